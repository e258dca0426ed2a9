"""Picks by score: what pruning by saliency, by routing frequency or at random comes to.

The score is the prior, (N, K), higher is better: expert saliencies, frequencies or router mass become methods by
being fed to these two rules, one with the same share of the budget in every block, one over the whole model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.baselines.common import blocks_of, generator
from rco.core.evaluation import Evaluator
from rco.core.knapsack import knapsack
from rco.core.problem import AllocationProblem
from rco.core.process import BudgetedSearch, Process
from rco.core.refine import Candidates

__all__ = ["RandomPick", "TopGlobal", "TopPerBlock", "share_budget"]

logger = logging.getLogger(__name__)


class _Pick(Process):
    """The exact knapsack of some scores."""

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        scores: Tensor,
        tightened: AllocationProblem | None = None,
    ) -> None:
        super().__init__(problem, evaluator, scores)
        self.tightened = problem if tightened is None else tightened
        self.choices = knapsack(scores, self.tightened)

    @property
    def steps(self) -> int:
        return 0

    def advance(self, step: int) -> float:
        raise AssertionError("a pick takes no steps")

    def propose(self, candidates: Candidates) -> None:
        # Left-over budget is spent under the tightened problem: a block may not spend another's share.
        held = Candidates(self.tightened, self.evaluator)
        held.add("pick", self.choices, self.scores())
        candidates.choices["pick"] = held.choices["pick"]


@dataclass(frozen=True, kw_only=True)
class _Selection(BudgetedSearch):
    spends_uniform: ClassVar[bool] = False
    starts_from_prior: ClassVar[bool] = False

    def scores(self, problem: AllocationProblem, prior: Tensor | None) -> Tensor:
        """The prior; without one every option scores the same, and that is said."""
        if prior is not None:
            return prior
        logger.warning("%s picks by score but was given none: all options tie.", self.name)
        return torch.zeros(problem.num_groups, problem.num_options, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class TopGlobal(_Selection):
    """The best scores over all groups, by exact knapsack."""

    name: ClassVar[str] = "top-global"

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """One knapsack."""
        return _Pick(problem, evaluator, self.scores(problem, prior))


@dataclass(frozen=True, kw_only=True)
class TopPerBlock(_Selection):
    """The best scores within each block, every block with the same share of the budget.

    Args:
        blocks: Block of every group; None: what the objective, the problem or its labels say.
    """

    name: ClassVar[str] = "top-per-block"

    blocks: tuple[Any, ...] | None = None

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """One knapsack per block."""
        blocks = blocks_of(problem, evaluator.objective, self.blocks)
        return _Pick(problem, evaluator, self.scores(problem, prior), share_budget(problem, blocks))


@dataclass(frozen=True, kw_only=True)
class RandomPick(_Selection):
    """An allocation drawn at random: the exact knapsack of uniform random scores in [0, 1).

    Args:
        per_block: Give every block the same share of the budget.
        blocks: As in :class:`TopPerBlock`.
    """

    name: ClassVar[str] = "random-pick"

    per_block: bool = False
    blocks: tuple[Any, ...] | None = None

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """One knapsack of noise; dearer options are drawn higher, so that the budget is used."""
        drawn = generator(self.seed, 0).random((problem.num_groups, problem.num_options))
        order = np.argsort(problem.float_costs.sum(axis=0), axis=1, kind="stable")
        scores = np.empty_like(drawn)
        np.put_along_axis(scores, order, np.cumsum(np.take_along_axis(drawn, order, axis=1), axis=1), axis=1)
        tightened = None
        if self.per_block:
            tightened = share_budget(problem, blocks_of(problem, evaluator.objective, self.blocks))
        return _Pick(problem, evaluator, torch.from_numpy(scores), tightened)


def share_budget(problem: AllocationProblem, blocks: np.ndarray) -> AllocationProblem:
    """The problem with its (first) budget divided over blocks, the same share of each block's reachable range.

    Units that do not divide go one each to the blocks with the largest remainders, the first of equal ones first.
    Problems that already have a budget per block stay as they are. Other joint budgets stay beside the shares.
    """
    count = int(blocks.max()) + 1
    if problem.block_index is not None or count == 1:
        return problem
    costs = problem.unit_costs[0]
    above = costs - costs.min(axis=1, keepdims=True)
    unit = int(np.gcd.reduce(above, axis=None)) or 1  # what is shared: whole experts, not their parameters
    widths = [int(above[blocks == b].max(axis=1).sum()) // unit for b in range(count)]
    lows = [int(costs[blocks == b].min(axis=1).sum()) for b in range(count)]
    room = min((problem.unit_budgets[0] - sum(lows)) // unit, sum(widths))
    total = max(sum(widths), 1)
    shares = [width * room // total for width in widths]
    remainders = [width * room % total for width in widths]
    for block in sorted(range(count), key=lambda b: -remainders[b])[: room - sum(shares)]:
        shares[block] += 1
    budgets = [low + unit * share for low, share in zip(lows, shares, strict=True)]
    common: dict[str, Any] = {
        "sense": "<=",
        "allowed": problem.allowed,
        "groups": problem.groups,
        "options": problem.options,
        "monotone": problem.monotone,
    }
    if problem.num_joint == 1:
        return AllocationProblem(costs, budgets, blocks=blocks, floors=problem.floors, **common)
    inside = [np.where((blocks == b)[:, None], costs, 0) for b in range(count)]
    stacked = np.concatenate([problem.unit_costs, np.stack(inside)])
    return AllocationProblem(stacked, [*problem.unit_budgets, *budgets], **common)
