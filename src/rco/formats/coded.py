"""Weights held as small integer codes: packing, decoding and the operands of the kernels.

A code ``c`` in a group of columns stands for ``(c - zero) * scale``, or for ``table[c] * scale`` if values are not
equally spaced, rounded once to the type of the scales or a narrower one; a format with minima then subtracts the
group's minimum.
Each row is a little-endian stream of ``bits``-wide codes in int32 words, padded with zero bits to a whole word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

from rco.formats import integer_kernels_cpu
from rco.formats.base import Format, Stored
from rco.formats.elements import Element
from rco.formats.integer_kernels_cpu import (
    CompiledOperands,
    decode_compiled,
    on_compiled_path,
    over_rows,
)

__all__ = [
    "CodedFormat",
    "CodedWeight",
    "check_bits",
    "decode_codes",
    "decode_rows",
    "on_triton_path",
    "pack",
    "packed_words",
    "unpack",
]

_CHUNK_ELEMENTS = 1 << 22


def packed_words(cols: int, bits: int) -> int:
    """Number of int32 words that a row of ``cols`` codes takes."""
    return -(-cols * bits // 32)


def on_triton_path(tensor: Tensor) -> bool:
    """Whether the GPU kernels support this tensor's device; otherwise torch operations are used, more slowly."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def check_bits(bits: int) -> None:
    """Raise for a width that codes cannot have."""
    if not 1 <= bits <= 8:
        raise ValueError(f"Codes are 1 to 8 bits wide, got bits={bits}.")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (rows, cols) in ``[0, 2^bits)`` into int32 words (rows, ceil(cols * bits / 32))."""
    check_bits(bits)
    if codes.ndim != 2 or codes.dtype != torch.uint8:
        raise ValueError(
            f"Expected uint8 codes of shape (rows, cols), got {codes.dtype} {tuple(codes.shape)}."
        )
    if bits < 8 and codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(
            f"Code {int(codes.max())} does not fit into {bits} bits (largest: {(1 << bits) - 1})."
        )
    rows, cols = codes.shape
    if on_compiled_path(codes):
        packed = torch.zeros(rows, packed_words(cols, bits), dtype=torch.int32)
        source, stream = codes.contiguous().numpy(), packed.view(torch.uint8).numpy()
        over_rows(rows, cols, lambda a, b: integer_kernels_cpu.pack_rows(source[a:b], bits, stream[a:b]))
        return packed
    units = -(-cols // 32)
    words = torch.zeros(rows, units, bits, dtype=torch.int32, device=codes.device)
    # Thirty-two codes fill exactly `bits` words; the i-th code of every unit is at the same position in it.
    for i in range(min(32, cols)):
        value = codes[:, i::32].to(torch.int32)
        count = value.shape[1]
        word, offset = divmod(i * bits, 32)
        words[:, :count, word] |= value << offset
        if offset + bits > 32:
            words[:, :count, word + 1] |= value >> (32 - offset)
    return words.view(rows, units * bits)[:, : packed_words(cols, bits)].contiguous()


def unpack(packed: Tensor, bits: int, cols: int) -> Tensor:
    """The codes (rows, cols), uint8, of a packed matrix; the inverse of :func:`pack`."""
    check_bits(bits)
    if packed.ndim != 2 or packed.dtype != torch.int32 or packed.shape[1] != packed_words(cols, bits):
        raise ValueError(
            f"{cols} codes of {bits} bits are int32 rows of {packed_words(cols, bits)} words, "
            f"got {packed.dtype} {tuple(packed.shape)}."
        )
    rows = packed.shape[0]
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=packed.device)
    if on_compiled_path(packed):
        stream, target = packed.contiguous().view(torch.uint8).numpy(), codes.numpy()
        over_rows(rows, cols, lambda a, b: integer_kernels_cpu.unpack_rows(stream[a:b], bits, target[a:b]))
        return codes
    units = -(-cols // 32)
    words = torch.nn.functional.pad(packed, (0, units * bits - packed.shape[1])).view(rows, units, bits)
    for i in range(min(32, cols)):
        target_i = codes[:, i::32]
        count = target_i.shape[1]
        word, offset = divmod(i * bits, 32)
        value = words[:, :count, word] >> offset
        if offset + bits > 32:
            low = 32 - offset
            # The shift above is arithmetic: only its lowest bits are the code's.
            value = (value & ((1 << low) - 1)) | (words[:, :count, word + 1] << low)
        target_i.copy_(value & ((1 << bits) - 1))
    return codes


class CodedFormat(Format):
    """Base of formats whose weights are :class:`CodedWeight`: decoding and inner products by the common kernels."""

    def decode(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The matrix as the serving engine decodes it, then cast."""
        out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
        stored.decode(out)
        return out

    def inner_products(self, stored: Stored, gradient: Tensor, segments: int = 1) -> Tensor:
        """Inner products by the fused kernels, which never hold the whole decoded matrix."""
        from rco.formats.products import inner_products

        return inner_products(gradient, [stored], segments).view(segments)


