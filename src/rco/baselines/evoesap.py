"""EvoESAP: evolution over the number of groups each block keeps, in an order fixed by a score.

For two options that is a count of kept groups per block. With more options or unequal costs a block's count is the
number of upgrades it has taken from its own fixed sequence, the best gain in score per cost first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from rco.baselines.block_budgets import blocks_of
from rco.baselines.evolution import Evolution, Population
from rco.core.knapsack import knapsack
from rco.core.moves import Ladder, unspent
from rco.core.problem import AllocationProblem
from rco.core.searcher import SearchRun

__all__ = ["EvoESAP", "Sequences"]


class Sequences:
    """Every block's upgrades in order; a genome is the number of upgrades taken in each block.

    Args:
        problem: Costs and budgets.
        scores: (N, K), higher is better.
        blocks: (N,) block numbers from 0.
        counted: Begin with the minimum counts instead of the cheapest options.
    """

    def __init__(
        self, problem: AllocationProblem, scores: np.ndarray, blocks: np.ndarray, counted: bool = False
    ) -> None:
        self.problem, self.ladder = problem, Ladder(problem)
        lowest = np.where(self.ladder.rung == 0, scores, -np.inf).argmax(axis=1)
        self.cheapest = self.ladder.start("cheapest", scores) if counted else lowest
        self._upgrades = [
            self._sequence(np.flatnonzero(blocks == block), scores) for block in range(int(blocks.max()) + 1)
        ]
        self.lengths = np.array([upgrades.shape[1] for upgrades in self._upgrades], dtype=np.int64)

    def _sequence(self, members: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """(2, L) groups and the options they go to."""
        size, rung, top = self.ladder.size, self.ladder.rung, self.ladder.top

        def best_on(group: int, level: int) -> int:
            """The option of the highest score among those of equal cost."""
            options = np.flatnonzero(rung[group] == level)
            return int(options[scores[group, options].argmax()])

        def push(group: int, option: int) -> None:
            if (level := rung[group, option] + 1) <= top[group]:
                above = best_on(group, level)
                gain = scores[group, above] - scores[group, option]
                paid = size[group, above] - size[group, option]
                heapq.heappush(waiting, (-gain / paid, group, above))

        waiting: list[tuple[float, int, int]] = []
        for group in members.tolist():
            push(group, int(self.cheapest[group]))
        taken = []
        while waiting:
            _, group, option = heapq.heappop(waiting)
            taken.append((group, option))
            push(group, option)
        return np.array(taken, dtype=np.int64).reshape(-1, 2).T

    def express(self, counts: np.ndarray) -> np.ndarray:
        """The allocation with that many upgrades in every block."""
        choices = self.cheapest.copy()
        for upgrades, count in zip(self._upgrades, counts.tolist(), strict=True):
            choices[upgrades[0, :count]] = upgrades[1, :count]  # a later upgrade of the same group wins
        return choices

    def feasible(self, counts: np.ndarray) -> bool:
        """Whether every budget is kept."""
        return self.problem.is_feasible(self.express(counts))

    def counts(self, choices: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Number of upgrades of an allocation in every block."""
        groups = np.arange(len(choices))
        levels = self.ladder.rung[groups, choices] - self.ladder.rung[groups, self.cheapest]
        levels = np.maximum(levels, 0)
        return np.bincount(blocks, weights=levels, minlength=len(self.lengths)).astype(np.int64)

    def fill(self, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Add upgrades to blocks in random order while any is affordable."""
        left = unspent(self.problem, self.express(counts))
        if len(left) == 1 and left[0] == 0:
            return counts  # every upgrade costs something
        counts = counts.copy()
        waiting = np.arange(len(counts))
        while waiting.size:
            still = []
            for block in rng.permutation(waiting).tolist():
                if counts[block] < self.lengths[block]:
                    counts[block] += 1
                    if self.feasible(counts):
                        still.append(block)
                    else:
                        counts[block] -= 1
            waiting = np.array(still, dtype=np.int64)
        return counts

    def move(self, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """One upgrade more in one block, and as many fewer in another as pay for it; None if impossible."""
        receivers, donors = np.flatnonzero(counts < self.lengths), np.flatnonzero(counts > 0)
        if not receivers.size or not donors.size:
            return None
        receiver = int(receivers[rng.integers(receivers.size)])
        donor = int(donors[rng.integers(donors.size)])
        if donor == receiver:
            return None
        moved = counts.copy()
        moved[receiver] += 1
        while moved[donor] > 0:
            moved[donor] -= 1
            if self.feasible(moved):
                return moved
        return None


class _BlockCounts(Population):
    """Genomes are counts of upgrades per block."""

    def __init__(self, run: SearchRun, settings: EvoESAP) -> None:
        super().__init__(run, settings)
        objective = run.evaluator.objective
        self.by_acceptance = settings.fitness == "acceptance"
        if self.by_acceptance and not objective.offers("acceptance"):
            raise ValueError(
                f'fitness="acceptance" needs an objective with an acceptance(gates, batch), which '
                f'{objective.described} does not define; use fitness="loss".'
            )
        blocks = blocks_of(self.problem, objective, settings.blocks)
        self.sequences = Sequences(self.problem, run.scores().numpy(), blocks)
        start = self._feasible_start(blocks)
        if start is None and self.problem.min_counts is not None:
            self.sequences = Sequences(self.problem, run.scores().numpy(), blocks, counted=True)
            start = self._feasible_start(blocks)
        if start is None:
            raise ValueError(
                "evoesap takes the groups of a block in the order of their score, and no counts per block give an "
                "allocation within the joint budgets; search over single groups instead, with rco or evopress."
            )
        self.start = start
        run.notes["blocks_searched"] = len(self.sequences.lengths)

    def _feasible_start(self, blocks: np.ndarray) -> np.ndarray | None:
        """The largest equal share of every block's sequence; else the prior's knapsack, block by block."""
        lengths = self.sequences.lengths
        most = int(lengths.max())
        for share in range(most, -1, -1):
            counts = lengths * share // max(most, 1)
            if self.sequences.feasible(counts):
                return np.asarray(counts)
        counts = self.sequences.counts(knapsack(self.run.scores(), self.problem), blocks)
        return counts if self.sequences.feasible(counts) else None

    def initial_genomes(self, rng: np.random.Generator, count: int) -> list[np.ndarray]:
        """The equal share, with the leftover budget given to blocks in random order."""
        found = [self.sequences.fill(self.start, rng) for _ in range(count)]
        return list({genome.tobytes(): genome for genome in found}.values())

    def mutate(self, genome: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        moved = self.sequences.move(genome, rng)
        return moved if moved is None or not self.problem.monotone else self.sequences.fill(moved, rng)

    def express(self, genome: np.ndarray) -> np.ndarray:
        return self.sequences.express(genome)

    def fitness(self, genome: np.ndarray, batches: list[int]) -> float:
        if not self.by_acceptance:
            return super().fitness(genome, batches)
        accepted, options = self.evaluator.objective.acceptance, self.problem.num_options
        return -float(self.evaluator.measure(accepted, self.express(genome), options, batches).mean())


@dataclass(frozen=True, kw_only=True)
class EvoESAP(Evolution):
    """Evolutionary search over per-block counts; the prior decides which groups of a block are kept.

    Args:
        fitness: "loss", or "acceptance": the share of the compressed model's tokens that the full model would
            accept, if the objective defines it. The final choice is by loss in either case.
        blocks: Block of every group; None: those of the objective, of the problem or of its labels.
    """

    name: ClassVar[str] = "evoesap"

    generations: int | None = 50
    offspring: int = 32
    survivors: tuple[int, ...] = (8, 2, 1)
    batches_per_stage: tuple[int, ...] | None = (1, 4, 16)
    initial: int = 32
    fitness: Literal["loss", "acceptance"] = "loss"
    blocks: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fitness not in ("loss", "acceptance"):
            raise ValueError(f'fitness must be "loss" or "acceptance", got {self.fitness!r}.')

    def population(self, run: SearchRun) -> Population:
        """Counts per block."""
        return _BlockCounts(run, self)
