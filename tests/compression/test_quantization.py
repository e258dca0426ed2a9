"""The quantization backend on small random models: exact budgets, gradients, restoration, heads."""

import json
import signal
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rco
from rco.compression import candidates
from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.compression.priors import logits_from_losses
from rco.compression.second_order import curvature, predicted_losses
from rco.compression.switched_model import SwitchedModel
from rco.core.moves import spend
from rco.data.calibration import CalibrationSet
from rco.evaluation.size import average_bits, checkpoint_size
from rco.export.compressed_tensors import CompressedTensorsExporter
from rco.export.exporter import ExportRequest
from rco.formats import parse
from rco.formats.elements import nearest_codes
from rco.formats.switchable import LayerOptions
from rco.models.loading import wrap_model
from rco.store import CandidateStore, StoreMismatchError
from rco.testing.tiny_models import tiny_model


def text(vocabulary, sequences=4, length=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, length), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    return CalibrationSet(tokens, mask, ("random",) * sequences, "random", seed, "calibration")


def make_backend(folder, model_type="llama", dtype=torch.float32, model_arguments=None, **plan_arguments):
    model = tiny_model(model_type, dtype=dtype, **(model_arguments or {}))
    loaded = wrap_model(model)
    linears = loaded.layout.linears(model, include_head=True)
    plan = make_plan(loaded.layout, linears, **{"group_size": None, "widths": (2, 3, 4), **plan_arguments})
    backend = Compression(loaded, plan, folder / "store", settings=CandidateSettings(batch_size=2))
    data = text(model.config.vocab_size)
    backend.candidates(data)
    return backend, data


def _waits(thread):
    """Whether a thread is blocked until another one is done."""
    frame = sys._current_frames()[thread]
    return frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"


def test_an_interruption_while_the_disk_is_slow_costs_no_block_that_was_made(tmp_path, monkeypatch):
    write, begun = CandidateStore._write_file, []

    def slowly(store, path, index, tensors):
        begun.append(index)
        if index == 1:  # the third is being made, and then waits for this one
            main = threading.main_thread().ident
            while not _waits(main):
                time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGINT)
        write(store, path, index, tensors)

    monkeypatch.setattr(CandidateStore, "_write_file", slowly)
    handler = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell may start tests with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            make_backend(tmp_path, model_arguments={"num_hidden_layers": 4})
    finally:
        signal.signal(signal.SIGINT, handler)
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert sorted(manifest["blocks"]) == [str(index) for index in begun] == ["0", "1", "2"]


@pytest.mark.parametrize("fails_at", ["making", "writing"])
def test_a_failure_costs_no_block_that_was_done_before_it(tmp_path, monkeypatch, fails_at):
    wanted, _ = make_backend(tmp_path / "whole", model_arguments={"num_hidden_layers": 4})
    made = [0]

    def failing(function, last):
        def call(*arguments):
            made[0] += 1
            if made[0] > last:
                raise KeyboardInterrupt if fails_at == "making" else OSError(28, "No space left on device")
            return function(*arguments)

        return call

    # The third block of four and the output layer: while it is made the second is being written.
    per_block = len(wanted.plan.linears) // 4
    if fails_at == "making":
        kept, error = 2, KeyboardInterrupt
        monkeypatch.setattr(
            candidates, "quantize_matrix", failing(candidates.quantize_matrix, 2 * per_block + 1)
        )
    else:
        kept, error = 2, OSError
        monkeypatch.setattr(CandidateStore, "_write_file", failing(CandidateStore._write_file, 2))
    with pytest.raises(error):
        make_backend(tmp_path / "cut", model_arguments={"num_hidden_layers": 4})
    monkeypatch.undo()
    manifest = json.loads((tmp_path / "cut" / "store" / "manifest.json").read_text())
    assert sorted(manifest["blocks"]) == [str(index) for index in range(kept)]
    found, _ = make_backend(tmp_path / "cut", model_arguments={"num_hidden_layers": 4})
    assert found.store.manifest == wanted.store.manifest


