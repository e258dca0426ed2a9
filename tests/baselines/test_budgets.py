"""Whatever the shape of the problem, every method keeps every budget exactly, or says at once why it cannot."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from rco import AllocationProblem
from rco.baselines.block_budgets import blocks_of
from rco.core.moves import Ladder, fill_upwards, fitting_switches, uniform_allocation
from rco.testing import random_problem

from .conftest import ErrorsObjective, make, methods


def problems():
    rng = np.random.default_rng(5)
    costs = np.cumsum(rng.integers(1, 5, size=(7, 3)), axis=1)
    low, high = int(costs[:, 0].sum()), int(costs[:, -1].sum())
    middle = (low + high) // 2
    locked = np.ones((7, 3), dtype=bool)
    locked[1, :2] = False
    locked[4, 1:] = False
    both = np.stack([costs, np.cumsum(rng.integers(1, 9, size=(7, 3)), axis=1)])
    limits = [(int(c[:, 0].sum()) + int(c[:, -1].sum())) // 2 for c in both]
    keep = np.array([[0, 1]] * 6)
    prune = np.where(np.arange(6)[:, None] < 3, [[1, 0]] * 6, 0)
    return {
        "lowest": AllocationProblem(costs, low, sense="<="),
        "highest": AllocationProblem(costs, high),
        "above": AllocationProblem(costs, high + 5, sense="<="),
        "locks": AllocationProblem(costs, middle, allowed=locked, monotone=True),
        "blocks": AllocationProblem(
            costs, [c + 3 for c in np.add.reduceat(costs[:, 0], [0, 3])], blocks=[0, 0, 0, 1, 1, 1, 1]
        ),
        "fractions": AllocationProblem(costs * Fraction(1, 7), Fraction(middle, 7), monotone=True),
        "huge": AllocationProblem((costs * 10**17 + 1).astype(object) * 100, middle * 10**19 + 700),
        "joint": AllocationProblem(both, limits, sense="<="),
        "joint, monotone": AllocationProblem(both, limits, sense="<=", monotone=True),
        # Four of six are kept, but of the first three no more than one may go: the orders conflict.
        "floors": AllocationProblem(np.stack([keep, prune]), [4, 1], sense="<=", monotone=True),
        "equal costs": AllocationProblem([1, 1, 2], 9, sense="<=", weights=[1] * 7),
    }


PROBLEMS = problems()


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("kind", sorted(PROBLEMS))
def test_exact_budget(name, kind):
    problem = PROBLEMS[kind]
    shape = (problem.num_groups, problem.num_options)
    objective = ErrorsObjective(*shape, seed=1, num_batches=2, batch_noise=0.1)
    prior = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if kind == "floors" and name in ("greedy", "greedy-down"):
        with pytest.raises(ValueError, match="order the options of group 0 differently"):
            make(name).search(problem, objective, prior=prior)
        return
    result = make(name).search(problem, objective, prior=prior)
    assert problem.is_feasible(result.allocation)
    assert result.cost == problem.cost(result.allocation)
    assert result.loss <= min(result.candidates.values()) + 1e-12
    assert ("uniform" in result.candidates) == make(name).compares_starts == (name != "rco-plain")


@pytest.mark.parametrize("seed", range(6))
def test_ladder_agrees_with_the_problem(seed, rng):
    problem = random_problem(seed, 6, 4, sense="<=") if seed else PROBLEMS["blocks"]
    ladder = Ladder(problem)
    for _ in range(20):
        choices = rng.integers(problem.num_options, size=problem.num_groups)
        if not problem.is_feasible(choices):
            relief = ladder.relieves(choices)
            spent = problem.units(choices)
            for group, option in np.argwhere(relief):
                switched = choices.copy()
                switched[group] = option
                after = problem.units(switched)
                assert any(
                    a < s and s > b for a, s, b in zip(after, spent, problem.unit_budgets, strict=True)
                )
            continue
        fits = fitting_switches(problem, choices)
        for group, option in np.ndindex(fits.shape):
            switched = choices.copy()
            switched[group] = option
            assert fits[group, option] == problem.is_feasible(switched)
        for group, option in np.argwhere(ladder.neighbours(choices, 1)):
            costs = problem.unit_costs[0, group]
            assert costs[option] > costs[choices[group]]
            assert not ((costs > costs[choices[group]]) & (costs < costs[option])).any()


def test_filling_takes_what_fits_and_stops_there():
    problem = AllocationProblem([1, 2, 4], 10, weights=[1, 1, 3, 1])  # uniform costs 6; steps cost 1, 1, 3, 1
    filled = fill_upwards(Ladder(problem), uniform_allocation(problem), np.array([2, 0, 1, 3]))
    assert filled.tolist() == [1, 0, 1, 0]
    assert problem.cost(filled) == 10


def test_the_start_is_feasible_where_joint_budgets_order_the_options_differently():
    problem = PROBLEMS["floors"]
    assert problem.is_feasible(uniform_allocation(problem))


def test_blocks_from_labels_objective_and_argument():
    groups = [f"layers.{layer}.experts.{e}" for layer in (10, 2) for e in range(2)]
    experts = AllocationProblem([0, 1], 2, groups=groups)
    assert blocks_of(experts, None, None).tolist() == [0, 0, 1, 1]
    linears = AllocationProblem([0, 1], 2, groups=["h.0.q", "h.0.k", "h.1.q", "head"])
    assert blocks_of(linears, None, None).tolist() == [0, 0, 1, 2]
    assert blocks_of(linears, None, ["a", "b", "a", "b"]).tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="each of 4 groups, got 1"):
        blocks_of(linears, None, ["a"])
    objective = ErrorsObjective(4, 2)
    objective.group_blocks = [1, 2, 1, 2]
    assert blocks_of(linears, objective, None).tolist() == [0, 1, 0, 1]
