"""Every family of formats on a GPU: decoded bit for bit as on a CPU, inner products as those of dense matrices."""

import pytest
import torch
from floating_weights import representable

from rco import formats, registry
from rco.formats.base import EncodeSettings
from rco.formats.coded import pack
from rco.formats.floating import FloatingPoint
from rco.formats.ggml.block_types import BLOCK_TYPES, GGMLFormat
from rco.formats.integer import IntegerGrid
from rco.formats.products import inner_products
from rco.testing import check_format
from rco.testing.format_checks import random_weight

pytestmark = pytest.mark.gpu

NAMES = {
    "integer": ["int2-g64", "int3-g128-sym", "int4-channel", "int5-g32", "int8-g64-sym"],
    "ggml-float": ["bf16"],
    "floating": ["fp8", "fp8-block-dynamic", "int8-dynamic", "nvfp4", "nvfp4-a4", "mxfp4-a4", "mxfp8"],
    "original": ["original"],
    "removed": ["removed"],
}


def on_grid(grid):
    """Weights on a grid of power-of-two scales with its outermost codes in every group, on the CPU."""

    def make(shape):
        generator = torch.Generator().manual_seed(9)
        size, top = grid.columns_per_group(shape[1]), (1 << grid.bits) - 1
        codes = torch.randint(0, top + 1, shape, generator=generator)
        codes[:, ::size], codes[:, 1::size] = 0, top
        scales = 2.0 ** torch.randint(-6, -2, (shape[0], grid.groups(shape[1])), generator=generator)
        return (codes - (1 << (grid.bits - 1))) * scales.repeat_interleave(size, dim=1)[:, : shape[1]]

    return make


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_the_contract(name):
    assert {*NAMES, "ggml"} == registry.FORMATS.keys()
    format = formats.parse(name)
    exact = on_grid(format) if isinstance(format, IntegerGrid) else None
    exact = representable(name) if isinstance(format, FloatingPoint) else exact
    check_format(format, shapes=[(12, 256), (64, 512)], device="cuda", representable=exact)


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_families_mixed_in_one_layer(gradient_dtype):
    """Fused products of integer grids and dense options beside those of a format without kernels."""
    names = ["int3-g64", "removed", "original", "int4-g128-sym", "int2-g64"]
    weight = random_weight((64, 512))
    settings = EncodeSettings(storage_dtype=torch.bfloat16)
    options = [formats.parse(name).encode(weight, settings=settings) for name in names]
    moved = [option.to("cuda") for option in options]
    gradient = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).to(gradient_dtype)
    for segments in (1, 4):
        here = inner_products(gradient, options, segments)
        there = inner_products(gradient.cuda(), moved, segments)
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-3)


def random_blocks(name, rows, columns, seed=0):
    """A weight in one of ggml's block types, of random codes, scales and minima."""
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(seed)
    blocks, groups = columns // kind.block, columns // kind.group
    per_sign = len(kind.levels) or 1 << (kind.code_bits - 1)
    codes = torch.randint(0, per_sign, (rows, columns), generator=generator)
    codes |= torch.randint(0, 2, codes.shape, generator=generator) << (kind.code_bits - 1)
    tensors = {"packed": pack(codes.to(torch.uint8), kind.code_bits)}
    tensors["scale"] = torch.randn(rows, blocks, generator=generator).half()
    if kind.with_minima:
        tensors["minimum"] = torch.randn(rows, blocks, generator=generator).half()
    if kind.with_sub_scales:
        signed = torch.int8 if kind.sub_offset else torch.uint8
        tensors["sub_scales"] = torch.randint(0, 16, (rows, groups), generator=generator).to(signed)
        if kind.with_minima:
            tensors["sub_minima"] = torch.randint(0, 16, (rows, groups), generator=generator).to(torch.uint8)
    return GGMLFormat(name).restore((rows, columns), tensors)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_block_types_decode_bit_for_bit_as_on_a_cpu(name):
    here = random_blocks(name, 24, 768)
    there = here.to("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(there.dequantize(dtype).cpu(), here.dequantize(dtype)), dtype


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_products_of_all_block_types_at_once(gradient_dtype):
    options = [random_blocks(name, 64, 768, seed) for seed, name in enumerate(BLOCK_TYPES)]
    gradient = torch.randn(64, 768, generator=torch.Generator().manual_seed(1)).to(gradient_dtype)
    dense = torch.stack([option.dequantize(torch.float64) for option in options])
    for segments in (1, 4):
        terms = (dense * gradient.double()).view(len(options), segments, -1)
        there = inner_products(gradient.cuda(), [option.to("cuda") for option in options], segments)
        there = there.cpu().view(len(options), segments)
        assert ((there - terms.sum(dim=2)).abs() <= 1e-5 * terms.abs().sum(dim=2)).all()
