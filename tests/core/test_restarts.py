"""Restarts find optima, a larger allowance continues a smaller one, curvature is measured from gradients."""

import numpy as np
import pytest
import torch

import rco
from rco.core.evaluator import Evaluator
from rco.core.measured_curvature import MeasuredCurvature
from rco.core.moves import uniform_allocation
from rco.core.refine import KnownLosses
from rco.core.restarts import LocalOptima
from rco.testing import NetworkObjective, QuadraticObjective, enumerate_feasible, random_problem, true_optimum


class Counted(QuadraticObjective):
    """Remembers the gates of every evaluation without gradient."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.seen = []

    def loss(self, gates, batch):
        if not gates.requires_grad:
            self.seen.append(gates.argmax(dim=1).numpy().tobytes())
        return super().loss(gates, batch)


def climbed(problem, objective, allowance, seed=0):
    evaluator = Evaluator(objective)
    optima = LocalOptima(problem, evaluator, seed)
    start = uniform_allocation(problem)
    optima.climb([(start, evaluator.selection_losses(start, problem.num_options, [0]))], allowance)
    optima.restart(allowance - evaluator.evaluations)
    return optima, evaluator


def test_restarts_find_optima_that_one_climb_misses():
    single, restarted = 0, 0
    for seed in range(5):
        problem = random_problem(seed, 6, 3, sense="<=")
        objective = QuadraticObjective(6, 3, seed=seed, coupling=3.0)
        best = true_optimum(problem, objective)[1]
        optima, _ = climbed(problem, objective, 400)
        assert problem.is_feasible(optima.best[0])
        restarted += optima.best[1] <= best + 1e-9
        evaluator = Evaluator(objective)
        start = uniform_allocation(problem)
        alone = LocalOptima(problem, evaluator, seed)
        alone.climb([(start, evaluator.selection_losses(start, 3, [0]))], 400)
        single += alone.best[1] <= best + 1e-9
    assert restarted == 5
    assert single < 5


def test_no_allocation_is_evaluated_twice_and_the_allowance_holds():
    problem, objective = random_problem(1, 6, 3, sense="<="), Counted(6, 3, seed=1, coupling=2.0)
    _, evaluator = climbed(problem, objective, 150)
    assert len(objective.seen) == len(set(objective.seen))
    assert evaluator.evaluations <= 150
    small = rco.AllocationProblem([[0, 1]] * 3, 2, sense="<=")
    _, evaluator = climbed(small, QuadraticObjective(3, 2), 10_000)
    assert evaluator.evaluations <= 4 * 7  # seven allocations: the search ends when all are known


@pytest.mark.parametrize("seed", range(3))
def test_local_optima_continue_after_a_checkpoint(seed):
    problem, objective = random_problem(seed, 8, 3, sense="<="), NetworkObjective(8, 3, seed=seed)
    whole, _ = climbed(problem, objective, 400)
    evaluator = Evaluator(objective)
    first = LocalOptima(problem, evaluator, 0)
    start = uniform_allocation(problem)
    first.climb([(start, evaluator.selection_losses(start, 3, [0]))], 400)
    second = LocalOptima(problem, evaluator, 0)
    second.load(first.state())
    second.restart(400 - evaluator.evaluations)
    assert [o.choices.tolist() for o in second.found] == [o.choices.tolist() for o in whole.found]


@pytest.mark.parametrize("sense", ["<=", None])
def test_a_larger_allowance_is_never_worse(sense):
    arguments = {} if sense is None else {"sense": sense}
    for seed in range(2):
        problem = random_problem(seed, 9, 3, **arguments)
        objective = QuadraticObjective(9, 3, seed=seed, coupling=2.0)
        losses = [
            rco.RCO(steps=None, refine=None, max_evaluations=allowance, seed=seed)
            .search(problem, objective)
            .loss
            for allowance in (60, 150, 300, 450)
        ]
        assert losses == sorted(losses, reverse=True)


def rugged(groups, options, seed):
    """A loss whose slopes say nothing of the loss at other allocations."""
    levels = torch.from_numpy(np.random.default_rng(seed).random((groups, options)))
    return lambda gates: torch.sin(60.0 * (gates * levels).sum()) + torch.sin(90.0 * (gates * levels).sum())


@pytest.mark.parametrize("seed", range(3))
def test_walks_take_over_where_gradients_mislead(seed):
    problem, loss = random_problem(seed, 30, 4, sense="<="), rugged(30, 4, seed)
    losses = [rco.minimize(loss, problem, max_evaluations=most, seed=seed).loss for most in (60, 250, 700)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < -1.9  # no value is below -1.906
    values = torch.from_numpy(np.random.default_rng(seed).random((30, 4)))
    for each, looped in ((loss, False), (lambda gates: (gates * values).sum(), True)):
        result = rco.minimize(each, problem, max_evaluations=500, seed=seed)
        assert problem.is_feasible(result.allocation)
        # Nothing is below the optimum that the knapsack of an additive loss's gradients has found.
        assert (result.settings["steps_taken"] > 0) == looped


def test_curvature_is_measured_from_gradients():
    """A convex loss of one number per group, whose second-order cost is known, among other groups' choices."""
    rng = np.random.default_rng(0)
    levels = torch.from_numpy(np.cumsum(rng.random((6, 3)), axis=1))

    def loss(gates):
        return 0.05 * (gates * levels).sum().square() + ((gates * levels).sum(dim=1) ** 2).sum()

    measured = MeasuredCurvature(6, 3)
    problem = rco.AllocationProblem([[0, 1, 2]] * 6, 12, sense="<=")
    allocations = list(enumerate_feasible(problem))
    for i in rng.choice(len(allocations), 200):
        gates = torch.nn.functional.one_hot(torch.from_numpy(allocations[i]), 3).double().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(gates), gates)
        measured.add(torch.from_numpy(allocations[i])[None], gradient[None])
    choices = torch.zeros(6, dtype=torch.int64)
    expected = 1.05 * (levels - levels[:, :1]) ** 2
    assert torch.allclose(measured.switches(choices), expected, atol=0.02)
    again = MeasuredCurvature(6, 3)
    again.load(measured.state())
    assert torch.equal(again.switches(choices), measured.switches(choices))
    assert not MeasuredCurvature(6, 3).switches(choices).any()


def test_known_losses_survive_a_checkpoint():
    known = KnownLosses()
    for i in range(5):
        known.add(np.array([i, 2]), 0.5 * i)
    known.add(np.array([1, 2]), 9.0)
    again = KnownLosses()
    again.load(known.state())
    assert [again.get(np.array([i, 2])) for i in range(6)] == [0.0, 0.5, 1.0, 1.5, 2.0, None]
