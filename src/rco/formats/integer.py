"""Integer grids: codes of 1 to 8 bits with a scale, and perhaps a zero point, per row and group of columns.

A code ``c`` stands for ``(c - zero) * scale``; the product is rounded once, to the type of the stored scales.
The layout is that of compressed-tensors' ``pack-quantized`` format: each row is a little-endian stream of
``bits``-wide codes in int32 words, padded with zero bits to a whole word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rco.formats import integer_kernels_cpu
from rco.formats.base import (
    Encoded,
    EncodeSettings,
    Format,
    Shape,
    Stored,
    TensorLayout,
    Tunable,
    measured,
)
from rco.formats.integer_kernels_cpu import (
    CompiledOperands,
    decode_compiled,
    on_compiled_path,
    over_rows,
)

__all__ = [
    "IntegerGrid",
    "PackedWeight",
    "TunableGrid",
    "decode_rows",
    "on_triton_path",
    "pack",
    "packed_words",
    "unpack",
]

_NAME = re.compile(r"int([1-8])-(?:g([1-9]\d*)|channel)(-sym)?")
_STORAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
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


@dataclass(frozen=True)
class IntegerGrid(Format):
    """Codes of a fixed width on a uniform grid per row and group of columns.

    Attributes:
        bits: Width of a code, 1 to 8.
        group_size: Columns that share a scale; None for one scale per row.
        symmetric: Zero point fixed at ``2^(bits - 1)`` and not stored; else one per row and group.
    """

    bits: int
    group_size: int | None = None
    symmetric: bool = False

    family = "integer"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"A grid has 1 to 8 bits, got bits={self.bits}.")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(
                f"group_size must be at least 1, or None for one scale per row; got {self.group_size}."
            )

    @property
    def name(self) -> str:
        """The name, such as ``int3-g64``, ``int4-g128-sym`` or ``int8-channel``."""
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"int{self.bits}-{group}" + ("-sym" if self.symmetric else "")

    @classmethod
    def parse(cls, name: str) -> IntegerGrid | None:
        """The grid of that name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        bits, group, symmetric = match.groups()
        return cls(int(bits), None if group is None else int(group), symmetric is not None)

    def __str__(self) -> str:
        grid = "symmetric" if self.symmetric else "asymmetric"
        groups = "per channel" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.bits} bits {grid}, {groups}"

    def on(self, columns: int) -> IntegerGrid:
        """The grid that is written for rows of that length: a group of the whole row is one scale per channel."""
        if self.group_size is not None and self.group_size >= columns:
            return IntegerGrid(self.bits, None, self.symmetric)
        return self

    def columns_per_group(self, columns: int) -> int:
        """Group size on rows of that length."""
        return max(1, columns if self.group_size is None else min(self.group_size, columns))

    def groups(self, columns: int) -> int:
        """Number of scales per row."""
        return -(-columns // self.columns_per_group(columns))

    def layout(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorLayout]:
        """Packed codes, scales, zero points if the grid has them, and the shape of the weight."""
        rows, columns = shape
        groups = self.groups(columns)
        tensors = {
            "weight_packed": TensorLayout(torch.int32, (rows, packed_words(columns, self.bits))),
            "weight_scale": TensorLayout(dtype, (rows, groups)),
        }
        if not self.symmetric:
            # Zero points are packed along the rows, unlike the codes.
            tensors["weight_zero_point"] = TensorLayout(torch.int32, (packed_words(rows, self.bits), groups))
        tensors["weight_shape"] = TensorLayout(torch.int64, (2,))
        return tensors

    def file_tensors(self, stored: Stored) -> dict[str, Tensor]:
        """The tensors of a ``pack-quantized`` checkpoint."""
        weight = packed_weight(stored)
        tensors = {"weight_packed": weight.packed, "weight_scale": weight.scales}
        if weight.zeros is not None:
            tensors["weight_zero_point"] = pack(weight.zeros.T.contiguous(), self.bits).T.contiguous()
        tensors["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        return tensors

    def restore(self, shape: Shape, tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The packed weight over codes, scales and zero points."""
        group = self.columns_per_group(shape[1])
        return PackedWeight(
            tensors["packed"], tensors["scales"], tensors.get("zeros"), self.bits, shape, group
        )

    def encode(
        self, weight: Tensor, statistics: Tensor | None = None, *, settings: EncodeSettings | None = None
    ) -> PackedWeight:
        """Encode by GPTQ if there are statistics of the inputs, else by rounding to nearest."""
        return packed_weight(self.encode_all([self], weight, statistics, settings=settings)[0].stored)

    @classmethod
    def encode_all(
        cls,
        formats: Sequence[Format],
        weight: Tensor,
        statistics: Tensor | None = None,
        *,
        settings: EncodeSettings | None = None,
    ) -> list[Encoded]:
        """Encode by GPTQ on one Hessian for all grids at once, or by rounding to nearest."""
        from rco.formats.gptq import gptq
        from rco.formats.rounding import round_to_nearest

        settings = settings or EncodeSettings()
        grids = [each for each in formats if isinstance(each, IntegerGrid)]
        if len(grids) < len(formats):
            raise ValueError(f"Expected integer grids, got {', '.join(each.name for each in formats)}.")
        if statistics is None:
            rounded = round_to_nearest(
                weight, grids, clip=settings.clip, storage_dtype=settings.storage_dtype
            )
            return [measured(packed, weight, None) for packed in rounded]
        result = gptq(
            weight,
            statistics,
            grids,
            damp=settings.damp,
            act_order=settings.act_order,
            clip=settings.clip,
            sweeps=settings.sweeps,
            storage_dtype=settings.storage_dtype,
        )
        errors, relative = result.errors.tolist(), result.relative_errors.tolist()
        return [Encoded(*each) for each in zip(result.candidates, errors, relative, strict=True)]

    def decode(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The matrix as compressed-tensors decodes it, then cast."""
        out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
        stored.decode(out)
        return out

    def inner_products(self, stored: Stored, gradient: Tensor, segments: int = 1) -> Tensor:
        """Inner products by the fused kernels, which never hold the whole decoded matrix."""
        from rco.formats.products import inner_products

        return inner_products(gradient, [packed_weight(stored)], segments).view(segments)

    def tunable(self, stored: Stored, original: Tensor | None = None, *, codes: bool = True) -> TunableGrid:
        """The weight with trainable scales and, with ``codes``, offsets of the codes."""
        return TunableGrid(packed_weight(stored), original, codes=codes)


class PackedWeight(Stored):
    """One weight on an integer grid.

    Attributes:
        packed: Codes, int32 (out, words).
        scales: Scale per row and group, (out, groups), in the type that decoded values are rounded to.
        zeros: Code that stands for zero, uint8 (out, groups); None for a symmetric grid: it is ``2^(bits - 1)``.
        bits: Width of a code.
        shape: (out, in) of the decoded matrix.
        group_size: Columns that share a scale; the last group of a row may be shorter. ``in`` means per channel.
    """

    format: IntegerGrid

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bits: int,
        shape: Shape,
        group_size: int,
    ) -> None:
        _check_bits(bits)
        rows, cols = shape
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}.")
        groups = (rows, -(-cols // group_size))
        if packed.dtype != torch.int32 or packed.shape != (rows, packed_words(cols, bits)):
            raise ValueError(
                f"A {rows}x{cols} matrix at {bits} bits packs into int32 "
                f"({rows}, {packed_words(cols, bits)}), got {packed.dtype} {tuple(packed.shape)}."
            )
        if scales.dtype not in _STORAGE_DTYPES or scales.shape != groups:
            raise ValueError(
                f"Scales must be floating point of shape {groups} (out, groups), "
                f"got {scales.dtype} {tuple(scales.shape)}."
            )
        if zeros is not None and (zeros.dtype != torch.uint8 or zeros.shape != groups):
            raise ValueError(
                f"Zero points must be uint8 of shape {groups} (out, groups), "
                f"got {zeros.dtype} {tuple(zeros.shape)}."
            )
        grid = IntegerGrid(bits, None if group_size >= cols else group_size, zeros is None)
        tensors = {"packed": packed, "scales": scales}
        super().__init__(grid, shape, tensors if zeros is None else {**tensors, "zeros": zeros})
        self.packed, self.scales, self.zeros = packed, scales, zeros
        self.bits, self.group_size = bits, group_size

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
            self.packed, self.scales, self.zeros, self.bits, self.shape[1], self.group_size
        )

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


def packed_weight(stored: Stored) -> PackedWeight:
    """A stored weight known to be on an integer grid."""
    assert isinstance(stored, PackedWeight)
    return stored


def decode_rows(weight: PackedWeight, start: int, stop: int) -> Tensor:
    """Rows of the decoded matrix in the scales' type, with torch operations only."""
    codes = unpack(weight.packed[start:stop], weight.bits, weight.shape[1])
    zeros = None if weight.zeros is None else weight.zeros[start:stop]
    return _decode_codes(codes, weight.scales[start:stop], zeros, weight.bits, weight.group_size)


def _decode_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> Tensor:
    """Codes (rows, cols) decoded in the scales' type."""
    columns = codes.shape[1]
    # Differences of codes are at most 255 and so exact even in bfloat16.
    if zeros is None:
        steps = codes.to(torch.int16) - (1 << (bits - 1))
    else:
        steps = codes.to(torch.int16) - zeros.to(torch.int16).repeat_interleave(group, dim=1)[:, :columns]
    return steps.to(scales.dtype) * scales.repeat_interleave(group, dim=1)[:, :columns]


class TunableGrid(Tunable):
    """A packed weight whose scales and codes may be trained; zero points stay.

    Scales are trained at full precision and rounded to their stored type; a positive one never becomes negative.
    Codes are trained by an offset in units of a code, rounded to a whole number. Gradients pass through both
    roundings, and are zero where a code leaves its range.

    Args:
        weight: The packed weight.
        original: The weight before it was packed: an offset then starts at its fractional part on the grid. None:
            at zero.
        codes: Whether codes are trained as well.
    """

    spacing: ClassVar[Mapping[str, float]] = {"offsets": 1.0}

    def __init__(self, weight: PackedWeight, original: Tensor | None = None, *, codes: bool = True) -> None:
        super().__init__()
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._weight = weight
        self.scales = nn.Parameter(weight.scales.detach().to(exact).clone())
        self.register_buffer("codes", weight.codes(), persistent=False)
        self.offsets: nn.Parameter | None = None
        if codes:
            start = torch.zeros(weight.shape, dtype=exact, device=weight.device)
            if original is not None:
                start = _fractions(weight, original.to(start))
            self.offsets = nn.Parameter(start)

    def forward(self) -> Tensor:
        """The decoded matrix in the type of the stored scales."""
        decoded: Tensor = _TunedGrid.apply(self.scales, self.offsets, self.codes, self._weight)  # type: ignore[no-untyped-call]
        return decoded

    def stored(self) -> PackedWeight:
        """The packed weight of the present scales and codes."""
        weight, codes = self._weight, self.codes
        assert isinstance(codes, Tensor)
        offsets = None if self.offsets is None else self.offsets.detach()
        moved = _moved_codes(codes, offsets, weight.bits)
        parts = {"packed": pack(moved, weight.bits), "scales": _stored_scales(self.scales.detach(), weight)}
        return weight.over(parts if weight.zeros is None else {**parts, "zeros": weight.zeros})


_NEAREST = 0.499  # largest offset that rounds to the same code in any floating-point type


def _fractions(weight: PackedWeight, original: Tensor) -> Tensor:
    """Fractional parts of the original weights on the grid, from -1/2 to 1/2: offsets that change no code.

    GPTQ moves some codes away from the nearest one on purpose. They keep the fractional part, since an offset up to
    the original weight would put all of them at the edge of their code, where the first step undoes GPTQ.
    """
    scales = _widened(weight.scales.to(original), weight)
    places = torch.where(scales == 0, 0.0, original / scales)
    return (places - places.round()).clamp_(-_NEAREST, _NEAREST)


def _widened(values: Tensor, weight: PackedWeight) -> Tensor:
    """(out, groups) values repeated for every column, (out, in)."""
    return values.repeat_interleave(weight.group_size, dim=1)[:, : weight.shape[1]]


def _moved_codes(codes: Tensor, offsets: Tensor | None, bits: int) -> Tensor:
    if offsets is None:
        return codes
    # Wide enough for a sum that offsets of 16 bits would round.
    raw = codes + offsets.to(torch.promote_types(offsets.dtype, torch.float32))
    return torch.round(raw).clamp_(0, (1 << bits) - 1).to(torch.uint8)


def _stored_scales(scales: Tensor, weight: PackedWeight) -> Tensor:
    """Scales in their stored type, without a change of sign."""
    return torch.where(weight.scales < 0, scales, scales.clamp(min=0)).to(weight.dtype)


class _TunedGrid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scales: Tensor, offsets: Tensor | None, codes: Tensor, weight: PackedWeight
    ) -> Tensor:
        moved, stored = _moved_codes(codes, offsets, weight.bits), _stored_scales(scales, weight)
        ctx.weight = weight
        ctx.save_for_backward(scales, offsets, codes, moved, stored)
        return _decode_codes(moved, stored, weight.zeros, weight.bits, weight.group_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scales, offsets, codes, moved, stored = ctx.saved_tensors
        weight, exact = ctx.weight, scales.dtype
        columns, group = weight.shape[1], weight.group_size
        gradient = gradient.to(exact)
        steps = _decode_codes(moved, torch.ones_like(scales), weight.zeros, weight.bits, group)
        shares = torch.nn.functional.pad(gradient * steps, (0, stored.shape[1] * group - columns))
        of_scales = shares.view(*stored.shape, group).sum(dim=2)
        if offsets is None:
            return of_scales, None, None, None
        raw = codes + offsets.to(exact)
        inside = (raw >= -0.5) & (raw <= (1 << weight.bits) - 0.5)
        return of_scales, torch.where(inside, gradient * _widened(stored.to(exact), weight), 0.0), None, None
