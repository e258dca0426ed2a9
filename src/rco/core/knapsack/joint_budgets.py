"""Knapsacks with several joint budgets: HiGHS solves, exact integers verify.

A mixed-integer solver works to tolerances, so its solutions may exceed a budget by rounding. Here each solution is
costed with exact integers; one that is over budget is cut off by a cover inequality, which no affordable allocation
violates, and the solver runs again.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from rco.core.min_counts import MinCounts
from rco.core.problem import AllocationProblem

__all__ = ["solve_joint"]

_OPTIMAL, _INFEASIBLE, _LIMIT = range(3)
# The solver's absolute gap is 1e-6 whatever is requested: values are scaled to make that negligible.
_VALUE_SCALE = 1e4
_LARGEST_COST = 1e6
_TIE = 1e-9  # relative to the range of values: how far the solver's own bound can be trusted


def solve_joint(
    values: np.ndarray, problem: AllocationProblem, time_limit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choices (batch, N), status codes and certified gaps for (batch, N, K) values.

    Where the time limit passes before any allocation within all budgets is known, the status is "limit", the
    choices are -1 and the gap is infinite.
    """
    if not time_limit > 0:
        raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit}.")
    choices = np.empty(values.shape[:2], dtype=np.int64)
    codes = np.empty(len(values), dtype=np.int64)
    gaps = np.empty(len(values))
    for b, sample in enumerate(values):
        choices[b], codes[b], gaps[b] = _solve_one(sample, problem, time_limit)
    return choices, codes, gaps


def _solve_one(
    values: np.ndarray, problem: AllocationProblem, time_limit: float
) -> tuple[np.ndarray, int, float]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix, vstack

    none = np.full(problem.num_groups, -1, dtype=np.int64)
    usable = problem.allowed & (values > -math.inf)
    if not usable.any(axis=1).all():
        return none, _INFEASIBLE, 0.0
    best = np.where(usable, values, -np.inf).argmax(axis=1)
    if problem.is_feasible(best):
        return best, _OPTIMAL, 0.0

    cells = np.flatnonzero(usable)
    rows = cells // problem.num_options
    shortfall = (values.max(axis=1, where=usable, initial=-np.inf)[:, None] - values).reshape(-1)[cells]
    unit = float(shortfall.max()) / _VALUE_SCALE or 1.0
    matrix, capacity = _scaled(problem, cells)
    if problem.exact and not _whole(problem):
        return none, _INFEASIBLE, 0.0
    cuts = csr_matrix((0, len(cells)))
    cut_sides: list[float] = []
    choose_one = csr_matrix((np.ones(len(cells)), (rows, np.arange(len(cells)))))
    minima = [] if problem.min_counts is None else [_minima(problem.min_counts, cells)]
    deadline = time.monotonic() + time_limit
    while (left := deadline - time.monotonic()) > 0:
        result = milp(
            shortfall / unit,
            integrality=np.ones(len(cells)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(choose_one, 1, 1),
                LinearConstraint(csr_matrix(matrix), capacity if problem.exact else -np.inf, capacity),
                LinearConstraint(cuts, -np.inf, cut_sides),
                *minima,
            ],
            options={"mip_rel_gap": 0.0, "time_limit": left},
        )
        if result.status == 2:
            return none, _INFEASIBLE, 0.0
        if result.x is None:
            break
        taken = np.zeros(values.size)
        taken[cells] = result.x
        found = taken.reshape(values.shape).argmax(axis=1)
        if problem.is_feasible(found):
            lost = float(shortfall[np.isin(cells, found + np.arange(len(found)) * problem.num_options)].sum())
            gap = max(lost - float(result.mip_dual_bound) * unit, 0.0)
            if result.status == 0 and gap <= _TIE * max(lost, _VALUE_SCALE * unit):
                return found, _OPTIMAL, 0.0
            return found, _LIMIT, gap
        covered = problem.block_index is None and _over(found, problem)
        cover, size = _cover(found, problem) if covered else _only(found, problem)
        cuts = vstack([cuts, csr_matrix(cover.reshape(-1)[cells].astype(float))])
        cut_sides.append(size - 1.0)
    return none, _LIMIT, math.inf


def _minima(counts: MinCounts, cells: np.ndarray) -> Any:
    """The minimum counts as rows over the cells."""
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix

    groups, options = cells // counts.num_options, cells % counts.num_options
    at = np.flatnonzero(counts.counting[options])
    shape = (len(counts.counts), len(cells))
    rows = csr_matrix((np.ones(len(at)), (counts.blocks[groups[at]], at)), shape=shape)
    return LinearConstraint(rows, counts.counts.astype(float), np.inf)


def _scaled(problem: AllocationProblem, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduced costs (q, cells) and capacities as floats of moderate size."""
    costs = problem.reduced.costs.reshape(problem.num_joint, -1)[:, cells]
    if problem.block_index is not None:
        inside = problem.block_index[cells // problem.num_options] == np.arange(problem.num_budgets)[:, None]
        costs = np.where(inside, costs, 0)
    matrix = np.empty(costs.shape)
    capacity = np.empty(len(costs))
    for j, (row, limit) in enumerate(zip(costs, problem.reduced.capacity, strict=True)):
        largest = max(int(row.max()), 1)
        scale = max(largest / _LARGEST_COST, 1.0)
        matrix[j] = row.astype(np.float64) / scale
        capacity[j] = min(limit, largest * problem.num_groups) / scale
    return matrix, capacity


def _whole(problem: AllocationProblem) -> bool:
    """Whether every budget is a multiple of the unit that the reduced costs are counted in."""
    low, _ = problem.unit_range
    exact = zip(problem.budgets, problem.unit_budgets, low, problem.reduced.capacity, strict=True)
    for j, (budget, units, lowest, capacity) in enumerate(exact):
        costs = problem.unit_costs[0 if problem.block_index is not None else j]
        divisor = int(np.gcd.reduce(costs - costs.min(axis=1, keepdims=True), axis=None)) or 1
        if budget * problem.denominator != units or capacity * divisor != units - lowest:
            return False
    return True


def _over(choices: np.ndarray, problem: AllocationProblem) -> bool:
    return any(u > b for u, b in zip(problem.units(choices), problem.unit_budgets, strict=True))


def _only(choices: np.ndarray, problem: AllocationProblem) -> tuple[np.ndarray, int]:
    """The choices themselves, in the form of a cover: cuts off an allocation that leaves budget."""
    cut = np.zeros((problem.num_groups, problem.num_options), dtype=bool)
    cut[np.arange(len(choices)), choices] = True
    return cut, len(choices)


def _cover(choices: np.ndarray, problem: AllocationProblem) -> tuple[np.ndarray, int]:
    """Options (N, K) of which no affordable allocation takes one in each of the ``size`` groups they lie in.

    For the first budget that the choices exceed: as few of the dearest choices as exceed it by themselves, with
    every option that costs as much or more.
    """
    units = problem.units(choices)
    j = next(i for i, (u, b) in enumerate(zip(units, problem.unit_budgets, strict=True)) if u > b)
    costs, capacity = problem.reduced.costs[j], problem.reduced.capacity[j]
    chosen = costs[np.arange(len(choices)), choices]
    cover = np.zeros(costs.shape, dtype=bool)
    total, size = 0, 0
    for i in sorted(range(len(choices)), key=lambda i: -int(chosen[i])):
        cover[i] = costs[i] >= chosen[i]
        total, size = total + int(chosen[i]), size + 1
        if total > capacity:
            break
    return cover & problem.allowed, size
