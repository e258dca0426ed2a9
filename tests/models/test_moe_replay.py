"""Routing rules that are found by replaying decisions, and removal of experts with them."""

from __future__ import annotations

import pytest
import torch

from rco.export.pruned_experts import export_pruned, load_pruned
from rco.models.moe.decisions import watch_decisions
from rco.models.moe.expert_discovery import find_layers
from rco.models.moe.expert_removal import keep_plan, prune_experts
from rco.models.moe.gates import expert_gates
from rco.models.moe.layers import MOE_ARCHITECTURES, UnsupportedMoEError, moe_layers
from rco.models.moe.routing import route
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_model, tiny_moe, tiny_tokens

# Softmax before and after the choice, sigmoid with a bias in the router, in the block, or none, groups, a nested
# router, weights that are not normalised.
SHARE = (
    "qwen3_5_moe_text", "granitemoe", "hy_v3", "afmoe", "lfm2_moe", "hunyuan_v1_moe", "jamba", "glm_moe_dsa",
    "dots1",
)  # fmt: skip
OTHERS = (
    "aria_text", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v32", "exaone_moe", "flex_olmo", "flint",
    "glm4_moe_lite", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v4", "kimi_linear", "laguna",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "qwen4_exp_text",
    "solar_open",
)  # fmt: skip
UNKNOWN = ("axk2", "deepseek_v4", "ernie4_5_moe", "inkling_text", "kolibri1", "phimoe", "zaya")
EXPERTS = {name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")}


def model_of(name):
    from transformers import AutoConfig

    known = AutoConfig.for_model(name).get_text_config().to_dict()
    model = tiny_model(name, **{key: value for key, value in EXPERTS.items() if key in known})
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if "bias" in key:
                buffer.normal_(std=0.2)
    return model


def tokens_of(model):
    return tiny_tokens() % 90


def logits_of(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_what_is_replayed_is_what_the_table_says(name):
    model = tiny_moe(name)
    for mine, row in zip(find_layers(model)[0], moe_layers(model), strict=True):
        assert not mine.obstacle
        assert mine.architecture.correction == row.architecture.correction
        assert mine.architecture.float32_router == row.architecture.float32_router
        hidden = torch.randn(200, 32)
        found = route(mine.rule, mine.logits(hidden), mine.correction)
        known = route(row.rule, row.logits(hidden), row.correction)
        assert torch.equal(found.indices.sort(dim=1).values, known.indices.sort(dim=1).values)
        spread = torch.zeros(200, row.num_experts)
        torch.testing.assert_close(
            spread.scatter(1, found.indices, found.weights), spread.scatter(1, known.indices, known.weights)
        )


def check(name, folder):
    model = model_of(name)
    assert model.config.get_text_config().model_type not in MOE_ARCHITECTURES
    layers = moe_layers(model)
    tokens = tokens_of(model)
    # The rule makes the decisions that the experts receive.
    received = []
    hooks = [
        layer.experts.register_forward_pre_hook(lambda _, args: received.append(args)) for layer in layers
    ]
    seen = []
    with torch.no_grad(), watch_decisions(layers[0], lambda hidden, routing: seen.append(routing)):
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    ((routing,), (_, indices, weights)) = seen, received[0]
    assert torch.equal(routing.indices.sort(dim=1).values, indices.sort(dim=1).values)
    empty = torch.zeros(len(indices), layers[0].num_experts)
    torch.testing.assert_close(
        empty.scatter(1, routing.indices, routing.weights), empty.scatter(1, indices, weights)
    )
    # A model with gates computes what the model without the experts computes, in memory and from a checkpoint.
    generator = torch.Generator().manual_seed(3)
    uneven = [torch.randperm(8, generator=generator) < 4 + index % 3 for index in range(len(layers))]
    even = [torch.arange(layer.num_experts) < layer.num_experts - 2 for layer in layers]
    if layers[0].rule.grouped:
        even = [torch.tensor([True, True, True, False] * 2) for _ in layers]
    for masks in (uneven, even):
        pruned = prune_experts(model, masks)
        expected = logits_of(pruned, tokens)
        with expert_gates(model) as gates:
            gates.set_gates(torch.cat(masks).float())
            torch.testing.assert_close(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-5)
        again = moe_layers(pruned)
        assert [layer.num_experts for layer in again] == [int(mask.sum()) for mask in masks]
        assert all(layer.rule is not None for layer in again), again[0].obstacle
        out = folder / ("even" if masks is even else "uneven")
        written = export_pruned(model, masks, out)
        assert (written.shape == "stock") == (masks is even or len(layers) == 1)
        torch.testing.assert_close(logits_of(load_pruned(out), tokens), expected, rtol=1e-5, atol=1e-6)
    assert keep_plan(model, even).stock_obstacle is None
    # Gates of kept and of removed experts have a gradient.
    keep = torch.cat(uneven).float().requires_grad_()
    with expert_gates(model) as gates:
        gates.set_gates(keep)
        model(input_ids=tokens, use_cache=False).logits.float().square().mean().backward()
    assert torch.isfinite(keep.grad).all()
    assert keep.grad[keep > 0.5].any()
    assert keep.grad[keep < 0.5].any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARE)
def test_experts_are_removed_by_a_rule_that_was_replayed(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_experts_of_other_architectures_are_removed_by_a_rule_that_was_replayed(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_rule_that_is_not_reproduced_is_not_used(name):
    layers = find_layers(tiny_model(name))[0]
    with pytest.raises(UnsupportedMoEError, match=r"is not known, because .*not removed or scored"):
        _ = layers[0].known_rule


def test_a_rule_is_found_without_weights():
    from transformers import AutoModelForCausalLM

    model = model_of("glm_moe_dsa")
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(model.config)
    assert [layer.rule for layer in moe_layers(outline)] == [layer.rule for layer in moe_layers(model)]


def test_a_router_that_decides_otherwise_is_refused(monkeypatch):
    model = model_of("qwen3_5_moe_text")
    kind = type(model.model.layers[0].mlp.gate)
    forward = kind.forward

    def other(self, hidden):
        logits, weights, indices = forward(self, hidden)
        return logits, weights**2, indices

    monkeypatch.setattr(kind, "forward", other)
    monkeypatch.setattr("rco.models.moe.replay._found", {})
    assert "follow none of the known rules" in moe_layers(model)[0].obstacle
