"""A budget that must be met exactly: the knapsack against enumeration, reachable totals, and searches."""

import itertools

import numpy as np
import pytest
import torch

import rco
from rco.core.knapsack import equality
from rco.core.knapsack.equality import nearest_totals
from rco.core.moves import fitting_switches, repaired, uniform_allocation
from rco.testing import QuadraticObjective, enumerate_feasible, random_problem, true_optimum


def drawn(rng, largest):
    groups, options = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    costs = rng.integers(0, largest, size=(groups, options))
    allowed = rng.random(costs.shape) < 0.8
    allowed[np.arange(groups), rng.integers(options, size=groups)] = True
    picks = itertools.product(*[np.flatnonzero(row) for row in allowed])
    return costs, allowed, np.array(list(picks)), rng.normal(size=costs.shape)


@pytest.mark.parametrize("largest", [2, 9, 4000])
def test_the_knapsack_equals_enumeration(largest):
    rng = np.random.default_rng(largest)
    for trial in range(30):
        costs, allowed, picks, values = drawn(rng, largest)
        if trial % 3 == 0:
            values = np.round(values)  # ties
        rows = np.arange(len(costs))
        totals = costs[rows, picks].sum(axis=1)
        budget = int(rng.choice(totals))
        if totals.min() == totals.max():
            continue
        problem = rco.AllocationProblem(costs, budget, sense="==", allowed=allowed)
        best = values[rows, picks].sum(axis=1)[totals == budget].max()
        found = rco.solve_mckp(np.where(allowed, values, -np.inf), problem)
        assert found.status == "optimal"
        assert found.cost == budget
        assert found.value == pytest.approx(best, abs=1e-9)


def test_nearest_totals_equal_enumeration(monkeypatch):
    rng = np.random.default_rng(0)
    for trial in range(80):
        costs, allowed, picks, _ = drawn(rng, (3, 50, 900)[trial % 3])
        totals = set(costs[np.arange(len(costs)), picks].sum(axis=1).tolist())
        wanted = int(rng.integers(0, costs.max() * len(costs) + 2))
        below, above = (t for t in totals if t <= wanted), (t for t in totals if t >= wanted)
        expected = max(below, default=None), min(above, default=None)
        assert nearest_totals(costs, allowed, wanted) == expected
        if trial < 20:  # as for totals too large for sets of bits
            with monkeypatch.context() as patch:
                patch.setattr(equality, "_MOST_BITS", 0)
                assert nearest_totals(costs, allowed, wanted) == expected


def test_the_words_mean_what_they_say():
    def taken(gates):
        return gates[:, 1].sum()

    least = rco.minimize(taken, rco.AllocationProblem([[0, 1]] * 6, 3, sense="<="), steps=4, samples=2)
    exact = rco.minimize(taken, rco.AllocationProblem([[0, 1]] * 6, 3, sense="=="), steps=4, samples=2)
    assert (least.cost, exact.cost) == (0, 3)
    assert "C <= 3" in repr(rco.AllocationProblem([[0, 1]] * 6, 3))


def test_an_unreachable_total_is_refused_with_its_neighbours():
    problem = rco.AllocationProblem([[0, 4], [0, 10], [0, 4]], 9, sense="==")
    with pytest.raises(rco.InfeasibleBudgetError, match="nearest reachable totals are 8 and 10"):
        rco.minimize(lambda gates: gates.sum(), problem, steps=1, samples=1)
    with pytest.raises(rco.InfeasibleBudgetError, match="2 and 3"):
        rco.minimize(
            lambda gates: gates.sum(),
            rco.AllocationProblem([[0, 1]] * 4, 2.5, sense="=="),
            steps=1,
            samples=1,
        )
    assert rco.solve_mckp(np.zeros((3, 2)), problem).status == "infeasible"
    blocks = rco.AllocationProblem([[0, 2]] * 4, {"a": 2, "b": 3}, blocks=list("aabb"), sense="==")
    with pytest.raises(rco.InfeasibleBudgetError, match="'b'; the nearest reachable totals are 2 and 4"):
        blocks.require_reachable()
    rco.BudgetManifold(problem).random_point()  # the surface C = B exists all the same


