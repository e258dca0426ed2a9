"""Optional parts of an objective have defaults, and objects that are not derived from Objective are accepted."""

import numpy as np
import pytest
import torch

import rco
from rco.core.objective import ForwardingObjective, Objective, as_objective
from rco.testing import QuadraticObjective, check_objective, random_problem


class Plain:
    """The least that a searcher needs."""

    num_batches = 2

    def __init__(self, inner):
        self._inner = inner

    def loss(self, gates, batch):
        return self._inner.loss(gates, batch)


class Rich(Plain):
    """Everything that an objective may offer, without deriving from it."""

    tokens_per_batch = 7

    def __init__(self, inner):
        super().__init__(inner)
        self.curvature = torch.rand(6, 3, 3, dtype=torch.float64)
        self.group_blocks = [0, 0, 0, 1, 1, 1]
        self.option_errors = torch.rand(6, 3, dtype=torch.float64)
        self.selection = Plain(inner)

    def noisy_loss(self, gates, batch, group, squared_error, seed):
        return self.loss(gates, batch) + squared_error


@pytest.fixture
def quadratic():
    return QuadraticObjective(6, 3, seed=0, num_batches=2, batch_noise=0.1)


def test_defaults_know_nothing(quadratic):
    assert quadratic.selection is None
    assert quadratic.curvature is None
    assert quadratic.table("option_errors") is None
    assert not quadratic.offers("noisy_loss")
    assert not quadratic.offers("acceptance")
    with pytest.raises(NotImplementedError, match="cannot add noise"):
        quadratic.noisy_loss(torch.zeros(6, 3), 0, 0, 0.1, 0)
    with pytest.raises(NotImplementedError, match="must define loss"):
        Objective().loss(torch.zeros(6, 3), 0)


def test_a_wrapped_object_offers_what_it_has(quadratic):
    rich = Rich(quadratic)
    wrapped = as_objective(rich)
    assert as_objective(wrapped) is wrapped
    assert wrapped.curvature is rich.curvature
    assert wrapped.table("option_errors") is rich.option_errors
    assert wrapped.table("fisher_losses") is None
    assert wrapped.group_blocks == [0, 0, 0, 1, 1, 1]
    assert (wrapped.tokens_per_batch, wrapped.described) == (7, "Rich")
    assert wrapped.offers("noisy_loss")
    assert not wrapped.offers("acceptance")
    assert wrapped.selection.loss(torch.ones(6, 3, dtype=torch.float64), 1) == quadratic.loss(
        torch.ones(6, 3, dtype=torch.float64), 1
    )
    check_objective(rich, 6, 3)
    check_objective(Plain(quadratic), 6, 3)


def test_a_search_over_a_plain_object_is_the_same(quadratic):
    problem = random_problem(0, 6, 3)
    searcher = rco.RCO(steps=5, samples=3, refine=2)
    results = [
        searcher.search(problem, objective)
        for objective in (quadratic, Plain(quadratic), ForwardingObjective(quadratic))
    ]
    for result in results[1:]:
        assert [r.loss for r in result.history] == [r.loss for r in results[0].history]
        assert (result.loss, result.allocation.tolist()) == (results[0].loss, results[0].allocation.tolist())


def test_further_tables_leave_the_rest(quadratic):
    rich = as_objective(Rich(quadratic))
    table = torch.rand(6, 3)
    informed = rich.with_tables(fisher_losses=table)
    assert informed.table("fisher_losses") is table
    assert rich.table("fisher_losses") is None
    assert informed.table("option_errors") is rich.table("option_errors")
    assert informed.curvature is rich.curvature
    assert informed.offers("noisy_loss")
    assert rich.with_tables() is rich
    gates = torch.from_numpy(np.random.default_rng(0).random((6, 3)))
    assert informed.losses([(gates, 0)]) == quadratic.losses([(gates, 0)])


@pytest.mark.parametrize(
    ("given", "missing"), [(object(), "no num_batches and no loss"), (len, "num_batches")]
)
def test_an_object_without_a_loss_is_refused(given, missing):
    with pytest.raises(TypeError, match=missing):
        rco.RCO(steps=1).search(random_problem(0, 6, 3), given)
