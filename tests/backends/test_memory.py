"""The count of a search's memory: what autograd keeps, and how the choices on offer change it."""

import gc

import pytest
import torch

from rco.backends.memory import pruning_memory, saved_bytes_per_token, search_memory
from rco.backends.plan import make_plan
from rco.compressors.packing import PackedWeight, pack
from rco.compressors.streaming import pinned
from rco.models.shapes import random_model


@pytest.fixture(scope="module")
def loaded():
    return random_model("quick", device="cpu", dtype=torch.float32)


def tensors():
    return sum(type(found) is torch.Tensor for found in gc.get_objects())


def test_saved_bytes_cover_the_linears_inputs_once_and_nothing_stays(loaded):
    linears = loaded.layout.linears(loaded.model)
    gc.collect()
    before = tensors()
    counted = saved_bytes_per_token(loaded, linears)
    gc.collect()
    assert tensors() == before
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    # At the least, the distinct inputs: of q/k/v, of o, of gate/up, of down.
    hidden, inner, blocks = 64, 128, 2
    assert counted >= 4 * blocks * (3 * hidden + inner)
    assert counted < 4 * blocks * 40 * (hidden + inner)


def test_checkpointing_and_streaming_take_less(loaded):
    plan = make_plan(loaded.layout, loaded.layout.linears(loaded.model), group_size=32)

    def needed(checkpointing, offload):
        return search_memory(
            loaded, plan, tokens=4096, dtype=torch.float32, checkpointing=checkpointing, offload=offload
        )

    plain = needed(False, False)
    assert needed(True, False).activations < plain.activations
    assert needed(False, True).candidates < plain.candidates
    assert plain.peak == plain.search + plain.originals
    total = 4 * sum(parameter.numel() for parameter in loaded.model.parameters())
    assert plain.weights + plain.originals == total


def test_pruning_keeps_what_its_backward_pass_reads():
    sparse = random_model("quick-moe", device="cpu", dtype=torch.float32)
    tokens, hidden, inner, top_k, layers = 4096, 64, 32, 2, 2
    gc.collect()
    before = tensors()
    plain, less = (
        pruning_memory(sparse, tokens=tokens, dtype=torch.float32, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    gc.collect()
    assert tensors() == before
    assert plain.weights == 4 * sum(parameter.numel() for parameter in sparse.model.parameters())
    assert plain.originals == plain.candidates == 0
    # At the least every pair's inner states, which the experts' backward pass starts from, and every token's input.
    assert plain.activations >= 4 * tokens * layers * (top_k * 2 * inner + hidden)
    assert less.activations == 4 * tokens * layers * hidden < plain.activations


def test_options_side_by_side_are_the_same_options():
    weights = []
    for bits, zeros in ((2, None), (5, torch.randint(0, 32, (3, 2), dtype=torch.uint8))):
        codes = torch.randint(0, 1 << bits, (3, 50), dtype=torch.uint8)
        weights.append(PackedWeight(pack(codes, bits), torch.rand(3, 2).bfloat16(), zeros, bits, (3, 50), 25))
    moved = pinned(weights)
    assert len({part.untyped_storage().data_ptr() for w in moved for part in (w.packed, w.scales)}) == 1
    for before, after in zip(weights, moved, strict=True):
        assert torch.equal(before.dequantize(), after.dequantize())
        assert after.packed.data_ptr() % 16 == 0
