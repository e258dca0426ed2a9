"""EvoPress: evolution whose mutations switch levels between groups and so keep the budget.

A mutation raises one group to its next dearer option and lowers others until the total fits again, or lowers one
and raises another. Between groups of equal cost that is the published operator, a swap of two levels; a group of
different cost is paid for by as many others as needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rco.baselines.evolution import Evolution, Population
from rco.core.knapsack import knapsack
from rco.core.moves import Ladder, cost_changes, fill_upwards, fitting_switches, uniform_allocation, unspent
from rco.core.problem import AllocationProblem
from rco.core.searcher import SearchRun

__all__ = ["EvoPress", "LevelSwitch"]


class LevelSwitch:
    """The mutation operator.

    Args:
        problem: Costs and budgets.
        partners: Candidates for the other half of a switch. "any": all groups that help; "size": those that
            balance it exactly, as long as there are any, which is the published rule for groups of equal size and
            hardly changes the share of each size.
    """

    def __init__(self, problem: AllocationProblem, partners: Literal["any", "size"] = "any") -> None:
        self.problem, self.partners = problem, partners
        self.ladder = Ladder(problem)

    def __call__(self, choices: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """A feasible neighbour of a feasible allocation, or None if the draw failed."""
        raises = bool(rng.integers(2))
        mutant = self._raise_first(choices, rng) if raises else self._lower_first(choices, rng)
        if mutant is not None and self.problem.monotone:
            mutant = self._use_up(choices, mutant, rng)
        counts = self.problem.min_counts
        return None if mutant is not None and counts is not None and not counts.met(mutant) else mutant

    def _raise_first(self, choices: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        raised = self._draw(self.ladder.neighbours(choices, 1), rng)
        if raised is None:
            return None
        mutant = choices.copy()
        mutant[raised[0]] = raised[1]
        owed = cost_changes(self.problem, choices)[:, raised[0], raised[1]]
        while self._over(mutant):
            possible = self.ladder.neighbours(mutant, -1) & self.ladder.relieves(mutant)
            possible[raised[0]] = False
            lowered = self._draw(self._balancing(possible, cost_changes(self.problem, mutant), -owed), rng)
            if lowered is None:
                return None
            mutant[lowered[0]] = lowered[1]
        return mutant

    def _lower_first(self, choices: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        lowered = self._draw(self.ladder.neighbours(choices, -1), rng)
        if lowered is None:
            return None
        mutant = choices.copy()
        mutant[lowered[0]] = lowered[1]
        if self._over(mutant):  # with joint budgets a cheaper option may still cost more under one of them
            return None
        if not self.problem.monotone and rng.integers(2):
            return mutant  # where dearer may be worse, spending less is a neighbour too
        freed = cost_changes(self.problem, choices)[:, lowered[0], lowered[1]]
        possible = self.ladder.neighbours(mutant, 1) & fitting_switches(self.problem, mutant)
        possible[lowered[0]] = False
        raised = self._draw(self._balancing(possible, cost_changes(self.problem, mutant), -freed), rng)
        if raised is not None:
            mutant[raised[0]] = raised[1]
        elif self.problem.monotone:
            return None  # a switch that only lowers
        return mutant

    def _use_up(self, before: np.ndarray, mutant: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Raise untouched groups at random while something fits, so that unequal costs waste no budget."""
        rung, groups = self.ladder.rung, np.arange(len(mutant))
        while True:
            possible = self.ladder.neighbours(mutant, 1) & fitting_switches(self.problem, mutant)
            possible[rung[groups, mutant] < rung[groups, before]] = False
            raised = self._draw(possible, rng)
            if raised is None:
                return mutant
            mutant[raised[0]] = raised[1]

    def _over(self, choices: np.ndarray) -> bool:
        return bool((unspent(self.problem, choices) < 0).any())

    def _balancing(self, possible: np.ndarray, change: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """The possible switches that change the cost by exactly ``wanted``, if there are any."""
        if self.partners == "any":
            return possible
        exact = possible & np.asarray((change == wanted[:, None, None]).all(axis=0), dtype=bool)
        return exact if exact.any() else possible

    @staticmethod
    def _draw(possible: np.ndarray, rng: np.random.Generator) -> tuple[int, int] | None:
        """One switch: a group among those that have any, then one of its options."""
        groups = np.flatnonzero(possible.any(axis=1))
        if not groups.size:
            return None
        group = int(groups[rng.integers(groups.size)])
        options = np.flatnonzero(possible[group])
        return group, int(options[rng.integers(options.size)])


class _Allocations(Population):
    """Genomes are allocations."""

    def __init__(self, run: SearchRun, settings: EvoPress) -> None:
        super().__init__(run, settings)
        self.switch = LevelSwitch(self.problem, settings.partners)
        self.start = uniform_allocation(self.problem)

    def initial_genomes(self, rng: np.random.Generator, count: int) -> list[np.ndarray]:
        """The prior's knapsack if there is one, and random mixtures of the two options around the budget."""
        first = [] if self.run.prior is None else [knapsack(self.run.prior, self.problem)]
        found = {genome.tobytes(): genome for genome in first}
        for _ in range(count - len(first)):
            genome = fill_upwards(self.switch.ladder, self.start, rng.permutation(self.problem.num_groups))
            found.setdefault(genome.tobytes(), genome)
        return list(found.values())

    def mutate(self, genome: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        return self.switch(genome, rng)


@dataclass(frozen=True, kw_only=True)
class EvoPress(Evolution):
    """Evolutionary search over the true loss, with mutations that keep the budget.

    The defaults are its recommended ones for widths from memory (not checked again for this package): 128
    offspring, of which 16, 4 and 1 survive on 2,048, 16,384 and 131,072 tokens.
    100 generations is the search budget that the RCO paper quotes from its authors. Under a small allowance
    :meth:`scaled_to` gives proportionally smaller settings.

    Args:
        partners: See :class:`LevelSwitch`.
    """

    name: ClassVar[str] = "evopress"

    partners: Literal["any", "size"] = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partners not in ("any", "size"):
            raise ValueError(f'partners must be "size" or "any", got {self.partners!r}.')

    def population(self, run: SearchRun) -> Population:
        """Whole allocations."""
        return _Allocations(run, self)
