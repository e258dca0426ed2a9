"""Steps made tangent in Adam's own metric: exact to first order, and the study's hard case."""

import numpy as np
import pytest
import torch

import rco
from rco.testing import random_problem


def problems():
    rng = np.random.default_rng(0)
    yield random_problem(3, 12, 4)
    yield rco.AllocationProblem([0, 1, 3], budget=[4, 5], blocks=[0, 0, 0, 1, 1, 1])
    costs = rng.integers(1, 9, size=(3, 10, 4))
    yield rco.AllocationProblem(costs, budget=costs.mean(axis=2).sum(axis=1).round().astype(int).tolist())


@pytest.mark.parametrize("problem", list(problems()), ids=["one", "blocks", "joint"])
def test_straightened_steps_are_tangent_and_nearest_in_the_metric(problem):
    manifold = rco.BudgetManifold(problem)
    x = manifold.random_point(0)
    generator = torch.Generator().manual_seed(1)
    step = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    scale = torch.rand(x.shape, generator=generator, dtype=torch.float64) + 0.1
    straight = manifold.straighten(x, step, scale)
    assert torch.allclose(manifold.project(x, straight), straight, atol=1e-10)
    # Nearest: the correction is orthogonal, in the metric 1 / scale, to every tangent vector.
    tangent = manifold.project(x, torch.randn(x.shape, generator=generator, dtype=torch.float64))
    assert float(((step - straight) / scale * tangent).sum()) == pytest.approx(0.0, abs=1e-9)
    assert torch.allclose(manifold.straighten(x, straight, scale), straight, atol=1e-10)


@pytest.mark.parametrize("problem", list(problems()), ids=["one", "blocks", "joint"])
def test_the_retraction_has_less_to_correct(problem):
    values = torch.randn(
        problem.num_groups,
        problem.num_options,
        generator=torch.Generator().manual_seed(2),
        dtype=torch.float64,
    )
    budget = torch.as_tensor(problem.float_budgets)
    missed = {}
    for straighten in (False, True):
        manifold = rco.BudgetManifold(problem)
        x = manifold.random_point(0).requires_grad_()
        optimizer = rco.RiemannianAdam([x], manifold, lr=0.01, straighten=straighten)
        retract, total = manifold.retract, 0.0

        def recorded(y, retract=retract, manifold=manifold):
            nonlocal total
            total += float((manifold.expected_cost(y).reshape(-1) - budget).abs().sum())
            return retract(y)

        manifold.retract = recorded
        for _ in range(60):
            optimizer.zero_grad()
            (torch.softmax(x, 1) * values).sum().backward()
            optimizer.step()
            assert torch.allclose(manifold.expected_cost(x).reshape(-1), budget, rtol=1e-11)
        missed[straighten] = total
    assert missed[True] < 0.5 * missed[False]
