"""Layouts found by runs with stand-ins, and passes over blocks that cannot be run one by one."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rco.models.capture import (
    BlockInputs,
    LoneBlockError,
    WholePasses,
    block_inputs,
    linear_inputs,
    lone_block,
)
from rco.models.layout import _checked, layout_for
from rco.models.skeleton import read_at_start
from rco.models.zoo import ModelError
from rco.testing.tiny_models import tiny_model

IDS = torch.randint(3, 88, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def unremembered():
    """No test sees what another one found for the same configuration."""
    before = dict(_checked)
    _checked.clear()
    yield
    _checked.clear()
    _checked.update(before)


def changed_logits(model, change):
    """A model whose logits are a function of the output layer's result."""

    class Changed(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits)
            return output

    model.__class__ = Changed
    return model


@pytest.mark.parametrize(
    ("change", "scale", "softcap"),
    [
        (lambda z: z, 1.0, None),
        (lambda z: z * 0.37, 0.37, None),
        (lambda z: z / 48, 1 / 48, None),  # 48 is a field of the configuration
        (lambda z: 5.0 * torch.tanh(z / 5.0), 1.0, 5.0),
        (lambda z: 5.0 * torch.tanh(0.25 * z / 5.0), 0.25, 5.0),
    ],
)
def test_scale_and_bound_of_the_logits_are_found(change, scale, softcap):
    model = changed_logits(tiny_model("llama", some_cap=5.0), change)
    layout = layout_for(model)
    assert layout.tail.scale == pytest.approx(scale, rel=1e-6)
    assert layout.tail.softcap == softcap
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        torch.testing.assert_close(layout.head(model)(layout.final_hidden(model, IDS)), logits)


@pytest.mark.parametrize("change", [torch.square, lambda z: z + 1.0, lambda z: z[..., :-1]])
def test_other_functions_of_the_output_layer_are_refused(change):
    with pytest.raises(ModelError, match="not supported"):
        layout_for(changed_logits(tiny_model("llama"), change))


def test_a_list_that_is_not_walked_is_not_taken_for_the_blocks():
    model = tiny_model("llama")
    # As long as the blocks, and larger.
    model.model.decoys = nn.ModuleList([nn.Linear(64, 512) for _ in model.model.layers])
    layout = layout_for(model)
    assert layout.prefix == "model.layers"
    assert not any("decoys" in info.name for info in layout.linears(model))


def test_the_run_leaves_the_model_as_it_was():
    model = tiny_model("gpt2")
    before = copy.deepcopy(model.state_dict())
    layout_for(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks


@pytest.mark.parametrize("name", ["llama", "bloom", "minicpm3", "gpt2"])
def test_whole_passes_show_linears_what_block_by_block_passes_show(name):
    model = tiny_model(name)
    layout = layout_for(model)
    seen: dict[str, dict[str, torch.Tensor]] = {}
    ends = {}
    for kind in (BlockInputs, WholePasses):
        passes = (
            BlockInputs.capture(model, layout, IDS, batch_size=2)
            if kind is BlockInputs
            else WholePasses(model, layout, IDS, 2)
        )
        sums = seen.setdefault(kind.__name__, {})
        for index, (prefix, block) in enumerate(layout.blocks(model)):
            paths = [info.path for info in layout.linears(model) if info.block == index]

            def add(path, x, prefix=prefix, sums=sums):
                key = f"{prefix}.{path}"
                sums[key] = sums.get(key, 0) + x.T @ x

            with linear_inputs(block, paths, add):
                passes.advance()
        ends[kind.__name__] = passes.finish()
    assert seen["BlockInputs"].keys() == seen["WholePasses"].keys()
    for key, value in seen["BlockInputs"].items():
        torch.testing.assert_close(value, seen["WholePasses"][key])
    torch.testing.assert_close(ends["BlockInputs"], ends["WholePasses"])


class Doubled(nn.Module):
    """A block that uses the input of the block before, which it gets through a side channel."""

    def __init__(self, block, shared):
        super().__init__()
        self.block, self.shared = block, shared

    def forward(self, hidden_states, **kwargs):
        before = getattr(self.shared, "value", None)
        before = hidden_states if before is None or before.shape != hidden_states.shape else before
        self.shared.value = hidden_states
        return self.block(hidden_states, **kwargs) + 0.1 * before


def test_blocks_that_depend_on_more_than_their_input_get_whole_passes():
    model = tiny_model("llama")
    assert isinstance(block_inputs(model, layout_for(model), IDS, batch_size=2, storage="cpu"), BlockInputs)
    shared = SimpleNamespace()
    model.model.layers = nn.ModuleList([Doubled(block, shared) for block in model.model.layers])
    _checked.clear()
    layout = layout_for(model)
    # The side channel of the whole pass is full when the blocks are run one by one.
    passes = block_inputs(model, layout, IDS, batch_size=2, storage="cpu")
    assert isinstance(passes, WholePasses)


def test_a_block_that_cannot_be_run_alone_says_so():
    model = tiny_model("llama")
    layout = layout_for(model)
    with lone_block(model, layout, 0, tokens=4, dtype=torch.float32) as lone:
        assert lone().shape == (1, 4, 32)
        with pytest.raises(LoneBlockError, match="cannot be run by itself"):
            lone(torch.zeros(1, 4, 31))


def test_weights_that_transformers_reads_while_it_builds_a_model():
    model = tiny_model("mamba")
    blocks = [block for _, block in layout_for(model).blocks(model)]
    assert set(read_at_start(model, blocks)) == {"mixer.dt_proj", "mixer.out_proj"}
    assert not read_at_start(tiny_model("llama"), list(tiny_model("llama").model.layers))
