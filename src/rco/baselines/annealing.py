"""Simulated annealing over switches of single groups and exchanges between two, on the true loss.

A move switches a random group to a random option. Where that breaks the budget a second group, drawn from those
that repair it, is switched as well. A move that raises the loss by d is kept with probability exp(-d / T); the
temperature T falls geometrically from the mean rise of the first moves. No gradient is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rco.core.choice import Candidates
from rco.core.knapsack import knapsack
from rco.core.moves import fitting_switches, spend, uniform_allocation
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.sampling import generator
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["Annealing", "random_move"]

_DRAWS = 16  # of a move before it counts as impossible


def random_move(
    problem: AllocationProblem, choices: np.ndarray, rng: np.random.Generator
) -> np.ndarray | None:
    """A feasible neighbour by one or two switches; None if no draw gave one."""
    columns = np.arange(problem.num_options)
    for _ in range(_DRAWS):
        group = int(rng.integers(problem.num_groups))
        options = columns[problem.allowed[group] & (columns != choices[group])]
        if not options.size:
            continue
        moved = choices.copy()
        moved[group] = options[rng.integers(options.size)]
        if not problem.is_feasible(moved):
            repairs = fitting_switches(problem, moved) & problem.allowed
            repairs[group] = False
            repairs[np.arange(problem.num_groups), moved] = False
            cells = np.flatnonzero(repairs)
            if not cells.size:
                continue
            partner, option = divmod(int(cells[rng.integers(cells.size)]), problem.num_options)
            moved[partner] = option
            if not problem.is_feasible(moved):  # several blocks or budgets: one switch may not be enough
                continue
        if problem.monotone:
            moved = spend(problem, moved, rng.random((problem.num_groups, problem.num_options)))
            if (moved == choices).all():
                continue
        return moved
    return None


class _Walk(SearchState):
    """The allocation and the best one seen, with their losses on the batches of the walk."""

    saved = ("choices", "loss", "best", "best_loss", "first_temperature")
    candidates = 1

    def __init__(self, run: SearchRun) -> None:
        super().__init__(run)
        self.choices = (
            uniform_allocation(self.problem) if run.prior is None else knapsack(run.prior, self.problem)
        )
        self.loss = math.inf
        self.best, self.best_loss = self.choices, math.inf
        self.first_temperature = 0.0

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
        state = run.resume(_Walk(run))
        cost = self.moves * len(batches)
        planned = run.planned(self.steps, cost)
        with run.allowance():
            for step in run.steps(planned, cost=lambda step: len(batches) if step else 2 * len(batches)):
                rng = generator(self.seed, step)
                if not np.isfinite(state.loss):
                    state.take(state.choices, float(run.losses(state.choices, batches).mean()))
                rises: list[float] = []
                for move in range(self.moves):
                    moved = random_move(run.problem, state.choices, rng)
                    if moved is None or run.evaluator.left < len(batches):
                        break
                    loss = float(run.losses(moved, batches).mean())
                    rise = loss - state.loss
                    rises.append(max(rise, 0.0))
                    progress = (step + move / self.moves) / max(planned, 1)
                    by_time = run.evaluator.seconds / run.evaluator.max_seconds
                    warmth = state.first_temperature or self.warmth * float(np.mean(rises))
                    temperature = warmth * self.cooling ** max(progress, by_time)
                    if rise <= 0 or (temperature > 0 and rng.random() < math.exp(-rise / temperature)):
                        state.take(moved, loss)
                if not state.first_temperature and any(rises):
                    state.first_temperature = self.warmth * float(np.mean([r for r in rises if r > 0]))
                run.record(state.loss)
                if not rises:
                    break
        return run.choose()
