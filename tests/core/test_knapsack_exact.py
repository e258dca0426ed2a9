"""The knapsack against exact dynamic programming, enumeration and HiGHS, on random instances of many kinds."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rco.core.knapsack import solve_mckp
from rco.core.problem import AllocationProblem


@dataclass
class Instance:
    values: np.ndarray
    costs: np.ndarray  # as given to the problem
    budget: Any
    weights: np.ndarray | None = None
    allowed: np.ndarray | None = None
    blocks: np.ndarray | None = None
    exact: np.ndarray = field(init=False)  # (N, K) Fractions, worked out here and not by the problem

    def __post_init__(self):
        shape = np.asarray(self.values).shape
        costs = np.broadcast_to(np.asarray(self.costs), shape)
        weights = np.ones(shape[0], dtype=object) if self.weights is None else self.weights
        self.exact = np.empty(shape, dtype=object)
        for i, k in np.ndindex(*shape):
            self.exact[i, k] = _fraction(costs[i, k]) * _fraction(weights[i])

    @property
    def usable(self):
        allowed = np.ones(self.values.shape, dtype=bool) if self.allowed is None else self.allowed
        return allowed & (self.values > -math.inf)

    def problem(self):
        return AllocationProblem(
            self.costs, self.budget, self.weights, sense="<=", blocks=self.blocks, allowed=self.allowed
        )

    def budgets(self):
        if self.blocks is None:
            return {0: _fraction(self.budget)}
        return {block: _fraction(b) for block, b in zip(sorted(set(self.blocks)), self.budget, strict=True)}

    def best(self):
        """The optimal value, or None if nothing is affordable; totals are kept as exact fractions."""
        blocks = np.zeros(len(self.values), dtype=int) if self.blocks is None else self.blocks
        total = 0.0
        for block, budget in self.budgets().items():
            rows = np.flatnonzero(blocks == block)
            # The least that the groups still to come can cost: states that cannot fit are left out.
            rest = [Fraction(0)]
            for i in rows[::-1]:
                open_costs = self.exact[i][self.usable[i]]
                if len(open_costs) == 0:
                    return None
                rest.append(rest[-1] + min(open_costs))
            states = {Fraction(0): 0.0}
            for i, least in zip(rows, rest[-2::-1], strict=True):
                following: dict[Fraction, float] = {}
                for spent, worth in states.items():
                    for k in np.flatnonzero(self.usable[i]):
                        cost = spent + self.exact[i, k]
                        if cost + least <= budget:
                            value = worth + float(self.values[i, k])
                            if value > following.get(cost, -math.inf):
                                following[cost] = value
                states = following
            if not states:
                return None
            total += max(states.values())
        return total

    def scale(self):
        finite = np.abs(self.values[self.usable]).astype(float)
        return float(finite.max(initial=0.0)) or 1.0


def _fraction(value):
    if isinstance(value, float | np.floating):
        return Fraction(str(value))  # the shortest decimal that prints it
    return Fraction(int(value)) if isinstance(value, int | np.integer) else Fraction(value)


def _shape(rng):
    return int(rng.integers(1, 8)), int(rng.integers(1, 6))


def _budget(rng, costs, weights=None):
    """A whole budget between the least and the most that can be spent."""
    exact = np.vectorize(_fraction, otypes=[object])(costs)
    if weights is not None:
        exact = exact * np.vectorize(_fraction, otypes=[object])(weights)[:, None]
    low, high = sum(exact.min(axis=1)), sum(exact.max(axis=1))
    return low + (high - low) * Fraction(int(rng.integers(0, 1001)), 1000)


def _whole(rng, costs):
    return math.floor(_budget(rng, costs))


def _plain(rng, **changes):
    n, k = _shape(rng)
    costs = changes.pop("costs", None)
    costs = rng.integers(0, 30, (n, k)) if costs is None else costs
    values = changes.pop("values", None)
    values = rng.normal(size=costs.shape) if values is None else values
    budget = changes.pop("budget", None)
    return Instance(values, costs, _whole(rng, costs) if budget is None else budget, **changes)


def gaussian(rng):
    return _plain(rng)


def ties(rng):
    n, k = _shape(rng)
    return _plain(rng, costs=rng.integers(0, 30, (n, k)), values=rng.integers(0, 4, (n, k)).astype(float))


def clamped(rng):
    n, k = _shape(rng)
    return _plain(rng, costs=rng.integers(0, 9, (n, k)), values=np.maximum(rng.normal(-1, 2, (n, k)), -1.5))


def equal_costs(rng):
    n, k = _shape(rng)
    return _plain(rng, costs=np.repeat(rng.integers(0, 30, (n, 1)), k, axis=1))


def few_costs(rng):
    return _plain(rng, costs=rng.choice([0, 3, 7], _shape(rng)))


def zero_costs(rng):
    costs = rng.integers(0, 30, _shape(rng)) * rng.integers(0, 2, 1)
    costs[: len(costs) // 2] = 0
    return _plain(rng, costs=costs)


def value_is_cost(rng):
    costs = rng.integers(1, 200, _shape(rng))
    return _plain(rng, costs=costs, values=costs.astype(float))


def value_is_cost_plus(rng):
    costs = rng.integers(1, 200, _shape(rng))
    return _plain(rng, costs=costs, values=costs + 10.0)


def single_precision(rng):
    n, k = _shape(rng)
    return _plain(rng, costs=rng.integers(0, 30, (n, k)), values=rng.normal(size=(n, k)).astype(np.float32))


def cold(rng):
    n, k = _shape(rng)
    logits = rng.normal(0, 3, (n, k))
    noisy = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) + rng.gumbel(size=(n, k))
    return _plain(rng, costs=np.tile(np.arange(2, 2 + k), (n, 1)), values=noisy / 0.01)


def two_sizes(rng):
    n, k = _shape(rng)
    return _plain(rng, costs=rng.choice([512, 257], (n, 1)) * np.arange(2, 2 + k))


def large_costs(rng):
    return _plain(rng, costs=rng.integers(0, 10**12, _shape(rng)))


def cheapest_only(rng):
    costs = rng.integers(0, 30, _shape(rng))
    return _plain(rng, costs=costs, budget=int(costs.min(axis=1).sum()))


def forbidding_values(rng):
    instance = _plain(rng)
    instance.values[rng.random(instance.values.shape) < 0.4] = -math.inf
    return instance


def decimal_costs(rng):
    n, k = _shape(rng)
    costs = rng.choice([1.58, 2.3, 4.25, 3.0, 8.5], (n, k))
    weights = rng.integers(1, 5, n)
    return _plain(rng, costs=costs, weights=weights, budget=_budget(rng, costs, weights))


def measured_costs(rng):
    costs = rng.random(_shape(rng))
    return _plain(rng, costs=costs, budget=_budget(rng, costs))


def fractions(rng):
    n, k = _shape(rng)
    costs = np.empty((n, k), dtype=object)
    for cell in np.ndindex(n, k):
        costs[cell] = Fraction(int(rng.integers(0, 50)), int(rng.integers(1, 8)))
    return _plain(rng, costs=costs, budget=_budget(rng, costs))


def locks(rng):
    n, k = _shape(rng)
    costs = rng.integers(0, 30, (n, k))
    allowed = rng.random((n, k)) < 0.6
    allowed[np.arange(n), rng.integers(0, k, n)] = True
    open_costs = np.where(allowed, costs, 10**6).min(axis=1)
    budget = int(open_costs.sum() + rng.integers(0, 60))
    return _plain(rng, costs=costs, allowed=allowed, budget=budget)


def blocks(rng):
    n, k = int(rng.integers(3, 10)), int(rng.integers(1, 5))
    costs = rng.integers(0, 30, (n, k))
    ids = rng.integers(0, 3, n)
    budget = [_whole(rng, costs[ids == block]) for block in sorted(set(ids))]
    return _plain(rng, costs=costs, blocks=ids, budget=budget)


def selection(rng):
    n = int(rng.integers(1, 10))
    weights = np.full(n, int(rng.integers(1, 4)))
    values = rng.normal(size=(n, 2)).round(int(rng.integers(0, 3)))
    values[rng.random((n, 2)) < 0.05] = -math.inf
    costs = np.where(rng.random((n, 1)) < 0.5, [[0, 1]], [[1, 0]])
    budget = int(weights[0]) * int(rng.integers(0, n + 1)) + int(rng.integers(0, weights[0]))
    return _plain(rng, costs=costs, values=values, weights=weights, budget=budget)


def negative_costs(rng):
    return _plain(rng, costs=rng.integers(-40, 30, _shape(rng)))


def huge_costs(rng):
    n, k = _shape(rng)
    costs = np.empty((n, k), dtype=object)
    for cell in np.ndindex(n, k):
        costs[cell] = int(rng.integers(0, 2**62)) * 2**40 + int(rng.integers(0, 2**40))
    return _plain(rng, costs=costs)


def wide_values(rng):
    instance = _plain(rng)
    instance.values *= float(rng.choice([5e-324, 1e-300, 1e-30, 1e30, 1e300, 1.7e307]))
    return instance


KINDS = [
    gaussian, ties, clamped, equal_costs, few_costs, zero_costs, value_is_cost, value_is_cost_plus,
    single_precision, cold, two_sizes, large_costs, cheapest_only, forbidding_values, decimal_costs,
    measured_costs, fractions, locks, blocks, selection, negative_costs, huge_costs, wide_values,
]  # fmt: skip


def _check(instance: Instance) -> str:
    problem = instance.problem()
    solution = solve_mckp(instance.values, problem)
    best = instance.best()
    if best is None:
        assert solution.status == "infeasible"
        assert (solution.allocation == -1).all()
        assert solution.value == -math.inf
        assert solution.cost is None
        return "infeasible"
    assert solution.status == "optimal"
    assert solution.gap == 0.0
    picked = np.arange(len(instance.values)), solution.allocation
    assert instance.usable[picked].all()
    blocks = np.zeros(len(instance.values), dtype=int) if instance.blocks is None else instance.blocks
    for block, budget in instance.budgets().items():
        assert sum(instance.exact[picked][blocks == block], Fraction(0)) <= budget
    assert solution.cost == problem.cost(solution.allocation)
    value = math.fsum(float(v) for v in instance.values[picked])
    assert solution.value == pytest.approx(value, rel=1e-13, abs=1e-13 * instance.scale())
    assert value >= best - 1e-12 * instance.scale()
    assert value <= best + 1e-12 * instance.scale()
    return "optimal"


def _run(kind, count, seed):
    rng = np.random.default_rng([zlib.crc32(kind.__name__.encode()), seed])
    outcomes = [_check(kind(rng)) for _ in range(count)]
    assert "optimal" in outcomes
    if kind.__name__ == "forbidding_values":
        assert "infeasible" in outcomes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_equals_dynamic_programming(kind):
    _run(kind, 66, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_equals_dynamic_programming_on_many(kind):
    _run(kind, 400, 1)


def test_dynamic_programming_equals_enumeration():
    """The reference itself is right."""
    rng = np.random.default_rng(0)
    for kind in KINDS:
        for _ in range(3):
            instance = kind(rng)
            if instance.values.size > 24:
                continue
            blocks = np.zeros(len(instance.values), dtype=int) if instance.blocks is None else instance.blocks
            best = None
            for choice in itertools.product(*(np.flatnonzero(row) for row in instance.usable)):
                picked = np.arange(len(choice)), np.array(choice, dtype=int)
                if all(
                    sum(instance.exact[picked][blocks == block], Fraction(0)) <= budget
                    for block, budget in instance.budgets().items()
                ):
                    value = math.fsum(float(v) for v in instance.values[picked])
                    best = value if best is None else max(best, value)
            assert (best is None) == (instance.best() is None)
            if best is not None:
                assert instance.best() == pytest.approx(best, rel=1e-12, abs=1e-12 * instance.scale())


def _larger(rng, kind):
    """Up to 60 groups with small whole costs, of the kinds that bounds prune badly."""
    shape = int(rng.integers(5, 60)), int(rng.integers(2, 9))
    costs = rng.integers(0, 120, shape)
    if kind == "value is cost plus a constant":
        values = costs + 10.0
    elif kind == "value near cost":
        values = costs * (1 + rng.uniform(-0.01, 0.01, shape))
    elif kind == "few values":
        values = rng.integers(0, 5, shape).astype(float)
    elif kind == "two sizes":
        costs = rng.choice([51, 26], (shape[0], 1)) * np.arange(shape[1])
        values = rng.gumbel(size=shape)
    elif kind == "one odd group":
        costs = 2 * costs
        costs[0] += np.arange(shape[1]) % 2
        values = costs.astype(float)
    else:
        costs = rng.choice([0, 97, 89, 101], shape)
        values = np.sqrt(costs) + rng.choice([0, 0.5, 1e-9], shape)
    return costs, values, int(rng.integers(costs.min(axis=1).sum(), costs.max(axis=1).sum() + 1))


_LARGER = [
    "value is cost plus a constant",
    "value near cost",
    "few values",
    "two sizes",
    "one odd group",
    "primes",
]


def _grid(costs, values, budget):
    """The optimum over a grid of all budgets."""
    best = np.full(budget + 1, -np.inf)
    best[0] = 0.0
    for row_costs, row_values in zip(costs, values, strict=True):
        following = np.full(budget + 1, -np.inf)
        for cost, value in zip(row_costs, row_values, strict=True):
            if cost <= budget:
                np.maximum(following[cost:], best[: budget + 1 - cost] + value, out=following[cost:])
        best = following
    return best.max()


def _against_grid(kind, count, seed):
    rng = np.random.default_rng([zlib.crc32(kind.encode()), seed])
    limited = 0
    for _ in range(count):
        costs, values, budget = _larger(rng, kind)
        best = _grid(costs, values, budget)
        problem = AllocationProblem(costs, budget, sense="<=")
        solution = solve_mckp(values, problem)
        assert solution.status == "optimal"
        assert solution.cost <= budget
        assert solution.value == pytest.approx(best, rel=1e-11)
        # Stopped early, it says how far off it may be.
        stopped = solve_mckp(values, problem, max_states=int(rng.integers(1, 300)))
        assert stopped.cost <= budget
        assert best - stopped.gap - 1e-9 <= stopped.value <= best + 1e-9
        limited += stopped.status == "limit"
    assert limited > 0 or kind == "few values"


@pytest.mark.parametrize("kind", _LARGER)
def test_equals_a_budget_grid(kind):
    _against_grid(kind, 40, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _LARGER)
def test_equals_a_budget_grid_on_many(kind):
    _against_grid(kind, 1000, 1)


def _qwen_weights(rng, odd):
    sizes = np.array([4, 1, 1, 4, 12, 12, 12] * 36)
    return sizes * 65537 + rng.integers(0, 4096, 252) if odd else sizes


def _families(rng):
    bits = np.arange(2, 9)
    for odd in (False, True):
        weights = _qwen_weights(rng, odd)
        yield AllocationProblem(bits, int(weights.sum() * 5 // 2), weights), rng.gumbel(size=(252, 7)) * 10
    costs = rng.integers(1, 101, (250, 8))
    yield AllocationProblem(costs, int(costs.sum(axis=1).sum() // 9)), costs + rng.uniform(-10, 10, (250, 8))
    weights = np.tile([2, 1], 400)
    yield AllocationProblem(bits, int(weights.sum() * 5 // 2), weights), rng.gumbel(size=(800, 7))
    yield AllocationProblem([0, 1], 700, np.ones(1500, dtype=int)), rng.normal(size=(1500, 2)) * [1, 4]


def _highs(values, problem):
    """The optimal value by HiGHS, or None if it was not proven in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    n, k = values.shape
    costs = problem.reduced.costs[0].astype(float).reshape(1, -1)
    rows = csr_matrix((np.ones(n * k), (np.repeat(np.arange(n), k), np.arange(n * k))))
    result = milp(
        -values.reshape(-1),
        integrality=np.ones(n * k),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(rows, 1, 1),
            LinearConstraint(costs, -np.inf, problem.reduced.capacity[0]),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": 20.0},
    )
    return -result.fun if result.status == 0 else None


def _against_highs(seed, wanted):
    proven = 0
    for i, (problem, values) in enumerate(_families(np.random.default_rng(seed))):
        if wanted is not None and i not in wanted:
            continue
        solution = solve_mckp(values, problem)
        assert solution.status == "optimal"
        assert problem.is_feasible(solution.allocation)
        reference = _highs(values, problem)
        if reference is not None:
            proven += 1
            # HiGHS stops within 1e-6 of the optimum whatever gap is asked for, and never above it by more.
            assert solution.value == pytest.approx(reference, abs=2e-6, rel=1e-9)
    assert proven > 0


def test_equals_highs():
    _against_highs(0, (0, 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_equals_highs_on_many(seed):
    _against_highs(seed, None)
