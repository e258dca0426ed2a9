"""Simulated annealing over switches of single groups and exchanges between two, on the true loss.

The moves and the rule that keeps them are those of :mod:`rco.core.annealing_walk`. No gradient is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rco.core.annealing_walk import Cooling, random_move
from rco.core.choice import Candidates
from rco.core.knapsack import knapsack
from rco.core.moves import uniform_allocation
from rco.core.result import SearchResult
from rco.core.sampling import generator
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["Annealing"]


class _Walk(SearchState):
    """The allocation and the best one seen, with their losses on the batches of the walk."""

    saved = ("choices", "loss", "best", "best_loss", "cooling")
    candidates = 1

    def __init__(self, run: SearchRun, cooling: Cooling) -> None:
        super().__init__(run)
        self.choices = (
            uniform_allocation(self.problem) if run.prior is None else knapsack(run.prior, self.problem)
        )
        self.loss = math.inf
        self.best, self.best_loss = self.choices, math.inf
        self.cooling = cooling

    def take(self, choices: np.ndarray, loss: float) -> None:
        """Move, and remember the best."""
        self.choices, self.loss = choices, loss
        if loss < self.best_loss:
            self.best, self.best_loss = choices, loss

    def propose(self, candidates: Candidates) -> None:
        candidates.add("best", self.best, self.run.scores())


@dataclass(frozen=True, kw_only=True)
class Annealing(BudgetedSearch):
    """Simulated annealing over feasible allocations.

    Args:
        steps: Steps of ``moves`` moves; None: as many as the allowance holds.
        moves: Moves per step, each of which evaluates the loss once per batch.
        batches: Batches that every move is measured on; None: all.
        cooling: The last temperature as a share of the first.
        warmth: The first temperature in units of the mean rise of the loss over the first step's moves.
    """

    name: ClassVar[str] = "annealing"
    meets_exactly: ClassVar[bool] = True

    steps: int | None = 100
    moves: int = 50
    batches: int | None = 4
    cooling: float = 1e-3
    warmth: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(steps=0, moves=1, batches=1)
        self.require_end("steps")
        if not 0 < self.cooling <= 1 or not self.warmth > 0:
            raise ValueError(
                f"cooling must lie in (0, 1] and warmth be positive, got {self.cooling} and {self.warmth}."
            )

    def loop(self, run: SearchRun) -> SearchResult:
        """Move, and keep better allocations always, worse ones by chance."""
        batches = run.some_batches(self.batches)
        state = run.resume(_Walk(run, Cooling(self.warmth, self.cooling, self.moves)))
        cost = self.moves * len(batches)
        planned = run.planned(self.steps, cost)
        with run.allowance():
            for step in run.steps(planned, cost=lambda step: len(batches) if step else 2 * len(batches)):
                rng = generator(self.seed, step)
                if not np.isfinite(state.loss):
                    state.take(state.choices, float(run.losses(state.choices, batches).mean()))
                tried = 0
                for move in range(self.moves):
                    moved = random_move(run.problem, state.choices, rng)
                    if moved is None or run.evaluator.left < len(batches):
                        break
                    tried += 1
                    loss = float(run.losses(moved, batches).mean())
                    progress = (step + move / self.moves) / max(planned, 1)
                    by_time = run.evaluator.seconds / run.evaluator.max_seconds
                    if state.cooling.keeps(loss - state.loss, max(progress, by_time), rng):
                        state.take(moved, loss)
                run.record(state.loss)
                if not tried:
                    break
        return run.choose()
