"""Candidates made on a GPU against those of the CPU."""

from unittest.mock import Mock

import pytest
import torch

from rco.formats import encode_all, parse
from rco.formats.base import EncodeSettings
from rco.formats.gptq import gptq
from rco.formats.integer import IntegerGrid
from rco.formats.rounding import round_to_nearest

pytestmark = pytest.mark.gpu


def layer(rows, cols, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(cols, cols, generator=generator) / cols**0.5
    inputs = torch.randn(tokens, cols, generator=generator) @ mix
    return torch.randn(rows, cols, generator=generator), 2 * inputs.T @ inputs / tokens


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "symmetric"), [(64, False), (128, True), (24, False), (None, True)])
def test_ranges_are_those_of_the_cpu(group, symmetric, storage):
    weight, _ = layer(150, 320, 10)
    weight[3] = 0.0
    grids = [IntegerGrid(bits, group, symmetric) for bits in range(2, 9)]
    for here, there in zip(
        round_to_nearest(weight, grids, storage_dtype=storage),
        round_to_nearest(weight.cuda(), grids, storage_dtype=storage),
        strict=True,
    ):
        # A sum in another order may tip the balance between two ranges that are equally good.
        alike = torch.isclose(here.scales.float(), there.scales.cpu().float(), rtol=1e-5)
        assert alike.float().mean() > 0.97
        errors = [(w.dequantize(torch.float32).cpu() - weight).square().sum() for w in (here, there)]
        assert float(errors[1]) == pytest.approx(float(errors[0]), rel=1e-3)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("group", "storage"), [(64, torch.float32), (128, torch.bfloat16), (None, torch.float32)]
)
def test_gptq_is_that_of_the_cpu(group, storage, act_order):
    weight, hessian = layer(150, 320, 800)
    grids = [IntegerGrid(bits, group) for bits in range(2, 9)]
    here = gptq(weight, hessian, grids, act_order=act_order, sweeps=2, storage_dtype=storage)
    there = gptq(weight.cuda(), hessian.cuda(), grids, act_order=act_order, sweeps=2, storage_dtype=storage)
    for a, b in zip(here.candidates, there.candidates, strict=True):
        assert b.device.type == "cuda"
        assert (a.codes() == b.codes().cpu()).float().mean() > 0.98
        assert torch.equal(b.dequantize().cpu(), b.to("cpu").dequantize())
    torch.testing.assert_close(there.errors.cpu(), here.errors, rtol=5e-3, atol=0)
    assert (there.errors <= there.nearest_errors).all()
    # What is reported is what the candidates have.
    for candidate, reported in zip(there.candidates, there.errors, strict=True):
        difference = candidate.dequantize(torch.float32).double() - weight.cuda().double()
        exact = ((difference @ hessian.cuda().double()) * difference).sum()
        assert float(reported) == pytest.approx(float(exact), rel=1e-3)


def test_float64_is_worked_on_in_float64():
    weight, hessian = layer(40, 96, 300)
    grids = [IntegerGrid(3, 32), IntegerGrid(4, None, True)]
    here = gptq(weight.double(), hessian.double(), grids, sweeps=2)
    there = gptq(weight.double().cuda(), hessian.double().cuda(), grids, sweeps=2)
    for a, b in zip(here.candidates, there.candidates, strict=True):
        assert torch.equal(a.codes(), b.codes().cpu())
        torch.testing.assert_close(b.scales.cpu(), a.scales, rtol=1e-10, atol=0)


FLOATING = ["fp8", "fp8-block", "int8", "nvfp4", "mxfp4", "mxfp8"]


def test_floating_point_formats_are_compensated_as_on_the_cpu(monkeypatch):
    """Also with rows of zeros, an input that is always zero, and columns that are no multiple of a block."""
    from rco.formats import floating_kernels_triton

    kernels = {}
    for name in ("gptq_levels", "descend_levels"):
        kernels[name] = Mock(wraps=getattr(floating_kernels_triton, name))
        monkeypatch.setattr(floating_kernels_triton, name, kernels[name])
    weight, hessian = layer(150, 352, 800)
    weight[3], hessian[7], hessian[:, 7] = 0, 0, 0
    formats = [parse(name) for name in FLOATING]
    settings = EncodeSettings(storage_dtype=torch.bfloat16, sweeps=3)
    here = encode_all(formats, weight, hessian, settings=settings)
    there = encode_all(formats, weight.cuda(), hessian.cuda(), settings=settings)
    assert all(kernel.called for kernel in kernels.values())
    nearest = encode_all(formats, weight, settings=settings)
    for name, a, b, plain in zip(FLOATING, here, there, nearest, strict=True):
        assert b.stored.device.type == "cuda", name
        assert (a.stored.codes() == b.stored.codes().cpu()).float().mean() > 0.98, name
        assert b.error == pytest.approx(a.error, rel=1e-2), name
        difference = [each.stored.dequantize(torch.float64).cpu() - weight.double() for each in (b, plain)]
        ours, theirs = (float(((d @ hessian.double()) * d).sum()) for d in difference)
        assert ours < theirs, name


def test_floating_point_formats_of_float64_weights():
    weight, hessian = layer(40, 96, 300)
    settings = EncodeSettings(sweeps=2)
    for format in map(parse, FLOATING):
        here = format.encode(weight.double(), hessian.double(), settings=settings)
        there = format.encode(weight.double().cuda(), hessian.double().cuda(), settings=settings)
        assert torch.equal(here.codes(), there.codes().cpu()), format.name