def test_rounding_to_nearest_calibrates_scales_of_inputs(tmp_path):
    """NVFP4 with rounded inputs: weights to nearest, and the scale of the inputs that compensation gets, too."""
    named = {"widths": (), "formats": [parse("nvfp4-a4"), parse("original")]}
    shape = {"intermediate_size": 64, "num_hidden_layers": 2}
    model = tiny_model("llama", **shape)
    loaded = wrap_model(model)
    plan = make_plan(loaded.layout, loaded.layout.linears(model, include_head=True), **named)
    data, found = text(model.config.vocab_size), {}
    for method in ("rtn", "gptq"):
        settings = CandidateSettings(method=method, batch_size=2, sweeps=0)
        compression = Compression(loaded, plan, tmp_path / method, settings=settings)
        compression.candidates(data)
        found[method] = compression.packed()
    for info in plan.linears:
        nearest, compensated = (found[method][info.name]["nvfp4-a4"] for method in ("rtn", "gptq"))
        scales = [each.tensors["input_global_scale"] for each in (nearest, compensated)]
        assert torch.equal(*scales)
        assert float(scales[0][0, 0]) != 1.0
        wide = nearest.wide_scales(torch.float32)
        assert torch.equal(nearest.codes(), nearest_codes(info.weight.detach().float() / wide, "e2m1"))
    other = Compression(
        loaded, plan, tmp_path / "rtn", settings=CandidateSettings(method="rtn", batch_size=2)
    )
    with pytest.raises(StoreMismatchError, match="data"):
        other.candidates(text(model.config.vocab_size, seed=1))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gemma2"])
