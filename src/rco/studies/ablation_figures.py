"""One figure per sweep of the ablation study: KL of the algorithm as printed and of the whole search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rco.studies.drawing import figure_class, polish, save_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_ablations"]

# Okabe and Ito's palette; markers and dashes repeat the difference.
_STYLE: dict[str, dict[str, Any]] = {
    "printed": {"color": "#D55E00", "linestyle": ":", "marker": "^"},
    "spent": {"color": "#E69F00", "linestyle": "--", "marker": "s"},
    "search": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
}


def draw_ablations(
    out: Path, record: Mapping[str, Any], columns: Mapping[str, str], formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Draw every sweep of a record into ``out``; returns the files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
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
