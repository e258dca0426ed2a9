"""IMPQ's surrogate and its MILP, each against something slower and independent."""

import itertools

import numpy as np
import pytest
import torch

from rco import AllocationProblem
from rco.baselines.impq import IMPQ, Surrogate, fit_surrogate, minimise_surrogate
from rco.testing import QuadraticObjective, random_problem

from .conftest import make


def random_surrogate(seed, count=8):
    rng = np.random.default_rng(seed)
    pairs = rng.normal(size=(count, count))
    pairs = pairs + pairs.T
    np.fill_diagonal(pairs, 0.0)
    return Surrogate(rng.normal(size=count) + 0.5, pairs), rng


@pytest.mark.parametrize("seed", range(12))
def test_milp_equals_brute_force_on_eight_groups(seed):
    surrogate, rng = random_surrogate(seed)
    budgets = 1 + seed % 2
    saved = rng.integers(1, 9, size=(budgets, 8)).astype(float)
    needed = np.floor(saved.sum(axis=1) * rng.uniform(0.2, 0.8))
    low, notes = minimise_surrogate(surrogate, saved, needed, max_pairs=1000, time_limit=20.0)
    corners = np.array(list(itertools.product([0, 1], repeat=8)))
    feasible = corners[(corners @ saved.T >= needed).all(axis=1)]
    best = min(surrogate(corner) for corner in feasible)
    assert (saved @ low >= needed).all()
    assert surrogate(low) == pytest.approx(best, abs=1e-9)
    assert notes["milp_status"] == "optimal"
    assert notes["milp_gap"] <= 1e-6


def test_dropped_pairs_enter_at_a_half():
    surrogate, _ = random_surrogate(0)
    nothing_needed = np.zeros((1, 8)), np.zeros(1)
    low, notes = minimise_surrogate(surrogate, *nothing_needed, max_pairs=0, time_limit=5.0)
    assert (notes["milp_pairs"], notes["milp_pairs_dropped"]) == (0, 28)
    np.testing.assert_array_equal(low, (surrogate.shapley < 0).astype(int))


def walk(surrogate, orders):
    """Marginals and predecessors by definition."""
    count = len(surrogate.alone)
    before = np.zeros((len(orders), count, count), dtype=bool)
    marginals = np.zeros((len(orders), count))
    for p, order in enumerate(orders):
        low = np.zeros(count)
        for switch in order:
            before[p, switch] = low > 0
            value = surrogate(low)
            low[switch] = 1
            marginals[p, switch] = surrogate(low) - value
    return before, marginals


def test_enough_orders_recover_a_quadratic_game():
    surrogate, rng = random_surrogate(3, count=6)
    before, marginals = walk(surrogate, [rng.permutation(6) for _ in range(60)])
    fitted = fit_surrogate(before, marginals, shrinkage=1e-9)
    np.testing.assert_allclose(fitted.pairs, surrogate.pairs, atol=1e-5)
    np.testing.assert_allclose(fitted.alone, surrogate.alone, atol=1e-5)


@pytest.mark.parametrize("shrinkage", [0.1, 0.5, 0.9])
def test_dual_equals_the_primal_ridge(shrinkage):
    surrogate, rng = random_surrogate(4, count=5)
    before, marginals = walk(surrogate, [rng.permutation(5) for _ in range(4)])
    marginals += 0.3 * rng.normal(size=marginals.shape)
    fitted = fit_surrogate(before, marginals, shrinkage)
    # The same regression with its features written out: one per switch (free), one per pair (penalised).
    index = {pair: n for n, pair in enumerate(itertools.combinations(range(5), 2))}
    rows, target = [], []
    for p, i in itertools.product(range(4), range(5)):
        row = np.zeros(10)
        for j in np.flatnonzero(before[p, i]):
            row[index[min(i, j), max(i, j)]] = 1.0
        rows.append((i, row))
        target.append(marginals[p, i])
    features = np.array([row for _, row in rows])
    owner = np.array([i for i, _ in rows])
    target = np.array(target)
    centred, aim = features.copy(), target.copy()
    for i in range(5):
        centred[owner == i] -= features[owner == i].mean(axis=0)
        aim[owner == i] -= target[owner == i].mean()
    ridge = shrinkage / (1 - shrinkage) * np.trace(centred @ centred.T) / len(aim)
    expected = np.linalg.solve(centred.T @ centred + ridge * np.eye(10), centred.T @ aim)
    for (i, j), n in index.items():
        assert fitted.pairs[i, j] == pytest.approx(expected[n], abs=1e-9)
    alone = [target[owner == i].mean() - features[owner == i].mean(axis=0) @ expected for i in range(5)]
    np.testing.assert_allclose(fitted.alone, alone, atol=1e-9)


