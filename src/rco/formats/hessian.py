"""Second moments of a linear layer's inputs, their diagonal, or the largest input, accumulated over tokens."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

__all__ = ["HessianAccumulator", "InputPeak", "InputSquares"]

_NOT_FINITE = "The layer's inputs held NaN or infinite values; check the model and the calibration data."


class HessianAccumulator:
    """Accumulates a layer's inputs into ``H = 2/n sum x x^T`` over the n tokens that count, and their largest size.

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
        self._largest = InputPeak(features, dtype=dtype, device=device)

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
        self._largest.add(flat)
        self.tokens += flat.shape[0]

    @property
    def peak(self) -> float:
        """Largest size of an input; 0 without tokens."""
        return self._largest.peak

    def merge(self, other: HessianAccumulator) -> None:
        """Add the tokens of another accumulator of the same layer."""
        if other.features != self.features:
            raise ValueError(f"Cannot merge {other.features} features into {self.features}.")
        self.total += other.total.to(device=self.total.device, dtype=self.total.dtype)
        self._largest.merge(other._largest)
        self.tokens += other.tokens

    def matrix(self) -> Tensor:
        """The Hessian, (features, features)."""
        if self.tokens == 0:
            raise ValueError(
                "No token was added, so there is no Hessian; check the calibration data and its mask."
            )
        result = self.total / self.tokens
        if not bool(torch.isfinite(result).all()):
            raise ValueError(_NOT_FINITE)
        return result


class InputSquares:
    """Accumulates the mean squared inputs of a layer: the importance matrix of llama.cpp.

    Args:
        features: Number of input features.
        device: Device of the sum; inputs are copied there.
    """

    def __init__(self, features: int, *, device: torch.device | str = "cpu") -> None:
        self.features = features
        self.tokens = 0
        exact = torch.float32 if torch.device(device).type == "mps" else torch.float64
        self.total = torch.zeros(features, dtype=exact, device=device)

    @torch.no_grad()
    def add(self, inputs: Tensor) -> None:
        """Add a batch of inputs (..., features)."""
        flat = inputs.reshape(-1, self.features).to(self.total.device, torch.float32)
        self.total += flat.square().sum(dim=0)
        self.tokens += len(flat)

    def matrix(self) -> Tensor:
        """The mean squares (features,), float32: the diagonal of the second moments.

        Raises:
            ValueError: No token was added, or an input was not finite.
        """
        if self.tokens == 0:
            raise ValueError(
                "No token was added, so there are no importances; check the calibration data and its mask."
            )
        result = (self.total / self.tokens).float()
        if not bool(torch.isfinite(result).all()):
            raise ValueError(_NOT_FINITE)
        return result


class InputPeak:
    """Accumulates the largest size of a layer's inputs.

    Args:
        features: Number of input features.
        dtype: Type of the maximum.
        device: Device of the maximum.
    """

    def __init__(
        self, features: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.features = features
        self.tokens = 0
        self._peak = torch.zeros((), dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, inputs: Tensor) -> None:
        """Add a batch of inputs (..., features)."""
        if inputs.numel():
            torch.maximum(self._peak, inputs.abs().amax().to(self._peak), out=self._peak)
        self.tokens += inputs.numel() // self.features

    def merge(self, other: InputPeak) -> None:
        """Add the tokens of another accumulator of the same layer."""
        self._peak = torch.maximum(self._peak, other._peak.to(self._peak))
        self.tokens += other.tokens

    @property
    def peak(self) -> float:
        """Largest size of an input; 0 without tokens.

        Raises:
            ValueError: An input was not finite.
        """
        found = float(self._peak)
        if not isfinite(found):
            raise ValueError(_NOT_FINITE)
        return found
