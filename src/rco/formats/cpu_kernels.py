"""Compiled CPU loops over bit-packed rows: unpack, decode, and inner products with a gradient.

Every kernel handles a range of rows and releases the GIL, so that :mod:`rco.formats.row_threads` can spread a
layer over threads. That keeps the result independent of the number of threads (each row is one sum, rows are added
afterwards in order) and free of any OpenMP or TBB runtime beside torch's own.

Scales are float32 or float64, or the bit patterns (uint16) of bfloat16 numbers.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = [
    "REASSOCIATE",
    "ROUND_BFLOAT16",
    "ROUND_HALF",
    "ROUND_NONE",
    "as_bfloat16",
    "as_half",
    "decode_bfloat16",
    "decode_float",
    "decode_float_at",
    "dot_bfloat16",
    "dot_float",
    "pack_rows",
    "unpack_rows",
]

ROUND_NONE, ROUND_BFLOAT16, ROUND_HALF = 0, 1, 2
"""How a decoded product is rounded to its storage type; float32 and float64 need nothing beyond the product."""

_SUM_SPAN = 256
"""Longest run that is summed in the gradient's own precision before it joins the float64 total of the row."""

REASSOCIATE = {"reassoc", "contract", "nsz"}
"""What sums need to be vectorised. Functions that round by adding and subtracting must not have it."""


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
        # Eight codes fill exactly `bits` bytes, so each unit starts on a byte whatever the width.
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

    # Compiled code is linked by name, also with code from numba's cache: functions of one name would take each
    # other's place there.
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
    raise NotImplementedError("compiled code alone")


@numba.extending.overload(_grid_at)
def _compile_grid_at(scales: Any, zeros: Any, group: int) -> Any:
    def of_patterns(scales: Any, zeros: Any, group: int) -> Any:
        return np.uint32(np.uint32(scales[group]) << np.uint32(16)).view(np.float32), np.float32(zeros[group])

    def of_floats(scales: Any, zeros: Any, group: int) -> Any:
        return scales[group], np.float32(zeros[group])

    return of_patterns if scales.dtype == numba.types.uint16 else of_floats


# Inner loops run over slices that start at zero: an offset in the index keeps LLVM from vectorising them.
@numba.njit(nogil=True)
def _decode_row(codes: Any, scales: Any, zeros: Any, group: int, rounding: int, values: Any) -> None:
    for g in range(scales.shape[0]):
        source = codes[g * group : (g + 1) * group]
        target = values[g * group : (g + 1) * group]
        scale, zero = _grid_at(scales, zeros, g)
        if rounding == ROUND_BFLOAT16:
            for j in range(target.shape[0]):
                target[j] = as_bfloat16((np.float32(source[j]) - zero) * scale)
        elif rounding == ROUND_HALF:
            for j in range(target.shape[0]):
                target[j] = as_half((np.float32(source[j]) - zero) * scale)
        else:
            for j in range(target.shape[0]):
                target[j] = (np.float32(source[j]) - zero) * scale


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
def pack_rows(codes: Any, bits: int, stream: Any) -> None:
    """Write codes (rows, cols) as bit streams over ``stream``, the uint8 view of zeroed words."""
    whole = codes.shape[1] // 8
    for row in range(codes.shape[0]):
        for unit in range(whole):
            part = codes[row, unit * 8 : unit * 8 + 8]
            word = np.uint64(0)
            for i in range(8):
                word |= np.uint64(part[i]) << np.uint64(i * bits)
            for byte in range(bits):
                stream[row, unit * bits + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))
        rest = codes[row, whole * 8 :]
        word = np.uint64(0)
        for i in range(rest.shape[0]):
            word |= np.uint64(rest[i]) << np.uint64(i * bits)
        for byte in range((rest.shape[0] * bits + 7) // 8):
            stream[row, whole * bits + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))


