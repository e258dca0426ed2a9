"""Floors per block, exact against enumeration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rco
from rco.core.moves import uniform_allocation
from rco.testing import QuadraticObjective, enumerate_feasible


def floored(seed, blocks=3, per_block=3):
    rng = np.random.default_rng(seed)
    count = blocks * per_block
    ids = np.repeat(np.arange(blocks), per_block)
    price = np.repeat(rng.integers(1, 4, size=blocks), per_block)
    costs = np.stack([np.zeros(count, dtype=np.int64), price], axis=1)
    counts = rng.integers(0, per_block, size=blocks)
    low = int((counts * price[::per_block]).sum())
    budget = int(rng.integers(max(low, 1), price.sum() + 1))
    allowed = np.ones((count, 2), dtype=bool)
    for i in range(count):
        if rng.random() < 0.15:
            allowed[i, 0] = False
    low = max(low, int(price[~allowed[:, 0]].sum() + low))
    budget = max(budget, min(low, int(price.sum())))
    return rco.AllocationProblem(
        costs,
        budget=budget,
        sense="<=",
        allowed=allowed,
        floors={"blocks": ids, "counts": counts, "option": 1},
    ), rng


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_knapsack_with_floors_equals_enumeration(seed):
    problem, rng = floored(seed)
    values = rng.normal(size=(4, problem.num_groups, 2))
    if seed % 3 == 0:
        values = np.round(values)  # ties
    feasible = list(enumerate_feasible(problem))
    groups = np.arange(problem.num_groups)
    for sample, solution in zip(values, rco.solve_mckp(values, problem), strict=True):
        best = max(float(sample[groups, choices].sum()) for choices in feasible)
        assert solution.status == "optimal"
        assert problem.is_feasible(solution.allocation)
        assert solution.value == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_range_uniform_and_search_respect_floors(seed):
    problem, _ = floored(seed)
    costs = [
        problem.cost(choices)
        for choices in enumerate_feasible(problem.replace(budget=problem.unit_range[1][0]))
    ]
    assert problem.feasible_range == (min(costs), max(costs))
    assert problem.is_feasible(uniform_allocation(problem))
    result = rco.RCO(steps=8, samples=2, refine=10).search(problem, QuadraticObjective(9, 2, seed=seed))
    assert problem.is_feasible(result.allocation)
    assert rco.AllocationProblem.from_json(problem.to_json()) == problem


def test_bad_floors_are_refused():
    costs, blocks = [[0, 1]] * 4, [0, 0, 1, 1]
    with pytest.raises(ValueError, match="only 2 of its 2"):
        rco.AllocationProblem(
            costs, budget=4, floors={"blocks": blocks, "counts": [3, 0], "option": 1}, sense="<="
        )
    with pytest.raises(rco.InfeasibleBudgetError, match="between 3"):
        rco.AllocationProblem(
            costs, budget=2, floors={"blocks": blocks, "counts": [2, 1], "option": 1}, sense="<="
        )
    with pytest.raises(ValueError, match="equal costs"):
        rco.AllocationProblem(
            [[0, 1], [0, 2]], budget=2, floors={"blocks": [0, 0], "counts": [1], "option": 1}, sense="<="
        )
    with pytest.raises(ValueError, match="two options"):
        rco.AllocationProblem([[0, 1, 2]], budget=2, floors={"blocks": [0], "counts": [1], "option": 1})
