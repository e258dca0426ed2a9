"""Every registered searcher keeps the contract of rco.testing."""

import dataclasses

import pytest

from rco import tables
from rco.testing import QuadraticObjective, check_objective, check_searcher


@pytest.mark.parametrize("name", sorted(tables.METHODS))
def test_searcher_keeps_the_contract(name):
    searcher = tables.load(tables.METHODS, name, "method")
    quick = {"steps": 10, "samples": 2, "refine": 8}
    settings = {f.name for f in dataclasses.fields(searcher)}
    check_searcher(searcher(**{k: v for k, v in quick.items() if k in settings}))


def test_objective_contract():
    check_objective(QuadraticObjective(5, 3, num_batches=3), 5, 3)


def test_unknown_names_suggest_neighbours():
    with pytest.raises(ValueError, match="Did you mean lagrangian"):
        tables.load(tables.METHODS, "lagrangean", "method")
