"""Compiled CPU loops over bit-packed rows: unpack, decode, and inner products with a gradient.

Every kernel handles a range of rows and releases the GIL; :func:`over_rows` spreads a layer over threads. The
result does not depend on the number of threads: each row is one sum, and rows are added afterwards in order.

Scales are float32 or float64, or the bit patterns (uint16) of bfloat16 numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "REASSOCIATE",
    "ROUND_BFLOAT16",
    "ROUND_HALF",
    "ROUND_NONE",
    "CompiledOperands",
    "as_bfloat16",
    "as_half",
    "decode_bfloat16",
    "decode_compiled",
    "decode_float",
    "decode_float_at",
    "dot_float",
    "joined_rows",
    "on_compiled_path",
    "over_rows",
    "pack_rows",
    "products_compiled",
    "unpack_rows",
]

ROUND_NONE, ROUND_BFLOAT16, ROUND_HALF = 0, 1, 2
"""Rounding of a decoded product to its storage type; float32 and float64 need none beyond the product."""

_SUM_SPAN = 256
"""Longest run that is summed in the gradient's own precision before it joins the float64 total of the row."""

REASSOCIATE = {"reassoc", "contract", "nsz"}
"""Compiler flag that lets sums be vectorised; not for functions that round by adding and subtracting."""


def _make_unpacker(bits: int) -> Any:
    """A function that spreads one packed row over bytes; ``bits`` is a constant in it, so shifts unroll."""

    def lanes(value: int, width: int) -> np.uint64:
        """A mask repeated in every lane of that many bits."""
        return np.uint64(sum(value << at for at in range(0, 64, width)) & (2**64 - 1))

    mask = np.uint64((1 << bits) - 1)
    four = np.uint64((1 << (4 * bits)) - 1)
    low_two, high_two = lanes((1 << (2 * bits)) - 1, 32), lanes(((1 << (2 * bits)) - 1) << (2 * bits), 32)
    low_one, high_one = lanes((1 << bits) - 1, 16), lanes(((1 << bits) - 1) << bits, 16)
    above_four, above_two, above_one = np.uint64(4 * bits), np.uint64(16 - 2 * bits), np.uint64(8 - bits)

    def unpack_row(stream: Any, cols: int, codes: Any) -> None:
        # Eight codes fill exactly `bits` bytes, so each unit starts on a byte at any width.
        for unit in range(cols // 8):
            word = np.uint64(0)
            for byte in range(bits):
                word |= np.uint64(stream[unit * bits + byte]) << np.uint64(8 * byte)
            # Halves, quarters and eighths move apart in turn, until each code has a byte of the word.
            word = (word & four) | ((word >> above_four) << np.uint64(32))
            word = (word & low_two) | ((word & high_two) << above_two)
            word = (word & low_one) | ((word & high_one) << above_one)
            for i in range(8):
                codes[unit * 8 + i] = np.uint8((word >> np.uint64(8 * i)) & np.uint64(255))
        for col in range(cols - cols % 8, cols):
            start = col * bits
            value = np.uint64(stream[start >> 3])
            if (start & 7) + bits > 8:
                value |= np.uint64(stream[(start >> 3) + 1]) << np.uint64(8)
            codes[col] = np.uint8((value >> np.uint64(start & 7)) & mask)

    # Compiled code is linked by name, also with code from numba's cache, so every function needs its own name.
    unpack_row.__name__ = unpack_row.__qualname__ = f"unpack_{bits}_bits"
    return numba.njit(nogil=True)(unpack_row)


_unpack_1, _unpack_2, _unpack_3, _unpack_4, _unpack_5, _unpack_6, _unpack_7, _unpack_8 = (
    _make_unpacker(bits) for bits in range(1, 9)
)


@numba.njit(nogil=True)
def _unpack_row(stream: Any, bits: int, cols: int, codes: Any) -> None:
    if bits == 1:
        _unpack_1(stream, cols, codes)
    elif bits == 2:
        _unpack_2(stream, cols, codes)
    elif bits == 3:
        _unpack_3(stream, cols, codes)
    elif bits == 4:
        _unpack_4(stream, cols, codes)
    elif bits == 5:
        _unpack_5(stream, cols, codes)
    elif bits == 6:
        _unpack_6(stream, cols, codes)
    elif bits == 7:
        _unpack_7(stream, cols, codes)
    else:
        _unpack_8(stream, cols, codes)


@numba.njit(nogil=True)
def as_bfloat16(value: Any) -> Any:
    """The nearest bfloat16, as float32."""
    # Round to nearest even on the upper half of the float32 pattern.
    pattern = np.float32(value).view(np.uint32)
    pattern = np.uint32(pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1)))
    return np.uint32(pattern & np.uint32(0xFFFF0000)).view(np.float32)


