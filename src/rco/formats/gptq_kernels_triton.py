"""GPU kernels for making candidates: range search, the columns of GPTQ, and coordinate descent on codes.

Each is the loop of the same name in :mod:`rco.formats.rounding_kernels_cpu` or :mod:`rco.formats.gptq_kernels_cpu`,
with rows in parallel. Columns depend on each other and are processed in turn inside one kernel, so that a block of
columns takes one launch; as separate operations every column would take a dozen.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rco.formats.launching import launching_at
from rco.formats.rounding_kernels_cpu import NOISE_FLOOR, NOISE_MARGIN, OFF_TIE

__all__ = ["WIDEST_GROUP", "columns", "descend", "fit"]

WIDEST_GROUP = 16384
"""Columns of the widest group that one program can hold in registers."""

_STORAGE: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
_ROWS = 16


@triton.jit
def _rint(x):
    """To the nearest integer, ties to even, for numbers far below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _stored(scale, lowest, highest, STORAGE: tl.constexpr):
    size = tl.minimum(tl.maximum(tl.abs(scale), lowest), highest).to(STORAGE).to(tl.float32)
    return tl.where(scale < 0, -size, size)


@triton.jit
def _steps(values, scale, low, high):
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scaled = values * inverse[:, None]
    return _rint(tl.minimum(tl.maximum(scaled, low[:, None]), high[:, None]))


@triton.jit
def _error(values, importance, scale, low, high):
    miss = _steps(values, scale, low, high) * scale[:, None] - values
    return tl.sum(importance * miss * miss, axis=1)


