"""GPU kernels of the training of integer grids: gradients of scales, decoding, and a whole step of Adam.

Each program handles one group of columns of some rows. A step reads codes, offsets, moments and the gradient of the
decoded weight once and writes offsets, moments and the new decoded weight once; nothing dense is kept in between.
Results equal those of the torch operations in :mod:`rco.formats.integer` and :mod:`rco.compression.tuning` up to
the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rco.formats.base import AdamState, AdamStep
from rco.formats.launching import launching_at

if TYPE_CHECKING:
    from rco.formats.integer import PackedWeight

__all__ = ["GridKernels"]

_ELEMENTS = 1024  # of one program, if a group is not larger
_WIDEST_GROUP = 1 << 14


@triton.jit
def _rounded(value):
    """The nearest whole number, ties to even, of a value far below 2^22."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _codes(codes, row, column, cols, live, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Codes of rows and columns, float32: from packed words, or from a byte each."""
    if PACKED:
        words = (cols * BITS + 31) // 32
        bit = column * BITS
        offset = (bit & 31).to(tl.uint32)
        place = codes + row.to(tl.int64) * words + (bit >> 5)
        code = tl.load(place, mask=live, other=0).to(tl.uint32, bitcast=True) >> offset
        if 32 % BITS != 0:
            reaches = live & (offset + BITS > 32)
            high = tl.load(place + 1, mask=reaches, other=0).to(tl.uint32, bitcast=True)
            # In two steps, because a shift by 32 is not defined.
            code |= (high << 1) << (31 - offset)
        code = code & ((1 << BITS) - 1)
    else:
        code = tl.load(codes + row.to(tl.int64) * cols + column, mask=live, other=0)
    return code.to(tl.float32)


@triton.jit
def _stored_scale(scale, first):
    """A scale in its stored type, as float32; where it was not negative at first it never becomes so."""
    kept = tl.where(first < 0, scale, tl.maximum(scale, 0.0))
    return kept.to(first.dtype).to(tl.float32)


@triton.jit
def _adam(value, gradient, first, second, place, live, rate, grow, EPSILON: tl.constexpr,
          ONE: tl.constexpr, TWO: tl.constexpr):  # fmt: skip
    """A value after a step of Adam; its moments are updated."""
    mean = tl.load(first + place, mask=live, other=0.0).to(tl.float32)
    square = tl.load(second + place, mask=live, other=0.0).to(tl.float32)
    mean = mean + ONE * (gradient - mean)
    square = square * TWO + gradient * gradient * (1 - TWO)
    tl.store(first + place, mean.to(first.dtype.element_ty), mask=live)
    tl.store(second + place, square.to(second.dtype.element_ty), mask=live)
    return value - mean / (tl.sqrt(square * grow) + EPSILON) * rate


