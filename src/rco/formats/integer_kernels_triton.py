"""GPU kernels on packed weights: decode one option, and inner products of a gradient with all options.

Both process a matrix in segments: runs of consecutive columns of one row that share a scale. Codes are read four at
a time (a *quad*): four codes of up to eight bits lie in two neighbouring words at most, so a thread loads one or
two words where single codes would take one or two each. Bfloat16 matrices of regular shape, the usual case
of a search, have their own kernels in :mod:`rco.formats.integer_kernels_bfloat16`; those here handle all others.

Every option's value is rounded to the type its scales are stored in, as a checkpoint decodes it; products with the
gradient are summed in float32 within a program, and over programs in float64, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rco.formats.elements import Element
from rco.formats.launching import launching_at

__all__ = [
    "DENSE",
    "Operand",
    "chosen_decoder",
    "decoder",
    "multiplier",
    "multiprocessors",
    "over_programs",
    "partial_sums",
    "segment_width",
]

DENSE = 16
"""The width of an operand that is not packed."""

ZEROS, MINIMA, TABLE, BFLOAT16 = 1, 2, 4, 8
"""Flags of an operand: its optional parts, and values rounded to bfloat16 whatever the type of the scales."""

ELEMENTS: dict[Element, int] = {"e2m1": 16, "e4m3": 32, "int8": 64}
"""Flags of codes whose values are computed, which is faster than a table of them."""

_WIDEST_SEGMENT = 128
_ELEMENTS = 1024  # of one step of a program
_WARPS = 4
_PROGRAMS_PER_CORE = 8


@dataclass(frozen=True)
class Operand:
    """One option as operands of the kernels.

    Attributes:
        codes: Packed codes, int32 (rows, words); the matrix itself if ``bits`` is :data:`DENSE`.
        scales: (rows, groups); unused for a dense operand.
        zeros: Uint8 (rows, groups), or None: ``2^(bits - 1)``, or 0 if there are minima.
        bits: Width of a code.
        minima: Float32 (rows, groups) to subtract from values, or None.
        table: Float32 (2^bits,) value of every code, or None: codes stand for themselves.
        element: What codes are, if that is known; the table is then not read.
        bfloat16: Whether values are rounded to bfloat16 instead of the type of the scales.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    minima: Tensor | None = None
    table: Tensor | None = None
    bfloat16: bool = False
    element: Element | None = None

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Codes, scales, zeros, minima and table; the scales in place of those that do not exist."""
        optional = (self.scales if each is None else each for each in (self.zeros, self.minima, self.table))
        return (self.codes, self.scales, *optional)  # type: ignore[return-value]

    @property
    def kind(self) -> int:
        """Constant of the kernels: which of the optional parts exist."""
        flags = (ZEROS, self.zeros), (MINIMA, self.minima), (TABLE, self.table)
        known = 0 if self.element is None else ELEMENTS[self.element]
        return sum(flag for flag, part in flags if part is not None) + BFLOAT16 * self.bfloat16 + known


def segment_width(group: int, cols: int) -> int:
    """Columns of a segment: the largest power of two, up to 128, that divides a group; 0 if quads do not fit.

    A group that spans the whole row needs no dividing: all its segments use the same scale.
    """
    if group >= cols:
        return _WIDEST_SEGMENT
    width = group & -group
    return 0 if width < 4 else min(width, _WIDEST_SEGMENT)


@triton.jit
def _quads(codes, row, column, cols, BITS: tl.constexpr):
    """Four codes from ``column`` on, in the low bits of a word."""
    words = (cols * BITS + 31) // 32
    bit = column * BITS
    word = bit >> 5
    offset = (bit & 31).to(tl.uint32)
    place = codes + row.to(tl.int64) * words + word
    low = tl.load(place, mask=column < cols, other=0).to(tl.uint32, bitcast=True)
    quads = low >> offset
    if 32 % (4 * BITS) != 0:
        reaches = (offset + 4 * BITS > 32) & (word + 1 < words)
        high = tl.load(place + 1, mask=reaches & (column < cols), other=0).to(tl.uint32, bitcast=True)
        # In two steps, because a shift by 32 is not defined.
        quads |= (high << 1) << (31 - offset)
    return quads


@triton.jit
def _element(code, MANTISSA: tl.constexpr, OFFSET: tl.constexpr, LEAST: tl.constexpr, SIGN: tl.constexpr):
    """Values of floating-point codes, float32.

    Exponents of codes and of float32 differ by OFFSET; LEAST is the smallest value, SIGN the place of the sign.
    """
    size = code & ((1 << SIGN) - 1)
    normal = (size << (23 - MANTISSA)) + (OFFSET << 23)
    small = (size.to(tl.float32) * LEAST).to(tl.uint32, bitcast=True)
    bits = tl.where(size < (1 << MANTISSA), small, normal)
    return (bits | ((code >> SIGN) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _values(
    codes, scales, zeros, minima, table, row, segment, quad, lane, cols, group,
    BITS: tl.constexpr, KIND: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Decoded values of (segments, quads, 4), float32."""
    start = segment * SEGMENT
    if BITS == 16:
        column = (start + 4 * quad)[:, :, None] + lane
        place = row.to(tl.int64)[:, :, None] * cols + column
        value = tl.load(codes + place, mask=column < cols, other=0.0).to(tl.float32)
    else:
        quads = _quads(codes, row, start + 4 * quad, cols, BITS)
        groups = (cols + group - 1) // group
        place = row.to(tl.int64) * groups + start // group
        live = start < cols
        scale = tl.load(scales + place, mask=live, other=0.0)
        code = (quads[:, :, None] >> (lane * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
        if KIND & 16:
            step = _element(code, 1, 126, 0.5, 3)
        elif KIND & 32:
            step = _element(code, 3, 120, 0.001953125, 7)
        elif KIND & 64:
            step = ((code ^ 128).to(tl.int32) - 128).to(tl.float32)
        elif KIND & 4:
            step = tl.load(table + code)
        else:
            if KIND & 1:
                zero = tl.load(zeros + place, mask=live, other=0).to(tl.float32)
            elif KIND & 2:
                zero = tl.zeros(scale.shape, tl.float32)
            else:
                zero = tl.full(scale.shape, 1 << (BITS - 1), tl.float32)
            # The bits of 2^23 + code: cheaper than a conversion, and exact.
            step = (code | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)[:, :, None]
        value = step * scale.to(tl.float32)[:, :, None]
        if KIND & 8:
            value = value.to(tl.bfloat16).to(tl.float32)
        else:
            value = value.to(scale.dtype).to(tl.float32)
        if KIND & 2:
            value -= tl.load(minima + place, mask=live, other=0.0)[:, :, None]
    return value


@triton.jit
def _decode_tile(
    codes, scales, zeros, minima, table, out, rows, cols, group, per_row,
    BITS: tl.constexpr, KIND: tl.constexpr, SEGMENT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)[:, None]
    row, segment = index // per_row, index % per_row
    quad = tl.arange(0, SEGMENT // 4)[None, :]
    lane = tl.arange(0, 4)[None, None, :]
    # A row past the end has no columns.
    width = tl.where(row < rows, cols, 0)
    value = _values(
        codes, scales, zeros, minima, table, tl.minimum(row, rows - 1), segment, quad, lane, cols, group,
        BITS, KIND, SEGMENT,
    )  # fmt: skip
    column = (segment * SEGMENT + 4 * quad)[:, :, None] + lane
    place = row.to(tl.int64)[:, :, None] * cols + column
    tl.store(out + place, value.to(out.dtype.element_ty), mask=column < width[:, :, None])


@triton.jit
def _decode_kernel(
    codes, scales, zeros, minima, table, out, rows, cols, group, per_row,
    BITS: tl.constexpr, KIND: tl.constexpr, SEGMENT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    _decode_tile(
        codes, scales, zeros, minima, table, out, rows, cols, group, per_row, BITS, KIND, SEGMENT, COUNT
    )  # fmt: skip


@triton.jit
def _decode_chosen_kernel(
    choice, codes, scales, zeros, minima, table, out, rows, cols, group, per_row,
    BITS: tl.constexpr, KIND: tl.constexpr, SEGMENT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    chosen = tl.load(choice)
    for k in tl.static_range(len(BITS)):
        if chosen == k:
            _decode_tile(
                codes[k], scales[k], zeros[k], minima[k], table[k], out, rows, cols, group[k], per_row[k],
                BITS[k], KIND[k], SEGMENT[k], COUNT[k],
            )  # fmt: skip


@triton.jit
def _inner_products_kernel(
    gradient, codes, scales, zeros, minima, table, partial, rows, cols, group, per_row, steps,
    BITS: tl.constexpr, KIND: tl.constexpr, SEGMENT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    quad = tl.arange(0, SEGMENT // 4)[None, :]
    lane = tl.arange(0, 4)[None, None, :]
    sums = ()
    for k in tl.static_range(len(BITS)):
        sums = sums + (tl.zeros((COUNT, SEGMENT // 4), tl.float32),)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        index = step * COUNT + tl.arange(0, COUNT)[:, None]
        row, segment = index // per_row, index % per_row
        inside = row < rows
        row = tl.minimum(row, rows - 1) + tl.program_id(1) * rows
        column = (segment * SEGMENT + 4 * quad)[:, :, None] + lane
        place = row.to(tl.int64)[:, :, None] * cols + column
        inside = (column < cols) & inside[:, :, None]
        slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        added = ()
        for k in tl.static_range(len(BITS)):
            value = _values(
                codes[k], scales[k], zeros[k], minima[k], table[k], row, segment, quad, lane, cols, group,
                BITS[k], KIND[k], SEGMENT,
            )  # fmt: skip
            added = added + (sums[k] + tl.sum(slope * value, axis=2),)
        sums = added
    target = partial + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * len(BITS)
    for k in tl.static_range(len(BITS)):
        tl.store(target + k, tl.sum(tl.sum(sums[k], axis=1), axis=0))


def decoder(operand: Operand, group: int, shape: tuple[int, int]) -> Callable[[Tensor], None]:
    """Kernel that writes the decoded matrix to a contiguous one of any floating-point type but float64."""
    rows, cols = shape
    segment = segment_width(group, cols)
    count, per_row = _ELEMENTS // segment, triton.cdiv(cols, segment)
    launch = _decode_kernel[(triton.cdiv(rows * per_row, count),)]
    parts, kind = operand.parts, operand.kind

    def decode(out: Tensor) -> None:
        with launching_at(out):
            # A fused product and difference would be rounded once, not twice as by every other decoder.
            launch(
                *parts, out, rows, cols, group, per_row,
                BITS=operand.bits, KIND=kind, SEGMENT=segment, COUNT=count,
                num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip

    return decode


def chosen_decoder(
    operands: Sequence[tuple[Operand, int]], shape: tuple[int, int]
) -> Callable[[Tensor, Tensor], None]:
    """Kernel that decodes the operand, of those with their groups, whose index is on the device."""
    rows, cols = shape
    listed, groups = zip(*operands, strict=True)
    segments = tuple(segment_width(group, cols) for group in groups)
    counts = tuple(_ELEMENTS // segment for segment in segments)
    per_row = tuple(triton.cdiv(cols, segment) for segment in segments)
    # Operands cut rows into segments of their own lengths: enough programs for any of them.
    programs = max(triton.cdiv(rows * each, count) for each, count in zip(per_row, counts, strict=True))
    launch = _decode_chosen_kernel[(programs,)]
    tensors = tuple(zip(*(operand.parts for operand in listed), strict=True))
    constants = {
        "BITS": tuple(operand.bits for operand in listed), "KIND": tuple(operand.kind for operand in listed),
        "SEGMENT": segments, "COUNT": counts, "num_warps": _WARPS, "enable_fp_fusion": False,
    }  # fmt: skip

    def decode(choice: Tensor, out: Tensor) -> None:
        with launching_at(out):
            launch(choice, *tensors, out, rows, cols, groups, per_row, **constants)

    return decode


def multiplier(
    operands: Sequence[Operand], group: int, shape: tuple[int, int], parts: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Kernel of ``<G, W_k>`` for all operands: float64 (K,), or (K, parts) for each part of the rows."""
    rows, cols = shape[0] // parts, shape[1]
    segment = segment_width(group, cols)
    count, per_row = _ELEMENTS // segment, triton.cdiv(cols, segment)
    steps = triton.cdiv(rows * per_row, count)
    programs = min(steps, max(1, _PROGRAMS_PER_CORE * multiprocessors(device) // parts))
    launch = _inner_products_kernel[(programs, parts)]
    tensors = tuple(zip(*(operand.parts for operand in operands), strict=True))
    bits = tuple(operand.bits for operand in operands)
    kinds = tuple(operand.kind for operand in operands)
    partial = partial_sums(len(operands), programs, parts)

    def multiply(gradient: Tensor) -> Tensor:
        sums = torch.empty(partial, dtype=torch.float32, device=device)
        with launching_at(gradient):
            launch(
                gradient, *tensors, sums, rows, cols, group, per_row, steps,
                BITS=bits, KIND=kinds, SEGMENT=segment, COUNT=count, num_warps=_WARPS,
            )  # fmt: skip
        return over_programs(sums)

    return multiply


def partial_sums(operands: int, programs: int, parts: int) -> tuple[int, ...]:
    """Shape of the partial sums of a multiplication's programs."""
    return (programs, operands) if parts == 1 else (parts, programs, operands)


def over_programs(sums: Tensor) -> Tensor:
    """The sums over programs: (K,), or (K, parts)."""
    return sums.sum(dim=-2, dtype=torch.float64).T if sums.ndim == 3 else sums.sum(dim=0, dtype=torch.float64)


def multiprocessors(device: torch.device) -> int:
    """Cores of a GPU, each of which runs several programs at a time."""
    count: Any = torch.cuda.get_device_properties(device).multi_processor_count
    return int(count)
