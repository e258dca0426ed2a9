"""ggml's floating-point types: a weight in float16, bfloat16 or float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rco.formats.base import EncodeSettings, Format, Shape, Stored, TensorLayout

__all__ = ["FLOAT_TYPES", "GGMLFloat"]

FLOAT_TYPES: dict[str, tuple[int, torch.dtype]] = {
    "f16": (1, torch.float16),
    "bf16": (30, torch.bfloat16),
    "f32": (0, torch.float32),
}
"""Name -> ggml's number and the type of torch."""


@dataclass(frozen=True)
class GGMLFloat(Format):
    """A weight in a floating-point type of GGUF files.

    Attributes:
        kind: ``f16``, ``bf16`` or ``f32``.
    """

    kind: str

    family = "ggml-float"

    def __post_init__(self) -> None:
        if self.kind not in FLOAT_TYPES:
            raise ValueError(f"{self.kind!r} is none of the types {', '.join(FLOAT_TYPES)}.")

    @property
    def name(self) -> str:
        """Name of the type."""
        return self.kind

    @property
    def dtype(self) -> torch.dtype:
        """The type in torch."""
        return FLOAT_TYPES[self.kind][1]

    @property
    def bits(self) -> int:  # type: ignore[override]
        """Bits per weight."""
        return 8 * self.dtype.itemsize

    @classmethod
    def parse(cls, name: str) -> GGMLFloat | None:
        """The type of that name."""
        return cls(name) if name in FLOAT_TYPES else None

    def layout(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorLayout]:
        """The weight itself."""
        return {"weight": TensorLayout(self.dtype, tuple(shape))}

    def encode(
        self, weight: Tensor, statistics: Tensor | None = None, *, settings: EncodeSettings | None = None
    ) -> Stored:
        """The weight, rounded to the type.

        Raises:
            ValueError: A value is too large for it.
        """
        rows, columns = weight.shape
        rounded = weight.detach().to(self.dtype)
        if not bool(torch.isfinite(rounded).all()):
            largest = float(weight.detach().abs().max())
            raise ValueError(
                f"{self.kind} cannot hold a weight whose largest magnitude is {largest:g}; use bf16."
            )
        return Stored(self, (rows, columns), {"weight": rounded})

    def dense(self, stored: Stored) -> Tensor:
        """The weight itself."""
        return stored.tensors["weight"]

    def decode(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The weight, without a copy where it has that type."""
        return stored.tensors["weight"].to(dtype)
