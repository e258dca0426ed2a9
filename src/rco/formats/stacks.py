"""Stacks of matrices of one shape and format in one packed weight: the experts of a layer.

Operations on a stack take one pass per option, however many matrices it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rco.core.async_copy import send
from rco.formats import integer_kernels_cpu
from rco.formats.base import Stored
from rco.formats.coded import CodedWeight
from rco.formats.integer_kernels_cpu import joined_rows, on_compiled_path, over_rows
from rco.formats.products import Option, unwrapped

StoredT = TypeVar("StoredT", bound=Stored)

__all__ = ["ChosenSegments", "by_option", "decode_segments", "stack_rows"]


def stack_rows(weights: Sequence[StoredT]) -> StoredT:
    """Matrices of one format and row length as one, the rows of the first on top."""
    return cast(StoredT, weights[0].format.stack(weights))


class ChosenSegments:
    """Option of every matrix of a stack, sorted once for all passes that decode it.

    Args:
        choices: (segments,) option of every matrix.
        order: :func:`by_option` of the choices.
        places: ``order`` on the stack's device.

    Attributes:
        order: (segments,) matrices in the order of their options.
        places: ``order`` on the stack's device.
        runs: (option, start, stop) of each option that is chosen, in that order.
    """

    def __init__(self, choices: NDArray[np.int64], order: NDArray[np.int64], places: Tensor) -> None:
        self.order, self.places = order, places
        counts = np.bincount(choices)
        ends = np.cumsum(counts)
        self.runs = [(k, int(ends[k] - counts[k]), int(ends[k])) for k in np.flatnonzero(counts).tolist()]

    @classmethod
    def sent(cls, choices: NDArray[np.int64], device: torch.device) -> ChosenSegments:
        """The choices, with their order copied to a stack's device."""
        order = by_option(choices)
        return cls(choices, order, send(torch.from_numpy(order), device))

    @property
    def options(self) -> list[int]:
        """Options that at least one matrix takes."""
        return [k for k, _, _ in self.runs]


def by_option(choices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Segments in the order of the options (segments,) chosen for them."""
    return np.argsort(choices, kind="stable")


def decode_segments(
    options: Sequence[Option], choices: NDArray[np.int64] | ChosenSegments, out: Tensor
) -> Tensor:
    """Decode a stack of matrices, each at the option chosen for it; one pass per option, not per matrix.

    Args:
        options: K versions of the same stack, (segments x rows, in), stored or dense.
        choices: (segments,) option of every matrix of the stack.
        out: (segments x rows, in), contiguous; written to.
    """
    chosen = choices if isinstance(choices, ChosenSegments) else ChosenSegments.sent(choices, out.device)
    segments = len(chosen.order)
    rows = out.shape[0] // segments
    direct = on_compiled_path(out) and out.dtype in (torch.float32, torch.float64)
    weights: list[CodedWeight] = []
    parts: list[NDArray[np.int64]] = []
    for k, start, stop in chosen.runs:
        option = unwrapped(options[k])
        if direct and isinstance(option, CodedWeight):
            weights.append(option)
            parts.append(chosen.order[start:stop])
            continue
        target, there = out.view(segments, rows, -1), chosen.places[start:stop]
        if isinstance(option, Tensor):
            target[there] = option.view(segments, rows, -1)[there].to(out.dtype)
        elif stop - start == segments:
            option.decode(out)
        elif not isinstance(option, CodedWeight):
            for segment in chosen.order[start:stop].tolist():
                option.rows(segment * rows, (segment + 1) * rows).decode(target[segment])
        else:
            taken = _segments_of(option, there, segments)
            target[there] = taken.dequantize(out.dtype).view(stop - start, rows, -1)
    _decode_chosen(weights, parts, rows, out)
    return out


def _segments_of(weight: CodedWeight, places: Tensor, segments: int) -> CodedWeight:
    def pick(part: Tensor) -> Tensor:
        return part.view(segments, -1, part.shape[1])[places].flatten(0, 1)

    parts = {name: pick(part) for name, part in weight.tensors.items()}
    return weight.over(parts, (len(places) * weight.shape[0] // segments, weight.shape[1]))


def _decode_chosen(
    weights: Sequence[CodedWeight], chosen: Sequence[NDArray[np.int64]], rows: int, out: Tensor
) -> None:
    """Decode the chosen segments of every weight in one job, so that threads start only once."""
    if not weights:
        return
    together = joined_rows([weight.operands for weight in weights], rows)
    grids, height = [weight.operands.joined(together) for weight in weights], rows // together
    wanted = (np.concatenate(chosen)[:, None] * height + np.arange(height)).reshape(-1)
    stops = np.cumsum([len(each) * height for each in chosen]).tolist()
    values = out.detach().view(out.shape[0] // together, -1).numpy()

    def task(a: int, b: int) -> None:
        for grid, start, stop in zip(grids, [0, *stops], stops, strict=False):
            if start < b and a < stop:
                integer_kernels_cpu.decode_float_at(
                    grid.stream, grid.bits, grid.scales, grid.zeros, grid.minima, grid.table, grid.group_size,
                    grid.rounding, wanted[max(a, start) : min(b, stop)], values,
                )  # fmt: skip

    over_rows(len(wanted), values.shape[1], task)
