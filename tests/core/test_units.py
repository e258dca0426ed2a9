"""Units do not matter: scaled costs, and offsets of a group's costs, change no allocation, no logit, no bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import rco
from rco.compression.priors import logits_from_losses
from rco.testing import QuadraticObjective

N, K = 7, 3
UNITS = [Fraction(1, 10**6), Fraction(1, 7), Fraction(10), Fraction(10**9)]


def _given(kind, sense, seed):
    """Integer costs, budgets, and further arguments of a random problem."""
    rng = np.random.default_rng(seed)
    q = {"one": 1, "joint": 3}.get(kind, 1)
    costs = rng.integers(0, 40, (q, N, K))
    costs[:, :, 0] = 0
    blocks = np.arange(N) % 2 if kind == "blocks" else np.zeros(N, dtype=int)
    shares = rng.dirichlet(np.ones(K) * 2, N)
    expected = (costs * shares).sum(axis=2)
    if kind == "blocks":
        budget = [Fraction(int(expected[0, blocks == b].sum())) for b in (0, 1)]
    elif kind == "joint" and sense == "<=":
        budget = [Fraction(int(b)) for b in expected.sum(axis=1)]
    else:
        budget = [Fraction(round(b * 64), 64) for b in expected.sum(axis=1)]
    weights = rng.integers(1, 9, N) if kind == "weights" else None
    if weights is not None:
        budget = [Fraction(int((expected * weights).sum()))]
    return costs, budget, weights, (blocks if kind == "blocks" else None)


def _problem(given, sense, unit=Fraction(1), offsets=None, in_weights=False):
    costs, budget, weights, blocks = given
    exact = np.vectorize(Fraction, otypes=[object])(costs.tolist())
    budget = list(budget)
    factor = np.ones(N, dtype=object) if weights is None else weights.astype(object)
    if offsets is not None:  # per budget and group
        exact = exact + offsets[: len(costs), :, None]
        if blocks is None:
            budget = [b + sum(o * factor) for b, o in zip(budget, offsets, strict=False)]
        else:
            budget = [b + sum((offsets[0] * factor)[blocks == j]) for j, b in enumerate(budget)]
    budget = [b * unit for b in budget]
    if in_weights:
        weights = [Fraction(int(w)) * unit for w in factor]
    else:
        exact = exact * unit
    return rco.AllocationProblem(
        exact if len(costs) > 1 else exact[0],
        budget if len(budget) > 1 else budget[0],
        weights=weights,
        sense=sense,
        blocks=None if blocks is None else blocks.tolist(),
    )


def _searched(problem, seed):
    """All that a search leaves: allocation, loss, and the logits of its last step."""
    losses = torch.from_numpy(np.random.default_rng(seed).random((N, K)))
    prior = logits_from_losses(losses, problem) if problem.num_joint == 1 else -losses
    states = []
    result = rco.RCO(steps=4, samples=3, seed=seed, refine=2).search(
        problem,
        QuadraticObjective(N, K, seed=seed, num_batches=2, batch_noise=0.1),
        prior=prior,
        proxy=losses,
        on_checkpoint=states.append,
    )
    return list(result.allocation), result.loss, states[-1]["process"]["optimizer"]["logits"]


@pytest.mark.parametrize("sense", [None, "<="])
@pytest.mark.parametrize("kind", ["one", "weights", "joint", "blocks"])
@pytest.mark.parametrize("seed", range(2))
def test_a_search_does_not_notice_units_and_offsets(kind, sense, seed):
    given = _given(kind, sense, seed)
    allocation, loss, logits = _searched(_problem(given, sense), seed)
    rng = np.random.default_rng(seed)
    offsets = np.vectorize(Fraction, otypes=[object])(rng.integers(-(10**6), 10**6, (3, N)).tolist())
    changes = [{"unit": UNITS[seed]}, {"unit": UNITS[seed + 2], "offsets": offsets}]
    if kind != "joint":
        changes.append({"unit": UNITS[3 - seed], "in_weights": True})
    for change in changes:
        again = _searched(_problem(given, sense, **change), seed)
        assert again[:2] == (allocation, loss), change
        assert torch.equal(again[2], logits), change


@pytest.mark.parametrize("sense", [None, "<="])
@pytest.mark.parametrize("unit", UNITS)
def test_budgets_that_count_different_things_have_units_of_their_own(sense, unit):
    """Bytes and milliseconds side by side: rescaling one of two joint budgets changes nothing."""
    costs, budget, _, _ = _given("joint", sense, 5)
    exact = np.vectorize(Fraction, otypes=[object])(costs.tolist())
    plain = rco.AllocationProblem(exact, budget, sense=sense)
    exact[1] *= unit
    scaled = rco.AllocationProblem(exact, [budget[0], budget[1] * unit, budget[2]], sense=sense)
    first, second = _searched(plain, 3), _searched(scaled, 3)
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])


@pytest.mark.parametrize("unit", [1, 10**6])
def test_a_walk_under_an_inequality_spends_the_budget_that_pays(unit):
    """Costlier options are better here, so "<=" must end where "==" does, whatever a unit of cost is."""
    rng, bits, groups = np.random.default_rng(0), np.arange(2, 9), 30
    table = torch.from_numpy(np.exp(rng.normal(size=groups)))[:, None] * torch.from_numpy(
        4.0 ** -(bits - 2.0)
    )
    losses = {}
    for sense in ("==", "<="):
        problem = rco.AllocationProblem(bits, 3 * groups * unit, weights=[unit] * groups, sense=sense)
        manifold = rco.BudgetManifold(problem)
        x = manifold.retract(torch.zeros_like(table)).requires_grad_()
        optimizer = rco.RiemannianAdam([x], manifold, lr=0.05)
        for _ in range(400):
            optimizer.zero_grad()
            loss = (torch.softmax(x, dim=1) * table).sum()
            loss.backward()
            optimizer.step()
        losses[sense] = float(loss.detach())
        assert float(manifold.expected_cost(x.detach())) == pytest.approx(3 * groups * unit, rel=1e-3)
    assert losses["<="] == pytest.approx(losses["=="], rel=0.01)
