"""Picks by score: pruning by saliency, by routing frequency or at random.

The score is the prior, (N, K), higher is better. Expert saliencies, frequencies or router mass become methods
as the prior of one of two rules: the same share of the budget in every block, or one budget over the whole
model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.baselines.block_budgets import blocks_of, share_budget
from rco.core.choice import Candidates
from rco.core.knapsack import knapsack
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.sampling import generator
from rco.core.searcher import BudgetedSearch, FixedAnswer, SearchRun

__all__ = ["RandomPick", "TopGlobal", "TopPerBlock"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Pick(BudgetedSearch):
    spends_uniform: ClassVar[bool] = False
    starts_from_prior: ClassVar[bool] = False

    def scores(self, run: SearchRun) -> Tensor:
        """The prior; without one every option scores the same, which is logged as a warning."""
        if run.prior is None:
            logger.warning("%s picks by score but has no prior: all options tie.", self.name)
        return run.scores()

    def rule(self, run: SearchRun) -> AllocationProblem:
        """The problem to solve: unchanged, or with its budget divided over blocks."""
        return run.problem

    def loop(self, run: SearchRun) -> SearchResult:
        """Solve one exact knapsack of the scores, without steps."""
        scores, rule = self.scores(run), self.rule(run)
        # Leftover budget is spent under the rule: a block may not spend another's share.
        picked = Candidates(rule, run.evaluator)
        picked.add("pick", knapsack(scores, rule), scores)
        run.resume(FixedAnswer(run, **picked.choices))
        return run.choose()


@dataclass(frozen=True, kw_only=True)
class TopGlobal(_Pick):
    """The best scores over all groups, by exact knapsack."""

    name: ClassVar[str] = "top-global"


@dataclass(frozen=True, kw_only=True)
class TopPerBlock(_Pick):
    """The best scores within each block, every block with the same share of the budget.

    Args:
        blocks: Block of every group; None: those of the objective, of the problem or of its labels.
    """

    name: ClassVar[str] = "top-per-block"

    blocks: tuple[Any, ...] | None = None

    def rule(self, run: SearchRun) -> AllocationProblem:
        """One budget per block."""
        return share_budget(run.problem, blocks_of(run.problem, run.evaluator.objective, self.blocks))


@dataclass(frozen=True, kw_only=True)
class RandomPick(_Pick):
    """An allocation drawn at random: the exact knapsack of uniform random scores in [0, 1).

    Args:
        per_block: Give every block the same share of the budget.
        blocks: As in :class:`TopPerBlock`.
    """

    name: ClassVar[str] = "random-pick"

    per_block: bool = False
    blocks: tuple[Any, ...] | None = None

    def scores(self, run: SearchRun) -> Tensor:
        """Noise, summed up from cheap to dear options, so that the budget is used."""
        problem = run.problem
        drawn = generator(self.seed, 0).random((problem.num_groups, problem.num_options))
        order = np.argsort(problem.float_costs.sum(axis=0), axis=1, kind="stable")
        scores = np.empty_like(drawn)
        np.put_along_axis(scores, order, np.cumsum(np.take_along_axis(drawn, order, axis=1), axis=1), axis=1)
        return torch.from_numpy(scores)

    def rule(self, run: SearchRun) -> AllocationProblem:
        """The problem, or one budget per block."""
        if not self.per_block:
            return run.problem
        return share_budget(run.problem, blocks_of(run.problem, run.evaluator.objective, self.blocks))
