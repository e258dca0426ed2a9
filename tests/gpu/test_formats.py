"""Every family of formats on a GPU: decoded bit for bit as on a CPU, inner products as those of dense matrices."""

import pytest
import torch

from rco import formats, registry
from rco.formats.base import EncodeSettings
from rco.formats.integer import IntegerGrid
from rco.formats.products import inner_products
from rco.testing import check_format
from rco.testing.format_checks import random_weight

pytestmark = pytest.mark.gpu

NAMES = {
    "integer": ["int2-g64", "int3-g128-sym", "int4-channel", "int5-g32", "int8-g64-sym"],
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
    assert NAMES.keys() == registry.FORMATS.keys()
    format = formats.parse(name)
    exact = on_grid(format) if isinstance(format, IntegerGrid) else None
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
