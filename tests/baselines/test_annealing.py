"""Annealing: moves keep the budget, optima of small problems are found, resuming changes nothing."""

import numpy as np
import pytest

import rco
from rco.baselines.annealing import Annealing
from rco.core.annealing_walk import random_move
from rco.core.moves import uniform_allocation
from rco.testing import QuadraticObjective, random_problem, true_optimum


@pytest.mark.parametrize("arguments", [{"sense": "<="}, {"sense": "<=", "monotone": True}])
def test_moves_are_feasible_neighbours(arguments):
    problem, rng = random_problem(2, 9, 4, **arguments), np.random.default_rng(0)
    choices = uniform_allocation(problem)
    for _ in range(60):
        moved = random_move(problem, choices, rng)
        assert problem.is_feasible(moved)
        assert problem.monotone or 1 <= (moved != choices).sum() <= 2
        choices = moved


def test_no_move_where_everything_is_locked():
    allowed = np.zeros((3, 2), dtype=bool)
    allowed[:, 1] = True
    problem = rco.AllocationProblem([1, 2], 6, weights=[1, 1, 1], allowed=allowed, sense="<=")
    assert random_move(problem, np.ones(3, dtype=np.int64), np.random.default_rng(0)) is None
    result = Annealing(steps=3, moves=4).search(problem, QuadraticObjective(3, 2))
    assert result.allocation.tolist() == [1, 1, 1]


def test_small_optima_are_found():
    found = 0
    for seed in range(6):
        problem = random_problem(seed, 6, 3, sense="<=")
        objective = QuadraticObjective(6, 3, seed=seed)
        result = Annealing(steps=20, moves=20, seed=seed).search(problem, objective)
        found += result.loss <= true_optimum(problem, objective)[1] + 1e-9
    assert found >= 5


def test_bad_settings_are_refused():
    for settings in ({"cooling": 0.0}, {"warmth": 0.0}, {"moves": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Annealing(**settings)
