"""Moves between allocations: cost and feasibility of switches, and starting points built from them."""

from __future__ import annotations

import numpy as np

from rco.core.knapsack import knapsack
from rco.core.problem import AllocationProblem

__all__ = [
    "Ladder",
    "cost_changes",
    "fill_upwards",
    "fitting_switches",
    "is_spent",
    "layer_order",
    "repaired",
    "spend",
    "uniform_allocation",
    "unspent",
]


def unspent(problem: AllocationProblem, choices: np.ndarray) -> np.ndarray:
    """Exact units (J,) that an allocation leaves of each budget; negative where it exceeds one."""
    units = problem.units(choices)
    left = [b - u for b, u in zip(problem.unit_budgets, units, strict=True)]
    return np.array(left, dtype=problem.unit_costs.dtype)


def cost_changes(problem: AllocationProblem, choices: np.ndarray) -> np.ndarray:
    """(q, N, K) exact change in units when one group switches to an option."""
    groups = np.arange(problem.num_groups)
    return np.asarray(problem.unit_costs - problem.unit_costs[:, groups, choices][:, :, None])


def fitting_switches(problem: AllocationProblem, choices: np.ndarray) -> np.ndarray:
    """(N, K) whether a single switch leads to an allocation that meets every budget and minimum count."""
    change, room = cost_changes(problem, choices), unspent(problem, choices)
    meets = np.equal if problem.exact else np.less_equal
    if problem.block_index is None:
        fits = np.asarray(meets(change, room[:, None, None]).all(axis=0), dtype=bool)
    else:
        fits = np.asarray(meets(change[0], room[problem.block_index][:, None]), dtype=bool)
    return fits if problem.min_counts is None else fits & problem.min_counts.keeping_switches(choices)


