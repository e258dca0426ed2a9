"""Compiled CPU loops that fit the ranges of integer grids.

Arithmetic is in the type of the weights given, float32 or float64. Scales are rounded to the type they will be
stored in before any code is computed from them, so that the errors measured here are those of the decoded
checkpoint.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from rco.formats.integer_kernels_cpu import REASSOCIATE, as_bfloat16, as_half

__all__ = [
    "NOISE_FLOOR",
    "NOISE_MARGIN",
    "OFF_TIE",
    "STORE_BFLOAT16",
    "STORE_DOUBLE",
    "STORE_FLOAT",
    "STORE_HALF",
    "fit_group",
    "fit_rows",
    "round_to_storage",
]

NOISE_MARGIN, NOISE_FLOOR = 1e-5, 1e-10
"""A trial must lower the error by this part of it, and by this part of the squared weights, to be taken."""

OFF_TIE = 1 + 2.0**-16
"""The extremes of a symmetric group reach half a step beyond the outermost level it shares; this keeps them from
lying exactly between two codes, where rounding noise would choose."""

STORE_DOUBLE, STORE_BFLOAT16, STORE_HALF, STORE_FLOAT = 0, 1, 2, 3


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
def fit_group(
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
    # A symmetric grid has one level more below zero than above; the sign of its scale sets on which side.
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
            scale, zero = fit_group(
                weight[row, g * group : (g + 1) * group],
                importance[g * group : (g + 1) * group],
                bits, symmetric, storage, limits, search,
            )  # fmt: skip
            scales[row, g] = scale
            zeros[row, g] = np.uint8(zero)


@numba.njit(nogil=True)
def round_to_storage(values: Any, storage: int) -> None:
    """Round values in place to the storage type of a checkpoint."""
    if storage == STORE_BFLOAT16:
        for j in range(values.shape[0]):
            values[j] = as_bfloat16(values[j])
    elif storage == STORE_HALF:
        for j in range(values.shape[0]):
            values[j] = as_half(values[j])
    elif storage == STORE_FLOAT:
        for j in range(values.shape[0]):
            values[j] = np.float32(values[j])
