"""Simulated annealing: random feasible moves, and the rule by which a worse allocation is kept.

A move switches a random group to a random option. Where that breaks the budget a second group, drawn from those
that repair it, is switched as well. A move that raises the loss by d is kept with probability exp(-d / T); the
temperature T falls geometrically from a share of the mean rise of the first moves.

Where the loss has a gradient it guides the walk: of a few random moves the one with the lowest predicted loss is
tried. That helps as soon as predictions are better than chance, and costs little where they are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rco.core.moves import fitting_switches, spend
from rco.core.problem import AllocationProblem

__all__ = ["Cooling", "Guide", "random_move", "walk"]

_DRAWS = 16  # of a move before it counts as impossible
_RENEWED = 30  # moves that are kept between two gradients of a guided walk


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


class Guide:
    """Random moves of a walk, chosen by a gradient: of some drawn, the one with the lowest predicted loss.

    The gradient is taken where the walk is, and again after it has kept some moves.

    Args:
        problem: Costs and budget.
        gradient: The gradient (N, K) with respect to the gates at an allocation; None if it is not affordable.
        most: Most moves drawn at once: one, two, four and so on up to this, at random.

    Attributes:
        slopes: The last gradient.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        gradient: Callable[[np.ndarray], np.ndarray | None],
        most: int = 8,
    ) -> None:
        self.problem, self._gradient = problem, gradient
        self._sizes = [2**power for power in range(most.bit_length())]
        self.slopes: np.ndarray | None = None
        self._kept = _RENEWED
        self._predicted: list[float] = []
        self._changes: list[float] = []

    def draw(self, choices: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """A move from an allocation; None if no draw gave one."""
        if self._kept >= _RENEWED:
            self.slopes, self._kept = self._gradient(choices), 0
        count = self._sizes[rng.integers(len(self._sizes))]
        drawn = [random_move(self.problem, choices, rng) for _ in range(count)]
        moves = [move for move in drawn if move is not None]
        if self.slopes is None or not moves:
            return moves[0] if moves else None
        predicted = [self._change(choices, move) for move in moves]
        best = int(np.argmin(predicted))
        self._predicted.append(predicted[best])
        return moves[best]

    def _change(self, choices: np.ndarray, moved: np.ndarray) -> float:
        assert self.slopes is not None
        groups = np.flatnonzero(moved != choices)
        return float((self.slopes[groups, moved[groups]] - self.slopes[groups, choices[groups]]).sum())

    def learn(self, change: float, kept: bool) -> None:
        """Take note of the true change of the last move, and of whether it was kept."""
        self._kept += kept
        if self.slopes is not None:
            self._changes.append(change)

    @property
    def correlation(self) -> float:
        """Correlation of predicted and true changes over all moves; 1 where either does not vary."""
        count = len(self._changes)
        pairs = np.array([self._predicted[:count], self._changes])
        if count < 2 or not pairs.std(axis=1).all():
            return 1.0
        return float(np.corrcoef(pairs)[0, 1])


def walk(
    problem: AllocationProblem,
    choices: np.ndarray,
    loss: float,
    measure: Callable[[np.ndarray], float | None],
    moves: int,
    rng: np.random.Generator,
    cooling: Cooling | None,
    on_best: Callable[[float], None] | None = None,
    guide: Guide | None = None,
) -> tuple[np.ndarray, float, int]:
    """The best allocation of a walk whose temperature falls over so many moves, its loss, and how many moves paid.

    Args:
        problem: Costs and budget.
        choices: Start of the walk.
        loss: Its loss.
        measure: The loss of an allocation; None ends the walk.
        moves: Most moves.
        rng: Draws the moves.
        cooling: The temperature; None: no move that raises the loss is kept.
        on_best: Called with every loss that is lower than all before.
        guide: Draws the moves; None: they are random.
    """
    best, best_loss, paid = choices, loss, 0
    for move in range(moves):
        moved = random_move(problem, choices, rng) if guide is None else guide.draw(choices, rng)
        new = None if moved is None else measure(moved)
        if moved is None or new is None:
            break
        rise = new - loss
        kept = rise <= 0 if cooling is None else cooling.keeps(rise, move / moves, rng)
        if guide is not None:
            guide.learn(rise, kept)
        if kept:
            choices, loss = moved, new
            paid += rise < 0
            if loss < best_loss:
                best, best_loss = choices, loss
                if on_best is not None:
                    on_best(loss)
    return best, best_loss, paid
