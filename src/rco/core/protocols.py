"""The two seams of the package: what a searcher sees of a model, and what a searcher is."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord

__all__ = [
    "CurvedObjective",
    "Objective",
    "QueuedObjective",
    "Searcher",
    "SplitObjective",
    "selection_objective",
]


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


@runtime_checkable
class CurvedObjective(Protocol):
    """An objective that knows its second-order term between the options of a group.

    The gradient with respect to the gates says what a switch costs to first order only, which is poor for options
    that are far apart. ``curvature[i, a, b]`` (N, K, K) adds what moving group i from option a to option b costs to
    second order, all else unchanged; it is zero for a = b and never negative.
    """

    num_batches: int
    curvature: Tensor

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """As :meth:`Objective.loss`."""
        ...


@runtime_checkable
class QueuedObjective(Protocol):
    """An objective on a device that computes while the host goes on.

    A step's samples follow each other on the device without a pause if all of them are enqueued before the first
    answer is asked for.
    """

    num_batches: int

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """As :meth:`Objective.loss`."""
        ...

    def enqueue(self, gates: Tensor, batch: int) -> Callable[[], tuple[float, Tensor]]:
        """Begin the loss and its gradient with respect to the gates; what is returned waits for them."""
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
        proxy: Tensor | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> SearchResult:
        """Find an allocation of low loss; never one over budget."""
        ...


def selection_objective(objective: Objective) -> Objective:
    """The held-back split if the objective has one, else the objective itself."""
    return objective.selection if isinstance(objective, SplitObjective) else objective
