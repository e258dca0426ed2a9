"""Frank-Wolfe and the Lagrangians on a convex problem whose constrained optimum is known in closed form."""

import numpy as np
import pytest
import torch

from rco import AllocationProblem
from rco.baselines.frank_wolfe import BudgetPolytope, FrankWolfe
from rco.baselines.lagrangian import PenalizedOptimizer
from rco.core.expected_cost import expected_cost
from rco.testing import random_problem

from .conftest import TableObjective, highs_optimum

COSTS = np.array([1.0, 2.0, 3.0, 2.0, 1.0])
WANTED = np.array([0.7, 0.6, 0.5, 0.8, 0.4])  # the unconstrained optimum, over budget
BUDGET = 4


def problem(sense="=="):
    return AllocationProblem(
        np.stack([np.zeros(5), COSTS], axis=1).astype(int), BUDGET, sense=sense, monotone=False
    )


def optimum(budget=BUDGET):
    """The nearest point on <c, p> = B: p = q - lambda c, all of it inside the cube."""
    p = WANTED - (COSTS @ WANTED - budget) / (COSTS @ COSTS) * COSTS
    assert ((p > 0) & (p < 1)).all()
    return p


class Distance:
    """Half the squared distance of the probabilities of option 1 to what is wanted."""

    num_batches = 1

    def loss(self, gates, batch):
        return 0.5 * ((gates[:, 1] - torch.from_numpy(WANTED)) ** 2).sum()


@pytest.mark.parametrize("sense", ["==", "<="])
def test_frank_wolfe_converges_to_the_constrained_optimum(sense):
    searcher = FrankWolfe(gates="expected", steps=150, delay=2)
    states = []
    history = searcher.search(problem(sense), Distance(), on_checkpoint=states.append).history
    best = 0.5 * ((optimum() - WANTED) ** 2).sum()
    diameter = 2 * 5  # squared, of the product of five segments in (p, 1 - p)
    assert len(states) == searcher.steps
    for step, (state, record) in enumerate(zip(states, history, strict=True)):
        p, loss = state["process"]["p"]["array"].numpy(), record.loss
        assert p.min() >= 0
        np.testing.assert_allclose(p.sum(axis=1), 1.0, atol=1e-9)
        spent = float(p[:, 1] @ COSTS)
        assert spent <= BUDGET + 1e-8
        if sense == "==":
            assert spent == pytest.approx(BUDGET, abs=1e-8)
        if step:
            assert loss - best <= 2 * diameter / (step + 2)  # the textbook rate
    np.testing.assert_allclose(p[:, 1], optimum(), atol=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_the_linear_oracle_bounds_the_knapsack(seed):
    """Its vertex has at most one fractional group per budget, and no integral allocation is better."""
    instance = random_problem(seed, 8, 3, sense="<=")
    values = np.random.default_rng(seed).normal(size=(8, 3))
    vertex = BudgetPolytope(instance).minimise(-values)
    assert ((vertex > 1e-9) & (vertex < 1 - 1e-9)).any(axis=1).sum() <= 1
    assert float((vertex * values).sum()) >= highs_optimum(values, instance) - 1e-9


@pytest.mark.parametrize("kind", ["one", "blocks", "joint"])
def test_the_start_is_on_the_budget(kind):
    rng = np.random.default_rng(0)
    costs = np.cumsum(rng.integers(1, 5, size=(6, 3)), axis=1)
    if kind == "one":
        instance = AllocationProblem(costs, int(costs[:, 0].sum()) + 7)
    elif kind == "blocks":
        lows = np.add.reduceat(costs[:, 0], [0, 3])
        instance = AllocationProblem(costs, (lows + 3).tolist(), blocks=[0, 0, 0, 1, 1, 1])
    else:
        both = np.stack([costs, costs[::-1]])
        instance = AllocationProblem(both, [int(c[:, 1].sum()) for c in both], sense="<=")
    p = BudgetPolytope(instance).start(torch.from_numpy(rng.normal(size=(6, 3))))
    np.testing.assert_allclose(p.sum(axis=1), 1.0)
    logits = torch.from_numpy(np.log(np.maximum(p, 1e-300)))
    spent = expected_cost(instance, logits).numpy()
    if instance.sense == "==":
        np.testing.assert_allclose(spent, instance.float_budgets, atol=1e-6)
    assert (spent <= instance.float_budgets + 1e-6).all()


@pytest.mark.parametrize("seed", range(3))
def test_frank_wolfe_solves_linear_losses(seed):
    instance = random_problem(seed, 8, 3, sense="<=")
    table = np.random.default_rng(seed).normal(size=(8, 3))
    result = FrankWolfe(steps=40, samples=2).search(instance, TableObjective(table))
    assert result.loss == pytest.approx(-highs_optimum(-table, instance), abs=1e-9)


def walk(steps=1000, **settings):
    optimizer = PenalizedOptimizer(problem(), torch.zeros(5, 2, dtype=torch.float64), lr=0.05, **settings)
    objective = Distance()
    for _ in range(steps):
        loss = objective.loss(torch.softmax(optimizer.logits, dim=-1), 0)
        (gradient,) = torch.autograd.grad(loss, optimizer.logits)
        optimizer.step(gradient, float(loss.detach()))
    return optimizer, torch.softmax(optimizer.logits.detach(), dim=-1)[:, 1].numpy()


def test_lagrangian_reaches_the_constrained_optimum():
    optimizer, p = walk(multiplier_lr=0.5, rho=0.0, growth=1.0, patience=1)
    np.testing.assert_allclose(p, optimum(), atol=5e-3)
    # The multiplier, in the optimizer's units, is the closed form's price.
    price = (COSTS @ WANTED - BUDGET) / (COSTS @ COSTS)
    width = COSTS.sum()
    assert float(optimizer.multipliers[0]) * optimizer.unit / width == pytest.approx(price, rel=0.05)


def test_augmented_lagrangian_reaches_the_constrained_optimum():
    _, p = walk(multiplier_lr=0.0, rho=1.0, growth=1.5, patience=100)
    np.testing.assert_allclose(p, optimum(), atol=5e-3)
    assert COSTS @ p == pytest.approx(BUDGET, abs=1e-2)


def test_penalty_stops_short_of_the_budget_by_what_it_must():
    rho = 20.0
    optimizer, p = walk(multiplier_lr=0.0, rho=rho, growth=1.0, patience=1)
    # Stationary: p = q - mu c with mu = unit rho (<c, p> - B) / width^2.
    strength = optimizer.unit * rho / COSTS.sum() ** 2
    excess = (COSTS @ WANTED - BUDGET) / (1 + strength * COSTS @ COSTS)
    np.testing.assert_allclose(p, WANTED - strength * excess * COSTS, atol=5e-3)
    assert COSTS @ p > BUDGET
