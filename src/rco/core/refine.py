"""Refinement of an allocation by moves that lower the loss on the selection batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rco.core.evaluator import Evaluator, OutOfAllowance
from rco.core.knapsack import found_allocation
from rco.core.moves import cost_changes, fitting_switches, spend, unspent
from rco.core.objective import one_hot
from rco.core.problem import AllocationProblem
from rco.core.result import StepRecord

__all__ = ["Refined", "refine"]

# Factors on the predicted cost of a switch, from trusting the prediction to hardly moving.
_DAMPINGS = (1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
# Moves that are predicted to pay most are tried first; more than this many are never ranked at once.
_MOVES_PER_SIDE = 512
# An exchange round ends after this many proposals in a row that did not pay.
_PATIENCE = 96


@dataclass(frozen=True)
class Refined:
    """Result of a refinement."""

    choices: np.ndarray
    loss: float
    evaluations: int
    accepted: int


def refine(
    problem: AllocationProblem,
    evaluator: Evaluator,
    choices: np.ndarray,
    losses: np.ndarray,
    *,
    allowance: float,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Refined:
    """Improve an allocation: first by many switches at once, then by single switches and exchanges.

    The gradient with respect to the gates, with the objective's curvature if it has one, predicts the cost of
    every switch. First the exact knapsack of those predictions is tried, under growing damping, with new
    predictions after each success; then single switches and exchanges between two groups, most promising first. A
    move is kept if it lowers the loss on the selection batches; it is dropped as soon as some of them show that it
    does not.

    Args:
        problem: Costs and budget.
        evaluator: The objective.
        choices: The starting allocation.
        losses: Losses of that allocation on every selection batch.
        allowance: Most evaluations to spend.
        on_step: Called with a record after every move that is kept.
    """
    climb = _Climb(problem, evaluator, choices, losses, allowance, on_step)
    # Time may run out between the check that a move is affordable and its evaluation.
    with contextlib.suppress(OutOfAllowance):
        for propose in (climb.knapsacks, climb.exchanges):
            while climb.improve(propose):
                pass
    return Refined(climb.choices, float(climb.losses.mean()), climb.spent, climb.accepted)


class _Climb:
    """The allocation under refinement, and the evaluations spent on it."""

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        choices: np.ndarray,
        losses: np.ndarray,
        allowance: float,
        on_step: Callable[[StepRecord], None] | None,
    ) -> None:
        self.problem, self.evaluator, self.on_step = problem, evaluator, on_step
        self.batches = list(evaluator.selection_batches)
        self.choices, self.losses = choices, losses
        self.allowance, self._before = allowance, evaluator.evaluations
        self.accepted = 0
        self._tried: set[bytes] = {choices.tobytes()}
        self._predicted: tuple[bytes, np.ndarray, np.ndarray] | None = None

    @property
    def spent(self) -> int:
        """Evaluations so far."""
        return self.evaluator.evaluations - self._before

    def affords(self, evaluations: int) -> bool:
        """Whether that many evaluations, and time, are left."""
        return self.spent + evaluations <= self.allowance and self.evaluator.in_time

    def predict(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(N, K) first- and second-order cost of every switch at the current allocation, if that is affordable."""
        key = self.choices.tobytes()
        if self._predicted is None or self._predicted[0] != key:
            count = min(self.evaluator.objective.num_batches, len(self.batches))
            if not self.affords(3 * count):
                return None
            current = torch.from_numpy(self.choices)
            gates = one_hot(self.choices, self.problem.num_options)
            _, gradient = self.evaluator.loss_and_gradient(gates, range(count))
            linear = (gradient - gradient.gather(1, current[:, None])).numpy()
            curved = self.evaluator.switch_curvature(current)
            self._predicted = (key, linear, np.zeros_like(linear) if curved is None else curved.numpy())
        return self._predicted[1], self._predicted[2]

    def knapsacks(self) -> Iterator[np.ndarray]:
        """Best allocations under the predictions, bolder ones first."""
        predicted = self.predict()
        if predicted is None:
            return
        linear, curved = predicted
        # Without curvature a fixed cost per switch replaces it.
        toll = np.full_like(linear, float(np.median(np.abs(linear))))
        toll[np.arange(len(toll)), self.choices] = 0.0
        for damping in _DAMPINGS:
            cost = linear + damping * (curved if curved.any() else toll)
            found = found_allocation(np.where(self.problem.allowed, -cost, -np.inf), self.problem)
            if found is None:
                return
            yield spend(self.problem, found, -cost) if self.problem.monotone else found

    def exchanges(self) -> Iterator[np.ndarray]:
        """Neighbours that differ in one or two groups, most promising first."""
        predicted = self.predict()
        if predicted is not None:
            yield from _proposals(self.problem, self.choices, predicted[0] + predicted[1])

    def improve(self, propose: Callable[[], Iterator[np.ndarray]]) -> bool:
        """Take the first proposal that pays; False if none does."""
        failures = 0
        for proposal in propose():
            key = proposal.tobytes()
            if key in self._tried or not self.problem.is_feasible(proposal):
                continue
            if failures >= _PATIENCE:
                return False
            self._tried.add(key)
            if not self.affords(len(self.batches)):
                return False
            losses = self._race(proposal)
            if losses is None:
                failures += 1
                continue
            self.choices, self.losses = proposal, losses
            self.accepted += 1
            if self.on_step is not None:
                self.on_step(_record(self.evaluator, self.spent, self.allowance, float(losses.mean())))
            return True  # predictions for the old allocation no longer hold
        return False

    def _race(self, proposal: np.ndarray) -> np.ndarray | None:
        """Losses of a proposal that beats the current ones, or None as soon as it falls behind."""
        losses: list[float] = []
        total = len(self.batches)
        for end in sorted({max(1, total // 4), max(1, total // 2), total}):
            part = self.batches[len(losses) : end]
            losses.extend(self.evaluator.selection_losses(proposal, self.problem.num_options, part))
            if not float(np.mean(losses)) < float(self.losses[:end].mean()):
                return None
        return np.array(losses)


def _record(evaluator: Evaluator, step: int, allowance: float, loss: float) -> StepRecord:
    return StepRecord(
        step=step,
        steps=int(min(allowance, 10**9)),
        loss=loss,
        best_loss=loss,
        forwards=evaluator.forwards,
        backwards=evaluator.backwards,
        seconds=evaluator.seconds,
        phase="refine",
    )


def _proposals(problem: AllocationProblem, choices: np.ndarray, predicted: np.ndarray) -> list[np.ndarray]:
    """Feasible neighbours by one switch or two; ``predicted`` (N, K) is the loss that a switch adds."""
    groups = np.arange(problem.num_groups)
    change, room = cost_changes(problem, choices), unspent(problem, choices)
    possible = problem.allowed.copy()
    possible[groups, choices] = False
    cells = np.flatnonzero(possible.ravel())
    if not cells.size:
        return []
    flat = predicted.ravel()[cells]
    keep = np.argsort(flat, kind="stable")[:_MOVES_PER_SIDE]
    # Cheaper options are needed as the other half of an exchange even when they rank low on their own.
    freeing = (change.reshape(change.shape[0], -1)[:, cells] < 0).any(axis=0)
    cheaper = np.flatnonzero(freeing)
    cheaper = cheaper[np.argsort(flat[cheaper], kind="stable")[:_MOVES_PER_SIDE]]
    selected = cells[np.unique(np.concatenate([keep, cheaper]))]
    group, option = selected // problem.num_options, selected % problem.num_options
    score = predicted.ravel()[selected]
    delta = change.reshape(change.shape[0], -1)[:, selected]  # (q, M)

    fits_alone = fitting_switches(problem, choices)[group, option]
    pairs = (group[:, None] < group[None, :]) & _pair_fits(problem, delta, group, room)
    first, second = np.nonzero(pairs)
    total = np.concatenate([score[fits_alone], score[first] + score[second]])
    singles = np.flatnonzero(fits_alone)
    order = np.argsort(total, kind="stable")[: 2 * _PATIENCE]
    proposals = []
    for position in order.tolist():
        neighbour = choices.copy()
        if position < len(singles):
            moves = [singles[position]]
        else:
            moves = [first[position - len(singles)], second[position - len(singles)]]
        for move in moves:
            neighbour[group[move]] = option[move]
        proposals.append(neighbour)
    return proposals


def _pair_fits(
    problem: AllocationProblem, delta: np.ndarray, group: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """(M, M) whether two switches together stay within every budget."""
    if problem.block_index is None:
        fits = np.ones((delta.shape[1], delta.shape[1]), dtype=bool)
        for j in range(len(room)):
            fits &= (delta[j][:, None] + delta[j][None, :]) <= room[j]
        return fits
    block = problem.block_index[group]
    alone = delta[0] <= room[block]
    together = (delta[0][:, None] + delta[0][None, :]) <= room[block][:, None]
    return np.asarray(np.where(block[:, None] == block[None, :], together, alone[:, None] & alone[None, :]))
