"""Minimum counts per block: the knapsack is exact against enumeration and HiGHS; moves and searches keep them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

import rco
from rco.core.knapsack import counted
from rco.core.moves import Ladder, fill_upwards, fitting_switches, spend, uniform_allocation
from rco.testing import QuadraticObjective, enumerate_feasible


def two_options(seed, blocks=3, per_block=3):
    """Keep or remove, at equal costs within a block: the case that locks solve."""
    rng = np.random.default_rng(seed)
    count = blocks * per_block
    ids = np.repeat(np.arange(blocks), per_block)
    price = np.repeat(rng.integers(1, 4, size=blocks), per_block)
    costs = np.stack([np.zeros(count, dtype=np.int64), price], axis=1)
    counts = rng.integers(0, per_block, size=blocks)
    allowed = np.ones((count, 2), dtype=bool)
    allowed[:, 0] = rng.random(count) >= 0.15
    low = int((counts * price[::per_block]).sum() + price[~allowed[:, 0]].sum())
    budget = max(int(rng.integers(1, price.sum() + 1)), min(low, int(price.sum())))
    minima = {"blocks": ids, "counts": counts, "options": [1]}
    return rco.AllocationProblem(costs, budget, sense="<=", allowed=allowed, min_counts=minima), rng


def any_options(seed, blocks=3, per_block=3, num_options=3, equal=None, budgets=False):
    """Any costs, any set of counting options, locks; a budget for all, or one per block."""
    rng = np.random.default_rng(seed)
    count = blocks * per_block
    ids = np.repeat(np.arange(blocks), per_block)
    equal = bool(rng.integers(2)) if equal is None else equal
    rows = blocks if equal else count
    costs = np.cumsum(rng.integers(0, 5, size=(rows, num_options)), axis=1)
    if rng.random() < 0.3:
        costs = rng.permuted(costs, axis=1)
    costs = np.repeat(costs, per_block, axis=0) if equal else costs
    size = int(rng.integers(1, num_options)) if num_options > 1 else 1
    options = rng.choice(num_options, size=size, replace=False).tolist()
    allowed = rng.random((count, num_options)) >= 0.1
    allowed[np.arange(count), rng.integers(num_options, size=count)] = True
    usable = allowed[:, options].any(axis=1)
    counts = [int(rng.integers(0, usable[ids == b].sum() + 1)) for b in range(blocks)]
    minima = {"blocks": ids, "counts": counts, "options": options}
    top = [int(costs[ids == b].max(axis=1).sum()) for b in range(blocks)]
    arguments = {"sense": "<=", "allowed": allowed, "min_counts": minima}
    if budgets:
        arguments["blocks"] = ids
    ample = rco.AllocationProblem(costs, top if budgets else sum(top), **arguments)
    low, high = ample.counted_range
    drawn = [int(rng.integers(a, b + 1)) for a, b in zip(low, high, strict=True)]
    return ample.replace(budget=drawn if budgets else drawn[0]), rng


def best_value(values, feasible):
    groups = np.arange(values.shape[0])
    return max((float(values[groups, choices].sum()) for choices in feasible), default=-np.inf)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_two_options_equal_enumeration(seed):
    problem, rng = two_options(seed)
    values = rng.normal(size=(4, problem.num_groups, 2))
    if seed % 3 == 0:
        values = np.round(values)  # ties
    feasible = list(enumerate_feasible(problem))
    for sample, solution in zip(values, rco.solve_mckp(values, problem), strict=True):
        assert solution.status == "optimal"
        assert problem.is_feasible(solution.allocation)
        assert solution.value == pytest.approx(best_value(sample, feasible), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.booleans())
def test_any_options_equal_enumeration(seed, num_options, budgets):
    problem, rng = any_options(seed, blocks=2, num_options=num_options, budgets=budgets)
    values = rng.normal(size=(4, problem.num_groups, num_options))
    if seed % 3 == 0:
        values = np.round(2 * values)  # ties
    if seed % 5 == 0:
        values[rng.random(values.shape) < 0.1] = -np.inf  # options that the values forbid
    feasible = list(enumerate_feasible(problem))
    assert feasible, "a problem that was built has a solution"
    for sample, solution in zip(values, rco.solve_mckp(values, problem), strict=True):
        best = best_value(sample, feasible)
        if best == -np.inf:
            assert solution.status == "infeasible"
            continue
        assert solution.status == "optimal"
        assert problem.is_feasible(solution.allocation)
        assert solution.value == pytest.approx(best, abs=1e-9)


def highs(values, problem):
    """The optimum by a mixed-integer program of its own."""
    counts, size = problem.min_counts, values.size
    choose = np.kron(np.eye(problem.num_groups), np.ones(problem.num_options))
    rows = np.zeros((len(counts.counts), problem.num_groups, problem.num_options))
    for group, block in enumerate(counts.blocks):
        rows[block, group, list(counts.options)] = 1
    result = milp(
        -np.where(problem.allowed, values, 0.0).reshape(-1),
        integrality=np.ones(size),
        bounds=Bounds(0, problem.allowed.reshape(-1).astype(float)),
        constraints=[
            LinearConstraint(choose, 1, 1),
            LinearConstraint(
                problem.float_costs.reshape(problem.num_joint, -1), -np.inf, problem.float_budgets
            ),
            LinearConstraint(rows.reshape(len(rows), -1), counts.counts, np.inf),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert result.status == 0
    return -result.fun


@pytest.mark.parametrize("seed", range(12))
def test_experts_with_widths_equal_highs(seed):
    """Removed, 2, 3 or 4 bits; tight budgets, so that most blocks stand at their minimum."""
    rng = np.random.default_rng(seed)
    layers, experts = 6, 8
    ids = np.repeat(np.arange(layers), experts)
    costs = np.array([0, 9, 13, 17]) * (rng.integers(1, 40, size=layers)[ids][:, None] if seed % 2 else 1)
    minima = {"blocks": ids, "counts": [3] * layers, "options": [1, 2, 3]}
    ample = rco.AllocationProblem(np.broadcast_to(costs, (48, 4)), 10**6, sense="<=", min_counts=minima)
    low, high = ample.counted_range
    problem = ample.replace(budget=low[0] + (high[0] - low[0]) * int(rng.integers(1, 30)) // 100)
    values = np.cumsum(rng.exponential(size=(48, 4)) * [0, 4, 1, 0.5], axis=1) + rng.gumbel(size=(48, 4))
    solution = rco.solve_mckp(values, problem)
    assert solution.status == "optimal"
    assert problem.is_feasible(solution.allocation)
    assert solution.value == pytest.approx(highs(values, problem), abs=1e-6)


def test_joint_budgets_with_minimum_counts_equal_highs():
    rng = np.random.default_rng(0)
    costs = np.cumsum(rng.integers(0, 9, size=(2, 12, 3)), axis=2)
    minima = {"blocks": np.repeat([0, 1, 2], 4), "counts": [2, 3, 1], "options": [0]}
    budgets = [int(0.6 * table.max(axis=1).sum()) for table in costs]
    problem = rco.AllocationProblem(costs, budgets, sense="<=", min_counts=minima)
    for _ in range(4):
        values = np.cumsum(rng.exponential(size=(12, 3)), axis=1)
        solution = rco.solve_mckp(values, problem)
        assert problem.is_feasible(solution.allocation)
        assert solution.value == pytest.approx(highs(values, problem), abs=1e-6)


def test_a_search_that_ends_early_certifies_its_gap(monkeypatch):
    """Without state lists the allocation is feasible and the optimum lies within the gap."""
    monkeypatch.setattr(counted, "_MOST_STATES", 0)
    limited = 0
    for seed in range(40):
        problem, rng = any_options(seed, blocks=2, num_options=3)
        values = rng.normal(size=(problem.num_groups, 3))
        best = best_value(values, enumerate_feasible(problem))
        solution = rco.solve_mckp(values, problem)
        assert problem.is_feasible(solution.allocation)
        assert solution.value <= best + 1e-9
        assert best <= solution.value + solution.gap + 1e-9
        limited += solution.status == "limit"
    assert limited, "no problem needed branching: the test proves nothing"


@pytest.mark.parametrize("seed", range(6))
def test_range_uniform_and_search_keep_the_counts(seed):
    problem, _ = two_options(seed)
    costs = [
        problem.cost(choices)
        for choices in enumerate_feasible(problem.replace(budget=problem.unit_range[1][0]))
    ]
    assert problem.feasible_range == (min(costs), max(costs))
    assert problem.is_feasible(uniform_allocation(problem))
    result = rco.RCO(steps=8, samples=2, refine=10).search(problem, QuadraticObjective(9, 2, seed=seed))
    assert problem.is_feasible(result.allocation)
    assert rco.AllocationProblem.from_json(problem.to_json()) == problem


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_range_and_moves_keep_the_counts(seed, budgets):
    problem, rng = any_options(seed, blocks=2, num_options=3, budgets=budgets)
    ample = problem.replace(budget=problem.feasible_range[1])
    reached = np.array([ample.units(choices) for choices in enumerate_feasible(ample)])
    low, high = problem.counted_range
    assert (reached.min(axis=0) == low).all()
    assert (reached.max(axis=0) == high).all()
    start = uniform_allocation(problem)
    assert problem.is_feasible(start)
    assert problem.is_feasible(spend(problem, start, rng.normal(size=(6, 3))))
    ladder = Ladder(problem)
    assert problem.is_feasible(fill_upwards(ladder, start, rng.permutation(6)))
    assert problem.is_feasible(ladder.start("cheapest", rng.normal(size=(6, 3))))
    fits = fitting_switches(problem, start)
    for group, option in np.argwhere(problem.allowed):
        switched = start.copy()
        switched[group] = option
        assert fits[group, option] == problem.is_feasible(switched)


def test_the_best_scores_fill_the_counts():
    """The cheap end of a problem with minimum counts keeps the groups with the best scores, not the first ones."""
    minima = {"blocks": [0, 0, 0, 0], "counts": [2], "options": [1]}
    problem = rco.AllocationProblem([[0, 1]] * 4, 3, sense="<=", min_counts=minima)
    scores = np.array([[0.0, 1.0], [0.0, 9.0], [0.0, 3.0], [0.0, 8.0]])
    assert Ladder(problem).start("cheapest", scores).tolist() == [0, 1, 0, 1]


def test_bad_minimum_counts_are_refused():
    costs, blocks = [[0, 1]] * 4, [0, 0, 1, 1]

    def problem(budget=4, **minima):
        return rco.AllocationProblem(costs, budget, sense="<=", min_counts=minima)

    with pytest.raises(ValueError, match="only 2 of its 2"):
        problem(blocks=blocks, counts=[3, 0], options=[1])
    with pytest.raises(rco.InfeasibleBudgetError, match="between 3"):
        problem(budget=2, blocks=blocks, counts=[2, 1], options=[1])
    with pytest.raises(ValueError, match="exactly the keys"):
        problem(blocks=blocks, counts=[1, 1], option=1)
    with pytest.raises(ValueError, match=r"some of 0\.\.1"):
        problem(blocks=blocks, counts=[1, 1], options=[2])
    with pytest.raises(ValueError, match="one count per block"):
        problem(blocks=blocks, counts=[1], options=[1])
    with pytest.raises(ValueError, match="at least 0"):
        problem(blocks=blocks, counts=[1, -1], options=[1])
    with pytest.raises(ValueError, match="each of 4 groups"):
        problem(blocks=[0, 0, 1], counts=[1, 1], options=[1])
    with pytest.raises(ValueError, match="spans several budget blocks"):
        rco.AllocationProblem(
            costs,
            [2, 2],
            blocks=[0, 1, 0, 1],
            min_counts={"blocks": blocks, "counts": [1, 1], "options": [1]},
        )
