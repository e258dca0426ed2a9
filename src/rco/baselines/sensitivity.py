"""Scores that decompose over groups, each with the exact knapsack: the proxies that production tools use.

All of them predict what a switch of one group costs as if the others stayed put, and differ in the prediction:
a table of output errors, the gradient, the squared gradient (empirical Fisher), or the loss itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rco.baselines.common import HasFisherLosses, HasOptionErrors, HasOutputErrors, Ladder
from rco.core.evaluation import Evaluator, one_hot
from rco.core.knapsack import knapsack
from rco.core.problem import AllocationProblem
from rco.core.process import BudgetedSearch, Process, checked_table, some_batches
from rco.core.refine import Candidates, uniform_allocation

__all__ = [
    "FirstOrder",
    "Fisher",
    "OneAtATime",
    "OutputError",
    "Sensitivity",
    "SwitchProcess",
    "TableProcess",
]

Base = Literal["dearest", "uniform"]


class TableProcess(Process):
    """A table of predicted losses (N, K), averaged over batches, then its knapsack. One step is one batch."""

    label = "knapsack"

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        prior: Tensor | None,
        batches: Sequence[int],
        base: np.ndarray,
    ) -> None:
        super().__init__(problem, evaluator, prior)
        self.batches, self.base = list(batches), base
        self.total = np.zeros((problem.num_groups, problem.num_options))
        self.seen = 0

    @property
    def steps(self) -> int:
        """One per batch."""
        return len(self.batches)

    @abstractmethod
    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """The loss of the base on one batch, and what that batch adds to the table."""

    def advance(self, step: int) -> float:
        """Measure on one more batch."""
        loss, table = self.measure(self.batches[step])
        self.total += table
        self.seen += 1
        return loss

    def predicted(self) -> np.ndarray:
        """(N, K) predicted loss of every option."""
        return self.total / max(self.seen, 1)

    def propose(self, candidates: Candidates) -> None:
        """The knapsack of the table, if anything was measured."""
        self.notes["batches_measured"] = self.seen
        if self.seen or not self.steps:
            predicted = self.predicted()
            candidates.add(self.label, knapsack(-predicted, self.problem), torch.from_numpy(-predicted))

    def state(self) -> dict[str, Any]:
        """The table so far."""
        return {"total": torch.from_numpy(self.total.copy()), "seen": self.seen}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.total, self.seen = state["total"].numpy().copy(), state["seen"]


class _Given(TableProcess):
    """A table that needs no measuring."""

    def __init__(
        self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None, table: np.ndarray
    ) -> None:
        super().__init__(problem, evaluator, prior, [], np.zeros(problem.num_groups, dtype=np.int64))
        self.total = table

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        raise AssertionError("the table is given")


class _Gradients(TableProcess):
    """Predictions from the gradient with respect to the gates, one backward per batch."""

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        prior: Tensor | None,
        batches: Sequence[int],
        base: np.ndarray,
        order: int,
    ) -> None:
        super().__init__(problem, evaluator, prior, batches, base)
        self.order = order

    def cost(self, step: int) -> int:
        return 3

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        gates = one_hot(self.base, self.problem.num_options)
        loss, gradient = self.evaluator.loss_and_gradient(gates, [batch])
        slope = gradient.numpy()
        change = slope - slope[np.arange(len(slope)), self.base][:, None]
        return loss, change if self.order == 1 else 0.5 * change**2


class SwitchProcess(TableProcess):
    """Measured losses with one group switched and the others at the base; ``measured`` (N, K) says which."""

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        prior: Tensor | None,
        batches: Sequence[int],
        base: np.ndarray,
        measured: np.ndarray | None = None,
    ) -> None:
        super().__init__(problem, evaluator, prior, batches, base)
        self.measured = problem.allowed.copy() if measured is None else measured
        self.measured[np.arange(len(base)), base] = False  # known: no change

    def cost(self, step: int) -> int:
        """The base and every switch."""
        return 1 + int(self.measured.sum())

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """The loss of the base, and what every switch adds to it."""
        (base_loss,) = self.losses(self.base, [batch])
        table = np.zeros_like(self.total)
        for group, option in np.argwhere(self.measured).tolist():
            table[group, option] = self.disturbed_loss(group, option, batch) - base_loss
        return float(base_loss), table

    def disturbed_loss(self, group: int, option: int, batch: int) -> float:
        """The loss of the base with one group switched."""
        switched = self.base.copy()
        switched[group] = option
        return float(self.losses(switched, [batch])[0])


@dataclass(frozen=True, kw_only=True)
class Sensitivity(BudgetedSearch):
    """Settings of the measured proxies.

    Args:
        batches: Batches to average over; None: all, or as many as the allowance holds.
        base: Where the others stay: at their dearest options, or at the uniform assignment.
    """

    spends_uniform: ClassVar[bool] = False

    batches: int | None = None
    base: Base = "dearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(batches=1)
        if self.base not in ("dearest", "uniform"):
            raise ValueError(f'base must be "dearest" or "uniform", got {self.base!r}.')

    def base_choices(self, problem: AllocationProblem) -> np.ndarray:
        """The assignment that one group is switched in."""
        return Ladder(problem).at("dearest") if self.base == "dearest" else uniform_allocation(problem)

    def chosen_batches(self, evaluator: Evaluator) -> list[int]:
        """The batches to measure on, in the order in which they are taken."""
        return some_batches(evaluator, self.batches, self.seed)


@dataclass(frozen=True, kw_only=True)
class OutputError(BudgetedSearch):
    """The least total error of the groups' outputs, from the objective's own table; no forward is needed.

    The objective must offer ``output_errors`` or ``option_errors``, (N, K).
    """

    name: ClassVar[str] = "output-error"
    spends_uniform: ClassVar[bool] = False

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """The table's knapsack."""
        objective = evaluator.objective
        if isinstance(objective, HasOutputErrors):
            name, table = "output_errors", objective.output_errors
        elif isinstance(objective, HasOptionErrors):
            name, table = "option_errors", objective.option_errors
        else:
            raise ValueError(
                f"{self.name} needs a table of errors, but the objective ({type(objective).__name__}) has neither "
                "output_errors nor option_errors (N, K); add one, or use one-at-a-time, which measures."
            )
        process = _Given(problem, evaluator, prior, checked_table(table, problem, name))
        process.notes["errors"] = name
        return process


