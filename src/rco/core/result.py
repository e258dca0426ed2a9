"""Step records and the result of a search, with conversion to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rco.core.problem import Allocation, AllocationProblem, NamedTotals

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
    # The best allocation so far where this step found it and one batch gives the loss; None otherwise.
    allocation: tuple[int, ...] | None = None

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> StepRecord:
        """The inverse of ``dataclasses.asdict``, from JSON."""
        tuples = {name: described.get(name) for name in ("expected_cost", "allocation")}
        return cls(**{**described, **{k: None if v is None else tuple(v) for k, v in tuples.items()}})


@dataclass(frozen=True)
class SearchResult:
    """The allocation that a searcher found, with its loss, cost and history."""

    allocation: Allocation
    loss: float  # mean over the selection batches
    cost: Any  # exact: int, Fraction, or a tuple of them, with names if the budgets have some
    history: list[StepRecord] = field(default_factory=list, repr=False)
    method: str = "rco"
    seed: int | None = None
    chosen_from: str = "final"  # which candidate won on the selection split
    candidates: dict[str, float] = field(default_factory=dict)  # candidate name -> selection loss
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    # "finished"; "stopped" by a callback; "target" or "patience" reached; "interrupted"; "not finite" where a loss
    # was NaN or infinite. Unless finished, the allocation is the best one known at that moment.
    status: str = "finished"
    problem: AllocationProblem | None = field(default=None, compare=False, repr=False)
    logits: Tensor | None = field(default=None, compare=False, repr=False)  # (N, K), of gradient searches

    def save(self, path: str | Path) -> None:
        """Write everything, the problem and the logits included, as one JSON file; :meth:`load` reads it."""
        described = self.to_dict()
        described["problem"] = None if self.problem is None else self.problem.to_dict()
        described["logits"] = None if self.logits is None else self.logits.tolist()
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        partial.write_text(json.dumps(described))
        partial.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> SearchResult:
        """Read the output of :meth:`save`."""
        described = json.loads(Path(path).read_text())
        problem, logits = described.pop("problem"), described.pop("logits")
        return replace(
            cls.from_dict(described),
            problem=None if problem is None else AllocationProblem.from_dict(problem),
            logits=None if logits is None else torch.tensor(logits, dtype=torch.float64),
        )

    def plot(self, path: str | Path | None = None) -> Any:
        """Figure of the losses, the violation of the budget and the entropy of the logits over the evaluations.

        Args:
            path: File to write, in the format of its ending; None: only the figure is returned.
        """
        from rco.core.result_plot import plot_result

        figure = plot_result(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, without the problem and the logits; see :meth:`save`."""
        kept = [f.name for f in fields(self) if f.name not in ("problem", "logits")]
        described = {name: getattr(self, name) for name in kept}
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
        return cls(
            allocation=Allocation(allocation["choices"], allocation["groups"], allocation["options"]),
            cost=_number_from_json(data.pop("cost")),
            history=[StepRecord.from_dict(record) for record in history],
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
    if isinstance(value, NamedTotals):
        named = value.by_name
        return {"names": list(named), "numbers": [_number_to_json(entry) for entry in named.values()]}
    if isinstance(value, tuple | list):
        return [_number_to_json(entry) for entry in value]
    return str(value) if isinstance(value, Fraction) else int(value)


def _number_from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_number_from_json(entry) for entry in value)
    if isinstance(value, Mapping):
        named = dict(zip(value["names"], map(_number_from_json, value["numbers"]), strict=True))
        order = sorted(named)
        return NamedTotals([named[name] for name in order], order, value["names"])
    if isinstance(value, str):
        return Fraction(value)
    return value
