"""The loss itself, with one group switched at a time: one forward per option, group and batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rco.baselines.loss_tables import LossTable, TableSearch
from rco.core.searcher import SearchRun

__all__ = ["OneAtATime", "SwitchTable"]


class SwitchTable(LossTable):
    """Measured losses with one group switched and the others at the base.

    Args:
        run: The search.
        base: (N,) the assignment of the others.
        measured: (N, K) switches to measure; None: all allowed ones.
    """

    def __init__(self, run: SearchRun, base: np.ndarray, measured: np.ndarray | None = None) -> None:
        super().__init__(run)
        self.base = base
        self.measured = self.problem.allowed.copy() if measured is None else measured
        self.measured[np.arange(len(base)), base] = False  # known: no change

    def cost(self, step: int) -> int:
        """Evaluations of the base and every switch."""
        return 1 + int(self.measured.sum())

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """The loss of the base, and the increase by every switch."""
        (base_loss,) = self.run.losses(self.base, [batch])
        table = np.zeros_like(self.total)
        for group, option in np.argwhere(self.measured).tolist():
            table[group, option] = self.disturbed_loss(group, option, batch) - base_loss
        return float(base_loss), table

    def disturbed_loss(self, group: int, option: int, batch: int) -> float:
        """The loss of the base with one group switched."""
        switched = self.base.copy()
        switched[group] = option
        return float(self.run.losses(switched, [batch])[0])


@dataclass(frozen=True, kw_only=True)
class OneAtATime(TableSearch):
    """The loss of every option measured while all other groups stay, then the exact knapsack."""

    name: ClassVar[str] = "one-at-a-time"

    def table(self, run: SearchRun) -> LossTable:
        """The table of every switch."""
        return SwitchTable(run, self.base_choices(run.problem))
