"""Simple allocations for comparison with a result: uniform widths, the proxy's knapsack, scores of experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rco.baselines.block_budgets import share_budget
from rco.compression.compression import Compression
from rco.compression.plan import CompressionPlan, stored_width
from rco.compression.priors import score_table
from rco.core.knapsack import knapsack, solve_mckp
from rco.core.moves import layer_order, spend, uniform_allocation
from rco.core.problem import Allocation, AllocationProblem, InfeasibleBudgetError
from rco.core.result import SearchResult
from rco.core.sampling import generator
from rco.pipeline.progress import Progress

__all__ = ["pick_at_random", "pick_by_score", "reference_allocations"]

Named = list[tuple[str, Allocation | None]]


def reference_allocations(
    compression: Compression, problem: AllocationProblem, result: SearchResult, progress: Progress
) -> Named:
    """Named allocations for comparison with the result; None is the full model."""
    if compression.plan.removes_only:
        return _expert_references(compression, problem, progress)
    return _width_references(compression, problem, result)


def _width_references(compression: Compression, problem: AllocationProblem, result: SearchResult) -> Named:
    """The full model, the neighbouring uniform widths, their interpolation, and the proxy's knapsack."""
    plan, losses = compression.plan, compression.losses.numpy()
    listed: Named = [("full model", None)]
    # Only groups with a choice: a uniform width does not include locked ones.
    free = [(k, g) for k, g in zip(result.allocation, plan.groups, strict=True) if len(g.options) > 1]
    parameters = sum(group.parameters for _, group in free) or 1
    average = sum(stored_width(plan.options[k]) * group.parameters for k, group in free) / parameters
    packed = [plan.options.index(option) for option in plan.packed]
    below = max((k for k in packed if stored_width(plan.options[k]) <= average), default=packed[0])
    above = min((k for k in packed if stored_width(plan.options[k]) > average), default=packed[-1])
    for option in dict.fromkeys((below, above)):
        listed.append((f"uniform {plan.labels[option]}", problem.allocation(_uniform(plan, option))))
    interpolation = spend(problem, uniform_allocation(problem), layer_order(problem))
    listed.append(("uniform interpolation", problem.allocation(interpolation)))
    proxy = solve_mckp(-losses, problem)
    listed.append(("proxy knapsack", problem.allocation(spend(problem, proxy.allocation, -losses))))
    return listed


def _uniform(plan: CompressionPlan, option: int) -> np.ndarray:
    """The same option for every group; where it is not allowed, the nearest one that is."""
    allowed = [np.flatnonzero(row) for row in plan.allowed]
    return np.array([row[np.abs(row - option).argmin()] for row in allowed])


def _expert_references(compression: Compression, problem: AllocationProblem, progress: Progress) -> Named:
    """The full model, a random choice, and choices by plain scores."""
    listed: Named = [("full model", None)]
    listed.append(("random", pick_at_random(problem, seed=0)))
    for label, score in (("frequency", "frequency"), ("REAP", "reap")):
        for per_layer in (True, False):
            name = f"{label}, {'same share per layer' if per_layer else 'over the model'}"
            if per_layer is False and problem.block_index is not None:
                continue  # with a budget per layer both are the same
            try:
                picked = pick_by_score(
                    problem, compression.scores[score], compression.plan.layer_of_group, per_layer=per_layer
                )
            except InfeasibleBudgetError as error:
                progress.message(f"{name} is left out of the comparison: {error}")
                continue
            listed.append((name, picked))
    return listed


def pick_by_score(
    problem: AllocationProblem, scores: Sequence[Tensor], blocks: np.ndarray, *, per_layer: bool
) -> Allocation:
    """Keep the experts of the highest score: the same share of every layer, or over the whole model."""
    values = score_table(scores).numpy()
    rule = share_budget(problem, blocks) if per_layer else problem
    return problem.allocation(spend(rule, knapsack(values, rule), values))


def pick_at_random(problem: AllocationProblem, seed: int) -> Allocation:
    """A feasible choice drawn at random."""
    values = np.zeros((problem.num_groups, problem.num_options))
    values[:, 1] = generator(seed, 0).random(problem.num_groups)
    return problem.allocation(spend(problem, knapsack(values, problem), values))
