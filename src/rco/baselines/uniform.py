"""The same option for all groups, or a mixture of two neighbouring options, filled in order or at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rco.core.moves import Ladder, fill_upwards, uniform_allocation
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.sampling import generator
from rco.core.searcher import BudgetedSearch, FixedAnswer, SearchRun

__all__ = ["RandomFill", "Uniform", "UniformFill"]


@dataclass(frozen=True, kw_only=True)
class Uniform(BudgetedSearch):
    """The dearest option that all groups can afford together; leftover budget stays unspent."""

    name: ClassVar[str] = "uniform"
    spends_uniform: ClassVar[bool] = False
    starts_from_prior: ClassVar[bool] = False

    def loop(self, run: SearchRun) -> SearchResult:
        """Return the uniform assignment, a starting point of every search."""
        run.resume(FixedAnswer(run))
        return run.choose()


@dataclass(frozen=True, kw_only=True)
class UniformFill(BudgetedSearch):
    """Uniform, then each group to its next dearer option, as long as the budget lasts.

    Args:
        fill: The order of the groups: "first" (from the start), "last" (from the end), or "random".
    """

    name: ClassVar[str] = "uniform-fill"
    spends_uniform: ClassVar[bool] = False
    starts_from_prior: ClassVar[bool] = False

    fill: Literal["first", "last", "random"] = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fill not in ("first", "last", "random"):
            raise ValueError(f'fill must be "first", "last" or "random", got {self.fill!r}.')

    def loop(self, run: SearchRun) -> SearchResult:
        """Fill the groups in their order, without steps."""
        problem = run.problem
        filled = fill_upwards(Ladder(problem), uniform_allocation(problem), self._order(problem))
        run.resume(FixedAnswer(run, filled=filled))
        return run.choose()

    def _order(self, problem: AllocationProblem) -> np.ndarray:
        order = np.arange(problem.num_groups)
        if self.fill == "last":
            return order[::-1]
        if self.fill == "random":
            return generator(self.seed, 0).permutation(problem.num_groups)
        return order


@dataclass(frozen=True, kw_only=True)
class RandomFill(UniformFill):
    """Uniform, then groups in random order to their next dearer option, as long as the budget lasts."""

    name: ClassVar[str] = "uniform-random-fill"

    fill: Literal["first", "last", "random"] = "random"
