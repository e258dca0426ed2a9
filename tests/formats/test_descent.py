from __future__ import annotations

import pytest
import torch

from rco.formats import gptq as gptq_module
from rco.formats import rounding as rounding_module
from rco.formats.gptq import descend, gptq
from rco.formats.integer import IntegerGrid
from rco.formats.rounding import FitSettings, fit_groups, nearest_codes


def problem(rows: int = 40, cols: int = 70, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=rng, dtype=torch.float64)
    inputs = torch.randn(300, cols, generator=rng, dtype=torch.float64)
    inputs = inputs @ torch.randn(cols, cols, generator=rng, dtype=torch.float64)
    return weight, inputs.T @ inputs / 300


def start(weight: torch.Tensor, grid: IntegerGrid, fit: FitSettings) -> tuple[torch.Tensor, ...]:
    scales, zeros = fit_groups(weight, grid, fit, torch.ones(weight.shape[1], dtype=weight.dtype))
    return nearest_codes(weight, scales, zeros, grid), scales, zeros


def losses_of(weight, hessian, grid, fit, parts) -> torch.Tensor:
    difference = rounding_module.differences(weight, *parts, grid, fit)[0].double()
    return ((difference @ hessian) * difference).sum(dim=1)


@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ends_where_no_single_code_can_improve(storage: torch.dtype, bits: int, symmetric: bool) -> None:
    weight, hessian = problem()
    grid, fit = IntegerGrid(bits, 16, symmetric), FitSettings("search", storage)
    codes, scales, zeros = start(weight, grid, fit)
    before = losses_of(weight, hessian, grid, fit, (codes, scales, zeros))
    change = descend(weight, hessian, grid, fit, codes, scales, zeros, sweeps=1000, block=32)
    after = losses_of(weight, hessian, grid, fit, (codes, scales, zeros))
    assert (change <= 0).all()
    assert torch.allclose(after - before, change, rtol=1e-6, atol=1e-8 * float(before.max()))
    assert after.sum() < 0.8 * before.sum()
    if storage in (torch.bfloat16, torch.float16):
        return  # the nearest code is taken before its value is rounded, so a neighbour may be better by that much
    # Brute force: every single move of every code leaves a row's error as it is or raises it.
    for j in range(weight.shape[1]):
        for step in (-1, 1):
            moved = codes.clone()
            moved[:, j] = (codes[:, j].int() + step).clamp(0, (1 << bits) - 1).to(torch.uint8)
            assert (losses_of(weight, hessian, grid, fit, (moved, scales, zeros)) >= after * (1 - 1e-9)).all()


def test_portable_descent_agrees_with_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem()
    hessian[5] = 0
    hessian[:, 5] = 0
    grid, fit = IntegerGrid(3, 16), FitSettings("search", torch.bfloat16)
    compiled, portable = start(weight, grid, fit), start(weight, grid, fit)
    change = descend(weight, hessian, grid, fit, *compiled, sweeps=3, block=32)
    monkeypatch.setattr(gptq_module, "on_compiled_path", lambda tensor: False)
    again = descend(weight, hessian, grid, fit, *portable, sweeps=3, block=32)
    assert torch.equal(compiled[0], portable[0])
    assert torch.allclose(change, again)


@pytest.mark.parametrize("act_order", [False, True])
def test_sweeps_lower_the_error_of_gptq_and_change_no_range(act_order: bool) -> None:
    weight, hessian = problem(100, 90)
    weight = weight.float()
    grids = [IntegerGrid(2, 32), IntegerGrid(3, None, True), IntegerGrid(4, 32)]
    plain, swept = (gptq(weight, hessian, grids, act_order=act_order, sweeps=n) for n in (0, 4))
    assert (swept.errors < 0.97 * plain.errors).all()
    for k, packed in enumerate(swept.candidates):
        difference = weight.double() - packed.dequantize(torch.float64)
        exact = ((difference @ hessian) * difference).sum()
        assert torch.allclose(swept.errors[k], exact, rtol=1e-4)
        same = (packed.scales == plain.candidates[k].scales).all(dim=1)
        assert same.float().mean() > 0.9
        alone = gptq(weight, hessian, [grids[k]], act_order=act_order, sweeps=4).candidates[0]
        assert torch.equal(alone.packed, packed.packed)
    with pytest.raises(ValueError, match="sweeps"):
        gptq(weight, hessian, grids, sweeps=-1)