@triton.jit
def _tile(rows, cols, group, groups, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Rows, columns and group of a program, places of its groups, and which of them exist."""
    number = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups) * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, GROUP)
    column = number * group + inside
    exists = row < rows
    live = exists[:, None] & ((inside < group) & (column < cols))[None, :]
    return row, column, row.to(tl.int64) * groups + number, exists, live


@triton.jit
def _zero(zeros, place, exists, BITS: tl.constexpr, ZEROS: tl.constexpr):
    if ZEROS:
        zero = tl.load(zeros + place, mask=exists, other=0).to(tl.float32)
    else:
        zero = tl.full(place.shape, 1 << (BITS - 1), tl.float32)
    return zero[:, None]


@triton.jit
def _gradient_kernel(
    gradient, codes, zeros, found, rows, cols, group, groups,
    BITS: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column, place, exists, live = _tile(rows, cols, group, groups, ROWS, GROUP)
    at = row.to(tl.int64)[:, None] * cols + column[None, :]
    slope = tl.load(gradient + at, mask=live, other=0.0).to(tl.float32)
    step = _codes(codes, row[:, None], column[None, :], cols, live, BITS, True)
    step -= _zero(zeros, place, exists, BITS, ZEROS)
    tl.store(found + place, tl.sum(slope * step, axis=1), mask=exists)


@triton.jit
def _decode_kernel(
    codes, offsets, scales, initial, zeros, out, rows, cols, group, groups,
    BITS: tl.constexpr, ZEROS: tl.constexpr, MOVED: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column, place, exists, live = _tile(rows, cols, group, groups, ROWS, GROUP)
    at = row.to(tl.int64)[:, None] * cols + column[None, :]
    code = _codes(codes, row[:, None], column[None, :], cols, live, BITS, not MOVED)
    if MOVED:
        offset = tl.load(offsets + at, mask=live, other=0.0).to(tl.float32)
        code = tl.minimum(tl.maximum(_rounded(code + offset), 0.0), (1 << BITS) - 1.0)
    first = tl.load(initial + place, mask=exists, other=0.0)
    scale = _stored_scale(tl.load(scales + place, mask=exists, other=0.0), first)
    value = (code - _zero(zeros, place, exists, BITS, ZEROS)) * scale[:, None]
    tl.store(out + at, value.to(first.dtype).to(out.dtype.element_ty), mask=live)


@triton.jit
def _adam_kernel(
    gradient, codes, offsets, scales, initial, zeros, out,
    code_first, code_second, scale_first, scale_second, numbers, count, code_rate, scale_rate,
    rows, cols, group, groups,
    BITS: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    EPSILON: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    row, column, place, exists, live = _tile(rows, cols, group, groups, ROWS, GROUP)
    at = row.to(tl.int64)[:, None] * cols + column[None, :]
    slope = tl.load(gradient + at, mask=live, other=0.0).to(tl.float32)
    code = _codes(codes, row[:, None], column[None, :], cols, live, BITS, False)
    offset = tl.load(offsets + at, mask=live, other=0.0).to(tl.float32)
    zero = _zero(zeros, place, exists, BITS, ZEROS)
    first = tl.load(initial + place, mask=exists, other=0.0)
    scale = tl.load(scales + place, mask=exists, other=0.0)
    stored = _stored_scale(scale, first)
    shrink, grow = tl.load(numbers), tl.load(numbers + 1)
    largest = (1 << BITS) - 1.0

    raw = code + offset
    moved = tl.minimum(tl.maximum(_rounded(raw), 0.0), largest)
    of_scale = tl.sum(slope * (moved - zero), axis=1)
    of_code = tl.where((raw >= -0.5) & (raw <= largest + 0.5), slope * stored[:, None], 0.0)

    scale = _adam(
        scale,
        of_scale,
        scale_first,
        scale_second,
        place,
        exists,
        scale_rate * shrink,
        grow,
        EPSILON,
        ONE,
        TWO,
    )
    tl.store(scales + place, scale, mask=exists)
    offset = _adam(
        offset, of_code, code_first, code_second, at, live, code_rate * shrink, grow, EPSILON, ONE, TWO
    )
    if offsets.dtype.element_ty == tl.float16:
        # Rounding at random: 13 bits, those that a float16 does not have, of a hash of position and step.
        noise = at.to(tl.uint32) * 0x9E3779B1 + (tl.load(count).to(tl.uint32) + 1) * 0x85EBCA6B
        noise = (noise ^ (noise >> 15)) * 0x2C1B3C6D
        noise = (noise ^ (noise >> 12)) * 0x297A2D39
        noise = (noise ^ (noise >> 15)) & 0x1FFF
        word = offset.to(tl.int32, bitcast=True) + noise.to(tl.int32)
        offset = ((word >> 13) << 13).to(tl.float32, bitcast=True)
    kept = offset.to(offsets.dtype.element_ty)
    tl.store(offsets + at, kept, mask=live)

    moved = tl.minimum(tl.maximum(_rounded(code + kept.to(tl.float32)), 0.0), largest)
    value = (moved - zero) * _stored_scale(scale, first)[:, None]
    tl.store(out + at, value.to(first.dtype).to(out.dtype.element_ty), mask=live)


class GridKernels:
    """The kernels for one trainable integer grid in the memory of a GPU.

    Args:
        weight: The packed weight before training.
        scales: The trained scales, float32 (out, groups).
        codes: Codes before training, uint8 (out, in); None if codes are not trained.
        offsets: Trained offsets of the codes (out, in); None as well.
    """

    @staticmethod
    def support(weight: PackedWeight) -> bool:
        """Whether the kernels take such a weight."""
        narrow = weight.scales.dtype in (torch.bfloat16, torch.float16, torch.float32)
        return narrow and min(weight.group_size, weight.shape[1]) <= _WIDEST_GROUP

    def __init__(
        self, weight: PackedWeight, scales: Tensor, codes: Tensor | None, offsets: Tensor | None
    ) -> None:
        self._packed, self._initial = weight.packed, weight.scales
        self._zeros = weight.scales if weight.zeros is None else weight.zeros
        self._scales, self._codes, self._offsets = scales, codes, offsets
        rows, cols = weight.shape
        group = min(weight.group_size, cols)
        groups = weight.scales.shape[1]
        width = triton.next_power_of_2(group)
        count = max(1, _ELEMENTS // width)
        self._sizes = (rows, cols, group, groups)
        self._grid = (triton.cdiv(rows, count) * groups,)
        self._constants = {
            "BITS": weight.bits, "ZEROS": weight.zeros is not None, "ROWS": count, "GROUP": width,
            "num_warps": 4 if width <= 2048 else 16,
        }  # fmt: skip

    def gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        """Gradients of the scales, if codes are not trained, from that of the decoded weight."""
        found = torch.empty_like(self._scales)
        with launching_at(gradient):
            _gradient_kernel[self._grid](
                gradient, self._packed, self._zeros, found, *self._sizes, **self._constants
            )
        return {"scales": found}

    def decode(self, out: Tensor) -> None:
        """Write the decoded weight to a contiguous matrix."""
        moved = self._offsets is not None
        codes = self._codes if moved else self._packed
        offsets = self._offsets if moved else self._scales
        with launching_at(out):
            _decode_kernel[self._grid](
                codes, offsets, self._scales, self._initial, self._zeros, out, *self._sizes,
                MOVED=moved, **self._constants,
            )  # fmt: skip

    def adam(self, gradient: Tensor, out: Tensor, state: Mapping[str, AdamState], step: AdamStep) -> None:
        """One step of Adam on codes and scales; writes the new decoded weight to ``out``."""
        of_codes, of_scales = state["offsets"], state["scales"]
        with launching_at(gradient):
            _adam_kernel[self._grid](
                gradient, self._codes, self._offsets, self._scales, self._initial, self._zeros, out,
                *of_codes.moments, *of_scales.moments, step.numbers, step.step, of_codes.rate, of_scales.rate,
                *self._sizes, EPSILON=step.epsilon, ONE=1 - step.betas[0], TWO=step.betas[1],
                enable_fp_fusion=False, **self._constants,
            )  # fmt: skip
