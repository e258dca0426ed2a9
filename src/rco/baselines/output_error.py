"""The least total error of the groups' outputs, from a table of the objective, without a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rco.baselines.loss_tables import GivenTable
from rco.core.result import SearchResult
from rco.core.searcher import BudgetedSearch, SearchRun, checked_table

__all__ = ["OutputError"]


@dataclass(frozen=True, kw_only=True)
class OutputError(BudgetedSearch):
    """The error of every option in the output of its group, then the exact knapsack.

    The objective must have the table ``output_errors`` or ``option_errors``, (N, K).
    """

    name: ClassVar[str] = "output-error"
    spends_uniform: ClassVar[bool] = False

    def loop(self, run: SearchRun) -> SearchResult:
        """Solve the table's knapsack, without steps."""
        objective = run.evaluator.objective
        for name in ("output_errors", "option_errors"):
            table = objective.table(name)
            if table is not None:
                run.notes["errors"] = name
                run.resume(GivenTable(run, checked_table(table, run.problem, name)))
                return run.choose()
        raise ValueError(
            f"{self.name} needs a table of errors, but the objective ({objective.described}) has neither "
            "output_errors nor option_errors (N, K); add one, or use one-at-a-time, which measures losses."
        )
