"""Optional parts of an objective have defaults, and objects that are not derived from Objective are accepted."""

import numpy as np
import pytest
import torch

import rco
from rco.core.objective import (
    CallableObjective,
    ForwardingObjective,
    NoGradientError,
    Objective,
    as_objective,
)
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
    ("given", "missing"), [(object(), "no num_batches and no loss"), (int, "num_batches")]
)
def test_an_object_without_a_loss_is_refused(given, missing):
    with pytest.raises(TypeError, match=missing):
        rco.RCO(steps=1).search(random_problem(0, 6, 3), given)


# ------------------------------------------------------------------ plain functions


def table():
    return torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3)))


PROBLEM = rco.AllocationProblem([[0, 1, 2]] * 4, 5, sense="<=")
QUICK = {"steps": 3, "samples": 2, "refine": 4}


def test_a_plain_function_is_an_objective():
    values = table()
    result = rco.RCO(**QUICK).search(PROBLEM, lambda gates: (gates * values).sum())
    again = rco.minimize(lambda gates: (gates * values).sum(), PROBLEM, **QUICK)
    assert result.allocation == again.allocation


def test_batched_losses_give_the_same_search():
    values, calls = table(), []

    def one(gates):
        return ((gates * values).sum(dim=(-2, -1)) + 0.3).square()

    def many(gates):
        calls.append(tuple(gates.shape))
        return one(gates)

    plain = CallableObjective(one)
    batched = CallableObjective(many, batched=True)
    first, second = rco.RCO(**QUICK).search(PROBLEM, plain), rco.RCO(**QUICK).search(PROBLEM, batched)
    assert first.allocation == second.allocation
    assert first.loss == pytest.approx(second.loss)
    assert (2, 4, 3) in calls  # a step's samples in one call
    assert all(len(shape) == 3 for shape in calls)
    gates = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 1, 2, 1])]
    assert float(batched.loss(gates, 0)) == pytest.approx(float(plain.loss(gates, 0)))
    (loss, slope), (_, other) = batched.enqueue(gates, 0)(), plain.enqueue(gates, 0)()
    assert loss == pytest.approx(float(one(gates)))
    assert torch.allclose(slope, other)


@pytest.mark.parametrize("batched", [False, True])
def test_a_float32_loss_is_found_out(batched):
    vector = table().float().flatten()
    objective = CallableObjective(lambda gates: gates.flatten(-2) @ vector, batched=batched)
    result = rco.RCO(**QUICK).search(PROBLEM, objective)
    assert PROBLEM.is_feasible(result.allocation)
    assert objective._dtype == torch.float32


def test_messages_name_cause_and_way_out():
    values = table()
    for black_box in (
        lambda gates: gates.detach().numpy().sum(),
        lambda gates: gates.numpy().sum(),
        lambda gates: (gates * values).sum().detach(),
    ):
        with pytest.raises(NoGradientError, match="annealing"):
            rco.minimize(black_box, PROBLEM, **QUICK)
    with pytest.raises(ValueError, match="batched=True"):
        rco.minimize(lambda gates: (gates * values).sum(dim=1), PROBLEM, **QUICK)
    with pytest.raises(ValueError, match="returned shape"):
        CallableObjective(lambda gates: gates.sum(), batched=True).loss(torch.ones(4, 3), 0)
    with pytest.raises(TypeError, match="dtype="):
        rco.minimize(lambda gates: gates @ torch.ones(7), PROBLEM, **QUICK)
    with pytest.raises(TypeError, match="function of the gates"):
        CallableObjective(3)


def test_methods_without_gradient_take_black_boxes():
    from rco.baselines.annealing import Annealing

    values = table().numpy()

    def black_box(gates):
        return float((gates.numpy() * values).sum())

    result = Annealing(steps=4, moves=10).search(PROBLEM, black_box)
    assert result.loss == pytest.approx(-rco.solve_mckp(-values, PROBLEM).value, abs=0.5)
