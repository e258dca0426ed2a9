"""Compiled CPU loops over the columns of a block: GPTQ, and coordinate descent on its codes.

Rows are independent, so a tile of rows is processed at once in whole vectors; the columns of a block depend on each
other and are processed in turn.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from rco.formats.rounding_kernels_cpu import fit_group, round_to_storage

__all__ = ["TILE", "descend_columns", "gptq_columns"]

TILE = 64
"""Rows that the column loop processes at once: whole vectors, and a block of columns fits L2."""


@numba.njit(nogil=True)
def _correct(tile: Any, errors: Any, factor: Any, first: int, last: int) -> None:
    """Correct the columns after ``last`` for the errors of columns ``first`` to ``last`` (at most four)."""
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
        storage: Type the scales are stored in.
        limits: Smallest and largest scale, in the type of the weights.
        search: Settings of the range search.
        scales: (rows, groups), read or written.
        zeros: (rows, groups), read or written.
        codes: (rows, in), written.
        errors: (rows, width), written: corrections for the columns after the block.
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
                    fitted, at = fit_group(
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
            # The error is that of the decoded value, so later columns compensate for its rounding too.
            round_to_storage(decoded, storage)
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
    """Move each code of a block of columns to the value of least error, all other codes fixed.

    Args:
        residual: ``(W - Q) H`` of the damped Hessian, (rows, in), as it was before the block.
        hessian: The block of the damped Hessian, (width, width).
        start: First column of the block.
        group: Columns per group.
        bits: Width of a code.
        storage: Type the scales are stored in.
        scales: (rows, groups).
        zeros: (rows, groups).
        codes: (rows, in), updated.
        changes: (rows, width), written: changes of the decoded values.
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
                round_to_storage(before, storage)
                for r in range(TILE):
                    best = before[r] + column[r] / curvature
                    step = np.rint(min(max(best / scale[r], -zero[r]), top - zero[r]))
                    after[r] = step * scale[r]
                    code[r] = step + zero[r]
                round_to_storage(after, storage)
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
