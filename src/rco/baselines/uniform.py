"""The same option everywhere, and the step beyond: two neighbouring options, filled in order or at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from rco.baselines.common import Ladder, fill_upwards, generator
from rco.core.evaluation import Evaluator
from rco.core.problem import AllocationProblem
from rco.core.process import BudgetedSearch, Process
from rco.core.refine import Candidates, uniform_allocation

__all__ = ["RandomFill", "Uniform", "UniformFill"]


class _Uniform(Process):
    """Nothing but the starting point."""

    own_candidates = 0

    @property
    def steps(self) -> int:
        return 0

    def advance(self, step: int) -> float:
        raise AssertionError("a uniform assignment takes no steps")

    def propose(self, candidates: Candidates) -> None:
        pass


class _Filled(_Uniform):
    """The uniform assignment with groups raised in a given order."""

    own_candidates = 1

    def __init__(
        self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None, order: np.ndarray
    ) -> None:
        super().__init__(problem, evaluator, prior)
        self.choices = fill_upwards(Ladder(problem), uniform_allocation(problem), order)

    def propose(self, candidates: Candidates) -> None:
        candidates.choices["filled"] = self.choices


@dataclass(frozen=True, kw_only=True)
class Uniform(BudgetedSearch):
    """The dearest option that all groups can afford together; what is left of the budget stays unspent."""

    name: ClassVar[str] = "uniform"
    spends_uniform: ClassVar[bool] = False
    starts_from_prior: ClassVar[bool] = False

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """Nothing to do."""
        return _Uniform(problem, evaluator, prior)


@dataclass(frozen=True, kw_only=True)
class UniformFill(BudgetedSearch):
    """Uniform, then each group to its next dearer option, as long as the budget lasts.

    Args:
        fill: The order of the groups: "first" (as they come), "last" (from the end), or "random".
    """

    name: ClassVar[str] = "uniform-fill"
    spends_uniform: ClassVar[bool] = False
    starts_from_prior: ClassVar[bool] = False

    fill: Literal["first", "last", "random"] = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fill not in ("first", "last", "random"):
            raise ValueError(f'fill must be "first", "last" or "random", got {self.fill!r}.')

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """All is decided by the order."""
        return _Filled(problem, evaluator, prior, self._order(problem))

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
