"""The original weight, unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rco.formats.base import EncodeSettings, Format, Shape, Stored, TensorLayout

__all__ = ["ORIGINAL", "Original"]


@dataclass(frozen=True)
class Original(Format):
    """A weight left in the type of the model."""

    family = "original"
    name = "original"
    bits = 16

    @classmethod
    def parse(cls, name: str) -> Original | None:
        """The format, if that is its name."""
        return cls() if name == "original" else None

    @classmethod
    def listed(cls) -> dict[str, str]:
        """The one name."""
        return {"original": "the weight as it is"}

    def layout(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorLayout]:
        """The weight itself."""
        return {"weight": TensorLayout(dtype, tuple(shape))}

    def encode(
        self, weight: Tensor, statistics: Tensor | None = None, *, settings: EncodeSettings | None = None
    ) -> Stored:
        """The weight itself, in the type of the checkpoint."""
        dtype = (settings or EncodeSettings()).storage_dtype or weight.dtype
        rows, columns = weight.shape
        return Stored(self, (rows, columns), {"weight": weight.detach().to(dtype)})

    def dense(self, stored: Stored) -> Tensor:
        """The weight itself."""
        return stored.tensors["weight"]

    def decode(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The weight, without a copy where it has that type."""
        return stored.tensors["weight"].to(dtype)

    def __str__(self) -> str:
        return "unquantized"


ORIGINAL = Original()
