"""Figures of the knapsack study, as PNG and SVG: convergence, violation on a log axis, final gaps, and two more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rco.studies.drawing import figure_class, polish, save_figures
from rco.studies.knapsack_methods import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_figures"]

# Okabe and Ito's palette, told apart by readers with any colour vision; markers and dashes repeat the difference.
_STYLE: dict[str, dict[str, Any]] = {
    "manifold": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "manifold_printed": {"color": "#000000", "linestyle": ":", "marker": "x"},
    "manifold_slack": {"color": "#009E73", "linestyle": "--", "marker": "s"},
    "manifold_slack_printed": {"color": "#56B4E9", "linestyle": ":", "marker": "v"},
    "lagrangian": {"color": "#D55E00", "linestyle": "-.", "marker": "^"},
    "augmented_lagrangian": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1)), "marker": "D"},
}
_FLOOR = 1e-16  # what a log axis shows of an exact zero


def draw_figures(
    out: Path,
    study: Mapping[str, Any],
    multi_budget: Mapping[str, Any] | None = None,
    retraction: Mapping[str, Any] | None = None,
    formats: Sequence[str] = ("png", "svg"),
    dpi: int = 90,
) -> list[Path]:
    """Draw everything the records hold into ``out``; returns the files written.

    Raises:
        ImportError: matplotlib is not installed (``pip install "rco[plot]"``).
    """
    blank = figure_class()
    drawn: dict[str, Figure] = {
        "convergence": _convergence(blank, study),
        "violation": _violation(blank, study),
        "gaps": _gaps(blank, study),
    }
    if multi_budget is not None:
        drawn["multi_budget"] = _multi_budget(blank, multi_budget)
    if retraction is not None:
        drawn["retraction"] = _retraction(blank, retraction)
    named = {f"knapsack_{name}": figure for name, figure in drawn.items()}
    return save_figures(out, named, formats, dpi)


def _grid(figure_class: type[Figure], count: int, title: str) -> tuple[Figure, list[Axes]]:
    columns = min(4, count)
    rows = -(-count // columns)
    figure = figure_class(figsize=(3.1 * columns + 0.4, 2.3 * rows + 1.0), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for extra in axes[count:]:
        extra.set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure, axes[:count]


def _legend(figure: Figure, axes: list[Axes]) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize=8, frameon=False
    )


def _traces(
    figure_class: type[Figure], study: Mapping[str, Any], title: str, key: str, label: str
) -> tuple[Figure, list[Axes]]:
    figure, axes = _grid(figure_class, len(study["scenarios"]), title)
    for axis, (name, scenario) in zip(axes, study["scenarios"].items(), strict=True):
        for method, result in scenario["methods"].items():
            style = {k: v for k, v in _STYLE[method].items() if k != "marker"}
            for j, values in enumerate(result["trace"][key]):
                shown = np.maximum(np.abs(values) if key == "excess" else np.array(values), 0.0)
                if key == "excess":
                    if "slack" in method:
                        shown = np.maximum(np.array(values), 0.0)
                    shown = np.maximum(shown, _FLOOR)
                axis.plot(
                    result["trace"]["step"],
                    shown,
                    linewidth=1.1,
                    alpha=0.85,
                    label=METHODS[method] if j == 0 else None,
                    **style,
                )
        polish(axis, f"{name} ({scenario['groups']} × {scenario['options']})")
    for axis in axes[-4:]:
        axis.set_xlabel("step", fontsize=8)
    for axis in axes[::4]:
        axis.set_ylabel(label, fontsize=8)
    _legend(figure, axes)
    return figure, axes


def _convergence(figure_class: type[Figure], study: Mapping[str, Any]) -> Figure:
    figure, axes = _traces(
        figure_class, study, "Gap of the repaired assignment to the exact optimum", "gap", "gap in %"
    )
    for axis in axes:
        axis.set_yscale("symlog", linthresh=0.01, linscale=0.6)
        axis.set_ylim(bottom=0)
        axis.minorticks_off()
        axis.axhline(1.0, color="#888888", linewidth=0.7)
    return figure


def _violation(figure_class: type[Figure], study: Mapping[str, Any]) -> Figure:
    figure, axes = _traces(
        figure_class,
        study,
        "Violation of the budget at each step (zero is drawn at 1e-16)",
        "excess",
        "|C − B|",
    )
    for axis in axes:
        axis.set_yscale("log")
        axis.set_ylim(_FLOOR / 3, 1e4)
        axis.minorticks_off()
        axis.axhline(1e-8, color="#888888", linewidth=0.7)
    return figure


def _gaps(figure_class: type[Figure], study: Mapping[str, Any]) -> Figure:
    """Box plot over all instances of all scenarios, and every instance as a point."""
    figure = figure_class(figsize=(11.5, 4.6), layout="constrained")
    axis = figure.subplots()
    names, methods = list(study["scenarios"]), list(METHODS)
    width = 0.8 / len(methods)
    for m, method in enumerate(methods):
        gaps = [study["scenarios"][name]["methods"][method]["gap"] for name in names]
        places = np.arange(len(names)) + (m - (len(methods) - 1) / 2) * width
        color = _STYLE[method]["color"]
        axis.boxplot(
            gaps,
            positions=places.tolist(),
            widths=0.85 * width,
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": color, "alpha": 0.35, "edgecolor": color},
            medianprops={"color": color, "linewidth": 1.5},
            whiskerprops={"color": color},
            capprops={"color": color},
        )
        for j, (place, values) in enumerate(zip(places, gaps, strict=True)):
            axis.scatter(
                [place] * len(values),
                values,
                s=14,
                color=color,
                marker=_STYLE[method]["marker"],
                label=METHODS[method] if j == 0 else None,
                zorder=3,
            )
    axis.set_yscale("symlog", linthresh=0.01, linscale=0.6)
    axis.set_ylim(bottom=-0.002)
    axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axis.set_ylabel("final gap in %", fontsize=9)
    polish(axis, "Final gap to the exact optimum, every instance")
    axis.tick_params(labelsize=8)
    _legend(figure, [axis])
    return figure


def _multi_budget(figure_class: type[Figure], record: Mapping[str, Any]) -> Figure:
    settings = record["settings"]
    size = f"{settings['groups']} × {settings['options']}"
    title = f"{settings['budgets']} joint budgets, {size}: each line is one budget"
    figure, axes = _grid(figure_class, len(record["methods"]), title)
    for axis, (method, result) in zip(axes, record["methods"].items(), strict=True):
        for values in result["trace"]["relative"]:
            shown = np.maximum(np.abs(values), _FLOOR)
            axis.plot(result["trace"]["step"], shown, linewidth=0.8, color=_STYLE[method]["color"], alpha=0.7)
        axis.set_yscale("log")
        axis.set_ylim(_FLOOR / 3, 1.0)
        axis.set_xlabel("step", fontsize=8)
        polish(axis, METHODS[method])
    axes[0].set_ylabel("|C − B| / B", fontsize=8)
    return figure


def _retraction(figure_class: type[Figure], bench: Mapping[str, Any]) -> Figure:
    figure = figure_class(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    names = list(bench["scenarios"])
    for offset, kind, color in ((-0.18, "newton", "#0072B2"), (0.18, "bisection", "#D55E00")):
        counts = [
            np.repeat(
                [int(v) for v in bench["scenarios"][name][kind]["histogram"]],
                list(bench["scenarios"][name][kind]["histogram"].values()),
            )
            for name in names
        ]
        axis.boxplot(
            counts,
            positions=(np.arange(len(names)) + offset).tolist(),
            widths=0.3,
            patch_artist=True,
            boxprops={"facecolor": color, "alpha": 0.35, "edgecolor": color},
            medianprops={"color": color, "linewidth": 1.5},
            flierprops={"markersize": 2, "markeredgecolor": color},
        )
        axis.plot([], [], color=color, linewidth=6, alpha=0.5, label=kind)
    axis.axhline(34, color="#888888", linestyle="--", linewidth=0.8, label="log2(100 / 1e-8) = 34")
    axis.set_xticks(range(len(names)), names)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("softmax evaluations", fontsize=9)
    polish(axis, "Evaluations per retraction inside a run")
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, frameon=False, loc="center right")
    return figure
