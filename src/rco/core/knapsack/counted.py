"""Knapsacks with minimum counts: at least m_b groups of block b take an option of a set S.

Where the optimum without minima keeps them it is the answer. Otherwise cost gets a price ``lam`` and each
minimum a multiplier ``mu_b``. For a given price the best assignment under the minima is found group by group:
each block takes the groups that prefer S most. So the dual is one-dimensional, and every ``mu_b`` follows from
the m_b-th preference: the middle of the interval of equally good ones. With the regret ``r`` of an option
against the best one of its group, an allocation is worth the dual's value less ``sum r + lam * unspent + sum
mu_b * (taken_b - m_b)``, which is minimised over the options whose regret alone is below the gap: state
lists (cost, regret, count), block after block, with dominance and bounds. The gap is that of the exact knapsack
with the preferred groups locked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rco.core.jit import entry
from rco.core.knapsack.single_budget import INFEASIBLE, LIMIT, OPTIMAL, Choices, plans, total_value
from rco.core.min_counts import MinCounts
from rco.core.problem import AllocationProblem, once_per_problem

__all__ = ["solve_counted"]

_MOST_STATES = 2_000_000  # visited for each sample and budget
_BISECTIONS = 44
_TIE = 1e-13  # of the largest value in play: closer ties are rounding noise


@dataclass(frozen=True, eq=False)
class _Part:
    """The groups under one budget, as a problem without minimum counts, and those counts."""

    members: np.ndarray
    problem: AllocationProblem
    counts: MinCounts
    price: np.ndarray  # (n, K) float costs as shares of the budget's range
    order: np.ndarray  # (n,) groups, block by block
    offsets: np.ndarray  # (B + 1,) start of each block in ``order``


@dataclass(frozen=True, eq=False)
class _Counted:
    """A problem with minimum counts, prepared once: without them, and by budget."""

    free: AllocationProblem
    parts: tuple[_Part, ...]
    exact_locks: bool


@once_per_problem
def _prepared(problem: AllocationProblem) -> _Counted:
    """The problem's parts."""
    counts = problem.min_counts
    assert counts is not None
    free = problem.replace(min_counts=None)
    exact = counts.locks_exactly(problem.unit_costs[0], problem.allowed)
    if problem.block_index is None:
        return _Counted(free, (_part(np.arange(problem.num_groups), free, counts),), exact)
    parts = []
    for j, budget in enumerate(problem.unit_budgets):
        members = np.flatnonzero(problem.block_index == j)
        ids, blocks = np.unique(counts.blocks[members], return_inverse=True)
        own = MinCounts(blocks.reshape(-1), counts.counts[ids], counts.options, counts.num_options)
        part = AllocationProblem(
            problem.unit_costs[0][members], budget, sense="<=", allowed=problem.allowed[members]
        )
        parts.append(_part(members, part, own))
    return _Counted(free, tuple(parts), exact)


def _part(members: np.ndarray, problem: AllocationProblem, counts: MinCounts) -> _Part:
    sizes = np.bincount(counts.blocks, minlength=len(counts.counts))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    price = np.ascontiguousarray(problem.relative_costs[0])
    return _Part(members, problem, counts, price, np.argsort(counts.blocks, kind="stable"), offsets)


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


@entry
def _assign(
    values: np.ndarray,
    price: np.ndarray,
    counting: np.ndarray,
    order: np.ndarray,
    offsets: np.ndarray,
    least: np.ndarray,
    lam: float,
    preference: np.ndarray,
) -> float:
    """Cost of the best assignment under the minima at a price of cost; writes the preferences for S (n,)."""
    total = 0.0
    for b in range(len(least)):
        size = offsets[b + 1] - offsets[b]
        inside = np.empty(size)
        outside = np.empty(size)
        for g in range(size):
            i = order[offsets[b] + g]
            best_in, best_out = -np.inf, -np.inf
            for k in range(values.shape[1]):
                x = values[i, k] - lam * price[i, k]
                if counting[k]:
                    if x > best_in:
                        best_in, inside[g] = x, price[i, k]
                elif x > best_out:
                    best_out, outside[g] = x, price[i, k]
            preference[i] = best_in - best_out
        members = order[offsets[b] : offsets[b + 1]]
        ranked = np.argsort(-preference[members], kind="mergesort")
        for rank in range(size):
            g = ranked[rank]
            total += inside[g] if rank < least[b] or preference[members[g]] > 0.0 else outside[g]
    return total