@pytest.mark.parametrize("method", ["rco", "annealing", "random", "greedy", "evopress", "frank-wolfe"])
def test_every_method_meets_the_budget(method):
    for seed in range(2):
        problem = random_problem(seed, 7, 3, sense="==")
        objective = QuadraticObjective(7, 3, seed=seed)
        result = rco.minimize(objective, problem, method=method, max_evaluations=400, seed=seed)
        assert result.cost == problem.budget
        assert result.loss >= true_optimum(problem, objective)[1] - 1e-9
        if method == "rco":
            assert result.loss <= true_optimum(problem, objective)[1] + 1e-9


def test_blocks_joint_budgets_and_minimum_counts_are_met_exactly():
    rng = np.random.default_rng(1)
    costs = rng.integers(0, 6, (6, 3))
    pick = rng.integers(3, size=6)
    one = costs[np.arange(6), pick]
    blocks = rco.AllocationProblem(
        costs, [int(one[:3].sum()), int(one[3:].sum())], blocks=[0] * 3 + [1] * 3, sense="=="
    )
    both = np.stack([costs, rng.integers(0, 6, (6, 3))])
    joint = rco.AllocationProblem(both, both[:, np.arange(6), pick].sum(axis=1).tolist(), sense="==")
    counts = {"blocks": [0] * 6, "counts": [int((pick > 0).sum())], "options": [1, 2]}
    counted = rco.AllocationProblem(costs, int(one.sum()), sense="==", min_counts=counts)
    values = rng.normal(size=(6, 3))
    for problem in (blocks, joint, counted):
        found = rco.solve_mckp(values, problem)
        best = max(values[np.arange(6), c].sum() for c in enumerate_feasible(problem))
        assert problem.is_feasible(found.allocation)
        assert found.value == pytest.approx(best)


def test_the_ends_of_the_range_agree_with_the_manifold():
    problem = random_problem(1, 4, 3)
    low, high = problem.feasible_range
    objective = QuadraticObjective(4, 3, seed=1)
    for end, budget in ((0, low), (2, high)):
        at_end = problem.replace(budget=budget, sense="==")
        assert set(rco.RCO(steps=3, samples=2).search(at_end, objective).allocation) == {end}
        with pytest.raises(rco.InfeasibleBudgetError, match="cheapest" if end == 0 else "met exactly"):
            rco.BudgetManifold(at_end)


def test_moves_keep_the_total():
    problem = random_problem(3, 6, 3, sense="==")
    choices = uniform_allocation(problem)
    assert problem.is_feasible(choices)
    for group, option in np.argwhere(fitting_switches(problem, choices)):
        switched = choices.copy()
        switched[group] = option
        assert problem.is_feasible(switched)
    off = choices.copy()
    off[0] = (off[0] + 1) % 3
    assert problem.is_feasible(repaired(problem, off))


def test_a_looser_budget_is_not_worse():
    """From the same seed and allowance; the bound is a hundredth of what the budgets change."""
    for seed in range(2):
        base = random_problem(seed, 7, 3)
        low, high = base.feasible_range
        objective = QuadraticObjective(7, 3, seed=seed, coupling=1.5)
        budgets = [low + (high - low) * i // 5 for i in range(1, 5)]
        losses = [
            rco.minimize(objective, base.replace(budget=b, sense="<="), max_evaluations=300).loss
            for b in budgets
        ]
        slack = 0.01 * (max(losses) - min(losses)) + 1e-12
        assert all(after <= before + slack for before, after in itertools.pairwise(losses))


def test_the_surface_of_a_search_is_its_own_choice():
    problem, objective = random_problem(3, 8, 3), QuadraticObjective(8, 3, seed=3)
    for surface, problem_ in ((None, problem.replace(monotone=True)), ("==", problem), ("<=", problem)):
        result = rco.RCO(steps=6, samples=2, refine=0, surface=surface).search(problem_, objective)
        costs = torch.tensor([record.expected_cost[0] for record in result.history])
        if surface == "<=":
            assert (costs <= problem.budget * (1 + 1e-12)).all()
        else:
            assert torch.allclose(costs, torch.tensor(float(problem.budget)), rtol=1e-6)
    with pytest.raises(ValueError, match="surface"):
        rco.RCO(surface="=")
