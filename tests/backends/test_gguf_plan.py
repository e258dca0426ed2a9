"""Plans for llama.cpp: which types are on offer, and what they count."""

from fractions import Fraction

import pytest
import torch

from rco.backends.base import Budget
from rco.backends.gguf_file import GGUFFile
from rco.backends.plan import make_plan
from rco.backends.quantization import QuantizationBackend
from rco.models.layout import layout_for
from rco.models.loading import wrap_model
from rco.models.moe_linears import model_linears
from rco.models.tiny import tiny_model

GGUF_SIZES = {"hidden_size": 256, "intermediate_size": 288, "num_attention_heads": 8, "head_dim": 32}


def test_llamacpp_offers_the_types_that_fit_a_row():
    model = tiny_model("llama", **GGUF_SIZES)
    layout = layout_for(model)
    linears, file = layout.linears(model, include_head=True), GGUFFile.of(layout, model)
    plan = make_plan(layout, linears, serve="llamacpp", gguf=file)
    for group in plan.groups:
        (member,) = group.members
        assert group.widths == ((2, 3, 4, 5, 6, 8) if member.in_features == 256 else (4, 5, 8))
        grids = {width: plan.scheme(member, width) for width in group.widths}
        assert all(scheme.bits == width for width, scheme in grids.items())
        assert {scheme.group_size for scheme in grids.values()} <= {16, 32}
    with pytest.raises(ValueError, match="rows of 288"):
        make_plan(layout, linears, serve="llamacpp", gguf=file, widths=(2, 3))
    with pytest.raises(ValueError, match="own grid"):
        make_plan(layout, linears, serve="llamacpp", gguf=file, symmetric=True)


def test_llamacpp_budgets_count_blocks(tmp_path):
    model = tiny_model("llama", dtype=torch.bfloat16, **GGUF_SIZES)
    loaded = wrap_model(model)
    linears, file = loaded.layout.linears(model, include_head=True), GGUFFile.of(loaded.layout, model)
    plan = make_plan(loaded.layout, linears, serve="llamacpp", gguf=file)
    backend = QuantizationBackend(loaded, plan, tmp_path)
    problem = backend.problem(Budget.parse(bpw="5"))
    for row, group in zip(problem.unit_costs[0], plan.groups, strict=True):
        for cost, width in zip(row.tolist(), plan.widths, strict=True):
            if width in group.widths:
                kind = file.type_of(group.members[0], width)
                assert Fraction(cost, group.parameters) == kind.bits_per_weight
    everything = sum(file.tensor_bytes({}).values())
    size = everything // 2
    sized = backend.problem(Budget.parse(size=str(size)))
    searched = sum(2 * group.parameters for group in plan.groups)
    assert sized.unit_budgets[0] == size - (everything - searched + 31 * len(file.tensors))


def test_by_default_every_width_that_an_engine_takes_is_on_offer():
    model = tiny_model("llama")
    layout, linears = layout_for(model), layout_for(model).linears(model, include_head=True)
    assert make_plan(layout, linears, group_size=64).widths == tuple(range(2, 9))
    assert make_plan(layout, linears, group_size=64, serve="vllm-marlin").widths == (4, 8)


def test_experts_share_a_type_for_each_projection_of_a_layer(tmp_path):
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 32, "mlp_only_layers": []}
    loaded = wrap_model(tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes))
    linears = model_linears(loaded.layout, loaded.model, include_head=True)
    file = GGUFFile.of(loaded.layout, loaded.model)
    plan = make_plan(loaded.layout, linears, serve="llamacpp", gguf=file)
    groups = [group for group in plan.groups if group.members[0].role == "experts"]
    assert len(groups) == 3 * 3  # blocks times projections
    for group in groups:
        assert group.widths == ((4, 5, 8) if group.members[0].in_features == 32 else (2, 3, 4, 5, 6, 8))
    problem = QuantizationBackend(loaded, plan, tmp_path).problem(Budget.parse(bpw="5"))
    row = problem.groups.index(groups[0].name)
    kind = file.type_of(groups[0].members[0], 3)
    assert problem.unit_costs[0][row][plan.widths.index(3)] == kind.bits_per_weight * groups[0].parameters
