"""Predicted losses that add up over groups, (N, K), and their exact knapsack, as in production tools.

All methods built on it predict the cost of switching one group while the others stay fixed. They differ in
the prediction: a table of errors (``output_error``), the gradient (``first_order``), the squared gradient
(``fisher``), or the loss itself (``one_at_a_time``, ``higgs``).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from rco.core.choice import Candidates
from rco.core.knapsack import knapsack
from rco.core.moves import Ladder, uniform_allocation
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["GivenTable", "LossTable", "TableSearch"]


class LossTable(SearchState):
    """A table of predicted losses, averaged over batches."""

    saved = ("total", "seen")

    def __init__(self, run: SearchRun) -> None:
        super().__init__(run)
        self.total = np.zeros((self.problem.num_groups, self.problem.num_options))
        self.seen = 0

    def cost(self, step: int) -> int:
        """Evaluations that one batch takes."""
        return 1

    @abstractmethod
    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """The loss of the base on one batch, and the batch's contribution to the table."""

    def predicted(self) -> np.ndarray:
        """(N, K) predicted loss of every option."""
        return self.total / max(self.seen, 1)

    def propose(self, candidates: Candidates) -> None:
        """Add the knapsack of the table, if anything was measured."""
        self.run.notes["batches_measured"] = self.seen
        if self.seen:
            self._add(candidates)

    def _add(self, candidates: Candidates) -> None:
        predicted = self.predicted()
        candidates.add("knapsack", knapsack(-predicted, self.problem), torch.from_numpy(-predicted))


class GivenTable(LossTable):
    """A table that needs no measuring."""

    def __init__(self, run: SearchRun, table: np.ndarray) -> None:
        super().__init__(run)
        self.total = table

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """Never called: the table is given."""
        raise AssertionError("the table is given")

    def propose(self, candidates: Candidates) -> None:
        """Add the knapsack of the table."""
        self.run.notes["batches_measured"] = 0
        self._add(candidates)


@dataclass(frozen=True, kw_only=True)
class TableSearch(BudgetedSearch):
    """Settings and loop of the measured tables.

    Args:
        batches: Batches to average over; None: all, or as many as the allowance holds.
        base: Options of the other groups: their dearest ones, or the uniform assignment.
    """

    spends_uniform: ClassVar[bool] = False
    meets_exactly: ClassVar[bool] = True

    batches: int | None = None
    base: Literal["dearest", "uniform"] = "dearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(batches=1)
        if self.base not in ("dearest", "uniform"):
            raise ValueError(f'base must be "dearest" or "uniform", got {self.base!r}.')

    @abstractmethod
    def table(self, run: SearchRun) -> LossTable:
        """The method's table, empty or given."""

    def base_choices(self, problem: AllocationProblem) -> np.ndarray:
        """The assignment in which one group is switched."""
        return Ladder(problem).at("dearest") if self.base == "dearest" else uniform_allocation(problem)

    def loop(self, run: SearchRun) -> SearchResult:
        """One step per batch; no steps for a given table."""
        state = run.resume(self.table(run))
        batches = [] if isinstance(state, GivenTable) else run.some_batches(self.batches)
        with run.allowance():
            for step in run.steps(len(batches), state.cost):
                loss, added = state.measure(batches[step])
                state.total += added
                state.seen += 1
                run.record(loss)
        return run.choose()
