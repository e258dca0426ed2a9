"""Search by the loss alone: RCO's loop with a score-function estimate of the gradient (REINFORCE).

Each step draws feasible samples around the logits x as Algorithm 1 does, and evaluates them without gradient. The
gradient of the expected loss is estimated by the mean of ``a (z - softmax(x))``: z is a sample, and a the distance
of its loss from the mean of the step, in units of the spread. These distances sum to zero, so that the mean of
``a z`` is the same. That the knapsack changes the probabilities of samples is neglected. The logits move on the
budget manifold, and the last part of the allowance goes to a cold walk from the best sample. It is no method of the
package, since it does not measure better than annealing; see ``docs/assignment.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.core.annealing_walk import Cooling, walk
from rco.core.choice import Candidates, SampleTracker
from rco.core.objective import one_hot
from rco.core.optimizer import ManifoldOptimizer, search_surface
from rco.core.result import SearchResult
from rco.core.sampling import draw_feasible, generator
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["ScoreRCO"]

_WALK = 0.25  # share of the allowance that the walk takes
_WARMTH, _LAST = 0.02, 0.1  # of the walk's temperature
_STREAM = 9  # of the seed's random numbers


class _Logits(SearchState):
    """The logits and the best sample."""

    saved = ("optimizer", "best")
    candidates = 2

    def __init__(self, settings: ScoreRCO, run: SearchRun) -> None:
        super().__init__(run)
        self.settings = settings
        surface = search_surface(self.problem)
        self.optimizer = ManifoldOptimizer(self.problem, run.scores(), settings.lr, surface)
        self.best = SampleTracker(self.evaluator.objective.num_batches)
        if settings.max_evaluations is not None:
            self.kept_back = int(_WALK * settings.max_evaluations)

    def current_logits(self) -> Tensor:
        return self.optimizer.logits.detach().clone()

    def propose(self, candidates: Candidates) -> None:
        final = torch.log_softmax(self.current_logits() + self.problem.log_allowed, dim=-1)
        candidates.add_values("final", final)
        if self.best.choices is not None:
            candidates.add("best sample", self.best.choices, final)

    def polish(self, ranked: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, float]:
        """A cold walk from the best candidate, on the selection batches."""
        choices, losses = ranked[0]
        batches = self.evaluator.selection_batches
        moves = int(min(self.kept_back, self.evaluator.left) // len(batches))

        def measure(moved: np.ndarray) -> float | None:
            if not self.evaluator.in_time or self.evaluator.left < len(batches):
                return None
            return float(self.evaluator.selection_losses(moved, self.problem.num_options, batches).mean())

        rng = generator(self.settings.seed, _STREAM)
        cooling = Cooling(_WARMTH, _LAST)
        best, loss, _ = walk(self.problem, choices, float(losses.mean()), measure, moves, rng, cooling)
        return best, loss


@dataclass(frozen=True, kw_only=True)
class ScoreRCO(BudgetedSearch):
    """RCO for losses without gradient: a score-function estimate takes the gradient's place.

    Args:
        steps: Optimizer steps; None: as many as the allowance holds.
        samples: Samples per step.
        lr: Learning rate of Adam on the logits.
        batches: Batches that a step's samples are evaluated on; None: all.
    """

    name: ClassVar[str] = "score function"
    meets_exactly: ClassVar[bool] = True

    steps: int | None = 300
    samples: int = 16
    lr: float = 0.1
    batches: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(steps=0, samples=2, batches=1)
        self.require_end("steps")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}.")

    def loop(self, run: SearchRun) -> SearchResult:
        """Algorithm 1 with another gradient."""
        state = run.resume(_Logits(self, run))
        options = run.problem.num_options
        cost = self.samples * len(run.some_batches(self.batches))
        with run.allowance():
            for step in run.steps(run.planned(self.steps, cost), cost=cost):
                batches = run.some_batches(self.batches, first=step)
                logits = state.optimizer.logits.detach()
                choices, _ = draw_feasible(
                    logits, run.problem, seed=self.seed, step=step, samples=self.samples
                )
                losses = run.evaluator.many_losses(choices, options, batches).mean(axis=1)
                for own, loss in zip(choices, losses.tolist(), strict=True):
                    state.best.add(own, batches, loss)
                mean, spread = float(losses.mean()), float(losses.std())
                distance = (losses - mean) / spread if spread > 0 else np.zeros_like(losses)
                weighted = torch.from_numpy(distance)[:, None, None] * one_hot(choices, options)
                state.optimizer.step(weighted.mean(dim=0), mean)
                run.record(mean, best_loss=state.best.loss)
        return run.choose()
