"""Asking an objective: many questions at once, counted, and within an allowance.

A search knows a whole step's samples, or a round's candidates, before it needs the first answer. Handing them over
together lets an objective spread them over devices, or enqueue them all on one; one that can do neither is asked
one by one, with the same answers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rco.core.protocols import CurvedObjective, Objective, QueuedObjective, selection_objective

__all__ = [
    "Evaluator",
    "OutOfAllowance",
    "ParallelObjective",
    "Request",
    "losses",
    "losses_and_gradients",
    "one_hot",
]

Request = tuple[Tensor, int]  # gates (N, K) and a batch


@runtime_checkable
class ParallelObjective(Protocol):
    """An objective that answers many requests at once.

    The answer to a request must not depend on the others, nor on where it is computed: a search then gives the same
    result on one device and on many.
    """

    num_batches: int

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """As :meth:`rco.core.protocols.Objective.loss`."""
        ...

    def losses(self, requests: Sequence[Request]) -> list[float]:
        """The loss of every request, without gradient."""
        ...

    def losses_and_gradients(self, requests: Sequence[Request]) -> list[tuple[float, Tensor]]:
        """The loss of every request and its gradient with respect to the gates."""
        ...


@torch.no_grad()
def losses(objective: Objective, requests: Sequence[Request]) -> list[float]:
    """The loss of every request, without gradient."""
    if isinstance(objective, ParallelObjective):
        return objective.losses(requests)
    # All of them are under way before the first is read, which waits for its device.
    found = [objective.loss(gates, batch) for gates, batch in requests]
    return [float(loss) for loss in found]


def losses_and_gradients(objective: Objective, requests: Iterable[Request]) -> list[tuple[float, Tensor]]:
    """The loss of every request and its gradient with respect to the gates.

    Requests are taken one at a time: while a device works on one, the next may still be in the making.
    """
    if isinstance(objective, ParallelObjective):
        return objective.losses_and_gradients(list(requests))
    if isinstance(objective, QueuedObjective):
        answers = [objective.enqueue(gates, batch) for gates, batch in requests]
        return [answer() for answer in answers]
    return [_loss_and_gradient(objective, gates, batch) for gates, batch in requests]


def _loss_and_gradient(objective: Objective, gates: Tensor, batch: int) -> tuple[float, Tensor]:
    leaf = gates.detach().requires_grad_()
    loss = objective.loss(leaf, batch)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


class OutOfAllowance(Exception):
    """The allowance ends within this step; what the step had begun is dropped."""


def one_hot(choices: np.ndarray, num_options: int) -> Tensor:
    """(N, K) float64 gates of an allocation."""
    return torch.nn.functional.one_hot(torch.from_numpy(choices), num_options).double()


class Evaluator:
    """Counts forwards and backwards, and refuses what the allowance does not hold.

    One evaluation is one batch forwarded; a backward counts as two more, which is what it costs. A part of the
    allowance may be kept back for the choice among finished candidates, which goes past the limits.
    """

    def __init__(self, objective: Objective) -> None:
        if objective.num_batches < 1:
            raise ValueError(f"The objective must have at least one batch, got {objective.num_batches}.")
        self.objective = objective
        self.selection = selection_objective(objective)
        self.selection_batches = range(self.selection.num_batches)
        self.curvature = objective.curvature if isinstance(objective, CurvedObjective) else None
        self.forwards = self.backwards = 0
        self.reserve = 0
        self.starts = 0  # starting points that the final choice compares, at most
        self.most = self.max_seconds = math.inf
        self.seconds_before = 0.0
        self._began = time.perf_counter()

    # -------------------------------------------------------------- allowance

    def limit(self, evaluations: int | None, seconds: float | None) -> None:
        """Set the allowance; None is no limit."""
        self.most = math.inf if evaluations is None else evaluations
        self.max_seconds = math.inf if seconds is None else seconds

    @property
    def seconds(self) -> float:
        """Since the search began, over all its parts."""
        return self.seconds_before + time.perf_counter() - self._began

    @property
    def evaluations(self) -> int:
        """Batches forwarded so far, a backward counted as two more."""
        return self.forwards + 2 * self.backwards

    @property
    def left(self) -> float:
        """Evaluations that the allowance still holds, less those kept back."""
        return self.most - self.reserve - self.evaluations

    @property
    def in_time(self) -> bool:
        """Whether the seconds are not used up."""
        return self.seconds < self.max_seconds

    def _take(self, evaluations: int) -> None:
        if evaluations > self.left or not self.in_time:
            raise OutOfAllowance

    # ------------------------------------------------------------ measurements

    @torch.no_grad()
    def measure(
        self,
        function: Callable[[Tensor, int], Tensor],
        choices: np.ndarray,
        options: int,
        batches: Sequence[int],
    ) -> np.ndarray:
        """Values of another function of gates and batch, counted like the loss, without gradient."""
        gates = one_hot(choices, options)
        values = np.empty(len(batches))
        for position, batch in enumerate(batches):
            self._take(1)
            values[position] = float(function(gates, batch))
            self.forwards += 1
        return _finite(values)

    def losses(self, choices: np.ndarray, options: int, batches: Sequence[int]) -> np.ndarray:
        """Losses of an allocation on some batches of the objective (not of its selection split)."""
        self._take(len(batches))
        gates = one_hot(choices, options)
        found = losses(self.objective, [(gates, batch) for batch in batches])
        self.forwards += len(batches)
        return _finite(np.array(found))

    def losses_and_gradients(
        self, samples: Iterable[Tensor], batches: Sequence[Sequence[int]]
    ) -> list[tuple[float, Tensor]]:
        """For each sample's gates: mean loss over its batches and its gradient with respect to the gates.

        Samples may be made one by one as they are taken; a device then works on one while the next is made.
        """
        count = sum(len(some) for some in batches)
        self._take(3 * count)
        requests = ((gates, batch) for gates, some in zip(samples, batches, strict=True) for batch in some)
        answers = iter(losses_and_gradients(self.objective, requests))
        self.forwards += count
        self.backwards += count
        found = []
        for some in batches:
            part = list(itertools.islice(answers, len(some)))
            mean = float(_finite(np.array([loss for loss, _ in part])).mean())
            total = torch.zeros_like(part[0][1])
            for _, gradient in part:
                total += gradient
            found.append((mean, total / len(part)))
        return found

    def loss_and_gradient(self, gates: Tensor, batches: Sequence[int]) -> tuple[float, Tensor]:
        """Mean loss over some batches and its gradient with respect to the gates."""
        return self.losses_and_gradients([gates.detach()], [batches])[0]

    def bend(self, choices: Tensor) -> Tensor | None:
        """(N, K) second-order cost of switching each group away from ``choices``, if the objective knows it."""
        if self.curvature is None:
            return None
        return self.curvature[torch.arange(len(choices)), choices]

    def selection_losses(self, choices: np.ndarray, num_options: int, batches: Sequence[int]) -> np.ndarray:
        """Loss of an allocation on each of the given selection batches: for the final choice, always allowed."""
        return self.many_selection_losses([choices], num_options, batches).reshape(-1)

    def many_selection_losses(
        self, allocations: Sequence[np.ndarray], num_options: int, batches: Sequence[int]
    ) -> np.ndarray:
        """(allocations, batches) losses on the selection split, without gradient; always allowed."""
        gates = [one_hot(choices, num_options) for choices in allocations]
        requests = [(each, batch) for each in gates for batch in batches]
        self.forwards += len(requests)
        found = losses(self.selection, requests)
        return _finite(np.array(found)).reshape(len(allocations), len(batches))


def _finite(losses: np.ndarray) -> np.ndarray:
    if not np.isfinite(losses).all():
        raise FloatingPointError(
            f"The objective returned {losses[~np.isfinite(losses)][0]}; check the model and the data, or its "
            "arithmetic type."
        )
    return losses
