from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.formats import rounding as rounding_module
from rco.formats.integer import IntegerGrid
from rco.formats.rounding import FitSettings, fit_groups, round_to_nearest

STORAGE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def weighted_errors(weight: torch.Tensor, decoded: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    return ((weight.double() - decoded.double()).square() * importance.double()).sum(dim=1)


def heavy_tailed(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=rng, dtype=torch.float64) * (
        0.05 + torch.rand(rows, cols, generator=rng, dtype=torch.float64) ** 3
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_search_comes_close_to_an_exhaustive_one(bits: int, symmetric: bool) -> None:
    weight = heavy_tailed(40, 32)
    importance = torch.rand(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    found = round_to_nearest(weight, [IntegerGrid(bits, None, symmetric)], importance=importance)[0]
    errors = weighted_errors(weight, found.dequantize(), importance)

    top, half = (1 << bits) - 1, 1 << (bits - 1)
    best = torch.full((40,), torch.inf, dtype=torch.float64)
    reach = weight.abs().amax(dim=1, keepdim=True) * 2.2
    zeros = [half] if symmetric else range(top + 1)
    for part in torch.linspace(0.01, 1, 400, dtype=torch.float64):
        for sign in (1, -1) if symmetric else (1,):
            scale = sign * part * reach / top
            for zero in zeros:
                decoded = (torch.round(weight / scale) + zero).clamp(0, top).sub(zero) * scale
                best = torch.minimum(best, weighted_errors(weight, decoded, importance))
    assert (errors / best).mean() < 1.05
    assert (errors / best).max() < 1.8


@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 5),
    cols=st.integers(1, 40),
    group=st.one_of(st.none(), st.integers(1, 50)),
    symmetric=st.booleans(),
    dtype=st.sampled_from(STORAGE),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_search_is_never_worse_than_the_extremes(
    bits: int, rows: int, cols: int, group: int | None, symmetric: bool, dtype: torch.dtype, seed: int
) -> None:
    weight = heavy_tailed(rows, cols, seed).to(dtype)
    grid = IntegerGrid(bits, group, symmetric)
    searched, plain = (round_to_nearest(weight, [grid], clip=clip)[0] for clip in ("search", "minmax"))
    size = searched.group_size
    for start in range(0, cols, size):
        columns = slice(start, start + size)
        # Ranges are compared before decoded values are rounded to storage, hence the slack.
        slack = weight[:, columns].double().square().sum(dim=1) * torch.finfo(dtype).eps ** 2
        one = torch.ones(columns.indices(cols)[1] - start)
        ours = weighted_errors(weight[:, columns], searched.dequantize()[:, columns], one)
        theirs = weighted_errors(weight[:, columns], plain.dequantize()[:, columns], one)
        if dtype in (torch.float32, torch.float64):
            assert (ours <= theirs * (1 + 1e-6) + 4 * slack).all()
        else:
            assert (ours.sqrt() <= theirs.sqrt() + 2 * slack.sqrt()).all()


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_the_nearest_on_the_stored_scales(dtype: torch.dtype, symmetric: bool) -> None:
    weight = heavy_tailed(9, 70).to(dtype)
    for bits in range(1, 9):
        packed = round_to_nearest(weight, [IntegerGrid(bits, 32, symmetric)])[0]
        assert packed.scales.dtype == dtype
        scale = packed.scales.double().repeat_interleave(32, dim=1)[:, :70]
        zero = (
            torch.full_like(scale, 1 << (bits - 1))
            if packed.zeros is None
            else packed.zeros.double().repeat_interleave(32, dim=1)[:, :70]
        )
        chosen = (weight.double() - (packed.codes().double() - zero) * scale).abs()
        for code in range(1 << bits):
            assert (chosen <= (weight.double() - (code - zero) * scale).abs() * (1 + 1e-5) + 1e-12).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip", ["search", "minmax"])
@pytest.mark.parametrize("dtype", STORAGE)
def test_degenerate_groups(symmetric: bool, clip: str, dtype: torch.dtype) -> None:
    weight = torch.zeros(6, 8, dtype=dtype)
    weight[1] = 0.37
    weight[2] = -0.37
    weight[3, 0] = 5.0
    weight[4] = 1e-6
    weight[5, 3] = -(6e4 if dtype == torch.float16 else 1e30)
    for bits in (1, 2, 4, 8):
        for group in (None, 1, 3, 100):
            packed = round_to_nearest(weight, [IntegerGrid(bits, group, symmetric)], clip=clip)[0]
            decoded = packed.dequantize()
            assert torch.isfinite(decoded).all()
            assert torch.isfinite(packed.scales).all()
            assert (packed.scales != 0).all()
            assert torch.equal(decoded[0], weight[0])
            if clip == "search" or not symmetric:
                assert torch.allclose(decoded[1:4], weight[1:4], rtol=0.02, atol=0)


def test_several_grids_at_once_are_the_single_ones() -> None:
    weight = heavy_tailed(7, 50).float()
    grids = [
        IntegerGrid(2, 16),
        IntegerGrid(3, None, True),
        IntegerGrid(8, 50),
        IntegerGrid(4, 7, True),
    ]
    together = round_to_nearest(weight, grids)
    for grid, packed in zip(grids, together, strict=True):
        alone = round_to_nearest(weight, [grid])[0]
        assert torch.equal(alone.packed, packed.packed)
        assert torch.equal(alone.scales, packed.scales)
        assert packed.bits == grid.bits
        assert (packed.zeros is None) == grid.symmetric
    assert (together[1].scales < 0).any()


def test_signed_scales_lower_the_error() -> None:
    weight = heavy_tailed(64, 64).float()
    for bits in (2, 3, 4):
        signed, plain = (
            round_to_nearest(weight, [IntegerGrid(bits, 32, True)], signed_scales=flag)[0]
            for flag in (True, False)
        )
        ours, theirs = ((weight - packed.dequantize()).square().sum().item() for packed in (signed, plain))
        assert ours < 0.95 * theirs
        assert (plain.scales > 0).all()


def test_importance_moves_the_error_to_columns_that_matter_less() -> None:
    weight = heavy_tailed(64, 32).float()
    importance = torch.ones(32)
    importance[:4] = 100.0
    weighted, plain = (
        (weight - round_to_nearest(weight, [IntegerGrid(2)], importance=h)[0].dequantize())
        .square()
        .sum(dim=0)
        for h in (importance, None)
    )
    assert weighted[:4].sum() < 0.7 * plain[:4].sum()
    assert (weighted * importance).sum() < (plain * importance).sum()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip", ["search", "minmax"])
@pytest.mark.parametrize("storage", STORAGE)
def test_portable_fit_agrees_with_compiled(
    symmetric: bool, clip: str, storage: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = heavy_tailed(30, 70)
    weight[3, :32] = 0
    importance = torch.rand(70, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fit = FitSettings(clip, storage)
    for bits in (1, 2, 3, 5, 8):
        grid = IntegerGrid(bits, 32, symmetric)
        compiled = fit_groups(weight, grid, fit, importance)
        with monkeypatch.context() as patch:
            patch.setattr(rounding_module, "on_compiled_path", lambda tensor: False)
            patch.setattr(rounding_module, "_CHUNK_ELEMENTS", 5000)
            portable = fit_groups(weight, grid, fit, importance)
        assert torch.allclose(portable[0], compiled[0], rtol=1e-12)
        assert torch.equal(portable[1], compiled[1])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("group", [1, 7, 32, 70])
@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
def test_codes_are_the_nearest_and_differences_those_of_the_decoded_weight(
    symmetric: bool, storage: torch.dtype, group: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding_module, "_CHUNK_CODES", chunk)
    weight = heavy_tailed(9, 70)
    weight[3, :32] = 0
    fit = FitSettings("search", storage)
    for bits in (1, 3, 8):
        grid = IntegerGrid(bits, group, symmetric)
        scales, zeros = fit_groups(weight, grid, fit, torch.ones(70, dtype=torch.float64))
        codes = rounding_module.nearest_codes(weight, scales, zeros, grid)
        wide = [each.double().repeat_interleave(group, dim=1)[:, :70] for each in (scales, zeros)]
        levels = (torch.arange(1 << bits).view(-1, 1, 1) - wide[1]) * wide[0]
        misses = (levels - weight).abs()
        taken = misses.gather(0, codes.long().unsqueeze(0))[0]
        assert (taken <= misses.amin(dim=0) * (1 + 1e-12)).all()
        found, sizes = rounding_module.differences(weight, codes, scales, zeros, grid, fit)
        decoded = rounding_module.assemble(codes, scales, zeros, grid, storage).dequantize(torch.float64)
        assert torch.equal(found, weight - decoded)
        torch.testing.assert_close(sizes, found.square().sum(dim=1))


def test_bad_input_is_named() -> None:
    weight = torch.zeros(3, 4)
    weight[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"1 values that are NaN or infinite.*row 1, column 2"):
        round_to_nearest(weight, [IntegerGrid(2)])
    with pytest.raises(ValueError, match="floating-point matrix"):
        round_to_nearest(torch.zeros(3, dtype=torch.float32), [IntegerGrid(2)])
    with pytest.raises(ValueError, match="1 to 8 bits"):
        IntegerGrid(9)
    with pytest.raises(ValueError, match="group_size"):
        IntegerGrid(2, 0)
    with pytest.raises(ValueError, match="clip"):
        round_to_nearest(torch.ones(2, 2), [IntegerGrid(2)], clip="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stored as"):
        round_to_nearest(torch.ones(2, 2), [IntegerGrid(2)], storage_dtype=torch.int8)
    with pytest.raises(ValueError, match="importance"):
        round_to_nearest(torch.ones(2, 2), [IntegerGrid(2)], importance=torch.ones(3))
    with pytest.raises(ValueError, match="not negative"):
        round_to_nearest(torch.ones(2, 2), [IntegerGrid(2)], importance=-torch.ones(2))
