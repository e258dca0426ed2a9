"""What follows the loop: choosing among candidates, spending what is left, and exchanges while they pay.

Nothing here can make a result worse: candidates are compared on the selection batches, and a move is kept only
if it lowers the loss there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.core import evaluation
from rco.core.knapsack import solve_mckp
from rco.core.problem import AllocationProblem
from rco.core.protocols import CurvedObjective, Objective, selection_objective
from rco.core.result import StepRecord

__all__ = [
    "Candidates",
    "Counter",
    "Refined",
    "SampleTracker",
    "layer_order",
    "refine",
    "spend",
    "uniform_allocation",
]

# How much more than predicted a switch is taken to cost, from trusting the prediction to hardly moving.
_DAMPINGS = (1.0, 2.0, 4.0, 8.0, 16.0)
# Moves that are predicted to pay most are tried first; more than this many are never ranked at once.
_MOVES_PER_SIDE = 512
# An exchange round ends after this many proposals in a row that did not pay.
_PATIENCE = 96


class Counter:
    """An objective whose forwards and backwards are counted."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.selection = selection_objective(objective)
        self.curvature = objective.curvature if isinstance(objective, CurvedObjective) else None
        self.forwards = 0
        self.backwards = 0

    def losses_and_gradients(
        self, samples: Sequence[tuple[Tensor, Sequence[int]]]
    ) -> list[tuple[float, Tensor]]:
        """For each (gates, batches): mean loss over the batches and its gradient with respect to the gates."""
        requests = [(gates, batch) for gates, batches in samples for batch in batches]
        answers = iter(evaluation.losses_and_gradients(self.objective, requests))
        self.forwards += len(requests)
        self.backwards += len(requests)
        found = []
        for gates, batches in samples:
            losses = []
            total = torch.zeros_like(gates)
            for loss, gradient in itertools.islice(answers, len(batches)):
                losses.append(loss)
                total += gradient
            mean = sum(losses) / len(losses)
            if not math.isfinite(mean):
                raise FloatingPointError(
                    f"The objective returned {mean}; check the model and the data, or its arithmetic type."
                )
            found.append((mean, total / len(losses)))
        return found

    def loss_and_gradient(self, gates: Tensor, batches: Sequence[int]) -> tuple[float, Tensor]:
        """Mean loss over some batches and its gradient with respect to the gates."""
        return self.losses_and_gradients([(gates.detach(), batches)])[0]

    def bend(self, choices: Tensor) -> Tensor | None:
        """(N, K) second-order cost of switching each group away from ``choices``, if the objective knows it."""
        if self.curvature is None:
            return None
        return self.curvature[torch.arange(len(choices)), choices]

    def selection_losses(self, choices: np.ndarray, num_options: int, batches: Sequence[int]) -> np.ndarray:
        """Loss of an allocation on each of the given selection batches, without gradient."""
        return self.many_selection_losses([choices], num_options, batches).reshape(-1)

    def many_selection_losses(
        self, allocations: Sequence[np.ndarray], num_options: int, batches: Sequence[int]
    ) -> np.ndarray:
        """(allocations, batches) losses on the selection split, without gradient."""
        gates = [
            torch.nn.functional.one_hot(torch.from_numpy(choices), num_options).double()
            for choices in allocations
        ]
        requests = [(each, batch) for each in gates for batch in batches]
        self.forwards += len(requests)
        found = evaluation.losses(self.selection, requests)
        return np.array(found).reshape(len(allocations), len(batches))


