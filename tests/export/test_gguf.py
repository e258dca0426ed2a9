"""GGUF files with chosen types: searched bytes in the file's order of rows, sizes to the byte."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from gguf_models import load_tiny

from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.deployment import decode_into
from rco.compression.gguf_target import DEFAULT_TYPES, GGUFTarget, parse_types
from rco.compression.plan import make_gguf_plan
from rco.core.knapsack import solve_mckp
from rco.core.moves import spend
from rco.core.problem import InfeasibleBudgetError
from rco.export.exporter import ExportError, ExportRequest
from rco.export.gguf_container import GGUFExporter, written_file
from rco.formats.ggml.block_types import BLOCK_TYPES, GGMLFormat
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.models.gguf_file import GGUFReader, padded
from rco.models.loading import load_model, wrap_model
from rco.models.moe.linears import model_linears
from rco.models.zoo import ModelError
from rco.pipeline.estimate import encoding_seconds

gguf = pytest.importorskip("gguf", reason="GGUF files need the extra gguf")
pytest.importorskip("libggml", reason="ggml's encoders are in the extra gguf")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def loaded(request, tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", request.param, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A mixture of experts."""
    path = tmp_path_factory.mktemp("model") / "sparse.gguf"
    return load_tiny(path, "qwen3_moe", num_hidden_layers=1)


def linears_of(loaded):
    return model_linears(loaded.layout, loaded.model, include_head=True)


def plan_of(loaded, types="q3_k,q4_0,iq4_xs,q4_k,q6_k,q8_0,bf16", **settings):
    linears = linears_of(loaded)
    target = GGUFTarget.of(loaded, linears)
    return make_gguf_plan(loaded.layout, linears, target, parse_types(types, importance=True), **settings)


def encoded(loaded, plan, allocation):
    """The weights of an allocation, encoded without statistics."""
    return {
        member.name: plan.options[choice].encode(member.weight.float())
        for group, choice in zip(plan.groups, allocation, strict=True)
        for member in group.members
        if plan.options[choice] != ORIGINAL
    }


def test_the_file_holds_the_chosen_weights_bit_for_bit(loaded, tmp_path):
    plan = plan_of(loaded)
    rng = np.random.default_rng(0)
    choices = [rng.choice(np.flatnonzero(row)) for row in plan.allowed]
    weights = encoded(loaded, plan, choices)
    summary = GGUFExporter().export(ExportRequest(loaded, weights, tmp_path / "out"))
    file = written_file(tmp_path / "out")
    assert summary.total_bytes == file.stat().st_size == summary.files["model.gguf"]
    found = load_model(file)
    expected = dataclasses.replace(loaded, model=load_model(loaded.gguf).model)
    decode_into(expected, weights)
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name
    theirs = gguf.GGUFReader(file)
    names = {tensor.name: tensor.tensor_type.name.lower() for tensor in theirs.tensors}
    for group, choice in zip(plan.groups, choices, strict=True):
        assert names[plan.target.names[group.members[0].name]] == plan.options[choice].name
    assert theirs.fields["general.quantization_version"].contents() == 2
    assert theirs.fields["tokenizer.ggml.tokens"].contents() == GGUFReader(loaded.gguf).metadata.get(
        "tokenizer.ggml.tokens"
    )


