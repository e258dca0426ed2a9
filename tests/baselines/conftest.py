"""Losses whose structure the baselines are meant to exploit, and an independent exact solver."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from rco import registry
from rco.testing import QuadraticObjective

QUICK = {
    "steps": 6,
    "samples": 3,
    "refine": 2,
    "generations": 4,
    "offspring": 6,
    "initial": 4,
    "orders": 4,
    "moves": 5,
}
SMALL_STAGES = {"survivors": (3, 1), "batches_per_stage": (1, 3)}


def methods():
    return sorted(registry.METHODS)


def make(name, **settings):
    searcher = registry.load(registry.METHODS, name, "method")
    known = {field.name for field in dataclasses.fields(searcher) if field.init}
    quick = {k: v for k, v in {**QUICK, **SMALL_STAGES}.items() if k in known}
    return searcher(**{**quick, **settings})


class TableObjective:
    """A sum of one number per group and option, so that the knapsack of the table is the optimum."""

    def __init__(self, table, num_batches=1):
        self.table = torch.as_tensor(table, dtype=torch.float64)
        self.num_batches = num_batches

    def loss(self, gates, batch):
        return (gates * self.table).sum()


class ErrorsObjective(QuadraticObjective):
    """A coupled loss that also offers the tables that some methods read."""

    def __init__(self, num_groups, num_options, **arguments):
        super().__init__(num_groups, num_options, **arguments)
        scale = torch.rand(num_groups, 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        self.option_errors = scale * 4.0 ** -torch.arange(num_options, dtype=torch.float64)

    def noisy_loss(self, gates, batch, group, squared_error, seed):
        drawn = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return self.loss(gates, batch) + (0.5 + drawn) * (group + 1) * squared_error


def highs_optimum(values, problem):
    """The largest total value within the budgets, by a mixed-integer program of its own."""
    size = values.size
    choose = np.kron(np.eye(problem.num_groups), np.ones(problem.num_options))
    costs = problem.float_costs.reshape(problem.num_joint, -1)
    if problem.block_index is not None:
        inside = problem.block_index == np.arange(problem.num_budgets)[:, None]
        costs = (problem.float_costs * inside[:, :, None]).reshape(problem.num_budgets, -1)
    result = milp(
        -np.where(problem.allowed, values, 0.0).reshape(-1),
        integrality=np.ones(size),
        bounds=Bounds(0, problem.allowed.reshape(-1).astype(float)),
        constraints=[
            LinearConstraint(choose, 1, 1),
            LinearConstraint(costs, -np.inf, problem.float_budgets + 1e-9),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert result.status == 0
    return -result.fun


def total(values, choices):
    return float(np.asarray(values)[np.arange(len(choices)), np.asarray(choices)].sum())


@pytest.fixture
def rng():
    return np.random.default_rng(0)