@numba.njit(nogil=True)
def as_half(value: Any) -> Any:
    """The nearest float16, as float32."""
    # Ordinary numbers keep 10 fraction bits; below 2^-14 the step is 2^-24, to which float32 rounds near 0.75.
    value = np.float32(value)
    pattern = value.view(np.uint32)
    pattern = np.uint32(pattern + np.uint32(0xFFF) + ((pattern >> np.uint32(13)) & np.uint32(1)))
    normal = np.uint32(pattern & np.uint32(0xFFFFE000)).view(np.float32)
    tiny = np.float32(np.float32(value + np.float32(0.75)) - np.float32(0.75))
    result = tiny if abs(value) < np.float32(2.0**-14) else normal
    return result if abs(result) <= np.float32(65504.0) else value * np.float32(np.inf)


def _grid_at(scales: Any, zeros: Any, group: int) -> Any:
    """Scale and zero point of a group as floats."""
    raise NotImplementedError("Only callable from compiled code.")


@numba.extending.overload(_grid_at)
def _compile_grid_at(scales: Any, zeros: Any, group: int) -> Any:
    def of_patterns(scales: Any, zeros: Any, group: int) -> Any:
        return np.uint32(np.uint32(scales[group]) << np.uint32(16)).view(np.float32), np.float32(zeros[group])

    def of_floats(scales: Any, zeros: Any, group: int) -> Any:
        return scales[group], np.float32(zeros[group])

    return of_patterns if scales.dtype == numba.types.uint16 else of_floats


# Inner loops run over slices that start at zero: an offset in the index keeps LLVM from vectorising them.
@numba.njit(nogil=True)
def _decode_row(
    codes: Any, scales: Any, zeros: Any, minima: Any, table: Any, group: int, rounding: int, values: Any
) -> None:
    for g in range(scales.shape[0]):
        source = codes[g * group : (g + 1) * group]
        target = values[g * group : (g + 1) * group]
        scale, zero = _grid_at(scales, zeros, g)
        if table.shape[0] > 0:
            for j in range(target.shape[0]):
                target[j] = table[source[j]] * scale
            if rounding == ROUND_BFLOAT16:
                for j in range(target.shape[0]):
                    target[j] = as_bfloat16(np.float32(target[j]))
            elif rounding == ROUND_HALF:
                for j in range(target.shape[0]):
                    target[j] = as_half(np.float32(target[j]))
        elif rounding == ROUND_BFLOAT16:
            for j in range(target.shape[0]):
                target[j] = as_bfloat16((np.float32(source[j]) - zero) * scale)
        elif rounding == ROUND_HALF:
            for j in range(target.shape[0]):
                target[j] = as_half((np.float32(source[j]) - zero) * scale)
        else:
            for j in range(target.shape[0]):
                target[j] = (np.float32(source[j]) - zero) * scale
        if minima.shape[0] > 0:
            low = minima[g]
            for j in range(target.shape[0]):
                target[j] = np.float32(target[j]) - low


@numba.njit(nogil=True, fastmath=REASSOCIATE)
def _dot(gradient: Any, values: Any) -> float:
    total = 0.0
    for start in range(0, values.shape[0], _SUM_SPAN):
        left = gradient[start : start + _SUM_SPAN]
        right = values[start : start + _SUM_SPAN]
        part = gradient.dtype.type(0)
        for j in range(right.shape[0]):
            part += left[j] * right[j]
        total += part
    return total


@numba.njit(nogil=True, cache=True)
def unpack_rows(stream: Any, bits: int, codes: Any) -> None:
    """Spread packed rows (uint8 view of the words) over ``codes`` (rows, cols)."""
    for row in range(codes.shape[0]):
        _unpack_row(stream[row], bits, codes.shape[1], codes[row])


