"""Greedy search on the true loss, per unit of cost: from the cheapest options up, or from the dearest down.

Each step takes the switch to a neighbouring option that gains most (or loses least) per cost. Measurements are
lazy: a switch is measured again only when its last measurement ranks it first. If the gain of a switch only shrinks
as others are taken, that is exactly the greedy choice; ``lazy=False`` measures all of them before every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from rco.core.choice import Candidates
from rco.core.knapsack import knapsack
from rco.core.moves import Ladder, cost_changes, fitting_switches, unspent
from rco.core.result import SearchResult
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["Greedy", "GreedyDown"]

# Assumed lazy measurements per step when dividing an allowance, beside the first one of every group.
_MEASUREMENTS_PER_STEP = 3


class _Climb(SearchState):
    """Choices so far, and the known gains of the switches from here."""

    saved = ("choices", "batches", "loss", "gain", "measured_at", "over")
    direction = 1
    start = "cheapest"

    def __init__(self, run: SearchRun, settings: Greedy) -> None:
        super().__init__(run)
        self.settings = settings
        self.ladder = Ladder(self.problem)
        self.ladder.require_order(settings.name)
        self.choices = self.ladder.start(self.start, run.scores().numpy())
        self.groups = np.arange(self.problem.num_groups)
        self.batches: list[int] | None = None
        self.loss = np.inf
        shape = (self.problem.num_groups, self.problem.num_options)
        self.gain = np.full(shape, np.nan)  # decrease of the loss, when it was last measured
        self.measured_at = np.full(shape, -1, dtype=np.int64)
        self.over = False

    def cost(self, step: int) -> int:
        """Evaluations of a step: the first measures every switch; for later ones the number is unknown."""
        return 1 if step else (1 + int(self.moves().sum())) * (self.settings.batches or 1)

    def moves(self) -> np.ndarray:
        """(N, K) the switches that may be taken now."""
        return np.asarray(
            self.ladder.neighbours(self.choices, 1) & fitting_switches(self.problem, self.choices)
        )

    def price(self) -> np.ndarray:
        """(N, K) positive cost that a gain is measured against."""
        size = self.ladder.size
        change = np.abs(size - size[self.groups, self.choices][:, None])
        return np.asarray(np.maximum(change, np.finfo(float).tiny))

    def refuses(self, gain: float) -> bool:
        """Whether the best switch is not worth taking."""
        return not self.problem.monotone and gain <= 0

    def best_move(self, step: int) -> tuple[int, int]:
        """The switch that gains most per cost, measured at this step."""
        assert self.batches is not None
        moves, price = self.moves(), self.price()
        while True:
            # Unmeasured switches come first.
            rate = np.where(np.isnan(self.gain), np.inf, self.gain / price)
            rate = np.where(moves, rate, -np.inf)
            stale = moves & (self.measured_at < step)
            if not self.settings.lazy and stale.any():
                rate = np.where(stale, np.inf, rate)
            group, option = (int(k) for k in np.unravel_index(int(rate.argmax()), rate.shape))
            if not stale[group, option]:
                return group, option
            switched = self.choices.copy()
            switched[group] = option
            self.gain[group, option] = self.loss - float(self.run.losses(switched, self.batches).mean())
            self.measured_at[group, option] = step

    def take(self, group: int, option: int) -> None:
        """Switch a group and discard the measurements of its other switches."""
        self.loss -= float(self.gain[group, option])
        self.choices = self.choices.copy()
        self.choices[group] = option
        self.gain[group], self.measured_at[group] = np.nan, -1

    def batches_affordable(self) -> int | None:
        """Batches per measurement: the setting, or as many as the allowance likely holds for a whole run."""
        if self.settings.batches is not None or not np.isfinite(self.evaluator.left):
            return self.settings.batches
        expected = self.problem.num_groups + _MEASUREMENTS_PER_STEP * self.expected_steps()
        return max(1, int(self.evaluator.left // max(expected, 1)))

    def expected_steps(self) -> int:
        """Steps that a run takes if rungs cost the same."""
        low, high = self.problem.unit_range
        filled = [
            (b - lo) / max(h - lo, 1) for b, lo, h in zip(self.problem.unit_budgets, low, high, strict=True)
        ]
        share = min(max(float(np.mean(filled)), 0.0), 1.0)
        return int(self.ladder.top.sum() * (share if self.direction > 0 else 1.0 - share))

    def propose(self, candidates: Candidates) -> None:
        self.run.notes["batches_used"] = 0 if self.batches is None else len(self.batches)
        values = self.run.scores() + torch.from_numpy(np.nan_to_num(self.gain))
        choices = self.choices
        self.run.notes.pop("replaced_by", None)
        if not self.problem.is_feasible(choices):  # minimum counts can end the descent too early
            self.run.notes["replaced_by"] = "knapsack of the scores and the measured gains"
            choices = knapsack(values, self.problem)
        candidates.add("greedy", choices, values)


class _Descent(_Climb):
    direction = -1
    start = "dearest"

    def moves(self) -> np.ndarray:
        moves = self.ladder.neighbours(self.choices, -1) & self.ladder.relieves(self.choices)
        if self.problem.min_counts is not None:
            moves &= self.problem.min_counts.keeping_switches(self.choices)
        return np.asarray(moves)

    def price(self) -> np.ndarray:
        """Cost that a switch frees under exceeded budgets, up to the excess."""
        excess = np.maximum(-unspent(self.problem, self.choices), 0)
        freed = np.maximum(-cost_changes(self.problem, self.choices), 0)
        low, high = self.problem.unit_range
        width = np.array([float(max(h - lo, 1)) for lo, h in zip(low, high, strict=True)])
        if self.problem.block_index is None:
            useful = np.minimum(freed, excess[:, None, None]).astype(np.float64) / width[:, None, None]
        else:
            blocks = self.problem.block_index
            useful = np.minimum(freed, excess[blocks][None, :, None]).astype(np.float64) / width.sum()
        return np.asarray(np.maximum(useful.sum(axis=0), np.finfo(float).tiny))

    def refuses(self, gain: float) -> bool:
        return False  # the budget must be met, whatever the loss

    def propose(self, candidates: Candidates) -> None:
        walked = self.choices, self.gain
        self.choices, self.gain = self.choices.copy(), self.gain.copy()
        self._finish_unmeasured()
        super().propose(candidates)
        self.choices, self.gain = walked  # so that the search may go on

    def _finish_unmeasured(self) -> None:
        """Finish the descent after the allowance ran out: by the last measurements, unmeasured switches last."""
        self.run.notes["unmeasured_steps"] = 0
        while (moves := self.moves()).any():
            known = moves & ~np.isnan(self.gain)
            rate = np.where(known, self.gain / self.price(), -np.inf)
            if not known.any():
                rate = np.where(moves, -self.price(), -np.inf)
            group, option = np.unravel_index(int(rate.argmax()), rate.shape)
            self.choices[group] = option
            self.gain[group] = np.nan
            self.run.notes["unmeasured_steps"] += 1


@dataclass(frozen=True, kw_only=True)
class Greedy(BudgetedSearch):
    """From the cheapest options up: the switch that gains most per cost, while one fits.

    Args:
        batches: Batches per measurement; None: all, or as many as the allowance likely holds.
        lazy: Measure a switch again only when it would be taken.
    """

    name: ClassVar[str] = "greedy"

    batches: int | None = None
    lazy: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(batches=1)

    def walk(self, run: SearchRun) -> _Climb:
        """The initial state: the cheapest options."""
        return _Climb(run, self)

    def loop(self, run: SearchRun) -> SearchResult:
        """Take the best switch until none is left or worth taking."""
        state = run.resume(self.walk(run))
        planned = int(state.ladder.top.sum()) if state.moves().any() else run.step
        with run.allowance():
            for step in run.steps(planned, state.cost):
                if state.over or not state.moves().any():
                    break
                if state.batches is None:
                    state.batches = run.some_batches(state.batches_affordable())
                if not np.isfinite(state.loss):
                    state.loss = float(run.losses(state.choices, state.batches).mean())
                group, option = state.best_move(step)
                if state.refuses(float(state.gain[group, option])):
                    state.over = True
                else:
                    state.take(group, option)
                run.record(state.loss)
        return run.choose()


@dataclass(frozen=True, kw_only=True)
class GreedyDown(Greedy):
    """From the dearest options down: the switch that loses least per cost freed, until the budget is kept."""

    name: ClassVar[str] = "greedy-down"

    def walk(self, run: SearchRun) -> _Climb:
        """The initial state: the dearest options."""
        return _Descent(run, self)
