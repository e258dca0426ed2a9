"""The two seams of the package: what a searcher sees of a model, and what a searcher is."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord

__all__ = ["Objective", "Searcher", "SplitObjective", "selection_objective"]


class Objective(Protocol):
    """A loss over whole assignments: all that a searcher ever sees of a model."""

    num_batches: int

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """Scalar loss on one batch; ``gates`` (N, K) has one-hot rows and may carry gradient."""
        ...


@runtime_checkable
class SplitObjective(Protocol):
    """An objective that holds batches back for choosing among finished candidates."""

    num_batches: int
    selection: Objective

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """As :meth:`Objective.loss`, on the batches that gradients may use."""
        ...


class Searcher(Protocol):
    """Picks one option per group within the budget. RCO and every baseline."""

    name: ClassVar[str]

    def search(
        self,
        problem: AllocationProblem,
        objective: Objective,
        *,
        prior: Tensor | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> SearchResult:
        """Find an allocation of low loss; never one over budget."""
        ...


def selection_objective(objective: Objective) -> Objective:
    """The held-back split if the objective has one, else the objective itself."""
    return objective.selection if isinstance(objective, SplitObjective) else objective
