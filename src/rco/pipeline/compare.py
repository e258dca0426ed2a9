"""Methods side by side on one problem: the same tokens, the same evaluation, several seeds, one table.

:func:`run_comparison` knows nothing of what is compressed: a :class:`Contest` says how a method is run with a seed
and how an allocation is judged, and each kind of compression makes its own.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rco.core.result import SearchResult
from rco.folders import atomic_path, read_json, write_json_atomic, write_text_atomic
from rco.pipeline.progress import Progress
from rco.runs import RunDirectory, environment

__all__ = ["Comparison", "Contest", "measured", "parse_methods", "run_comparison", "seeds_of", "summary"]

_ENTRIES = "comparison.json"


class Contest(Protocol):
    """One problem that methods compete on."""

    tokens: int  # that every search may forward, a backward counted as two more
    tokens_per_batch: int

    def run(self, method: str, seed: int, tokens: int) -> SearchResult:
        """Run a method with a seed and an allowance."""
        ...

    def judge(self, method: str, seed: int, result: SearchResult) -> dict[str, Any]:
        """Measure what a method found: at least ``kl`` and ``perplexity``."""
        ...


@dataclass(frozen=True)
class Comparison:
    """What was measured, and where it is written.

    Attributes:
        rows: One per method: means and standard deviations over seeds.
        entries: One per method and seed.
        folder: Holds ``comparison.json``, ``comparison.md``, ``comparison.csv`` and the plot.
        plot: The picture; None without matplotlib.
    """

    rows: list[dict[str, Any]]
    entries: list[dict[str, Any]]
    folder: Path
    plot: Path | None


def parse_methods(text: str) -> list[tuple[str, str, float]]:
    """(label, method, share of the tokens) of a list such as ``rco,rco@0.1,evoesap``."""
    found = []
    for label in (part.strip() for part in text.split(",")):
        if not label:
            continue
        name, _, share = label.partition("@")
        try:
            value = float(share) if share else 1.0
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise ValueError(
                f"{label!r}: after @ comes the share of the tokens, between 0 and 1, as in rco@0.1."
            )
        found.append((label, name, value))
    if not found:
        raise ValueError("--methods names no method; give a list such as rco,evoesap,random.")
    if len({label for label, _, _ in found}) < len(found):
        raise ValueError(f"--methods names a method twice: {text}.")
    return found


def run_comparison(
    run: RunDirectory,
    contest: Contest,
    methods: str,
    seeds: Sequence[int],
    progress: Progress,
    *,
    title: str,
) -> Comparison:
    """Run what is missing, then write the tables and the plot."""
    listed = parse_methods(methods)
    path = run.folder / _ENTRIES
    entries: list[dict[str, Any]] = read_json(path)["entries"] if path.exists() else []
    done = {(entry["label"], entry["seed"]) for entry in entries}
    jobs = [(label, name, share, seed) for seed in seeds for label, name, share in listed]
    count = progress.stage("comparison")
    for position, (label, name, share, seed) in enumerate(jobs):
        if (label, seed) not in done:
            result = contest.run(name, seed, int(share * contest.tokens))
            entries.append(measured(contest, label, seed, result))
            _write_entries(path, contest, entries)
        count(position + 1, len(jobs))
    _write_entries(path, contest, entries)
    labels = [label for label, _, _ in listed]
    rows = [
        summary(label, [e for e in entries if e["label"] == label and e["seed"] in seeds]) for label in labels
    ]
    rows.sort(key=lambda row: row["kl"])
    write_text_atomic(run.folder / "comparison.md", markdown(rows, title))
    write_text_atomic(run.folder / "comparison.csv", as_csv(rows))
    plot = _plot(rows, run.folder / "comparison.svg", title, progress)
    return Comparison(rows, entries, run.folder, plot)


def measured(contest: Contest, label: str, seed: int, result: SearchResult) -> dict[str, Any]:
    """What one method found with one seed, judged."""
    return {
        "label": label,
        "method": result.method,
        "seed": seed,
        **contest.judge(label, seed, result),
        "selection_loss": result.loss,
        "chosen_from": result.chosen_from,
        "tokens": (result.forwards + 2 * result.backwards) * contest.tokens_per_batch,
        "seconds": result.seconds,
        "choices": result.allocation.tolist(),
    }


def summary(label: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard deviations of one method over its seeds."""

    def spread(key: str) -> tuple[float, float]:
        values = [float(entry[key]) for entry in entries]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    (kl, kl_std), (perplexity, perplexity_std) = spread("kl"), spread("perplexity")
    domains: dict[str, Any] = {}
    for domain in entries[0].get("by_domain", {}):
        domains[domain] = statistics.fmean(float(e["by_domain"][domain]["kl"]) for e in entries)
    return {
        "method": label,
        "seeds": len(entries),
        "kl": kl,
        "kl_std": kl_std,
        "perplexity": perplexity,
        "perplexity_std": perplexity_std,
        "tokens": spread("tokens")[0],
        "seconds": spread("seconds")[0],
        "kl_by_domain": domains,
    }


def _write_entries(path: Path, contest: Contest, entries: Sequence[dict[str, Any]]) -> None:
    write_json_atomic(
        path, {"tokens": contest.tokens, "environment": environment(), "entries": list(entries)}
    )


def markdown(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The table for people."""
    lines = [
        f"# {title}",
        "",
        "Mean and standard deviation over seeds on held-out text, best first. Tokens are those a search forwarded, "
        "a backward pass counted as two; scores and the evaluation itself are not counted.",
        "",
        "| method | KL to the full model | perplexity | tokens | seconds | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['method']} | {row['kl']:.4f} ± {row['kl_std']:.4f} | {row['perplexity']:.3f} ± "
            f"{row['perplexity_std']:.3f} | {row['tokens']:,.0f} | {row['seconds']:.0f} | {row['seeds']} |"
        )
    return "\n".join(lines) + "\n"


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The table for programs."""
    domains = list(dict.fromkeys(domain for row in rows for domain in row["kl_by_domain"]))
    plain = [key for key in rows[0] if key != "kl_by_domain"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*plain, *(f"kl {domain}" for domain in domains)])
    for row in rows:
        writer.writerow(
            [*(row[key] for key in plain), *(row["kl_by_domain"].get(domain) for domain in domains)]
        )
    return out.getvalue()


def _plot(rows: Sequence[dict[str, Any]], path: Path, title: str, progress: Progress) -> Path | None:
    """KL of every method, with its spread over seeds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        progress.message("The plot is left out: it needs matplotlib (pip install 'rco[plot]').")
        return None
    figure = Figure(figsize=(7, 0.45 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    shown = list(reversed(rows))
    axes.barh(
        [row["method"] for row in shown],
        [row["kl"] for row in shown],
        xerr=[row["kl_std"] for row in shown],
        color=["#2a6f97" if row["method"].startswith("rco") else "#b8c4cc" for row in shown],
        error_kw={"lw": 1, "capsize": 3},
    )
    axes.set_xlabel("KL to the full model on held-out text (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="svg")
    return path


def seeds_of(first: int, count: int) -> list[int]:
    """That many seeds from the first on."""
    if count < 1:
        raise ValueError(f"--seeds must be at least 1, got {count}.")
    return list(range(first, first + count))
