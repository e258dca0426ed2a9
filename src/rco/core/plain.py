"""Algorithm 1 exactly as the paper prints it: the one place that says what ``rco-plain`` means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from rco.core.search import RCO

__all__ = ["PRINTED", "PlainRCO"]

# Temperatures of section 3.1; the straight-through gradient without a term for curvature; and line 16 as result:
# the knapsack of the last logits, with no choice, no exchanges and no use of the budget that it leaves.
PRINTED: Mapping[str, Any] = MappingProxyType(
    {"tau": (1.0, 0.01), "refine": 0, "curvature": False, "choose": False, "monotone": False}
)


@dataclass(frozen=True, kw_only=True)
class PlainRCO(RCO):
    """Algorithm 1 as printed: the knapsack of the last logits is the result, whatever it leaves unspent.

    Steps, samples, learning rate, temperatures and antithetic sampling are settings as for
    :class:`rco.core.search.RCO`; the rest of ``PRINTED`` is fixed. Without a prior the logits start at zero. The
    result is not compared with the starting points, so it may be worse than them.
    """

    name: ClassVar[str] = "rco-plain"

    tau: tuple[float, float] = PRINTED["tau"]
    refine: int | None = field(default=PRINTED["refine"], init=False)
    curvature: bool = field(default=PRINTED["curvature"], init=False)
    choose: bool = field(default=PRINTED["choose"], init=False)
    monotone: bool | None = field(default=PRINTED["monotone"], init=False)
