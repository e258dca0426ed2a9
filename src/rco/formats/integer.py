"""Integer grids: codes of 1 to 8 bits with a scale, and perhaps a zero point, per row and group of columns.

A code ``c`` stands for ``(c - zero) * scale``; the product is rounded once, to the type of the stored scales.
The layout is that of compressed-tensors' ``pack-quantized`` format: each row is a little-endian stream of
``bits``-wide codes in int32 words, padded with zero bits to a whole word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rco.formats.base import (
    Encoded,
    EncodeSettings,
    Format,
    Shape,
    Stored,
    TensorLayout,
    Tunable,
    TunableKernels,
    measured,
)
from rco.formats.coded import (
    CodedFormat,
    CodedWeight,
    check_bits,
    decode_codes,
    on_triton_path,
    pack,
    packed_words,
    unpack,
)

__all__ = [
    "IntegerGrid",
    "PackedWeight",
    "TunableGrid",
    "on_triton_path",
    "pack",
    "packed_weight",
    "packed_words",
    "unpack",
]

_NAME = re.compile(r"int([1-8])-(?:g([1-9]\d*)|channel)(-sym)?")
_STORAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class IntegerGrid(CodedFormat):
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

    @classmethod
    def listed(cls) -> dict[str, str]:
        """An example of each form of a name; there are too many to list."""
        return {
            "int3-g64": "integers of 1 to 8 bits; a scale and a zero point per 64 weights, or any other number",
            "int4-g32-sym": "the same without zero points",
            "int8-channel": "the same with one scale per row; int8-channel-sym without zero points",
        }

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

    def tunable(self, stored: Stored, original: Tensor | None = None, *, codes: bool = True) -> TunableGrid:
        """The weight with trainable scales and, with ``codes``, offsets of the codes."""
        return TunableGrid(packed_weight(stored), original, codes=codes)


class PackedWeight(CodedWeight):
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
        check_bits(bits)
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


def packed_weight(stored: Stored) -> PackedWeight:
    """A stored weight known to be on an integer grid."""
    assert isinstance(stored, PackedWeight)
    return stored


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
    codes: Tensor | None

    def __init__(self, weight: PackedWeight, original: Tensor | None = None, *, codes: bool = True) -> None:
        super().__init__()
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._weight = weight
        self.scales = nn.Parameter(weight.scales.detach().to(exact).clone())
        # Kernels read packed codes, unless an offset is added to each.
        unpacked = codes or not on_triton_path(weight.packed)
        self.register_buffer("codes", weight.codes() if unpacked else None, persistent=False)
        self.offsets: nn.Parameter | None = None
        if codes:
            start = torch.zeros(weight.shape, dtype=exact, device=weight.device)
            if original is not None:
                start = _fractions(weight, original.to(start))
            self.offsets = nn.Parameter(start)

    def forward(self) -> Tensor:
        """The decoded matrix in the type of the stored scales."""
        tuned = self.scales, self.offsets, self._unpacked(), self._weight
        decoded: Tensor = _TunedGrid.apply(*tuned)  # type: ignore[no-untyped-call]
        return decoded

    def _unpacked(self) -> Tensor:
        """Codes before training, one number each."""
        return self._weight.codes() if self.codes is None else self.codes

    def kernels(self) -> TunableKernels | None:
        """GPU kernels of a training step."""
        if not on_triton_path(self.scales):
            return None
        from rco.formats.tuning_kernels_triton import GridKernels

        if not GridKernels.support(self._weight):
            return None
        codes = self.codes if self.offsets is not None else None
        return GridKernels(self._weight, self.scales, codes, self.offsets)

    def stored(self) -> PackedWeight:
        """The packed weight of the present scales and codes."""
        weight = self._weight
        offsets = None if self.offsets is None else self.offsets.detach()
        moved = _moved_codes(self._unpacked(), offsets, weight.bits)
        parts = {"packed": pack(moved, weight.bits), "scales": _stored_scales(self.scales.detach(), weight)}
        return weight.over(parts if weight.zeros is None else {**parts, "zeros": weight.zeros})


def _points(weight: PackedWeight) -> Tensor | int:
    return weight.midpoint if weight.zeros is None else weight.zeros


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
        return decode_codes(moved, stored, _points(weight), weight.group_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scales, offsets, codes, moved, stored = ctx.saved_tensors
        weight, exact = ctx.weight, scales.dtype
        columns, group = weight.shape[1], weight.group_size
        gradient = gradient.to(exact)
        steps = decode_codes(moved, torch.ones_like(scales), _points(weight), group)
        shares = torch.nn.functional.pad(gradient * steps, (0, stored.shape[1] * group - columns))
        of_scales = shares.view(*stored.shape, group).sum(dim=2)
        if offsets is None:
            return of_scales, None, None, None
        raw = codes + offsets.to(exact)
        inside = (raw >= -0.5) & (raw <= (1 << weight.bits) - 0.5)
        return of_scales, torch.where(inside, gradient * _widened(stored.to(exact), weight), 0.0), None, None
