"""Types that ``llama-quantize`` writes by a recipe, as options, and exact bytes of an allocation in its file.

Searches over ggml's own blocks (:mod:`rco.compression.gguf_target`) write the file themselves, but need a GGUF file
that transformers reads. A recipe only needs the names of the tensors, which are known for more architectures:
candidates are then integer grids with the codes and groups of a type, and llama.cpp quantizes once more.

A GGUF tensor is stored row by row in blocks. The K types hold 256 weights in a block, so the length of a row
must be a multiple of 256; otherwise llama.cpp silently writes another type. Plans never rely on that: multiples of
256 use the K types, other multiples of 32 the plain ones, and all other rows stay at 16 bits.

Sizes are those of tensor data in whole blocks. The file also has metadata (mostly of the tokenizer, the same
for every allocation), which llama.cpp's converter writes and which is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rco.compression.file_size import LinearLike, distinct_state
from rco.formats.base import Format
from rco.formats.ggml.block_types import BLOCK_TYPES
from rco.formats.ggml.float_types import FLOAT_TYPES
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.models.gguf_names import GGUFTensor, gguf_names, gguf_tensors
from rco.models.layout import Layout

__all__ = ["ALIGNMENT", "GGUF_WIDTHS", "RECIPE_TYPES", "GGUFFile", "RecipeType", "block_type", "written_type"]


@dataclass(frozen=True)
class RecipeType:
    """A type that a recipe may name.

    Attributes:
        name: As llama.cpp's programs read and print it.
        block: Weights per block.
        block_bytes: Bytes per block: codes, scales and minima.
        scheme: Grid of its candidates: the same codes and weights per scale. The K types also quantize the scales
            inside a block of 256; the candidates keep them exact.
    """

    name: str
    block: int
    block_bytes: int
    scheme: Format

    @property
    def bits_per_weight(self) -> Fraction:
        """Bits per weight, scales included."""
        return Fraction(8 * self.block_bytes, self.block)

    def fits(self, columns: int) -> bool:
        """Whether a row of that length consists of whole blocks."""
        return columns % self.block == 0

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a tensor's data."""
        if not self.fits(columns):
            raise ValueError(
                f"{self.name} stores blocks of {self.block}, which do not divide a row of {columns}."
            )
        return rows * (columns // self.block) * self.block_bytes


def _quantized(name: str, group_size: int, *, symmetric: bool) -> RecipeType:
    kind = BLOCK_TYPES[name]
    return RecipeType(name, kind.block, kind.block_bytes, IntegerGrid(kind.bits, group_size, symmetric))


RECIPE_TYPES: Mapping[str, RecipeType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            _quantized("q2_k", 16, symmetric=False),
            _quantized("q3_k", 16, symmetric=True),
            _quantized("q4_k", 32, symmetric=False),
            _quantized("q5_k", 32, symmetric=False),
            _quantized("q6_k", 16, symmetric=True),
            _quantized("q4_0", 32, symmetric=True),
            _quantized("q5_0", 32, symmetric=True),
            _quantized("q5_1", 32, symmetric=False),
            _quantized("q8_0", 32, symmetric=True),
            *(RecipeType(name, 1, dtype.itemsize, ORIGINAL) for name, (_, dtype) in FLOAT_TYPES.items()),
        )
    }
)
_OF_256 = {2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k", 8: "q8_0"}
_OF_32 = {4: "q4_0", 5: "q5_0", 8: "q8_0"}
GGUF_WIDTHS = tuple(_OF_256)

# Types that llama.cpp writes instead for rows that are no multiple of 256, as of the release named in
# docs/engines.md. Earlier releases use iq4_nl, of the same size, for q2_k and q3_k.
_FALLBACK = {
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip


def block_type(width: int, columns: int, dense: str = "f16") -> RecipeType | None:
    """Block type of a width for rows of that length; None if llama.cpp has none.

    Args:
        width: Bits of a code, 16 for an unquantized weight.
        columns: Length of a row in the file.
        dense: Type of unquantized weights, ``f16`` or ``bf16``.
    """
    if width == 16:
        return RECIPE_TYPES[dense]
    name = (_OF_32 if columns % 256 else _OF_256).get(width)
    kind = RECIPE_TYPES[name] if name is not None else None
    return kind if kind is not None and kind.fits(columns) else None


def written_type(asked: str, columns: int) -> str:
    """The type that llama.cpp writes for a requested one: the same, its fallback, or f16."""
    for name in (asked, _FALLBACK.get(asked, asked)):
        if name in FLOAT_TYPES or columns % BLOCK_TYPES[name].block == 0:
            return name
    return "f16"


ALIGNMENT = 32  # bytes; every tensor begins at a multiple
_PLAIN_BLOCK = 32


@dataclass(frozen=True)
class GGUFFile:
    """Tensors of a model in a GGUF file, and the types that its linears may take.

    Attributes:
        layout: Row of the architecture table.
        tensors: Every tensor by its name in the file.
        dense: Type of unquantized tensors.
    """

    layout: Layout
    tensors: Mapping[str, GGUFTensor]
    dense: str

    @classmethod
    def of(cls, layout: Layout, model: nn.Module) -> GGUFFile:
        """The file of a model; unquantized tensors have 16 bits, bfloat16 if the model does."""
        shapes = {name: tuple(value.shape) for name, value in distinct_state(model).items()}
        config: Any = model.config
        found = gguf_tensors(layout, config.get_text_config(), shapes)
        types = {parameter.dtype for parameter in model.parameters()}
        return cls(
            layout, {tensor.name: tensor for tensor in found}, "bf16" if torch.bfloat16 in types else "f16"
        )

    def type_of(self, linear: LinearLike, width: int) -> RecipeType | None:
        """Block type of a width for a linear; None if llama.cpp has none that fits its rows.

        If the converter splits a linear into several tensors, the type fits the rows of all of them.
        """
        names = gguf_names(self.layout, linear.name)
        columns = gcd(*(self.tensors[name].columns for name in names if name in self.tensors))
        return block_type(width, columns or linear.in_features, self.dense)

    def scheme_of(self, linear: LinearLike, width: int) -> Format:
        """Grid of the candidates for a width; without a block type, a placeholder that cannot be chosen."""
        kind = self.type_of(linear, width)
        return IntegerGrid(width, _PLAIN_BLOCK, symmetric=True) if kind is None else kind.scheme

    def linear_bytes(self, linear: LinearLike, width: int) -> int:
        """Bytes of a linear's weight at a width; without a block type, a nominal number."""
        kind, weights = self.type_of(linear, width), linear.in_features * linear.out_features
        if kind is None:
            return weights * (2 * width + 1) // 16
        return weights // kind.block * kind.block_bytes  # a block never crosses a row

    def fixed_bytes(self, linears: Collection[LinearLike]) -> int:
        """Bytes of all other tensors, plus the most that gaps between tensors can take."""
        everything = sum(self.tensor_bytes({}).values())
        searched = sum(self.linear_bytes(linear, 16) for linear in linears)
        return everything - searched + (ALIGNMENT - 1) * len(self.tensors)

    def tensor_bytes(self, types: Mapping[str, RecipeType]) -> dict[str, int]:
        """Data bytes of every tensor; those not in ``types`` are unquantized."""
        return {
            name: self._type(tensor, types).tensor_bytes(tensor.rows, tensor.columns)
            for name, tensor in self.tensors.items()
        }

    def _type(self, tensor: GGUFTensor, types: Mapping[str, RecipeType]) -> RecipeType:
        return RECIPE_TYPES["f32"] if tensor.float32 else types.get(tensor.name, RECIPE_TYPES[self.dense])
