"""Knapsacks with one budget, or one per block: prepared once for the compiled kernels, solved many times.

Blocks are laid out contiguously, options by cost, options that can never be afforded left out, common factors
divided away. Costs too large for int64 are rounded in both directions, and results checked with exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rco.core.problem import AllocationProblem, once_per_problem

__all__ = ["INFEASIBLE", "LIMIT", "OPTIMAL", "Choices", "over_budget", "plans", "total_value"]

OPTIMAL, INFEASIBLE, LIMIT = range(3)
_INT64_SAFE = 2**62
_FIRST_LENGTH = 4096  # states per list; grown where a sample needs more
_LARGEST_KEPT_LENGTH = 2**20  # larger lists are freed with the call that needed them


class Choices(NamedTuple):
    """Results of the hot path as stacked arrays. ``codes``: 0 optimal, 1 infeasible, 2 limit."""

    choices: np.ndarray  # (batch, N) int64
    codes: np.ndarray  # (batch,) int64
    gaps: np.ndarray  # (batch,) float64


class _Plan:
    """A problem laid out for the kernels: blocks contiguous, options by cost, unusable options left out."""

    def __init__(
        self, costs: np.ndarray, capacity: Sequence[int], allowed: np.ndarray, block_index: np.ndarray | None
    ) -> None:
        num_groups, num_options = costs.shape
        if block_index is None:
            self.order = np.arange(num_groups)
            self.offsets = np.array([0, num_groups])
            cap_of = np.full((num_groups, 1), capacity[0])
        else:
            self.order = np.argsort(block_index, kind="stable")
            self.offsets = np.concatenate([[0], np.cumsum(np.bincount(block_index))])
            cap_of = np.array(capacity)[block_index[self.order]][:, None]
        costs = costs[self.order]
        usable = allowed[self.order] & (costs <= cap_of)
        # A common factor within a block makes fewer offsets distinct, and lets the budget be rounded down to it.
        divisor = np.gcd.reduceat(np.gcd.reduce(np.where(usable, costs, 0), axis=1), self.offsets[:-1])
        divisor = np.maximum(divisor, 1)
        costs = costs // np.repeat(divisor, np.diff(self.offsets))[:, None]
        self.capacity = np.array(capacity, dtype=np.int64) // divisor
        self.perm = np.argsort(np.where(usable, costs, _INT64_SAFE), axis=1, kind="stable")
        self.costs = np.take_along_axis(costs, self.perm, axis=1)
        self.counts = usable.sum(axis=1)
        self.shape = self._shapes()
        self.room = _FIRST_LENGTH
        self._allocate_workspace(int(np.diff(self.offsets).max()), num_options)

    def _shapes(self) -> np.ndarray:
        """Kind of each block, see :func:`rco.core.knapsack.batch_kernel.solve_batch`."""
        from rco.core.knapsack.batch_kernel import DISTINCT, GENERAL, SELECTION

        index = np.arange(self.costs.shape[1])
        beyond = index >= self.counts[:, None]
        steps = np.diff(self.costs, axis=1) > 0
        distinct = (steps | beyond[:, 1:]).all(axis=1)
        unit = (self.counts <= 2) & ((self.costs == index) | beyond).all(axis=1)
        by_block = [np.logical_and.reduceat(rows, self.offsets[:-1]) for rows in (distinct, unit)]
        return np.where(by_block[1], SELECTION, np.where(by_block[0], DISTINCT, GENERAL))

    def _allocate_workspace(self, num_groups: int, num_options: int) -> None:
        cells, side = num_groups * num_options, num_groups + 32
        self.workspace = (
            np.empty((2, cells)),
            np.empty((4, cells), dtype=np.int64),
            np.empty((4, side)),
            np.empty((10, side), dtype=np.int64),
        )
        self.lists = _state_lists(self.room, 8 * self.room)

    def solve(self, values: np.ndarray, max_states: int) -> Choices:
        """All samples of a batch; a sample that outgrows the state lists is repeated with larger ones."""
        from rco.core.knapsack.batch_kernel import solve_batch

        batch, num_groups, _ = values.shape
        found = Choices(
            np.empty((batch, num_groups), dtype=np.int64), np.empty(batch, dtype=np.int64), np.empty(batch)
        )
        done, room, lists = 0, self.room, self.lists
        while True:
            done = solve_batch(
                values, self.costs, self.perm, self.counts, self.order, self.offsets, self.capacity, self.shape,
                *self.workspace, *lists, max_states, done, *found,
            )  # fmt: skip
            if done >= batch:
                return found
            room *= 4
            lists = _state_lists(room, min(8 * room, max(max_states, 8 * _FIRST_LENGTH)))
            if room <= _LARGEST_KEPT_LENGTH:
                self.room, self.lists = room, lists


def _state_lists(room: int, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Four lists of ``room`` states and a tree of ``nodes`` nodes; memory is committed when it is first touched."""
    return (
        np.empty((4, room), dtype=np.int64),
        np.empty((4, room)),
        np.empty((4, room), dtype=np.int32),
        np.empty((2, nodes), dtype=np.int32),
    )


