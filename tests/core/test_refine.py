"""Spending, uniform starts and exchange moves keep the budget and never lose."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rco
from rco.core.choice import SampleTracker
from rco.core.evaluator import Evaluator
from rco.core.moves import is_spent, layer_order, spend, uniform_allocation
from rco.core.refine import _proposals, refine
from rco.testing import QuadraticObjective, enumerate_feasible, random_problem, true_optimum


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 9), options=st.integers(2, 5))
def test_spend_ends_only_when_nothing_is_affordable(seed, groups, options):
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 7, size=(groups, options))
    budget = int(rng.integers(costs.min(1).sum(), costs.max(1).sum() + 2))
    problem = rco.AllocationProblem(costs, budget=budget, sense="<=", allowed=rng.random(costs.shape) < 2)
    start = costs.argmin(axis=1)
    spent = spend(problem, start, rng.normal(size=costs.shape))
    assert problem.is_feasible(spent)
    room = budget - problem.cost(spent)
    now = costs[np.arange(groups), spent]
    assert not ((costs > now[:, None]) & (costs - now[:, None] <= room)).any()


def test_spend_takes_the_best_value_first():
    problem = rco.AllocationProblem([1, 2], budget=4, weights=[1, 1, 1])
    values = np.array([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]])
    assert spend(problem, np.array([0, 0, 0]), values).tolist() == [0, 1, 0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), joint=st.booleans(), spent_before=st.booleans(), groups=st.integers(2, 7))
def test_proposals_of_a_monotone_problem_leave_nothing_affordable(seed, joint, spent_before, groups):
    """They are those of the plain problem, each with its leftover budget spent."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 9, size=(2, groups, 4) if joint else (1, groups, 4))
    budget = [int(rng.integers(each.max(1).sum() // 2, each.max(1).sum() + 2)) for each in costs]
    choices = costs.sum(axis=0).argmin(axis=1)
    budget = [max(b, int(c[np.arange(groups), choices].sum())) for b, c in zip(budget, costs, strict=True)]
    given_costs, given_budget = (costs, budget) if joint else (costs[0], budget[0])
    plain = rco.AllocationProblem(given_costs, budget=given_budget, sense="<=")
    monotone, predicted = plain.replace(monotone=True), rng.normal(size=(groups, 4))
    if spent_before:
        choices = spend(plain, choices, -predicted)
    found = list(_proposals(monotone, choices, predicted, 64, 1000))
    expected = [spend(plain, each, -predicted) for each in _proposals(plain, choices, predicted, 64, 1000)]
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert all(is_spent(monotone, each) for each in found)


def test_uniform_is_the_dearest_single_option_that_fits():
    problem = rco.AllocationProblem([2, 3, 4], budget=32, weights=[5, 3, 2])
    assert uniform_allocation(problem).tolist() == [1, 1, 1]
    locked = np.ones((3, 3), dtype=bool)
    locked[0] = [True, False, True]
    problem = problem.replace(allowed=locked)
    choices = uniform_allocation(problem)
    assert problem.is_feasible(choices)
    assert choices.tolist() == [0, 1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_exchanges_never_lose_and_keep_the_budget(seed):
    problem = random_problem(seed, 6, 3, sense="<=")
    objective = QuadraticObjective(6, 3, seed=seed, num_batches=4, batch_noise=0.1)
    start = next(iter(enumerate_feasible(problem)))
    evaluator = Evaluator(objective)
    losses = evaluator.selection_losses(start, 3, range(4))
    refined = refine(problem, evaluator, start, losses, allowance=1600)
    assert problem.is_feasible(refined.choices)
    assert refined.loss <= losses.mean()
    assert refined.loss >= true_optimum(problem, objective)[1] - 1e-9


def test_the_allowance_is_kept():
    problem = random_problem(0, 8, 4)
    objective = QuadraticObjective(8, 4, seed=0)
    evaluator = Evaluator(objective)
    start = uniform_allocation(problem)
    losses = evaluator.selection_losses(start, 4, [0])
    before = evaluator.evaluations
    refined = refine(problem, evaluator, start, losses, allowance=10)
    assert refined.evaluations == evaluator.evaluations - before <= 10


def test_exchanges_respect_blocks_and_joint_budgets():
    blocks = rco.AllocationProblem([0, 1, 3], budget=[3, 4], blocks=[0, 0, 0, 1, 1, 1])
    rng = np.random.default_rng(0)
    joint = rco.AllocationProblem(rng.integers(1, 6, size=(2, 6, 3)), budget=[20, 20], sense="<=")
    for problem in (blocks, joint):
        objective = QuadraticObjective(6, 3, seed=4)
        start = uniform_allocation(problem)
        evaluator = Evaluator(objective)
        losses = evaluator.selection_losses(start, 3, [0])
        refined = refine(problem, evaluator, start, losses, allowance=60)
        assert problem.is_feasible(refined.choices)
        assert refined.loss <= losses.mean()


def test_the_best_sample_is_the_lowest_while_every_batch_is_new():
    tracker = SampleTracker(256)
    for i in range(200):
        tracker.add(np.array([i]), [i], 10.0 - 0.01 * i)
    assert tracker.choices.tolist() == [199]
    assert tracker.loss == pytest.approx(8.01)


def test_the_best_sample_is_found_though_batches_differ_in_difficulty():
    """Losses are a sample's quality plus its batch's difficulty, which is much larger; batches come again."""
    rng = np.random.default_rng(0)
    difficulty = rng.normal(size=16) * 5
    quality = 1.0 + rng.random(640)
    quality[500] = 0.0
    tracker = SampleTracker(16)
    for i, q in enumerate(quality):
        batch = int(rng.permutation(16)[i % 16])
        tracker.add(np.array([i]), [batch], float(q + difficulty[batch]))
    assert tracker.choices.tolist() == [500]


def test_the_best_sample_survives_a_checkpoint():
    rng = np.random.default_rng(1)
    seen = [(np.array([i]), [int(rng.integers(5))], float(rng.random())) for i in range(40)]
    whole, first = SampleTracker(5), SampleTracker(5)
    for sample in seen:
        whole.add(*sample)
    for sample in seen[:17]:
        first.add(*sample)
    second = SampleTracker(5)
    second.load(first.state())
    for sample in seen[17:]:
        second.add(*sample)
    assert second.choices.tolist() == whole.choices.tolist()
    assert second.loss == whole.loss


def test_the_rest_of_a_uniform_budget_raises_groups_by_one_option_in_order():
    problem = rco.AllocationProblem([2, 3, 4, 8], budget=2 * 12 + 7, weights=[1] * 12, monotone=True)
    found = spend(problem, uniform_allocation(problem), layer_order(problem))
    assert found.tolist() == [1] * 7 + [0] * 5
    problem = problem.replace(budget=3 * 12 + 3)
    found = spend(problem, uniform_allocation(problem), layer_order(problem))
    assert found.tolist() == [2] * 3 + [1] * 9
