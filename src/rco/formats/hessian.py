"""The Hessian of a linear layer's output error, accumulated from the layer's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HessianAccumulator"]


class HessianAccumulator:
    """Accumulates a layer's inputs into ``H = 2/n sum x x^T`` over the n tokens that count.

    Args:
        features: Number of input features.
        dtype: Type that products are formed and summed in.
        device: Device of the sum; inputs are copied there.
    """

    def __init__(
        self, features: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.features = features
        self.tokens = 0
        self.total = torch.zeros(features, features, dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, inputs: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of inputs.

        Args:
            inputs: (..., features).
            mask: Booleans (...), true for tokens that count; all of them if not given.
        """
        if inputs.shape[-1] != self.features:
            raise ValueError(f"Expected inputs of {self.features} features, got shape {tuple(inputs.shape)}.")
        if mask is not None:
            if mask.shape != inputs.shape[:-1]:
                raise ValueError(
                    f"The mask must be {tuple(inputs.shape[:-1])}, one flag per token, got {tuple(mask.shape)}."
                )
            inputs = inputs[mask.to(device=inputs.device, dtype=torch.bool)]
        flat = inputs.reshape(-1, self.features).to(device=self.total.device, dtype=self.total.dtype)
        self.total.addmm_(flat.T, flat, alpha=2.0)
        self.tokens += flat.shape[0]

    def merge(self, other: HessianAccumulator) -> None:
        """Add the tokens of another accumulator of the same layer."""
        if other.features != self.features:
            raise ValueError(f"Cannot merge {other.features} features into {self.features}.")
        self.total += other.total.to(device=self.total.device, dtype=self.total.dtype)
        self.tokens += other.tokens

    def matrix(self) -> Tensor:
        """The Hessian, (features, features)."""
        if self.tokens == 0:
            raise ValueError(
                "No token was added, so there is no Hessian; check the calibration data and its mask."
            )
        result = self.total / self.tokens
        if not bool(torch.isfinite(result).all()):
            raise ValueError(
                "The layer's inputs held NaN or infinite values; check the model and the calibration data."
            )
        return result
