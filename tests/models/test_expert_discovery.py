"""Experts of architectures without a table row, and stacks that are left alone."""

from __future__ import annotations

import pytest
import torch

from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.models.loading import wrap_model
from rco.models.moe import expert_discovery
from rco.models.moe.decisions import watch_decisions
from rco.models.moe.expert_discovery import find_layers
from rco.models.moe.layers import MOE_ARCHITECTURES, moe_layers
from rco.models.moe.linears import model_linears, unread_experts
from rco.testing.tiny_models import tiny_model, tiny_moe, tiny_tokens


@pytest.mark.parametrize("name", sorted(MOE_ARCHITECTURES))
def test_what_is_found_is_what_the_table_says(name):
    model = tiny_moe(name)
    known, (found, unread) = moe_layers(model), find_layers(model)
    assert not unread
    assert [layer.name for layer in found] == [layer.name for layer in known]
    for mine, row in zip(found, known, strict=True):
        assert mine.experts is row.experts
        assert mine.router is row.router
        assert (mine.num_experts, mine.top_k, mine.decoder_index) == (
            row.num_experts, row.top_k, row.decoder_index,
        )  # fmt: skip
        for field in ("experts", "projections", "interleaved", "separable", "causal_lm"):
            assert getattr(mine.architecture, field) == getattr(row.architecture, field), field


def test_experts_that_compute_something_else_are_left_alone(monkeypatch):
    model = tiny_model("flex_olmo")
    assert len(find_layers(model)[0]) == 3
    kind = type(model.model.layers[0].mlp.experts)
    forward = kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda self, x, index, weights: forward(self, x, index, weights) * 1.01
    )
    layers, unread = find_layers(model)
    assert not layers
    assert len(unread) == 6
    assert "do not reproduce its output" in unread[0].reason


def test_decisions_without_a_rule_are_those_that_the_experts_receive():
    model = tiny_model("phimoe")
    layer = moe_layers(model)[1]
    assert layer.rule is None
    seen, received = [], []
    hook = layer.experts.register_forward_pre_hook(lambda _, args: received.append(args))
    tokens = tiny_tokens() % 90
    with torch.no_grad(), watch_decisions(layer, lambda hidden, routing: seen.append((hidden, routing))):
        model(tokens)
    hook.remove()
    ((hidden, routing),) = seen
    assert torch.equal(hidden, received[0][0].reshape(hidden.shape))
    assert torch.equal(routing.indices, received[0][1])
    assert torch.equal(routing.weights, received[0][2])
    assert routing.indices.shape[1] == layer.top_k
    assert torch.equal(routing.mass.sum(dim=1), torch.full((len(hidden),), float(layer.top_k)))


def test_unverified_experts_count_in_the_budget():
    loaded = wrap_model(tiny_model("jetmoe"))
    linears = model_linears(loaded.layout, loaded.model, include_head=True)
    unread = unread_experts(loaded.model)
    assert len(unread) == 12
    plan = make_plan(loaded.layout, linears, widths=(4, 8), group_size=None, unread=unread)
    compression = Compression(loaded, plan)
    stacked = sum(each.weight.numel() for each in unread)
    packed = sum(info.parameters for info in plan.linears)
    costs = compression.costs("bits")
    assert costs.parameters == stacked + packed
    assert costs.fixed == 32 * stacked
    low, high = (float(end) for end in compression.budget_range("bits"))
    assert low == pytest.approx((32 * stacked + 4 * packed) / (stacked + packed), abs=1e-4)
    assert high == pytest.approx((32 * stacked + 8 * packed) / (stacked + packed), abs=1e-4)
    middle = f"{(low + high) / 2:.3f}"
    problem = compression.problem(Budget.parse(bits=middle))
    spent = sum(problem.unit_budgets) + costs.fixed
    assert spent <= float(middle) * (stacked + packed) < spent + 8
    with pytest.raises(ValueError, match=r"must lie between 30\.49"):
        compression.problem(Budget.parse(bits="5"))


def test_names_of_projections_come_from_transformers():
    assert find_layers(tiny_model("minimax"))[0][0].architecture.projections == ("w1", "w3", "w2")
    assert not find_layers(tiny_model("granitemoe"))[0][0].architecture.separable
    assert expert_discovery._TOLERANCE < 1e-3
