"""ModelOpt's ``auto_quantize``: squared gradients at a layer's outputs times squared changes of these outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rco.baselines.first_order import GradientTable
from rco.baselines.loss_tables import LossTable, TableSearch
from rco.core.objective import one_hot
from rco.core.searcher import SearchRun

__all__ = ["AutoQuantize"]


class _OutputTable(LossTable):
    """Scores of all options, from one backward of the base per batch.

    Args:
        run: The search.
        base: (N,) the assignment at which gradients are taken.
    """

    def __init__(self, run: SearchRun, base: np.ndarray) -> None:
        super().__init__(run)
        self.base = base

    def cost(self, step: int) -> int:
        """A forward and a backward, and the outputs under every other option."""
        return self.problem.num_options + 2

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """One backward."""
        gates = one_hot(self.base, self.problem.num_options)
        objective = self.evaluator.objective
        return self.evaluator.scores(lambda: objective.output_scores(gates, batch), self.problem.num_options)

    def predicted(self) -> np.ndarray:
        """The scores; an option is never worse than a cheaper one of the same group."""
        scores = super().predicted()
        order = np.argsort(self.problem.unit_costs[0], axis=1, kind="stable")
        falling = np.minimum.accumulate(np.take_along_axis(scores, order, axis=1), axis=1)
        found = np.empty_like(scores)
        np.put_along_axis(found, order, falling, axis=1)
        return found


@dataclass(frozen=True, kw_only=True)
class AutoQuantize(TableSearch):
    """The scores of ModelOpt's AutoQuantize, then the exact knapsack.

    The objective should define ``output_scores``. Without it a group counts as one output, whose score is the
    squared change of the gradient.
    """

    name: ClassVar[str] = "autoquantize"

    def table(self, run: SearchRun) -> LossTable:
        """The table of all scores."""
        base = self.base_choices(run.problem)
        if run.evaluator.objective.offers("output_scores"):
            return _OutputTable(run, base)
        return GradientTable(run, base, order=2)
