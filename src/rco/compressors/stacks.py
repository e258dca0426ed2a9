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
from rco.compressors.packing import (
    ROUNDING,
    PackedWeight,
    compiled_operands,
    joined_rows,
    on_compiled_path,
)
from rco.compressors.row_threads import over_rows
from rco.core.transfer import send

__all__ = ["by_option", "decode_segments", "stack_rows"]


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


def by_option(choices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Segments in the order of the options (segments,) chosen for them."""
    return np.argsort(choices, kind="stable")


def decode_segments(
    options: Sequence[PackedWeight | Tensor],
    choices: NDArray[np.int64],
    out: Tensor,
    places: Tensor | None = None,
) -> Tensor:
    """Decode a stack of matrices, each at the option chosen for it; one pass per option, not per matrix.

    Args:
        options: K versions of the same stack, (segments x rows, in), packed or dense.
        choices: (segments,) option of every matrix of the stack.
        out: (segments x rows, in), contiguous; written to.
        places: :func:`by_option` of the choices where ``out`` is, if it is there already.
    """
    segments, rows = len(choices), out.shape[0] // len(choices)
    order = by_option(choices)
    if places is None:
        places = send(torch.from_numpy(order), out.device)
    end = 0
    direct = on_compiled_path(out) and out.dtype in (torch.float32, torch.float64)
    compiled: list[_Decoding] = []
    for k in np.unique(choices).tolist():
        start, end = end, end + int((choices == k).sum())
        option, chosen, there = options[k], order[start:end], places[start:end]
        if direct and isinstance(option, PackedWeight):
            compiled.append(_Decoding.of(option, chosen, rows, out))
            continue
        target = out.view(segments, rows, -1)
        if isinstance(option, Tensor):
            target[there] = option.view(segments, rows, -1)[there].to(out.dtype)
        elif len(chosen) == segments:
            option.dequantize(out=out)
        else:
            taken = _segments_of(option, there, segments)
            target[there] = taken.dequantize(out.dtype).view(len(chosen), rows, -1)
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

    weight: PackedWeight
    operands: tuple[NDArray[np.uint8], NDArray[np.floating], NDArray[np.uint8]]  # stream, scales, zeros
    wanted: NDArray[np.int64]
    values: NDArray[np.floating]

    @classmethod
    def of(cls, weight: PackedWeight, chosen: NDArray[np.int64], rows: int, out: Tensor) -> _Decoding:
        """The chosen segments of that many rows."""
        together = joined_rows([weight], rows)
        count, height = weight.shape[0] // together, rows // together
        stream, scales, zeros = (t.detach().view(count, -1).numpy() for t in compiled_operands(weight))
        wanted = (chosen[:, None] * height + np.arange(height)).reshape(-1)
        return cls(weight, (stream, scales, zeros), wanted, out.detach().view(count, -1).numpy())

    def run(self, start: int, stop: int) -> None:
        """Decode some of the wanted rows."""
        stream, scales, zeros = self.operands
        rounding = ROUNDING.get(self.weight.scales.dtype, cpu_kernels.ROUND_NONE)
        cpu_kernels.decode_float_at(
            stream, self.weight.bits, scales, zeros, self.weight.group_size, rounding,
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
