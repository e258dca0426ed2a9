"""The retraction from anywhere: extreme logits, cost scales, budgets near the ends, many budgets at once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.core.manifold import BudgetManifold
from rco.core.problem import AllocationProblem, InfeasibleBudgetError
from rco.core.retraction import JointPoint, NoConvergenceError, solve_joint

SETTINGS = settings(max_examples=60, deadline=None)


def _residuals(manifold: BudgetManifold, x: torch.Tensor) -> np.ndarray:
    """(C - B) / |B| from the plain formula, as a user would evaluate it."""
    problem = manifold.problem
    p = torch.softmax(x + problem.log_allowed, dim=1).numpy()
    groups = (problem.float_costs * p).sum(axis=2)
    cost = (
        groups.sum(axis=1)
        if problem.block_index is None
        else np.bincount(problem.block_index, weights=groups[0])
    )
    return (cost - problem.float_budgets) / np.abs(problem.float_budgets)


def _start(rng: np.random.Generator, shape: tuple[int, int], kind: str, size: float) -> torch.Tensor:
    if kind == "normal":
        x = rng.normal(size=shape) * size
    elif kind == "one-hot":
        x = np.zeros(shape)
        x[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = size
    elif kind == "cheap corner":
        x = -size * np.arange(shape[1])[None, :].repeat(shape[0], axis=0).astype(float)
    else:  # all groups tied and far from zero
        x = np.full(shape, size)
    return torch.from_numpy(x)


starts = st.tuples(
    st.sampled_from(["normal", "one-hot", "cheap corner", "tied"]),
    st.sampled_from([0.0, 1.0, 40.0, 1e3, -1e3, 1e6]),
)


@SETTINGS
@given(
    seed=st.integers(0, 2**32 - 1),
    start=starts,
    scale=st.sampled_from([Fraction(1, 10**6), 1, 10**6, 10**12]),
    share=st.sampled_from([Fraction(1, 10**6), Fraction(1, 7), Fraction(1, 2), Fraction(999, 1000)]),
    sense=st.sampled_from(["==", "<="]),
    blocks=st.booleans(),
    locks=st.booleans(),
    retraction=st.sampled_from(["newton", "bisection"]),
)
def test_budgets_are_met_from_anywhere(seed, start, scale, share, sense, blocks, locks, retraction):
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 25)), int(rng.integers(2, 9))
    costs = rng.integers(0, 60, (n, k))
    weights = rng.integers(1, 1000, n)
    index = rng.integers(0, 3, n) if blocks else np.zeros(n, dtype=int)
    allowed = rng.random((n, k)) < 0.7 if locks else np.ones((n, k), dtype=bool)
    for b in np.unique(index):  # every block needs something to decide
        first = int(np.flatnonzero(index == b)[0])
        costs[first, :2], allowed[first, :2] = (5, 9), True
    allowed[np.arange(n), rng.integers(0, k, n)] = True

    reachable = (
        np.where(allowed, costs, costs.max() + 1).min(axis=1),
        np.where(allowed, costs, -1).max(axis=1),
    )
    low, high = (
        np.array([int((r * weights)[index == b].sum()) for b in np.unique(index)]) for r in reachable
    )
    budgets = [scale * (lo + share * (hi - lo)) for lo, hi in zip(low.tolist(), high.tolist(), strict=True)]
    scaled = np.vectorize(lambda c: scale * int(c), otypes=[object])(costs)
    problem = AllocationProblem(
        scaled, budgets if blocks else budgets[0], weights=weights, sense=sense, allowed=allowed,
        blocks=index if blocks else None,
    )  # fmt: skip
    manifold = BudgetManifold(problem, retraction=retraction)
    x = _start(rng, (n, k), *start)
    before = _residuals(manifold, x)
    moved = manifold.retract(x)
    after = _residuals(manifold, moved)
    assert moved.isfinite().all()
    if sense == "==":
        assert np.abs(after).max() <= 1e-12
    else:
        assert after.max() <= 1e-12
        stays = np.isin(np.asarray(index), np.unique(index)[before < -1e-12])
        assert np.abs(after[before > 1e-12]).max(initial=0.0) <= 1e-12  # exceeded: now met exactly
        p, q = (torch.softmax(u + problem.log_allowed, dim=1)[torch.from_numpy(stays)] for u in (x, moved))
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)  # not exceeded: left alone
    assert manifold.check_point(moved) == (True, None)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    start=st.tuples(st.sampled_from(["normal", "one-hot"]), st.sampled_from([1.0, 40.0, 1e3])),
    q=st.integers(2, 16),
    sense=st.sampled_from(["==", "<="]),
)
def test_joint_budgets_are_met_from_anywhere(seed, start, q, sense):
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(q + 2, 40)), int(rng.integers(2, 7))
    costs = rng.integers(1, 90, (q, n, k)) * (10 ** rng.integers(0, 7, q))[:, None, None]
    weights = rng.integers(1, 50, n)
    shares = rng.dirichlet(np.ones(k), n)
    budgets = [float(b) for b in (costs * shares * weights[:, None]).sum(axis=(1, 2))]
    manifold = BudgetManifold(AllocationProblem(costs, budgets, weights=weights, sense=sense))
    x = _start(rng, (n, k), *start)
    moved = manifold.retract(x)
    after = _residuals(manifold, moved)
    if sense == "==":
        assert np.abs(after).max() <= 1e-12
        return
    assert after.max() <= 1e-12
    # Complementary slackness: the shift is a combination t . d with t <= 0, and t_j < 0 only where C_j = B_j.
    directions = manifold.problem.directions
    basis = (directions - directions.mean(axis=2, keepdims=True)).reshape(q, -1).T
    scale = np.abs(basis).max(axis=0)
    shift = (moved - x) - (moved - x).mean(dim=1, keepdim=True)
    t = np.linalg.lstsq(basis / scale, shift.numpy().ravel(), rcond=None)[0]
    size = max(1e-9, np.abs(t).max())
    assert t.max() <= 1e-8 * size
    assert np.abs(after[t < -1e-6 * size]).max(initial=0.0) <= 1e-12


@pytest.mark.parametrize("size", [1e9, 1e15, 1e100])
@pytest.mark.parametrize("retraction", ["newton", "bisection"])
def test_absurd_logits_still_reach_the_budget(size, retraction):
    rng = np.random.default_rng(0)
    problem = AllocationProblem(rng.integers(1, 9, (20, 6)), 90)
    manifold = BudgetManifold(problem, retraction=retraction)
    moved = manifold.retract(torch.from_numpy(rng.normal(size=(20, 6)) * size))
    assert np.abs(_residuals(manifold, moved)).max() <= 1e-12


def test_close_competitors_far_from_zero():
    """Costs 0, 1 - 1e-9 and 1: options that differ by almost nothing must be told apart at a shift of 1e12."""
    costs = [[0, 10**9 - 1, 10**9]] * 3
    problem = AllocationProblem(costs, Fraction(6 * 10**9 - 3, 2))
    manifold = BudgetManifold(problem)
    x = torch.tensor([[0.0, 1e3, -1e3]] * 3, dtype=torch.float64)
    assert np.abs(_residuals(manifold, manifold.retract(x))).max() <= 1e-12


def test_common_offsets_cost_no_digits():
    """Options at 1e12 + {0, 1}: the budget's deciding part is its last digits, and the tolerance follows it."""
    manifold = BudgetManifold(AllocationProblem([[10**12, 10**12 + 1]] * 4, 4 * 10**12 + 3))
    start = torch.tensor([[0.0, 3.0]] * 4, dtype=torch.float64)
    met, reason = manifold.check_point(start)
    assert not met
    assert "is not met" in reason
    moved = manifold.retract(start)
    assert manifold.check_point(moved) == (True, None)
    torch.testing.assert_close(
        torch.softmax(moved, dim=1)[:, 1], torch.full((4,), 0.75).double(), rtol=1e-12, atol=0
    )


