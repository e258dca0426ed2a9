"""HIGGS with dynamic widths: the linearity theorem's coefficients, then the exact knapsack.

By the theorem, small relative errors t_i of the groups raise the loss by sum_i alpha_i t_i^2, whatever the
quantizer. Each alpha_i is measured by perturbing group i alone, at several levels, and fitted by least
squares through the origin; the predicted loss of option k is alpha_i t_ik^2. The published method perturbs with
Gaussian noise, which is ``higgs-noise`` here; ``higgs`` perturbs with the options themselves, so that the errors
are those of the deployed model. The levels, those of some of the options, are our choice in both.
Implemented from the theorem as its abstract and the RCO paper state it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from rco.baselines.loss_tables import LossTable, TableSearch
from rco.baselines.one_at_a_time import SwitchTable
from rco.core.moves import Ladder
from rco.core.sampling import generator
from rco.core.searcher import SearchRun, checked_table

__all__ = ["HIGGS", "HIGGSNoise", "fit_coefficients"]


def fit_coefficients(errors: np.ndarray, increases: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """(N,) slopes of the increases over the errors, through the origin; 0 for a group without measurements.

    A negative slope is noise around zero, since no perturbation helps to first order, and becomes 0.
    """
    x = np.where(measured, errors, 0.0)
    power = (x**2).sum(axis=1)
    slope = (x * np.where(measured, increases, 0.0)).sum(axis=1) / np.where(power > 0, power, 1.0)
    return np.asarray(np.maximum(slope, 0.0))


class _LinearTable(SwitchTable):
    """Losses at a few options of each group, and the line through them."""

    def __init__(self, run: SearchRun, base: np.ndarray, errors: np.ndarray, levels: int) -> None:
        self.errors = errors
        # Error added by a switch to that of the base, which is not quite zero for the dearest option.
        self.added = errors - errors[np.arange(len(errors)), base][:, None]
        measured = np.zeros(errors.shape, dtype=bool)
        for group, row in enumerate(self.added):
            usable = np.flatnonzero(run.problem.allowed[group] & (row > 0))
            usable = usable[np.argsort(row[usable], kind="stable")]
            if usable.size:
                measured[group, usable[np.linspace(0, len(usable) - 1, levels).round().astype(int)]] = True
        super().__init__(run, base, measured)

    def predicted(self) -> np.ndarray:
        """Slope times error."""
        slopes = fit_coefficients(self.added, super().predicted(), self.measured)
        self.run.notes["coefficients"] = slopes.tolist()
        return np.asarray(slopes[:, None] * self.errors)


class _NoiseTable(_LinearTable):
    """Losses under noise with the errors of the options that ``higgs`` measures."""

    def disturbed_loss(self, group: int, option: int, batch: int) -> float:
        objective = self.evaluator.objective
        draw = int(generator(self.run.settings.seed, batch, group, option).integers(2**62))
        error = float(self.added[group, option])

        def noisy(gates: Tensor, batch: int) -> Tensor:
            return objective.noisy_loss(gates, batch, group, error, draw)

        return float(self.evaluator.measure(noisy, self.base, self.problem.num_options, [batch])[0])


@dataclass(frozen=True, kw_only=True)
class HIGGS(TableSearch):
    """A loss linear in the squared error of each group, fitted to measurements, then the exact knapsack.

    The objective must have the table ``option_errors``, the relative squared error of every option, (N, K).

    Args:
        levels: Perturbations per group, spread over its options from the mildest to the strongest.
    """

    name: ClassVar[str] = "higgs"
    _table: ClassVar[type[_LinearTable]] = _LinearTable

    levels: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(levels=1)

    def table(self, run: SearchRun) -> LossTable:
        """The table of all perturbations."""
        objective, problem = run.evaluator.objective, run.problem
        given = objective.table("option_errors")
        if given is None:
            raise ValueError(
                f"{self.name} needs the relative squared error of every option, but the objective "
                f"({objective.described}) has no option_errors (N, K); add it, or use one-at-a-time."
            )
        errors = checked_table(given, problem, "option_errors")
        if (errors < 0).any():
            raise ValueError(f"option_errors must not be negative, got {errors.min()}.")
        base = self.base_choices(problem)
        if self.base == "dearest":
            # Of several dearest options the most accurate one.
            ladder = Ladder(problem)
            dearest = ladder.rung == ladder.top[:, None]
            base = np.where(dearest, errors, np.inf).argmin(axis=1)
        return self._table(run, base, errors, self.levels)


@dataclass(frozen=True, kw_only=True)
class HIGGSNoise(HIGGS):
    """HIGGS as published: the groups are perturbed by Gaussian noise instead of their options.

    The objective must define ``noisy_loss`` and have ``option_errors``; see :class:`rco.core.objective.Objective`.
    """

    name: ClassVar[str] = "higgs-noise"
    _table: ClassVar[type[_LinearTable]] = _NoiseTable

    def table(self, run: SearchRun) -> LossTable:
        """The table of all perturbations."""
        objective = run.evaluator.objective
        if not objective.offers("noisy_loss"):
            raise ValueError(
                f"{self.name} needs an objective that can add noise to a group, but {objective.described} has no "
                "noisy_loss; add it, or use higgs."
            )
        return super().table(run)