@numba.njit(nogil=True, cache=True)
def pack_rows(codes: Any, bits: int, stream: Any) -> None:
    """Write codes (rows, cols) to zeroed rows (uint8 view of the words); the inverse of :func:`unpack_rows`."""
    for row in range(codes.shape[0]):
        source, target = codes[row], stream[row]
        word, filled, byte = np.uint32(0), 0, 0
        for col in range(source.shape[0]):
            word |= np.uint32(source[col]) << np.uint32(filled)
            filled += bits
            if filled >= 8:
                target[byte] = np.uint8(word & np.uint32(255))
                word >>= np.uint32(8)
                filled -= 8
                byte += 1
        if filled:
            target[byte] = np.uint8(word)


@numba.njit(nogil=True, cache=True)
def decode_float(
    codes: Any, scales: Any, zeros: Any, minima: Any, table: Any, group: int, rounding: int, values: Any
) -> None:
    """Write ``(code - zero) * scale - minimum``, rounded as stored, to ``values`` (float32 or float64).

    ``minima`` has no columns, and ``table``, which replaces ``code - zero``, no entries where a weight has none.
    """
    for row in range(values.shape[0]):
        _decode_row(codes[row], scales[row], zeros[row], minima[row], table, group, rounding, values[row])


@numba.njit(nogil=True, cache=True)
def decode_float_at(
    stream: Any, bits: int, scales: Any, zeros: Any, minima: Any, table: Any, group: int, rounding: int,
    rows: Any, values: Any,
) -> None:  # fmt: skip
    """As :func:`decode_float` from the packed rows (uint8 view of the words), for the rows that are listed."""
    codes = np.empty(values.shape[1], dtype=np.uint8)
    for row in rows:
        _unpack_row(stream[row], bits, values.shape[1], codes)
        _decode_row(codes, scales[row], zeros[row], minima[row], table, group, rounding, values[row])


@numba.njit(nogil=True, cache=True)
def decode_bfloat16(
    codes: Any, scales: Any, zeros: Any, minima: Any, table: Any, group: int, rounding: int, patterns: Any
) -> None:
    """As :func:`decode_float`, writing the bit patterns (uint16) of bfloat16 values."""
    values = np.empty(patterns.shape[1], dtype=np.float32)
    for row in range(patterns.shape[0]):
        _decode_row(codes[row], scales[row], zeros[row], minima[row], table, group, rounding, values)
        for j in range(patterns.shape[1]):
            rounded = np.float32(as_bfloat16(values[j]))
            pattern = rounded.view(np.uint32)
            patterns[row, j] = np.uint16(pattern >> np.uint32(16))


@numba.njit(nogil=True, fastmath=REASSOCIATE)
def _dot_codes(gradient: Any, codes: Any, scales: Any, zeros: Any, group: int, rounded: bool) -> float:
    """``<gradient, decoded row>`` without writing the decoded values to memory."""
    total = 0.0
    for g in range(scales.shape[0]):
        scale, zero = _grid_at(scales, zeros, g)
        end = min((g + 1) * group, codes.shape[0])
        for start in range(g * group, end, _SUM_SPAN):
            left = gradient[start : min(start + _SUM_SPAN, end)]
            right = codes[start : min(start + _SUM_SPAN, end)]
            part = gradient.dtype.type(0)
            if rounded:
                for j in range(right.shape[0]):
                    part += left[j] * as_bfloat16((np.float32(right[j]) - zero) * scale)
            else:
                for j in range(right.shape[0]):
                    part += left[j] * ((np.float32(right[j]) - zero) * scale)
            total += part
    return total


@numba.njit(nogil=True, fastmath=REASSOCIATE)
def _dot_blocks(
    gradient: Any, codes: Any, scales: Any, zeros: Any, minima: Any, table: Any, group: int
) -> float:
    """``<gradient, decoded row>`` of unrounded values with minima or a table; groups are short."""
    total = 0.0
    for g in range(scales.shape[0]):
        scale, zero = _grid_at(scales, zeros, g)
        end = min((g + 1) * group, codes.shape[0])
        left, right = gradient[g * group : end], codes[g * group : end]
        part, slope = gradient.dtype.type(0), gradient.dtype.type(0)
        if table.shape[0] > 0:
            for j in range(right.shape[0]):
                part += left[j] * table[right[j]]
        else:
            for j in range(right.shape[0]):
                part += left[j] * (np.float32(right[j]) - zero)
        total += part * scale
        if minima.shape[0] > 0:
            for j in range(right.shape[0]):
                slope += left[j]
            total -= slope * minima[g]
    return total


