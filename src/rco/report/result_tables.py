"""Tables of the report: allocations side by side, groups, experts per layer, settings, bytes of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from rco.report.data import Evaluated, ExpertWidths, GroupWidth, MoeLayer, ReportError
from rco.report.numbers import count, measured, percent, short, significant

__all__ = [
    "Column",
    "Table",
    "domain_matrix",
    "domain_tables",
    "evaluation_table",
    "expert_width_table",
    "fold_names",
    "group_table",
    "key_values",
    "layer_table",
]

_MOST_GROUPS = 1500


@dataclass(frozen=True)
class Column:
    """A heading and its cells: text or markup, None for an empty cell."""

    title: str
    cells: Sequence[Any]
    number: bool = False
    code: bool = False


@dataclass(frozen=True)
class Table:
    """A table by columns; the first names the rows. A column without any content is not shown.

    Attributes:
        caption: The subject of the table.
        columns: The columns.
        foot: Rows with sums; they stay at the bottom when the rest is sorted.
        sortable: Whether a click on a heading sorts.
        tags: Tag beside a row's name, by row; tagged rows are bold.
        links: Link targets of the rows' names.
    """

    caption: str
    columns: Sequence[Column]
    foot: Sequence[Sequence[Any]] = ()
    sortable: bool = False
    tags: Mapping[int, str] = field(default_factory=dict)
    links: Sequence[str] = ()

    @property
    def shown(self) -> list[Column]:
        """The columns with content."""
        return [column for column in self.columns if any(cell is not None for cell in column.cells)]


def key_values(values: Mapping[str, Any], caption: str) -> Table:
    """Names and values of a document; inner names are written with dots."""
    rows = _flat(values)
    return Table(
        caption,
        [
            Column("Name", [name for name, _ in rows], code=True),
            Column("Value", [value for _, value in rows]),
        ],
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{name}.")
        elif value is None or value in ([], {}):
            found.append((name, None))
        elif isinstance(value, bool):
            found.append((name, "yes" if value else "no"))
        elif isinstance(value, list | tuple):
            found.append((name, ", ".join(str(entry) for entry in value)))
        else:
            found.append((name, str(value)))
    return found


# --------------------------------------------------------------------- evaluation


def evaluation_table(rows: Sequence[Evaluated]) -> Table:
    """Allocations side by side with their measurements."""
    tasks = list(dict.fromkeys(task for row in rows for task in row.tasks))
    errors = any(row.kl_error or row.perplexity_error for row in rows) or any(
        scores.get("stderr") for row in rows for scores in row.tasks.values()
    )
    caption = "Allocations on the evaluation text" + ("; ± is one standard error" if errors else "")
    within = [None if r.full or r.within_budget is None else bool(r.within_budget) for r in rows]
    return Table(
        caption,
        [
            Column("Allocation", [row.name for row in rows]),
            Column("Bits", [None if r.bits is None else short(r.bits) for r in rows], number=True),
            Column("Experts", [None if r.experts is None else count(r.experts) for r in rows], number=True),
            Column("KL", [None if r.kl is None else measured(r.kl, r.kl_error) for r in rows], number=True),
            Column(
                "Perplexity",
                [None if r.perplexity is None else measured(r.perplexity, r.perplexity_error) for r in rows],
                number=True,
            ),
            *(Column(task, [_accuracy(row.tasks.get(task)) for row in rows], number=True) for task in tasks),
            Column(
                "Recovery",
                [None if r.recovery is None else percent(r.recovery / 100) for r in rows],
                number=True,
            ),
            Column("Within budget", [None if w is None else "yes" if w else "no" for w in within]),
        ],
        tags={index: "this run" for index, row in enumerate(rows) if row.chosen},
    )


def _accuracy(scores: Mapping[str, float | None] | None) -> Markup | None:
    if not scores or scores.get("acc") is None:
        return None
    return measured(scores["acc"], scores.get("stderr"))


def domain_tables(rows: Sequence[Evaluated]) -> list[Table]:
    """KL and perplexity per domain of the evaluation text."""
    domains = list(dict.fromkeys(domain for row in rows for domain in row.by_domain))
    found = []
    for key, title in (("kl", "KL to the full model"), ("perplexity", "Perplexity")):
        known = [
            row
            for row in rows
            if any(values.get(key) is not None for values in row.by_domain.values())
            and not (key == "kl" and row.full)  # 0 by definition
        ]
        if not known:
            continue
        columns = [
            Column(domain, [significant(r.by_domain.get(domain, {}).get(key)) for r in known], number=True)
            for domain in domains
        ]
        found.append(
            Table(
                f"{title} by domain of the evaluation text",
                [Column("Allocation", [row.name for row in known]), *columns],
                tags={index: "" for index, row in enumerate(known) if row.chosen},
            )
        )
    return found


# ------------------------------------------------------------------------- groups


def group_table(groups: Sequence[GroupWidth]) -> Table:
    """Every group with its width; sums by block and kind if there are too many to list."""
    if len(groups) > _MOST_GROUPS:
        return _folded_groups(groups)

    def as_chosen(values: Sequence[Mapping[str, float]]) -> list[str | None]:
        if not any(values):
            return [None] * len(groups)
        return [significant(known.get(group.option), 3) for known, group in zip(values, groups, strict=True)]

    named = any(not group.option.isdigit() for group in groups)
    return Table(
        "All groups; predictions and errors are those of the chosen option",
        [
            Column("Group", [group.name for group in groups], code=True),
            Column("Block", [group.block for group in groups], number=True),
            Column("Linears", [len(group.members) for group in groups], number=True),
            Column("Weights", [count(group.parameters) for group in groups], number=True),
            Column("Format", [group.option if named else None for group in groups]),
            Column("Bits", [f"{group.width:g}" for group in groups], number=True),
            Column("Predicted KL", as_chosen([group.sensitivity for group in groups]), number=True),
            Column("Relative error", as_chosen([group.relative_error for group in groups]), number=True),
        ],
        sortable=True,
    )


def _folded_groups(groups: Sequence[GroupWidth]) -> Table:
    cells: dict[tuple[int, str], list[GroupWidth]] = {}
    for group in groups:
        cells.setdefault((-1 if group.block is None else group.block, group.kind), []).append(group)
    rows = sorted(cells.items())
    weights = [sum(group.parameters for group in members) for _, members in rows]
    bits = [sum(group.parameters * group.width for group in members) for _, members in rows]
    ranges = [sorted({min(g.width for g in members), max(g.width for g in members)}) for _, members in rows]
    return Table(
        f"{count(len(groups))} groups by block and kind; allocation.json in the run's folder lists each",
        [
            Column("Kind", [kind for (_, kind), _ in rows], code=True),
            Column("Block", [None if block < 0 else block for (block, _), _ in rows], number=True),
            Column("Groups", [count(len(members)) for _, members in rows], number=True),
            Column("Weights", [count(weight) for weight in weights], number=True),
            Column(
                "Average bits",
                [significant(b / w) if w else None for b, w in zip(bits, weights, strict=True)],
                number=True,
            ),
            Column("Widths", [" to ".join(f"{width:g}" for width in ends) for ends in ranges]),
        ],
        sortable=True,
    )


def fold_names(sizes: dict[str, int], most: int) -> tuple[dict[str, tuple[int, int]], bool]:
    """Sizes added up over numbered names, from the innermost number outwards, until at most ``most`` are left.

    Returns:
        (number, sum) by name, with ``*`` for folded numbers; and whether anything was folded.
    """
    folded = {name: (1, size) for name, size in sizes.items()}
    depth = 0
    while len(folded) > most and depth < 8:
        depth += 1
        merged: dict[str, tuple[int, int]] = {}
        for name, (number, size) in folded.items():
            short = re.sub(r"(.*)\b\d+\b", r"\1*", name, count=1)
            before = merged.get(short, (0, 0))
            merged[short] = (before[0] + number, before[1] + size)
        if len(merged) == len(folded) and set(merged) == set(folded):
            break
        folded = merged
    return folded, depth > 0


# ------------------------------------------------------------------------ experts


def layer_table(layers: Sequence[MoeLayer]) -> Table:
    """Experts kept per layer, and the overlap with the choice by each score at the same count."""
    names = sorted({name for layer in layers for name in layer.scores} - {"reap", "frequency"})
    scores = [name for name in ("reap", "frequency", *names) if all(name in layer.scores for layer in layers)]

    def overlap(layer: MoeLayer, score: str) -> str | None:
        best = layer.best(score) or frozenset()
        return percent(len(best & set(layer.kept)) / len(layer.kept)) if layer.kept else None

    shown = {"reap": "REAP", "fisher": "sensitivity"}
    caption = "Experts kept per layer"
    if scores:
        caption += ", and how many of them each score would keep at the same count"
    return Table(
        caption,
        [
            Column("Layer", [layer.layer for layer in layers], number=True),
            Column("Experts", [layer.experts for layer in layers], number=True),
            Column("Kept", [len(layer.kept) for layer in layers], number=True),
            Column("Share kept", [percent(len(layer.kept) / layer.experts) for layer in layers], number=True),
            *(
                Column(
                    f"Same as by {shown.get(name, name.replace('_', ' '))}",
                    [overlap(layer, name) for layer in layers],
                    number=True,
                )
                for name in scores
            ),
        ],
        sortable=True,
    )


def domain_matrix(by_domain: Mapping[str, Any]) -> Table:
    """KL per domain (columns) of models pruned on each domain (rows)."""
    rows: dict[str, dict[str, float | None]] = {}
    for pruned_on, found in by_domain.items():
        if not isinstance(found, Mapping):
            raise ReportError(
                f"'by_domain' under 'moe' of metrics.json maps a domain to its measurements, got {found!r} "
                f"for {pruned_on!r}."
            )
        rows[str(pruned_on)] = {
            str(domain): value.get("kl") if isinstance(value, Mapping) else value
            for domain, value in found.items()
        }
    columns = [Column("Pruned on", list(rows))]
    for domain in dict.fromkeys(domain for found in rows.values() for domain in found):
        values = [found.get(domain) for found in rows.values()]
        lowest = min((value for value in values if value is not None), default=None)
        bold = Markup("<strong>{}</strong>")
        cells = [
            bold.format(significant(value))
            if len(rows) > 1 and value is not None and value == lowest
            else significant(value)
            for value in values
        ]
        columns.append(Column(domain, cells, number=True))
    caption = "KL to the full model by domain of the evaluation text; the lowest of each column is bold"
    return Table(caption, columns)


def expert_width_table(layers: Sequence[ExpertWidths]) -> Table:
    """Average widths of experts per layer."""
    return Table(
        "Widths of experts per layer: plain mean, and weighted by how often experts are chosen",
        [
            Column("Layer", [layer.layer for layer in layers], number=True),
            Column("Experts", [len(layer.widths) for layer in layers], number=True),
            Column("Pruned", [layer.widths.count((0, 0, 0)) for layer in layers], number=True),
            Column("Mean width", [f"{layer.mean:.3f}" for layer in layers], number=True),
            Column("Mean width by use", [f"{layer.active_mean:.3f}" for layer in layers], number=True),
        ],
        sortable=True,
    )
