"""``rco-plain`` beside a slow transcription of Algorithm 1: autograd, enumeration, bisection, Adam by hand."""

import itertools

import numpy as np
import pytest
import torch

from rco import AllocationProblem
from rco.core.sampling import batch_order, gumbel_noise
from rco.core.search import PRINTED, RCO, PlainRCO
from rco.testing import QuadraticObjective

COSTS, WEIGHTS, BUDGET = np.array([2.0, 3.0, 5.0, 8.0]), np.array([3.0, 1.0, 2.0, 4.0, 1.0]), 40.0
PROBLEM = AllocationProblem([2, 3, 5, 8], budget=40, weights=[3, 1, 2, 4, 1], sense=None, monotone=True)
SHAPE = (5, 4)


def enumerated(values):
    """The best assignment within the budget, Eq. 4, among all 4^5."""
    rows = np.arange(SHAPE[0])
    fitting = (
        np.array(choices)
        for choices in itertools.product(range(SHAPE[1]), repeat=SHAPE[0])
        if (WEIGHTS * COSTS[list(choices)]).sum() <= BUDGET
    )
    return max(fitting, key=lambda choices: values[rows, choices].sum())


def spent(logits):
    return (torch.from_numpy(WEIGHTS) * (torch.softmax(logits, 1) @ torch.from_numpy(COSTS))).sum()


def retracted(logits):
    low, high = -50.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        if spent(logits + middle * torch.from_numpy(COSTS)) < BUDGET:
            low = middle
        else:
            high = middle
    return logits + low * torch.from_numpy(COSTS)


def without_normal(vector, logits):
    point = logits.clone().requires_grad_()
    (normal,) = torch.autograd.grad(spent(point), point)
    return vector - (vector * normal).sum() / normal.square().sum() * normal


def algorithm_1(objective, start, temperatures, samples, lr, seed):
    """The logits after every step, and the final assignment."""
    logits = retracted(start)
    first, second, trace = torch.zeros(SHAPE), torch.zeros(SHAPE), []
    for t, tau in enumerate(temperatures, start=1):
        gradient = torch.zeros(SHAPE)
        batches = batch_order(objective.num_batches, seed=seed, first=(t - 1) * samples, count=samples)
        for j, batch in enumerate(batches):
            point = logits.clone().requires_grad_()
            perturbed = (point + gumbel_noise(SHAPE, seed=seed, step=t - 1, sample=j)) / tau
            choices = enumerated(perturbed.detach().numpy())
            soft = torch.softmax(perturbed, 1)
            hard = torch.nn.functional.one_hot(torch.from_numpy(choices), SHAPE[1])
            loss = objective.loss((hard - soft).detach() + soft, batch)
            gradient = gradient + torch.autograd.grad(loss, point)[0] / samples
        gradient = without_normal(gradient, logits)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        step = (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
        logits = retracted(logits - lr * step)
        first = without_normal(first, logits)
        trace.append(logits)
    return trace, enumerated(torch.log_softmax(logits, 1).numpy())


@pytest.mark.parametrize("started", [False, True])
def test_every_step_is_that_of_the_printed_algorithm(started):
    objective = QuadraticObjective(*SHAPE, seed=3, num_batches=3, batch_noise=0.3)
    prior = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    states = []
    result = PlainRCO(steps=6, samples=2, lr=0.2, seed=5).search(
        PROBLEM, objective, prior=prior if started else None, on_checkpoint=states.append
    )
    temperatures = [record.temperature for record in result.history]
    start = prior if started else torch.zeros(SHAPE, dtype=torch.float64)
    trace, choices = algorithm_1(objective, start, temperatures, 2, 0.2, 5)
    for state, logits in zip(states, trace, strict=True):
        # A constant added to a group's logits changes nothing.
        found, expected = (
            torch.log_softmax(each, 1) for each in (state["process"]["optimizer"]["logits"], logits)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert result.allocation.tolist() == choices.tolist()
    assert (result.method, result.chosen_from, list(result.candidates)) == ("rco-plain", "final", ["final"])


def test_the_settings_are_those_of_the_paper_and_fixed():
    settings = {"tau": (1.0, 0.01), "refine": 0, "curvature": False, "choose": False, "monotone": False}
    assert dict(PRINTED) == settings
    plain = PlainRCO(steps=7, samples=2, lr=0.3, antithetic=True, seed=4)
    same = RCO(steps=7, samples=2, lr=0.3, antithetic=True, seed=4, **settings)
    objective = QuadraticObjective(*SHAPE, seed=0)
    found = [searcher.search(PROBLEM, objective).history for searcher in (plain, same)]
    assert [record.loss for record in found[0]] == [record.loss for record in found[1]]
    for name in set(settings) - {"tau"}:
        with pytest.raises(TypeError, match=name):
            PlainRCO(**{name: settings[name]})


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_the_temperatures_are_the_printed_ones(steps):
    """tau_t = max(tau_min, tau_0 (tau_min / tau_0)^(t / T)) for t = 1 ... T: the last step is at tau_min."""
    result = PlainRCO(steps=steps, samples=1).search(PROBLEM, QuadraticObjective(*SHAPE, seed=0))
    printed = [max(0.01, 1.0 * (0.01 / 1.0) ** (t / steps)) for t in range(1, steps + 1)]
    assert [record.temperature for record in result.history] == pytest.approx(printed, rel=1e-12)
    assert result.history[-1].temperature == pytest.approx(0.01, rel=1e-12)