@numba.njit(nogil=True, cache=True)
def dot_float(
    gradient: Any, stream: Any, bits: int, scales: Any, zeros: Any, minima: Any, table: Any, group: int,
    rounding: int, sums: Any,
) -> None:  # fmt: skip
    """``sums[row] = <gradient[row], decoded row>`` for a float32 or float64 gradient and packed rows.

    ``stream`` is the uint8 view of the words. Only a row of codes is in memory at a time.
    """
    cols = gradient.shape[1]
    codes = np.empty(cols, dtype=np.uint8)
    values = np.empty(cols, dtype=gradient.dtype)
    for row in range(gradient.shape[0]):
        _unpack_row(stream[row], bits, cols, codes)
        # Rounding to half adds and subtracts, which must not be reassociated.
        if rounding == ROUND_HALF or (rounding != ROUND_NONE and table.shape[0] > 0):
            _decode_row(codes, scales[row], zeros[row], minima[row], table, group, rounding, values)
            sums[row] = _dot(gradient[row], values)
        elif minima.shape[1] > 0 or table.shape[0] > 0:
            sums[row] = _dot_blocks(gradient[row], codes, scales[row], zeros[row], minima[row], table, group)
        else:
            rounded = rounding == ROUND_BFLOAT16
            sums[row] = _dot_codes(gradient[row], codes, scales[row], zeros[row], group, rounded)


# ---------------------------------------------------------------------- packed weights in host memory

_ROUNDING = {torch.bfloat16: ROUND_BFLOAT16, torch.float16: ROUND_HALF}
_JOINED_COLUMNS = 1024
_PARALLEL_WORK = 1 << 16
_CACHE_BYTES = 1 << 19


