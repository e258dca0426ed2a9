"""GPU kernels over the columns of a block, on a table of levels: GPTQ, and coordinate descent.

Each is the loop of the same name in :mod:`rco.formats.floating_kernels_cpu`, with rows in parallel. Columns depend
on each other and are processed in turn inside one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rco.formats.launching import launching_at

__all__ = ["descend_levels", "gptq_levels"]

_ROWS = 16


@triton.jit
def _place(value, between, count, STEPS: tl.constexpr):
    """Indices of the nearest levels, given the midpoints between neighbours."""
    low = tl.zeros(value.shape, tl.int32)
    high = low + count
    for _ in tl.static_range(STEPS):
        open = low < high
        middle = (low + high) // 2
        above = value > tl.load(between + middle, mask=open, other=0.0)
        low = tl.where(open & above, middle + 1, low)
        high = tl.where(open & (above == 0), middle, high)
    return low


@triton.jit
def _gptq_kernel(
    values, factor, scales, levels, between, places, errors,
    rows, start, width, stride, scale_stride, group, count,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = row < rows
    both = live[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * stride + start + column[None, :]
    tile = tl.load(values + place, mask=both, other=0.0)
    misses = tl.zeros((ROWS, COLUMNS), tl.float32)
    taken = tl.zeros((ROWS, COLUMNS), tl.int32)
    for j in range(width):
        scale = tl.load(scales + row.to(tl.int64) * scale_stride + (start + j) // group, mask=live, other=1.0)
        here = (column == j)[None, :]
        value = tl.sum(tl.where(here, tile, 0.0), axis=1)
        index = _place(tl.div_rn(value, scale), between, count, STEPS)
        pivot = tl.zeros((ROWS,), tl.float32) + tl.load(factor + j * width + j)
        miss = tl.div_rn(value - tl.load(levels + index) * scale, pivot)
        later = (column > j) & (column < width)
        share = tl.load(factor + j * width + column, mask=later, other=0.0)
        tile = tile - miss[:, None] * share[None, :]
        misses = tl.where(here, miss[:, None], misses)
        taken = tl.where(here, index[:, None], taken)
    tl.store(places + place, taken.to(tl.int16), mask=both)
    tl.store(errors + row.to(tl.int64)[:, None] * width + column[None, :], misses, mask=both)


@triton.jit
def _descend_kernel(
    residual, hessian, scales, levels, between, places, decoded, moved,
    rows, start, width, stride, scale_stride, group, count,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = row < rows
    both = live[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * stride + start + column[None, :]
    tile = tl.load(residual + row.to(tl.int64)[:, None] * width + column[None, :], mask=both, other=0.0)
    present = tl.load(places + place, mask=both, other=0).to(tl.int32)
    weight = tl.load(decoded + place, mask=both, other=0.0)
    moves = tl.zeros((ROWS,), tl.int32)
    for j in range(width):
        curvature = tl.load(hessian + j * width + j)
        if curvature > 0:
            where = row.to(tl.int64) * scale_stride + (start + j) // group
            scale = tl.load(scales + where, mask=live, other=1.0)
            here = (column == j)[None, :]
            slope = tl.sum(tl.where(here, tile, 0.0), axis=1)
            old = tl.sum(tl.where(here, weight, 0.0), axis=1)
            before = tl.sum(tl.where(here, present, 0), axis=1)
            best = old + tl.div_rn(slope, tl.zeros((ROWS,), tl.float32) + curvature)
            index = _place(tl.div_rn(best, scale), between, count, STEPS)
            changed = live & (index != before)
            new = tl.where(changed, tl.load(levels + index) * scale, old)
            moves += changed.to(tl.int32)
            later = (column > j) & (column < width)
            share = tl.load(hessian + j * width + column, mask=later, other=0.0)
            tile = tile - (new - old)[:, None] * share[None, :]
            weight = tl.where(here, new[:, None], weight)
            present = tl.where(here, index[:, None], present)
    tl.store(places + place, present.to(tl.int16), mask=both)
    tl.store(decoded + place, weight, mask=both)
    tl.atomic_add(moved, tl.sum(moves, axis=0).to(tl.int64))


def gptq_levels(
    values: Tensor,
    factor: Tensor,
    scales: Tensor,
    group: int,
    start: int,
    levels: Tensor,
    between: Tensor,
    places: Tensor,
    errors: Tensor,
) -> None:
    """Round the columns of a block in turn, passing each column's error on to those after it.

    Args:
        values: Current weights, float32 (rows, in), contiguous; only the block is read, and it is not changed.
        factor: The block of the upper factor of the inverse Hessian, (width, width), contiguous.
        scales: (rows, groups), contiguous.
        group: Columns per group.
        start: First column of the block.
        levels: Levels in ascending order.
        between: Midpoints of neighbouring levels.
        places: Int16 (rows, in), written: index of every level.
        errors: (rows, width), written: corrections for the columns after the block.
    """
    rows, width = errors.shape
    with launching_at(values):
        _gptq_kernel[(triton.cdiv(rows, _ROWS),)](
            values, factor, scales, levels, between, places, errors,
            rows, start, width, values.stride(0), scales.stride(0), group, len(between),
            STEPS=len(between).bit_length(), ROWS=_ROWS, COLUMNS=triton.next_power_of_2(max(width, 16)),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def descend_levels(
    residual: Tensor,
    hessian: Tensor,
    scales: Tensor,
    group: int,
    start: int,
    levels: Tensor,
    between: Tensor,
    places: Tensor,
    decoded: Tensor,
    moved: Tensor,
) -> None:
    """Move each element of a block of columns to the level of least error, all others fixed.

    Args:
        residual: ``(W - Q) H`` of the damped Hessian, float32 (rows, width), contiguous.
        hessian: The block of the damped Hessian, (width, width), contiguous.
        scales: (rows, groups), contiguous.
        group: Columns per group.
        start: First column of the block.
        levels: Levels in ascending order.
        between: Midpoints of neighbouring levels.
        places: Int16 (rows, in), updated.
        decoded: (rows, in), updated: the decoded weight Q.
        moved: Int64 (), added to: number of elements that moved.
    """
    rows, width = residual.shape
    with launching_at(residual):
        _descend_kernel[(triton.cdiv(rows, _ROWS),)](
            residual, hessian, scales, levels, between, places, decoded, moved,
            rows, start, width, decoded.stride(0), scales.stride(0), group, len(between),
            STEPS=len(between).bit_length(), ROWS=_ROWS, COLUMNS=triton.next_power_of_2(max(width, 16)),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
