"""Predicted cost of switching a group from the gradient at a base assignment: one backward per batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rco.baselines.loss_tables import LossTable, TableSearch
from rco.core.objective import one_hot
from rco.core.searcher import SearchRun

__all__ = ["FirstOrder", "GradientTable"]


class GradientTable(LossTable):
    """Predictions from the gradient with respect to the gates.

    Args:
        run: The search.
        base: (N,) the assignment at which the gradient is taken.
        order: 1: the change of the gradient between options; 2: half its square.
    """

    def __init__(self, run: SearchRun, base: np.ndarray, order: int) -> None:
        super().__init__(run)
        self.base, self.order = base, order

    def cost(self, step: int) -> int:
        """A forward and a backward."""
        return 3

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """One backward."""
        gates = one_hot(self.base, self.problem.num_options)
        loss, gradient = self.evaluator.loss_and_gradient(gates, [batch])
        slope = gradient.numpy()
        change = slope - slope[np.arange(len(slope)), self.base][:, None]
        return loss, change if self.order == 1 else 0.5 * change**2


@dataclass(frozen=True, kw_only=True)
class FirstOrder(TableSearch):
    """Losses predicted from gradients at one fixed allocation, then the exact knapsack."""

    name: ClassVar[str] = "first-order"

    def table(self, run: SearchRun) -> LossTable:
        """The gradient's change between options."""
        return GradientTable(run, self.base_choices(run.problem), order=1)
