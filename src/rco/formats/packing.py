"""Quantized matrices as dense bit streams, and the two things a search does with them: decode one, dot all.

The layout is that of compressed-tensors' ``pack-quantized`` format: each row is a little-endian stream of
``bits``-wide codes in int32 words, padded with zero bits to a whole word. A code ``c`` stands for
``(c - zero) * scale`` with one scale (and zero) per row and group of columns; the product is rounded once, to the
type that the scales are stored in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rco.formats import cpu_kernels
from rco.formats.compiled import CompiledOperands, decode_compiled, on_compiled_path, products_compiled
from rco.formats.row_threads import over_rows

__all__ = [
    "OptionProducts",
    "PackedWeight",
    "inner_products",
    "on_triton_path",
    "pack",
    "packed_words",
    "unpack",
]

_STORAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CHUNK_ELEMENTS = 1 << 22


def packed_words(cols: int, bits: int) -> int:
    """Number of int32 words that a row of ``cols`` codes takes."""
    return -(-cols * bits // 32)


def on_triton_path(tensor: Tensor) -> bool:
    """Whether the GPU kernels serve this tensor's device; without them torch operations do, more slowly."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"Codes are 1 to 8 bits wide, got bits={bits}.")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (rows, cols) in ``[0, 2^bits)`` into int32 words (rows, ceil(cols * bits / 32))."""
    _check_bits(bits)
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
        over_rows(rows, cols, lambda a, b: cpu_kernels.pack_rows(source[a:b], bits, stream[a:b]))
        return packed
    units = -(-cols // 32)
    words = torch.zeros(rows, units, bits, dtype=torch.int32, device=codes.device)
    # Thirty-two codes fill exactly `bits` words; the i-th code of every unit sits at the same place in it.
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
    _check_bits(bits)
    if packed.ndim != 2 or packed.dtype != torch.int32 or packed.shape[1] != packed_words(cols, bits):
        raise ValueError(
            f"{cols} codes of {bits} bits are int32 rows of {packed_words(cols, bits)} words, "
            f"got {packed.dtype} {tuple(packed.shape)}."
        )
    rows = packed.shape[0]
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=packed.device)
    if on_compiled_path(packed):
        stream, target = packed.contiguous().view(torch.uint8).numpy(), codes.numpy()
        over_rows(rows, cols, lambda a, b: cpu_kernels.unpack_rows(stream[a:b], bits, target[a:b]))
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


