"""Knapsacks with minimum counts: at least m_b groups of block b take an option of a set S.

Where the unconstrained optimum keeps the minima it is the answer. Otherwise the minima get multipliers. For a
price ``lam`` of cost the best assignment under the minima is found group by group: each block takes the groups
that prefer S most, so the dual in ``lam`` is one-dimensional, and every binding block's multiplier ``mu_b``
follows from the m_b-th preference. With the values of S raised by ``mu_b`` the exact knapsack bounds the
optimum from above; it is the optimum itself if it takes exactly m_b groups in the blocks with ``mu_b > 0`` and
no fewer elsewhere. The middle of the interval of equally good ``mu_b`` makes that the common case. What is left
is branch and bound: one group of a block that misses its count must, or must not, take an option of S. Locking
the preferred groups gives allocations to compare with.
"""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rco.core.knapsack.single_budget import INFEASIBLE, LIMIT, OPTIMAL, Choices, plans, total_value
from rco.core.min_counts import MinCounts
from rco.core.problem import AllocationProblem

__all__ = ["solve_counted"]

_MOST_NODES = 2000  # of branch and bound, for each sample and budget
_BISECTIONS = 48
_ROUNDING = 1e-14  # of a sum of values, relative to the sum of their sizes


@dataclass(frozen=True, eq=False)
class _Part:
    """The groups under one budget, as a problem without minimum counts, and those counts."""

    members: np.ndarray
    problem: AllocationProblem
    counts: MinCounts
    price: np.ndarray  # (n, K) float costs as shares of the budget's range


@dataclass(frozen=True, eq=False)
class _Counted:
    """A problem with minimum counts, prepared once: without them, and by budget."""

    free: AllocationProblem
    parts: tuple[_Part, ...]
    exact_locks: bool


_PREPARED: dict[int, _Counted] = {}  # by problem identity; an entry leaves with its problem


def _prepared(problem: AllocationProblem) -> _Counted:
    found = _PREPARED.get(id(problem))
    if found is None:
        found = _PREPARED[id(problem)] = _prepare(problem)
        weakref.finalize(problem, _PREPARED.pop, id(problem), None)
    return found


def _prepare(problem: AllocationProblem) -> _Counted:
    counts = problem.min_counts
    assert counts is not None
    free = problem.replace(min_counts=None)
    exact = counts.locks_exactly(problem.unit_costs[0], problem.allowed)
    if problem.block_index is None:
        parts = [_Part(np.arange(problem.num_groups), free, counts, free.relative_costs[0])]
        return _Counted(free, tuple(parts), exact)
    parts = []
    for j, budget in enumerate(problem.unit_budgets):
        members = np.flatnonzero(problem.block_index == j)
        ids, blocks = np.unique(counts.blocks[members], return_inverse=True)
        own = MinCounts(blocks.reshape(-1), counts.counts[ids], counts.options, counts.num_options)
        part = AllocationProblem(
            problem.unit_costs[0][members], budget, sense="<=", allowed=problem.allowed[members]
        )
        parts.append(_Part(members, part, own, part.relative_costs[0]))
    return _Counted(free, tuple(parts), exact)


def solve_counted(values: np.ndarray, problem: AllocationProblem, max_states: int) -> Choices:
    """Best choices within the budgets and minimum counts, for (batch, N, K) values."""
    counts, prepared = problem.min_counts, _prepared(problem)
    assert counts is not None
    values = np.where(problem.allowed, values, -np.inf)
    free = prepared.free
    if prepared.exact_locks:
        return plans(free).solve(counts.lock(values), free, max_states)
    found = plans(free).solve(values, free, max_states)
    for b in range(len(values)):
        if found.codes[b] == INFEASIBLE or counts.met(found.choices[b]):
            continue
        found.gaps[b], found.codes[b] = 0.0, OPTIMAL
        for part in prepared.parts:
            choices, code, gap = _Search(values[b, part.members], part, max_states).run()
            if code == INFEASIBLE:
                found.choices[b], found.codes[b], found.gaps[b] = -1, INFEASIBLE, 0.0
                break
            found.choices[b, part.members] = choices
            found.codes[b] = max(found.codes[b], code)
            found.gaps[b] += gap
    return found


class _Bound(NamedTuple):
    """The relaxation of one node."""

    value: float  # no allocation of the node is worth more
    settled: bool  # nothing to branch on: ``choices`` keeps the minima
    undecided: int  # the group to branch on


