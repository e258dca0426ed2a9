"""A table of many searches: means and standard deviations over seeds, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from rco.atomic_files import write_json_atomic, write_text_atomic
from rco.evaluation.statistics import recovery
from rco.pipeline.evaluate import headline
from rco.runs import environment

__all__ = ["Draw", "as_csv", "markdown", "summarise", "table_columns", "write_comparison"]

# Function of (folder, rows, entries, about); returns the paths of the plots.
Draw = Callable[
    [Path, Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], Mapping[str, Any]], list[Path]
]
_AMOUNTS = {
    "bits": "bits",
    "bytes": "bytes",
    "experts": "experts kept",
}  # key of an entry -> heading of its column


def write_comparison(
    folder: Path,
    about: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    draw: Draw,
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Write ``comparison.json``, ``.md``, ``.csv`` and the plots; return the table's rows and the plots.

    Args:
        folder: Folder of the files.
        about: ``title``; ``tokens`` and ``seconds``, the allowance of each search (None: no limit);
            ``full_model`` with its perplexity and, if measured, ``tasks``; ``failed``, name to reason.
        entries: One per search.
        draw: Draws the plots.
    """
    rows = summarise(entries, about["full_model"])
    write_json_atomic(
        folder / "comparison.json",
        {**about, "environment": environment(), "rows": rows, "entries": list(entries)},
    )
    for name, text in (("comparison.md", markdown(rows, about)), ("comparison.csv", as_csv(rows))):
        write_text_atomic(folder / name, text)
    return rows, draw(folder, rows, entries, about)


def summarise(
    entries: Sequence[Mapping[str, Any]], full: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """One row per budget and method, best first within a budget; with recovery if the full model was measured."""
    rows = []
    for budget in dict.fromkeys(entry["budget"] for entry in entries):
        mine = [entry for entry in entries if entry["budget"] == budget]
        found = [
            _row([entry for entry in mine if entry["label"] == label], full)
            for label in dict.fromkeys(entry["label"] for entry in mine)
        ]
        rows += sorted(found, key=lambda row: float(row["kl"]))
    return rows


def _row(entries: Sequence[Mapping[str, Any]], full: Mapping[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "budget": entries[0]["budget"],
        "method": entries[0]["label"],
        "seeds": len(entries),
    }
    for key in ("kl", "perplexity"):
        row[key], row[f"{key}_std"] = _spread([entry[key] for entry in entries])
    for key in (key for key in _AMOUNTS if key in entries[0]):
        exact = {str(entry.get(f"{key}_exact", entry[key])) for entry in entries}
        row[key] = _spread([entry[key] for entry in entries])[0]
        row[f"{key}_exact"] = exact.pop() if len(exact) == 1 else None
    for key in ("tokens", "forward_tokens", "backward_tokens", "seconds"):
        row[key], row[f"{key}_std"] = _spread([entry[key] for entry in entries])
    if full is not None:
        row["recovery"] = 100.0 * full["perplexity"] / row["perplexity"]
    for domain in entries[0]["by_domain"]:
        for key in ("kl", "perplexity"):
            found = [entry["by_domain"][domain][key] for entry in entries]
            row[f"{key} {domain}"], row[f"{key} {domain}_std"] = _spread(found)
    measured = {
        task: [headline(entry["tasks"][task]) for entry in entries] for task in entries[0].get("tasks", {})
    }
    tasks = {task: values for task, values in measured.items() if None not in values}
    for task, values in tasks.items():
        row[f"acc {task}"], row[f"acc {task}_std"] = _spread([value for value in values if value is not None])
    known = (full or {}).get("tasks", {})
    share = recovery(
        {task: {"acc": row[f"acc {task}"]} for task in tasks},
        {task: {"acc": value} for task in tasks if (value := headline(known.get(task, {}))) is not None},
    )["average"]
    if share is not None:
        row["recovery"] = share
    return row


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table_columns(
    rows: Sequence[Mapping[str, Any]], corpora: bool = True
) -> list[tuple[str, Callable[[Mapping[str, Any]], str]]]:
    """Heading and cell formatter of every column.

    Args:
        rows: Rows from :func:`summarise`.
        corpora: Include the perplexity on each corpus, if there are several.
    """

    def plus_minus(key: str, digits: int, unit: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
        def text(row: Mapping[str, Any]) -> str:
            if key not in row:
                return ""
            spread = (
                f" ± {unit * row[f'{key}_std']:.{digits}f}" if row["seeds"] > 1 else ""
            )  # one seed has no spread
            return f"{unit * row[key]:.{digits}f}{spread}"

        return text

    def amount(key: str) -> Callable[[Mapping[str, Any]], str]:
        def text(row: Mapping[str, Any]) -> str:
            if row[f"{key}_exact"] is None:
                return f"{row[key]:,.4f}"
            exact = Fraction(row[f"{key}_exact"])
            return f"{exact.numerator:,}" if exact.denominator == 1 else f"{float(exact):.4f}".rstrip("0")

        return text

    first = rows[0] if rows else {}
    named = [key for key in first if not key.endswith("_std")]
    domains = [key for key in named if key.startswith("perplexity ")]
    return [
        ("method", lambda row: str(row["method"])),
        ("KL to the full model", plus_minus("kl", 4)),
        ("perplexity", plus_minus("perplexity", 3)),
        *((key, plus_minus(key, 3)) for key in domains if corpora and len(domains) > 1),
        *((name, amount(key)) for key, name in _AMOUNTS.items() if key in first),
        *((key, plus_minus(key, 1, 100.0)) for key in named if key.startswith("acc ")),
        ("tokens", lambda row: f"{row['tokens']:,.0f}"),
        ("seconds", plus_minus("seconds", 0)),
        ("seeds", lambda row: str(row["seeds"])),
    ]


def markdown(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    limits = [
        f"{about['tokens']:,} tokens" if about["tokens"] else "",
        f"{about['seconds']:g} seconds" if about["seconds"] else "",
    ]
    columns = table_columns(rows)
    lines = [
        f"# {about['title']}",
        "",
        "Mean ± standard deviation over seeds on held-out text, lowest KL first. Allowance of each search: "
        f"{' and '.join(filter(None, limits))}. A backward pass counts as two forward passes; priors, proxies, the "
        "comparison of candidates and exchanges count, too. Perplexity of the full model: "
        f"{about['full_model']['perplexity']:.3f}.",
    ]
    for budget in dict.fromkeys(row["budget"] for row in rows):
        lines += [
            "",
            f"## {budget}",
            "",
            f"| {' | '.join(name for name, _ in columns)} |",
            "|---|" + "---:|" * (len(columns) - 1),
        ]
        for row in (row for row in rows if row["budget"] == budget):
            lines.append(f"| {' | '.join(text(row) for _, text in columns)} |")
    if about["failed"]:
        lines += ["", "Not run:", ""]
        lines += [f"* {name}: {reason}" for name, reason in about["failed"].items()]
    return "\n".join(lines) + "\n"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as CSV."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([row.get(column) for column in columns])
    return out.getvalue()