@dataclass(frozen=True)
class Plans:
    """The exact knapsack or, where its integers are too large for int64, one rounded in both directions.

    Rounding costs down (and the capacity down: a sum of integers that fits the one fits the other) relaxes the
    problem, rounding costs up tightens it. If the relaxed optimum is affordable it is the optimum.
    """

    relaxed: _Plan
    tightened: _Plan | None
    block_of: np.ndarray  # (N,) budget that each group counts towards
    budgets: np.ndarray  # (J,) in the problem's own units

    def audit(
        self, values: np.ndarray, found: Choices, problem: AllocationProblem
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values (batch,) and units of cost (batch, J) of the choices, by the problem's own int64 costs."""
        from rco.core.knapsack.batch_kernel import audit

        totals = np.empty((len(values), len(self.budgets)), dtype=np.int64)
        worth = np.empty(len(values))
        over = audit(values, problem.unit_costs[0], found.choices, self.block_of, self.budgets, totals, worth)
        if over >= 0:
            raise over_budget(over)
        return worth, totals

    def solve(self, values: np.ndarray, problem: AllocationProblem, max_states: int) -> Choices:
        """All samples of a batch, never over budget."""
        found = self.relaxed.solve(values, max_states)
        if self.tightened is None:
            return found
        for b in range(len(values)):
            if found.codes[b] == INFEASIBLE or problem.is_feasible(found.choices[b]):
                continue
            bound = total_value(values[b], found.choices[b]) + found.gaps[b]
            found.choices[b], found.codes[b] = self._affordable(
                found.choices[b], values[b], problem, max_states
            )
            if found.codes[b] != INFEASIBLE:
                found.gaps[b] = max(bound - total_value(values[b], found.choices[b]), 0.0)
                found.codes[b] = LIMIT if found.gaps[b] > 0 else OPTIMAL
        return found

    def _affordable(
        self, relaxed: np.ndarray, values: np.ndarray, problem: AllocationProblem, max_states: int
    ) -> tuple[np.ndarray, int]:
        """The best affordable choices among the tightened optimum, the relaxed one repaired, and the cheapest."""
        assert self.tightened is not None
        usable = problem.allowed & (values > -math.inf)
        tightened = self.tightened.solve(values[None], max_states).choices[0]
        priced = np.where(usable, problem.unit_costs[0], problem.unit_costs[0].max() + 1)
        offers = [tightened, self._repaired(relaxed, values, usable, problem), priced.argmin(axis=1)]
        rows = np.arange(len(values))
        offers = [x for x in offers if x[0] >= 0 and usable[rows, x].all() and problem.is_feasible(x)]
        if not offers:  # not even the cheapest choice
            return np.full(len(values), -1), INFEASIBLE
        return max(offers, key=lambda offer: total_value(values, offer)), LIMIT

    def _repaired(
        self, choices: np.ndarray, values: np.ndarray, usable: np.ndarray, problem: AllocationProblem
    ) -> np.ndarray:
        """In each block that is over budget, the one cheaper option that brings it back at the least loss."""
        choices, rows = choices.copy(), np.arange(len(choices))
        saved = problem.unit_costs[0][rows, choices][:, None] - problem.unit_costs[0]
        for j, (spent, budget) in enumerate(zip(problem.units(choices), problem.unit_budgets, strict=True)):
            if spent > budget:
                enough = usable & (saved >= spent - budget).astype(bool) & (self.block_of == j)[:, None]
                lost = np.where(
                    enough, values[rows, choices][:, None] - np.where(usable, values, 0.0), np.inf
                )
                i, k = np.unravel_index(int(lost.argmin()), lost.shape)
                if enough[i, k]:
                    choices[i] = k
        return choices


def total_value(values: np.ndarray, choices: np.ndarray) -> float:
    """Sum of the chosen values."""
    with np.errstate(over="ignore"):  # finite values near the largest float may sum to infinity
        return float(values[np.arange(len(choices)), choices].sum())


def over_budget(sample: int) -> RuntimeError:
    """The error for a solution over budget, a defect of the solver."""
    return RuntimeError(
        f"Internal error: the knapsack solver exceeded a budget in sample {sample}; please report this with the "
        "problem and the values."
    )


@once_per_problem
def plans(problem: AllocationProblem) -> Plans:
    """The problem's preparation."""
    costs, blocks = problem.reduced.costs[0], problem.block_index
    block_of = blocks if blocks is not None else np.zeros(problem.num_groups, dtype=np.int64)
    # Reduced costs are at least 0, so that an option dearer than the whole capacity is never affordable.
    limits = np.array(problem.reduced.capacity, dtype=object)[block_of]
    allowed = problem.allowed & (costs <= limits[:, None]).astype(bool)
    costs = np.where(allowed, costs, 0)
    total = sum(int(c) for c in costs.max(axis=1))
    capacity = [min(c, total) for c in problem.reduced.capacity]
    budgets = np.clip(np.array(problem.unit_budgets, dtype=object), -_INT64_SAFE, _INT64_SAFE).astype(
        np.int64
    )
    if total < _INT64_SAFE:
        return Plans(_Plan(costs.astype(np.int64), capacity, allowed, blocks), None, block_of, budgets)
    shift = (total // _INT64_SAFE).bit_length() + 1
    wide = costs.astype(object)
    capacity = [c >> shift for c in capacity]
    relaxed = _Plan((wide >> shift).astype(np.int64), capacity, allowed, blocks)
    tightened = _Plan((-(-wide >> shift)).astype(np.int64), capacity, allowed, blocks)
    return Plans(relaxed, tightened, block_of, budgets)
