"""The experts that plain scores, or chance, would keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rco.baselines.common import generator
from rco.baselines.selection import share_budget
from rco.compression.expert_pruning import score_table
from rco.core.knapsack import knapsack
from rco.core.problem import Allocation, AllocationProblem
from rco.core.refine import spend

__all__ = ["pick_at_random", "pick_by_score"]


def pick_by_score(
    problem: AllocationProblem, scores: Sequence[Tensor], blocks: np.ndarray, *, per_layer: bool
) -> Allocation:
    """The experts of the highest score: the same share of every layer, or over the whole model."""
    values = score_table(scores).numpy()
    rule = share_budget(problem, blocks) if per_layer else problem
    return problem.allocation(spend(rule, knapsack(values, rule), values))


def pick_at_random(problem: AllocationProblem, seed: int) -> Allocation:
    """A feasible choice drawn at random."""
    values = np.zeros((problem.num_groups, problem.num_options))
    values[:, 1] = generator(seed, 0).random(problem.num_groups)
    return problem.allocation(spend(problem, knapsack(values, problem), values))
