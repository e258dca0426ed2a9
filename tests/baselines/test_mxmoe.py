"""MxMoE against brute force and against the exact knapsack of each layer."""

import itertools

import numpy as np
import pytest
import torch

import rco
from rco.baselines.block_budgets import share_budget
from rco.baselines.mxmoe import MxMoE, solve_layer

from .conftest import TableObjective


def test_a_layer_is_solved_exactly():
    rng = np.random.default_rng(0)
    for _ in range(20):
        count, options = int(rng.integers(1, 5)), int(rng.integers(2, 5))
        table = rng.random((count, options))
        costs = np.sort(rng.integers(1, 40, size=(count, options)), axis=1)
        allowed = rng.random((count, options)) < 0.8
        allowed[:, 0] = True
        budget = int(rng.integers(costs.min(axis=1).sum(), costs.max(axis=1).sum() + 1))
        best = min(
            table[np.arange(count), list(choice)].sum()
            for choice in itertools.product(range(options), repeat=count)
            if costs[np.arange(count), list(choice)].sum() <= budget
            and allowed[np.arange(count), list(choice)].all()
        )
        found = solve_layer(table, costs[None], allowed, [budget])
        assert costs[np.arange(count), found].sum() <= budget
        assert allowed[np.arange(count), found].all()
        assert table[np.arange(count), found].sum() == pytest.approx(best)


def test_every_layer_spends_the_same_share():
    rng = np.random.default_rng(1)
    groups = [f"layers.{layer}.experts.{e}" for layer in range(3) for e in range(8)]
    problem = rco.AllocationProblem([2, 3, 4], budget=24 * 3, weights=[1] * 24, groups=groups, monotone=True)
    table = torch.from_numpy(np.sort(rng.random((24, 3)), axis=1)[:, ::-1].copy())
    # One layer counts far more than the others: a global knapsack would give it everything.
    table[8:16] *= 100
    objective = TableObjective(table)
    objective.layer_errors = table
    result = MxMoE().search(problem, objective)
    spent = np.asarray(problem.unit_costs[0])[np.arange(24), np.asarray(result.allocation)]
    assert [int(part.sum()) for part in np.split(spent, 3)] == [24, 24, 24]
    shared = share_budget(problem, np.repeat(np.arange(3), 8))
    best = rco.solve_mckp(-table.numpy(), shared)
    assert float(result.loss) == pytest.approx(-best.value)
    assert result.settings["sensitivities"] == "layer_errors"


def test_without_a_table_it_says_so():
    problem = rco.AllocationProblem([1, 2], budget=6, weights=[1] * 4)
    with pytest.raises(ValueError, match="layer_errors, output_errors and option_errors"):
        MxMoE().search(problem, TableObjective(torch.zeros(4, 2)))