class _Search:
    """One knapsack with minimum counts under one budget."""

    def __init__(self, values: np.ndarray, part: _Part, max_states: int) -> None:
        self.values, self.part = np.ascontiguousarray(values), part
        self.max_states = max_states
        self.counting, self.blocks = part.counts.counting, part.counts.blocks
        self.least = part.counts.counts

    def run(self) -> tuple[np.ndarray, int, float]:
        """Choices (n,), status code, certified gap."""
        part, values = self.part, self.values
        usable = values > -math.inf
        nothing = values.argmax(axis=1), INFEASIBLE, 0.0
        if not usable.any(axis=1).all():
            return nothing
        cheapest = part.counts.cheapest(part.problem.unit_costs[0], usable)
        if cheapest is None or not part.problem.is_feasible(cheapest):
            return nothing
        lam, mu = self._multipliers()
        best = self._locked(lam, cheapest)
        reduced = np.where(self.counting, values + mu[self.blocks][:, None], values) - lam * part.price
        base = reduced.argmax(axis=1)
        regret = reduced[np.arange(len(base)), base][:, None] - reduced
        tie = _TIE * max(float(np.abs(values[usable]).max()), lam)
        return self._states(best, base, regret, lam, mu, tie)

    def _locked(self, lam: float, cheapest: np.ndarray) -> np.ndarray:
        """The better of the cheapest allocation and the exact knapsack with the preferred groups locked."""
        problem, priced = self.part.problem, self.values - lam * self.part.price
        locked = np.where(self.part.counts.lock(priced[None])[0] > -math.inf, self.values, -np.inf)
        found: np.ndarray = plans(problem).solve(locked[None], problem, self.max_states).choices[0]
        if found[0] < 0 or total_value(self.values, cheapest) > total_value(self.values, found):
            return cheapest
        return found

    def _multipliers(self) -> tuple[float, np.ndarray]:
        """The price of cost at the dual's minimum, and the multipliers (B,)."""
        part, preference = self.part, np.empty(len(self.values))
        budget = float(part.problem.relative_budgets[0])
        finite = self.values[np.isfinite(self.values)]
        spread = float(finite.max() - finite.min()) or 1.0

        def cost(lam: float) -> float:
            arguments = self.counting, part.order, part.offsets, self.least, lam, preference
            return float(_assign(self.values, part.price, *arguments))

        lam = 0.0
        if cost(0.0) > budget:
            low, lam = 0.0, spread
            while cost(lam) > budget and lam < 1e15 * spread:
                low, lam = lam, 8.0 * lam
            for _ in range(_BISECTIONS):
                middle = 0.5 * (low + lam)
                if cost(middle) > budget:
                    low = middle
                else:
                    lam = middle
            cost(lam)
        mu = np.zeros(len(self.least))
        for block in np.flatnonzero(self.least):
            ranked = -np.sort(-preference[part.order[part.offsets[block] : part.offsets[block + 1]]])
            count = int(self.least[block])
            lowest = max(0.0, -float(ranked[count - 1]))
            after = float(ranked[count]) if count < len(ranked) else -math.inf
            highest = max(0.0, -after)
            mu[block] = 0.5 * (lowest + (lowest + spread if math.isinf(highest) else highest))
        return lam, mu

    def _states(
        self, best: np.ndarray, base: np.ndarray, regret: np.ndarray, lam: float, mu: np.ndarray, tie: float
    ) -> tuple[np.ndarray, int, float]:
        """State lists over the options whose regret is below the gap, block after block.

        Args:
            best: The best known allocation.
            base: The dual's assignment, from which states deviate.
            regret: (n, K) against the base.
            lam: Price of cost, as a share of the budget's range.
            mu: (B,) multipliers of the minima.
            tie: Differences that are rounding noise.
        """
        part = self.part
        costs, capacity = part.problem.reduced.costs[0], part.problem.reduced.capacity[0]
        groups = np.arange(len(base))
        unit = float(part.price.max()) / max(float(costs.max()), 1.0)  # of relative cost per reduced unit
        lam = lam * unit
        unspent = float(capacity - sum(int(c) for c in costs[groups, best]))
        # Loss of the best known allocation against the dual's value.
        gap = float(regret[groups, best].sum() + lam * unspent + mu @ (part.counts.taken(best) - self.least))
        if gap <= tie * len(base):
            return best, OPTIMAL, 0.0
        if costs.dtype == object:  # beyond int64: only the dual's gap is certified
            return best, LIMIT, gap
        step = costs - costs[groups, base][:, None]
        change = self.counting[None, :].astype(np.int64) - self.counting[base][:, None]
        candidate = regret < gap
        candidate[groups, base] = False
        slope = np.where(candidate, regret / np.maximum(np.abs(step), 1), np.inf)
        steepness = slope.min(axis=1)
        excess = part.counts.taken(base) - self.least
        # Blocks in the order of their flattest candidate; groups within them likewise.
        first = np.full(len(self.least), np.inf)
        np.minimum.at(first, self.blocks, steepness)
        order = np.lexsort((steepness, self.blocks, first[self.blocks]))
        order = order[candidate[order].any(axis=1) | (excess < 0)[self.blocks[order]]]
        down = np.where(candidate & (step < 0), slope, np.inf).min(axis=1)[order]
        up = np.where(candidate & (step > 0), slope, np.inf).min(axis=1)[order]
        down = np.append(np.minimum.accumulate(down[::-1])[::-1], np.inf)
        up = np.minimum(np.append(np.minimum.accumulate(up[::-1])[::-1], np.inf), lam)
        waiting = mu * np.maximum(excess, 0)  # of the blocks whose groups have not been visited
        later, broken = float(waiting.sum()), int((excess < 0).sum())

        offset = np.array([int(costs[groups, base].sum()) - capacity], dtype=np.int64)
        lost, count, node = np.zeros(1), np.zeros(1, dtype=np.int64), np.full(1, -1)
        parents: list[np.ndarray] = []
        moves: list[np.ndarray] = []
        size, work, finish = 0, 0, -2

        def adopted() -> np.ndarray:
            """The best known allocation, or the better one that a chain of nodes makes of the base."""
            if finish == -2:
                return best
            found, chain = base.copy(), finish
            parent, move = np.concatenate(parents), np.concatenate(moves)
            while chain >= 0:
                found[move[chain] // costs.shape[1]] = move[chain] % costs.shape[1]
                chain = int(parent[chain])
            return found

        for position, group in enumerate(order.tolist()):
            block = self.blocks[group]
            if position == 0 or self.blocks[order[position - 1]] != block:
                count = np.full(len(lost), excess[block])
                later -= float(waiting[block])
                broken -= int(excess[block] < 0)
                inside = order[position:][self.blocks[order[position:]] == block]
                rises = (candidate[inside] & (change[inside] > 0)).any(axis=1)[::-1].cumsum()[::-1]
                falls = (candidate[inside] & (change[inside] < 0)).any(axis=1)[::-1].cumsum()[::-1]
                seat = 0
            seat += 1
            more, fewer = (int(x[seat]) if seat < len(inside) else 0 for x in (rises, falls))
            options = np.flatnonzero(candidate[group])
            parts = [(offset, lost, count, node)]
            for option in options:
                parents.append(node)
                moves.append(np.full(len(node), group * costs.shape[1] + option))
                fresh = np.arange(size, size + len(node))
                size += len(node)
                deviation = step[group, option], regret[group, option], change[group, option]
                parts.append((offset + deviation[0], lost + deviation[1], count + deviation[2], fresh))
            offset, lost, count, node = (np.concatenate(column) for column in zip(*parts, strict=True))
            work += len(offset)
            # The least that any completion loses.
            reach = np.where(
                offset > 0, offset * np.minimum(down[position + 1], 1e300), -offset * up[position + 1]
            )
            bound = lost + reach + mu[block] * np.maximum(count - fewer, 0) + later
            if work > min(_MOST_STATES, self.max_states):
                return adopted(), LIMIT, min(gap, max(gap - float(bound.min()), 0.0))
            keep = (bound < gap - tie) & (count + more >= 0)
            last = position + 1 == len(order) or self.blocks[order[position + 1]] != block
            if last:
                lost = lost + mu[block] * np.maximum(count, 0)
                count = np.zeros_like(count)
            offset, lost, count, node = (x[keep] for x in (offset, lost, count, node))
            if not len(offset):
                break
            offset, lost, count, node = _undominated(offset, lost, count, node, lam)
            ended = (offset <= 0) & (count >= 0)
            if not broken and ended.any():  # the rest may stay at the base
                loss = np.where(
                    ended, lost - lam * offset + (0.0 if last else mu[block] * count) + later, np.inf
                )
                if loss.min() < gap - tie:
                    gap, finish = float(loss.min()), int(node[loss.argmin()])
        return adopted(), OPTIMAL, 0.0


def _undominated(
    offset: np.ndarray, lost: np.ndarray, count: np.ndarray, node: np.ndarray, lam: float
) -> tuple[np.ndarray, ...]:
    """States that no cheaper state of the same count beats."""
    worth = lost - lam * offset
    order = np.lexsort((worth, offset, count))
    offset, lost, count, node, worth = (x[order] for x in (offset, lost, count, node, worth))
    keep = np.empty(len(order), dtype=bool)
    ends = np.flatnonzero(np.diff(count)) + 1
    for begin, end in zip([0, *ends], [*ends, len(order)], strict=True):
        part = worth[begin:end]
        keep[begin] = True
        keep[begin + 1 : end] = part[1:] < np.minimum.accumulate(part)[:-1]
    return offset[keep], lost[keep], count[keep], node[keep]