@dataclass(frozen=True, kw_only=True)
class FirstOrder(Sensitivity):
    """The gradient at the base predicts what a switch costs."""

    name: ClassVar[str] = "first-order"

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """One backward per batch."""
        base = self.base_choices(problem)
        return _Gradients(problem, evaluator, prior, self.chosen_batches(evaluator), base, order=1)


@dataclass(frozen=True, kw_only=True)
class Fisher(Sensitivity):
    """Half the mean squared change of the gradient: the diagonal of the Fisher information.

    An objective that offers ``fisher_losses`` has drawn the labels from the model itself, which is the Fisher
    information proper; else the gradients of the loss on each batch make the empirical one.
    """

    name: ClassVar[str] = "fisher"

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """One backward per batch, or the objective's table."""
        objective = evaluator.objective
        if isinstance(objective, HasFisherLosses):
            table = checked_table(objective.fisher_losses, problem, "fisher_losses")
            return _Given(problem, evaluator, prior, table)
        base = self.base_choices(problem)
        return _Gradients(problem, evaluator, prior, self.chosen_batches(evaluator), base, order=2)


@dataclass(frozen=True, kw_only=True)
class OneAtATime(Sensitivity):
    """The loss itself, with one group switched at a time: one forward per option, group and batch."""

    name: ClassVar[str] = "one-at-a-time"

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """All switches, batch by batch."""
        return SwitchProcess(
            problem, evaluator, prior, self.chosen_batches(evaluator), self.base_choices(problem)
        )
