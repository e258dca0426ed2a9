"""ggml's block types as formats: exact bytes, ggml's own encoder, and weights held as small integer codes.

Every type decodes to ``value * scale - minimum`` in float32, where a code of 2 to 8 bits stands for the value, and
scale and minimum belong to 16 or 32 weights of a row. In the K and IQ types these two are products of a float16 of
the whole block of 256 weights and a small integer. A stored weight keeps codes, float16 numbers and small integers
apart, so that the kernels of a search take it as it is, training can change its parts, and the block's bytes are
rebuilt exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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
from rco.formats.coded import CodedFormat, CodedWeight, decode_codes, pack
from rco.formats.ggml import libggml
from rco.formats.ggml.bit_layout import LAYOUTS, join, split

__all__ = ["BLOCK_TYPES", "BlockType", "BlockWeight", "GGMLFormat", "importances"]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockType:
    """One of ggml's block types.

    Attributes:
        name: Lower-case name.
        number: ggml's number of the type.
        block: Weights per block.
        code_bits: Width of a code in memory.
        group: Weights that share a scale.
        bits: Nominal bits per weight.
        levels: Magnitudes of a type whose codes are signs and magnitudes; its blocks hold indices of a grid.
        values: Value of every code, where values are not equally spaced and not ``levels``.
        sub_offset: Integer that is subtracted from a block's scales; half their range if they are signed.
        sub_scale: (a, b): the scale of a group is that of the block times ``a + b * integer``.
        zero: Code that stands for zero, for equally spaced values.
        needs_importance: Whether ggml requires an importance matrix to encode it.
    """

    name: str
    number: int
    block: int
    code_bits: int
    group: int
    bits: int
    levels: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    sub_offset: int = 0
    sub_scale: tuple[float, float] = (0.0, 1.0)
    zero: int = 0
    needs_importance: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return LAYOUTS[self.name].block_bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, scales and minima included."""
        return 8 * self.block_bytes / self.block

    @property
    def with_minima(self) -> bool:
        """Whether groups have minima."""
        return "minimum" in LAYOUTS[self.name].fields

    @property
    def with_sub_scales(self) -> bool:
        """Whether the scale of a group is a product of the block's scale and an integer."""
        return "sub_scales" in LAYOUTS[self.name].fields

    @property
    def table(self) -> tuple[float, ...]:
        """Value of every code; empty for equally spaced values."""
        if self.levels:
            spare = (1 << (self.code_bits - 1)) - len(self.levels)  # codes that do not occur
            magnitudes = (*self.levels, *(0,) * spare)
            return tuple(float(v) for v in (*magnitudes, *(-v for v in magnitudes)))
        return tuple(map(float, self.values))


_IQ2 = {"levels": (8, 25, 43), "code_bits": 3, "sub_scale": (0.125, 0.25), "bits": 2, "block": 256}

BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType("iq2_xxs", 16, group=32, needs_importance=True, **_IQ2),  # type: ignore[arg-type]
            BlockType("iq2_xs", 17, group=16, needs_importance=True, **_IQ2),  # type: ignore[arg-type]
            BlockType("iq2_s", 22, group=16, **_IQ2),  # type: ignore[arg-type]
            BlockType("q2_k", 10, 256, 2, 16, 2),
            BlockType(
                "iq3_xxs", 18, 256, 4, 32, 3, levels=(4, 12, 20, 28, 36, 44, 52, 62), sub_scale=(0.25, 0.5)
            ),
            BlockType("iq3_s", 21, 256, 4, 32, 3, levels=(1, 3, 5, 7, 9, 11, 13, 15), sub_scale=(1.0, 2.0)),
            BlockType("q3_k", 11, 256, 3, 16, 3, sub_offset=32, zero=4),
            BlockType("iq4_xs", 23, 256, 4, 32, 4, values=_IQ4, sub_offset=32),
            BlockType("iq4_nl", 20, 32, 4, 32, 4, values=_IQ4),
            BlockType("q4_0", 2, 32, 4, 32, 4, zero=8),
            BlockType("q4_k", 12, 256, 4, 32, 4),
            BlockType("q4_1", 3, 32, 4, 32, 4),
            BlockType("q5_0", 6, 32, 5, 32, 5, zero=16),
            BlockType("q5_k", 13, 256, 5, 32, 5),
            BlockType("q5_1", 7, 32, 5, 32, 5),
            BlockType("q6_k", 14, 256, 6, 16, 6, sub_offset=128, zero=32),
            BlockType("q8_0", 8, 32, 8, 32, 8, zero=128),
        )
    }
)
_TWOS_COMPLEMENT = {"q8_0": "codes", "q6_k": "sub_scales"}  # fields of signed bytes


