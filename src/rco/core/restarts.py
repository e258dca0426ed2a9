"""Local optima, and the search for better ones among their perturbations and crossings.

Each candidate of a search is refined (:mod:`rco.core.refine`). What is left of the allowance goes to restarts: a
local optimum is perturbed (a knapsack of its choices, of the predicted costs of switches, and of noise), or two are
crossed (a knapsack that prefers the choices of either, and keeps those of both), and the result is refined again.
The best local optima are kept.

Where gradients say little of the loss at other allocations, random moves find more. So where one batch gives the
loss, two more ways compete with restarts. A descent takes random moves from the best local optimum, guided by the
gradient, as long as some of them pay. After it come rounds of a walk of simulated annealing and restarts
(:mod:`rco.core.annealing_walk`): the one that gained more per evaluation gets the larger part of the next round.

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

from rco.core.annealing_walk import Cooling, Guide, walk
from rco.core.evaluator import Evaluator
from rco.core.knapsack import found_allocation
from rco.core.moves import spend
from rco.core.objective import one_hot
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
_TRIAL = 100  # random moves that show how well gradients predict
_TRUSTED = 0.5  # correlation of predicted and true changes from which on they do
_DESCENT_PER_GROUP, _SHORTEST_DESCENT = 0.25, 100  # moves after which a descent is judged
_PAYING = 0.05  # share of its moves that must lower the loss for a descent to go on
_REPEATED = 200  # moves in a row to known allocations after which a walk ends
# Evaluations of the first round of a walk and restarts, and the growth of the rounds.
_ROUND_PER_GROUP, _SHORTEST_ROUND, _LONGEST_ROUND, _GROWTH = 25, 500, 5000, 1.5
_LEAST_SHARE, _SHARE_STEP = 0.2, 0.3  # of a walk and of restarts in a round; how fast the shares change
# First temperature of a walk: hot in small problems, whose local optima differ most; colder by the number of groups
# in large ones, where a descent comes closer than a walk from anywhere. Last temperature.
_HOT, _COLD, _WARMTH_OF_GROUPS, _LAST = 0.5, 0.1, 25.0, 5e-4


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
        self.restarts = self.walks = self.rounds = 0
        self.trusted = True  # whether gradients predict what random moves do
        self.walk_share = _LEAST_SHARE  # of the next round
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

    def try_moves(self, allowance: float) -> None:
        """Random moves from the best local optimum, which show whether gradients are to be trusted."""
        guide = Guide(self.problem, self._slopes, most=1)
        self._walk(_TRIAL, self.evaluator.evaluations + allowance, None, guide)
        self.trusted = guide.correlation >= _TRUSTED
        self.walk_share = _LEAST_SHARE if self.trusted else 1.0 - _LEAST_SHARE

    def improve(self, allowance: float, patience: int | None = None) -> None:
        """Spend the allowance on descents, walks and restarts.

        With ``patience`` it ends after a round without a lower loss, and in any case when everything is known.
        """
        end = self.evaluator.evaluations + allowance
        if not self.evaluator.one_loss:
            self.restart(allowance, patience)
            return
        self._descend(end)
        while self._affords(4, end):
            before, best = self.evaluator.evaluations, self.found[0].loss
            self._round(end, patience)
            if self.evaluator.evaluations == before or (patience is not None and self.found[0].loss == best):
                return

    def _affords(self, evaluations: int, end: float) -> bool:
        return self.evaluator.evaluations + evaluations <= end and self.evaluator.in_time

    def _descend(self, end: float) -> None:
        """Guided random moves from the best local optimum, as long as enough of them pay."""
        moves = max(int(_DESCENT_PER_GROUP * self.problem.num_groups), _SHORTEST_DESCENT)
        while self._affords(4, end):
            if self._walk(moves, end, None) < _PAYING * moves:
                return

    def _round(self, end: float, patience: int | None) -> None:
        """A walk and restarts; what gained more per evaluation has a larger share next time."""
        groups = self.problem.num_groups
        length = min(max(_ROUND_PER_GROUP * groups, _SHORTEST_ROUND), _LONGEST_ROUND) * _GROWTH**self.rounds
        self.rounds += 1
        walk_first = self.walk_share > 0.5
        rates = {}
        for walks in (walk_first, not walk_first):
            before, best = self.evaluator.evaluations, self.found[0].loss
            if walks:
                warmth = min(max(_WARMTH_OF_GROUPS / groups, _COLD), _HOT)
                self._walk(int(self.walk_share * length), end, Cooling(warmth, _LAST / warmth))
            else:
                self.restart(min((1.0 - self.walk_share) * length, end - before), patience)
            spent = max(self.evaluator.evaluations - before, 1)
            rates[walks] = (best - self.found[0].loss) / spent
        step = _SHARE_STEP * float(np.sign(rates[True] - rates[False]))
        self.walk_share = min(max(self.walk_share + step, _LEAST_SHARE), 1.0 - _LEAST_SHARE)

    def _walk(self, moves: int, end: float, cooling: Cooling | None, guide: Guide | None = None) -> int:
        """A walk from the best local optimum, whose best allocation is refined; returns how many moves paid."""
        rng = generator(self.seed, _WALKS, self.walks)
        self.walks += 1
        began = self.evaluator.evaluations
        guide = guide or Guide(self.problem, lambda choices: self._slopes(choices, end))
        repeated = 0  # moves in a row to allocations whose loss is known

        def measure(moved: np.ndarray) -> float | None:
            nonlocal repeated
            if repeated > _REPEATED or not self._affords(1, end):
                return None
            before = self.evaluator.evaluations
            found = float(self._losses(moved)[0])
            repeated = repeated + 1 if self.evaluator.evaluations == before else 0
            return found

        def show(lowest: float) -> None:
            self._step(move_record(self.evaluator, self.evaluator.evaluations - began, moves, lowest))

        choices, loss = self.best
        best, best_loss, paid = walk(self.problem, choices, loss, measure, moves, rng, cooling, show, guide)
        if best_loss < loss:
            self._climb(best, np.array([best_loss]), end)
        return paid

    def _slopes(self, choices: np.ndarray, end: float = math.inf) -> np.ndarray | None:
        """The gradient at an allocation, if it is known or affordable."""
        gradient = self._known.gradient(choices)
        if gradient is None:
            if not self._affords(3, min(end, self.evaluator.evaluations + self.evaluator.left)):
                return None
            _, gradient = self.evaluator.loss_and_gradient(one_hot(choices, self.problem.num_options), [0])
            self._known.add_gradient(choices, gradient)
        return gradient.numpy()

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
            "rounds": self.rounds,
            "trusted": self.trusted,
            "walk share": self.walk_share,
            "known": self._known.state(),
            "found": [
                [torch.from_numpy(np.array(part)) for part in (o.choices, o.losses, o.predicted)]
                for o in self.found
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.restarts, self.walks, self.rounds = state["restarts"], state["walks"], state["rounds"]
        self.trusted, self.walk_share = state["trusted"], state["walk share"]
        self._known.load(state["known"])
        self.found = [_Optimum(*(part.numpy().copy() for part in parts)) for parts in state["found"]]