def test_promised_sizes_are_those_of_files(loaded, tmp_path):
    check_random_sizes(loaded, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_thirty_promised_sizes_are_those_of_files(architecture, tmp_path):
    check_random_sizes(load_tiny(tmp_path / "tiny.gguf", architecture), tmp_path, 30)


def check_random_sizes(loaded, tmp_path, count):
    """Random budgets: never above, and less than the smallest upgrade of a tensor below."""
    plan = plan_of(loaded)
    compression = Compression(loaded, plan, tmp_path / "store")
    costs = compression.costs("size")
    allowed = plan.allowed
    low = costs.fixed + int(np.where(allowed, costs.matrix, 2**60).min(axis=1).sum())
    high = costs.fixed + int(np.where(allowed, costs.matrix, 0).max(axis=1).sum())
    rng = np.random.default_rng(1)
    for number, budget in enumerate(rng.integers(low, high, count).tolist()):
        problem = compression.problem(Budget.parse(size=budget))
        values = rng.random(costs.matrix.shape)
        choice = problem.allocation(spend(problem, solve_mckp(values, problem).allocation, values))
        promised = costs.fixed + int(costs.matrix[np.arange(len(allowed)), np.asarray(choice)].sum())
        weights = {
            name: _same_size(stored) for name, stored in _blank(plan, choice).items() if stored is not None
        }
        out = tmp_path / f"out{number}"
        written = GGUFExporter().export(ExportRequest(loaded, weights, out)).total_bytes
        assert written == promised <= budget
        steps = [
            row[row > row[k]].min() - row[k]
            for row, k in zip(np.where(allowed, costs.matrix, 0), choice, strict=True)
            if (row > row[k]).any()
        ]
        assert budget - written < min(steps, default=1)
        tensors = GGUFReader(written_file(out)).tensors.values()
        bits = bits_per_weight(tensors)
        assert compression.costs("bpw").total(bits) == sum(
            compression.costs("bpw").matrix[np.arange(len(allowed)), np.asarray(choice)]
        )
    with pytest.raises(InfeasibleBudgetError, match=f"between {low:,} bytes and {high:,} bytes"):
        compression.problem(Budget.parse(size=low - 1))


def bits_per_weight(tensors):
    """As llama.cpp counts them: over all tensors."""
    return Fraction(8 * sum(t.nbytes for t in tensors), sum(t.elements for t in tensors))


def _blank(plan, choice):
    return {
        member.name: None if plan.options[k] == ORIGINAL else (plan.options[k], member)
        for group, k in zip(plan.groups, choice, strict=True)
        for member in group.members
    }


def _same_size(pair):
    """A weight of zeros in a type, made without ggml."""
    option, member = pair
    shape = (member.out_features, member.in_features)
    if not isinstance(option, GGMLFormat):
        return option.encode(torch.zeros(shape))
    (layout,) = option.layout(shape, torch.float32).values()
    return option.from_blocks(torch.zeros(layout.shape, dtype=torch.uint8), shape)


def test_groups_offer_the_types_that_fit_a_row(loaded):
    plan = plan_of(loaded)
    assert plan.labels == ("q3_k", "iq4_xs", "q4_0", "q4_k", "q6_k", "q8_0", "bf16")
    for group in plan.groups:
        names = {option.name for option in group.options}
        assert names == ({"q4_0", "q8_0", "bf16"} if "down_proj" in group.name else set(plan.labels))
    assert "lm_head" in {group.name for group in plan.groups}
    locked = plan_of(loaded, locks=["lm_head=q6_k", "attention=original"], skips=["layers.1.mlp"])
    choices = {group.name: group.options for group in locked.groups}
    assert choices["lm_head"] == (GGMLFormat("q6_k"),)
    assert choices["model.layers.0.self_attn.q_proj"] == (ORIGINAL,)
    assert not any("layers.1.mlp" in name for name in choices)
    tied = plan_of(loaded, ties=["q_proj,k_proj,v_proj"])
    assert len(tied.groups) == len(plan.groups) - 4
    alone = plan_of(loaded, types="q4_k,q6_k")  # no type fits rows of 288, which are copied
    assert {group.options for group in alone.groups if "down_proj" in group.name} == {(ORIGINAL,)}


def test_experts_share_one_type_for_each_stack(sparse, tmp_path):
    plan = plan_of(sparse)
    stacks = [group for group in plan.groups if "experts" in group.name]
    assert [(len(group.members), plan.target.names[group.members[-1].name]) for group in stacks] == [
        (4, "blk.0.ffn_gate_exps.weight"), (4, "blk.0.ffn_up_exps.weight"), (4, "blk.0.ffn_down_exps.weight"),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    choices = [rng.choice(np.flatnonzero(row)) for row in plan.allowed]
    weights = encoded(sparse, plan, choices)
    GGUFExporter().export(ExportRequest(sparse, weights, tmp_path / "out"))
    found = load_model(written_file(tmp_path / "out"))
    expected = dataclasses.replace(sparse, model=load_model(sparse.gguf).model)
    decode_into(expected, weights)
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name
    one = next(name for name in weights if "experts" in name)
    with pytest.raises(ExportError, match="holds 4 matrices in one type, but 1 are given"):
        GGUFExporter().export(ExportRequest(sparse, {one: weights[one]}, tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"types": "q4_k,q7"}, "'q7' is none of"),
        ({"types": ","}, "names no type"),
        ({"locks": ["lm_head=q2_k"]}, "REGEX=VALUE, where VALUE is one of q3_k"),
        ({"locks": ["down_proj=q4_k"]}, "locked to q4_k"),
        ({"locks": ["lm_hed=q4_k"]}, "matches no linear"),
        ({"types": "q8_0"}, "No tensor has a choice"),
    ],
)
def test_impossible_plans_are_refused(loaded, settings, reason):
    with pytest.raises(ValueError, match=reason):
        plan_of(loaded, **settings)


def test_types_that_need_importances_are_offered_with_them_alone():
    with_them = [option.name for option in parse_types(None, importance=True)]
    assert with_them == list(DEFAULT_TYPES)
    without = {option.name for option in parse_types(None, importance=False)}
    assert set(with_them) - without == {"iq2_xxs", "iq2_xs"}
    with pytest.raises(ValueError, match="importance matrix only"):
        parse_types("iq2_xs,q4_k", importance=False)


def test_weights_that_do_not_fit_the_file_are_refused(loaded, tmp_path):
    info = linears_of(loaded)[0]
    integer = {info.name: IntegerGrid(4, 64).encode(info.weight.float())}
    with pytest.raises(ExportError, match="cannot hold"):
        GGUFExporter().export(ExportRequest(loaded, integer, tmp_path / "out"))
    from_folder = wrap_model(loaded.model, loaded.tokenizer, name="tiny")
    with pytest.raises(ExportError, match="convert"):
        GGUFExporter().export(ExportRequest(from_folder, {}, tmp_path / "out"))
    with torch.no_grad():
        kept = info.weight.clone()
        info.module.weight.add_(1)
        try:
            with pytest.raises(ModelError, match="in an order known here"):
                GGUFTarget.of(loaded, [info])
        finally:
            info.module.weight.copy_(kept)
    assert not list(tmp_path.iterdir())


def test_the_time_of_encoding_is_that_of_every_type_on_offer(loaded):
    plan = plan_of(loaded, types="iq4_nl,q8_0")
    weights = sum(info.parameters for info in plan.linears)
    assert encoding_seconds(plan, 2) == pytest.approx(weights / 1e6 * (1 / 2.2 + 1 / 100) / 2)
    assert encoding_seconds(plan_of(loaded, types=",".join(BLOCK_TYPES)), 2) > encoding_seconds(plan, 2)


def test_padding_counts():
    assert [padded(size) for size in (0, 1, 32, 33)] == [0, 32, 32, 64]
