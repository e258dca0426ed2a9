"""Counted evaluations of an objective within an allowance, many at once.

A search has a whole step's samples, or a round's candidates, before it needs the first loss. Passing them
together lets an objective spread them over devices, or enqueue them all on one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.core.measured_curvature import MeasuredCurvature
from rco.core.moves import is_spent
from rco.core.objective import Answer, Loss, Request, as_objective, one_hot
from rco.core.problem import AllocationProblem

__all__ = ["Evaluator", "OutOfAllowance", "SearchStopped"]


class OutOfAllowance(Exception):
    """Raised when the allowance ends within a step; the step is dropped."""


class SearchStopped(Exception):
    """Raised when a callback, a target or patience ends the search; the argument is the status."""


class Evaluator:
    """Counts forwards and backwards, and refuses evaluations beyond the allowance.

    One evaluation is one batch forwarded; a backward counts as two more, which is its cost. A part of the allowance
    may be kept back for the choice among finished candidates, which ignores the limits.

    Args:
        objective: The loss.
        problem: If given, its best feasible allocation is remembered, where one batch gives the loss.
        evaluations: Most evaluations; None: no limit.
        seconds: Seconds after which no evaluation begins; None: no limit.
    """

    def __init__(
        self,
        objective: Loss | Callable[[Tensor], Any],
        problem: AllocationProblem | None = None,
        *,
        evaluations: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self.objective = as_objective(objective)
        if self.objective.num_batches < 1:
            raise ValueError(f"The objective must have at least one batch, got {self.objective.num_batches}.")
        selection = self.objective.selection
        self.selection = self.objective if selection is None else selection
        self.selection_batches = range(self.selection.num_batches)
        self.curvature = self.objective.curvature
        self.measured: MeasuredCurvature | None = None  # takes the place of an unknown curvature
        self.forwards = self.backwards = 0
        self.reserve = 0
        self.most = math.inf if evaluations is None else evaluations
        self.max_seconds = math.inf if seconds is None else seconds
        self._seconds_before = 0.0
        self._began = time.perf_counter()
        self._problem = problem
        self.best_choices: np.ndarray | None = None
        self.best_loss = math.inf

    @property
    def one_loss(self) -> bool:
        """Whether one batch gives the loss, for gradients and for the choice: then it is free of noise."""
        return self.objective.num_batches == 1 and self.selection is self.objective

    # -------------------------------------------------------------- allowance

    def keep_back(self, evaluations: int) -> None:
        """Reserve evaluations, instead of those reserved before."""
        self.reserve = evaluations

    def select_on(self, batches: int) -> None:
        """Compare candidates on the first selection batches alone."""
        self.selection_batches = range(batches)

    def measure_curvature(self, measured: MeasuredCurvature) -> None:
        """Take a curvature that the search measures where the objective has none."""
        self.measured = measured

    @property
    def seconds(self) -> float:
        """Seconds since the search began, over all its parts."""
        return self._seconds_before + time.perf_counter() - self._began

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
        """Whether time is left."""
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

    def scores(self, function: Callable[[], Answer], forwards: int) -> tuple[float, np.ndarray]:
        """Loss and scores that a function measures by a backward and so many forwards, counted as such."""
        self._take(forwards + 2)
        loss, found = function()
        self.forwards += forwards
        self.backwards += 1
        return loss, _finite(found.numpy())

    def losses(self, choices: np.ndarray, options: int, batches: Sequence[int]) -> np.ndarray:
        """Losses of an allocation on some batches of the objective (not of its selection split)."""
        (losses,) = self.many_losses(choices[None], options, batches)
        return np.asarray(losses)

    def many_losses(self, allocations: np.ndarray, options: int, batches: Sequence[int]) -> np.ndarray:
        """(S, batches) losses of allocations (S, N) on some batches of the objective."""
        count = len(allocations) * len(batches)
        self._take(count)
        gates = one_hot(allocations, options)
        found = self.objective.losses([(each, batch) for each in gates for batch in batches])
        self.forwards += count
        losses = _finite(np.array(found)).reshape(len(allocations), len(batches))
        for choices, own in zip(allocations, losses, strict=True):
            self._remember(choices, float(own[0]))
        return losses

    def losses_and_gradients(
        self, samples: Iterable[Tensor], batches: Sequence[Sequence[int]]
    ) -> list[tuple[float, Tensor]]:
        """For each sample's gates: mean loss over its batches and its gradient with respect to the gates.

        Samples may come from a generator; a device then works on one while the next is made.
        """
        count = sum(len(some) for some in batches)
        self._take(3 * count)
        gates_of: list[Tensor] = []

        def requests() -> Iterator[Request]:
            for gates, some in zip(samples, batches, strict=True):
                gates_of.append(gates)
                yield from ((gates, batch) for batch in some)

        answers = iter(self.objective.losses_and_gradients(requests()))
        self.forwards += count
        self.backwards += count
        found: list[tuple[float, Tensor]] = []
        for some in batches:
            part = list(itertools.islice(answers, len(some)))
            mean = _finite_mean([loss for loss, _ in part])
            if mean < self.best_loss and self.one_loss:
                self._remember_gates(gates_of[len(found)], mean)
            total = part[0][1]
            for _, gradient in part[1:]:
                total = total + gradient
            found.append((mean, total if len(part) == 1 else total / len(part)))
        return found

    def loss_and_gradient(self, gates: Tensor, batches: Sequence[int]) -> tuple[float, Tensor]:
        """Mean loss over some batches and its gradient with respect to the gates."""
        return self.losses_and_gradients([gates.detach()], [batches])[0]

    def switch_curvature(self, choices: Tensor) -> Tensor | None:
        """(N, K) second-order cost of switching each group away from ``choices``; None if unknown."""
        if self.curvature is None:
            return None if self.measured is None else self.measured.switches(choices)
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
        found = self.selection.losses(requests)
        losses = _finite(np.array(found)).reshape(len(allocations), len(batches))
        for choices, own in zip(allocations, losses, strict=True):
            self._remember(choices, float(own[0]))
        return losses

    def _remember(self, choices: np.ndarray, loss: float) -> None:
        """Keep the best feasible allocation, where one batch gives the loss.

        Of a monotone problem, only those that leave no budget that would buy something.
        """
        problem = self._problem
        if problem is None or loss >= self.best_loss or not self.one_loss:
            return
        if problem.is_feasible(choices) and (not problem.monotone or is_spent(problem, choices)):
            self.best_choices, self.best_loss = choices.copy(), loss

    def state(self) -> dict[str, Any]:
        """Counts, seconds and the best allocation, as plain tensors and numbers."""
        best = self.best_choices
        return {
            "seen": [None if best is None else torch.from_numpy(best.copy()), self.best_loss],
            "counter": [self.forwards, self.backwards],
            "seconds": self.seconds,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        best, self.best_loss = state["seen"]
        self.best_choices = None if best is None else best.numpy().copy()
        self.forwards, self.backwards = state["counter"]
        self._seconds_before = state["seconds"]

    def _remember_gates(self, gates: Tensor, loss: float) -> None:
        """As :meth:`_remember`; gates between the corners are no allocation."""
        largest, choices = gates.max(dim=1)
        if bool((largest == 1).all()):
            self._remember(choices.numpy(), loss)


def _finite_mean(losses: list[float]) -> float:
    if len(losses) == 1 and math.isfinite(losses[0]):
        return losses[0]
    return float(_finite(np.array(losses)).mean())


def _finite(losses: np.ndarray) -> np.ndarray:
    if not np.isfinite(losses).all():
        raise FloatingPointError(
            f"The objective returned {losses[~np.isfinite(losses)][0]}, but losses must be finite; check the "
            "model, the data and the arithmetic type."
        )
    return losses
