from __future__ import annotations

import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.formats import gptq as gptq_module
from rco.formats import rounding as rounding_module
from rco.formats.gptq import block_edges, gptq
from rco.formats.hessian import HessianAccumulator, InputPeak
from rco.formats.integer import IntegerGrid, PackedWeight
from rco.formats.rounding import round_to_nearest


def layer(rows: int, cols: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the Hessian of correlated inputs of uneven size."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=rng, dtype=torch.float64)
    mixing = torch.randn(cols, cols, generator=rng, dtype=torch.float64)
    sizes = 0.2 + 3 * torch.rand(cols, generator=rng, dtype=torch.float64) ** 4
    inputs = torch.randn(tokens, cols, generator=rng, dtype=torch.float64) @ mixing * sizes
    return weight, 2 * inputs.T @ inputs / tokens


def row_errors(weight: torch.Tensor, packed: PackedWeight, hessian: torch.Tensor) -> torch.Tensor:
    difference = weight.double() - packed.dequantize(torch.float64)
    return ((difference @ hessian) * difference).sum(dim=1)


def grid_of(
    group: torch.Tensor, grid: IntegerGrid, importance: torch.Tensor, clip: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of one group by the package's own policy, read back from a rounded group."""
    whole = IntegerGrid(grid.bits, None, grid.symmetric)
    packed = round_to_nearest(group.contiguous(), [whole], importance=importance, clip=clip)[0]  # type: ignore[arg-type]
    zero = torch.full_like(packed.scales, 1 << (grid.bits - 1))
    return packed.scales[:, 0], (zero if packed.zeros is None else packed.zeros.double())[:, 0]


def slow_gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: IntegerGrid,
    damp: float,
    clip: str,
    act_order: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One column at a time, each with the inverse Hessian of what is left; no blocks, no Cholesky factor."""
    rows, cols = weight.shape
    size = grid.columns_per_group(cols)
    damped = hessian + damp * hessian.diagonal().mean() * torch.eye(cols, dtype=torch.float64)
    order = torch.argsort(hessian.diagonal(), descending=True) if act_order else torch.arange(cols)

    # Row j: the inverse of the Hessian of the columns not yet quantized, in its first row.
    free = damped[order][:, order]
    eliminated = []
    for j in range(cols):
        row = torch.zeros(cols, dtype=torch.float64)
        row[j:] = torch.linalg.inv(free[j:, j:])[0]
        eliminated.append(row)
    importance = torch.tensor([1 / float(eliminated[j][j]) for j in range(cols)], dtype=torch.float64)

    current = weight[:, order].clone()
    codes = torch.zeros(rows, cols)
    scales = torch.zeros(rows, grid.groups(cols), dtype=torch.float64)
    zeros = torch.zeros_like(scales)
    if act_order:
        for g in range(grid.groups(cols)):
            span = slice(g * size, (g + 1) * size)
            scales[:, g], zeros[:, g] = grid_of(weight[:, span], grid, damped.diagonal()[span], clip)
    for j in range(cols):
        g = int(order[j]) // size
        if not act_order and j % size == 0:
            span = slice(j, j + size)
            scales[:, g], zeros[:, g] = grid_of(current[:, span], grid, importance[span], clip)
        scale, zero = scales[:, g], zeros[:, g]
        code = (torch.round(current[:, j] / scale) + zero).clamp(0, (1 << grid.bits) - 1)
        error = (current[:, j] - (code - zero) * scale) / eliminated[j][j]
        current[:, j:] -= error[:, None] * eliminated[j][j:]
        codes[:, order[j]] = code.float()
    return codes.to(torch.uint8), scales


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("cols", "group", "block"),
    [(64, 16, 128), (70, 32, 40), (70, None, 16), (50, 7, 20), (40, 100, 128), (33, 1, 8)],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_a_slow_reference(
    bits: int, cols: int, group: int | None, block: int, symmetric: bool
) -> None:
    weight, hessian = layer(70, cols, 200, seed=bits)
    grid = IntegerGrid(bits, group, symmetric)
    for clip in ("search", "minmax"):
        result = gptq(weight, hessian, [grid], block=block, clip=clip)  # type: ignore[arg-type]
        found = result.candidates[0]
        codes, scales = slow_gptq(weight, hessian, grid, 0.01, clip)
        ours = torch.ones(70, dtype=torch.bool)
        if result.nearest_rows[0] > 0:
            importance = hessian.diagonal() + 0.01 * hessian.diagonal().mean()
            nearest = round_to_nearest(weight, [grid], importance=importance, clip=clip)[0]  # type: ignore[arg-type]
            rounded = (found.codes() == nearest.codes()).all(dim=1) & (found.scales == nearest.scales).all(
                dim=1
            )
            ours = ~rounded
            assert rounded.sum() >= result.nearest_rows[0]
        assert ours.sum() >= 20
        assert torch.equal(found.codes()[ours], codes[ours])
        assert torch.allclose(found.scales[ours], scales[ours], rtol=1e-10)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [16, 30, None])
def test_activation_order_is_that_of_a_slow_reference(bits: int, group: int | None) -> None:
    weight, hessian = layer(40, 70, 200)
    grid = IntegerGrid(bits, group)
    result = gptq(weight, hessian, [grid], act_order=True, block=32)
    codes, scales = slow_gptq(weight, hessian, grid, 0.01, "search", act_order=True)
    same = (result.candidates[0].codes() == codes).all(dim=1)
    # Ranges are those of plain rounding, so a row either is GPTQ's or was kept from rounding.
    assert same.sum() >= 40 - int(result.nearest_rows[0])
    assert same.sum() > 20
    assert torch.allclose(result.candidates[0].scales, scales, rtol=1e-12)


def test_diagonal_hessian_gives_rounding_to_nearest() -> None:
    weight, _ = layer(20, 48, 10)
    hessian = torch.diag(
        0.1 + torch.rand(48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    importance = hessian.diagonal() + 0.01 * hessian.diagonal().mean()
    grids = [IntegerGrid(2, 16), IntegerGrid(3, None, True), IntegerGrid(8, 20)]
    for act_order in (False, True):
        found = gptq(weight, hessian, grids, act_order=act_order).candidates
        for ours, theirs in zip(found, round_to_nearest(weight, grids, importance=importance), strict=True):
            assert torch.equal(ours.codes(), theirs.codes())
            assert torch.allclose(ours.scales, theirs.scales, rtol=1e-12)


@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 40),
    tokens=st.sampled_from([1, 3, 30, 300]),
    bits=st.integers(1, 8),
    group=st.sampled_from([None, 1, 5, 16]),
    symmetric=st.booleans(),
    clip=st.sampled_from(["search", "minmax"]),
    act_order=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    damp=st.sampled_from([0.0, 1e-4, 0.01, 1.0]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=80, deadline=None)
def test_never_above_rounding_to_nearest(
    rows: int, cols: int, tokens: int, bits: int, group: int | None, symmetric: bool, clip: str, act_order: bool,
    dtype: torch.dtype, damp: float, seed: int,
) -> None:  # fmt: skip
    weight, hessian = layer(rows, cols, tokens, seed)
    weight = weight.to(dtype)
    grid = IntegerGrid(bits, group, symmetric)
    result = gptq(weight, hessian, [grid], damp=damp, act_order=act_order, clip=clip)  # type: ignore[arg-type]
    importance = hessian.diagonal() + result.damp * hessian.diagonal().mean()
    nearest = round_to_nearest(weight, [grid], importance=importance, clip=clip)[0]  # type: ignore[arg-type]
    ours, theirs = row_errors(weight, result.candidates[0], hessian), row_errors(weight, nearest, hessian)
    noise = 1e-12 * (weight.double().square().sum(dim=1) * hessian.diagonal().sum())
    assert (ours <= theirs * (1 + 1e-9) + noise).all()
    assert torch.allclose(result.errors[0], ours.sum(), rtol=1e-3, atol=float(noise.sum()) * 1e3)
    assert torch.allclose(result.nearest_errors[0], theirs.sum(), rtol=1e-3, atol=float(noise.sum()) * 1e3)


def test_error_is_well_below_rounding_and_reported_exactly() -> None:
    weight, hessian = layer(64, 96, 400)
    weight = weight.float()
    grids = [IntegerGrid(bits, 32, symmetric) for bits in range(2, 9) for symmetric in (True, False)]
    result = gptq(weight, hessian.float(), grids, storage_dtype=torch.bfloat16)
    total = ((weight.double() @ hessian) * weight.double()).sum()
    for k, packed in enumerate(result.candidates):
        exact = row_errors(weight, packed, hessian).sum()
        assert packed.scales.dtype == torch.bfloat16
        assert torch.allclose(result.errors[k], exact, rtol=1e-5)
        assert torch.allclose(result.relative_errors[k], exact / total, rtol=1e-5)
    assert (result.errors < 0.75 * result.nearest_errors).all()
    assert (result.errors[2:] < result.errors[:-2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act_order", [False, True])
def test_all_widths_at_once_are_the_single_ones_bit_for_bit(dtype: torch.dtype, act_order: bool) -> None:
    weight, hessian = layer(150, 200, 500)
    weight = weight.to(dtype)
    grids = [IntegerGrid(bits, 64) for bits in range(2, 9)] + [
        IntegerGrid(3, None, True),
        IntegerGrid(4, 48, True),
    ]
    together = gptq(weight, hessian, grids, act_order=act_order)
    for k, (grid, shared) in enumerate(zip(grids, together.candidates, strict=True)):
        single = gptq(weight, hessian, [grid], act_order=act_order)
        alone = single.candidates[0]
        assert torch.equal(alone.packed, shared.packed)
        assert torch.equal(alone.scales, shared.scales)
        assert (alone.zeros is None) == (shared.zeros is None) == grid.symmetric
        assert alone.zeros is None or torch.equal(alone.zeros, shared.zeros)
        assert single.errors[0] == together.errors[k]


def test_result_does_not_depend_on_the_number_of_threads_within_a_block() -> None:
    weight, hessian = layer(130, 64, 300)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gptq(weight, hessian, [IntegerGrid(3, 16), IntegerGrid(4, 16)]).candidates)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a.packed, b.packed) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("act_order", [False, True])
def test_portable_columns_agree_with_compiled(act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = layer(30, 90, 300)
    grids = [IntegerGrid(2, 32), IntegerGrid(3, None, True), IntegerGrid(5, 16, True), IntegerGrid(8, 7)]
    compiled = gptq(weight, hessian, grids, act_order=act_order, block=32)
    for module in (gptq_module, rounding_module):
        monkeypatch.setattr(module, "on_compiled_path", lambda tensor: False)
    portable = gptq(weight, hessian, grids, act_order=act_order, block=32)
    for a, b in zip(compiled.candidates, portable.candidates, strict=True):
        assert torch.equal(a.codes(), b.codes())
        assert torch.allclose(a.scales, b.scales, rtol=1e-10)
    assert torch.allclose(compiled.errors, portable.errors)


def test_dead_columns_are_rounded_and_disturb_nothing() -> None:
    weight, hessian = layer(20, 40, 300)
    dead = torch.tensor([0, 7, 39])
    alive = torch.tensor([j for j in range(40) if j not in dead.tolist()])
    hessian[dead] = 0
    hessian[:, dead] = 0
    for act_order in (False, True):
        packed = gptq(weight, hessian, [IntegerGrid(4, 8)], act_order=act_order).candidates[0]
        decoded = packed.dequantize()
        scale = packed.scales.repeat_interleave(8, dim=1)
        low = (0 - packed.zeros.double().repeat_interleave(8, dim=1)) * scale
        high = low + 15 * scale
        clipped = torch.minimum(torch.maximum(weight, low), high)
        assert ((decoded - clipped).abs() <= scale / 2 * (1 + 1e-9))[:, dead].all()
    per_row = [IntegerGrid(4, 1)]
    whole = gptq(weight, hessian, per_row).candidates[0]
    part = gptq(weight[:, alive], hessian[alive][:, alive], per_row, damp=0.01 * 37 / 40).candidates[0]
    assert torch.equal(whole.codes()[:, alive], part.codes())
    nothing = gptq(weight, torch.zeros(40, 40), [IntegerGrid(3, 8)])
    assert torch.equal(
        nothing.candidates[0].codes(), round_to_nearest(weight, [IntegerGrid(3, 8)])[0].codes()
    )
    assert nothing.errors[0] == 0


def test_singular_hessian_is_damped_until_it_has_a_factor(caplog: pytest.LogCaptureFixture) -> None:
    weight, hessian = layer(10, 30, 2)
    with caplog.at_level(logging.WARNING, logger="rco.formats.gptq"):
        result = gptq(weight, hessian, [IntegerGrid(3)], damp=0.0)
    assert result.damp > 0
    assert "dampening raised" in caplog.text
    assert torch.isfinite(result.candidates[0].dequantize()).all()


@given(cols=st.integers(1, 300), group=st.integers(1, 320), block=st.integers(1, 140))
def test_blocks_cover_all_columns_and_cut_no_group_that_starts_inside(
    cols: int, group: int, block: int
) -> None:
    edges = block_edges(cols, group, block)
    assert edges[0] == 0
    assert edges[-1] == cols
    for start, end in itertools.pairwise(edges):
        assert 0 < end - start <= block
        for first in range(0, cols, group):
            assert not (start < first < end) or min(first + group, cols) <= end


def test_bad_input_is_named() -> None:
    weight, hessian = layer(4, 6, 20)
    with pytest.raises(ValueError, match=r"\(6, 6\) Hessian"):
        gptq(weight, hessian[:5, :5], [IntegerGrid(2)])
    with pytest.raises(ValueError, match="Hessian has NaN"):
        gptq(weight, hessian * torch.nan, [IntegerGrid(2)])
    with pytest.raises(ValueError, match="negative diagonal"):
        gptq(weight, -hessian, [IntegerGrid(2)])
    with pytest.raises(ValueError, match="must not be negative"):
        gptq(weight, hessian, [IntegerGrid(2)], damp=-1)
    with pytest.raises(ValueError, match="no Cholesky factor"):
        gptq(weight, torch.ones(6, 6) - 1e12 * (1 - torch.eye(6)), [IntegerGrid(2)])
    weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="row 0, column 0"):
        gptq(weight, hessian, [IntegerGrid(2)])


def test_hessian_accumulator_counts_masked_tokens_once() -> None:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 10, 6, generator=rng)
    mask = torch.rand(4, 10, generator=rng) < 0.6
    chosen = inputs[mask].double()
    expected = 2 * chosen.T @ chosen / len(chosen)
    whole, left, right = (HessianAccumulator(6, dtype=torch.float64) for _ in range(3))
    whole.add(inputs, mask)
    left.add(inputs[:1], mask[:1])
    right.add(inputs[1:], mask[1:].int())
    left.merge(right)
    assert whole.tokens == left.tokens == int(mask.sum())
    assert torch.allclose(whole.matrix(), expected, rtol=1e-12)
    assert torch.allclose(left.matrix(), expected, rtol=1e-12)
    unmasked = HessianAccumulator(6)
    unmasked.add(inputs.bfloat16())
    assert unmasked.matrix().dtype == torch.float32
    assert unmasked.tokens == 40

    with pytest.raises(ValueError, match="No token"):
        HessianAccumulator(6).matrix()
    with pytest.raises(ValueError, match="6 features"):
        whole.add(inputs[..., :5])
    with pytest.raises(ValueError, match="one flag per token"):
        whole.add(inputs, mask[:, :9])
    with pytest.raises(ValueError, match="Cannot merge"):
        whole.merge(HessianAccumulator(5))
    whole.add(inputs * torch.inf)
    with pytest.raises(ValueError, match="NaN or infinite"):
        whole.matrix()


@pytest.mark.parametrize("kind", [HessianAccumulator, InputPeak])
def test_the_largest_input(kind):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 7, 6, generator=generator) * scale for scale in (1.0, 40.0, 3.0)]
    one, two = kind(6), kind(6)
    assert one.peak == 0
    for batch in batches[:2]:
        one.add(batch)
    two.add(batches[2])
    two.add(torch.empty(0, 6))
    two.merge(one)
    assert two.tokens == 3 * 14
    assert two.peak == float(torch.stack(batches).abs().max()) == one.peak
    for bad in (torch.nan, -torch.inf):
        spoilt = kind(6)
        spoilt.add(torch.tensor([[1.0, bad, 2.0, 0, 0, 0]]))
        with pytest.raises(ValueError, match="NaN or infinite"):
            _ = spoilt.peak
