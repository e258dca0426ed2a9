"""Tables, figures and recommendations of the ablation study (ablations.py)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rco.atomic_files import make_folder, write_text_atomic
from rco.plotting import figure_class, polish, save_figures

if TYPE_CHECKING:
    from ablations import Loop, Sweep
    from matplotlib.figure import Figure

# Results measured at every point, and their names in the tables.
COLUMNS = {
    "printed": "Algorithm 1 as printed",
    "spent": "Algorithm 1, rest spent",
    "search": "the whole search",
}

Run = Mapping[str, Any]


def summarize(sweeps: Sequence[Sweep], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry per sweep, one row per point, means and standard deviations over the point's seeds."""
    found = {(run["key"], run["seed"], column): run for run in runs for column in run["measured"]}
    described = []
    for sweep in sweeps:
        rows = []
        for point in sweep.points:
            row: dict[str, Any] = {
                "label": point.label,
                "loop": point.loop.to_dict(),
                "seeds": list(point.seeds),
            }
            for column in COLUMNS:
                these = [found[point.loop.key, seed, column] for seed in point.seeds]
                row[column] = {
                    **{name: _spread(these, column, name) for name in ("kl", "perplexity", "bits")},
                    "tokens": statistics.fmean(run["tokens"] for run in these),
                    "seconds": statistics.fmean(run["seconds"] for run in these),
                }
            rows.append(row)
        entry: dict[str, Any] = {
            "name": sweep.name, "title": sweep.title, "varies": sweep.varies, "setting": sweep.setting,
            "rows": rows,
        }  # fmt: skip
        if sweep.name == "seeds":
            entry["agreement"] = {
                column: _agreement(
                    [found[p.loop.key, p.seeds[0], column]["measured"][column] for p in sweep.points]
                )
                for column in COLUMNS
            }
        described.append(entry)
    return described


