"""Knapsacks whose total cost must equal the budget: state lists without dominance between costs.

With a multiplier ``lam`` of either sign and the regret ``r_ik = max_j(v_ij - lam c_ij) - (v_ik - lam c_ik) >= 0``,
every choice whose cost is the budget is worth ``L(lam) - sum of its regrets``, and that sum is minimised. A state
is (cost, least regret) of the choices made so far. It is dropped if its regret, and the least regret per unit of
cost that the remaining groups need to reach the budget, exceed a limit. The limit grows until a solution is found
within it, which is then optimal.
"""

# numba infers and specialises all types here; annotations would be a second source that nothing checks.
# ruff: noqa: ANN001, ANN202
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from rco.core.jit import entry
from rco.core.knapsack.single_budget import INFEASIBLE, LIMIT, OPTIMAL, Choices
from rco.core.problem import AllocationProblem

__all__ = ["nearest_totals", "solve_equality"]

_FIRST_ROOM = 1 << 12  # states per list
_LARGEST_ROOM = 1 << 24
_MOST_BITS = 1 << 33  # of work on bit sets of reachable totals


def solve_equality(values: np.ndarray, problem: AllocationProblem, max_states: int) -> Choices:
    """Best choices that meet every budget exactly, for (batch, N, K) values; one budget or one per block."""
    batch, num_groups, _ = values.shape
    found = Choices(
        np.full((batch, num_groups), -1, dtype=np.int64), np.zeros(batch, dtype=np.int64), np.zeros(batch)
    )
    costs = problem.reduced.costs[0].astype(np.int64)
    blocks = np.zeros(num_groups, dtype=np.int64) if problem.block_index is None else problem.block_index
    exact = _whole_capacities(problem)
    for b in range(batch):
        usable = problem.allowed & (values[b] > -math.inf)
        for j, capacity in enumerate(exact):
            members = np.flatnonzero(blocks == j)
            code, choices = INFEASIBLE, None
            if capacity is not None and usable[members].any(axis=1).all():
                code, choices = _solve_one(
                    values[b, members], costs[members], usable[members], capacity, max_states
                )
            if choices is None:
                found.choices[b], found.codes[b] = -1, code
                found.gaps[b] = math.inf if code == LIMIT else 0.0
                break
            found.choices[b, members] = choices
    return found


