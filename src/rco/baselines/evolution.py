"""(1 + lambda) evolution with selection in stages: many offspring on few batches, few survivors on many.

Each method defines its genomes, their mutations and their allocations.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rco.core.choice import Candidates
from rco.core.evaluator import Evaluator
from rco.core.result import SearchResult
from rco.core.sampling import generator
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["Evolution", "Population"]

# Draws of a mutation that cannot be completed before the parent counts as stuck.
_TRIES = 32
_BATCH = 2048  # tokens of a batch of unknown size
_INITIAL, _OFFSPRING, _BATCHES = range(3)


@dataclass(frozen=True, kw_only=True)
class Evolution(BudgetedSearch):
    """Settings of the evolutionary baselines.

    Args:
        generations: Rounds of mutation and selection after the initial choice; None: until the allowance ends.
        offspring: Mutants of the parent per generation.
        survivors: Survivors of each stage of a generation; the last keeps one and includes the parent.
        tokens_per_stage: Tokens that each stage evaluates its contestants on, in whole batches, at most all.
            A batch of unknown size counts as 2,048 tokens.
        batches_per_stage: The same in batches; overrides ``tokens_per_stage``.
        initial: Random starting allocations, of which the best on the first stage's batches becomes the parent.
        mutations: Most elementary mutations per offspring; the number is the smaller of two uniform draws.
    """

    generations: int | None = 100
    offspring: int = 128
    survivors: tuple[int, ...] = (16, 4, 1)
    tokens_per_stage: tuple[int, ...] = (2048, 16384, 131072)
    batches_per_stage: tuple[int, ...] | None = None
    initial: int = 128
    mutations: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(generations=0, offspring=1, initial=1, mutations=1)
        self.require_end("generations")
        stages = self.tokens_per_stage if self.batches_per_stage is None else self.batches_per_stage
        if not self.survivors or self.survivors[-1] != 1 or min(self.survivors) < 1:
            raise ValueError(f"survivors must be positive and end with 1, got {self.survivors}.")
        if len(stages) != len(self.survivors) or min(stages) < 1:
            raise ValueError(
                f"There must be one positive number of tokens (or batches) for each of the {len(self.survivors)} "
                f"stages, got {stages}."
            )

    @classmethod
    def scaled_to(cls, evaluations: int, generations: int = 50) -> dict[str, Any]:
        """Settings proportional to the defaults that fit that many generations into the evaluations.

        An allowance that holds a handful of full-size generations is better spent on many small ones: offspring,
        survivors and batches shrink together, the first stage stays at one batch.
        """
        default: dict[str, Any] = {f.name: f.default for f in fields(cls)}
        stages = default["batches_per_stage"] or [tokens // _BATCH for tokens in default["tokens_per_stage"]]
        for shrink in (2.0**-k for k in np.arange(0.0, 6.0, 0.25)):
            offspring = max(4, round(default["offspring"] * shrink))
            survivors = tuple(max(1, round(count * shrink)) for count in default["survivors"])
            batches = tuple(max(2**k, round(count * shrink)) for k, count in enumerate(stages))
            contestants, cost = offspring, 0
            for stage, (kept, count) in enumerate(zip(survivors, batches, strict=True)):
                cost += count * (contestants + (stage == len(stages) - 1))
                contestants = min(contestants, kept)
            if cost * generations <= evaluations:
                break
        return {
            "offspring": offspring,
            "survivors": survivors,
            "batches_per_stage": batches,
            "initial": offspring,
        }

    def stage_batches(self, evaluator: Evaluator) -> list[int]:
        """Batches per stage, at most all."""
        objective, counts = evaluator.objective, self.batches_per_stage
        if counts is None:
            held = objective.tokens_per_batch or _BATCH
            counts = tuple(-(-tokens // held) for tokens in self.tokens_per_stage)
        return [min(count, objective.num_batches) for count in counts]

    @abstractmethod
    def population(self, run: SearchRun) -> Population:
        """The method's genomes and mutations."""

    def loop(self, run: SearchRun) -> SearchResult:
        """The initial choice as the first step, then one generation per step; the fittest becomes the parent."""
        state = run.resume(self.population(run))
        planned = 1 + run.planned(self.generations, state.cost(1))
        with run.allowance():
            for step in run.steps(planned, state.cost):
                if state.stuck:
                    break
                draw = generator(self.seed, _BATCHES, step)
                available = run.evaluator.objective.num_batches
                batches = [draw.permutation(available)[:count].tolist() for count in state.stages]
                if step == 0:
                    genomes = state.initial_genomes(generator(self.seed, _INITIAL), self.initial)
                    state.parent, loss = state.select(genomes, batches[0], 1)[0]
                else:
                    state.parent, loss = state.generation(step, batches)
                run.record(loss)
        return run.choose()