class _Search:
    """Branch and bound over which groups take a counting option."""

    def __init__(self, values: np.ndarray, part: _Part, max_states: int) -> None:
        self.values, self.part, self.max_states = values, part, max_states
        self.counting, self.blocks = part.counts.counting, part.counts.blocks
        self.least = part.counts.counts
        self.best: np.ndarray | None = None
        self.best_value = -math.inf
        self.open_value = -math.inf  # bound of what the knapsacks themselves have left open

    def run(self) -> tuple[np.ndarray, int, float]:
        """Choices (n,), status code, certified gap."""
        part = self.part
        usable = self.values > -math.inf
        if not usable.any(axis=1).all():
            return self.values.argmax(axis=1), INFEASIBLE, 0.0
        cheapest = part.counts.cheapest(part.problem.unit_costs[0], usable)
        if cheapest is None or not part.problem.is_feasible(cheapest):
            return self.values.argmax(axis=1), INFEASIBLE, 0.0
        self._offer(cheapest)
        number = itertools.count()
        waiting: list[tuple[float, int, np.ndarray, _Bound]] = []

        def push(node: np.ndarray) -> None:
            bound = self._bound(node)
            if bound is None or bound.value <= self.best_value + self._tolerance():
                return
            if bound.settled:
                self.open_value = max(self.open_value, bound.value)
            else:
                heapq.heappush(waiting, (-bound.value, next(number), node, bound))

        push(self.values)
        for _ in range(_MOST_NODES):
            while waiting and -waiting[0][0] <= self.best_value + self._tolerance():
                heapq.heappop(waiting)
            if not waiting:
                break
            _, _, node, bound = heapq.heappop(waiting)
            for forbidden in (~self.counting, self.counting):
                child = node.copy()
                child[bound.undecided, forbidden] = -np.inf
                push(child)
        assert self.best is not None
        highest = max(self.open_value, -waiting[0][0] if waiting else -math.inf)
        gap = highest - self.best_value
        return (self.best, LIMIT, gap) if gap > self._tolerance() else (self.best, OPTIMAL, 0.0)

    def _tolerance(self) -> float:
        """Rounding error of the sums that are compared."""
        assert self.best is not None
        return _ROUNDING * float(np.abs(self.values[np.arange(len(self.best)), self.best]).sum())

    def _offer(self, choices: np.ndarray) -> None:
        """Take an allocation within budget and minima if it is the best so far."""
        value = total_value(self.values, choices)
        if value > self.best_value or self.best is None:
            self.best, self.best_value = choices.copy(), value

    def _knapsack(self, values: np.ndarray) -> tuple[np.ndarray, int, float]:
        problem = self.part.problem
        found = plans(problem).solve(values[None], problem, self.max_states)
        return found.choices[0], int(found.codes[0]), float(found.gaps[0])

    def _bound(self, node: np.ndarray) -> _Bound | None:
        """The relaxation of a node; None where it holds no allocation."""
        counts = self.part.counts
        usable = node > -math.inf
        if not usable.any(axis=1).all():
            return None
        cheapest = counts.cheapest(self.part.problem.unit_costs[0], usable)
        if cheapest is None or not self.part.problem.is_feasible(cheapest):
            return None
        both = usable[:, self.counting].any(axis=1) & usable[:, ~self.counting].any(axis=1)
        multipliers, preference, priced = self._multipliers(node)
        # A block whose groups are all decided has its count.
        multipliers[np.bincount(self.blocks[both], minlength=len(multipliers)) == 0] = 0.0
        locked = np.where(counts.lock(priced[None])[0] > -math.inf, node, -np.inf)
        choices, code, _ = self._knapsack(locked)
        if code != INFEASIBLE:
            self._offer(choices)
        raised = np.where(self.counting, node + multipliers[self.blocks][:, None], node)
        choices, code, gap = self._knapsack(raised)
        assert code != INFEASIBLE, "the cheapest choice is affordable"
        taken = counts.taken(choices)
        if (taken >= self.least).all():
            self._offer(choices)
        off = (taken < self.least) | ((multipliers > 0) & (taken > self.least))
        if not off.any():  # the multipliers' terms cancel
            return _Bound(total_value(node, choices) + gap, True, -1)
        bound = total_value(raised, choices) + gap - float(multipliers @ self.least)
        distance = np.where(both & off[self.blocks], np.abs(preference + multipliers[self.blocks]), np.inf)
        return _Bound(bound, False, int(distance.argmin()))

    def _multipliers(self, node: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Multipliers (B,), preferences for S (n,) and values less the price of cost, at the dual's minimum."""
        part = self.part
        budget = float(part.problem.relative_budgets[0])
        finite = node[np.isfinite(node)]
        spread = float(finite.max() - finite.min()) or 1.0

        def at(price: float) -> tuple[float, np.ndarray, np.ndarray]:
            """Cost of the best assignment under the minima, preferences and priced values."""
            priced = node - price * part.price
            inside = np.where(self.counting, priced, -np.inf)
            outside = np.where(self.counting, -np.inf, priced)
            with np.errstate(invalid="ignore"):
                preference = inside.max(axis=1) - outside.max(axis=1)
            chosen = part.counts.lock(priced[None])[0].argmax(axis=1)
            return float(part.price[np.arange(len(chosen)), chosen].sum()), preference, priced

        low, high = 0.0, 0.0
        cost, preference, priced = at(0.0)
        if cost > budget:
            high = spread
            while (found := at(high))[0] > budget and high < 1e12 * spread:
                low, high = high, 4.0 * high
            for _ in range(_BISECTIONS):
                middle = 0.5 * (low + high)
                trial = at(middle)
                if trial[0] > budget:
                    low = middle
                else:
                    high, found = middle, trial
            _, preference, priced = found
        multipliers = np.zeros(len(self.least))
        for block in np.flatnonzero(self.least):
            ranked = np.sort(preference[self.blocks == block])[::-1]
            count = int(self.least[block])
            lowest = max(0.0, -float(ranked[count - 1]))
            after = float(ranked[count]) if count < len(ranked) else -math.inf
            highest = max(0.0, -after)
            if math.isinf(highest):
                highest = lowest + spread
            if math.isfinite(lowest):
                multipliers[block] = 0.5 * (lowest + highest)
        return multipliers, preference, priced