def test_a_zero_budget_is_met_on_an_absolute_scale():
    costs = np.random.default_rng(0).integers(-40, 40, (30, 6))
    manifold = BudgetManifold(AllocationProblem(costs, 0))
    moved = manifold.retract(
        torch.randn(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    assert abs(float(manifold.expected_cost(moved))) < 1e-11


def test_many_small_blocks():
    rng = np.random.default_rng(0)
    n, k = 3000, 7
    blocks = np.arange(n) // 3
    costs = np.tile(np.arange(2, 9), (n, 1))
    budgets = rng.integers(7, 24, n // 3)
    manifold = BudgetManifold(AllocationProblem(costs, budgets, blocks=blocks))
    moved = manifold.retract(torch.from_numpy(rng.normal(size=(n, k)) * 5))
    assert np.abs(_residuals(manifold, moved)).max() <= 1e-12
    assert manifold.iterations_per_budget.shape == (1000,)


def test_blocks_equal_separate_problems():
    rng = np.random.default_rng(1)
    costs, blocks = rng.integers(1, 30, (20, 4)), rng.integers(0, 4, 20)
    budgets = [int(costs[blocks == b].mean(axis=1).sum()) for b in range(4)]
    x = torch.from_numpy(rng.normal(size=(20, 4)))
    together = BudgetManifold(AllocationProblem(costs, budgets, blocks=blocks)).retract(x)
    for b in range(4):
        rows = torch.from_numpy(blocks == b)
        alone = BudgetManifold(AllocationProblem(costs[blocks == b], budgets[b])).retract(x[rows])
        torch.testing.assert_close(together[rows], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("joint", [False, True])
def test_logits_that_are_not_finite_are_named(value, joint):
    costs = np.array([[0, 4], [3, 5]])
    problem = (
        AllocationProblem(np.stack([costs, costs[::-1]]), [6, 6]) if joint else AllocationProblem(costs, 6)
    )
    x = torch.zeros(2, 2, dtype=torch.float64)
    x[1, 0] = value
    if value == -np.inf:  # what is left cannot meet the budget
        x[0, 1] = value
    with pytest.raises(ValueError, match=r"must be finite, got -?(nan|inf) at group"):
        BudgetManifold(problem).retract(x)


def test_joint_budgets_out_of_reach_are_named():
    """Twice the costs at almost, but not quite, twice the budget: too little for a linear program to notice."""
    costs = np.random.default_rng(0).integers(1, 9, (1, 6, 3))
    problem = AllocationProblem(np.concatenate([costs, 2 * costs]), [27, Fraction(54 * 10**9 + 1, 10**9)])
    with pytest.raises(InfeasibleBudgetError, match=r"Joint budget \d .* could not be reached"):
        BudgetManifold(problem).retract(torch.zeros(6, 3, dtype=torch.float64))


def test_evaluations_are_counted():
    problem = AllocationProblem(np.tile(np.arange(2, 9), (60, 1)), 271)
    newton, bisection = BudgetManifold(problem), BudgetManifold(problem, retraction="bisection")
    x = newton.random_point(0)
    newton.softmax_evaluations = newton.retractions = 0
    step = 0.1 * torch.randn(60, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for manifold, least, most in ((newton, 1, 4), (bisection, 25, 60)):
        manifold.retract(x + step)
        assert least <= manifold.last_iterations <= most
        assert manifold.softmax_evaluations == manifold.last_iterations
        assert manifold.retractions == 1


def test_the_joint_solver_says_when_it_gives_up():
    def linear(shift: np.ndarray) -> JointPoint:  # unbounded below: no minimum to find
        return JointPoint(float(-shift.sum()), -np.ones(2), np.zeros((2, 2)))

    with pytest.raises(NoConvergenceError):
        solve_joint(linear, np.zeros(2), np.full(2, 1e-9), np.full(2, np.inf))
    bounded = solve_joint(linear, np.full(2, -3.0), np.full(2, 1e-9), np.zeros(2))
    np.testing.assert_array_equal(bounded, np.zeros(2))
