"""A run's documents, read and checked for the report.

A missing section of ``metrics.json`` is left out of the page; a malformed one is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.runs import RunDirectory

__all__ = [
    "Evaluated",
    "ExpertWidths",
    "GroupWidth",
    "MoeLayer",
    "ReportError",
    "RunData",
    "evaluations",
    "expert_width_layers",
    "groups",
    "integer",
    "moe_layers",
    "number",
    "read_run",
    "section",
]


class ReportError(ValueError):
    """A run's documents cannot be shown; the message names the entry."""


@dataclass(frozen=True)
class RunData:
    """Documents of one run; ``metrics`` is the one that the pipeline writes."""

    name: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    problem: AllocationProblem | None = None
    result: SearchResult | None = None
    history: Sequence[StepRecord] = ()
    header_bytes: int | None = None  # of the checkpoint's safetensors files, read from them

    @property
    def title(self) -> str:
        """The model that was compressed, or else the name of the run's folder."""
        model = section(self.metrics, "model").get("name") or self.config.get("model")
        return str(model) if model else self.name

    @property
    def pruning(self) -> bool:
        """Whether experts were pruned (otherwise weights were quantized)."""
        return self.metrics.get("kind") == "expert-pruning"

    @property
    def method(self) -> str:
        """Name of the search method."""
        name = self.result.method if self.result else "search"
        return "RCO" if name == "rco" else name


@dataclass(frozen=True)
class Evaluated:
    """One line of the comparison on the evaluation text."""

    name: str
    bits: float | None
    experts: int | None
    kl: float | None
    kl_error: float | None
    perplexity: float | None
    perplexity_error: float | None
    recovery: float | None
    within_budget: bool | None
    by_domain: Mapping[str, Mapping[str, float | None]]
    tasks: Mapping[str, Mapping[str, float | None]]
    chosen: bool  # the run's own result

    @property
    def uniform_width(self) -> int | None:
        """The width, if it is the same everywhere; else None."""
        kind, _, width = self.name.partition(" ")
        return int(width) if kind.lower() == "uniform" and width.isdigit() else None

    @property
    def full(self) -> bool:
        """Whether this is the uncompressed model."""
        return self.name.lower() in ("full model", "full")


@dataclass(frozen=True)
class GroupWidth:
    """One group of linears with its width and its option: a width, or a format by name."""

    name: str
    members: tuple[str, ...]
    kind: str
    block: int | None
    parameters: int
    width: float
    option: str
    sensitivity: Mapping[str, float]  # option -> predicted KL, from few bits to many
    relative_error: Mapping[str, float]


@dataclass(frozen=True)
class MoeLayer:
    """One layer's experts."""

    layer: int
    experts: int
    kept: tuple[int, ...]  # sorted
    scores: Mapping[str, tuple[float, ...]]

    def best(self, score: str) -> frozenset[int] | None:
        """The experts with the highest score, as many as were kept; None without that score."""
        if score not in self.scores:
            return None
        values = self.scores[score]
        order = sorted(range(self.experts), key=lambda expert: (-values[expert], expert))
        return frozenset(order[: len(self.kept)])


@dataclass(frozen=True)
class ExpertWidths:
    """One layer: widths of every expert's gate, up and down projection, and the share of tokens routed to it."""

    layer: int
    widths: tuple[tuple[int, int, int], ...]
    frequency: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Average width; the three projections of an expert have the same number of weights."""
        return sum(sum(expert) for expert in self.widths) / (3 * len(self.widths))

    @property
    def active_mean(self) -> float:
        """Average width, weighted by the tokens routed to each expert."""
        total = sum(self.frequency) or 1.0
        return sum(f * sum(w) / 3 for f, w in zip(self.frequency, self.widths, strict=True)) / total


# ------------------------------------------------------------------------- reading


def read_run(run: RunDirectory) -> RunData:
    """All documents that a run has written; an unfinished run has no result yet."""
    metrics = run.metrics
    return RunData(
        name=run.folder.resolve().name,
        metrics=metrics,
        config=run.config,
        environment=run.environment,
        problem=run.problem if (run.folder / "problem.json").is_file() else None,
        result=run.result if run.finished else None,
        history=[_step(record) for record in run.history()],
        header_bytes=_header_bytes(section(metrics, "export"), run.folder),
    )


def _step(record: Mapping[str, Any]) -> StepRecord:
    known = {entry.name for entry in fields(StepRecord)}
    values = {key: value for key, value in record.items() if key in known}
    if values.get("expected_cost") is not None:
        values["expected_cost"] = tuple(values["expected_cost"])
    try:
        return StepRecord(**values)
    except TypeError as error:
        raise ReportError(f"history.jsonl has an incomplete record {json.dumps(record)}: {error}.") from None


def _header_bytes(export: Mapping[str, Any], folder: Path) -> int | None:
    """Bytes of all safetensors headers, from the export's own count or from its files.

    The checkpoint of a run that was moved is looked up inside the run's folder.
    """
    stated = integer(export, "header_bytes", "export")
    if stated is not None:
        return stated
    files = export.get("files")
    if not isinstance(files, Mapping) or "path" not in export:
        return None
    written = Path(str(export["path"]))
    place = written if written.is_dir() else folder / written.name
    total = 0
    for name in files:
        if str(name).endswith(".safetensors"):
            try:
                with open(place / str(name), "rb") as file:
                    total += 8 + int.from_bytes(file.read(8), "little")
            except FileNotFoundError:  # moved since
                return None
    return total


# ------------------------------------------------------------------------ checking


def section(container: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of the metrics; empty if missing."""
    value = container.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ReportError(f"{key!r} in metrics.json must be an object, got {type(value).__name__}.")
    return value


