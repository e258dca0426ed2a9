"""What follows the loop: choosing among candidates, spending what is left, and exchanges while they pay.

Nothing here can make a result worse: candidates are compared on the selection batches, and a move is kept only
if it lowers the loss there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.core.evaluation import Evaluator, OutOfAllowance, one_hot
from rco.core.knapsack import found_allocation, knapsack
from rco.core.problem import AllocationProblem
from rco.core.result import StepRecord

__all__ = [
    "Candidates",
    "Refined",
    "SampleTracker",
    "layer_order",
    "refine",
    "spend",
    "uniform_allocation",
]

# How much more than predicted a switch is taken to cost, from trusting the prediction to hardly moving.
_DAMPINGS = (1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
# Moves that are predicted to pay most are tried first; more than this many are never ranked at once.
_MOVES_PER_SIDE = 512
_HORIZON = 32  # samples that the moving average of losses looks back on
# An exchange round ends after this many proposals in a row that did not pay.
_PATIENCE = 96


class SampleTracker:
    """The best sample so far, with the difficulty of the batches it was measured on taken out.

    Samples are measured on different batches, some of which are harder than others. How much harder is learned
    from the samples themselves: the mean distance of a batch's losses from the moving average of all losses. A
    batch that was never visited counts as average.
    """

    def __init__(self, num_batches: int) -> None:
        self._excess = np.zeros(num_batches)  # sums of a batch's losses above the moving average
        self._visits = np.zeros(num_batches, dtype=np.int64)
        self._average, self._count = 0.0, 0
        self._batches: list[int] = []  # those of the best sample, and its loss there
        self._measured = math.inf
        self.choices: np.ndarray | None = None
        self.loss = math.inf

    def _difficulty(self, batches: Sequence[int]) -> float:
        if len(self._visits) == 1:
            return 0.0  # every sample was measured on the same batch
        index = np.asarray(batches)
        return float((self._excess[index] / np.maximum(self._visits[index], 1)).mean())

    def see(self, choices: np.ndarray, batches: Sequence[int], loss: float) -> None:
        """Note a sample's loss on its batches."""
        # Both sides are judged by what is known of their batches now.
        best = self._measured - self._difficulty(self._batches) if self._batches else math.inf
        if loss - self._difficulty(batches) < best:
            self.choices, self._batches, self._measured = choices.copy(), list(batches), loss
        if self._count:
            index = np.asarray(batches)
            np.add.at(self._excess, index, loss - self._average)
            np.add.at(self._visits, index, 1)
        self._count += 1
        self._average += (loss - self._average) / min(self._count, _HORIZON)
        self.loss = min(self.loss, loss)

    def state(self) -> dict[str, Any]:
        """Plain tensors and numbers."""
        return {
            "excess": torch.from_numpy(self._excess.copy()),
            "visits": torch.from_numpy(self._visits.copy()),
            "average": self._average,
            "count": self._count,
            "batches": list(self._batches),
            "measured": self._measured,
            "choices": None if self.choices is None else torch.from_numpy(self.choices.copy()),
            "loss": self.loss,
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self._excess, self._visits = state["excess"].numpy().copy(), state["visits"].numpy().copy()
        self._average, self._count = state["average"], state["count"]
        self._batches, self._measured = list(state["batches"]), state["measured"]
        self.choices = None if state["choices"] is None else state["choices"].numpy().copy()
        self.loss = state["loss"]


def _room(problem: AllocationProblem, choices: np.ndarray) -> np.ndarray:
    """Unspent units per budget."""
    units = problem.units(choices)
    room = [b - u for b, u in zip(problem.unit_budgets, units, strict=True)]
    return np.array(room, dtype=problem.unit_costs.dtype)


def _changes(problem: AllocationProblem, choices: np.ndarray) -> np.ndarray:
    """(q, N, K) change in units when one group switches to an option."""
    groups = np.arange(problem.num_groups)
    return np.asarray(problem.unit_costs - problem.unit_costs[:, groups, choices][:, :, None])


def _fits(problem: AllocationProblem, change: np.ndarray, room: np.ndarray) -> np.ndarray:
    """(N, K) whether a single switch stays within every budget."""
    if problem.block_index is None:
        return np.asarray((change <= room[:, None, None]).all(axis=0))
    return np.asarray(change[0] <= room[problem.block_index][:, None])


def spend(problem: AllocationProblem, choices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Switch groups to costlier options, best value first, until nothing more is affordable.

    Only right where costlier options are never worse. Among the affordable switches the one that gains most
    value is taken; with joint budgets, costlier means no cheaper under any and costlier under one.
    """
    choices = choices.copy()
    groups = np.arange(problem.num_groups)
    while True:
        change = _changes(problem, choices)
        costlier = (change >= 0).all(axis=0) & (change > 0).any(axis=0)
        possible = costlier & problem.allowed & _fits(problem, change, _room(problem, choices))
        if not possible.any():
            return choices
        gain = np.where(possible, values - values[groups, choices][:, None], -np.inf)
        if not np.isfinite(gain).any():
            return choices
        group, option = np.unravel_index(int(gain.argmax()), gain.shape)
        choices[group] = option


def layer_order(problem: AllocationProblem) -> np.ndarray:
    """(N, K) values under which :func:`spend` upgrades the first groups first, one option at a time."""
    order = np.arange(problem.num_groups)[:, None]
    step = np.arange(problem.num_options)[None, :]
    return -(order + problem.num_groups * step).astype(np.float64)


def uniform_allocation(problem: AllocationProblem) -> np.ndarray:
    """The same option for every group where the budget and the locks let it, the dearest such option.

    Groups that may not use it take their dearest allowed option that costs no more. If no single option fits,
    every group takes its cheapest.
    """
    groups = np.arange(problem.num_groups)
    costs = problem.relative_costs.sum(axis=0)  # joint budgets count alike, each by its range
    total = np.where(problem.allowed, costs, np.inf)
    cheapest = total.argmin(axis=1)
    best, best_spent = cheapest, total[groups, cheapest].sum()
    for option in range(problem.num_options):
        under = problem.allowed & (total <= costs[:, option][:, None])
        dearest_under = np.where(under, total, -np.inf).argmax(axis=1)
        choices = np.where(
            problem.allowed[groups, option], option, np.where(under.any(axis=1), dearest_under, cheapest)
        )
        spent = total[groups, choices].sum()
        if spent > best_spent and problem.is_feasible(choices):
            best, best_spent = choices, spent
    if not problem.is_feasible(best):
        # Floors, or joint budgets that order the options differently: the cheapest allocation that is feasible.
        best = knapsack(np.where(problem.allowed, -costs, -np.inf), problem)
    return np.asarray(best, dtype=np.int64)


class Candidates:
    """Allocations to choose from, each spent if the problem is monotone, compared on the selection batches."""

    def __init__(self, problem: AllocationProblem, evaluator: Evaluator) -> None:
        self.problem, self.evaluator = problem, evaluator
        self.choices: dict[str, np.ndarray] = {}
        self.losses: dict[str, float] = {}

    def add(self, name: str, choices: np.ndarray, values: Tensor) -> None:
        """Take an allocation; ``values`` say where left-over budget goes first."""
        if self.problem.monotone:
            choices = spend(self.problem, choices, values.numpy())
        self.choices[name] = choices

    def add_values(self, name: str, values: Tensor) -> None:
        """Take the exact knapsack of some values; nothing if its time limit passes before it has an allocation."""
        found = found_allocation(values.numpy(), self.problem)
        if found is not None:
            self.add(name, found, values)

    def add_exactly(self, name: str, values: Tensor) -> None:
        """Take the exact knapsack of some values as it is, and beside it what it is with its budget spent."""
        found = found_allocation(values.numpy(), self.problem)
        if found is None:
            return
        self.choices[name] = found
        if self.problem.monotone:
            self.add(f"{name}, spent", found, values)

    def best(self) -> tuple[str, np.ndarray, np.ndarray]:
        """Name, choices and selection losses of the best candidate; equal ones are evaluated once."""
        different = {choices.tobytes(): choices for choices in self.choices.values()}
        found = self.evaluator.many_selection_losses(
            list(different.values()), self.problem.num_options, self.evaluator.selection_batches
        )
        losses = dict(zip(different, found, strict=True))
        self.losses = {name: float(losses[c.tobytes()].mean()) for name, c in self.choices.items()}
        name = min(self.losses, key=lambda n: self.losses[n])
        return name, self.choices[name], losses[self.choices[name].tobytes()]


@dataclass(frozen=True)
class Refined:
    """Where the exchanges ended."""

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
    """Improve an allocation: many switches at once while a model of the loss finds some that pay, then few.

    The gradient with respect to the gates, with the objective's curvature if it has one, predicts what every switch
    costs. First the exact knapsack of those predictions is tried, under growing damping, and predicted anew where
    it paid; then single switches and exchanges between two groups, most promising first. A move is kept if it
    lowers the loss on the selection batches; it is given up as soon as a part of them says it does not.

    Args:
        problem: Costs and budget.
        evaluator: The objective.
        choices: Where to begin.
        losses: Of that allocation on every selection batch.
        allowance: Most evaluations to spend.
        on_step: Called with a record after every move that is kept.
    """
    climb = _Climb(problem, evaluator, choices, losses, allowance, on_step)
    # The clock may run out between asking whether a move is affordable and evaluating it.
    with contextlib.suppress(OutOfAllowance):
        for propose in (climb.knapsacks, climb.exchanges):
            while climb.improve(propose):
                pass
    return Refined(climb.choices, float(climb.losses.mean()), climb.spent, climb.accepted)


class _Climb:
    """The allocation under refinement, and what it has cost so far."""

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
        """Whether that much is left of the allowance, and any time."""
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
            bend = self.evaluator.bend(current)
            self._predicted = (key, linear, np.zeros_like(linear) if bend is None else bend.numpy())
        return self._predicted[1], self._predicted[2]

    def knapsacks(self) -> Iterator[np.ndarray]:
        """Best allocations under the predictions, bolder ones first."""
        predicted = self.predict()
        if predicted is None:
            return
        linear, bend = predicted
        # Without curvature a fixed toll per switch takes its place.
        toll = np.full_like(linear, float(np.median(np.abs(linear))))
        toll[np.arange(len(toll)), self.choices] = 0.0
        for damping in _DAMPINGS:
            cost = linear + damping * (bend if bend.any() else toll)
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
            return True  # the predictions were the old allocation's
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
    """Feasible neighbours by one switch or two; ``predicted`` (N, K) is what a switch adds to the loss."""
    groups = np.arange(problem.num_groups)
    change = _changes(problem, choices)
    room = _room(problem, choices)
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

    fits_alone = _fits(problem, change, room)[group, option]
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
