"""Tables that people and screen readers can follow: captions, scoped headers, numbers flush right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rco.report.data import Evaluated, GroupWidth
from rco.report.markup import Markup, element, fragment
from rco.report.numbers import DASH, count, measured, percent, short, significant

__all__ = [
    "Column",
    "domain_tables",
    "evaluation_table",
    "fold_names",
    "group_table",
    "key_values",
    "table",
]

_MOST_GROUPS = 1500


@dataclass(frozen=True)
class Column:
    """A column's heading and how its cells are set."""

    title: str
    number: bool = False
    code: bool = False


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    *,
    caption: str,
    foot: Sequence[Sequence[Any]] = (),
    sortable: bool = False,
    strong: Sequence[int] = (),
) -> Markup:
    """A table whose first column names the rows.

    Args:
        columns: Headings.
        rows: Cells: text or markup.
        caption: What the table shows.
        foot: Rows that sum up; they stay below when the rest is sorted.
        sortable: Whether a click on a heading sorts.
        strong: Indices of rows to stress.
    """

    def cells(row: Sequence[Any], *, stressed: bool = False) -> Markup:
        made = []
        for index, (column, cell) in enumerate(zip(columns, row, strict=True)):
            content = element("code", cell) if column.code and cell != DASH else cell
            name, scope = ("th", "row") if index == 0 else ("td", None)
            made.append(element(name, content, scope=scope, class_="n" if column.number else None))
        return element("tr", made, class_="strong" if stressed else None)

    def heading(column: Column) -> Markup:
        content: Any = column.title
        if sortable:
            content = element("button", column.title, type="button")
        return element("th", content, scope="col", class_="n" if column.number else None)

    body = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", [heading(column) for column in columns])),
        element("tbody", [cells(row, stressed=index in strong) for index, row in enumerate(rows)]),
        element("tfoot", [cells(row) for row in foot]) if foot else None,
        class_="sortable" if sortable else None,
    )
    return element("div", body, class_="scroll", tabindex="0", role="group", aria_label=caption)


def key_values(values: Mapping[str, Any], caption: str) -> Markup:
    """Names and values of a flat document; inner ones are written with dots."""
    rows = [[name, value] for name, value in _flat(values)]
    return table([Column("Name", code=True), Column("Value")], rows, caption=caption)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{name}.")
        elif value is None or value in ([], {}):
            found.append((name, DASH))
        elif isinstance(value, bool):
            found.append((name, "yes" if value else "no"))
        elif isinstance(value, list | tuple):
            found.append((name, ", ".join(str(entry) for entry in value)))
        else:
            found.append((name, str(value)))
    return found


# --------------------------------------------------------------------- evaluation


def evaluation_table(rows: Sequence[Evaluated], caption: str) -> Markup:
    """Allocations side by side; a column appears only if something was measured for it."""
    tasks = list(dict.fromkeys(task for row in rows for task in row.tasks))
    errors = any(row.kl_error or row.perplexity_error for row in rows) or any(
        scores.get("stderr") for row in rows for scores in row.tasks.values()
    )
    candidates: list[tuple[Column, list[Any]]] = [
        (Column("Bits", number=True), [None if r.bits is None else short(r.bits) for r in rows]),
        (Column("Experts", number=True), [None if r.experts is None else count(r.experts) for r in rows]),
        (Column("KL", number=True), [None if r.kl is None else measured(r.kl, r.kl_error) for r in rows]),
        (
            Column("Perplexity", number=True),
            [None if r.perplexity is None else measured(r.perplexity, r.perplexity_error) for r in rows],
        ),
        *((Column(task, number=True), [_accuracy(row.tasks.get(task)) for row in rows]) for task in tasks),
        (
            Column("Recovery", number=True),
            [None if r.recovery is None else percent(r.recovery / 100) for r in rows],
        ),
        (
            Column("Within budget"),
            [
                None if r.within_budget is None or r.full else ("yes" if r.within_budget else "no")
                for r in rows
            ],
        ),
    ]
    shown = [(column, cells) for column, cells in candidates if any(cell is not None for cell in cells)]
    body = []
    for index, row in enumerate(rows):
        name = fragment(row.name, element("span", "this run", class_="tag")) if row.chosen else row.name
        cells = [cells[index] for _, cells in shown]
        body.append([name, *(DASH if cell is None else cell for cell in cells)])
    return table(
        [Column("Allocation"), *(column for column, _ in shown)],
        body,
        caption=f"{caption}; ± is one standard error" if errors else caption,
        strong=[index for index, row in enumerate(rows) if row.chosen],
    )