@dataclass(frozen=True)
class PackedWeight:
    """One quantized option of a linear layer's weight.

    Attributes:
        packed: Codes, int32 (out, words).
        scales: Scale per row and group, (out, groups), in the type that decoded values are rounded to.
        zeros: Code that stands for zero, uint8 (out, groups); None for a symmetric grid: it is ``2^(bits - 1)``.
        bits: Width of a code.
        shape: (out, in) of the decoded matrix.
        group_size: Columns that share a scale; the last group of a row may be shorter. ``in`` means per channel.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    shape: tuple[int, int]
    group_size: int

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        rows, cols = self.shape
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}.")
        groups = (rows, -(-cols // self.group_size))
        if self.packed.dtype != torch.int32 or self.packed.shape != (rows, packed_words(cols, self.bits)):
            raise ValueError(
                f"A {rows}x{cols} matrix at {self.bits} bits packs into int32 "
                f"({rows}, {packed_words(cols, self.bits)}), got {self.packed.dtype} {tuple(self.packed.shape)}."
            )
        if self.scales.dtype not in _STORAGE_DTYPES or self.scales.shape != groups:
            raise ValueError(
                f"Scales must be floating point of shape {groups} (out, groups), "
                f"got {self.scales.dtype} {tuple(self.scales.shape)}."
            )
        if self.zeros is not None and (self.zeros.dtype != torch.uint8 or self.zeros.shape != groups):
            raise ValueError(
                f"Zero points must be uint8 of shape {groups} (out, groups), "
                f"got {self.zeros.dtype} {tuple(self.zeros.shape)}."
            )

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points as held in memory."""
        return sum(t.nbytes for t in (self.packed, self.scales, self.zeros) if t is not None)

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, packed=self.packed.to(device), scales=self.scales.to(device), zeros=zeros)

    def clone(self) -> PackedWeight:
        """A copy in memory of its own."""
        zeros = None if self.zeros is None else self.zeros.clone()
        return replace(self, packed=self.packed.clone(), scales=self.scales.clone(), zeros=zeros)

    def codes(self) -> Tensor:
        """The codes, uint8 (out, in)."""
        return unpack(self.packed, self.bits, self.shape[1])

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """Decode to a dense matrix, bit for bit as compressed-tensors does, then cast.

        Args:
            dtype: Type of the result; that of the scales (or of ``out``) if not given.
            out: Write here instead of allocating.
        """
        if out is None:
            out = torch.empty(self.shape, dtype=dtype or self.scales.dtype, device=self.device)
        elif out.shape != self.shape or out.device != self.device or dtype not in (None, out.dtype):
            raise ValueError(
                f"out must be {self.shape} on {self.device}" + (f" of {dtype}" if dtype else "")
                + f", got {tuple(out.shape)} on {out.device} of {out.dtype}."
            )  # fmt: skip
        self.decode(out)
        return out

    @cached_property
    def _decoders(self) -> dict[torch.dtype, Callable[[Tensor], None] | None]:
        """How a GPU decodes it, by the type of the result; None where no kernel does."""
        return {}

    @cached_property
    def operands(self) -> CompiledOperands:
        """How compiled code reads it, where it is in host memory."""
        return CompiledOperands.of(
            self.packed, self.scales, self.zeros, self.bits, self.shape[1], self.group_size
        )

    def decode(self, out: Tensor) -> None:
        """Write the decoded matrix to ``out``, which is known to be of its shape and where it is."""
        if out.is_contiguous() and on_triton_path(out):
            if out.dtype not in self._decoders:
                from rco.formats import gpu

                self._decoders[out.dtype] = gpu.decoder(self, out.dtype)
            decoder = self._decoders[out.dtype]
            if decoder is not None:
                decoder(out)
                return
        # Through float32 to bfloat16, a float64 product would be rounded twice.
        direct = (torch.float32, torch.float64) + (
            () if self.scales.dtype == torch.float64 else (torch.bfloat16,)
        )
        if on_compiled_path(out) and out.dtype in direct and out.is_contiguous():
            decode_compiled(self.operands, out)
            return
        step = max(1, _CHUNK_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            out[start : start + step] = _decode_rows(self, start, start + step)

    def inner_product(self, gradient: Tensor) -> Tensor:
        """``<gradient, W>`` with this decoded matrix W, which is never whole in memory."""
        return inner_products(gradient, [self])[0]

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Some rows, sharing memory: one matrix of several that were stacked."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        shape = (len(range(self.shape[0])[start:stop]), self.shape[1])
        return replace(
            self, packed=self.packed[start:stop], scales=self.scales[start:stop], zeros=zeros, shape=shape
        )


def inner_products(
    gradient: Tensor, options: Sequence[PackedWeight | Tensor | None], segments: int = 1
) -> Tensor:
    """``<gradient, W_k>`` for every option of one layer, in one pass over the gradient.

    Args:
        gradient: Gradient of the loss with respect to the layer's effective weight, (out, in).
        options: Packed weights, dense matrices, or None for an option whose weight is zero.
        segments: The rows are so many matrices of equal height, one below the other (experts), and each gets
            its own products.

    Returns:
        (K,) one number per option on the gradient's device, in float64 (float32 where the device has no float64);
        (K, segments) if there are several segments.
    """
    return OptionProducts(options, segments)(gradient)


class OptionProducts:
    """The products of :func:`inner_products` for the same options and one gradient after the other.

    What the options alone decide is worked out once: on a GPU most layers' products take less time than looking at
    their options does.

    Args:
        options: As for :func:`inner_products`.
        segments: Likewise.
    """

    def __init__(self, options: Sequence[PackedWeight | Tensor | None], segments: int = 1) -> None:
        self._options, self._segments = list(options), segments
        self._kernels: dict[Any, Callable[[Tensor], Tensor] | None] = {}  # by the kind of gradient

    def __call__(self, gradient: Tensor) -> Tensor:
        """(K,) or (K, segments), see :func:`inner_products`."""
        kind = (gradient.shape, gradient.device, gradient.dtype)
        if kind not in self._kernels:
            self._check(gradient)
            self._kernels[kind] = self._kernel(gradient)
        kernel = self._kernels[kind]
        gradient = (gradient.detach() if gradient.requires_grad else gradient).contiguous()
        if kernel is not None:
            return kernel(gradient)
        products = _inner_products_compiled if on_compiled_path(gradient) else _inner_products_torch
        found = products(gradient, self._options, self._segments)
        return found[:, 0] if self._segments == 1 else found

    def _check(self, gradient: Tensor) -> None:
        if gradient.shape[0] % self._segments:
            raise ValueError(
                f"{gradient.shape[0]} rows cannot be cut into {self._segments} segments of equal height."
            )
        for index, option in enumerate(self._options):
            if option is not None and (
                tuple(option.shape) != tuple(gradient.shape) or option.device != gradient.device
            ):
                raise ValueError(
                    f"Option {index} is {tuple(option.shape)} on {option.device}, "
                    f"the gradient {tuple(gradient.shape)} on {gradient.device}; they must agree."
                )

    def _kernel(self, gradient: Tensor) -> Callable[[Tensor], Tensor] | None:
        if not on_triton_path(gradient):
            return None
        from rco.formats import gpu

        rows, cols = gradient.shape
        return gpu.multiplier(self._options, self._segments, gradient.dtype, (rows, cols), gradient.device)


def _decode_rows(weight: PackedWeight, start: int, stop: int) -> Tensor:
    """Rows of the decoded matrix in the scales' type, with torch operations only."""
    cols, group = weight.shape[1], weight.group_size
    codes = unpack(weight.packed[start:stop], weight.bits, cols)
    scales = weight.scales[start:stop].repeat_interleave(group, dim=1)[:, :cols]
    # Differences of codes are at most 255 and so exact even in bfloat16.
    if weight.zeros is None:
        steps = codes.to(torch.int16) - (1 << (weight.bits - 1))
    else:
        zeros = weight.zeros[start:stop].to(torch.int16)
        steps = codes.to(torch.int16) - zeros.repeat_interleave(group, dim=1)[:, :cols]
    return steps.to(scales.dtype) * scales


def _inner_products_torch(
    gradient: Tensor, options: Sequence[PackedWeight | Tensor | None], segments: int
) -> Tensor:
    rows, cols = gradient.shape
    exact = torch.float32 if gradient.device.type == "mps" else torch.float64
    total = torch.zeros(len(options), rows, dtype=exact, device=gradient.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, cols))
    for start in range(0, rows, step):
        part = gradient[start : start + step]
        for index, option in enumerate(options):
            if option is None:
                continue
            if isinstance(option, PackedWeight):
                value = _decode_rows(option, start, start + step)
            else:
                value = option.detach()[start : start + step]
            work = torch.promote_types(torch.promote_types(part.dtype, value.dtype), torch.float32)
            total[index, start : start + step] = torch.linalg.vecdot(part.to(work), value.to(work))
    return total.view(len(options), segments, -1).sum(dim=2)


def _inner_products_compiled(
    gradient: Tensor, options: Sequence[PackedWeight | Tensor | None], segments: int
) -> Tensor:
    grids = [option.operands if isinstance(option, PackedWeight) else None for option in options]
    total = products_compiled(gradient, grids, segments)
    dense = [index for index, option in enumerate(options) if isinstance(option, Tensor)]
    if dense:
        total[dense] = _inner_products_torch(gradient, [options[index] for index in dense], segments)
    return total
