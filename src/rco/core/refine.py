"""Refinement of an allocation by moves that lower the loss on the selection batches."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.core.evaluator import Evaluator, OutOfAllowance
from rco.core.knapsack import found_allocation
from rco.core.moves import cost_changes, fitting_switches, is_spent, spend, unspent
from rco.core.objective import one_hot
from rco.core.problem import AllocationProblem
from rco.core.result import StepRecord

__all__ = ["Climb", "KnownLosses", "Refined", "move_record", "refine"]

# Factors on the predicted cost of a switch, from trusting the prediction to hardly moving.
_DAMPINGS = (1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
# Without curvature a fixed cost per switch takes its place: the first factor on it, and the most doublings.
_FIRST_DAMPING, _DOUBLINGS = 0.25, 12
# Moves that are predicted to pay most are tried first; more than this many are never ranked at once.
_MOVES_PER_SIDE = 512
# An exchange round ends after this many proposals in a row that did not pay.
_PATIENCE = 96
# Exchanges whose losses are computed together where one batch gives the loss.
_TOGETHER = 4
_HASH = 16  # bytes
_MOST_NUMBERS = 2**18  # in all remembered gradients together


@dataclass(frozen=True)
class Refined:
    """Result of a refinement."""

    choices: np.ndarray
    loss: float
    evaluations: int
    accepted: int


class KnownLosses:
    """Losses and gradients of evaluated allocations, where one batch gives the loss: none is evaluated twice.

    Gradients are kept only while they take little memory.
    """

    def __init__(self) -> None:
        self._losses: dict[bytes, float] = {}
        self._gradients: dict[bytes, Tensor] = {}

    @staticmethod
    def _key(choices: np.ndarray) -> bytes:
        return hashlib.blake2b(choices.tobytes(), digest_size=_HASH).digest()

    def get(self, choices: np.ndarray) -> float | None:
        """The loss of an allocation, if known."""
        return self._losses.get(self._key(choices))

    def add(self, choices: np.ndarray, loss: float) -> None:
        """Record a loss; the first one of an allocation stays."""
        self._losses.setdefault(self._key(choices), loss)

    def gradient(self, choices: np.ndarray) -> Tensor | None:
        """The gradient (N, K) with respect to the gates at an allocation, if known."""
        return self._gradients.get(self._key(choices))

    def add_gradient(self, choices: np.ndarray, gradient: Tensor) -> None:
        """Record a gradient, unless too many are known."""
        if (len(self._gradients) + 1) * gradient.numel() <= _MOST_NUMBERS:
            self._gradients[self._key(choices)] = gradient

    def state(self) -> dict[str, Any]:
        """Losses, gradients and the hashes of their allocations."""
        return {
            "keys": _joined(self._losses),
            "losses": torch.tensor(list(self._losses.values()), dtype=torch.float64),
            "gradient keys": _joined(self._gradients),
            "gradients": torch.stack(list(self._gradients.values())) if self._gradients else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        keys = [row.tobytes() for row in state["keys"].numpy()]
        self._losses = dict(zip(keys, state["losses"].tolist(), strict=True))
        keys = [row.tobytes() for row in state["gradient keys"].numpy()]
        self._gradients = dict(zip(keys, state["gradients"], strict=True)) if keys else {}


def _joined(keys: Iterable[bytes]) -> Tensor:
    """Hashes as rows of bytes."""
    return torch.from_numpy(np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, _HASH).copy())


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
    climb = Climb(problem, evaluator, choices, losses, allowance, on_step)
    climb.run()
    return Refined(climb.choices, climb.loss, climb.spent, climb.accepted)


class Climb:
    """The allocation under refinement, and the evaluations spent on it.

    Args:
        problem, evaluator, choices, losses, allowance, on_step: As for :func:`refine`.
        patience: Exchanges in a row that may fail before the climb ends.
        moves: Most switches that are combined to exchanges.
        known: Losses of allocations evaluated before; None: each climb remembers its own.
        curved: Add the curvature to predictions, if there is any.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        choices: np.ndarray,
        losses: np.ndarray,
        allowance: float,
        on_step: Callable[[StepRecord], None] | None = None,
        *,
        patience: int = _PATIENCE,
        moves: int = _MOVES_PER_SIDE,
        known: KnownLosses | None = None,
        curved: bool = True,
    ) -> None:
        self.problem, self.evaluator, self.on_step = problem, evaluator, on_step
        self.batches = list(evaluator.selection_batches)
        self.choices, self.losses, self.loss = choices, losses, float(losses.mean())
        self.allowance, self._before = allowance, evaluator.evaluations
        self.patience, self.moves, self.curved = patience, moves, curved
        self.accepted = 0
        self._known = known if evaluator.one_loss else None
        self._tried: set[bytes] = {choices.tobytes()}
        self._predicted: tuple[bytes, np.ndarray, np.ndarray] | None = None
        self._damping = _FIRST_DAMPING
        if self._known is not None:
            self._known.add(choices, float(losses[0]))

    def run(self) -> None:
        """Climb until no move pays or the allowance ends."""
        # Time may run out between the check that a move is affordable and its evaluation.
        with contextlib.suppress(OutOfAllowance):
            while self._improve(self._chains(), together=1):
                pass
            while self._improve(self._exchanges(), together=_TOGETHER if self.evaluator.one_loss else 1):
                pass

    @property
    def spent(self) -> int:
        """Evaluations so far."""
        return self.evaluator.evaluations - self._before

    @property
    def predicted(self) -> np.ndarray | None:
        """(N, K) predicted cost of every switch at the current allocation, if it was computed."""
        if self._predicted is None or self._predicted[0] != self.choices.tobytes():
            return None
        return np.asarray(self._predicted[1] + self._predicted[2])

    def _affords(self, evaluations: int) -> bool:
        return self.spent + evaluations <= self.allowance and self.evaluator.in_time

    def _predict(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(N, K) first- and second-order cost of every switch at the current allocation, if that is affordable."""
        key = self.choices.tobytes()
        if self._predicted is None or self._predicted[0] != key:
            count = min(self.evaluator.objective.num_batches, len(self.batches))
            if not self._affords(3 * count):
                return None
            current = torch.from_numpy(self.choices)
            gates = one_hot(self.choices, self.problem.num_options)
            gradient = None if self._known is None else self._known.gradient(self.choices)
            if gradient is None:
                _, gradient = self.evaluator.loss_and_gradient(gates, range(count))
                if self.evaluator.measured is not None:
                    self.evaluator.measured.add(current[None], gradient[None])
                if self._known is not None:
                    self._known.add_gradient(self.choices, gradient)
            linear = (gradient - gradient.gather(1, current[:, None])).numpy()
            curved = self.evaluator.switch_curvature(current) if self.curved else None
            self._predicted = (key, linear, np.zeros_like(linear) if curved is None else curved.numpy())
        return self._predicted[1], self._predicted[2]

    def _chains(self) -> Iterator[np.ndarray]:
        """Best allocations under the predictions, bolder ones first: chains of any number of switches."""
        predicted = self._predict()
        if predicted is None:
            return
        linear, curved = predicted
        if self.evaluator.curvature is not None and self.curved:
            yield from (self._chain(linear + d * curved) for d in _DAMPINGS)
            return
        # Without a known curvature each switch has a fixed cost in addition. It follows the last one that paid.
        linear = linear + curved
        unit = float(np.median(np.abs(linear[linear != 0]))) if linear.any() else 0.0
        toll = np.full_like(linear, unit)
        toll[np.arange(len(toll)), self.choices] = 0.0
        damping = self._damping / 1.5
        for _ in range(_DOUBLINGS):
            self._damping = damping
            chain = self._chain(linear + damping * toll)
            yield chain
            if (chain != self.choices).sum() <= 2:
                return
            damping *= 2.0

    def _chain(self, cost: np.ndarray) -> np.ndarray:
        found = found_allocation(np.where(self.problem.allowed, -cost, -np.inf), self.problem)
        if found is None:
            return self.choices
        return spend(self.problem, found, -cost) if self.problem.monotone else found

    def _exchanges(self) -> Iterator[np.ndarray]:
        """Neighbours that differ in one or two groups, most promising first."""
        predicted = self._predict()
        if predicted is not None:
            cost = predicted[0] + predicted[1]
            yield from _proposals(self.problem, self.choices, cost, self.moves, 2 * self.patience)

    def _improve(self, proposals: Iterator[np.ndarray], together: int) -> bool:
        """Take the first proposal that pays, the best of those evaluated together; False if none does."""
        failures = 0
        waiting: list[np.ndarray] = []
        for proposal in proposals:
            key = proposal.tobytes()
            if key in self._tried or not self.problem.is_feasible(proposal):
                continue
            if failures + len(waiting) >= self.patience or not self._affords(len(self.batches)):
                break
            self._tried.add(key)
            waiting.append(proposal)
            if len(waiting) == together:
                if self._take_best(waiting):
                    return True
                failures, waiting = failures + together, []
        return self._take_best(waiting)

    def _take_best(self, proposals: list[np.ndarray]) -> bool:
        found = [(p, losses) for p, losses in self._measured(proposals) if losses is not None]
        best = min(
            ((float(losses.mean()), p, losses) for p, losses in found), key=lambda e: e[0], default=None
        )
        if best is None or not best[0] < self.loss:
            return False
        self.loss, self.choices, self.losses = best
        self.accepted += 1
        if self.on_step is not None:
            self.on_step(move_record(self.evaluator, self.spent, self.allowance, self.loss))
        return True  # predictions for the old allocation no longer hold

    def _measured(self, proposals: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Proposals with their losses; None where it fell behind before all batches were evaluated."""
        if not self.evaluator.one_loss:
            affordable = [p for p in proposals if self._affords(len(self.batches))]
            return [(p, self._race(p)) for p in affordable]
        known = self._known if self._known is not None else KnownLosses()
        new = [p for p in proposals if known.get(p) is None]
        while new and not self._affords(len(new)):
            new.pop()
        if new:
            found = self.evaluator.many_selection_losses(new, self.problem.num_options, self.batches)
            for proposal, (loss,) in zip(new, found, strict=True):
                known.add(proposal, float(loss))
        losses = [(p, known.get(p)) for p in proposals]
        return [(p, None if loss is None else np.array([loss])) for p, loss in losses]

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


def move_record(evaluator: Evaluator, step: int, allowance: float, loss: float) -> StepRecord:
    """The record of a move that was kept, after so many evaluations of an allowance."""
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


def _proposals(
    problem: AllocationProblem, choices: np.ndarray, predicted: np.ndarray, moves: int, most: int
) -> Iterator[np.ndarray]:
    """Feasible neighbours by one switch or two; ``predicted`` (N, K) is the loss that a switch adds.

    If the problem is monotone, budget that a switch frees is spent again.
    """
    groups = np.arange(problem.num_groups)
    change, room = cost_changes(problem, choices), unspent(problem, choices)
    possible = problem.allowed.copy()
    possible[groups, choices] = False
    cells = np.flatnonzero(possible.ravel())
    if not cells.size:
        return
    flat = predicted.ravel()[cells]
    keep = np.argsort(flat, kind="stable")[:moves]
    # Cheaper options are needed as the other half of an exchange even when they rank low on their own.
    cheaper = np.flatnonzero((change.reshape(change.shape[0], -1)[:, cells] < 0).any(axis=0))
    cheaper = cheaper[np.argsort(flat[cheaper], kind="stable")[:moves]]
    selected = cells[np.unique(np.concatenate([keep, cheaper]))]
    group, option = selected // problem.num_options, selected % problem.num_options
    score = predicted.ravel()[selected]
    delta = change.reshape(change.shape[0], -1)[:, selected]  # (q, M)

    fits_alone = fitting_switches(problem, choices)[group, option]
    pairs = (group[:, None] < group[None, :]) & _pair_fits(problem, delta, group, room)
    first, second = np.nonzero(pairs)
    total = np.concatenate([score[fits_alone], score[first] + score[second]])
    singles = np.flatnonzero(fits_alone)
    if len(total) > most:
        best = np.argpartition(total, most)[:most]
        order = best[np.lexsort((best, total[best]))]
    else:
        order = np.argsort(total, kind="stable")
    # Costlier options alone free no budget: from an allocation without leftover budget they lead to another one.
    frees = np.asarray((delta < 0).any(axis=0))
    has_leftover = problem.monotone and not is_spent(problem, choices)
    for position in order.tolist():
        neighbour = choices.copy()
        if position < len(singles):
            switched = [singles[position]]
        else:
            switched = [first[position - len(singles)], second[position - len(singles)]]
        for move in switched:
            neighbour[group[move]] = option[move]
        if problem.monotone and (has_leftover or frees[switched].any()):
            neighbour = spend(problem, neighbour, -predicted)
        yield neighbour


def _pair_fits(
    problem: AllocationProblem, delta: np.ndarray, group: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """(M, M) whether two switches together meet every budget."""
    meets = np.equal if problem.exact else np.less_equal
    if problem.block_index is None:
        fits = np.ones((delta.shape[1], delta.shape[1]), dtype=bool)
        for j in range(len(room)):
            fits &= np.asarray(meets(delta[j][:, None] + delta[j][None, :], room[j]), dtype=bool)
        return fits
    block = problem.block_index[group]
    alone = meets(delta[0], room[block])
    together = meets(delta[0][:, None] + delta[0][None, :], room[block][:, None])
    return np.asarray(np.where(block[:, None] == block[None, :], together, alone[:, None] & alone[None, :]))