class SampleTracker:
    """Remembers the sample whose loss fell furthest below what its batches usually show."""

    def __init__(self, num_batches: int) -> None:
        self._mean = np.zeros(num_batches)
        self._seen = np.zeros(num_batches, dtype=np.int64)
        self.choices: np.ndarray | None = None
        self.loss = math.inf
        self._advantage = math.inf

    def see(self, choices: np.ndarray, batches: Sequence[int], loss: float) -> None:
        """Note a sample's loss on its batches."""
        index = np.asarray(batches)
        self._seen[index] += 1
        self._mean[index] += (loss - self._mean[index]) / self._seen[index]
        advantage = loss - float(self._mean[index].mean()) if len(self._mean) > 1 else loss
        if advantage < self._advantage:
            self._advantage = advantage
            self.choices = choices.copy()
        self.loss = min(self.loss, loss)

    def state(self) -> dict[str, Any]:
        """Plain tensors and numbers."""
        return {
            "mean": torch.from_numpy(self._mean.copy()),
            "seen": torch.from_numpy(self._seen.copy()),
            "choices": None if self.choices is None else torch.from_numpy(self.choices.copy()),
            "loss": self.loss,
            "advantage": self._advantage,
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self._mean = state["mean"].numpy().copy()
        self._seen = state["seen"].numpy().copy()
        self.choices = None if state["choices"] is None else state["choices"].numpy().copy()
        self.loss = state["loss"]
        self._advantage = state["advantage"]


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
    total = problem.unit_costs.sum(axis=0)
    total = np.where(problem.allowed, total, total.max() + 1)
    cheapest = total.argmin(axis=1)
    best, best_spent = cheapest, problem.units(cheapest)
    for option in range(problem.num_options):
        limit = problem.unit_costs.sum(axis=0)[:, option]
        under = problem.allowed & (total <= limit[:, None])
        dearest_under = np.where(under, total, total.min() - 1).argmax(axis=1)
        choices = np.where(
            problem.allowed[groups, option], option, np.where(under.any(axis=1), dearest_under, cheapest)
        )
        if problem.is_feasible(choices) and sum(problem.units(choices)) > sum(best_spent):
            best, best_spent = choices, problem.units(choices)
    if not problem.is_feasible(best):
        # Floors, or joint budgets that order the options differently: the cheapest allocation that is feasible.
        cheap = -problem.float_costs.sum(axis=0)
        best = np.asarray(solve_mckp(np.where(problem.allowed, cheap, -np.inf), problem).allocation)
    return np.asarray(best, dtype=np.int64)


class Candidates:
    """Allocations to choose from, each spent if the problem is monotone, compared on the selection batches."""

    def __init__(self, problem: AllocationProblem, counter: Counter) -> None:
        self.problem, self.counter = problem, counter
        self.choices: dict[str, np.ndarray] = {}
        self.losses: dict[str, float] = {}

    def add(self, name: str, choices: np.ndarray, values: Tensor) -> None:
        """Take an allocation; ``values`` say where left-over budget goes first."""
        if self.problem.monotone:
            choices = spend(self.problem, choices, values.numpy())
        self.choices[name] = choices

    def add_values(self, name: str, values: Tensor) -> None:
        """Take the exact knapsack of some values."""
        solution = solve_mckp(values.numpy(), self.problem)
        self.add(name, np.asarray(solution.allocation), values)

    def add_uniform(self) -> None:
        """Take the uniform assignment; what it leaves is spent in the order of the groups, one step at a time."""
        self.add("uniform", uniform_allocation(self.problem), torch.from_numpy(layer_order(self.problem)))

    def best(self) -> tuple[str, np.ndarray, float]:
        """Name, choices and selection loss of the best candidate; equal ones are evaluated once."""
        different = {choices.tobytes(): choices for choices in self.choices.values()}
        batches = range(self.counter.selection.num_batches)
        losses = self.counter.many_selection_losses(
            list(different.values()), self.problem.num_options, batches
        )
        means = {key: float(row.mean()) for key, row in zip(different, losses, strict=True)}
        self.losses = {name: means[choices.tobytes()] for name, choices in self.choices.items()}
        name = min(self.losses, key=lambda n: self.losses[n])
        return name, self.choices[name], self.losses[name]


@dataclass(frozen=True)
class Refined:
    """Where the exchanges ended."""

    choices: np.ndarray
    loss: float
    evaluations: int
    accepted: int


def refine(
    problem: AllocationProblem,
    counter: Counter,
    choices: np.ndarray,
    *,
    allowance: int,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Refined:
    """Improve an allocation: many switches at once while a model of the loss finds some that pay, then few.

    At the current allocation the gradient with respect to the gates, with the objective's curvature if it has one,
    predicts what every switch costs. First the exact knapsack of those predictions is tried, under growing damping;
    then single switches and exchanges between two groups, most promising first. A move is kept if it lowers the
    loss on the selection batches; it is given up as soon as a part of them says it does not. ``allowance`` counts
    passes over the selection batches.
    """
    climb = _Climb(problem, counter, choices, allowance, on_step)
    for propose in (climb.knapsacks, climb.exchanges):
        while climb.spent < allowance and climb.improve(propose):
            pass
    return Refined(climb.choices, float(climb.losses.mean()), int(climb.spent), climb.accepted)


class _Climb:
    """The allocation under refinement, and what it has cost so far."""

    def __init__(
        self,
        problem: AllocationProblem,
        counter: Counter,
        choices: np.ndarray,
        allowance: int,
        on_step: Callable[[StepRecord], None] | None,
    ) -> None:
        self.problem, self.counter, self.allowance, self.on_step = problem, counter, allowance, on_step
        self.batches = list(range(counter.selection.num_batches))
        self.choices = choices
        self.losses = counter.selection_losses(choices, problem.num_options, self.batches)
        self.spent = 1.0
        self.accepted = 0
        self._tried: set[bytes] = {choices.tobytes()}
        self._predicted: tuple[bytes, np.ndarray, np.ndarray] | None = None

    def predict(self) -> tuple[np.ndarray, np.ndarray]:
        """(N, K) first- and second-order cost of every switch at the current allocation."""
        key = self.choices.tobytes()
        if self._predicted is None or self._predicted[0] != key:
            current = torch.from_numpy(self.choices)
            gates = torch.nn.functional.one_hot(current, self.problem.num_options).double()
            count = min(self.counter.objective.num_batches, max(len(self.batches), 1))
            _, gradient = self.counter.loss_and_gradient(gates, range(count))
            self.spent += 3.0 * count / len(self.batches)  # a backward costs about two forwards
            linear = (gradient - gradient.gather(1, current[:, None])).numpy()
            bend = self.counter.bend(current)
            self._predicted = (key, linear, np.zeros_like(linear) if bend is None else bend.numpy())
        return self._predicted[1], self._predicted[2]

    def knapsacks(self) -> Iterator[np.ndarray]:
        """Best allocations under the predictions, bolder ones first."""
        linear, bend = self.predict()
        # Without curvature a fixed toll per switch takes its place.
        toll = np.full_like(linear, float(np.median(np.abs(linear))))
        toll[np.arange(len(toll)), self.choices] = 0.0
        for damping in _DAMPINGS:
            cost = linear + damping * (bend if bend.any() else toll)
            solution = solve_mckp(np.where(self.problem.allowed, -cost, -np.inf), self.problem)
            if solution.status == "infeasible":
                return
            found = np.asarray(solution.allocation)
            yield spend(self.problem, found, -cost) if self.problem.monotone else found

    def exchanges(self) -> Iterator[np.ndarray]:
        """Neighbours that differ in one or two groups, most promising first."""
        linear, bend = self.predict()
        yield from _proposals(self.problem, self.choices, linear + bend)

    def improve(self, propose: Callable[[], Iterator[np.ndarray]]) -> bool:
        """Take the first proposal that pays; False if none does."""
        failures = 0
        for proposal in propose():
            key = proposal.tobytes()
            if key in self._tried or not self.problem.is_feasible(proposal):
                continue
            if self.spent >= self.allowance or failures >= _PATIENCE:
                return False
            self._tried.add(key)
            losses = self._race(proposal)
            if losses is None:
                failures += 1
                continue
            self.choices, self.losses = proposal, losses
            self.accepted += 1
            if self.on_step is not None:
                self.on_step(_record(self.counter, int(self.spent), self.allowance, float(losses.mean())))
            return True  # the predictions were the old allocation's
        return False

    def _race(self, proposal: np.ndarray) -> np.ndarray | None:
        """Losses of a proposal that beats the current ones, or None as soon as it falls behind."""
        losses: list[float] = []
        total = len(self.batches)
        for end in sorted({max(1, total // 4), max(1, total // 2), total}):
            part = self.batches[len(losses) : end]
            losses.extend(self.counter.selection_losses(proposal, self.problem.num_options, part))
            self.spent += len(part) / total
            if not float(np.mean(losses)) < float(self.losses[:end].mean()):
                return None
        return np.array(losses)


def _record(counter: Counter, step: int, allowance: int, loss: float) -> StepRecord:
    return StepRecord(
        step=step,
        steps=allowance,
        loss=loss,
        best_loss=loss,
        forwards=counter.forwards,
        backwards=counter.backwards,
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
