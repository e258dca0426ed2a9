"""What every kind of compression offers to the rest, and the budgets people write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from rco.compression.accounting import parse_size
from rco.core.exact import exact_number
from rco.core.problem import Allocation, AllocationProblem
from rco.core.protocols import Objective
from rco.data.calibration import CalibrationSet
from rco.models.loading import LoadedModel

__all__ = ["Backend", "Budget"]


@dataclass(frozen=True)
class Budget:
    """What was asked for: an amount, and what it counts.

    Kinds of quantization: ``bits`` (average width of the quantized weights), ``bpw`` (the same with scales and
    zero points), ``size`` (bytes of all safetensors files). Kinds of pruning: ``experts`` (how many to prune),
    ``size``.
    """

    kind: str
    amount: Fraction

    @classmethod
    def parse(cls, **given: Any) -> Budget:
        """The one budget that is not None, e.g. ``Budget.parse(bits="2.5", size=None)``."""
        named = {kind: value for kind, value in given.items() if value is not None}
        if len(named) != 1:
            raise ValueError(
                f"Give exactly one budget out of {_arguments(given)}; got {_arguments(sorted(named)) or 'none'}."
            )
        ((kind, value),) = named.items()
        amount = (
            Fraction(parse_size(str(value))) if kind == "size" else exact_number(value, _arguments([kind]))
        )
        if amount <= 0:
            raise ValueError(f"{_arguments([kind])} must be positive, got {value}.")
        return cls(kind, amount)

    def __str__(self) -> str:
        if self.kind == "size":
            return f"{int(self.amount):,} bytes"
        return f"{float(self.amount):.6g} {self.kind}"


def _arguments(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


class Backend(ABC):
    """One kind of compression: model -> (problem, objective); allocation -> model."""

    name: ClassVar[str]
    loaded: LoadedModel
    compute_dtype: torch.dtype

    @abstractmethod
    def prepare(self, calibration: CalibrationSet) -> None:
        """Build the candidates; resumable."""

    @abstractmethod
    def problem(self, budget: Budget) -> AllocationProblem:
        """Groups, options, exact costs and the budget in the same integers."""

    @abstractmethod
    def objective(
        self, calibration: CalibrationSet, selection: CalibrationSet | None = None
    ) -> AbstractContextManager[Objective]:
        """The loss over assignments; the model is altered inside the context and restored after it."""

    @abstractmethod
    def prior(self) -> Tensor | None:
        """(N, K) scores, higher is better, or None."""

    @abstractmethod
    def apply(self, allocation: Allocation) -> AbstractContextManager[Any]:
        """The model with an allocation applied, inside the context."""

    @abstractmethod
    def amounts(self, allocation: Allocation | None) -> dict[str, float]:
        """What tables show of an allocation beside its quality, e.g. ``{"bits": 2.5}``; None: the full model."""

    def describe_cost(self, kind: str, units: float) -> str:
        """A cost of the problem as the user counts it, e.g. ``2.5 bits``; ``kind`` is that of the budget."""
        return f"{units:,.0f} units"
