"""Local optima, and the search for better ones among their perturbations and crossings.

Each candidate of a search is refined (:mod:`rco.core.refine`). What is left of the allowance goes to restarts: a
local optimum is perturbed (a knapsack of its choices, of the predicted costs of switches, and of noise), or two are
crossed (a knapsack that prefers the choices of either, and keeps those of both), and the result is refined again.
The best local optima are kept.

Where gradients say little of the loss at other allocations, random moves find more. So where one batch gives the
loss, the refinement of the starting point is compared with a walk of simulated annealing of as many evaluations
(:mod:`rco.core.annealing_walk`). If the walk finds the lower loss, longer and longer walks replace most restarts.

Everything drawn, and every length, depends on the seed and on what was found before, so that a larger allowance
continues where a smaller one ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rco.core.annealing_walk import Cooling, walk
from rco.core.evaluator import Evaluator
from rco.core.knapsack import found_allocation
from rco.core.moves import spend
from rco.core.problem import AllocationProblem
from rco.core.refine import Climb, KnownLosses, move_record
from rco.core.result import StepRecord
from rco.core.sampling import generator

__all__ = ["LocalOptima"]

_KEPT = 8  # local optima
_CROSSED = 0.4  # share of the restarts that cross two local optima
_LARGEST_KICK = 0.33  # share of the groups that a perturbation switches at most
_PATIENCE, _MOVES = 12, 96  # of the climbs from a restart
_STREAM, _WALKS = 7, 8  # of the seed's random numbers
# Moves of the walk that is compared with a refinement, at least; of the first walk after it; and the growth.
_SHORTEST_TRIAL = 100
_MARGIN = 0.05  # by which the walk must lower the loss more than the refinement did
_WALK_PER_GROUP, _SHORTEST_WALK, _LONGEST_WALK, _GROWTH = 20, 400, 4000, 1.5
_RESTARTS_PER_WALK = 0.25  # evaluations of the restarts after a walk, as a share of its own


@dataclass(frozen=True, eq=False)
class _Optimum:
    choices: np.ndarray
    losses: np.ndarray  # on the selection batches
    predicted: np.ndarray  # (N, K) cost of every switch; zeros if unknown

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


class LocalOptima:
    """The best local optima found so far.

    Args:
        problem: Costs and budget.
        evaluator: The objective.
        seed: Seed of the perturbations and crossings.
        on_step: Called with a record after every move that is kept.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        seed: int,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.problem, self.evaluator, self.seed, self.on_step = problem, evaluator, seed, on_step
        self.found: list[_Optimum] = []  # best first
        self.restarts = self.walks = 0
        self.walks_win = False
        self._known = KnownLosses()

    @property
    def best(self) -> tuple[np.ndarray, float]:
        """Choices and loss of the best one."""
        return self.found[0].choices, self.found[0].loss

    def climb(self, starts: Iterable[tuple[np.ndarray, np.ndarray]], allowance: float) -> None:
        """Refine some allocations, best first, within the allowance; each comes with its selection losses."""
        end = self.evaluator.evaluations + allowance
        first = not self.evaluator.one_loss and not self.found
        for choices, losses in sorted(starts, key=lambda start: float(start[1].mean())):
            if any((choices == optimum.choices).all() for optimum in self.found):
                continue
            self._climb(choices, losses, end, thorough=first)
            first = False

    def compare_with_walk(
        self, choices: np.ndarray, losses: np.ndarray, moves: int, allowance: float
    ) -> None:
        """Decide whether walks are worth more than gradients: a walk from where the best refinement began."""
        refined, start = self.found[0].loss, float(losses.mean())
        moves = max(moves, _SHORTEST_TRIAL)
        _, loss = self._walk(choices, start, moves, self.evaluator.evaluations + allowance)
        self.walks_win = start - loss > (1.0 + _MARGIN) * (start - refined)

    def improve(self, allowance: float, patience: int | None = None) -> None:
        """Spend the allowance on restarts; where walks are worth more, on them and some restarts."""
        end = self.evaluator.evaluations + allowance
        moves = float(min(max(_WALK_PER_GROUP * self.problem.num_groups, _SHORTEST_WALK), _LONGEST_WALK))
        while self.walks_win and self.evaluator.evaluations + 4 <= end and self.evaluator.in_time:
            before, best = self.evaluator.evaluations, self.found[0].loss
            self._walk(*self.best, int(moves), end)
            some = min(_RESTARTS_PER_WALK * moves, end - self.evaluator.evaluations)
            self.restart(some, patience)
            moves *= _GROWTH
            if self.evaluator.evaluations == before:
                return  # everything is known
            if patience is not None and self.found[0].loss == best:
                return
        if not self.walks_win:
            self.restart(allowance, patience)

    def _walk(self, choices: np.ndarray, loss: float, moves: int, end: float) -> tuple[np.ndarray, float]:
        """The best allocation of a walk whose temperature falls over so many moves; it is refined and kept."""
        rng = generator(self.seed, _WALKS, self.walks)
        self.walks += 1
        before = self.evaluator.evaluations

        def measure(moved: np.ndarray) -> float | None:
            if self.evaluator.evaluations >= end or not self.evaluator.in_time:
                return None
            return float(self._losses(moved)[0])

        def show(lowest: float) -> None:
            self._step(move_record(self.evaluator, self.evaluator.evaluations - before, moves, lowest))

        best, best_loss = walk(self.problem, choices, loss, measure, moves, rng, Cooling(), show)
        self._climb(best, np.array([best_loss]), end)
        return best, best_loss

    def restart(self, allowance: float, patience: int | None = None) -> None:
        """Perturb, cross and refine until the allowance is spent or ``patience`` restarts in a row have failed."""
        end = self.evaluator.evaluations + allowance
        one = len(self.evaluator.selection_batches)
        failures = 0
        idle = 0  # restarts in a row that evaluated nothing: everything near is known
        while self.found and self.evaluator.evaluations + 4 * one <= end and self.evaluator.in_time:
            start = self._next_start(idle)
            self.restarts += 1
            before, best = self.evaluator.evaluations, self.found[0].loss
            if start is not None:
                losses = self._losses(start)
                self._climb(start, losses, end)
            idle = idle + 1 if self.evaluator.evaluations == before else 0
            failures = 0 if self.found[0].loss < best else failures + 1
            if idle > 4 * _KEPT or (patience is not None and failures >= patience):
                return

    def _losses(self, choices: np.ndarray) -> np.ndarray:
        known = self._known.get(choices) if self.evaluator.one_loss else None
        if known is not None:
            return np.array([known])
        batches = self.evaluator.selection_batches
        losses = self.evaluator.selection_losses(choices, self.problem.num_options, batches)
        if self.evaluator.one_loss:
            self._known.add(choices, float(losses[0]))
        return losses

    def _climb(self, choices: np.ndarray, losses: np.ndarray, end: float, thorough: bool = False) -> None:
        settings: dict[str, Any] = {} if thorough else {"patience": _PATIENCE, "moves": _MOVES}
        # A measured curvature misleads on some problems, and its absence on others: climbs take turns.
        settings["curved"] = self.evaluator.curvature is not None or self.restarts % 2 == 0
        climb = Climb(
            self.problem,
            self.evaluator,
            choices,
            losses,
            end - self.evaluator.evaluations,
            self._step,
            known=self._known,
            **settings,
        )
        climb.run()
        if any((climb.choices == optimum.choices).all() for optimum in self.found):
            return
        predicted = climb.predicted
        shape = (self.problem.num_groups, self.problem.num_options)
        self.found.append(
            _Optimum(climb.choices, climb.losses, np.zeros(shape) if predicted is None else predicted)
        )
        self.found.sort(key=lambda optimum: optimum.loss)
        del self.found[_KEPT:]

    def _step(self, record: StepRecord) -> None:
        """Pass on the moves that lead to a new best."""
        if self.on_step is not None and (not self.found or record.loss < self.found[0].loss):
            self.on_step(record)

    def _next_start(self, idle: int) -> np.ndarray | None:
        rng = generator(self.seed, _STREAM, self.restarts)
        crossed = rng.random() < _CROSSED
        if crossed and len(self.found) >= 3:
            first, second = rng.choice(len(self.found), 2, replace=False)
            values = self._crossing(self.found[first].choices, self.found[second].choices, rng)
        else:
            rank = min(int(rng.exponential(len(self.found) / 3)), len(self.found) - 1)
            values = self._perturbation(self.found[rank], rng, idle)
        found = found_allocation(np.where(self.problem.allowed, values, -np.inf), self.problem)
        if found is None:  # joint budgets: out of time
            return None
        return spend(self.problem, found, values) if self.problem.monotone else found

    def _perturbation(self, optimum: _Optimum, rng: np.random.Generator, idle: int) -> np.ndarray:
        """Noise, part of the predicted costs, and as much preference for staying as keeps most groups."""
        groups, options = optimum.predicted.shape
        rows = np.arange(groups)
        most = max(3.0, _LARGEST_KICK * groups) * 2.0**idle  # further away where everything near is known
        switched = math.exp(rng.uniform(math.log(2.0), math.log(most)))
        sizes = np.abs(optimum.predicted[optimum.predicted != 0])
        unit = float(np.median(sizes)) if sizes.size else 1.0
        values = rng.gumbel(size=(groups, options)) - rng.uniform(0.0, 0.5) * optimum.predicted / unit
        values[~self.problem.allowed] = -np.inf
        stay = values[rows, optimum.choices]
        values[rows, optimum.choices] = -np.inf
        gain = np.sort(values.max(axis=1) - stay)[::-1]
        bonus = max(float(gain[min(int(switched), groups - 1)]), 0.0)
        values[rows, optimum.choices] = stay + bonus
        return values

    def _crossing(self, first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Preference for the choices of both, then at random for either's, then for anything else."""
        rows = np.arange(self.problem.num_groups)
        values = 0.5 * rng.random((self.problem.num_groups, self.problem.num_options)) - 10.0
        values[rows, first] = rng.random(len(rows))
        values[rows, second] = rng.random(len(rows))
        same = first == second
        values[rows[same], first[same]] = 2.0
        return values

    # -------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """The local optima and the number of restarts, as plain tensors and numbers."""
        return {
            "restarts": self.restarts,
            "walks": self.walks,
            "walks win": self.walks_win,
            "known": self._known.state(),
            "found": [
                [torch.from_numpy(np.array(part)) for part in (o.choices, o.losses, o.predicted)]
                for o in self.found
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.restarts, self.walks, self.walks_win = state["restarts"], state["walks"], state["walks win"]
        self._known.load(state["known"])
        self.found = [_Optimum(*(part.numpy().copy() for part in parts)) for parts in state["found"]]
