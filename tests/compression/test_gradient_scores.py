"""Scores of ModelOpt and AutoRound: against plain autograd through a model with the options in place."""

from contextlib import ExitStack
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.compression.second_order import predicted_losses
from rco.core.objective import one_hot
from rco.data.calibration import CalibrationSet
from rco.formats import parse
from rco.models.loading import wrap_model
from rco.models.rounded_inputs import rounded_inputs
from rco.testing.tiny_models import tiny_model

TOKENS = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["with rounded inputs alone", "also with inputs as they are"])
def backend(request, tmp_path_factory):
    names = ["nvfp4-a4", "fp8-dynamic", "original"]
    names += ["mxfp4"] if "as they are" in request.param else []
    model = tiny_model("llama", num_hidden_layers=1, intermediate_size=64)
    loaded = wrap_model(model)
    linears = loaded.layout.linears(model, include_head=True)
    plan = make_plan(loaded.layout, linears, formats=[*map(parse, names)], ties=["gate_proj,up_proj"])
    folder = tmp_path_factory.mktemp("scores") / "store"
    found = Compression(loaded, plan, folder, settings=CandidateSettings(batch_size=2, sweeps=0))
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[:, -1] = False
    data = CalibrationSet(TOKENS, mask, ("random",) * 2, "random", 0, "calibration")
    found.candidates(data)
    return found, data


def cross_entropy(model, batch):
    logits = model(TOKENS[batch : batch + 1]).logits[0, :-1]
    return F.cross_entropy(logits, TOKENS[batch, 1:])


def test_output_scores(backend):
    compression, data = backend
    plan, model, batch = compression.plan, compression.loaded.model, 1
    original = next(k for k, option in enumerate(plan.options) if option.name == "original")
    gates = one_hot(torch.full((len(plan.groups),), original).numpy(), len(plan.options))
    with compression.objective(data) as objective:
        loss, found = objective.output_scores(gates, batch)

    seen = {}
    handles = [
        info.module.register_forward_hook(
            lambda module, args, output, name=info.name: seen.update({name: (args[0].detach(), output)})
        )
        for info in plan.linears
    ]
    with torch.enable_grad():
        parameters = [info.module.weight.requires_grad_() for info in plan.linears]
        expected = cross_entropy(model, batch)
        gradients = torch.autograd.grad(expected, [seen[info.name][1] for info in plan.linears])
    for handle, parameter in zip(handles, parameters, strict=True):
        handle.remove()
        parameter.requires_grad_(False)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    wanted = torch.zeros_like(found)
    for info, gradient in zip(plan.linears, gradients, strict=True):
        row, (x, output) = compression.rows[info.name], seen[info.name]
        for column, option in enumerate(plan.options):
            if column == original:
                continue
            stored = compression.packed()[info.name][plan.label(option)]
            rule = option.input_rule(stored)
            changed = F.linear(x if rule is None else rule(x), stored.dequantize(torch.float32))
            wanted[row, column] += float((gradient.square() * (changed - output.detach()).square()).sum())
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-12)
    assert (found[:, original] == 0).all()


def test_diagonal_losses_are_output_scores_of_sampled_tokens(backend):
    compression, data = backend
    assert compression.has_diagonal_losses
    found = compression.diagonal_losses(data, seed=3)
    options = len(compression.plan.options)
    original = next(k for k, option in enumerate(compression.plan.options) if option.name == "original")
    assert found.shape == (len(compression.plan.groups), options)
    assert (found[:, original] == 0).all()
    others = [k for k in range(options) if k != original]
    assert (found[:, others] > 0).all()
    # Up to correlations of outputs and tokens, and the noise of few sequences, they are the losses themselves.
    draws = [compression.differences(data, seed=seed) for seed in range(16)]
    exact = predicted_losses(torch.cat(draws))[:, others]
    ratio = (found[:, others] / exact).log()
    assert float(ratio.abs().median()) < 1.0
    compression.use_differences(draws[0], diagonal=found)
    problem = compression.problem(Budget("bits", Fraction(8)))
    inputs = compression.search_inputs(problem, "fisher", 3.0)
    assert torch.equal(inputs["proxy"][1], found)
    compression.use_differences(None)


def test_delta_losses(backend):
    compression, data = backend
    plan, model, batch = compression.plan, compression.loaded.model, 0
    weights_count = any(option.name == "mxfp4" for option in plan.options)
    for column, option in enumerate(plan.options):
        if option.name == "original":
            continue
        gates = one_hot(torch.full((len(plan.groups),), column).numpy(), len(plan.options))
        with compression.objective(data) as objective:
            loss, found = objective.delta_losses(gates, batch)
        stored = {info.name: compression.packed()[info.name][plan.label(option)] for info in plan.linears}
        kept = {info.name: info.module.weight.data for info in plan.linears}
        seen, wanted = {}, torch.zeros_like(found)
        with ExitStack() as stack:
            for info in plan.linears:
                info.module.weight.data = stored[info.name].dequantize(torch.float32)
                info.module.weight.requires_grad_()
                before = info.module.register_forward_pre_hook(
                    lambda module, args, name=info.name, seen=seen: seen.update({name: [args[0]]})
                )
                stack.callback(before.remove)
            with rounded_inputs(model, stored), torch.enable_grad():
                for info in plan.linears:  # after the rounding
                    after = info.module.register_forward_pre_hook(
                        lambda module, args, name=info.name, seen=seen: seen[name].append(args[0])
                    )
                    stack.callback(after.remove)
                model.get_input_embeddings().weight.requires_grad_()
                expected = cross_entropy(model, batch)
                inputs = [seen[info.name][1] for info in plan.linears]
                found_inputs = torch.autograd.grad(expected, inputs, retain_graph=True)
                found_weights = torch.autograd.grad(expected, [info.module.weight for info in plan.linears])
        for info, by_input, by_weight in zip(plan.linears, found_inputs, found_weights, strict=True):
            row, (x, rounded) = compression.rows[info.name], seen[info.name]
            wanted[row] += float((by_input * (x - rounded).detach()).abs().sum())
            if weights_count:
                change = kept[info.name] - info.module.weight.detach()
                wanted[row] += float((by_weight * change).abs().sum())
            info.module.weight.data = kept[info.name]
            info.module.weight.requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_(False)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-12)


def test_experts_have_no_scores(tmp_path):
    loaded = wrap_model(tiny_model("qwen3_moe"))
    from rco.models.moe.linears import model_linears

    linears = model_linears(loaded.layout, loaded.model, include_head=True)
    plan = make_plan(loaded.layout, linears, formats=[parse("fp8"), parse("original")])
    compression = Compression(
        loaded, plan, tmp_path / "store", settings=CandidateSettings(method="rtn", batch_size=2)
    )
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    data = CalibrationSet(TOKENS, mask, ("random",) * 2, "random", 0, "calibration")
    compression.candidates(data)
    with (
        compression.objective(data) as objective,
        pytest.raises(ValueError, match="score linears alone"),
    ):
        objective.output_scores(one_hot(torch.zeros(len(plan.groups)).long().numpy(), 2), 0)
