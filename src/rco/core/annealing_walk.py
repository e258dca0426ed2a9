"""Simulated annealing: random feasible moves, and the rule by which a worse allocation is kept.

A move switches a random group to a random option. Where that breaks the budget a second group, drawn from those
that repair it, is switched as well. A move that raises the loss by d is kept with probability exp(-d / T); the
temperature T falls geometrically from a share of the mean rise of the first moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rco.core.moves import fitting_switches, spend
from rco.core.problem import AllocationProblem

__all__ = ["Cooling", "random_move", "walk"]

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


class Cooling:
    """The temperature of a walk, and whether it keeps a move.

    Args:
        warmth: First temperature, in units of the mean rise of the loss over the first moves.
        last: Last temperature as a share of the first.
        measured: Moves that the mean rise is taken over.

    Attributes:
        rises, rise: Number and sum of the rises measured so far; zero rises do not count.
    """

    def __init__(self, warmth: float = 0.5, last: float = 1e-3, measured: int = 50) -> None:
        self.warmth, self.last, self.measured = warmth, last, measured
        self.moves = self.rises = 0
        self.rise = 0.0

    def keeps(self, rise: float, progress: float, rng: np.random.Generator) -> bool:
        """Whether a move that changes the loss by ``rise`` is kept after that share of the walk."""
        if self.moves < self.measured or not self.rises:
            self.moves += 1
            if rise > 0:
                self.rises, self.rise = self.rises + 1, self.rise + rise
        if rise <= 0:
            return True
        temperature = self.warmth * self.rise / self.rises * self.last**progress
        return bool(rng.random() < math.exp(-rise / temperature))

    def state(self) -> dict[str, float]:
        """The measured rises."""
        return {"moves": self.moves, "rises": self.rises, "rise": self.rise}

    def load(self, state: dict[str, float]) -> None:
        """The inverse of :meth:`state`."""
        self.moves, self.rises, self.rise = int(state["moves"]), int(state["rises"]), state["rise"]


def walk(
    problem: AllocationProblem,
    choices: np.ndarray,
    loss: float,
    measure: Callable[[np.ndarray], float | None],
    moves: int,
    rng: np.random.Generator,
    cooling: Cooling,
    on_best: Callable[[float], None] | None = None,
) -> tuple[np.ndarray, float]:
    """The best allocation of a walk whose temperature falls over so many moves, and its loss.

    Args:
        problem: Costs and budget.
        choices: Start of the walk.
        loss: Its loss.
        measure: The loss of an allocation; None ends the walk.
        moves: Most moves.
        rng: Draws the moves.
        cooling: The temperature.
        on_best: Called with every loss that is lower than all before.
    """
    best, best_loss = choices, loss
    for move in range(moves):
        moved = random_move(problem, choices, rng)
        new = None if moved is None else measure(moved)
        if moved is None or new is None:
            break
        if cooling.keeps(new - loss, move / moves, rng):
            choices, loss = moved, new
            if loss < best_loss:
                best, best_loss = choices, loss
                if on_best is not None:
                    on_best(loss)
    return best, best_loss
