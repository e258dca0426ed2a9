"""Every registered searcher keeps the contract of rco.testing."""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import types

import numpy as np
import pytest
import torch

import rco.baselines
import rco.testing.contracts
from rco import registry
from rco.core.searcher import BudgetedSearch, FixedAnswer
from rco.testing import QuadraticObjective, check_objective, check_searcher

QUICK = {
    "steps": 10,
    "samples": 2,
    "refine": 8,
    "generations": 3,
    "offspring": 6,
    "initial": 4,
    "orders": 3,
    "moves": 4,
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


@pytest.mark.parametrize("name", sorted(registry.METHODS))
def test_a_name_of_the_table_is_the_name_of_its_class(name):
    searcher = registry.load(registry.METHODS, name, "method")
    assert searcher.name == name
    assert registry.METHODS[name] == f"{searcher.__module__}:{searcher.__name__}"
    assert dataclasses.is_dataclass(searcher)
    assert searcher.__dataclass_params__.frozen
    searcher()  # every setting has a default


def test_every_method_in_the_package_is_in_the_table():
    """A baseline whose file was added without its line would be unreachable."""
    found = set()
    for module in pkgutil.iter_modules(rco.baselines.__path__, "rco.baselines."):
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and issubclass(cls, BudgetedSearch) and "name" in vars(cls):
                found.add(f"{cls.__module__}:{cls.__name__}")
    assert found == {entry for entry in registry.METHODS.values() if entry.startswith("rco.baselines.")}


def test_a_method_is_one_file_and_one_line(monkeypatch):
    """A method as docs/add_a_baseline.md describes it, found by name and held to the contract."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Cheapest(BudgetedSearch):
        name = "cheapest"

        def loop(self, run):
            priced = np.where(run.problem.allowed, -run.problem.float_costs.sum(axis=0), -np.inf)
            cheapest = rco.solve_mckp(priced, run.problem).allocation
            run.resume(FixedAnswer(run, cheapest=cheapest))
            return run.choose()

    module = types.ModuleType("rco.baselines.cheapest")
    module.Cheapest = Cheapest
    monkeypatch.setitem(sys.modules, "rco.baselines.cheapest", module)
    monkeypatch.setitem(registry.METHODS, "cheapest", "rco.baselines.cheapest:Cheapest")
    check_searcher(registry.load(registry.METHODS, "cheapest", "method")(seed=1))


def test_objective_contract():
    check_objective(QuadraticObjective(5, 3, num_batches=3), 5, 3)


def test_unknown_names_suggest_neighbours():
    with pytest.raises(ValueError, match="Did you mean lagrangian"):
        registry.load(registry.METHODS, "lagrangean", "method")
