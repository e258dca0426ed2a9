"""Compiled CPU loops that fit quantization grids and run the columns of GPTQ.

Arithmetic is in the type of the weights given, float32 or float64. Scales are rounded to the type they will be
stored in before any code is computed from them, so that what is measured here is what a checkpoint decodes to.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from rco.compressors.cpu_kernels import REASSOCIATE, as_bfloat16, as_half

__all__ = [
    "NOISE_FLOOR",
    "NOISE_MARGIN",
    "OFF_TIE",
    "STORE_BFLOAT16",
    "STORE_DOUBLE",
    "STORE_FLOAT",
    "STORE_HALF",
    "TILE",
    "descend_columns",
    "differences",
    "fit_rows",
    "gptq_columns",
    "quantize_rows",
]

NOISE_MARGIN, NOISE_FLOOR = 1e-5, 1e-10
"""A trial must lower the error by this part of it, and by this part of the squared weights, to be taken."""

OFF_TIE = 1 + 2.0**-16
"""The extremes of a symmetric group reach half a step beyond the outermost level it shares; this keeps them from
lying exactly between two codes, where rounding noise would choose."""

STORE_DOUBLE, STORE_BFLOAT16, STORE_HALF, STORE_FLOAT = 0, 1, 2, 3

TILE = 64
"""Rows that the column loop carries side by side: whole vectors, and a block of columns fits L2."""


@numba.njit(nogil=True)
def _stored(scale: Any, storage: int, limits: Any) -> Any:
    """The nearest scale that the storage type can hold and divide by."""
    size = min(max(abs(scale), limits[0]), limits[1])
    if storage == STORE_BFLOAT16:
        size = as_bfloat16(size)
    elif storage == STORE_HALF:
        size = as_half(size)
    elif storage == STORE_FLOAT:
        size = np.float32(size)
    return -size if scale < 0 else size


@numba.njit(nogil=True, fastmath=REASSOCIATE)
def _error(values: Any, importance: Any, scale: Any, low: Any, high: Any) -> Any:
    number = values.dtype.type
    inverse = number(1) / scale
    total = number(0)
    for j in range(values.shape[0]):
        step = np.rint(min(max(values[j] * inverse, low), high))
        miss = step * scale - values[j]
        total += importance[j] * miss * miss
    return total


@numba.njit(nogil=True, fastmath=REASSOCIATE)
def _least_squares_scale(values: Any, importance: Any, scale: Any, low: Any, high: Any) -> Any:
    """The best scale for the codes that ``scale`` gives."""
    number = values.dtype.type
    inverse = number(1) / scale
    product, square = number(0), number(0)
    for j in range(values.shape[0]):
        step = np.rint(min(max(values[j] * inverse, low), high))
        product += importance[j] * step * values[j]
        square += importance[j] * step * step
    return product / square if square > 0 else scale


@numba.njit(nogil=True, fastmath=REASSOCIATE | {"nnan", "ninf"})
def _extremes(values: Any) -> Any:
    number = values.dtype.type
    most, least = number(0), number(0)
    for j in range(values.shape[0]):
        most = max(most, values[j])
        least = min(least, values[j])
    return most, least


@numba.njit(nogil=True, fastmath=REASSOCIATE)
def _square_sum(values: Any, importance: Any) -> Any:
    total = values.dtype.type(0)
    for j in range(values.shape[0]):
        total += importance[j] * values[j] * values[j]
    return total


@numba.njit(nogil=True)
def _fit(
    values: Any, importance: Any, bits: int, symmetric: bool, storage: int, limits: Any, search: Any
) -> Any:
    """Scale and zero point of one group; ``search`` is (steps, smallest shrink, refinements, signed)."""
    number = values.dtype.type
    top = number((1 << bits) - 1)
    most, least = _extremes(values)
    steps, refinements = int(search[0]), int(search[2])
    size = max(most, -least)
    half = number(1 << (bits - 1))
    if symmetric:
        zero = half
        scale = _stored(size * number(OFF_TIE) / (half - number(0.5)), storage, limits)
    else:
        scale = _stored((most - least) / top, storage, limits)
        zero = min(max(np.rint(-least / scale), number(0)), top)
    if steps == 0 or size == 0:
        return scale, zero
    smallest = _error(values, importance, scale, -zero, top - zero)
    # Rounding noise must not decide between trials that are equally good, or exact.
    floor = _square_sum(values, importance) * number(NOISE_FLOOR)
    keep = number(1 - NOISE_MARGIN)
    # A symmetric grid has one level more below zero than above; the sign of its scale says which way that points.
    outward = number(-1) if symmetric and search[3] != 0 and most > -least else number(1)
    for i in range(steps):
        shrink = number(1) - number(i) * number(1 - search[1]) / number(max(steps - 1, 1))
        if symmetric:
            trial = _stored(outward * shrink * size / half, storage, limits)
            for _ in range(2 if search[3] != 0 else 1):
                error = _error(values, importance, trial, -half, half - number(1))
                if error < smallest * keep - floor:
                    scale, smallest = trial, error
                trial = -trial
        else:
            trial = _stored(shrink * (most - least) / top, storage, limits)
            middle = min(max(np.rint(-shrink * least / trial), number(0)), top)
            for shift in range(-1, 2):
                at = middle + number(shift)
                if at >= 0 and at <= top:
                    error = _error(values, importance, trial, -at, top - at)
                    if error < smallest * keep - floor:
                        scale, zero, smallest = trial, at, error
    for _ in range(refinements):
        trial = _least_squares_scale(values, importance, scale, -zero, top - zero)
        trial = _stored(trial, storage, limits)
        error = _error(values, importance, trial, -zero, top - zero)
        if not error < smallest * keep - floor:
            break
        scale, smallest = trial, error
    return scale, zero


@numba.njit(nogil=True, cache=True)
def fit_rows(
    weight: Any,
    importance: Any,
    group: int,
    bits: int,
    symmetric: bool,
    storage: int,
    limits: Any,
    search: Any,
    scales: Any,
    zeros: Any,
) -> None:
    """Fit the scale and zero point of every group of every row of ``weight``."""
    for row in range(weight.shape[0]):
        for g in range(scales.shape[1]):
            scale, zero = _fit(
                weight[row, g * group : (g + 1) * group],
                importance[g * group : (g + 1) * group],
                bits, symmetric, storage, limits, search,
            )  # fmt: skip
            scales[row, g] = scale
            zeros[row, g] = np.uint8(zero)


@numba.njit(nogil=True, cache=True)
def quantize_rows(weight: Any, scales: Any, zeros: Any, group: int, bits: int, codes: Any) -> None:
    """The nearest code of every weight on fitted grids."""
    number = weight.dtype.type
    top = number((1 << bits) - 1)
    for row in range(weight.shape[0]):
        for g in range(scales.shape[1]):
            source = weight[row, g * group : (g + 1) * group]
            target = codes[row, g * group : (g + 1) * group]
            scale, zero = number(scales[row, g]), number(zeros[row, g])
            for j in range(target.shape[0]):
                step = np.rint(min(max(source[j] / scale, -zero), top - zero))
                target[j] = np.uint8(step + zero)


@numba.njit(nogil=True)
def _round_to_storage(values: Any, storage: int) -> None:
    if storage == STORE_BFLOAT16:
        for j in range(values.shape[0]):
            values[j] = as_bfloat16(values[j])
    elif storage == STORE_HALF:
        for j in range(values.shape[0]):
            values[j] = as_half(values[j])
    elif storage == STORE_FLOAT:
        for j in range(values.shape[0]):
            values[j] = np.float32(values[j])


@numba.njit(nogil=True, cache=True)
def differences(
    weight: Any, codes: Any, scales: Any, zeros: Any, group: int, storage: int, result: Any, sizes: Any
) -> None:
    """``result = weight - decoded`` and the squared length of its rows."""
    number = weight.dtype.type
    ones = np.ones(group, dtype=weight.dtype)
    for row in range(weight.shape[0]):
        size = 0.0
        for g in range(scales.shape[1]):
            source = weight[row, g * group : (g + 1) * group]
            code = codes[row, g * group : (g + 1) * group]
            target = result[row, g * group : (g + 1) * group]
            scale, zero = scales[row, g], number(zeros[row, g])
            for j in range(target.shape[0]):
                target[j] = (number(code[j]) - zero) * scale
            _round_to_storage(target, storage)
            for j in range(target.shape[0]):
                target[j] = source[j] - target[j]
            size += _square_sum(target, ones[: target.shape[0]])
        sizes[row] = size


@numba.njit(nogil=True)
def _correct(tile: Any, errors: Any, factor: Any, first: int, last: int) -> None:
    """Take what columns ``first`` to ``last`` (four, or fewer at the end) got wrong out of those after ``last``."""
    width = tile.shape[0]
    if last - first == 4:
        # Four at a time: each later column is then read and written once instead of four times.
        e0, e1, e2, e3 = errors[first], errors[first + 1], errors[first + 2], errors[first + 3]
        for i in range(last, width):
            s0, s1, s2, s3 = (
                factor[first, i],
                factor[first + 1, i],
                factor[first + 2, i],
                factor[first + 3, i],
            )
            column = tile[i]
            for r in range(TILE):
                column[r] -= (e0[r] * s0 + e1[r] * s1) + (e2[r] * s2 + e3[r] * s3)
        return
    for j in range(first, last):
        error = errors[j]
        for i in range(last, width):
            share = factor[j, i]
            column = tile[i]
            for r in range(TILE):
                column[r] -= error[r] * share


@numba.njit(nogil=True, cache=True)
def gptq_columns(
    weight: Any,
    factor: Any,
    importance: Any,
    start: int,
    group_of: Any,
    fits: Any,
    bits: int,
    symmetric: bool,
    storage: int,
    limits: Any,
    search: Any,
    scales: Any,
    zeros: Any,
    codes: Any,
    errors: Any,
    losses: Any,
) -> None:
    """Quantize the columns of one block in turn, passing each column's error on to those after it.

    Args:
        weight: Current weights (rows, in); read within the block and within groups that start in it.
        factor: The block of the upper factor U of the inverse Hessian, (width, width).
        importance: Weights of the range search, (in,).
        start: First column of the block.
        group_of: Group of each column of the block.
        fits: Per column of the block, the end of the group that is to be fitted there, or 0.
        bits: Width of a code.
        symmetric: Whether the zero point is fixed.
        storage: Which type the scales are stored in.
        limits: Smallest and largest scale, in the type of the weights.
        search: Settings of the range search.
        scales: (rows, groups), read or written.
        zeros: (rows, groups), read or written.
        codes: (rows, in), written.
        errors: (rows, width), written: what columns after the block are to be corrected by.
        losses: (rows,), added to: squared error in the norm of the damped Hessian.
    """
    number = weight.dtype.type
    rows, width = errors.shape
    top = number((1 << bits) - 1)
    tile = np.empty((width, TILE), dtype=weight.dtype)
    misses = np.zeros((width, TILE), dtype=weight.dtype)
    scale = np.ones(TILE, dtype=weight.dtype)
    zero = np.zeros(TILE, dtype=weight.dtype)
    decoded = np.zeros(TILE, dtype=weight.dtype)
    part = np.empty(TILE, dtype=weight.dtype)
    gathered = np.empty(weight.shape[1], dtype=weight.dtype)
    for first in range(0, rows, TILE):
        count = min(TILE, rows - first)
        tile[:] = 0
        for r in range(count):
            for j in range(width):
                tile[j, r] = weight[first + r, start + j]
        previous = -1
        settled = 0
        part[:] = 0
        for j in range(width):
            g = group_of[j]
            if fits[j] > 0:
                if settled < j:
                    _correct(tile, misses, factor, settled, j)
                    settled = j
                # A group that reaches past the block starts with it, where every column is up to date.
                size = fits[j] - (start + j)
                inside = min(size, width - j)
                values = gathered[:size]
                for r in range(count):
                    for i in range(inside):
                        values[i] = tile[j + i, r]
                    for i in range(inside, size):
                        values[i] = weight[first + r, start + j + i]
                    fitted, at = _fit(
                        values, importance[start + j : fits[j]], bits, symmetric, storage, limits, search
                    )
                    scales[first + r, g] = fitted
                    zeros[first + r, g] = np.uint8(at)
                previous = -1
            if g != previous:
                for r in range(count):
                    scale[r] = scales[first + r, g]
                    zero[r] = zeros[first + r, g]
                previous = g
            column, miss = tile[j], misses[j]
            for i in range(settled, j):
                share, earlier = factor[i, j], misses[i]
                for r in range(TILE):
                    column[r] -= earlier[r] * share
            for r in range(TILE):
                step = np.rint(min(max(column[r] / scale[r], -zero[r]), top - zero[r]))
                decoded[r] = step * scale[r]
                miss[r] = step + zero[r]
            # The error is that of what a checkpoint decodes to: later columns make up for its rounding too.
            _round_to_storage(decoded, storage)
            pivot = factor[j, j]
            for r in range(TILE):
                code = miss[r]
                miss[r] = (column[r] - decoded[r]) / pivot
                part[r] += miss[r] * miss[r]
                column[r] = code
            if j + 1 - settled == 4:
                _correct(tile, misses, factor, settled, j + 1)
                settled = j + 1
        for r in range(count):
            losses[first + r] += part[r]
            for j in range(width):
                codes[first + r, start + j] = np.uint8(tile[j, r])
                errors[first + r, j] = misses[j, r]


@numba.njit(nogil=True, cache=True)
def descend_columns(
    residual: Any,
    hessian: Any,
    start: int,
    group: int,
    bits: int,
    storage: int,
    scales: Any,
    zeros: Any,
    codes: Any,
    changes: Any,
    losses: Any,
) -> None:
    """Move each code of a block of columns to where the error is least, all other codes as they are.

    Args:
        residual: ``(W - Q) H`` of the damped Hessian, (rows, in), as it was before the block.
        hessian: The block of the damped Hessian, (width, width).
        start: First column of the block.
        group: Columns per group.
        bits: Width of a code.
        storage: Which type the scales are stored in.
        scales: (rows, groups).
        zeros: (rows, groups).
        codes: (rows, in), updated.
        changes: (rows, width), written: by how much decoded values moved.
        losses: (rows,), added to: the change of the squared error, never positive.
    """
    number = residual.dtype.type
    rows, width = changes.shape
    top = number((1 << bits) - 1)
    tile = np.empty((width, TILE), dtype=residual.dtype)
    moves = np.zeros((width, TILE), dtype=residual.dtype)
    scale = np.ones(TILE, dtype=residual.dtype)
    zero = np.zeros(TILE, dtype=residual.dtype)
    code = np.zeros(TILE, dtype=residual.dtype)
    before = np.zeros(TILE, dtype=residual.dtype)
    after = np.zeros(TILE, dtype=residual.dtype)
    part = np.empty(TILE, dtype=residual.dtype)
    for first in range(0, rows, TILE):
        count = min(TILE, rows - first)
        tile[:] = 0
        for r in range(count):
            for j in range(width):
                tile[j, r] = residual[first + r, start + j]
        part[:] = 0
        settled = 0
        for j in range(width):
            g = (start + j) // group
            for r in range(count):
                scale[r] = scales[first + r, g]
                zero[r] = zeros[first + r, g]
                code[r] = codes[first + r, start + j]
            column, move = tile[j], moves[j]
            for i in range(settled, j):
                share, earlier = hessian[i, j], moves[i]
                for r in range(TILE):
                    column[r] -= earlier[r] * share
            curvature = hessian[j, j]
            move[:] = 0
            if curvature > 0:
                for r in range(TILE):
                    before[r] = (code[r] - zero[r]) * scale[r]
                _round_to_storage(before, storage)
                for r in range(TILE):
                    best = before[r] + column[r] / curvature
                    step = np.rint(min(max(best / scale[r], -zero[r]), top - zero[r]))
                    after[r] = step * scale[r]
                    code[r] = step + zero[r]
                _round_to_storage(after, storage)
                for r in range(count):
                    by = after[r] - before[r]
                    change = by * (by * curvature - number(2) * column[r])
                    if change < 0:
                        move[r] = by
                        part[r] += change
                        codes[first + r, start + j] = np.uint8(code[r])
            if j + 1 - settled == 4:
                _correct(tile, moves, hessian, settled, j + 1)
                settled = j + 1
        for r in range(count):
            losses[first + r] += part[r]
            for j in range(width):
                changes[first + r, j] = moves[j, r]
