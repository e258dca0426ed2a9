"""Packed weights in host memory: how compiled loops read them, decode them and multiply them with a gradient."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rco.formats import cpu_kernels
from rco.formats.row_threads import over_rows

__all__ = ["CompiledOperands", "decode_compiled", "joined_rows", "on_compiled_path", "products_compiled"]

_ROUNDING = {torch.bfloat16: cpu_kernels.ROUND_BFLOAT16, torch.float16: cpu_kernels.ROUND_HALF}
_JOINED_COLUMNS = 1024


def on_compiled_path(tensor: Tensor) -> bool:
    """Whether the compiled kernels serve this tensor; they read int32 words as little-endian bytes."""
    return tensor.device.type == "cpu" and sys.byteorder == "little"


@dataclass(frozen=True)
class CompiledOperands:
    """A packed weight as compiled code takes it: where it can be, the weight's own memory.

    Attributes:
        stream: Bytes of the codes, (rows, bytes).
        scales: (rows, groups), float32, float64, or the bit patterns (uint16) of bfloat16.
        zeros: (rows, groups), uint8.
        bits: Width of a code.
        cols: Codes of a row.
        group_size: Columns that share a scale.
        rounding: How decoded values are rounded.
    """

    stream: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8]
    bits: int
    cols: int
    group_size: int
    rounding: int

    @classmethod
    def of(
        cls, packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, cols: int, group_size: int
    ) -> CompiledOperands:
        """Operands of the codes, scales and zero points of a packed weight."""
        rounding = _ROUNDING.get(scales.dtype, cpu_kernels.ROUND_NONE)
        scales = scales.detach().contiguous()
        if scales.dtype == torch.bfloat16:
            scales = scales.view(torch.uint16)
        elif scales.dtype == torch.float16:
            scales = scales.to(torch.float32)
        stream = packed.detach().contiguous().view(torch.uint8).numpy()
        if zeros is None:
            points = _midpoints(bits, *scales.shape)
        else:
            points = zeros.detach().contiguous().numpy()
        return cls(stream, scales.numpy(), points, bits, cols, group_size, rounding)

    def joined(self, together: int) -> CompiledOperands:
        """The same with so many neighbouring rows as one (see :func:`joined_rows`)."""
        if together not in self._joined:
            parts = (self.stream, self.scales, self.zeros)
            stream, scales, zeros = (part.reshape(len(part) // together, -1) for part in parts)
            self._joined[together] = replace(
                self, stream=stream, scales=scales, zeros=zeros, cols=self.cols * together
            )
        return self._joined[together]

    @cached_property
    def _joined(self) -> dict[int, CompiledOperands]:
        return {}


@lru_cache(maxsize=64)
def _midpoints(bits: int, rows: int, groups: int) -> NDArray[np.uint8]:
    """Zero points of a symmetric grid, the same memory for all weights of a shape."""
    return np.full((rows, groups), 1 << (bits - 1), dtype=np.uint8)


def joined_rows(grids: Sequence[CompiledOperands], height: int) -> int:
    """How many neighbouring rows the compiled kernels may take as one, so that short rows do not cost a call each.

    Rows whose codes fill whole words and whose groups are whole follow each other without a gap. The number divides
    ``height``, within which rows belong together.
    """
    cols = grids[0].cols if grids else 0
    whole = cols % 8 == 0 and all(
        cols * each.bits % 32 == 0 and cols % each.group_size == 0 for each in grids
    )
    if not cols or not whole:
        return 1
    return max((n for n in range(1, _JOINED_COLUMNS // cols + 1) if height % n == 0), default=1)


def _codes_of(stream: NDArray[np.uint8], bits: int, cols: int) -> NDArray[np.uint8]:
    codes = np.empty((stream.shape[0], cols), dtype=np.uint8)
    cpu_kernels.unpack_rows(stream, bits, codes)
    return codes


def decode_compiled(grid: CompiledOperands, out: Tensor) -> None:
    """Write the decoded matrix to ``out``, contiguous float32, float64 or bfloat16."""
    kernel: Any = cpu_kernels.decode_float
    target = out.detach()
    if out.dtype == torch.bfloat16:
        kernel, target = cpu_kernels.decode_bfloat16, target.view(torch.uint16)
    values = target.numpy()

    def task(a: int, b: int) -> None:
        codes = _codes_of(grid.stream[a:b], grid.bits, grid.cols)
        kernel(codes, grid.scales[a:b], grid.zeros[a:b], grid.group_size, grid.rounding, values[a:b])

    over_rows(len(values), grid.cols, task, row_bytes=grid.cols * out.element_size())


def products_compiled(gradient: Tensor, grids: Sequence[CompiledOperands | None], segments: int) -> Tensor:
    """(K, segments) ``<gradient, W_k>`` of a contiguous gradient (out, in); zero where there is no weight."""
    narrow = gradient.dtype == torch.bfloat16
    if gradient.dtype == torch.float16:
        gradient = gradient.to(torch.float32)
    together = joined_rows([each for each in grids if each is not None], gradient.shape[0] // segments)
    gradient = gradient.view(gradient.shape[0] // together, -1)
    rows, cols = gradient.shape
    source = gradient.view(torch.uint16).numpy() if narrow else gradient.numpy()
    sums = np.zeros((len(grids), rows))
    listed = [(sums[k], each.joined(together)) for k, each in enumerate(grids) if each is not None]

    def task(a: int, b: int) -> None:
        # All options of a range of rows in turn: that part of the gradient is read from memory once.
        part = source[a:b]
        for found, each in listed:
            stream = each.stream[a:b]
            grid = (each.scales[a:b], each.zeros[a:b], each.group_size, each.rounding, found[a:b])
            if narrow:
                cpu_kernels.dot_bfloat16(part, _codes_of(stream, each.bits, cols), *grid)
            else:
                cpu_kernels.dot_float(part, stream, each.bits, *grid)

    if listed:
        over_rows(rows, cols * len(listed), task, row_bytes=cols * gradient.element_size())
    return torch.from_numpy(sums).view(len(grids), segments, -1).sum(dim=2)
