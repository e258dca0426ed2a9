"""What an allocation costs in a GGUF file: the same questions that :mod:`rco.compression.accounting` answers.

Costs are those of tensor data in whole blocks. The file has metadata on top (mostly the tokenizer's, the same for
every allocation), which is made by llama.cpp's converter and not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn

from rco.compression.accounting import LinearLike, distinct_state
from rco.compression.gguf_types import BLOCK_TYPES, BlockType, block_type
from rco.formats.base import Format
from rco.formats.integer import IntegerGrid
from rco.models.gguf_names import GGUFTensor, gguf_names, gguf_tensors
from rco.models.layout import Layout

__all__ = ["ALIGNMENT", "GGUFFile"]

ALIGNMENT = 32  # every tensor begins at a multiple of it
_PLAIN_BLOCK = 32


@dataclass(frozen=True)
class GGUFFile:
    """The tensors that llama.cpp will hold of a model, and the types that its linears may take.

    Attributes:
        layout: Row of the architecture table.
        tensors: Every tensor by its name in the file.
        dense: Type of what is left alone.
    """

    layout: Layout
    tensors: Mapping[str, GGUFTensor]
    dense: str

    @classmethod
    def of(cls, layout: Layout, model: nn.Module) -> GGUFFile:
        """The file of a model; what is left alone keeps 16 bits, as bfloat16 where the model has it."""
        shapes = {name: tuple(value.shape) for name, value in distinct_state(model).items()}
        config: Any = model.config
        found = gguf_tensors(layout, config.get_text_config(), shapes)
        types = {parameter.dtype for parameter in model.parameters()}
        return cls(
            layout, {tensor.name: tensor for tensor in found}, "bf16" if torch.bfloat16 in types else "f16"
        )

    def type_of(self, linear: LinearLike, width: int) -> BlockType | None:
        """The type that a width means for a linear; None where llama.cpp has none that fits its rows.

        A linear that the converter splits into several tensors takes a type that fits the rows of all of them.
        """
        names = gguf_names(self.layout, linear.name)
        columns = gcd(*(self.tensors[name].columns for name in names if name in self.tensors))
        return block_type(width, columns or linear.in_features, self.dense)

    def scheme_of(self, linear: LinearLike, width: int) -> Format:
        """The grid of the candidates for a width; where there is no type, one that nobody may choose."""
        kind = self.type_of(linear, width)
        return IntegerGrid(width, _PLAIN_BLOCK, symmetric=True) if kind is None else kind.scheme

    def linear_bytes(self, linear: LinearLike, width: int) -> int:
        """Bytes of a linear's weight at a width; where there is no type, as many as one would take."""
        kind, weights = self.type_of(linear, width), linear.in_features * linear.out_features
        if kind is None:
            return weights * (2 * width + 1) // 16
        return weights // kind.block * kind.block_bytes  # a block never crosses a row

    def fixed_bytes(self, linears: Collection[LinearLike]) -> int:
        """Bytes of all other tensors, and the most that gaps between tensors can take."""
        everything = sum(self.tensor_bytes({}).values())
        searched = sum(self.linear_bytes(linear, 16) for linear in linears)
        return everything - searched + (ALIGNMENT - 1) * len(self.tensors)

    def tensor_bytes(self, types: Mapping[str, BlockType]) -> dict[str, int]:
        """Data bytes of every tensor when some have these types and the others are left alone."""
        return {
            name: self._type(tensor, types).tensor_bytes(tensor.rows, tensor.columns)
            for name, tensor in self.tensors.items()
        }

    def _type(self, tensor: GGUFTensor, types: Mapping[str, BlockType]) -> BlockType:
        return BLOCK_TYPES["f32"] if tensor.float32 else types.get(tensor.name, BLOCK_TYPES[self.dense])
