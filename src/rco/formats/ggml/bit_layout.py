"""Bit layouts of ggml's blocks: which bit of a block belongs to which number.

A block of a row holds 32 or 256 weights. :data:`LAYOUTS` lists, for every type, its numbers as fields and the
positions of their bits in the block, so one pair of functions reads and writes all types: :func:`split` and
:func:`join`. They are inverses of each other, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["LAYOUTS", "BlockLayout", "join", "split"]

Positions = NDArray[np.int64]
_CHUNK_BITS = 1 << 26


@dataclass(frozen=True)
class BlockLayout:
    """Bits of one block.

    Attributes:
        block_bytes: Bytes of a block.
        fields: Name -> (count, bits) positions in the block, 8 times the byte plus the bit, lowest bit first.
    """

    block_bytes: int
    fields: Mapping[str, Positions]


def _at(byte: NDArray[np.int64] | int, first: NDArray[np.int64] | int, bits: int) -> Positions:
    """Positions of ``bits`` bits from bit ``first`` of a byte on, for arrays of bytes and first bits."""
    start = np.atleast_1d(8 * np.asarray(byte, dtype=np.int64) + first)
    return np.asarray(start[:, None] + np.arange(bits))


def _joined(*parts: Positions) -> Positions:
    """Numbers whose low bits are in the first part, the next higher ones in the second, and so on."""
    return np.concatenate(parts, axis=1)


_OF_32, _OF_256 = np.arange(32), np.arange(256)
_HALF = _at(0, 0, 16)  # a float16


def _half(byte: int) -> Positions:
    return _HALF + 8 * byte


def _nibbles_of_32(byte: int, weights: NDArray[np.int64] = _OF_32) -> Positions:
    """Four bits of each of 32 weights: low nibbles of 16 bytes for the first half, high ones for the second."""
    group, place = weights // 32, weights % 32
    return _at(byte + 16 * group + place % 16, 4 * (place // 16), 4)


def _two_bits_of_256(byte: int) -> Positions:
    """Two bits of each of 256 weights: runs of 32 share 32 bytes four at a time."""
    half, place = _OF_256 // 128, _OF_256 % 128
    return _at(byte + 32 * half + place % 32, 2 * (place // 32), 2)


def _nibbles_of_256(byte: int) -> Positions:
    """Four bits of each of 256 weights: runs of 32 share 32 bytes two at a time."""
    quarter, place = _OF_256 // 64, _OF_256 % 64
    return _at(byte + 32 * quarter + place % 32, 4 * (place // 32), 4)


def _one_bit_of_256(byte: int) -> Positions:
    """One bit of each of 256 weights: runs of 32 share 32 bytes."""
    return _at(byte + _OF_256 % 32, _OF_256 // 32, 1)


def _scales_and_minima(byte: int) -> dict[str, Positions]:
    """Eight scales and eight minima of six bits in twelve bytes."""
    four = np.arange(4)
    return {
        "sub_scales": np.concatenate(
            [_at(byte + four, 0, 6), _joined(_at(byte + 8 + four, 0, 4), _at(byte + four, 6, 2))]
        ),
        "sub_minima": np.concatenate(
            [_at(byte + 4 + four, 0, 6), _joined(_at(byte + 8 + four, 4, 4), _at(byte + 4 + four, 6, 2))]
        ),
    }


def _signs_and_scale(byte: int, stride: int) -> dict[str, Positions]:
    """Words of four sign patterns of seven bits and a scale of four, one for every 32 of 256 weights."""
    word = byte + stride * np.arange(8)
    signs = _at(np.repeat(word, 4), np.tile(7 * np.arange(4), 8), 7)
    return {"signs": signs, "sub_scales": _at(word, 28, 4)}


def _nibbles(byte: int, count: int) -> Positions:
    """Numbers of four bits, two to a byte."""
    number = np.arange(count)
    return _at(byte + number // 2, 4 * (number % 2), 4)


def _q3_k_scales() -> Positions:
    number = np.arange(16)
    return _joined(_at(96 + number % 8, 4 * (number // 8), 4), _at(104 + number % 4, 2 * (number // 4), 2))


def _q6_k_codes() -> Positions:
    half, place = _OF_256 // 128, _OF_256 % 128
    low = _at(64 * half + place % 64, 4 * (place // 64), 4)
    return _joined(low, _two_bits_of_256(128))


def _layouts() -> dict[str, BlockLayout]:
    of_64, of_8 = np.arange(64), np.arange(8)
    high_of_32 = _at(0, _OF_32, 1)
    return {
        "q4_0": BlockLayout(18, {"scale": _half(0), "codes": _nibbles_of_32(2)}),
        "q4_1": BlockLayout(20, {"scale": _half(0), "minimum": _half(2), "codes": _nibbles_of_32(4)}),
        "q5_0": BlockLayout(22, {"scale": _half(0), "codes": _joined(_nibbles_of_32(6), high_of_32 + 8 * 2)}),
        "q5_1": BlockLayout(
            24,
            {
                "scale": _half(0),
                "minimum": _half(2),
                "codes": _joined(_nibbles_of_32(8), high_of_32 + 8 * 4),
            },
        ),
        "q8_0": BlockLayout(34, {"scale": _half(0), "codes": _at(2 + _OF_32, 0, 8)}),
        "q2_k": BlockLayout(
            84,
            {
                "sub_scales": _at(np.arange(16), 0, 4),
                "sub_minima": _at(np.arange(16), 4, 4),
                "codes": _two_bits_of_256(16),
                "scale": _half(80),
                "minimum": _half(82),
            },
        ),
        "q3_k": BlockLayout(
            110,
            {
                "codes": _joined(_two_bits_of_256(32), _one_bit_of_256(0)),
                "sub_scales": _q3_k_scales(),
                "scale": _half(108),
            },
        ),
        "q4_k": BlockLayout(
            144,
            {
                "scale": _half(0),
                "minimum": _half(2),
                **_scales_and_minima(4),
                "codes": _nibbles_of_256(16),
            },
        ),
        "q5_k": BlockLayout(
            176,
            {
                "scale": _half(0),
                "minimum": _half(2),
                **_scales_and_minima(4),
                "codes": _joined(_nibbles_of_256(48), _one_bit_of_256(16)),
            },
        ),
        "q6_k": BlockLayout(
            210, {"codes": _q6_k_codes(), "sub_scales": _at(192 + np.arange(16), 0, 8), "scale": _half(208)}
        ),
        "iq4_nl": BlockLayout(18, {"scale": _half(0), "codes": _nibbles_of_32(2)}),
        "iq4_xs": BlockLayout(
            136,
            {
                "scale": _half(0),
                "sub_scales": _joined(_nibbles(4, 8), _at(2, 2 * of_8, 2)),
                "codes": _nibbles_of_32(8, _OF_256),
            },
        ),
        "iq2_xxs": BlockLayout(
            66,
            {
                "scale": _half(0),
                "grid": _at((2 + 8 * of_8[:, None] + np.arange(4)).reshape(-1), 0, 8),
                **_signs_and_scale(6, 8),
            },
        ),
        "iq2_xs": BlockLayout(
            74,
            {
                "scale": _half(0),
                "grid": _at(2 + 2 * _OF_32, 0, 9),
                "signs": _at(2 + 2 * _OF_32, 9, 7),
                "sub_scales": _nibbles(66, 16),
            },
        ),
        "iq2_s": BlockLayout(
            82,
            {
                "scale": _half(0),
                "grid": _joined(_at(2 + _OF_32, 0, 8), _at(66 + _OF_32 // 4, 2 * (_OF_32 % 4), 2)),
                "signs": _at(34 + _OF_32, 0, 8),
                "sub_scales": _nibbles(74, 16),
            },
        ),
        "iq3_xxs": BlockLayout(
            98, {"scale": _half(0), "grid": _at(2 + of_64, 0, 8), **_signs_and_scale(66, 4)}
        ),
        "iq3_s": BlockLayout(
            110,
            {
                "scale": _half(0),
                "grid": _joined(_at(2 + of_64, 0, 8), _at(66 + of_64 // 8, of_64 % 8, 1)),
                "signs": _at(74 + _OF_32, 0, 8),
                "sub_scales": _nibbles(106, 8),
            },
        ),
    }


LAYOUTS: Mapping[str, BlockLayout] = _layouts()


@cache
def _places(name: str, field: str, device: torch.device) -> Tensor:
    return torch.from_numpy(LAYOUTS[name].fields[field].reshape(-1)).to(device)


def _rows_at_once(layout: BlockLayout, blocks: int) -> int:
    return max(1, _CHUNK_BITS // max(1, 8 * layout.block_bytes * blocks))


def split(name: str, data: Tensor) -> dict[str, Tensor]:
    """Numbers of every block, without their signs or offsets: int32 (rows, blocks x count) for each field.

    Args:
        name: Name of the type.
        data: Rows of whole blocks, uint8 (rows, blocks x bytes).
    """
    layout = LAYOUTS[name]
    rows, blocks = len(data), data.shape[1] // layout.block_bytes
    found = {
        field: torch.empty(rows, blocks * len(places), dtype=torch.int32, device=data.device)
        for field, places in layout.fields.items()
    }
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    step = _rows_at_once(layout, blocks)
    for start in range(0, rows, step):
        part = data[start : start + step].reshape(-1, layout.block_bytes)
        bits = ((part[:, :, None] >> shifts) & 1).flatten(1)
        for field, places in layout.fields.items():
            taken = bits[:, _places(name, field, data.device)].view(len(part), *places.shape)
            value = torch.zeros(taken.shape[:2], dtype=torch.int32, device=data.device)
            for bit in range(places.shape[1]):
                value |= taken[:, :, bit].int() << bit
            found[field][start : start + step] = value.view(-1, blocks * len(places))
    return found


def join(name: str, fields: Mapping[str, Tensor]) -> Tensor:
    """The rows of blocks of some numbers: the inverse of :func:`split`."""
    layout = LAYOUTS[name]
    first = fields["scale"]
    rows, blocks = first.shape
    out = torch.empty(rows, blocks * layout.block_bytes, dtype=torch.uint8, device=first.device)
    weights = 1 << torch.arange(8, dtype=torch.int32, device=first.device)
    step = _rows_at_once(layout, blocks)
    for start in range(0, rows, step):
        count = len(first[start : start + step]) * blocks
        bits = torch.zeros(count, 8 * layout.block_bytes, dtype=torch.uint8, device=first.device)
        for field, places in layout.fields.items():
            value = fields[field][start : start + step].reshape(count, len(places)).int()
            shifts = torch.arange(places.shape[1], dtype=torch.int32, device=first.device)
            taken = ((value[:, :, None] >> shifts) & 1).to(torch.uint8)
            bits[:, _places(name, field, first.device)] = taken.flatten(1)
        packed = (bits.view(count, layout.block_bytes, 8) * weights).sum(dim=2).to(torch.uint8)
        out[start : start + step] = packed.view(-1, blocks * layout.block_bytes)
    return out
