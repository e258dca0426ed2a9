"""An objective that answers many requests at once changes nothing but where they are computed."""

import numpy as np
import torch

import rco
from rco.core.evaluator import Evaluator
from rco.testing import QuadraticObjective, random_problem


class Backwards:
    """Answers the requests in the opposite order, and remembers how many came together."""

    def __init__(self, objective):
        self._objective = objective
        self.num_batches = objective.num_batches
        self.together = []

    def loss(self, gates, batch):
        raise AssertionError("a parallel objective is asked for many losses, never for one")

    def losses(self, requests):
        self.together.append(len(requests))
        return self._objective.losses(requests[::-1])[::-1]

    def losses_and_gradients(self, requests):
        self.together.append(len(requests))
        return self._objective.losses_and_gradients(requests[::-1])[::-1]


def test_requests_come_together_and_order_does_not_matter():
    problem = random_problem(3, 8, 3)
    plain = QuadraticObjective(8, 3, seed=3, num_batches=5, batch_noise=0.2)
    parallel = Backwards(plain)
    searcher = rco.RCO(steps=6, samples=4, batches_per_sample=2, seed=1)
    one, many = (searcher.search(problem, objective) for objective in (plain, parallel))
    assert many.allocation.tolist() == one.allocation.tolist()
    assert [r.loss for r in many.history] == [r.loss for r in one.history]
    assert (many.loss, many.candidates) == (one.loss, one.candidates)
    assert (many.forwards, many.backwards) == (one.forwards, one.backwards)
    assert parallel.together[:6] == [8] * 6  # a step's samples on all of their batches
    assert parallel.together[6] >= 2 * 5  # the candidates on all selection batches


def test_gradients_are_those_of_each_request():
    objective = QuadraticObjective(4, 3, seed=0, num_batches=3, batch_noise=0.5)
    rng = np.random.default_rng(0)
    requests = [(torch.from_numpy(rng.random((4, 3))), batch) for batch in (2, 0, 2)]
    for (gates, batch), (loss, gradient) in zip(
        requests, objective.losses_and_gradients(requests), strict=True
    ):
        leaf = gates.clone().requires_grad_()
        expected = objective.loss(leaf, batch)
        expected.backward()
        assert loss == expected.item()
        assert torch.equal(gradient, leaf.grad)
        assert objective.losses([(gates, batch)]) == [expected.item()]


class Queue:
    """Notes when a sample is launched and when its answer is asked for."""

    def __init__(self, objective, events):
        self._objective, self._events = objective, events
        self.num_batches = objective.num_batches

    def loss(self, gates, batch):
        return self._objective.loss(gates, batch)

    def enqueue(self, gates, batch):
        self._events.append("launch")

        def answer():
            self._events.append("answer")
            return self._objective.losses_and_gradients([(gates, batch)])[0]

        return answer


def test_all_samples_are_launched_before_the_first_answer_each_made_after_the_one_before_it():
    objective, events = QuadraticObjective(4, 3, seed=0, num_batches=3, batch_noise=0.5), []
    gates = [torch.from_numpy(np.random.default_rng(seed).random((4, 3))) for seed in range(3)]

    def made():
        for each in gates:
            events.append("make")
            yield each

    batches = [[0, 1], [2, 0], [1, 2]]
    found = Evaluator(Queue(objective, events)).losses_and_gradients(made(), batches)
    assert events == ["make", "launch", "launch"] * 3 + ["answer"] * 6
    plain = Evaluator(objective).losses_and_gradients(gates, batches)
    assert [loss for loss, _ in found] == [loss for loss, _ in plain]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, plain, strict=True))


def test_a_queued_objective_changes_nothing_of_a_search():
    problem = random_problem(3, 8, 3)
    plain = QuadraticObjective(8, 3, seed=3, num_batches=5, batch_noise=0.2)
    searcher = rco.RCO(steps=6, samples=4, batches_per_sample=2, seed=1)
    one, queued = (searcher.search(problem, objective) for objective in (plain, Queue(plain, [])))
    assert queued.allocation.tolist() == one.allocation.tolist()
    assert [r.loss for r in queued.history] == [r.loss for r in one.history]