def test_gradient_equals_autograd_through_the_mixture(model_type, tmp_path, monkeypatch):
    backend, data = make_backend(tmp_path, model_type, dtype=torch.float64)
    backend.compute_dtype = torch.float64
    problem = backend.problem(Budget("bits", Fraction(3)))
    choices = np.random.default_rng(0).integers(0, 3, size=problem.num_groups)
    gates = problem.allocation(choices).one_hot(3).requires_grad_()
    before = {k: v.clone() for k, v in backend.loaded.model.state_dict().items()}
    with backend.objective(data) as objective:
        (got,) = torch.autograd.grad(objective.loss(gates, 0), gates)
        # One direction by central differences through the dense mixture of all options.
        direction = torch.randn(gates.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        step = 1e-3  # the models normalise in float32, whatever their type
    monkeypatch.setattr(
        SwitchedModel, "set_gates", lambda _, relaxed, *rest, **more: _relax(backend, relaxed)
    )
    with backend.objective(data) as objective, torch.no_grad():
        ends = [gates.detach() + sign * step * direction for sign in (1.0, -1.0)]
        values = [float(objective.loss(end, 0)) for end in ends]
    assert float((got * direction).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=5e-3)
    after = backend.loaded.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def _relax(backend, gates):
    """Gates that are not one-hot: every layer gets the dense mixture of its options."""
    for name, row in backend.rows.items():
        module = backend.loaded.model.get_submodule(name)
        dense = [each if isinstance(each, torch.Tensor) else each.dequantize() for each in module.options]
        mixture = sum(gate * weight.to(gates.dtype) for gate, weight in zip(gates[row], dense, strict=True))
        module._known = LayerOptions([mixture.to(dense[0].dtype)])
        module.select(0)


@pytest.mark.parametrize(("loss", "top_k"), [("kl", None), ("kl", 3), ("cross-entropy", None)])
def test_only_what_the_mask_marks_counts(tmp_path, loss, top_k):
    """As with conversations, whose answers alone count: the loss is that of plain logits at those positions."""
    backend, data = make_backend(tmp_path)
    backend.loss_kind, backend.top_k, backend.batch_size = loss, top_k, 2
    mask = torch.rand(data.mask.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[:, -1] = False
    data = replace(data, mask=mask)
    problem = backend.problem(Budget("bits", Fraction(3)))
    gates = problem.allocation(np.arange(problem.num_groups) % 3).one_hot(3)
    with torch.no_grad():
        full = backend.loaded.model(data.tokens[2:]).logits.log_softmax(-1)
        with backend.apply(problem.allocation(np.arange(problem.num_groups) % 3)) as applied:
            own = applied.model(data.tokens[2:]).logits.log_softmax(-1)
        with backend.objective(data) as objective:
            got = float(objective.loss(gates, 1))
    if loss == "cross-entropy":
        per_token = -own[:, :-1].gather(-1, data.tokens[2:, 1:, None])[..., 0]
    else:
        p, q = full.exp(), own.exp()
        if top_k is not None:
            likeliest = p.topk(top_k).indices
            kept = [x.gather(-1, likeliest) for x in (p, q)]
            p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in kept)
        per_token = (p * (p / q).log()).sum(-1)[:, :-1]
    counted = mask[2:, :-1]
    assert 0 < counted.sum() < counted.numel()
    assert got == pytest.approx(float(per_token[counted].mean()), rel=1e-3)


def test_the_full_model_has_no_loss_and_two_bits_have_some(tmp_path):
    backend, data = make_backend(tmp_path, widths=(2, 8, 16))
    problem = backend.problem(Budget("bits", Fraction(20)))
    with backend.objective(data) as objective, torch.no_grad():
        losses = [
            float(objective.loss(problem.allocation(np.full(problem.num_groups, k)).one_hot(3), 0))
            for k in range(3)
        ]
    assert losses[0] > losses[1] > losses[2] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("head", [False, True])
def test_noise_has_the_size_that_was_asked_for_and_leaves_no_trace(tmp_path, head):
    """The loss is that of the model with the noise in its weights, and grows with the square of the noise."""
    model_arguments = {"tie_word_embeddings": False} if head else {}
    locks = {"locks": ["lm_head=3"]} if head else {"ties": ["gate_proj,up_proj"]}
    backend, data = make_backend(tmp_path, model_arguments=model_arguments, widths=(2, 3, 8), **locks)
    problem = backend.problem(Budget("bits", Fraction(6)))
    choices = np.where(problem.allowed[:, 2], 2, 1)
    gates = problem.allocation(choices).one_hot(3)
    names = [group.name for group in backend.plan.groups]
    group = next(i for i, name in enumerate(names) if ("lm_head" if head else "gate_proj") in name)
    members = [member.name for member in backend.plan.groups[group].members]
    model = backend.loaded.model
    with backend.switchable() as switched, torch.no_grad():
        switched.set_gates(gates)
        modules = {name: model.get_submodule(name) for name in members}
        clean = {name: module.weight.clone() for name, module in modules.items()}
        with switched.disturbed(group, 0.01, seed=5):
            noisy = {name: module.weight.clone() for name, module in modules.items()}
            got = model(data.tokens).logits
        for name, module in modules.items():
            assert torch.equal(module.weight, clean[name])
            relative = (noisy[name] - clean[name]).square().sum() / clean[name].square().sum()
            assert float(relative) == pytest.approx(0.01, rel=1e-4)
            plain = torch.nn.Linear(*reversed(noisy[name].shape), bias=False)
            plain.weight.copy_(noisy[name])
            model.set_submodule(name, plain)
        expected = model(data.tokens).logits
        for name, module in modules.items():
            model.set_submodule(name, module)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with backend.objective(data) as objective, torch.no_grad():
        base = float(objective.loss(gates, 0))
        assert float(objective.noisy_loss(gates, 0, group, 0.0, 0)) == pytest.approx(base, rel=1e-4, abs=1e-7)
        rise = [
            np.mean([float(objective.noisy_loss(gates, 0, group, t, seed)) - base for seed in range(8)])
            for t in (0.01, 0.04)
        ]
        assert float(objective.loss(gates, 0)) == base
    assert rise[1] == pytest.approx(4 * rise[0], rel=0.5)  # the linearity theorem, in the square of the noise


def test_fisher_losses_predict_small_changes(tmp_path):
    # At eight bits the second-order term is all there is; its estimate is unbiased over draws.
    backend, data = make_backend(tmp_path, widths=(4, 8))
    differences = torch.cat([backend.differences(data, seed=seed) for seed in range(12)])
    predicted = predicted_losses(differences)
    assert predicted.shape == (len(backend.plan.groups), 2)
    assert (predicted[:, 0] > predicted[:, 1]).all()
    group = int(predicted[:, 0].argmax())
    problem = backend.problem(Budget("bits", Fraction(8)))
    base = np.ones(problem.num_groups, dtype=np.int64)
    changed = base.copy()
    changed[group] = 0
    with backend.objective(data) as objective, torch.no_grad():
        loss = np.mean([float(objective.loss(problem.allocation(changed).one_hot(2), b)) for b in range(4)])
    assert float(predicted[group, 0]) == pytest.approx(float(loss), rel=0.5)
    bends = curvature(differences)
    assert torch.allclose(bends, bends.transpose(1, 2))
    assert (bends.diagonal(dim1=1, dim2=2) == 0).all()


def drawn_differences(losses, sequences, seed=0):
    """Sequences of independent normal numbers whose second-order losses are the given ones."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(sequences, *losses.shape, generator=generator, dtype=torch.float64)
    return noise * (2.0 * losses).sqrt()


def far_off(estimate, truth):
    return float((estimate / truth).log().square().mean().sqrt())


def test_factors_of_groups_with_comparable_errors_lose_their_noise():
    generator = torch.Generator().manual_seed(1)
    errors = torch.exp(torch.randn(40, 2, generator=generator, dtype=torch.float64))
    for scatter, kept in ((0.0, 0.5), (0.1, 0.6), (2.0, 1.02)):  # of the groups' true factors
        truth = errors * torch.exp(scatter * torch.randn(40, 1, generator=generator, dtype=torch.float64))
        differences = drawn_differences(truth[:, :1], 16) * (truth / truth[:, :1]).sqrt()
        plain = predicted_losses(differences, errors)
        shrunk = predicted_losses(differences, errors, comparable=True)
        assert far_off(shrunk, truth) < kept * far_off(plain, truth)


def test_pooling_over_options_takes_out_most_of_the_noise():
    generator = torch.Generator().manual_seed(1)
    errors = 4.0 ** -torch.arange(7.0, dtype=torch.float64) * torch.rand(40, 1, generator=generator).double()
    by_group = torch.exp(torch.randn(40, 1, generator=generator, dtype=torch.float64))
    by_option = torch.linspace(1.3, 1.0, 7, dtype=torch.float64)
    truth = by_group * by_option * errors
    for sequences in (4, 16, 64):
        differences = drawn_differences(truth, sequences)
        raw, pooled = predicted_losses(differences), predicted_losses(differences, errors)
        assert far_off(pooled, truth) < 0.55 * far_off(raw, truth)
    # An option that changes nothing stays at nothing, and the scale of the errors means nothing.
    errors[:, 6], differences[:, :, 6] = 0.0, 0.0
    pooled = predicted_losses(differences, errors)
    assert (pooled[:, 6] == 0).all()
    assert torch.allclose(predicted_losses(differences, 1e3 * errors), pooled)


def test_pooling_yields_to_what_the_gradients_say():
    """Where losses are not proportional to errors, many sequences outvote the errors."""
    generator = torch.Generator().manual_seed(2)
    truth = torch.exp(torch.randn(30, 5, generator=generator, dtype=torch.float64))
    errors = torch.exp(torch.randn(30, 5, generator=generator, dtype=torch.float64))
    differences = drawn_differences(truth, 400)
    raw, pooled = predicted_losses(differences), predicted_losses(differences, errors)
    assert far_off(pooled, truth) < 1.05 * far_off(raw, truth)
    assert far_off(pooled, raw) < 0.1


def test_pooled_curvature_is_that_of_the_losses():
    generator = torch.Generator().manual_seed(3)
    errors = 4.0 ** -torch.arange(4.0, dtype=torch.float64) * (
        0.5 + torch.rand(50, 1, generator=generator).double()
    )
    differences = drawn_differences(3.0 * errors, 200)
    bends = curvature(differences, predicted_losses(differences, errors))
    assert torch.allclose(bends, bends.transpose(1, 2))
    assert (bends.diagonal(dim1=1, dim2=2) == 0).all()
    independent = 3.0 * (errors[:, :, None] + errors[:, None, :])
    apart = ~torch.eye(4, dtype=torch.bool)
    assert far_off(bends[:, apart], independent[:, apart]) < 0.1


def test_logits_reproduce_the_proxys_knapsack():
    rng = np.random.default_rng(0)
    problem = rco.AllocationProblem(
        rng.integers(1, 9, size=(12, 1)) * np.array([[2, 3, 4, 5]]), budget=150, sense="<=", monotone=True
    )
    losses = torch.from_numpy(np.sort(rng.random((12, 4)), axis=1)[:, ::-1].copy())
    logits = logits_from_losses(losses, problem, 2.0)
    groups = np.arange(12)
    best = rco.solve_mckp(-losses.numpy(), problem)
    again = rco.solve_mckp(logits.numpy(), problem)
    spent = spend(problem, again.allocation, -losses.numpy())
    worst = float(losses[:, 0].sum())
    # The price of the budget is in the logits, so their knapsack may leave more unspent than that of the losses.
    assert float(losses.numpy()[groups, spent].sum()) <= -best.value + 0.05 * worst
    assert float(losses.numpy()[groups, spent].sum()) < 0.6 * worst


def test_an_untied_head_takes_part_when_locked(tmp_path):
    backend, data = make_backend(
        tmp_path, model_arguments={"tie_word_embeddings": False}, locks=["lm_head=4"], widths=(2, 4)
    )
    assert backend.plan.groups[-1].name == "lm_head"
    problem = backend.problem(Budget("bits", Fraction(3)))
    with backend.objective(data) as objective:
        gates = problem.allocation(rco.solve_mckp(np.zeros((problem.num_groups, 2)), problem).allocation)
        leaf = gates.one_hot(2).requires_grad_()
        (gradient,) = torch.autograd.grad(objective.loss(leaf, 0), leaf)
    assert gradient[-1].abs().sum() > 0


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_written_checkpoints_keep_every_budget(tmp_path_factory, shared_backend, seed):
    backend = shared_backend
    rng = np.random.default_rng(seed)
    kind = ("bits", "bpw", "size")[seed % 3]
    low, high = (float(end.replace(",", "").split()[0]) for end in backend.budget_range(kind))
    amount = low + (high - low) * float(rng.random()) * 0.98
    budget = Budget(
        kind, Fraction(int(amount)) if kind == "size" else Fraction(amount).limit_denominator(1000)
    )
    try:
        problem = backend.problem(budget)
    except rco.InfeasibleBudgetError:
        assert amount < low * 1.001 + 1
        return
    found = rco.solve_mckp(rng.normal(size=(problem.num_groups, problem.num_options)), problem)
    allocation = problem.allocation(found.allocation)
    out = tmp_path_factory.mktemp("export") / "model"
    summary = CompressedTensorsExporter().export(
        ExportRequest(backend.loaded, backend.weights_of(allocation), out)
    )
    bits = average_bits(out, [info.name for info in backend.plan.linears])
    size = checkpoint_size(out)["bytes"]
    used = {"bits": bits["average_bits"], "bpw": bits["average_stored_bits"], "size": size}
    assert used[kind] <= float(budget.amount) * (1 + 1e-12)
    assert summary.total_bytes == checkpoint_size(out)["bytes"]


@pytest.fixture(scope="module")
def shared_backend(tmp_path_factory):
    backend, _ = make_backend(
        tmp_path_factory.mktemp("shared"),
        dtype=torch.bfloat16,
        widths=(2, 3, 4, 8, 16),
        locks=["layers.0.*o_proj=8"],
    )
    return backend


def test_budgets_outside_the_range_say_the_range(shared_backend):
    with pytest.raises(rco.InfeasibleBudgetError, match="between 2"):
        shared_backend.problem(Budget("bits", Fraction(1)))
    with pytest.raises(rco.InfeasibleBudgetError, match="bytes"):
        shared_backend.problem(Budget("size", Fraction(10)))


def test_budget_parsing():
    assert Budget.parse(bits="2.5", size=None).amount == Fraction(5, 2)
    assert Budget.parse(bits=None, size="3.1GB").amount == 3_100_000_000
    with pytest.raises(ValueError, match="exactly one"):
        Budget.parse(bits="2", size="1GB")
    with pytest.raises(ValueError, match="exactly one"):
        Budget.parse(bits=None, size=None)
    with pytest.raises(ValueError, match="positive"):
        Budget.parse(bits="0", size=None)


def test_a_store_of_another_model_is_refused(tmp_path):
    make_backend(tmp_path)
    other = wrap_model(tiny_model("llama", seed=9))
    linears = other.layout.linears(other.model, include_head=True)
    plan = make_plan(other.layout, linears, group_size=None, widths=(2, 3, 4))
    backend = Compression(other, plan, tmp_path / "store", settings=CandidateSettings(batch_size=2))
    with pytest.raises(ValueError, match="model"):
        backend.candidates(text(other.model.config.vocab_size))
