"""Step records and the result of a search, with conversion to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from typing import Any

from rco.core.problem import Allocation

__all__ = ["SearchResult", "StepRecord"]


@dataclass(frozen=True)
class StepRecord:
    """One step of a search, as handed to ``on_step`` and kept in the history."""

    step: int  # counted from 1
    steps: int  # planned in total
    loss: float  # mean over this step's samples, on its batches
    best_loss: float  # lowest sampled loss so far (one batch each: a noisy figure)
    temperature: float | None = None
    expected_cost: tuple[float, ...] | None = None  # of the continuous iterate, per budget
    entropy: float | None = None  # mean over groups, in units of log K: 1 undecided, 0 decided
    decided: int | None = None  # groups whose likeliest option has probability > 0.9
    forwards: int = 0  # objective evaluations so far
    backwards: int = 0  # of which with gradient
    seconds: float = 0.0  # since the search began
    phase: str = "search"  # or "refine"


@dataclass(frozen=True)
class SearchResult:
    """The allocation that a searcher found, with its loss, cost and history."""

    allocation: Allocation
    loss: float  # mean over the selection batches
    cost: Any  # exact: int, Fraction, or a tuple of them
    history: list[StepRecord] = field(default_factory=list)
    method: str = "rco"
    seed: int | None = None
    chosen_from: str = "final"  # which candidate won on the selection split
    candidates: dict[str, float] = field(default_factory=dict)  # candidate name -> selection loss
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        described = {f.name: getattr(self, f.name) for f in fields(self)}
        described["allocation"] = {
            "choices": self.allocation.tolist(),
            "groups": list(self.allocation.groups) if self.allocation.groups else None,
            "options": list(self.allocation.options) if self.allocation.options else None,
        }
        described["cost"] = _number_to_json(self.cost)
        described["history"] = [asdict(record) for record in self.history]
        return described

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> SearchResult:
        """The inverse of :meth:`to_dict`."""
        data = dict(described)
        allocation = data.pop("allocation")
        history = data.pop("history", [])
        for record in history:
            if record.get("expected_cost") is not None:
                record["expected_cost"] = tuple(record["expected_cost"])
        return cls(
            allocation=Allocation(allocation["choices"], allocation["groups"], allocation["options"]),
            cost=_number_from_json(data.pop("cost")),
            history=[StepRecord(**record) for record in history],
            **data,
        )

    def to_json(self) -> str:
        """The result as one JSON object."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> SearchResult:
        """Read the output of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))


def _number_to_json(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_number_to_json(entry) for entry in value]
    return str(value) if isinstance(value, Fraction) else int(value)


def _number_from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_number_from_json(entry) for entry in value)
    if isinstance(value, str):
        return Fraction(value)
    return value
