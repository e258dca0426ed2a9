"""A weight that is removed from the model and counts as zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rco.formats.base import EncodeSettings, Format, Shape, Stored, TensorLayout, dense_products

__all__ = ["REMOVED", "Removed"]


@dataclass(frozen=True)
class Removed(Format):
    """A removed weight: no tensor is stored."""

    family = "removed"
    name = "removed"
    bits = 0

    @classmethod
    def parse(cls, name: str) -> Removed | None:
        """The format, if that is its name."""
        return cls() if name == "removed" else None

    def layout(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorLayout]:
        """No tensors."""
        return {}

    def encode(
        self, weight: Tensor, statistics: Tensor | None = None, *, settings: EncodeSettings | None = None
    ) -> Stored:
        """Only the shape."""
        rows, columns = weight.shape
        return Stored(self, (rows, columns), {})

    def decode(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """Zeros on the CPU, as a removed weight has no device."""
        return torch.zeros(stored.shape, dtype=dtype)

    def decode_into(self, stored: Stored, out: Tensor) -> None:
        """Zeros."""
        out.zero_()

    def inner_products(self, stored: Stored, gradient: Tensor, segments: int = 1) -> Tensor:
        """Zeros, on the device of the gradient."""
        return torch.zeros_like(dense_products(gradient[:, :0], gradient[:, :0], segments))

    def __str__(self) -> str:
        return "removed"


REMOVED = Removed()
