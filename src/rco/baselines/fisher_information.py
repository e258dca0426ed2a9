"""The diagonal of the Fisher information: half the mean squared change of the gradient between options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rco.baselines.first_order import GradientTable
from rco.baselines.loss_tables import GivenTable, LossTable, TableSearch
from rco.core.searcher import SearchRun, checked_table

__all__ = ["Fisher"]


@dataclass(frozen=True, kw_only=True)
class Fisher(TableSearch):
    """Losses predicted from the Fisher information of each group, then the exact knapsack.

    An objective with the table ``fisher_losses`` has drawn the labels from the model itself, which is the Fisher
    information proper; otherwise the gradients of the loss on each batch give the empirical one.
    """

    name: ClassVar[str] = "fisher"

    def table(self, run: SearchRun) -> LossTable:
        """The objective's table, or one backward per batch."""
        known = run.evaluator.objective.table("fisher_losses")
        if known is not None:
            return GivenTable(run, checked_table(known, run.problem, "fisher_losses"))
        return GradientTable(run, self.base_choices(run.problem), order=2)