def _accuracy(scores: Mapping[str, float | None] | None) -> Markup | None:
    if not scores or scores.get("acc") is None:
        return None
    return measured(scores["acc"], scores.get("stderr"))


def domain_tables(rows: Sequence[Evaluated]) -> list[Markup]:
    """KL and perplexity per domain of the evaluation text."""
    domains = list(dict.fromkeys(domain for row in rows for domain in row.by_domain))
    found = []
    for key, title in (("kl", "KL to the full model"), ("perplexity", "Perplexity")):
        known = [
            row
            for row in rows
            if any(values.get(key) is not None for values in row.by_domain.values())
            and not (key == "kl" and row.full)  # which is 0 by definition
        ]
        if not domains or not known:
            continue
        body = [
            [row.name, *(significant(row.by_domain.get(domain, {}).get(key)) for domain in domains)]
            for row in known
        ]
        found.append(
            table(
                [Column("Allocation"), *(Column(domain, number=True) for domain in domains)],
                body,
                caption=f"{title} by domain of the evaluation text",
                strong=[index for index, row in enumerate(known) if row.chosen],
            )
        )
    return found


# ------------------------------------------------------------------------- groups


def group_table(groups: Sequence[GroupWidth]) -> Markup:
    """Every group with its width; where there are too many to list, by block and kind."""
    if len(groups) > _MOST_GROUPS:
        return _folded_groups(groups)
    sensitivity = any(group.sensitivity for group in groups)
    errors = any(group.relative_error for group in groups)
    columns = [
        Column("Group", code=True),
        Column("Block", number=True),
        Column("Linears", number=True),
        Column("Weights", number=True),
        Column("Bits", number=True),
    ]
    columns += [Column("Predicted KL", number=True)] if sensitivity else []
    columns += [Column("Relative error", number=True)] if errors else []
    rows = []
    for group in groups:
        width = int(group.width)
        row: list[Any] = [
            group.name,
            DASH if group.block is None else group.block,
            len(group.members),
            count(group.parameters),
            f"{group.width:g}",
        ]
        row += [significant(group.sensitivity.get(width), 3)] if sensitivity else []
        row += [significant(group.relative_error.get(width), 3)] if errors else []
        rows.append(row)
    caption = "All groups; predictions and errors are those at the chosen width"
    return table(columns, rows, caption=caption, sortable=True)


def _folded_groups(groups: Sequence[GroupWidth]) -> Markup:
    cells: dict[tuple[int, str], list[GroupWidth]] = {}
    for group in groups:
        cells.setdefault((-1 if group.block is None else group.block, group.kind), []).append(group)
    rows = []
    for (block, kind), members in sorted(cells.items()):
        weights = sum(group.parameters for group in members)
        bits = sum(group.parameters * group.width for group in members) / weights if weights else None
        lowest, highest = min(g.width for g in members), max(g.width for g in members)
        spread = f"{lowest:g} to {highest:g}" if lowest != highest else f"{lowest:g}"
        label = DASH if block < 0 else block
        rows.append([kind, label, count(len(members)), count(weights), significant(bits), spread])
    columns = [
        Column("Kind", code=True),
        Column("Block", number=True),
        Column("Groups", number=True),
        Column("Weights", number=True),
        Column("Average bits", number=True),
        Column("Widths"),
    ]
    caption = f"{count(len(groups))} groups by block and kind; allocation.json in the run's folder lists each"
    return table(columns, rows, caption=caption, sortable=True)


def fold_names(sizes: dict[str, int], most: int) -> tuple[dict[str, tuple[int, int]], bool]:
    """Sizes added up over numbered names, from the innermost number outwards, until at most ``most`` are left.

    Returns:
        Name, with ``*`` for what was folded, to (how many, their sum); and whether anything was folded.
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
