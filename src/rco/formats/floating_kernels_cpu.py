"""Compiled CPU loops over the columns of a block, on a table of levels: GPTQ, and coordinate descent."""

from __future__ import annotations

from typing import Any

import numba

__all__ = ["descend_levels", "gptq_levels"]


@numba.njit(nogil=True)
def _place(value: float, between: Any) -> int:
    """Index of the nearest level, given the midpoints between neighbours."""
    low, high = 0, between.shape[0]
    while low < high:
        middle = (low + high) // 2
        if value > between[middle]:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(nogil=True, cache=True)
def gptq_levels(
    values: Any,
    factor: Any,
    scales: Any,
    group: int,
    start: int,
    levels: Any,
    between: Any,
    places: Any,
    errors: Any,
) -> None:
    """Round the columns of a block in turn, passing each column's error on to those after it.

    Args:
        values: Current weights (rows, in); those of the block are changed.
        factor: The block of the upper factor of the inverse Hessian, (width, width).
        scales: (rows, groups).
        group: Columns per group.
        start: First column of the block.
        levels: Levels in ascending order.
        between: Midpoints of neighbouring levels.
        places: (rows, in), written: index of every level.
        errors: (rows, width), written: corrections for the columns after the block.
    """
    rows, width = errors.shape
    for r in range(rows):
        row = values[r, start : start + width]
        for j in range(width):
            scale = scales[r, (start + j) // group]
            place = _place(row[j] / scale, between)
            places[r, start + j] = place
            error = (row[j] - levels[place] * scale) / factor[j, j]
            errors[r, j] = error
            for i in range(j + 1, width):
                row[i] -= error * factor[j, i]


@numba.njit(nogil=True, cache=True)
def descend_levels(
    residual: Any,
    hessian: Any,
    scales: Any,
    group: int,
    start: int,
    levels: Any,
    between: Any,
    places: Any,
    decoded: Any,
) -> int:
    """Move each element of a block of columns to the level of least error, all others fixed.

    Args:
        residual: ``(W - Q) H`` of the damped Hessian, (rows, width); changed.
        hessian: The block of the damped Hessian, (width, width).
        scales: (rows, groups).
        group: Columns per group.
        start: First column of the block.
        levels: Levels in ascending order.
        between: Midpoints of neighbouring levels.
        places: (rows, in), updated.
        decoded: (rows, in), updated: the decoded weight Q.

    Returns:
        Number of elements that moved.
    """
    rows, width = residual.shape
    moved = 0
    for r in range(rows):
        rest = residual[r]
        for j in range(width):
            if not hessian[j, j] > 0:
                continue
            column = start + j
            scale, old = scales[r, column // group], decoded[r, column]
            place = _place((old + rest[j] / hessian[j, j]) / scale, between)
            if place == places[r, column]:
                continue
            new = levels[place] * scale
            places[r, column], decoded[r, column] = place, new
            moved += 1
            by = new - old
            for i in range(width):
                rest[i] -= by * hessian[j, i]
    return moved
