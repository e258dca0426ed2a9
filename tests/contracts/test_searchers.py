"""Every registered searcher keeps the contract of rco.testing."""

import dataclasses

import pytest
import torch

import rco.testing.contracts
from rco import registry
from rco.testing import QuadraticObjective, check_objective, check_searcher

QUICK = {
    "steps": 10,
    "samples": 2,
    "refine": 8,
    "generations": 3,
    "offspring": 6,
    "initial": 4,
    "orders": 3,
}


class ObjectiveWithErrors(QuadraticObjective):
    """What the methods that read a table of errors need beside the loss."""

    def __init__(self, num_groups, num_options, **arguments):
        super().__init__(num_groups, num_options, **arguments)
        generator = torch.Generator().manual_seed(num_groups)
        scale = torch.rand(num_groups, 1, generator=generator, dtype=torch.float64)
        self.option_errors = scale * 4.0 ** -torch.arange(num_options, dtype=torch.float64)

    def noisy_loss(self, gates, batch, group, squared_error, seed):
        drawn = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return self.loss(gates, batch) + (0.5 + drawn) * (group + 1) * squared_error


@pytest.mark.parametrize("name", sorted(registry.METHODS))
def test_searcher_keeps_the_contract(name, monkeypatch):
    monkeypatch.setattr(rco.testing.contracts, "QuadraticObjective", ObjectiveWithErrors)
    searcher = registry.load(registry.METHODS, name, "method")
    settings = {f.name for f in dataclasses.fields(searcher) if f.init}
    check_searcher(searcher(**{k: v for k, v in QUICK.items() if k in settings}))


def test_objective_contract():
    check_objective(QuadraticObjective(5, 3, num_batches=3), 5, 3)


def test_unknown_names_suggest_neighbours():
    with pytest.raises(ValueError, match="Did you mean lagrangian"):
        registry.load(registry.METHODS, "lagrangean", "method")