def test_full_shrinkage_leaves_the_shapley_values():
    surrogate, _ = random_surrogate(5, count=4)
    before, marginals = walk(surrogate, list(itertools.permutations(range(4))))
    fitted = fit_surrogate(before, marginals, shrinkage=1.0)
    np.testing.assert_allclose(fitted.shapley, surrogate.shapley, atol=1e-12)  # all orders: no sampling error
    assert not fitted.pairs.any()


class PairObjective:
    """Two options; the loss is a quadratic in who is low."""

    num_batches = 1

    def __init__(self, surrogate):
        self.alone = torch.from_numpy(surrogate.alone)
        self.pairs = torch.from_numpy(surrogate.pairs)

    def loss(self, gates, batch):
        low = gates[:, 0]
        return 20.0 + self.alone @ low + 0.5 * low @ self.pairs @ low


@pytest.mark.parametrize("seed", range(4))
def test_search_finds_the_optimum_of_a_pairwise_loss(seed):
    surrogate, _ = random_surrogate(seed)
    problem = AllocationProblem([[2, 4]] * 8, 24)
    result = IMPQ(orders=40, shrinkage=1e-6).search(problem, PairObjective(surrogate))
    corners = [c for c in itertools.product([0, 1], repeat=8) if sum(c) >= 4]
    assert result.loss == pytest.approx(20 + min(surrogate(np.array(c)) for c in corners), abs=1e-6)
    assert result.chosen_from == "impq"


def pair_used(searcher, problem):
    """The low and the high options that a search switches between, from what it evaluates first and last."""
    seen = []

    class Watched(QuadraticObjective):
        def losses(self, requests):
            seen.extend(gates.argmax(dim=1) for gates, _ in requests)
            return super().losses(requests)

    searcher.search(problem, Watched(problem.num_groups, problem.num_options))
    return set(seen[problem.num_groups].tolist()), set(seen[0].tolist())


def test_options_around_the_budget_and_given_ones():
    problem = AllocationProblem([2, 3, 4, 8], 28, weights=[1] * 8)
    assert pair_used(IMPQ(orders=1), problem) == ({1}, {2})
    assert pair_used(IMPQ(orders=1, pair=(3, 0)), problem) == ({0}, {3})
    with pytest.raises(ValueError, match="exceeds the budget 28"):
        pair_used(IMPQ(pair=(2, 3)), problem)
    with pytest.raises(ValueError, match="two of the options"):
        pair_used(IMPQ(pair=(2, 4)), problem)


def test_too_many_marginals_are_refused_before_any_is_measured():
    problem = AllocationProblem([[0, 1]] * 3000, 1500)

    class Never:
        num_batches = 1

        def loss(self, gates, batch):
            raise AssertionError("measured")

    with pytest.raises(ValueError, match="16 orders of 3000 groups"):
        IMPQ().search(problem, Never())
    with pytest.raises(AssertionError, match="measured"):  # without interactions they are welcome
        IMPQ(shrinkage=1.0).search(problem, Never())


def test_no_time_for_the_milp_is_stated_and_stays_within_budget(monkeypatch):
    monkeypatch.setattr(
        "rco.baselines.impq.minimise_surrogate", lambda *a, **k: (None, {"milp_status": "time limit"})
    )
    surrogate, _ = random_surrogate(1)
    problem = random_problem(1, 8, 2)
    result = make("impq").search(problem, PairObjective(surrogate))
    assert result.settings["milp_status"] == "time limit"
    assert result.settings["milp_replaced_by"].startswith("knapsack")
    assert problem.is_feasible(result.allocation)
