"""Matrices of one shape and scheme below each other in one packed weight: the experts of a layer.

What is done to a whole stack takes one pass per option, however many matrices it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rco.compressors import cpu_kernels
from rco.compressors.compiled import CompiledOperands, joined_rows, on_compiled_path
from rco.compressors.packing import PackedWeight
from rco.compressors.row_threads import over_rows
from rco.core.transfer import send

__all__ = ["ChosenSegments", "by_option", "decode_segments", "stack_rows"]


def stack_rows(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Matrices of one scheme and row length as one, the rows of the first on top."""
    first = weights[0]
    if len({(w.bits, w.group_size, w.shape[1], w.zeros is None) for w in weights}) > 1:
        raise ValueError("Only weights of one width, group size and row length can be stacked.")
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in weights if w.zeros is not None])
    return replace(
        first,
        packed=torch.cat([w.packed for w in weights]),
        scales=torch.cat([w.scales for w in weights]),
        zeros=zeros,
        shape=(sum(w.shape[0] for w in weights), first.shape[1]),
    )


class ChosenSegments:
    """Which option every matrix of a stack takes, sorted out once for all passes that decode it.

    Args:
        choices: (segments,) option of every matrix.
        places: :func:`by_option` of the choices where the stack is; None: they are sent there.
        device: Where the stack is, if no places are given.

    Attributes:
        order: (segments,) matrices in the order of their options.
        places: The same where the stack is.
        runs: (option, start, stop) of each option that is chosen, in that order.
    """

    def __init__(
        self,
        choices: NDArray[np.int64],
        places: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.order = by_option(choices)
        self.places = (
            send(torch.from_numpy(self.order), device or torch.device("cpu")) if places is None else places
        )
        counts = np.bincount(choices)
        ends = np.cumsum(counts)
        self.runs = [(k, int(ends[k] - counts[k]), int(ends[k])) for k in np.flatnonzero(counts).tolist()]

    @property
    def options(self) -> list[int]:
        """Those that at least one matrix takes."""
        return [k for k, _, _ in self.runs]


def by_option(choices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Segments in the order of the options (segments,) chosen for them."""
    return np.argsort(choices, kind="stable")


def decode_segments(
    options: Sequence[PackedWeight | Tensor], choices: NDArray[np.int64] | ChosenSegments, out: Tensor
) -> Tensor:
    """Decode a stack of matrices, each at the option chosen for it; one pass per option, not per matrix.

    Args:
        options: K versions of the same stack, (segments x rows, in), packed or dense.
        choices: (segments,) option of every matrix of the stack.
        out: (segments x rows, in), contiguous; written to.
    """
    chosen = choices if isinstance(choices, ChosenSegments) else ChosenSegments(choices, device=out.device)
    segments = len(chosen.order)
    rows = out.shape[0] // segments
    direct = on_compiled_path(out) and out.dtype in (torch.float32, torch.float64)
    compiled: list[_Decoding] = []
    for k, start, stop in chosen.runs:
        option = options[k]
        if direct and isinstance(option, PackedWeight):
            compiled.append(_Decoding.of(option, chosen.order[start:stop], rows, out))
            continue
        target, there = out.view(segments, rows, -1), chosen.places[start:stop]
        if isinstance(option, Tensor):
            target[there] = option.view(segments, rows, -1)[there].to(out.dtype)
        elif stop - start == segments:
            option.dequantize(out=out)
        else:
            taken = _segments_of(option, there, segments)
            target[there] = taken.dequantize(out.dtype).view(stop - start, rows, -1)
    _decode_together(compiled)
    return out


def _segments_of(weight: PackedWeight, places: Tensor, segments: int) -> PackedWeight:
    def pick(part: Tensor) -> Tensor:
        return part.view(segments, -1, part.shape[1])[places].flatten(0, 1)

    zeros = None if weight.zeros is None else pick(weight.zeros)
    packed = pick(weight.packed)
    return replace(
        weight,
        packed=packed,
        scales=pick(weight.scales),
        zeros=zeros,
        shape=(packed.shape[0], weight.shape[1]),
    )


@dataclass(frozen=True)
class _Decoding:
    """Rows of a packed weight that compiled code will write to their own places in ``values``."""

    grid: CompiledOperands
    wanted: NDArray[np.int64]
    values: NDArray[np.floating]

    @classmethod
    def of(cls, weight: PackedWeight, chosen: NDArray[np.int64], rows: int, out: Tensor) -> _Decoding:
        """The chosen segments of that many rows."""
        together = joined_rows([weight.operands], rows)
        count, height = weight.shape[0] // together, rows // together
        wanted = (chosen[:, None] * height + np.arange(height)).reshape(-1)
        return cls(weight.operands.joined(together), wanted, out.detach().view(count, -1).numpy())

    def run(self, start: int, stop: int) -> None:
        """Decode some of the wanted rows."""
        grid = self.grid
        cpu_kernels.decode_float_at(
            grid.stream, grid.bits, grid.scales, grid.zeros, grid.group_size, grid.rounding,
            self.wanted[start:stop], self.values,
        )  # fmt: skip


def _decode_together(parts: Sequence[_Decoding]) -> None:
    """All of them as one job: threads start once, not for every option."""
    if not parts:
        return
    ends = np.cumsum([len(part.wanted) for part in parts])

    def task(a: int, b: int) -> None:
        for part, end in zip(parts, ends.tolist(), strict=True):
            begin = end - len(part.wanted)
            if begin < b and a < end:
                part.run(max(a, begin) - begin, min(b, end) - begin)

    over_rows(int(ends[-1]), parts[0].values.shape[1], task)