class Population(SearchState):
    """The parent and the operators of a method. Genomes are integer vectors."""

    saved = ("parent", "stuck")

    def __init__(self, run: SearchRun, settings: Evolution) -> None:
        super().__init__(run)
        self.settings = settings
        self.stages = settings.stage_batches(run.evaluator)
        self.parent: np.ndarray | None = None
        self.stuck = False

    # Defined by each method.

    @abstractmethod
    def initial_genomes(self, rng: np.random.Generator, count: int) -> list[np.ndarray]:
        """Feasible genomes to choose the first parent from, at least one and at most ``count``."""

    @abstractmethod
    def mutate(self, genome: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """One elementary mutation that keeps every budget, or None if the draw failed."""

    def express(self, genome: np.ndarray) -> np.ndarray:
        """The allocation of a genome."""
        return genome

    def fitness(self, genome: np.ndarray, batches: list[int]) -> float:
        """Mean loss on some batches; lower is better."""
        return float(self.run.losses(self.express(genome), batches).mean())

    # Shared by all methods.

    def cost(self, step: int) -> int:
        """Most evaluations of a step; fewer if mutants occur twice."""
        if step == 0:
            return self.stages[0] * self.settings.initial
        contestants, total = self.settings.offspring, 0
        for stage, (survivors, batches) in enumerate(zip(self.settings.survivors, self.stages, strict=True)):
            total += batches * (contestants + (stage == len(self.stages) - 1))
            contestants = min(contestants, survivors)
        return total

    def generation(self, step: int, batches: list[list[int]]) -> tuple[np.ndarray, float]:
        """The fittest of the parent and its offspring, and its loss, by selection in stages."""
        assert self.parent is not None
        contestants = self._offspring(step)
        if not contestants:
            self.stuck = True
        for stage, (survivors, some) in enumerate(zip(self.settings.survivors, batches, strict=True)):
            if stage == len(batches) - 1:
                contestants = [self.parent, *contestants]  # ties keep the parent
            ranked = self.select(contestants, some, survivors)
            contestants = [genome for genome, _ in ranked]
        return ranked[0]

    def _offspring(self, step: int) -> list[np.ndarray]:
        assert self.parent is not None
        offspring: dict[bytes, np.ndarray] = {}
        for number in range(self.settings.offspring):
            rng = generator(self.settings.seed, _OFFSPRING, step, number)
            for _ in range(_TRIES):
                child: np.ndarray | None = self.parent
                for _ in range(int(rng.integers(1, self.settings.mutations + 1, size=2).min())):
                    child = None if child is None else self.mutate(child, rng)
                if child is not None and not np.array_equal(child, self.parent):
                    offspring.setdefault(child.tobytes(), child)  # the same mutant is evaluated once
                    break
            else:
                # If the budget leaves no neighbour every draw fails; otherwise this is practically impossible.
                break
        return list(offspring.values())

    def select(
        self, genomes: list[np.ndarray], batches: list[int], count: int
    ) -> list[tuple[np.ndarray, float]]:
        """The fittest genomes and their losses."""
        losses = [self.fitness(genome, batches) for genome in genomes]
        order = sorted(range(len(genomes)), key=lambda i: losses[i])
        return [(genomes[i], losses[i]) for i in order[:count]]

    def propose(self, candidates: Candidates) -> None:
        """Add the last parent."""
        self.run.notes["stage_batches"] = self.stages
        if self.parent is not None:
            candidates.add("fittest", self.express(self.parent), self.run.scores())