@numba.njit(nogil=True, cache=True)
def unpack_rows(stream: Any, bits: int, codes: Any) -> None:
    """Spread packed rows (uint8 view of the words) over ``codes`` (rows, cols)."""
    for row in range(codes.shape[0]):
        _unpack_row(stream[row], bits, codes.shape[1], codes[row])


@numba.njit(nogil=True, cache=True)
def decode_float(codes: Any, scales: Any, zeros: Any, group: int, rounding: int, values: Any) -> None:
    """Write ``(code - zero) * scale``, rounded as stored, to ``values`` (float32 or float64)."""
    for row in range(values.shape[0]):
        _decode_row(codes[row], scales[row], zeros[row], group, rounding, values[row])


@numba.njit(nogil=True, cache=True)
def decode_float_at(
    stream: Any, bits: int, scales: Any, zeros: Any, group: int, rounding: int, rows: Any, values: Any
) -> None:
    """As :func:`decode_float` from the packed rows (uint8 view of the words), for the rows that are listed."""
    codes = np.empty(values.shape[1], dtype=np.uint8)
    for row in rows:
        _unpack_row(stream[row], bits, values.shape[1], codes)
        _decode_row(codes, scales[row], zeros[row], group, rounding, values[row])


@numba.njit(nogil=True, cache=True)
def decode_bfloat16(codes: Any, scales: Any, zeros: Any, group: int, rounding: int, patterns: Any) -> None:
    """As :func:`decode_float`, writing the bit patterns (uint16) of bfloat16 values."""
    values = np.empty(patterns.shape[1], dtype=np.float32)
    for row in range(patterns.shape[0]):
        _decode_row(codes[row], scales[row], zeros[row], group, rounding, values)
        for j in range(patterns.shape[1]):
            rounded = np.float32(as_bfloat16(values[j]))
            pattern = rounded.view(np.uint32)
            patterns[row, j] = np.uint16(pattern >> np.uint32(16))


@numba.njit(nogil=True, fastmath=REASSOCIATE)
def _dot_codes(gradient: Any, codes: Any, scales: Any, zeros: Any, group: int, rounded: bool) -> float:
    """``<gradient, decoded row>`` with values used where they are made, never written."""
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


@numba.njit(nogil=True, cache=True)
def dot_float(
    gradient: Any, stream: Any, bits: int, scales: Any, zeros: Any, group: int, rounding: int, sums: Any
) -> None:
    """``sums[row] = <gradient[row], decoded row>`` for a float32 or float64 gradient and packed rows.

    ``stream`` is the uint8 view of the words. Only a row of codes is in memory at a time.
    """
    cols = gradient.shape[1]
    codes = np.empty(cols, dtype=np.uint8)
    values = np.empty(cols, dtype=gradient.dtype)
    for row in range(gradient.shape[0]):
        _unpack_row(stream[row], bits, cols, codes)
        if rounding == ROUND_HALF:  # rounds by adding and subtracting, which must not be reassociated
            _decode_row(codes, scales[row], zeros[row], group, rounding, values)
            sums[row] = _dot(gradient[row], values)
        else:
            rounded = rounding == ROUND_BFLOAT16
            sums[row] = _dot_codes(gradient[row], codes, scales[row], zeros[row], group, rounded)


@numba.njit(nogil=True, cache=True)
def dot_bfloat16(
    patterns: Any, codes: Any, scales: Any, zeros: Any, group: int, rounding: int, sums: Any
) -> None:
    """As :func:`dot_float` for a bfloat16 gradient given by its bit patterns (uint16)."""
    cols = patterns.shape[1]
    values = np.empty(cols, dtype=np.float32)
    gradient = np.empty(cols, dtype=np.float32)
    for row in range(patterns.shape[0]):
        for j in range(cols):
            pattern = np.uint32(np.uint32(patterns[row, j]) << np.uint32(16))
            gradient[j] = pattern.view(np.float32)
        _decode_row(codes[row], scales[row], zeros[row], group, rounding, values)
        sums[row] = _dot(gradient, values)
