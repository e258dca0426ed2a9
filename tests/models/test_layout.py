"""Layouts read off the module tree, against random models of the architectures with known fused linears."""

from __future__ import annotations

import pytest
import torch
from named_architectures import NAMED
from torch import nn
from transformers.pytorch_utils import Conv1D

from rco.models.layout import FUSED, layout_for
from rco.models.zoo import ModelError
from rco.testing.tiny_models import tiny_model

ALL = NAMED
UNTIED = [name for name in ALL if name != "gemma3"]


def laid_out(model_type, **changes):
    model = tiny_model(model_type, **changes)
    return layout_for(model), model


@pytest.fixture(scope="module", params=ALL)
def pair(request):
    return laid_out(request.param)


def inputs_of(layout, model, linears):
    """The first input of every linear in a forward pass."""
    seen = {}
    hooks = [
        info.module.register_forward_pre_hook(lambda m, args, name=info.name: seen.setdefault(name, args[0]))
        for info in linears
    ]
    with torch.no_grad():
        layout.final_hidden(model, ids_for(model))
    for hook in hooks:
        hook.remove()
    return seen


def ids_for(model, batch=2, length=12):
    return torch.randint(3, 88, (batch, length), generator=torch.Generator().manual_seed(1))


def test_head_of_final_hidden_is_the_logits(pair):
    layout, model = pair
    ids = ids_for(model)
    with torch.no_grad():
        hidden = layout.final_hidden(model, ids)
        logits = model(input_ids=ids).logits
    assert hidden.shape == (2, 12, 32)
    assert logits.std() > 0.01
    assert torch.equal(layout.head(model)(hidden), logits)


def test_final_hidden_honours_the_attention_mask(pair):
    layout, model = pair
    ids = ids_for(model)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        hidden = layout.final_hidden(model, ids, mask)
        logits = model(input_ids=ids, attention_mask=mask).logits
        free = model(input_ids=ids).logits
    assert torch.equal(layout.head(model)(hidden), logits)
    assert not torch.equal(logits[0, 5:], free[0, 5:])


def test_every_projection_of_every_block_is_found_once(pair):
    layout, model = pair
    found = layout.linears(model)
    names = [info.name for info in found]
    expected = {
        f"{prefix}.{path}"
        for prefix, block in layout.blocks(model)
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and path not in layout.kept
    }
    assert len(names) == len(set(names))
    assert set(names) == expected
    modules = dict(model.named_modules())
    for info in found:
        assert modules[info.name] is info.module
        assert info.weight.shape == (info.out_features, info.in_features)
        assert info.bias == (info.module.bias is not None)
        x = torch.randn(3, info.in_features)
        expected_y = x @ info.weight.T + (info.module.bias if info.bias else 0)
        torch.testing.assert_close(info.module(x), expected_y)
    assert [info.block for info in found] == sorted(info.block for info in found)
    assert len({(info.block, info.kind) for info in found}) == len(found)


def test_what_is_kept_is_a_router_or_a_gate(pair):
    layout, model = pair
    for _, block in layout.blocks(model):
        modules = dict(block.named_modules())
        for path in layout.kept:
            if path in modules:
                assert modules[path].weight.shape[0] <= 4  # experts of the tiny models, or one


def test_fused_linears_read_the_same_input(pair):
    layout, model = pair
    seen = inputs_of(layout, model, layout.linears(model))
    sets = layout.fused_sets(layout.linears(model))
    for names in sets:
        assert len(names) > 1
        assert all(torch.equal(seen[names[0]], seen[name]) for name in names[1:])
    kinds = {info.kind for info in layout.linears(model)}
    for group in layout.fused_groups:
        assert any(kind in kinds for kind in group)


@pytest.mark.parametrize("model_type", UNTIED)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_are_flagged(model_type, tied):
    layout, model = laid_out(model_type, tie_word_embeddings=tied)
    head = layout.linears(model, include_head=True)[-1]
    assert layout.head(model).tied is tied
    assert head.tied is tied
    assert head.block is None
    assert head.role == "head"
    assert (head.out_features, head.in_features) == tuple(model.get_output_embeddings().weight.shape)
    assert dict(model.named_modules())[head.name] is model.get_output_embeddings()
    if tied:
        assert layout.embedding(model).weight.data_ptr() == layout.head(model).weight.data_ptr()


def test_llama_row_in_full():
    layout, model = laid_out("llama")
    first = layout.linears(model)[:7]
    assert [info.kind for info in first] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    assert [info.role for info in first] == ["attention"] * 4 + ["mlp"] * 3
    assert layout.fused_groups == (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    assert layout.fused_sets(layout.linears(model))[0] == tuple(
        f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")
    )


def test_gpt2_weights_are_stored_transposed_and_its_kinds_are_unambiguous():
    layout, model = laid_out("gpt2")
    infos = layout.linears(model)
    assert all(info.transposed for info in infos)
    assert [info.kind for info in infos[:4]] == ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]


def test_gradients_flow_through_final_hidden():
    layout, model = laid_out("llama")
    weight = layout.linears(model)[0].module.weight.requires_grad_(True)
    layout.final_hidden(model, ids_for(model)).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_a_packed_linear_is_an_error():
    model = tiny_model("llama")
    packed = nn.Module()
    packed.weight_packed = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
    model.model.layers[1].mlp.up_proj = packed
    with pytest.raises(ModelError, match=r"mlp.up_proj is a Module.*already quantized"):
        layout_for(model)
    layout, model = laid_out("llama")
    model.model.layers[1].mlp.up_proj = nn.Identity()
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj is a Identity.*already quantized"):
        layout.linears(model)


def test_any_linear_of_a_block_is_found():
    model = tiny_model("llama")
    model.model.layers[2].adapter = nn.Linear(4, 4)
    names = [info.name for info in layout_for(model).linears(model)]
    assert names[-1] == "model.layers.2.adapter"
    assert len(names) == 22


class Grouped(nn.Linear):
    """Multiplies parts of its input with parts of its weight, as some architectures do."""

    def forward(self, x):
        return nn.functional.linear(x[..., :2], self.weight[:, :2])


class Spelled(nn.Linear):
    """The same product as a linear, written differently."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_a_subclass_of_linear_is_taken_only_if_it_computes_the_product():
    model = tiny_model("llama")
    model.model.layers[2].grouped, model.model.layers[2].spelled = Grouped(4, 4), Spelled(4, 4)
    names = [info.name for info in layout_for(model).linears(model)]
    assert "model.layers.2.spelled" in names
    assert "model.layers.2.grouped" not in names


def test_what_is_no_language_model_is_refused():
    with pytest.raises(ModelError, match="Linear is not a causal language model of transformers"):
        layout_for(nn.Linear(2, 2))


def test_a_part_of_a_model_is_refused():
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="Pass the causal language model itself"):
        layout_for(model).blocks(model.model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_merged_linears_of_every_row_have_one_input():
    parts = {
        "gemma3n",
        "gemma4",
        "qwen3_5",
        "qwen3_5_moe",
    }  # checkpoints with images; the language part is a row
    without = set()
    for model_type in sorted(FUSED.keys() - set(NAMED) - parts):
        layout, model = laid_out(model_type)
        linears = layout.linears(model)
        seen = inputs_of(layout, model, linears)
        sets = layout.fused_sets(linears)
        if not sets and FUSED[model_type]:
            without.add(model_type)
        for names in sets:
            assert all(torch.equal(seen[names[0]], seen[name]) for name in names[1:]), names
    assert without == {"granitemoehybrid"}  # the tiny model has no attention
