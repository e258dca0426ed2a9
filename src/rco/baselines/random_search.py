"""Random search: feasible allocations drawn independently, all measured on the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.baselines.common import draw_feasible
from rco.core.evaluation import Evaluator
from rco.core.problem import AllocationProblem
from rco.core.process import BudgetedSearch, Process, some_batches
from rco.core.refine import Candidates, spend

__all__ = ["RandomSearch"]


class _RandomSearch(Process):
    def __init__(
        self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None, settings: RandomSearch
    ) -> None:
        super().__init__(problem, evaluator, prior)
        self.settings = settings
        self.own_candidates = settings.keep
        self.batches = some_batches(self.evaluator, settings.batches, settings.seed)
        self.best: list[tuple[float, np.ndarray]] = []

    @property
    def steps(self) -> int:
        return self.planned(self.settings.steps, self.cost(0))

    def cost(self, step: int) -> int:
        return self.settings.samples * len(self.batches)

    def advance(self, step: int) -> float:
        settings, problem = self.settings, self.problem
        drawn, values = draw_feasible(
            self.scores(), problem, seed=settings.seed, step=step, samples=settings.samples
        )
        if problem.monotone:
            drawn = np.stack([spend(problem, c, v) for c, v in zip(drawn, values, strict=True)])
        found = [(float(self.losses(choices, self.batches).mean()), choices) for choices in drawn]
        known = {choices.tobytes(): (loss, choices) for loss, choices in [*self.best, *found]}
        self.best = sorted(known.values(), key=lambda entry: entry[0])[: settings.keep]
        return float(np.mean([loss for loss, _ in found]))

    def propose(self, candidates: Candidates) -> None:
        for rank, (_, choices) in enumerate(self.best):
            candidates.add(f"draw {rank + 1}", choices, self.scores())

    def state(self) -> dict[str, Any]:
        return {"best": [[loss, torch.from_numpy(choices.copy())] for loss, choices in self.best]}

    def load(self, state: Mapping[str, Any]) -> None:
        self.best = [(loss, choices.numpy().copy()) for loss, choices in state["best"]]


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

    steps: int | None = 100
    samples: int = 16
    batches: int | None = 4
    keep: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(steps=0, samples=1, batches=1, keep=1)
        self.require_end("steps")

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """Nothing drawn yet."""
        return _RandomSearch(problem, evaluator, prior, self)