@triton.jit
def _fit_kernel(
    weight, importance, scales, zeros,
    rows, weight_stride, first, last, group, scale_stride, first_group,
    bits, lowest, highest, trials, shrink_by, refinements,
    SYMMETRIC: tl.constexpr, SIGNED: tl.constexpr, STORAGE: tl.constexpr,
    MARGIN: tl.constexpr, FLOOR: tl.constexpr, BEYOND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.program_id(1)
    begin = first + index * group
    column = begin + tl.arange(0, COLUMNS)
    inside = (column < begin + group) & (column < last)
    live = row < rows
    place = row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    values = tl.load(weight + place, mask=live[:, None] & inside[None, :], other=0.0)
    share = tl.load(importance + column, mask=inside, other=0.0)[None, :]

    top = (1 << bits) - 1.0
    half = (1 << (bits - 1)) * 1.0
    most = tl.maximum(tl.max(values, axis=1), 0.0)
    least = tl.minimum(tl.min(values, axis=1), 0.0)
    size = tl.maximum(most, -least)
    whole = most - least
    if SYMMETRIC:
        zero = tl.full((ROWS,), 0.0, tl.float32) + half
        scale = _stored(tl.div_rn(size * BEYOND, zero - 0.5), lowest, highest, STORAGE)
    else:
        scale = _stored(tl.div_rn(whole, tl.full((ROWS,), 0.0, tl.float32) + top), lowest, highest, STORAGE)
        zero = _rint(tl.minimum(tl.maximum(tl.div_rn(-least, scale), 0.0), top))
    smallest = _error(values, share, scale, -zero, top - zero)
    # Rounding noise must not decide between trials that are equally good or exact.
    floor = tl.sum(share * values * values, axis=1) * FLOOR
    used = size > 0
    for i in range(trials):
        shrink = 1.0 - i * shrink_by
        if SYMMETRIC:
            trial = size * shrink / half  # a division by a power of two
            if SIGNED:
                trial = tl.where(most > -least, -trial, trial)
            trial = _stored(trial, lowest, highest, STORAGE)
            error = _error(values, share, trial, -zero, top - zero)
            better = used & (error < smallest * (1 - MARGIN) - floor)
            scale = tl.where(better, trial, scale)
            smallest = tl.where(better, error, smallest)
            if SIGNED:
                error = _error(values, share, -trial, -zero, top - zero)
                better = used & (error < smallest * (1 - MARGIN) - floor)
                scale = tl.where(better, -trial, scale)
                smallest = tl.where(better, error, smallest)
        else:
            ends = tl.full((ROWS,), 0.0, tl.float32) + top
            trial = _stored(tl.div_rn(shrink * whole, ends), lowest, highest, STORAGE)
            middle = _rint(tl.minimum(tl.maximum(tl.div_rn(-shrink * least, trial), 0.0), top))
            for shift in tl.static_range(3):
                at = middle + (shift - 1.0)
                error = _error(values, share, trial, -at, top - at)
                better = used & (at >= 0) & (at <= top) & (error < smallest * (1 - MARGIN) - floor)
                scale = tl.where(better, trial, scale)
                zero = tl.where(better, at, zero)
                smallest = tl.where(better, error, smallest)
    for _ in range(refinements):
        steps = _steps(values, scale, -zero, top - zero)
        product = tl.sum(share * steps * values, axis=1)
        square = tl.sum(share * steps * steps, axis=1)
        trial = tl.where(square > 0, tl.div_rn(product, tl.where(square > 0, square, 1.0)), scale)
        trial = _stored(trial, lowest, highest, STORAGE)
        error = _error(values, share, trial, -zero, top - zero)
        better = used & (error < smallest * (1 - MARGIN) - floor)
        scale = tl.where(better, trial, scale)
        smallest = tl.where(better, error, smallest)
    target = row.to(tl.int64) * scale_stride + first_group + index
    tl.store(scales + target, scale, mask=live)
    tl.store(zeros + target, zero.to(tl.uint8), mask=live)


@triton.jit
def _columns_kernel(
    weight, factor, groups, scales, zeros, codes, errors, losses,
    rows, start, width, weight_stride, scale_stride, bits,
    STORAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = row < rows
    both = live[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * weight_stride + start + column[None, :]
    tile = tl.load(weight + place, mask=both, other=0.0)
    misses = tl.zeros((ROWS, COLUMNS), tl.float32)
    lost = tl.zeros((ROWS,), tl.float32)
    top = (1 << bits) - 1.0
    for j in range(width):
        group = tl.load(groups + j)
        scale = tl.load(scales + row.to(tl.int64) * scale_stride + group, mask=live, other=1.0)
        zero = tl.load(zeros + row.to(tl.int64) * scale_stride + group, mask=live, other=0).to(tl.float32)
        here = (column == j)[None, :]
        value = tl.sum(tl.where(here, tile, 0.0), axis=1)
        step = _rint(tl.minimum(tl.maximum(tl.div_rn(value, scale), -zero), top - zero))
        # The error is that of the decoded value, so later columns compensate for its rounding too.
        decoded = (step * scale).to(STORAGE).to(tl.float32)
        pivot = tl.load(factor + j * width + j)
        miss = tl.div_rn(value - decoded, tl.zeros((ROWS,), tl.float32) + pivot)
        lost += miss * miss
        later = (column > j) & (column < width)
        share = tl.load(factor + j * width + column, mask=later, other=0.0)
        tile = tl.where(here, (step + zero)[:, None], tile - miss[:, None] * share[None, :])
        misses = tl.where(here, miss[:, None], misses)
    tl.store(codes + place, tile.to(tl.uint8), mask=both)
    out = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(errors + out, misses, mask=both)
    before = tl.load(losses + row, mask=live, other=0.0)
    tl.store(losses + row, before + lost.to(tl.float64), mask=live)


@triton.jit
def _descend_kernel(
    residual, hessian, scales, zeros, codes, changes, losses,
    rows, start, width, stride, scale_stride, group, bits,
    STORAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = row < rows
    both = live[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * stride + start + column[None, :]
    tile = tl.load(residual + place, mask=both, other=0.0)
    present = tl.load(codes + place, mask=both, other=0).to(tl.float32)
    moves = tl.zeros((ROWS, COLUMNS), tl.float32)
    gained = tl.zeros((ROWS,), tl.float32)
    top = (1 << bits) - 1.0
    for j in range(width):
        curvature = tl.load(hessian + j * width + j)
        if curvature > 0:
            where = row.to(tl.int64) * scale_stride + (start + j) // group
            scale = tl.load(scales + where, mask=live, other=1.0)
            zero = tl.load(zeros + where, mask=live, other=0).to(tl.float32)
            here = (column == j)[None, :]
            slope = tl.sum(tl.where(here, tile, 0.0), axis=1)
            code = tl.sum(tl.where(here, present, 0.0), axis=1)
            before = ((code - zero) * scale).to(STORAGE).to(tl.float32)
            best = before + tl.div_rn(slope, tl.zeros((ROWS,), tl.float32) + curvature)
            step = _rint(tl.minimum(tl.maximum(tl.div_rn(best, scale), -zero), top - zero))
            by = (step * scale).to(STORAGE).to(tl.float32) - before
            change = by * (by * curvature - 2.0 * slope)
            better = change < 0
            by = tl.where(better, by, 0.0)
            gained += tl.where(better, change, 0.0)
            code = tl.where(better, step + zero, code)
            later = (column > j) & (column < width)
            share = tl.load(hessian + j * width + column, mask=later, other=0.0)
            tile = tile - by[:, None] * share[None, :]
            moves = tl.where(here, by[:, None], moves)
            present = tl.where(here, code[:, None], present)
    tl.store(codes + place, present.to(tl.uint8), mask=both)
    out = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(changes + out, moves, mask=both)
    earlier = tl.load(losses + row, mask=live, other=0.0)
    tl.store(losses + row, earlier + gained.to(tl.float64), mask=live)


def fit(
    weight: Tensor,
    importance: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    span: tuple[int, int],
    group: int,
    first_group: int,
    bits: int,
    symmetric: bool,
    storage: torch.dtype,
    limits: tuple[float, float],
    search: tuple[float, float, float, float],
) -> None:
    """Fit the groups of the columns ``span`` of every row; writes their columns of ``scales`` and ``zeros``.

    Args:
        weight: Float32 (rows, in) with contiguous rows.
        importance: Weight of each column's squared error, (in,).
        scales: Float32 (rows, groups).
        zeros: Uint8 (rows, groups).
        span: First column and end.
        group: Columns per group, counted from the first column of the span.
        first_group: Column of ``scales`` that the first group goes to.
        bits: Width of a code.
        symmetric: Whether the zero point is fixed.
        storage: Type that scales are rounded to.
        limits: Smallest and largest scale.
        search: (steps, smallest shrink, refinements, signed).
    """
    rows, (first, last) = weight.shape[0], span
    steps, smallest, refinements, signed = int(search[0]), search[1], int(search[2]), bool(search[3])
    width = triton.next_power_of_2(max(min(group, last - first), 16))
    tile_rows = max(1, min(_ROWS, 4096 // width))
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(last - first, group))
    with launching_at(weight):
        _fit_kernel[grid](
            weight, importance, scales, zeros,
            rows, weight.stride(0), first, last, group, scales.stride(0), first_group,
            bits, limits[0], limits[1], steps, (1.0 - smallest) / max(steps - 1, 1), refinements,
            SYMMETRIC=symmetric, SIGNED=signed, STORAGE=_STORAGE[storage],
            MARGIN=NOISE_MARGIN, FLOOR=NOISE_FLOOR, BEYOND=OFF_TIE,
            ROWS=tile_rows, COLUMNS=width, num_warps=16 if width > 4096 else 4, enable_fp_fusion=False,
        )  # fmt: skip


def columns(
    weight: Tensor,
    factor: Tensor,
    start: int,
    groups: Tensor,
    bits: int,
    storage: torch.dtype,
    scales: Tensor,
    zeros: Tensor,
    codes: Tensor,
    losses: Tensor,
) -> Tensor:
    """Quantize the columns of one block in turn on given ranges; returns the errors (rows, width).

    Args:
        weight: Current weights, float32 (rows, in).
        factor: The block of the upper factor of the inverse Hessian, (width, width), contiguous.
        start: First column of the block.
        groups: Group of each column of the block, (width,).
        bits: Width of a code.
        storage: Type that decoded values are rounded to.
        scales: (rows, groups).
        zeros: (rows, groups).
        codes: (rows, in), written; strides of the weight.
        losses: Float64 (rows,), added to: squared error in the norm of the damped Hessian.
    """
    rows, width = weight.shape[0], factor.shape[0]
    errors = torch.empty(rows, width, dtype=torch.float32, device=weight.device)
    with launching_at(weight):
        _columns_kernel[(triton.cdiv(rows, _ROWS),)](
            weight, factor, groups, scales, zeros, codes, errors, losses,
            rows, start, width, weight.stride(0), scales.stride(0), bits,
            STORAGE=_STORAGE[storage], ROWS=_ROWS, COLUMNS=triton.next_power_of_2(max(width, 16)),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return errors


def descend(
    residual: Tensor,
    hessian: Tensor,
    start: int,
    group: int,
    bits: int,
    storage: torch.dtype,
    scales: Tensor,
    zeros: Tensor,
    codes: Tensor,
    losses: Tensor,
) -> Tensor:
    """Move each code of a block of columns to the value of least error; returns the changes of the values.

    Args:
        residual: ``(W - Q) H`` of the damped Hessian, float32 (rows, in), as it was before the block.
        hessian: The block of the damped Hessian, (width, width), contiguous.
        start: First column of the block.
        group: Columns per group.
        bits: Width of a code.
        storage: Type that decoded values are rounded to.
        scales: (rows, groups).
        zeros: (rows, groups).
        codes: (rows, in), updated; strides of the residual.
        losses: Float64 (rows,), added to: the change of the squared error, never positive.
    """
    rows, width = residual.shape[0], hessian.shape[0]
    changes = torch.empty(rows, width, dtype=torch.float32, device=residual.device)
    with launching_at(residual):
        _descend_kernel[(triton.cdiv(rows, _ROWS),)](
            residual, hessian, scales, zeros, codes, changes, losses,
            rows, start, width, residual.stride(0), scales.stride(0), group, bits,
            STORAGE=_STORAGE[storage], ROWS=_ROWS, COLUMNS=triton.next_power_of_2(max(width, 16)),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return changes