def number(container: Mapping[str, Any], key: str, where: str) -> float | None:
    """A number; None if missing."""
    value = container.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportError(f"{key!r} in {where} of metrics.json must be a number, got {value!r}.")
    return value


def integer(container: Mapping[str, Any], key: str, where: str) -> int | None:
    """A whole number; None if missing."""
    value = number(container, key, where)
    if value is not None and not isinstance(value, int):
        raise ReportError(f"{key!r} in {where} of metrics.json must be a whole number, got {value!r}.")
    return value


def _rows(container: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = container.get(key) or []
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise ReportError(f"{key!r} in metrics.json must be a list of objects.")
    return list(rows)


def _required(row: Mapping[str, Any], key: str, where: str) -> Any:
    if row.get(key) is None:
        raise ReportError(f"{where} of metrics.json lacks {key!r}.")
    return row[key]


def _numbers(row: Mapping[str, Any], key: str, where: str) -> dict[str, dict[str, float | None]]:
    return {
        str(name): {inner: number(values, inner, f"{where}, {name}") for inner in values}
        for name, values in section(row, key).items()
        if isinstance(values, Mapping)
    }


def evaluations(run: RunData) -> list[Evaluated]:
    """The comparison's lines, in the order they were measured."""
    found = []
    for row in _rows(run.metrics, "evaluation"):
        name = str(_required(row, "name", "an evaluation row"))
        where = f"evaluation row {name!r}"
        found.append(
            Evaluated(
                name=name,
                bits=number(row, "bits", where),
                experts=integer(row, "experts", where),
                kl=number(row, "kl", where),
                kl_error=number(row, "kl_error", where),
                perplexity=number(row, "perplexity", where),
                perplexity_error=number(row, "perplexity_error", where),
                recovery=number(row, "recovery", where),
                within_budget=row.get("within_budget"),
                by_domain=_numbers(row, "by_domain", where),
                tasks=_numbers(row, "tasks", where),
                chosen=bool(row.get("chosen", name.lower() == run.method.lower())),
            )
        )
    return found


def groups(run: RunData) -> list[GroupWidth]:
    """Every group with its width."""
    found = []
    for row in _rows(run.metrics, "groups"):
        name = str(_required(row, "name", "a group"))
        where = f"group {name!r}"
        _required(row, "width", where)
        members = tuple(str(member) for member in row.get("members") or [name])
        width, format = number(row, "width", where) or 0, str(row.get("format"))
        predicted = _by_option(row, "sensitivity", where)
        found.append(
            GroupWidth(
                name=name,
                members=members,
                kind=str(row.get("kind") or members[0].rpartition(".")[2]),
                block=integer(row, "block", where),
                parameters=integer(row, "parameters", where) or 0,
                width=width,
                option=format if format in predicted else f"{width:g}",
                sensitivity=predicted,
                relative_error=_by_option(row, "relative_error", where),
            )
        )
    return found


def _by_option(row: Mapping[str, Any], key: str, where: str) -> dict[str, float]:
    values = section(row, key)
    known = {str(label): number(values, label, f"{key} of {where}") for label in values}
    return {label: value for label, value in known.items() if value is not None and math.isfinite(value)}


def moe_layers(run: RunData) -> list[MoeLayer]:
    """Every layer's experts."""
    found = []
    for row in _rows(section(run.metrics, "moe"), "layers"):
        layer = int(_required(row, "layer", "a layer under 'moe'"))
        where = f"layer {layer} under 'moe'"
        experts = int(_required(row, "experts", where))
        kept = tuple(sorted({int(expert) for expert in _required(row, "kept", where)}))
        if kept and not 0 <= kept[0] <= kept[-1] < experts:
            raise ReportError(f"{where} of metrics.json keeps experts outside 0..{experts - 1}: {kept}.")
        scores = {}
        for name, values in section(row, "scores").items():
            if len(values) != experts:
                raise ReportError(
                    f"{where} of metrics.json has {len(values)} {name} scores for {experts} experts."
                )
            scores[str(name)] = tuple(float(value) for value in values)
        found.append(MoeLayer(layer, experts, kept, scores))
    return found


def expert_width_layers(run: RunData) -> list[ExpertWidths]:
    """Every layer's experts with their widths, if experts have their own widths."""
    found = []
    for row in _rows(section(run.metrics, "expert_widths"), "layers"):
        try:
            widths = tuple((int(g), int(u), int(d)) for g, u, d in row["widths"])
            frequency = tuple(float(share) for share in row["frequency"])
            layer = int(row["layer"])
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(
                "A layer under 'expert_widths' of metrics.json needs layer, widths (gate, up, down per expert) "
                f"and frequency: {error!r}."
            ) from None
        if len(widths) != len(frequency) or not widths:
            raise ReportError(
                f"Layer {layer} under 'expert_widths' of metrics.json has {len(widths)} experts with widths and "
                f"{len(frequency)} with a frequency."
            )
        found.append(ExpertWidths(layer, widths, frequency))
    return found
