"""A second budget at the same time: the cost of multiplications, or a table of costs such as milliseconds."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np

from rco.compression.plan import CompressionPlan
from rco.core.exact import exact_number
from rco.formats.base import Format
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.layout import LinearInfo

__all__ = ["SecondBudget"]

_COLUMNS = ("linear", "format", "cost")
Table = Mapping[tuple[str, str], Fraction]


@dataclass(frozen=True)
class SecondBudget:
    """A most total of further costs, beside the budget of bits or bytes.

    Attributes:
        amount: The most that costs may sum up to; without a table, a share of what multiplications cost at 16 bits.
        table: Cost by (name or kind of a linear, name of a format); None: multiplications. A multiply-add costs the
            width of the wider of weight and input: 8-bit weights with 8-bit inputs cost half of the original ones,
            and weights alone as much as those.
    """

    amount: Fraction
    table: Table | None = None

    @classmethod
    def parse(
        cls, flops_share: str | None, cost_table: Path | None, cost_budget: str | None
    ) -> SecondBudget | None:
        """The budget of a user's settings; None if there is none.

        Raises:
            ValueError: Settings contradict each other, or the table cannot be read.
        """
        if (cost_table is None) != (cost_budget is None) or (flops_share and cost_table):
            raise ValueError(
                "Give `cost_table` together with `cost_budget`, the most that its costs may sum up to, or "
                "`flops_share` alone."
            )
        if flops_share is not None:
            share = exact_number(flops_share, "`flops_share`")
            if not 0 < share <= 1:
                raise ValueError(f"`flops_share` is a share above 0 and at most 1, got {flops_share}.")
            return cls(share)
        if cost_table is None:
            return None
        return cls(exact_number(cost_budget, "`cost_budget`"), _read(cost_table))

    @property
    def name(self) -> str:
        """Name of the setting."""
        return "flops_share" if self.table is None else "cost_budget"

    def costs(self, plan: CompressionPlan) -> tuple[np.ndarray, Fraction, int]:
        """Costs (N, K) as integers, the most that they may sum up to, and the units of one of the user's costs.

        Raises:
            ValueError: The table lacks an option of a linear.
        """
        rows = [
            [
                sum(self._cost(plan, member, option) for member in group.members)
                if option in group.options
                else Fraction(0)
                for option in plan.options
            ]
            for group in plan.groups
        ]
        whole = Fraction(1)
        if self.table is None:
            whole = Fraction(sum(info.parameters for info in plan.linears) * ORIGINAL.bits)
        unit = lcm(*(Fraction(cost).denominator for row in rows for cost in row))
        matrix = np.array([[int(cost * unit) for cost in row] for row in rows], dtype=np.int64)
        return matrix, self.amount * whole * unit, int(whole * unit)

    def _cost(self, plan: CompressionPlan, info: LinearInfo, option: Format) -> Fraction:
        if option == REMOVED:
            return Fraction(0)
        if self.table is None:
            return Fraction(info.parameters * (option.bits if option.rounds_inputs else ORIGINAL.bits))
        for key in ((info.name, option.name), (info.name, plan.label(option)), (info.kind, option.name),
                    (info.kind, plan.label(option))):  # fmt: skip
            if key in self.table:
                return self.table[key]
        raise ValueError(
            f"`cost_table` has no cost of {info.name} (or of its kind, {info.kind}) in {option.name}; add a line."
        )


def _read(path: Path) -> Table:
    """Costs by linear and format.

    Raises:
        ValueError: The file is missing, lacks a column, or has a cost that is no number or negative.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"`cost_table` {path} cannot be read: {error}.") from error
    if not rows or any(name not in rows[0] for name in _COLUMNS):
        raise ValueError(
            f"`cost_table` {path} needs the columns {', '.join(_COLUMNS)} and at least one line."
        )
    found = {}
    for number, row in enumerate(rows, start=2):
        cost = exact_number((row["cost"] or "").strip(), f"the cost in line {number} of {path.name}")
        if cost < 0:
            raise ValueError(f"The cost in line {number} of {path.name} is negative: {row['cost']}.")
        found[row["linear"].strip(), row["format"].strip()] = cost
    return found