def _whole_capacities(problem: AllocationProblem) -> list[int | None]:
    """Capacities in the reduced costs' units; None where the budget is no multiple of that unit."""
    above = problem.unit_costs - problem.unit_costs.min(axis=2, keepdims=True)
    low, _ = problem.unit_range
    divisor = int(np.gcd.reduce(above[0], axis=None)) or 1
    capacities: list[int | None] = []
    for budget, units, lowest in zip(problem.budgets, problem.unit_budgets, low, strict=True):
        met = budget * problem.denominator == units and (units - lowest) % divisor == 0
        capacities.append((units - lowest) // divisor if met else None)
    return capacities


def _solve_one(
    values: np.ndarray, costs: np.ndarray, usable: np.ndarray, capacity: int, max_states: int
) -> tuple[int, np.ndarray | None]:
    """Status code and choices of one knapsack."""
    lowest = np.where(usable, costs, np.iinfo(np.int64).max).min(axis=1).sum()
    highest = np.where(usable, costs, -1).max(axis=1).sum()
    if not lowest <= capacity <= highest:
        return INFEASIBLE, None
    scale = float(np.abs(values[usable]).max()) or 1.0
    scaled = np.where(usable, values / scale, 0.0)
    lam, base = _multiplier(scaled, costs, usable, capacity)
    rows = np.arange(len(values))
    reduced = np.where(usable, scaled - lam * costs, -np.inf)
    regret = np.where(usable, np.maximum(reduced[rows, base][:, None] - reduced, 0.0), np.inf)
    offset = int(costs[rows, base].sum()) - capacity
    if offset == 0:
        return OPTIMAL, base
    step = costs - costs[rows, base][:, None]
    # Groups that move cheaply come last: what is left to them bounds the states best.
    each = np.where(usable & (step != 0), regret / np.maximum(np.abs(step), 1), np.inf).min(axis=1)
    order = np.argsort(-each, kind="stable")
    order = order[np.isfinite(each[order])]
    limit = _first_limit(regret[order], step[order], offset)
    room, states = _FIRST_ROOM, 0
    while True:
        choices = base.copy()
        code, visited = _expand(regret, step, usable, base, order, offset, limit, room, choices)
        states += visited
        if code == _FOUND:
            return OPTIMAL, choices
        if code == _COMPLETE:  # every state was kept, and none meets the budget
            return INFEASIBLE, None
        if states > max_states:
            return LIMIT, None
        if code == _FULL:
            room *= 4
            if room > _LARGEST_ROOM:
                return LIMIT, None
        else:
            limit *= 4.0


def _multiplier(
    values: np.ndarray, costs: np.ndarray, usable: np.ndarray, capacity: int
) -> tuple[float, np.ndarray]:
    """A multiplier at which the best choices' cost passes the capacity, and the choices on one side of it."""
    rows = np.arange(len(values))

    def best(lam: float) -> tuple[int, np.ndarray]:
        choices = np.where(usable, values - lam * costs, -np.inf).argmax(axis=1)
        return int(costs[rows, choices].sum()), choices

    total, choices = best(0.0)
    if total == capacity:
        return 0.0, choices
    sign = 1.0 if total > capacity else -1.0
    near, far = 0.0, 4.0 / max(int(costs.max()), 1)
    while sign * (best(sign * far)[0] - capacity) > 0 and far < 1e18:
        near, far = far, 4.0 * far
    for _ in range(80):
        middle = 0.5 * (near + far)
        if middle in (near, far):
            break
        total, choices = best(sign * middle)
        if total == capacity:
            return sign * middle, choices
        if sign * (total - capacity) > 0:
            near = middle
        else:
            far = middle
    return sign * far, best(sign * far)[1]


def _first_limit(regret: np.ndarray, step: np.ndarray, offset: int) -> float:
    """The least regret that could bring the total back, if steps could be split; a little more than that."""
    useful = np.where(step * -np.sign(offset) > 0, regret / np.maximum(np.abs(step), 1), np.inf)
    rate = float(useful.min(initial=np.inf))
    finite = regret[np.isfinite(regret) & (regret > 0)]
    small = float(np.median(finite)) * 1e-3 if finite.size else 1.0
    return max(rate * abs(offset) * 1.5 if math.isfinite(rate) else small, small, 1e-12)


_FOUND, _NONE, _COMPLETE, _FULL = range(4)


@entry
def _expand(regret, step, usable, base, order, offset, limit, room, choices):
    """Lists of (cost offset, regret), group after group, with everything above the limit dropped.

    Returns (found, none within the limit, none at all, lists full) and the states visited; writes the choices.
    """
    count = len(order)
    # Least regret per unit of cost saved and spent, over the groups from each one on, and how far they reach.
    down = np.full(count + 1, np.inf)
    up = np.full(count + 1, np.inf)
    reach_down = np.zeros(count + 1, dtype=np.int64)
    reach_up = np.zeros(count + 1, dtype=np.int64)
    for s in range(count - 1, -1, -1):
        i = order[s]
        down[s], up[s] = down[s + 1], up[s + 1]
        low, high = np.int64(0), np.int64(0)
        for k in range(step.shape[1]):
            if usable[i, k] and step[i, k] != 0:
                rate = regret[i, k] / abs(step[i, k])
                if step[i, k] < 0:
                    down[s] = min(down[s], rate)
                else:
                    up[s] = min(up[s], rate)
                low, high = min(low, step[i, k]), max(high, step[i, k])
        reach_down[s], reach_up[s] = reach_down[s + 1] + low, reach_up[s + 1] + high
    d = np.empty((2, room), dtype=np.int64)
    r = np.empty((2, room))
    node = np.empty((2, room), dtype=np.int64)
    nodes_room = 8 * room
    parent = np.empty(nodes_room, dtype=np.int64)
    chosen = np.empty(nodes_room, dtype=np.int32)
    owner = np.empty(nodes_room, dtype=np.int32)
    d[0, 0], r[0, 0], node[0, 0] = offset, 0.0, -1
    size, now, nodes, visited = 1, 0, 0, 0
    dropped = False
    for s in range(count):
        i = order[s]
        options = 0
        columns = np.empty(step.shape[1], dtype=np.int64)
        for k in range(step.shape[1]):
            if usable[i, k] and (k == base[i] or regret[i, k] <= limit):
                columns[options] = k
                options += 1
            elif usable[i, k]:
                dropped = True
        total = size * options
        if total > room:
            return _FULL, visited
        costs = np.empty(total, dtype=np.int64)
        for a in range(size):
            for b in range(options):
                costs[a * options + b] = d[now, a] + step[i, columns[b]]
        ranked = np.argsort(costs, kind="mergesort")
        into, w = 1 - now, 0
        for q in ranked:
            a, k = q // options, columns[q % options]
            cost, lost = costs[q], r[now, a] + regret[i, k]
            if cost + reach_down[s + 1] > 0 or cost + reach_up[s + 1] < 0:
                continue  # out of reach of the groups that are left
            bound = lost
            if cost > 0:
                bound += cost * down[s + 1]
            elif cost < 0:
                bound -= cost * up[s + 1]
            if bound > limit:
                dropped = True
                continue
            if w > 0 and d[into, w - 1] == cost:
                if r[into, w - 1] <= lost:
                    continue
                w -= 1
            came = node[now, a]
            if k != base[i]:
                if nodes >= nodes_room:
                    return _FULL, visited
                parent[nodes], chosen[nodes], owner[nodes] = came, k, i
                came = nodes
                nodes += 1
            d[into, w], r[into, w], node[into, w] = cost, lost, came
            w += 1
        visited += total
        now, size = into, w
        if size == 0:
            return (_NONE if dropped else _COMPLETE), visited
    for a in range(size):
        if d[now, a] == 0:
            at = node[now, a]
            while at >= 0:
                choices[owner[at]] = chosen[at]
                at = parent[at]
            return _FOUND, visited
    return (_NONE if dropped else _COMPLETE), visited


# ------------------------------------------------------------------------------------------ reachable totals


def nearest_totals(costs: np.ndarray, allowed: np.ndarray, capacity: int) -> tuple[int | None, int | None]:
    """The largest reachable total of at most ``capacity`` and the smallest of at least that; None if there is none.

    Args:
        costs: (n, K) integers of at least 0.
        allowed: (n, K) booleans.
        capacity: The total asked for.
    """
    offered = [sorted({int(c) for c in row[ok]}) for row, ok in zip(costs, allowed, strict=True)]
    lowest, highest = sum(o[0] for o in offered), sum(o[-1] for o in offered)
    if capacity < lowest or capacity > highest:
        return (None, lowest) if capacity < lowest else (highest, None)
    if sum(len(o) for o in offered) * max(highest, 1) <= _MOST_BITS:
        reachable = reduce(lambda bits, o: reduce(int.__or__, (bits << c for c in o)), offered, 1)
        below = (reachable & ((1 << (capacity + 1)) - 1)).bit_length() - 1
        above_bits = reachable >> capacity
        above = capacity + (above_bits & -above_bits).bit_length() - 1
        return below, above
    return _nearest_by_knapsack(costs, allowed, capacity, highest)


def _nearest_by_knapsack(
    costs: np.ndarray, allowed: np.ndarray, capacity: int, highest: int
) -> tuple[int | None, int | None]:
    """As :func:`nearest_totals`, by the knapsacks of the costs and of what they leave of the dearest options."""
    from rco.core.knapsack.solver import Solution, solve_mckp

    found = []
    dearest = np.where(allowed, costs, 0).max(axis=1, keepdims=True)
    for table, limit in ((costs, capacity), (dearest - costs, highest - capacity)):
        problem = AllocationProblem(np.where(allowed, table, 0), limit, sense="<=", allowed=allowed)
        solution = solve_mckp(np.where(allowed, table, -np.inf).astype(np.float64), problem)
        assert isinstance(solution, Solution)
        found.append(int(solution.cost))
    return found[0], highest - found[1]
