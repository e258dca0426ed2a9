"""Fused experts on a GPU: stacks decoded at mixed options, and the gradients of whole layers."""

import numpy as np
import pytest
import torch

from rco.formats.integer import IntegerGrid
from rco.formats.rounding import round_to_nearest
from rco.formats.stacks import decode_segments
from rco.models.moe.layers import moe_layers
from rco.models.moe.linears import original_stacks
from rco.models.moe.switchable_experts import ExpertOptions, switchable_experts
from rco.models.shapes import random_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDTHS = range(2, 9)


# (experts, rows of each, columns, group, symmetric)
@pytest.mark.parametrize(
    ("experts", "rows", "cols", "group", "symmetric"),
    [(8, 64, 256, 128, False), (6, 33, 320, 32, True), (5, 7, 77, None, False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stacks_at_mixed_widths_decode_as_on_the_cpu(experts, rows, cols, group, symmetric, dtype):
    from rco.formats import integer_kernels_gpu as gpu  # needs Triton

    generator = torch.Generator().manual_seed(experts)
    weight = torch.randn(experts * rows, cols, generator=generator)
    grids = [IntegerGrid(bits, group, symmetric) for bits in WIDTHS]
    options = [*round_to_nearest(weight, grids, storage_dtype=dtype), weight.to(dtype)]
    moved = [option.to(CUDA) for option in options]
    rng = np.random.default_rng(rows)
    for choices in (rng.integers(0, 8, experts), np.full(experts, 3), np.arange(experts)):
        wanted, found = (
            decode_segments(each, choices, torch.full((experts * rows, cols), torch.nan, dtype=dtype, device=place))
            for each, place in ((options, "cpu"), (moved, CUDA))
        )  # fmt: skip
        assert torch.equal(found.cpu(), wanted)
        decode = gpu.chosen_decoder(moved, dtype, (experts * rows, cols), experts)
        assert (decode is not None) == (dtype == torch.bfloat16 and cols == 256)
        if decode is not None:
            found.fill_(torch.nan)
            decode(torch.from_numpy(choices).to(CUDA), found)
            assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("group", [32, None])
def test_experts_and_their_gradients_are_those_of_float64(group):
    """One layer with its routing given, every projection of every expert at a width of its own."""
    made = random_model("quick-moe", device="cpu", dtype=torch.bfloat16, layers=1).model
    layer = moe_layers(made)[0]
    experts, count = layer.num_experts, len(WIDTHS) + 1  # the last option is the original
    grids = [IntegerGrid(bits, group) for bits in WIDTHS]
    packed = [
        round_to_nearest(stack.reshape(-1, stack.shape[3]).float(), grids, storage_dtype=torch.bfloat16)
        for stack in original_stacks(layer)
    ]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, made.config.hidden_size, generator=generator).bfloat16()
    indices = torch.rand(50, experts, generator=generator).topk(layer.top_k).indices
    weights = torch.rand(50, layer.top_k, generator=generator).bfloat16()
    target = torch.randn(50, made.config.hidden_size, generator=generator)
    choices = torch.randint(count, (3 * experts,), generator=generator)
    rows = np.arange(3 * experts).reshape(-1, 3)
    results = []
    for place, dtype in ((torch.device("cpu"), torch.float64), (CUDA, torch.bfloat16)):
        model = made.to(place, dtype)
        (layer,) = moe_layers(model)
        up, down = ([*(option.to(place) for option in options), None] for options in packed)
        gates = torch.nn.functional.one_hot(choices, count).double().to(place).requires_grad_()
        leaf = hidden.to(place, dtype).requires_grad_()
        with switchable_experts(model, {0: ExpertOptions(layer, up, down)}, {0: rows}) as switched:
            switched.set_gates(gates, choices.tolist())
            out = layer.experts(leaf, indices.to(place), weights.to(place, dtype))
            (out.double() * target.to(place)).sum().backward()
        results.append((out.detach(), leaf.grad, gates.grad))
    for wanted, found in zip(*results, strict=True):
        error = (found.cpu().double() - wanted).norm() / wanted.norm()
        assert error < 2e-2
