"""Random search: feasible allocations drawn independently, all measured on the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rco.core.choice import Candidates
from rco.core.moves import spend
from rco.core.result import SearchResult
from rco.core.sampling import draw_feasible
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["RandomSearch"]


class _BestDraws(SearchState):
    saved = ("best",)

    def __init__(self, run: SearchRun, keep: int) -> None:
        super().__init__(run)
        self.candidates = keep
        self.best: list[tuple[float, np.ndarray]] = []

    def propose(self, candidates: Candidates) -> None:
        for rank, (_, choices) in enumerate(self.best):
            candidates.add(f"draw {rank + 1}", choices, self.run.scores())


@dataclass(frozen=True, kw_only=True)
class RandomSearch(BudgetedSearch):
    """The best of many feasible draws: exact knapsacks of Gumbel noise, around the prior if there is one.

    Args:
        steps: Rounds of draws; None: until the allowance ends.
        samples: Draws per round.
        batches: Batches that every draw is measured on; None: all.
        keep: Best draws that go to the final choice on the selection split.
    """

    name: ClassVar[str] = "random"
    meets_exactly: ClassVar[bool] = True

    steps: int | None = 100
    samples: int = 16
    batches: int | None = 4
    keep: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(steps=0, samples=1, batches=1, keep=1)
        self.require_end("steps")

    def loop(self, run: SearchRun) -> SearchResult:
        """Draw, measure, keep the best."""
        problem, batches = run.problem, run.some_batches(self.batches)
        cost = self.samples * len(batches)
        state = run.resume(_BestDraws(run, self.keep))
        with run.allowance():
            for step in run.steps(run.planned(self.steps, cost), cost):
                drawn, values = draw_feasible(
                    run.scores(), problem, seed=self.seed, step=step, samples=self.samples
                )
                if problem.monotone:
                    drawn = np.stack([spend(problem, c, v) for c, v in zip(drawn, values, strict=True)])
                found = [(float(run.losses(choices, batches).mean()), choices) for choices in drawn]
                known = {choices.tobytes(): (loss, choices) for loss, choices in [*state.best, *found]}
                state.best = sorted(known.values(), key=lambda entry: entry[0])[: self.keep]
                run.record(float(np.mean([loss for loss, _ in found])))
        return run.choose()