def _spread(runs: Sequence[Run], column: str, name: str) -> dict[str, float]:
    values = [float(run["measured"][column][name]) for run in runs]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def _agreement(measured: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many linears get the same width under every seed."""
    widths = list(zip(*(entry["widths"] for entry in measured), strict=True))
    return {"linears": len(widths), "same": sum(len(set(options)) == 1 for options in widths)}


def recommend(sweeps: Sequence[Mapping[str, Any]], centre: Loop) -> list[dict[str, Any]]:
    """For every setting: the value with the lowest mean KL, and those that noise does not tell apart from it.

    A value counts as equal if its mean lies within two standard errors of the difference from the best mean. The
    best is the luckiest of several, hence two; the error comes from the spread over seeds of all values of the
    sweep together, since three seeds alone may agree by chance.
    """
    advice = []
    for sweep in sweeps:
        if sweep["setting"] is None:
            continue
        entry: dict[str, Any] = {"setting": sweep["setting"], "title": sweep["title"]}
        entry["default"] = getattr(centre, sweep["setting"])
        rows = sweep["rows"]
        if sweep["name"] == "grouping":  # only rows with the full calibration set differ in grouping alone
            rows = [row for row in rows if row["loop"]["sequences"] == centre.sequences]
        entry["tested"] = [row["loop"][sweep["setting"]] for row in rows]
        for column in COLUMNS:
            best = min(rows, key=lambda row: row[column]["kl"]["mean"])
            spread = math.sqrt(statistics.fmean(row[column]["kl"]["std"] ** 2 for row in rows))
            entry[column] = {
                "best": best["loop"][sweep["setting"]],
                "as_good": [
                    row["loop"][sweep["setting"]]
                    for row in rows
                    if row[column]["kl"]["mean"] - best[column]["kl"]["mean"]
                    <= 2 * spread * math.sqrt(1 / len(row["seeds"]) + 1 / len(best["seeds"]))
                ],
            }
        advice.append(entry)
    return advice


# --------------------------------------------------------------------- documents


def write_ablations(
    out: Path, record: Mapping[str, Any], formats: Sequence[str] = ("png", "svg"), name: str = "ablations"
) -> list[Path]:
    """Write ``name.json``, ``name.md`` and a figure per sweep; returns the files written."""
    folder = make_folder(out)
    drawn = draw_ablations(folder, record, COLUMNS, formats) if formats else []
    documents = {
        folder / f"{name}.json": json.dumps(record, indent=1) + "\n",
        folder / f"{name}.md": ablation_markdown(record, drawn),
    }
    for path, text in documents.items():
        write_text_atomic(path, text)
    return [*documents, *drawn]


def ablation_markdown(record: Mapping[str, Any], figures: Sequence[Path] = ()) -> str:
    """The report."""
    settings, environment, centre = record["settings"], record["environment"], record["centre"]
    on_cpu = settings["device"] == "cpu" or not environment.get("gpu")
    machine = environment.get("cpu") if on_cpu else environment["gpu"][0]
    # Records from before there was a choice have no entry.
    weights = settings.get("printed_prior") == "weight-error"
    start = "logits from the errors of weights" if weights else "zero logits"
    parts = [
        "# Ablations of the search settings",
        "The effect of single settings of the search on its result, for users who consider other values than the "
        "defaults. Each sweep varies one setting and keeps the rest; docs/concepts.md of the package defines the "
        "terms.",
    ]
    if record["recommended"]:
        parts += [
            "## Result",
            _ranges(record),
            "Best values by mean KL. *As good*: values whose mean KL lies within two standard errors of the best.",
            recommendation_table(record),
        ]
    parts += [
        "## How it was measured",
        f"`{present_command(record)}`: {record['core_minutes']:.0f} minutes of runs, summed over workers and "
        f"threads, on {machine}, torch {environment.get('torch', '?')}.",
        f"* Model: {settings['model']} at {settings['bits']} bits, {record['linears']} linears, widths "
        f"{settings['widths']}; all runs share one candidate store.\n"
        f"* Text: {settings['sequences']} calibration and {settings['evaluation']} evaluation sequences of "
        f"{settings['length']} tokens ({settings['data']}).\n"
        f"* Centre of the sweeps: T = {centre['steps']} steps, g = {centre['samples']} samples, learning rate "
        f"{centre['lr']:g}, last temperature {centre['tau']:g}.\n"
        "* KL to the full model on evaluation text, mean ± standard deviation over seeds; the lowest mean is bold. "
        "Perplexity is that of the whole search.\n"
        "* Tokens are forwarded tokens, a backward pass counted as two; those of the whole search include the "
        "sensitivities.",
        "Every point is measured in three ways:",
        f"* *{COLUMNS['printed']}*: {start} at the start, no curvature; the result is the knapsack of the last "
        "logits.\n"
        f"* *{COLUMNS['spent']}*: the same, and left-over budget buys the upgrades with the highest logits.\n"
        f"* *{COLUMNS['search'].capitalize()}*: sensitivities as prior and curvature, the choice among candidates "
        "on selection text, exchanges.",
        _references(record),
    ]
    by_name = {path.stem.removeprefix("ablation_"): path for path in figures if path.suffix == ".png"}
    for sweep in record["sweeps"]:
        parts += [f"## {sweep['title']}", _table(sweep)]
        if "agreement" in sweep:
            parts.append(_seeds_line(sweep))
        if sweep["name"] in by_name:
            parts.append(f"![{sweep['title']}]({by_name[sweep['name']].name})")
    return "\n\n".join(parts) + "\n"


def present_command(record: Mapping[str, Any]) -> str:
    """The command that makes a record today; older records name the verb of ``rco`` that the script was."""
    command: str = record["command"]
    return command.replace("rco bench ablations", "python benchmarks/ablations.py")


def _ranges(record: Mapping[str, Any]) -> str:
    """Lowest and highest mean KL of every column over the swept settings, and the spread over seeds."""
    swept = [row for sweep in record["sweeps"] if sweep["setting"] is not None for row in sweep["rows"]]
    seeds = [row for sweep in record["sweeps"] if sweep["name"] == "seeds" for row in sweep["rows"]]

    def means(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
        return [row[column]["kl"]["mean"] for row in rows]

    lines = [
        f"| KL over all settings below | {' | '.join(COLUMNS.values())} |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, grouped in (("a width per linear", False), ("linears that engines fuse share a width", True)):
        rows = [row for row in swept if row["loop"]["grouped"] == grouped]
        if rows:
            cells = [f"{min(means(rows, c)):.4f} to {max(means(rows, c)):.4f}" for c in COLUMNS]
            lines.append(f"| lowest to highest mean, {name} | {' | '.join(cells)} |")
    if len(seeds) > 1:
        cells = [f"{statistics.stdev(means(seeds, column)):.4f}" for column in COLUMNS]
        lines.append(f"| standard deviation over seeds, centre of the sweeps | {' | '.join(cells)} |")
    return "\n".join(lines)


def _references(record: Mapping[str, Any]) -> str:
    shown = ", ".join(
        f"{name} {row['kl']:.4f} ({row['perplexity']:.2f} perplexity)"
        for name, row in record["references"].items()
    )
    return f"Without a search, on the same text: {shown}."


def _table(sweep: Mapping[str, Any]) -> str:
    lines = [
        f"| {sweep['varies']} | " + " | ".join(COLUMNS.values()) + " | perplexity | tokens, Algorithm 1 | "
        "tokens, search | seeds |",
        "|---|" + "---:|" * (len(COLUMNS) + 4),
    ]
    best = {column: min(row[column]["kl"]["mean"] for row in sweep["rows"]) for column in COLUMNS}
    for row in sweep["rows"]:
        cells = []
        for column in COLUMNS:
            kl = row[column]["kl"]
            text = f"{kl['mean']:.4f}" + (f" ± {kl['std']:.4f}" if len(row["seeds"]) > 1 else "")
            cells.append(f"**{text}**" if kl["mean"] == best[column] and len(sweep["rows"]) > 1 else text)
        lines.append(
            f"| {row['label']} | "
            + " | ".join(cells)
            + f" | {row['search']['perplexity']['mean']:.2f} | {row['printed']['tokens']:,.0f} | "
            f"{row['search']['tokens']:,.0f} | {len(row['seeds'])} |"
        )
    return "\n".join(lines)


def _seeds_line(sweep: Mapping[str, Any]) -> str:
    said = []
    for column, title in COLUMNS.items():
        values = [row[column]["kl"]["mean"] for row in sweep["rows"]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        agree = sweep["agreement"][column]
        said.append(
            f"{title}: mean {statistics.fmean(values):.4f}, standard deviation {spread:.4f}, range "
            f"{max(values) - min(values):.4f}; {agree['same']} of {agree['linears']} linears get the same width "
            "under every seed"
        )
    return "\n".join(f"- {line}." for line in said)


def recommendation_table(record: Mapping[str, Any]) -> str:
    """Best values and those that are as good, as a Markdown table."""
    lines = [
        "| setting | tested | best for Algorithm 1 | as good | best for the search | as good | default |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in record["recommended"]:
        lines.append(
            f"| {entry['title'].lower()} | {_values(entry['tested'])} | {_value(entry['printed']['best'])} | "
            f"{_values(entry['printed']['as_good'])} | {_value(entry['search']['best'])} | "
            f"{_values(entry['search']['as_good'])} | {_value(entry['default'])} |"
        )
    return "\n".join(lines)


def _values(values: Sequence[Any]) -> str:
    return ", ".join(_value(value) for value in values)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}"


# ----------------------------------------------------------------------- figures

# Okabe and Ito's palette; markers and dashes repeat the difference.
_STYLE: dict[str, dict[str, Any]] = {
    "printed": {"color": "#D55E00", "linestyle": ":", "marker": "^"},
    "spent": {"color": "#E69F00", "linestyle": "--", "marker": "s"},
    "search": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
}


def draw_ablations(
    out: Path, record: Mapping[str, Any], columns: Mapping[str, str], formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Draw every sweep of a record into ``out``; returns the files written."""
    blank = figure_class()
    drawn = {f"ablation_{sweep['name']}": _draw(blank, sweep, columns) for sweep in record["sweeps"]}
    return save_figures(out, drawn, formats)


def _draw(blank: type[Figure], sweep: Mapping[str, Any], columns: Mapping[str, str]) -> Figure:
    figure = blank(figsize=(4.6, 3.1), layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(sweep["rows"]))
    for shift, (column, title) in enumerate(columns.items()):
        means = [row[column]["kl"]["mean"] for row in sweep["rows"]]
        spread = [row[column]["kl"]["std"] for row in sweep["rows"]]
        # Side by side, so that error bars do not hide one another.
        axis.errorbar(
            places + 0.06 * (shift - 1),
            means,
            yerr=spread if any(spread) else None,
            label=title,
            capsize=3,
            linewidth=1.2,
            markersize=5,
            **_STYLE[column],
        )
    axis.set_xticks(places.tolist(), [row["label"] for row in sweep["rows"]])
    if max(len(row["label"]) for row in sweep["rows"]) > 6:
        axis.tick_params(axis="x", rotation=20)
    axis.set_xlabel(sweep["varies"], fontsize=8)
    axis.set_ylabel("KL to the full model", fontsize=8)
    polish(axis, sweep["title"])
    axis.legend(fontsize=7, frameon=False)
    return figure
