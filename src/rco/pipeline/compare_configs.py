"""The settings of ``rco compare quantize``: those of one quantization, and what is compared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rco.compression.base import Budget
from rco.pipeline.configs import QuantizeConfig, SearchProcesses
from rco.settings import setting

__all__ = ["CompareQuantizeConfig"]


@dataclass(frozen=True, kw_only=True)
class CompareQuantizeConfig(SearchProcesses, QuantizeConfig):
    """Methods side by side at one or more budgets; the flags of ``rco compare quantize``."""

    methods: str = setting(
        "rco,rco@0.1,rco-plain,evopress,impq,higgs,one-at-a-time,fisher,fisher-pooled,first-order,output-error,greedy,"
        "greedy-down,random,lagrangian,augmented-lagrangian,penalty,frank-wolfe,uniform,uniform-fill,"
        "uniform-random-fill",
        help="Comma-separated; see `rco ls methods`. METHOD@0.1 has a tenth of the allowance, METHOD+prior starts "
        "from RCO's prior, METHOD+weight-error from the initial logits of the paper's own code; "
        "fisher-pooled is the knapsack of RCO's prior.",
        panel="Comparison",
    )
    seeds: int = setting(3, help="Seeds of each search; the data stay the same.", panel="Comparison", least=1)
    allowance: str | None = setting(
        None,
        help="What every search may spend: tokens=NUMBER (a backward counts as two), seconds=NUMBER, or both; "
        "default: the tokens that rco takes.",
        panel="Comparison",
    )
    sweep: bool = setting(
        False,
        help="Also draw a front: rco at `sweep_budgets` budgets from the lowest to the highest of `bits`, each "
        "search started from the one before, with a quarter of the allowance.",
        panel="Comparison",
    )
    sweep_budgets: int = setting(9, help="Budgets of `sweep`.", panel="Comparison", least=2)
    curves: bool = setting(
        True, help="Judge each search on its way, too, with the first seed.", panel="Comparison"
    )
    tasks: str | None = setting(
        None, help="Tasks to measure, too: JSONL files or lm-eval names, comma-separated.", panel="Comparison"
    )
    limit: int | None = setting(None, help="Items per task.", panel="Comparison", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is not None:
            raise ValueError(
                f"In a comparison the name of a method says where it starts, such as rco-plain+weight-error or "
                f"evopress+prior: leave out `prior`, got {self.prior}."
            )

    def budget_list(self) -> list[str]:
        """The budgets, as they were written."""
        return [part.strip() for part in (self._budget()[1] or "").split(",") if part.strip()]

    def front(self) -> list[str]:
        """The budgets of a sweep at equal distances, exact decimals, from the lowest to the highest."""
        if self.bits is None:
            raise ValueError(
                "`sweep` needs `bits` with the lowest and the highest budget, such as `bits='2.25,4.0'`."
            )
        ends = [Budget.parse(bits=part).amount for part in self.budget_list()]
        low, high = min(ends), max(ends)
        if low == high:
            raise ValueError(f"`sweep` needs two different budgets in `bits`, got {self.bits}.")
        steps = [low + (high - low) * k / (self.sweep_budgets - 1) for k in range(self.sweep_budgets)]
        # One that is also listed is written as it is there, so that both come under one heading.
        listed = dict(zip(ends, self.budget_list(), strict=True))
        return [
            listed.get(step) or f"{Decimal(round(step * 10**4)).scaleb(-4).normalize():f}" for step in steps
        ]

    def _budget(self) -> tuple[str, str | None]:
        named = [(kind, text) for kind, text in self.budgets().items() if text is not None]
        if len(named) != 1:
            raise ValueError(
                f"Give one kind of budget, such as `bits='2.25,2.5'`; got {[k for k, _ in named] or 'none'}."
            )
        return named[0]

    def single(self, budget: str) -> QuantizeConfig:
        """The same with one of the budgets; a comparison writes no checkpoint, whose rules are none of its own."""
        named: dict[str, Any] = {self._budget()[0]: budget, "format": "none"}
        return dataclasses.replace(self, **named)

    def folder(self) -> Path:
        """Where the comparison is kept."""
        kind, text = self._budget()
        name = f"compare-{Path(self.model).name}-{kind}-{text}"
        return self.out or Path("runs") / "".join(c if c.isalnum() or c in "-._" else "-" for c in name)

    def identity(self) -> dict[str, Any]:
        """As for a run; budgets, seeds and methods may be added to a comparison later."""
        described = super().identity()
        free = (
            *self.budgets(),
            "seeds",
            "methods",
            "searcher",
            "format",
            "store",
            "sweep",
            "sweep_budgets",
            "curves",
            "workers",
            "threads",
        )
        for name in free:
            described.pop(name)
        return described
