"""The knapsack study as Markdown and files: every number comes from the records, none is typed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rco.folders import make_folder, write_text_atomic
from rco.studies.knapsack_figures import draw_figures
from rco.studies.knapsack_methods import METHODS
from rco.studies.knapsack_paper import compare_with_paper

__all__ = ["retraction_table", "study_markdown", "write_study"]


def write_study(
    out: Path | str,
    study: Mapping[str, Any],
    multi_budget: Mapping[str, Any] | None = None,
    retraction: Mapping[str, Any] | None = None,
    figures: Sequence[str] = ("png", "svg"),
    name: str = "knapsack_study",
) -> list[Path]:
    """Write ``name.json``, ``name.md`` and the figures in the formats asked for; returns the files written."""
    folder = make_folder(Path(out))
    record = {"knapsack": study, "multi_budget": multi_budget, "retraction": retraction}
    drawn = draw_figures(folder, study, multi_budget, retraction, figures) if figures else []
    documents = {
        folder / f"{name}.json": json.dumps(record, separators=(",", ":")) + "\n",
        folder / f"{name}.md": study_markdown(study, multi_budget, retraction, drawn),
    }
    for path, text in documents.items():
        write_text_atomic(path, text)
    return [*documents, *drawn]


def study_markdown(
    study: Mapping[str, Any],
    multi_budget: Mapping[str, Any] | None = None,
    retraction: Mapping[str, Any] | None = None,
    figures: Sequence[Path] = (),
) -> str:
    """The report."""
    settings, environment = study["settings"], study["environment"]
    parts = [
        "# Knapsack study",
        f"Instances per scenario: {settings['instances']}; {settings['steps']} steps of Adam at learning rate "
        f"{settings['lr']:g}, seed {settings['seed']}; {study['seconds']:.0f} s with "
        f"{settings['workers']} workers on "
        f"{environment.get('cpu', 'an unknown processor')}, torch {environment.get('torch', '?')}. All "
        "methods start "
        "from the same random point on C = B and follow the same closed-form gradient with the same Adam; they "
        "differ in how they handle the budget. On the manifold, Adam's step is made tangent in Adam's own "
        "metric before the retraction (`straighten=True`); *as printed* is the paper's algorithm without "
        "that.",
        "Gap: per cent below the exact optimum, of the likeliest assignment after greedy repair (options "
        "that lose "
        "the least value per cost saved until it fits, then costlier ones that gain the most per cost "
        "while they "
        "fit). Violation: mean |C - B| over all steps, in cost units; with slack only what exceeds the "
        "budget counts. "
        f"Repair is evaluated every {settings['record_every']} steps.",
        "## Gap in per cent (mean ± standard deviation)",
        _table(study, lambda r: f"{r['gap_mean']:.3f} ± {r['gap_std']:.3f}"),
        "## Violation (mean over steps, largest in brackets)",
        _table(study, lambda r: f"{_power(r['violation_mean'])} ({_power(r['violation_max'])})"),
        "## Steps to within 1 % of the optimum (mean over instances)",
        _table(study, _steps),
        "## Chosen multiplier schedules",
        "Of each sweep the schedule with the smallest mean gap (to 0.001 %), then the smallest violation, "
        "is shown "
        "above: the choice that favours the Lagrangian methods most, made anew for every scenario. With u "
        "the range "
        "of total value over the range R of total cost, the Lagrangian adds rate · u/R · (C − B) to its "
        "multiplier "
        "at each step; the augmented Lagrangian starts at a penalty of start · u/R and every 20 steps "
        "adds penalty · "
        "(C − B) and multiplies the penalty by growth, up to 10⁴ u/R.",
        _schedules(study),
        "## Retraction inside the runs",
        "Mean softmax evaluations per retraction: "
        + ", ".join(
            f"{name} {scenario['methods']['manifold']['evaluations']:.2f}"
            for name, scenario in study["scenarios"].items()
        )
        + ".",
    ]
    if retraction is not None:
        parts += ["## Newton and bisection on the same iterates", retraction_table(retraction)]
    if multi_budget is not None:
        parts += ["## Many budgets at once", _multi_table(multi_budget)]
    parts += [
        "## Compared with the paper",
        "The paper names its scenarios and some of their sizes, not their distributions; our instances "
        "are our own. "
        "Each line states one of its claims against this run.",
        "\n".join(f"- {line}" for line in compare_with_paper(study, multi_budget, retraction)),
    ]
    shown = [path.name for path in figures if path.suffix == figures[0].suffix]
    if shown:
        parts += ["## Figures", "\n".join(f"![{Path(n).stem.replace('_', ' ')}]({n})" for n in shown)]
    return "\n\n".join(parts) + "\n"


def _table(study: Mapping[str, Any], cell: Any) -> str:
    lines = [
        "| Scenario | N × K | " + " | ".join(METHODS.values()) + " |",
        "|---|---|" + "---:|" * len(METHODS),
    ]
    for name, scenario in study["scenarios"].items():
        cells = [cell(scenario["methods"][method]) for method in METHODS]
        lines.append(f"| {name} | {scenario['groups']} × {scenario['options']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _steps(result: Mapping[str, Any]) -> str:
    within = result["steps_within"]
    if result["steps_within_mean"] is not None:
        return f"{result['steps_within_mean']:.0f}"
    reached = sum(w is not None for w in within)
    return "never" if reached == 0 else f"{reached} of {len(within)} only"


def _power(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _schedules(study: Mapping[str, Any]) -> str:
    lines = ["| Scenario | Lagrangian | Augmented Lagrangian |", "|---|---|---|"]
    for name, scenario in study["scenarios"].items():
        shown = [
            ", ".join(f"{key} {value:g}" for key, value in scenario["methods"][method]["setting"].items())
            for method in ("lagrangian", "augmented_lagrangian")
        ]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


def retraction_table(bench: Mapping[str, Any]) -> str:
    """Counts and times of both retractions as a Markdown table."""
    lines = [
        f"{bench['settings']['steps']} retractions per scenario, one instance. Newton to 1e-12 of the budget, "
        f"bisection on [-50, 50] to {bench['settings']['bisection_tol']:g}.",
        "",
        "| Scenario | N × K | Newton mean (max) | µs | Bisection mean (max) | µs |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, s in bench["scenarios"].items():
        newton, bisection = s["newton"], s["bisection"]
        lines.append(
            f"| {name} | {s['groups']} × {s['options']} | {newton['mean']:.2f} ({newton['max']}) | "
            f"{newton['microseconds']:.0f} | {bisection['mean']:.1f} ({bisection['max']}) | "
            f"{bisection['microseconds']:.0f} |"
        )
    return "\n".join(lines)


def _multi_table(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    lines = [
        f"{settings['budgets']} joint budgets, {settings['groups']} × {settings['options']}, "
        f"{settings['steps']} steps. "
        "Violations are relative to each budget; the gap is that of the expected value to the linear "
        "relaxation's "
        "optimum.",
        "",
        "| Method | mean violation | largest | at the end | gap in % | ms per step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, result in record["methods"].items():
        lines.append(
            f"| {METHODS[method]} | {_power(result['violation_mean'])} | {_power(result['violation_max'])} | "
            f"{_power(result['violation_final'])} | {result['gap_percent']:.2f} | "
            f"{result['milliseconds']:.1f} |"
        )
    return "\n".join(lines)