class CodedWeight(Stored):
    """A weight as codes with a scale per row and group of columns: what the kernels of a search take.

    Attributes:
        packed: Codes, int32 (out, words).
        scales: (out, groups), in the type that products of codes and scales are rounded to.
        zeros: Code that stands for zero, uint8 (out, groups); None: :attr:`midpoint`.
        minima: Subtracted from every value of a group, float32 (out, groups); None if there are none.
        table: Value of every code, float32 (2^bits,), instead of zero points; None if values are equally spaced.
        element: What codes are, if values follow from that; None: values are those of the table, or whole numbers.
        rounded_to: Type that products are rounded to; None: that of the scales.
        bits: Width of a code.
        group_size: Columns that share a scale; the last group of a row may be shorter. ``in`` means per channel.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    minima: Tensor | None = None
    table: Tensor | None = None
    element: Element | None = None
    rounded_to: torch.dtype | None = None
    bits: int
    group_size: int

    @property
    def midpoint(self) -> int:
        """Code that stands for zero where there are no zero points."""
        return 0 if self.minima is not None else 1 << (self.bits - 1)

    def codes(self) -> Tensor:
        """The codes, uint8 (out, in)."""
        return unpack(self.packed, self.bits, self.shape[1])

    @cached_property
    def _decoders(self) -> dict[torch.dtype, Callable[[Tensor], None] | None]:
        """GPU decoders by the type of the result; None where no kernel supports it."""
        return {}

    @cached_property
    def operands(self) -> CompiledOperands:
        """The weight as operands of the compiled kernels, if it is in host memory."""
        return CompiledOperands.of(
            self.packed, self.scales, self.zeros, self.bits, self.shape[1], self.group_size,
            midpoint=self.midpoint, minima=self.minima, table=self.table, rounded_to=self.rounded_to,
        )  # fmt: skip

    def decode(self, out: Tensor) -> None:
        """Write the decoded matrix to ``out``, which must have its shape and device."""
        if out.is_contiguous() and on_triton_path(out):
            if out.dtype not in self._decoders:
                from rco.formats import integer_kernels_gpu

                self._decoders[out.dtype] = integer_kernels_gpu.decoder(self, out.dtype)
            decoder = self._decoders[out.dtype]
            if decoder is not None:
                decoder(out)
                return
        # A float64 product converted to bfloat16 through float32 would be rounded twice.
        direct = (torch.float32, torch.float64) + (
            () if self.scales.dtype == torch.float64 else (torch.bfloat16,)
        )
        if on_compiled_path(out) and out.dtype in direct and out.is_contiguous():
            decode_compiled(self.operands, out)
            return
        step = max(1, _CHUNK_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            out[start : start + step] = decode_rows(self, start, start + step)


def decode_rows(weight: CodedWeight, start: int, stop: int) -> Tensor:
    """Rows of the decoded matrix in the scales' type, with torch operations only."""
    codes = unpack(weight.packed[start:stop], weight.bits, weight.shape[1])
    zeros = weight.midpoint if weight.zeros is None else weight.zeros[start:stop]
    minima = None if weight.minima is None else weight.minima[start:stop]
    decoded = decode_codes(codes, weight.scales[start:stop], zeros, weight.group_size, minima, weight.table)
    return decoded if weight.rounded_to is None else decoded.to(weight.rounded_to)


def decode_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | int,
    group: int,
    minima: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Codes (rows, cols) decoded in the scales' type.

    Args:
        codes: Uint8.
        scales: (rows, groups).
        zeros: Code that stands for zero: (rows, groups), or the same for all.
        group: Columns that share a scale.
        minima: (rows, groups) to subtract.
        table: Value of every code; ``zeros`` are then unused.
    """
    columns = codes.shape[1]

    def wide(part: Tensor) -> Tensor:
        return part.repeat_interleave(group, dim=1)[:, :columns]

    if table is not None:
        steps = table.to(scales.dtype)[codes.int()]
    else:
        # Differences of codes are at most 255 and so exact even in bfloat16.
        points = wide(zeros.to(torch.int16)) if isinstance(zeros, Tensor) else zeros
        steps = (codes.to(torch.int16) - points).to(scales.dtype)
    values = steps * wide(scales)
    return values if minima is None else values - wide(minima)