def spend(problem: AllocationProblem, choices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Switch groups to costlier options, best value first, until nothing more is affordable.

    Valid only where costlier options are never worse. Among the affordable switches the one that gains most
    value is taken; with joint budgets, costlier means no cheaper under any and costlier under one.
    """
    choices = choices.copy()
    groups = np.arange(problem.num_groups)
    while True:
        possible = _affordable(problem, choices)
        if not possible.any():
            return choices
        gain = np.where(possible, values - values[groups, choices][:, None], -np.inf)
        if not np.isfinite(gain).any():
            return choices
        group, option = np.unravel_index(int(gain.argmax()), gain.shape)
        choices[group] = option


def is_spent(problem: AllocationProblem, choices: np.ndarray) -> bool:
    """Whether no group can switch to a costlier option within the budget."""
    return not _affordable(problem, choices).any()


def _affordable(problem: AllocationProblem, choices: np.ndarray) -> np.ndarray:
    """(N, K) costlier options that a group can switch to within the budget."""
    change = cost_changes(problem, choices)
    costlier = (change >= 0).all(axis=0) & (change > 0).any(axis=0)
    found: np.ndarray = costlier & problem.allowed & fitting_switches(problem, choices)
    return found


def layer_order(problem: AllocationProblem) -> np.ndarray:
    """(N, K) values under which :func:`spend` raises groups by one option each, the first groups first."""
    order = np.arange(problem.num_groups)[:, None]
    step = np.arange(problem.num_options)[None, :]
    return -(order * step + problem.num_groups * step * (step + 1) // 2).astype(np.float64)


def uniform_allocation(problem: AllocationProblem) -> np.ndarray:
    """One option for every group: the dearest that the budget allows.

    Groups that may not use it take their dearest allowed option that costs no more. If no single option fits,
    every group takes its cheapest.
    """
    if problem.exact:
        return repaired(problem, uniform_allocation(problem.relaxed))
    groups = np.arange(problem.num_groups)
    costs = problem.relative_costs.sum(axis=0)  # joint budgets count alike, each by its range
    total = np.where(problem.allowed, costs, np.inf)
    cheapest = total.argmin(axis=1)
    best, best_spent = cheapest, total[groups, cheapest].sum()
    for option in range(problem.num_options):
        under = problem.allowed & (total <= costs[:, option][:, None])
        dearest_under = np.where(under, total, -np.inf).argmax(axis=1)
        choices = np.where(
            problem.allowed[groups, option], option, np.where(under.any(axis=1), dearest_under, cheapest)
        )
        spent = total[groups, choices].sum()
        if spent > best_spent and problem.is_feasible(choices):
            best, best_spent = choices, spent
    if not problem.is_feasible(best):
        # Minimum counts, or joint budgets that order the options differently: the cheapest feasible allocation.
        best = knapsack(np.where(problem.allowed, -costs, -np.inf), problem)
    return np.asarray(best, dtype=np.int64)


def repaired(problem: AllocationProblem, choices: np.ndarray) -> np.ndarray:
    """The feasible allocation nearest to some choices: fewest switches, then least change of cost."""
    if problem.is_feasible(choices):
        return choices
    groups = np.arange(problem.num_groups)
    costs = problem.relative_costs.sum(axis=0)
    values = -1.0 - np.abs(costs - costs[groups, choices][:, None])
    values[groups, choices] = 0.0
    return knapsack(np.where(problem.allowed, values, -np.inf), problem)


class Ladder:
    """Each group's allowed options from the cheapest to the dearest; options of equal cost share a rung.

    With joint budgets an option's cost is the sum of its costs, each in units of its budget's reachable range.

    Attributes:
        size: (N, K) float costs in those units.
        rung: (N, K) int64 position of every option, counted from 0; -1 if forbidden.
        top: (N,) highest rung.
    """

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem = problem
        low, high = problem.unit_range
        width = [max(h - lo, 1) for lo, h in zip(low, high, strict=True)]
        costs = problem.unit_costs
        if problem.block_index is None:
            scaled = [costs[j].astype(np.float64) / float(width[j]) for j in range(len(costs))]
            self.size = np.sum(scaled, axis=0)
        else:
            self.size = costs[0].astype(np.float64) / float(sum(width))
        exact = costs[0] if problem.num_joint == 1 else self.size
        self.rung = np.full(problem.allowed.shape, -1, dtype=np.int64)
        for row, ok, cost in zip(self.rung, problem.allowed, exact, strict=True):
            row[ok] = np.unique(cost[ok], return_inverse=True)[1].reshape(-1)
        self.top = self.rung.max(axis=1)
        self._groups = np.arange(problem.num_groups)

    def at(self, rung: str) -> np.ndarray:
        """The first option on the lowest or highest rung of every group."""
        wanted = self.top if rung == "dearest" else np.zeros_like(self.top)
        return np.asarray((self.rung == wanted[:, None]).argmax(axis=1), dtype=np.int64)

    def start(self, rung: str, scores: np.ndarray) -> np.ndarray:
        """As :meth:`at`, with as few groups elsewhere as the minimum counts require, those of the best scores.

        Where that is over budget, the cheapest allocation that keeps the minimum counts.
        """
        choices, counts = self.at(rung), self.problem.min_counts
        if counts is None or counts.met(choices):
            return choices
        away = np.abs(self.rung - self.rung[self._groups, choices][:, None])
        span = float(np.ptp(scores[self.problem.allowed])) + 1.0  # a rung counts more than any score
        values = np.where(self.problem.allowed, scores - span * away, -np.inf)
        choices = counts.lock(values[None])[0].argmax(axis=1)
        if rung == "cheapest" and not self.problem.is_feasible(choices):
            cheapest = counts.cheapest(self.problem.unit_costs[0], self.problem.allowed)
            assert cheapest is not None, "checked at construction"
            choices = cheapest
        return np.asarray(choices, dtype=np.int64)

    def neighbours(self, choices: np.ndarray, step: int) -> np.ndarray:
        """(N, K) options that lie ``step`` rungs above (below, if negative) the chosen ones."""
        wanted = self.rung[self._groups, choices] + step
        return np.asarray((self.rung == wanted[:, None]) & (self.rung >= 0))

    def relieves(self, choices: np.ndarray) -> np.ndarray:
        """(N, K) whether a single switch lowers an exceeded cost, and raises none that is exceeded."""
        over, change = unspent(self.problem, choices) < 0, cost_changes(self.problem, choices)
        if self.problem.block_index is None:
            exceeded = change[over]
            return np.asarray((exceeded < 0).any(axis=0) & (exceeded <= 0).all(axis=0), dtype=bool)
        return np.asarray((change[0] < 0) & over[self.problem.block_index][:, None], dtype=bool)

    def require_order(self, method: str) -> None:
        """Raise an error if joint budgets order a group's options differently, so that "dearer" has no meaning."""
        costs = self.problem.unit_costs
        for group in range(self.problem.num_groups if len(costs) > 1 else 0):
            ok = self.problem.allowed[group]
            order = np.argsort(self.size[group, ok], kind="stable")
            steps = np.diff(costs[:, group, ok][:, order], axis=1)
            if (steps < 0).any():
                raise ValueError(
                    f"{method} goes from cheaper to dearer options, but the joint budgets order the options of "
                    f"group {group} differently; use a search that needs no such order, such as rco or evopress."
                )


def _keeps_counts(problem: AllocationProblem, choices: np.ndarray, group: int, option: int) -> bool:
    counts = problem.min_counts
    if counts is None or not counts.counting[choices[group]] or counts.counting[option]:
        return True
    block = counts.blocks[group]
    return bool(counts.taken(choices)[block] > counts.counts[block])


def fill_upwards(ladder: Ladder, choices: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Raise groups of a feasible allocation by one rung in the given order, each if it still fits."""
    problem = ladder.problem
    choices = choices.copy()
    above = ladder.neighbours(choices, 1)
    target = above.argmax(axis=1)
    # A group is raised once, so the cost of each step is known in advance.
    change = cost_changes(problem, choices)[:, np.arange(len(choices)), target]
    room = unspent(problem, choices)
    blocks = problem.block_index
    can_rise = np.asarray(above.any(axis=1))
    for group in order[can_rise[order]].tolist():
        if blocks is None:
            left = room - change[:, group]
        else:
            left = room.copy()
            left[blocks[group]] -= change[0, group]
        if (left >= 0).all() and _keeps_counts(problem, choices, group, target[group]):
            room, choices[group] = left, target[group]
    return choices
