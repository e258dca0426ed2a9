"""Greedy is optimal where it must be, lazy measurements change nothing there, and running out is survivable."""

import numpy as np
import pytest

from rco import AllocationProblem
from rco.baselines.greedy import Greedy, GreedyDown
from rco.testing import QuadraticObjective, random_problem

from .conftest import TableObjective, highs_optimum, make


def concave(seed, groups=9, options=4):
    """Unit steps whose gains shrink within a group: the greedy choice is the optimum."""
    rng = np.random.default_rng(seed)
    gains = -np.sort(-rng.uniform(size=(groups, options - 1)), axis=1)
    table = np.concatenate([np.zeros((groups, 1)), -np.cumsum(gains, axis=1)], axis=1)
    costs = np.tile(np.arange(options), (groups, 1))
    budget = int(rng.integers(1, groups * (options - 1)))
    return AllocationProblem(costs, budget, monotone=True), table


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [Greedy, GreedyDown])
@pytest.mark.parametrize("lazy", [True, False])
def test_optimal_on_concave_decomposable_unit_costs(seed, kind, lazy):
    problem, table = concave(seed)
    result = kind(lazy=lazy).search(problem, TableObjective(table))
    assert result.candidates["greedy"] == pytest.approx(-highs_optimum(-table, problem), abs=1e-9)


@pytest.mark.parametrize("kind", [Greedy, GreedyDown])
def test_lazy_measures_less(kind):
    problem, table = concave(3, groups=20)
    lazy, eager = (kind(lazy=lazy).search(problem, TableObjective(table)) for lazy in (True, False))
    assert lazy.forwards < eager.forwards / 2


def test_eager_greedy_by_definition():
    problem = random_problem(1, 6, 3, sense="<=")
    objective = QuadraticObjective(6, 3, seed=1)
    result = Greedy(lazy=False).search(problem, objective)
    assert result.candidates["greedy"] == pytest.approx(_naive(problem, objective))


def _naive(problem, objective):
    import torch

    def loss(choices):
        return float(objective.loss(torch.nn.functional.one_hot(torch.from_numpy(choices), 3).double(), 0))

    choices = np.zeros(6, dtype=np.int64)
    while True:
        best, target = 0.0, None
        for group in range(6):
            switched = choices.copy()
            switched[group] += 1
            if switched[group] > 2 or not problem.is_feasible(switched):
                continue
            paid = problem.units(switched)[0] - problem.units(choices)[0]
            rate = (loss(choices) - loss(switched)) / paid
            if rate > best:
                best, target = rate, switched
        if target is None:
            return loss(choices)
        choices = target


def test_running_out_on_the_way_down_still_meets_the_budget():
    problem, table = concave(5, groups=12)
    full = GreedyDown().search(problem, TableObjective(table))
    limited = GreedyDown(max_evaluations=12 + 1 + 2 + 4).search(problem, TableObjective(table))
    assert problem.is_feasible(limited.allocation)
    assert limited.settings["unmeasured_steps"] > 0
    assert full.settings["unmeasured_steps"] == 0


def test_an_allowance_decides_the_batches():
    problem, table = concave(2, groups=12)
    objective = TableObjective(table, num_batches=50)
    result = Greedy(max_evaluations=1500).search(problem, objective)
    assert 1 < result.settings["batches_used"] < 50
    assert result.forwards <= 1500


def test_too_small_an_allowance_is_refused():
    problem, table = concave(2, groups=12)
    with pytest.raises(ValueError, match="too little for greedy"):
        make("greedy", max_evaluations=10).search(problem, TableObjective(table))
