"""Matrices of one shape and scheme below each other in one packed weight: the experts of a layer.

What is done to a whole stack takes one pass per option, however many matrices it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    for k in np.unique(choices).tolist():
        start, end = end, end + int((choices == k).sum())
        option, chosen, there = options[k], order[start:end], places[start:end]
        if direct and isinstance(option, PackedWeight):
            _decode_compiled_at(option, chosen, rows, out)
            continue
        target = out.view(segments, rows, -1)
        if isinstance(option, Tensor):
            target[there] = option.view(segments, rows, -1)[there].to(out.dtype)
        elif len(chosen) == segments:
            option.dequantize(out=out)
        else:
            taken = _segments_of(option, there, segments)
            target[there] = taken.dequantize(out.dtype).view(len(chosen), rows, -1)
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


def _decode_compiled_at(weight: PackedWeight, chosen: NDArray[np.int64], rows: int, out: Tensor) -> None:
    """Decode the chosen segments of that many rows, each to its own place."""
    together = joined_rows([weight], rows)
    count = weight.shape[0] // together
    stream, scales, zeros = (t.detach().view(count, -1).numpy() for t in compiled_operands(weight))
    values = out.detach().view(count, -1).numpy()
    rounding = ROUNDING.get(weight.scales.dtype, cpu_kernels.ROUND_NONE)
    height = rows // together
    wanted = (chosen[:, None] * height + np.arange(height)).reshape(-1)

    def task(a: int, b: int) -> None:
        cpu_kernels.decode_float_at(
            stream, weight.bits, scales, zeros, weight.group_size, rounding, wanted[a:b], values
        )

    cpu_kernels.over_rows(len(wanted), values.shape[1], task)
