"""Block-by-block runs reproduce the whole model, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from named_architectures import NAMED

from rco.models.capture import BlockInputs, linear_inputs
from rco.models.layout import layout_for
from rco.testing.tiny_models import tiny_model


def laid_out(model_type, **changes):
    model = tiny_model(model_type, **changes)
    return layout_for(model), model


def tokens_for(sequences=5, length=20):
    return torch.randint(3, 88, (sequences, length), generator=torch.Generator().manual_seed(2))


def hook_count(model):
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) + ("forward" in vars(module))
        for module in model.modules()
    )


@pytest.mark.parametrize("model_type", NAMED)
def test_blocks_in_turn_reproduce_the_final_hidden_states(model_type):
    layout, model = laid_out(model_type)
    tokens = tokens_for()
    before = hook_count(model)
    inputs = BlockInputs.capture(model, layout, tokens, batch_size=2)
    assert hook_count(model) == before
    for _ in layout.blocks(model):
        inputs.advance()
    with torch.no_grad():
        whole = torch.cat([layout.final_hidden(model, tokens[i : i + 2]) for i in range(0, 5, 2)])
    assert torch.equal(inputs.finish(), whole)


def test_observing_changes_nothing_and_streams_what_linears_read():
    layout, model = laid_out("llama")
    tokens = tokens_for()
    inputs = BlockInputs.capture(model, layout, tokens, batch_size=2)
    inputs.advance()
    kept = inputs.hidden.clone()
    block = layout.blocks(model)[1][1]
    seen: dict[str, list[torch.Tensor]] = {}
    with linear_inputs(
        block, ["self_attn.q_proj", "mlp.down_proj"], lambda n, x: seen.setdefault(n, []).append(x)
    ):
        inputs.observe()
    assert hook_count(model) == 0
    assert torch.equal(inputs.hidden, kept)
    assert inputs.position == 1

    whole: dict[str, torch.Tensor] = {}
    handles = [
        block.get_submodule(name).register_forward_pre_hook(
            lambda m, args, n=name: whole.update({n: args[0]})
        )
        for name in seen
    ]
    with torch.no_grad():
        layout.final_hidden(model, tokens)
    for handle in handles:
        handle.remove()
    for name, parts in seen.items():
        assert [len(part) for part in parts] == [40, 40, 20]
        torch.testing.assert_close(torch.cat(parts), whole[name].reshape(100, -1))


def test_advancing_uses_the_block_as_it_is_now():
    layout, model = laid_out("llama")
    tokens = tokens_for(2)
    inputs = BlockInputs.capture(model, layout, tokens, batch_size=2)
    layout.linears(model)[3].module.weight.data.mul_(0.5)
    for _ in range(3):
        inputs.advance()
    with torch.no_grad():
        assert torch.equal(inputs.finish(), layout.final_hidden(model, tokens))


def test_a_stand_in_block_is_run_instead():
    layout, model = laid_out("llama")
    other = tiny_model("llama", seed=1)
    inputs = BlockInputs.capture(model, layout, tokens_for(2), batch_size=2)
    own = [output for _, output in inputs.outputs()]
    strange = [output for _, output in inputs.outputs(layout.blocks(other)[0][1])]
    assert not torch.equal(own[0], strange[0])
    inputs.advance(layout.blocks(other)[0][1])
    assert torch.equal(inputs.hidden, strange[0])


def test_resuming_from_saved_hidden_states():
    layout, model = laid_out("gemma2")
    first = BlockInputs.capture(model, layout, tokens_for(), batch_size=2)
    first.advance()
    second = BlockInputs.capture(model, layout, tokens_for(), batch_size=2)
    second.hidden, second.position = first.hidden.clone(), first.position
    for inputs in (first, second):
        inputs.advance()
        inputs.advance()
    assert torch.equal(first.finish(), second.finish())


def test_hooks_go_when_the_body_fails():
    model = tiny_model("llama")
    block = model.model.layers[0]
    with pytest.raises(RuntimeError, match="stop"), linear_inputs(block, ["mlp.up_proj"], lambda n, x: None):
        raise RuntimeError("stop")
    assert hook_count(model) == 0


def test_a_failing_model_is_left_as_it_was():
    layout, model = laid_out("llama")
    with pytest.raises(IndexError):
        BlockInputs.capture(model, layout, torch.full((1, 4), 10**6))
    assert hook_count(model) == 0


def test_an_instance_forward_is_put_back():
    layout, model = laid_out("llama")
    block = model.model.layers[0]
    own = block.forward
    block.forward = own
    BlockInputs.capture(model, layout, tokens_for(1))
    assert vars(block)["forward"] is own


def test_misuse_is_explained():
    layout, model = laid_out("llama")
    with pytest.raises(ValueError, match=r"\(sequences, length\)"):
        BlockInputs.capture(model, layout, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="batch_size"):
        BlockInputs.capture(model, layout, tokens_for(), batch_size=0)
    inputs = BlockInputs.capture(model, layout, tokens_for())
    with pytest.raises(IndexError, match="3 blocks have not been run"):
        inputs.finish()
    for _ in range(3):
        inputs.advance()
    with pytest.raises(IndexError, match="All 3 blocks"):
        inputs.advance()
    with (
        pytest.raises(ValueError, match=r"no module 'mlp\.nothing'"),
        linear_inputs(model.model.layers[0], ["mlp.nothing"], lambda n, x: None),
    ):
        pass