def over_rows(rows: int, row_work: int, task: Callable[[int, int], None], row_bytes: int = 0) -> None:
    """Call ``task(start, stop)`` over all rows, on as many threads as torch is set to use.

    Args:
        rows: Number of rows.
        row_work: Elements visited per row; small jobs run on the calling thread.
        task: Handles rows ``start`` to ``stop``; must release the GIL to gain from threads.
        row_bytes: If given, ranges are cut so that this much per row stays within a core's cache.
    """
    threads = torch.get_num_threads() if rows * row_work >= _PARALLEL_WORK else 1
    # The same number of ranges for every thread.
    turns = max(1, -(-rows * row_bytes // (_CACHE_BYTES * threads)))
    span = max(1, -(-rows // (threads * turns)))
    ranges = [(start, min(start + span, rows)) for start in range(0, rows, span)]
    if len(ranges) <= 1 or threads == 1:
        for start, stop in ranges:
            task(start, stop)
        return
    for _ in _pool(os.getpid(), threads).map(lambda ends: task(*ends), ranges):
        pass


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of a process; a forked child makes its own, since the parent's do not run there."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rco-rows")


def on_compiled_path(tensor: Tensor) -> bool:
    """Whether the compiled kernels support this tensor; they read int32 words as little-endian bytes."""
    return tensor.device.type == "cpu" and sys.byteorder == "little"


@dataclass(frozen=True)
class CompiledOperands:
    """A packed weight as operands of compiled code, sharing the weight's memory if possible.

    Attributes:
        stream: Bytes of the codes, (rows, bytes).
        scales: (rows, groups), float32, float64, or the bit patterns (uint16) of bfloat16.
        zeros: (rows, groups), uint8.
        minima: (rows, groups), float32; no columns if there are none.
        table: (2^bits,) float32 value of every code; empty if codes stand for themselves.
        bits: Width of a code.
        cols: Codes of a row.
        group_size: Columns that share a scale.
        rounding: Rounding of decoded values.
    """

    stream: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8]
    minima: NDArray[Any]
    table: NDArray[np.float32]
    bits: int
    cols: int
    group_size: int
    rounding: int

    @classmethod
    def of(
        cls,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bits: int,
        cols: int,
        group_size: int,
        *,
        midpoint: int,
        minima: Tensor | None = None,
        table: Tensor | None = None,
        rounded_to: torch.dtype | None = None,
    ) -> CompiledOperands:
        """Operands of a weight's codes, scales and so on; ``midpoint`` stands for zero without zero points.

        Minima need unrounded values: scales of float32.
        """
        rounding = _ROUNDING.get(rounded_to or scales.dtype, ROUND_NONE)
        scales = scales.detach().contiguous()
        if scales.dtype == torch.bfloat16:
            scales = scales.view(torch.uint16)
        elif scales.dtype == torch.float16:
            scales = scales.to(torch.float32)
        stream = packed.detach().contiguous().view(torch.uint8).numpy()
        if zeros is None:
            points = _midpoints(midpoint, *scales.shape)
        else:
            points = zeros.detach().contiguous().numpy()
        lows = torch.empty(len(scales), 0) if minima is None else minima.detach().contiguous()
        values = torch.empty(0) if table is None else table.detach().contiguous()
        return cls(
            stream, scales.numpy(), points, lows.numpy(), values.numpy(), bits, cols, group_size, rounding
        )

    def joined(self, together: int) -> CompiledOperands:
        """The same with ``together`` neighbouring rows as one (see :func:`joined_rows`)."""
        if together not in self._joined:
            parts = (self.stream, self.scales, self.zeros, self.minima)
            stream, scales, zeros, minima = (
                part.reshape(len(part) // together, part.shape[1] * together) for part in parts
            )
            self._joined[together] = replace(
                self, stream=stream, scales=scales, zeros=zeros, minima=minima, cols=self.cols * together
            )
        return self._joined[together]

    @cached_property
    def _joined(self) -> dict[int, CompiledOperands]:
        return {}


@lru_cache(maxsize=64)
def _midpoints(value: int, rows: int, groups: int) -> NDArray[np.uint8]:
    """Zero points that are all the same, the same memory for all weights of a shape."""
    return np.full((rows, groups), value, dtype=np.uint8)


def joined_rows(grids: Sequence[CompiledOperands], height: int) -> int:
    """Number of neighbouring rows that the compiled kernels may treat as one, to save calls for short rows.

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
    unpack_rows(stream, bits, codes)
    return codes


def decode_compiled(grid: CompiledOperands, out: Tensor) -> None:
    """Write the decoded matrix to ``out``, contiguous float32, float64 or bfloat16."""
    kernel: Any = decode_float
    target = out.detach()
    if out.dtype == torch.bfloat16:
        kernel, target = decode_bfloat16, target.view(torch.uint16)
    values = target.numpy()

    def task(a: int, b: int) -> None:
        codes = _codes_of(grid.stream[a:b], grid.bits, grid.cols)
        kernel(
            codes, grid.scales[a:b], grid.zeros[a:b], grid.minima[a:b], grid.table, grid.group_size,
            grid.rounding, values[a:b],
        )  # fmt: skip

    over_rows(len(values), grid.cols, task, row_bytes=grid.cols * out.element_size())


def products_compiled(gradient: Tensor, grids: Sequence[CompiledOperands | None], segments: int) -> Tensor:
    """(K, segments) ``<gradient, W_k>`` of a contiguous gradient (out, in); zero where there is no weight."""
    if gradient.dtype not in (torch.float32, torch.float64):
        gradient = gradient.to(torch.float32)
    together = joined_rows([each for each in grids if each is not None], gradient.shape[0] // segments)
    gradient = gradient.view(gradient.shape[0] // together, -1)
    rows, cols = gradient.shape
    source = gradient.numpy()
    sums = np.zeros((len(grids), rows))
    listed = [(sums[k], each.joined(together)) for k, each in enumerate(grids) if each is not None]

    def task(a: int, b: int) -> None:
        # All options of a range of rows in turn, so that part of the gradient is read from memory once.
        part = source[a:b]
        for found, each in listed:
            dot_float(
                part, each.stream[a:b], each.bits, each.scales[a:b], each.zeros[a:b], each.minima[a:b],
                each.table, each.group_size, each.rounding, found[a:b],
            )  # fmt: skip

    if listed:
        over_rows(rows, cols * len(listed), task, row_bytes=cols * gradient.element_size())
    return torch.from_numpy(sums).view(len(grids), segments, -1).sum(dim=2)
