"""A gradient guides random moves, its predictions are judged, and a walk without temperature only descends."""

import numpy as np
import pytest
import torch

import rco
from rco.core.annealing_walk import Guide, walk
from rco.core.evaluator import Evaluator
from rco.core.moves import uniform_allocation
from rco.core.objective import CallableObjective
from rco.core.restarts import LocalOptima
from rco.testing import random_problem

GROUPS, OPTIONS = 40, 4


def descent(problem, values, guide, moves=120):
    """Losses that a walk without temperature takes on an additive loss, and what it returns."""
    rows, seen = np.arange(GROUPS), []

    def measure(choices):
        assert problem.is_feasible(choices)
        return float(values[rows, choices].sum())

    start = uniform_allocation(problem)
    found = walk(
        problem,
        start,
        measure(start),
        measure,
        moves,
        np.random.default_rng(0),
        None,
        on_best=seen.append,
        guide=guide,
    )
    return seen, found


@pytest.mark.parametrize("seed", range(3))
def test_a_guided_descent_is_faster_than_a_random_one(seed):
    problem = random_problem(seed, GROUPS, OPTIONS, sense="<=")
    values = np.random.default_rng(seed).normal(size=(GROUPS, OPTIONS))
    asked = []
    guide = Guide(problem, lambda choices: asked.append(choices) or values)
    guided, (_, loss, paid) = descent(problem, values, guide)
    random, (_, random_loss, _) = descent(problem, values, None)
    assert guided == sorted(guided, reverse=True)
    assert len(guided) == paid
    assert loss == guided[-1] < random_loss == random[-1]
    assert guide.correlation == pytest.approx(1.0)  # of an additive loss the gradient says everything
    assert len(asked) == 1 + (paid - 1) // 30 or len(asked) == 1 + paid // 30


def test_a_guide_knows_when_it_misleads():
    problem = random_problem(0, GROUPS, OPTIONS, sense="<=")
    rng = np.random.default_rng(0)
    values, noise = rng.normal(size=(2, GROUPS, OPTIONS))
    guide = Guide(problem, lambda choices: noise)
    descent(problem, values, guide)
    assert abs(guide.correlation) < 0.5
    without = Guide(problem, lambda choices: None)  # no gradient is affordable: moves are random
    descent(problem, values, without)
    assert without.correlation == 1.0
    assert without.slopes is None


def test_shares_follow_what_gained_and_stay_within_their_bounds():
    problem = random_problem(0, GROUPS, OPTIONS, sense="<=")
    levels = torch.from_numpy(np.random.default_rng(0).random((GROUPS, OPTIONS)))
    additive = CallableObjective(lambda gates: (gates * levels).sum())
    rugged = CallableObjective(lambda gates: torch.sin(60.0 * (gates * levels).sum()))
    for objective, trusted in ((additive, True), (rugged, False)):
        evaluator = Evaluator(objective)
        optima = LocalOptima(problem, evaluator, 0)
        start = uniform_allocation(problem)
        optima.climb([(start, evaluator.selection_losses(start, OPTIONS, [0]))], 200)
        optima.try_moves(200)
        assert optima.trusted == trusted
        assert optima.walk_share == pytest.approx(0.2 if trusted else 0.8)
        before = optima.best[1]
        optima.improve(900 - evaluator.evaluations)
        assert evaluator.evaluations <= 900
        assert optima.best[1] <= before
        assert 0.2 <= optima.walk_share <= 0.8
        again = LocalOptima(problem, evaluator, 0)
        again.load(optima.state())
        assert (again.rounds, again.trusted, again.walk_share) == (
            optima.rounds,
            optima.trusted,
            optima.walk_share,
        )
    best = rco.solve_mckp(-levels.numpy(), problem)
    result = rco.minimize(lambda gates: (gates * levels).sum(), problem, max_evaluations=300)
    assert result.allocation == best.allocation
