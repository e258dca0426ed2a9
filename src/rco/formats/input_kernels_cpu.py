"""Compiled CPU loop that rounds groups of inputs to E2M1."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["round_e2m1"]


@numba.njit(nogil=True, cache=True)
def round_e2m1(values: Any, scales: Any, out: Any) -> None:
    """Divide by the scale, round to the nearest element, ties to even codes, and multiply by the scale.

    Args:
        values: (groups, members) float32.
        scales: (groups,) float32.
        out: (groups, members) float32, written.
    """
    zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
    two, four, six = np.float32(2), np.float32(4), np.float32(6)
    groups, members = values.shape
    for g in range(groups):
        scale = scales[g]
        for i in range(members):
            value = values[g, i] / scale
            size = abs(value)
            # Steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6; an even code is an even number of steps.
            step = half if size < two else (one if size < four else two)
            size = size if size <= six else (six if size > six else zero)  # NaN is zero
            rounded = np.rint(size / step) * step * scale
            out[g, i] = -rounded if value < 0 else rounded