def importances(statistics: Tensor | None) -> Tensor | None:
    """(in,) importance of every column: the mean squared inputs, up to a factor.

    Args:
        statistics: (in, in) second moments of the inputs, or their diagonal (in,).
    """
    if statistics is None or statistics.ndim == 1:
        return statistics
    return statistics.diagonal()


@dataclass(frozen=True)
class GGMLFormat(CodedFormat):
    """A weight in one of ggml's block types.

    Attributes:
        kind: Name of the type.
    """

    kind: str

    family = "ggml"

    def __post_init__(self) -> None:
        if self.kind not in BLOCK_TYPES:
            raise ValueError(f"{self.kind!r} is none of the block types {', '.join(BLOCK_TYPES)}.")

    @property
    def type(self) -> BlockType:
        """The block type."""
        return BLOCK_TYPES[self.kind]

    @property
    def name(self) -> str:
        """Name of the type."""
        return self.kind

    @property
    def bits(self) -> int:  # type: ignore[override]
        """Nominal bits per weight."""
        return self.type.bits

    @classmethod
    def parse(cls, name: str) -> GGMLFormat | None:
        """The type of that name."""
        return cls(name) if name in BLOCK_TYPES else None

    def __str__(self) -> str:
        return f"{self.kind} ({self.type.bits_per_weight:g} bits per weight)"

    def fits(self, columns: int) -> bool:
        """Whether rows of that length are whole blocks."""
        return columns % self.type.block == 0

    def layout(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorLayout]:
        """The blocks, row by row."""
        rows, columns = shape
        self._check(columns)
        return {
            "weight": TensorLayout(torch.uint8, (rows, columns // self.type.block * self.type.block_bytes))
        }

    def memory_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes of codes, of what scales and minima are made of, and of both as the kernels take them."""
        kind, weights = self.type, shape[0] * shape[1]
        groups, made = weights // kind.group, 8 if kind.with_minima else 4
        parts = (2 if kind.with_minima else 1) * (groups if kind.with_sub_scales else 0)
        return weights * kind.code_bits // 8 + groups * made + parts + weights // kind.block * made // 2

    def _check(self, columns: int) -> None:
        if not self.fits(columns):
            raise ValueError(
                f"{self.kind} stores blocks of {self.type.block} weights, which do not divide a row of {columns}; "
                f"use a type with smaller blocks."
            )

    def encode(
        self, weight: Tensor, statistics: Tensor | None = None, *, settings: EncodeSettings | None = None
    ) -> BlockWeight:
        """Encode by ggml, with the inputs' mean squares as importance matrix.

        Types that need importances take equal ones if there are no statistics.
        """
        return self._encoded(weight, importances(statistics), weight.device)

    def _encoded(self, weight: Tensor, weights: Tensor | None, device: torch.device) -> BlockWeight:
        """Encoded by ggml on the CPU, then split into codes and scales on a device."""
        rows, columns = weight.shape
        self._check(columns)
        if weights is None and self.type.needs_importance:
            weights = torch.ones(columns)
        blocks = libggml.quantize(self.type.number, weight, weights)
        return self.from_blocks(blocks.to(device), (rows, columns))

    @classmethod
    def encode_all(
        cls,
        formats: Sequence[Format],
        weight: Tensor,
        statistics: Tensor | None = None,
        *,
        settings: EncodeSettings | None = None,
    ) -> list[Encoded]:
        """Encode in several types; errors are weighted by the importances."""
        original = weight.detach().float()
        source, weights = original.cpu(), importances(statistics)
        at_hand = None if weights is None else weights.to(weight.device)
        types = [each for each in formats if isinstance(each, GGMLFormat)]
        if len(types) < len(formats):
            raise ValueError(f"Expected ggml types, got {', '.join(each.name for each in formats)}.")
        found = (each._encoded(source, weights, weight.device) for each in types)
        return [measured(stored, original, at_hand) for stored in found]

    def from_blocks(self, data: Tensor, shape: Shape) -> BlockWeight:
        """The weight of a file's blocks, uint8 (rows, bytes)."""
        kind, fields = self.type, split(self.kind, data)
        flipped = _TWOS_COMPLEMENT.get(self.kind)
        if flipped is not None:  # signed bytes, as offsets from their middle
            fields[flipped] ^= 128
        tensors = {
            name: fields[name].to(torch.int16).view(torch.float16) for name in _HALVES if name in fields
        }
        if "sub_scales" in fields:
            signed = torch.int8 if kind.sub_offset else torch.uint8
            tensors["sub_scales"] = (fields["sub_scales"] - kind.sub_offset).to(signed)
        if "sub_minima" in fields:
            tensors["sub_minima"] = fields["sub_minima"].to(torch.uint8)
        codes = fields["codes"] if "codes" in fields else _grid_codes(kind, fields["grid"], fields["signs"])
        packed = pack(codes.to(torch.uint8), kind.code_bits)
        return self.restore(shape, {"packed": packed, **tensors})

    def blocks(self, stored: Stored) -> Tensor:
        """The blocks of a weight, uint8 (rows, bytes): the inverse of :meth:`from_blocks`."""
        kind, weight = self.type, block_weight(stored)
        fields = {
            name: weight.tensors[name].view(torch.int16).int() & 0xFFFF
            for name in _HALVES
            if name in weight.tensors
        }
        if "sub_scales" in weight.tensors:
            fields["sub_scales"] = weight.tensors["sub_scales"].int() + kind.sub_offset
        if "sub_minima" in weight.tensors:
            fields["sub_minima"] = weight.tensors["sub_minima"].int()
        if kind.levels:
            fields["grid"], fields["signs"] = _grid_indices(kind, weight.codes().int())
        else:
            fields["codes"] = weight.codes().int()
        flipped = _TWOS_COMPLEMENT.get(self.kind)
        if flipped is not None:
            fields[flipped] ^= 128
        return join(self.kind, fields)

    def file_tensors(self, stored: Stored) -> dict[str, Tensor]:
        """The blocks."""
        return {"weight": self.blocks(stored)}

    def restore(self, shape: Shape, tensors: Mapping[str, Tensor]) -> BlockWeight:
        """The weight over codes, scales and minima."""
        return BlockWeight(self, shape, tensors)

    def tunable(self, stored: Stored, original: Tensor | None = None, *, codes: bool = True) -> TunableBlocks:
        """The weight with trainable scales, minima and, where values are equally spaced, codes."""
        return TunableBlocks(block_weight(stored), original, codes=codes)


_HALVES = ("scale", "minimum")


class BlockWeight(CodedWeight):
    """One weight in a block type.

    Its tensors are ``packed`` codes, float16 ``scale`` (and ``minimum``) of every block, and integer ``sub_scales``
    (and ``sub_minima``) of every group where the type has them.
    """

    format: GGMLFormat

    def __init__(self, format: GGMLFormat, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(format, shape, tensors)
        kind = format.type
        self.packed, self.zeros = tensors["packed"], None
        self.bits, self.group_size = kind.code_bits, kind.group

    @property
    def dtype(self) -> torch.dtype:
        """Type of the decoded values."""
        return torch.float32

    @property
    def midpoint(self) -> int:
        """Code that stands for zero."""
        return self.format.type.zero

    @cached_property
    def scales(self) -> Tensor:  # type: ignore[override]
        """Scale of every group, float32 (out, groups)."""
        kind, tensors = self.format.type, self.tensors
        return group_scales(kind, tensors["scale"].float(), _float(tensors.get("sub_scales")))

    @cached_property
    def minima(self) -> Tensor | None:  # type: ignore[override]
        """Minimum of every group, float32 (out, groups); None if the type has none."""
        tensors = self.tensors
        if "minimum" not in tensors:
            return None
        return group_minima(self.format.type, tensors["minimum"].float(), _float(tensors.get("sub_minima")))

    @property
    def table(self) -> Tensor | None:  # type: ignore[override]
        """Value of every code, float32; None for equally spaced values."""
        return _table(self.format.type, self.device)


@cache
def _table(kind: BlockType, device: torch.device) -> Tensor | None:
    return torch.tensor(kind.table, dtype=torch.float32, device=device) if kind.table else None


def block_weight(stored: Stored) -> BlockWeight:
    """A stored weight known to be in a block type."""
    assert isinstance(stored, BlockWeight)
    return stored


def _float(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.float()


def group_scales(kind: BlockType, scale: Tensor, sub_scales: Tensor | None) -> Tensor:
    """Scale of every group from those of the blocks and their integers."""
    if sub_scales is None:
        return scale
    first, step = kind.sub_scale
    return scale.repeat_interleave(kind.block // kind.group, dim=1) * (first + step * sub_scales)


def group_minima(kind: BlockType, minimum: Tensor, sub_minima: Tensor | None) -> Tensor:
    """Amount that is subtracted from the values of every group; types without integers add their minimum."""
    if sub_minima is None:
        return -minimum
    return minimum.repeat_interleave(kind.block // kind.group, dim=1) * sub_minima


# ---------------------------------------------------------------------- grids of the IQ2 and IQ3 types


@cache
def _grid(name: str) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Levels of every grid index (entries, weights), and the index of every combination of levels; -1 for none."""
    from rco.requirements import require

    require("gguf", "Reading the grids of IQ types")
    from gguf import quants

    source: Any = getattr(quants, name.upper())
    source.init_grid()
    values = np.asarray(source.grid).reshape(source.grid_shape)
    levels = BLOCK_TYPES[name].levels
    places = np.searchsorted(np.array(levels), values).astype(np.uint8)
    width = BLOCK_TYPES[name].code_bits - 1
    keys = (places.astype(np.int64) << (width * np.arange(places.shape[1]))).sum(axis=1)
    inverse = np.full(1 << (width * places.shape[1]), -1, dtype=np.int32)
    inverse[keys] = np.arange(len(keys))
    return places, inverse


def _grid_codes(kind: BlockType, grid: Tensor, signs: Tensor) -> Tensor:
    """Codes (rows, cols) of grid indices and sign patterns: the magnitude's level, and the sign above it."""
    levels = torch.from_numpy(_grid(kind.name)[0]).to(grid.device)[grid.long()].flatten(1).int()
    eight = torch.arange(8, device=signs.device)
    if LAYOUTS[kind.name].fields["signs"].shape[1] == 7:  # the eighth makes the number of minus signs even
        parity = signs.clone()
        for shift in (4, 2, 1):
            parity = parity ^ (parity >> shift)
        signs = signs | ((parity & 1) << 7)
    minus = ((signs[:, :, None] >> eight) & 1).flatten(1)
    return levels | (minus << (kind.code_bits - 1))


def _grid_indices(kind: BlockType, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Grid indices and sign patterns of codes: the inverse of :func:`_grid_codes`."""
    places, inverse = _grid(kind.name)
    width, members = kind.code_bits - 1, places.shape[1]
    rows = len(codes)
    shifts = width * torch.arange(members, device=codes.device)
    keys = ((codes & ((1 << width) - 1)).view(rows, -1, members) << shifts).sum(dim=2)
    grid = torch.from_numpy(inverse).to(codes.device)[keys]
    signs = ((codes >> width).view(rows, -1, 8) << torch.arange(8, device=codes.device)).sum(dim=2)
    if bool((grid < 0).any()):
        raise ValueError(
            f"The codes are not on the grid of {kind.name}; its magnitudes cannot be changed freely."
        )
    return grid, signs & ((1 << LAYOUTS[kind.name].fields["signs"].shape[1]) - 1)


# ---------------------------------------------------------------------- training


class TunableBlocks(Tunable):
    """A weight whose scales, minima and codes may be trained; signs and magnitudes of the IQ types stay.

    Float16 numbers are trained by an offset in units of their last place, integers and codes by an offset in units
    of one; all are rounded in the forward pass, with gradients passed through, and stay in their range.

    Args:
        weight: The weight.
        original: The weight before it was stored: offsets of codes then start at its fractional part on the grid.
        codes: Whether codes are trained as well.
    """

    spacing: ClassVar[Mapping[str, float]] = MappingProxyType(
        dict.fromkeys(("scale", "minimum", "sub_scales", "sub_minima", "codes"), 1.0)
    )

    def __init__(self, weight: BlockWeight, original: Tensor | None = None, *, codes: bool = True) -> None:
        super().__init__()
        kind, self._weight = weight.format.type, weight
        starts = {
            name: torch.zeros(part.shape, device=weight.device)
            for name, part in weight.tensors.items()
            if name != "packed"
        }
        if codes and not kind.table:
            zero = torch.zeros(weight.shape, device=weight.device)
            starts["codes"] = zero if original is None else _fractions(weight, original.to(zero))
        for name, start in starts.items():
            self.register_parameter(name, nn.Parameter(start))
        self.register_buffer("_codes", weight.codes().float(), persistent=False)

    def _part(self, name: str) -> Tensor | None:
        """A trained part: its stored value plus the offset, rounded and in range; None if the type has none."""
        offset = self._parameters.get(name)
        if name == "codes":
            assert isinstance(self._codes, Tensor)
            if offset is None:
                return self._codes
            return _Rounded.apply(self._codes, offset, 0.0, float((1 << self._weight.bits) - 1))  # type: ignore
        stored = self._weight.tensors.get(name)
        if stored is None or offset is None:
            return None
        if stored.dtype == torch.float16:
            return _Nearest.apply(stored.float(), offset)  # type: ignore
        low, high = _ranges(self._weight.format.type, name)
        return _Rounded.apply(stored.float(), offset, low, high)  # type: ignore

    def forward(self) -> Tensor:
        """The decoded matrix, float32."""
        kind, scale, minimum = self._weight.format.type, self._part("scale"), self._part("minimum")
        assert scale is not None
        scales = group_scales(kind, scale, self._part("sub_scales"))
        minima = None if minimum is None else group_minima(kind, minimum, self._part("sub_minima"))
        codes, table = self._part("codes"), self._weight.table
        assert codes is not None
        if table is not None:
            return decode_codes(codes.to(torch.uint8), scales, 0, kind.group, minima, table)
        values = (codes - kind.zero) * scales.repeat_interleave(kind.group, dim=1)
        return values if minima is None else values - minima.repeat_interleave(kind.group, dim=1)

    @torch.no_grad()
    def stored(self) -> BlockWeight:
        """The weight of the present parameters."""
        weight, parts = self._weight, {}
        for name, before in weight.tensors.items():
            part = self._part("codes" if name == "packed" else name)
            assert part is not None
            parts[name] = (
                pack(part.to(torch.uint8), weight.bits) if name == "packed" else part.to(before.dtype)
            )
        return weight.over(parts)


_NEAREST = 0.499  # largest offset that rounds to the same code


def _fractions(weight: BlockWeight, original: Tensor) -> Tensor:
    """Fractional parts of the original weights on the grid, from -1/2 to 1/2: offsets that change no code."""

    def wide(part: Tensor) -> Tensor:
        return part.repeat_interleave(weight.group_size, dim=1)

    scales = wide(weight.scales)
    raised = original if weight.minima is None else original + wide(weight.minima)
    places = torch.where(scales == 0, 0.0, raised / scales)
    return (places - places.round()).clamp_(-_NEAREST, _NEAREST)


def _ranges(kind: BlockType, name: str) -> tuple[float, float]:
    """Smallest and largest integer of a field."""
    bits = LAYOUTS[kind.name].fields[name].shape[1]
    offset = kind.sub_offset if name == "sub_scales" else 0
    return float(-offset), float((1 << bits) - 1 - offset)


class _Rounded(torch.autograd.Function):
    """``round(value + offset)`` in a range; the gradient passes where the sum is inside it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, offset: Tensor, low: float, high: float) -> Tensor:
        raw = value + offset
        ctx.save_for_backward((raw >= low - 0.5) & (raw <= high + 0.5))
        return torch.round(raw).clamp(low, high)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return None, torch.where(inside, gradient, 0.0), None, None


class _Nearest(torch.autograd.Function):
    """The float16 nearest to a value plus an offset in units of the value's last place, as float32."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, offset: Tensor) -> Tensor:
        _, exponent = torch.frexp(value)
        unit = torch.ldexp(torch.ones_like(value), (exponent - 11).clamp_min(-24))
        raw = value + offset * unit
        most = torch.finfo(torch.float16).max
        ctx.save_for_backward(torch.where(raw.abs() <= most, unit, 0.0))
        return raw.clamp(-most, most).to(torch.float16).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (unit,) = ctx.saved_tensors
        return None, gradient * unit
