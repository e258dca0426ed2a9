"""AutoRound's AutoScheme: sizes of gradients times changes, with the whole model in one format at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from rco.baselines.loss_tables import LossTable, TableSearch
from rco.core.objective import one_hot
from rco.core.searcher import SearchRun

__all__ = ["AutoScheme"]


class _DeltaTable(LossTable):
    """Delta losses of all options, from one backward per option and batch.

    Args:
        run: The search.
        base: (N,) options that change nothing.
    """

    def __init__(self, run: SearchRun, base: np.ndarray) -> None:
        super().__init__(run)
        self.base = base
        self.others = [k for k in range(self.problem.num_options) if not (base == k).all()]

    def cost(self, step: int) -> int:
        """A forward and a backward for every option."""
        return 3 * len(self.others)

    def measure(self, batch: int) -> tuple[float, np.ndarray]:
        """One backward with all groups at one option, for every option."""
        objective, found, loss = self.evaluator.objective, np.zeros_like(self.total), 0.0
        for option in self.others:
            choices = np.where(self.problem.allowed[:, option], option, self.base)
            gates, takers = one_hot(choices, self.problem.num_options), choices != self.base
            if objective.offers("delta_losses"):
                loss, deltas = self.evaluator.scores(partial(objective.delta_losses, gates, batch), 1)
            else:
                loss, gradient = self.evaluator.loss_and_gradient(gates, [batch])
                slope, rows = gradient.numpy(), np.arange(len(choices))
                deltas = np.abs(slope[rows, choices] - slope[rows, self.base])
            found[takers, option] = deltas[takers]
        return loss, found


@dataclass(frozen=True, kw_only=True)
class AutoScheme(TableSearch):
    """The delta losses of AutoRound's AutoScheme, then the exact knapsack.

    The objective should define ``delta_losses``. Without it the delta of an option is the size of the gradient's
    change between it and the base.
    """

    name: ClassVar[str] = "autoscheme"

    def table(self, run: SearchRun) -> LossTable:
        """The table of all delta losses."""
        return _DeltaTable(run, self.base_choices(run.problem))
