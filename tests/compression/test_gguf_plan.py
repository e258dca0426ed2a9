"""Plans for llama.cpp: which types are on offer, and what they count."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import rco
from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.llama_quantize import GGUFFile
from rco.compression.plan import make_plan
from rco.export.exporter import ExportRequest
from rco.export.llama_cpp import LlamaCppExporter
from rco.formats.integer import PackedWeight
from rco.formats.original import ORIGINAL
from rco.models.layout import layout_for
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.testing.tiny_models import tiny_model

GGUF_SIZES = {"hidden_size": 256, "intermediate_size": 288, "num_attention_heads": 8, "head_dim": 32}


def test_llamacpp_offers_the_types_that_fit_a_row():
    model = tiny_model("llama", **GGUF_SIZES)
    layout = layout_for(model)
    linears, file = layout.linears(model, include_head=True), GGUFFile.of(layout, model)
    plan = make_plan(layout, linears, serve="llamacpp", gguf=file)
    for group in plan.groups:
        (member,) = group.members
        assert group.widths == ((2, 3, 4, 5, 6, 8) if member.in_features == 256 else (4, 5, 8))
        grids = {option.bits: plan.format_of(member, option) for option in group.options}
        assert all(scheme.bits == width for width, scheme in grids.items())
        assert {scheme.group_size for scheme in grids.values()} <= {16, 32}
    with pytest.raises(ValueError, match="rows of 288"):
        make_plan(layout, linears, serve="llamacpp", gguf=file, widths=(2, 3))
    with pytest.raises(ValueError, match="own grid"):
        make_plan(layout, linears, serve="llamacpp", gguf=file, symmetric=True)


def test_llamacpp_counts_sixteen_bits_for_what_it_stores_in_sixteen(tmp_path):
    """A GGUF file has no float32 weights of linears, so that a float32 model's lock at 16 counts 16 bits."""
    model = tiny_model("llama", dtype=torch.float32, **GGUF_SIZES)
    loaded = wrap_model(model)
    linears, file = loaded.layout.linears(model, include_head=True), GGUFFile.of(loaded.layout, model)
    plan = make_plan(loaded.layout, linears, serve="llamacpp", gguf=file, locks=["attention=16"])
    backend = Compression(loaded, plan, tmp_path)
    bits, stored = backend.costs("bits"), backend.costs("bpw")
    for info in plan.linears:
        assert bits.of(info, ORIGINAL) == stored.of(info, ORIGINAL) == 16 * info.parameters


def test_llamacpp_budgets_count_blocks(tmp_path):
    model = tiny_model("llama", dtype=torch.bfloat16, **GGUF_SIZES)
    loaded = wrap_model(model)
    linears, file = loaded.layout.linears(model, include_head=True), GGUFFile.of(loaded.layout, model)
    plan = make_plan(loaded.layout, linears, serve="llamacpp", gguf=file)
    backend = Compression(loaded, plan, tmp_path)
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
    problem = Compression(loaded, plan, tmp_path).problem(Budget.parse(bpw="5"))
    row = problem.groups.index(groups[0].name)
    kind = file.type_of(groups[0].members[0], 3)
    assert problem.unit_costs[0][row][plan.widths.index(3)] == kind.bits_per_weight * groups[0].parameters


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_bytes_of_experts_hold_in_what_the_recipe_asks_for(architecture, tmp_path):
    """A budget of bytes, the file that follows from the recipe's lines alone, and block sizes counted once more."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 32, "intermediate_size": 64, "mlp_only_layers": []}
    if architecture == "deepseek_v3":  # rows that llama.cpp has types for
        sizes |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    if architecture == "gpt_oss":
        sizes |= {"head_dim": 64}
    known = AutoConfig.for_model(architecture).to_dict()
    sizes = {field: size for field, size in sizes.items() if field in known}
    loaded = wrap_model(tiny_model(architecture, dtype=torch.bfloat16, **sizes))
    linears = model_linears(loaded.layout, loaded.model, include_head=True)
    file = GGUFFile.of(loaded.layout, loaded.model)
    plan = make_plan(loaded.layout, linears, serve="llamacpp", gguf=file)
    backend = Compression(loaded, plan, tmp_path, settings=CandidateSettings(method="rtn", clip="minmax"))
    backend.set_packed(_rounded(plan))
    low, high = (int(end.split()[0].replace(",", "")) for end in backend.budget_range("size"))
    shapes = {tensor.name: (tensor.rows, tensor.columns) for tensor in file.tensors.values()}
    for share in (0.2, 0.6):
        budget = int(low + share * (high - low))
        problem = backend.problem(Budget.parse(size=str(budget)))
        values = np.random.default_rng(0).random((problem.num_groups, problem.num_options))
        solution = rco.solve_mckp(values, problem)
        allocation = problem.allocation(solution.allocation)
        summary = LlamaCppExporter().export(
            ExportRequest(*backend.deployed(allocation), tmp_path / str(share))
        )
        lines = (tmp_path / str(share) / "tensor_types.txt").read_text().split()
        asked = dict(line.strip("^").replace("\\", "").split("$=") for line in lines)
        total = data = 0
        for name, (rows, columns) in shapes.items():
            block, size = SIZES_OF_BLOCKS[asked.get(name, "f32")]
            assert columns % block == 0
            data += rows * (columns // block) * size
            total += -(-rows * (columns // block) * size // 32) * 32  # tensors begin at multiples of 32 bytes
        assert summary.total_bytes == data
        assert total <= budget
        assert budget - total < 31 * len(shapes) + 2 * max(row.max() for row in problem.unit_costs[0])


# Weights and bytes of a block, from ggml-common.h.
SIZES_OF_BLOCKS = {
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "q4_0": (32, 18), "q5_0": (32, 22), "q8_0": (32, 34), "f16": (1, 2), "bf16": (1, 2), "f32": (1, 4),
}  # fmt: skip


def _rounded(plan):
    """Packed candidates as a store gives them, all of the right shape and with nothing in them."""
    stacks = {}
    for info in plan.linears:
        parts = stacks.setdefault(info.stored_in if info in plan.experts else info.name, [])
        parts.append(info)
    return {
        name: {
            plan.label(option): _empty(
                sum(p.out_features for p in parts), parts[0].in_features, plan.format_of(parts[0], option)
            )
            for option in plan.packed
        }
        for name, parts in stacks.items()
    }


def _empty(rows, columns, scheme):
    size = min(scheme.group_size or columns, columns)
    groups = -(-columns // size)
    zeros = None if scheme.symmetric else torch.zeros(rows, groups, dtype=torch.uint8)
    codes = torch.zeros(rows, -(-columns * scheme.bits // 32), dtype=torch.int32)
    return PackedWeight(codes, torch.ones(rows, groups), zeros, scheme.bits, (rows, columns), size)
