"""The plots of a comparison: quality against bits, quality against tokens, recovery with wall time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rco.plotting import save_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_comparison", "draw_divergence"]

# Colours for colour-blind readers; RCO has the first, with a heavier line.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#222222")
_MARKERS = "os^Dv<>PX*ph"


def draw_comparison(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    entries: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> list[Path]:
    """Draw the available plots; a comparison at one budget has no curve against bits."""
    from matplotlib.figure import Figure

    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in sorted(rows, key=lambda row: float(row["kl"]))))
    style = {method: _style(method, place) for place, method in enumerate(methods)}
    drawn = []
    # Budgets of a sweep alone have no other method to compare with.
    shared = [b for b in budgets if len({row["method"] for row in rows if row["budget"] == b}) > 1] or budgets
    if len(budgets) > 1:
        figure = Figure(figsize=(8, 5), layout="constrained")
        _quality(figure.subplots(), rows, style)
        drawn.append(_save(figure, folder / "quality.svg"))
    if any("curve" in entry for entry in entries):
        figure = Figure(figsize=(1.5 + 4.5 * len(shared), 4.2), layout="constrained")
        panels = figure.subplots(1, len(shared), squeeze=False)[0]
        for axes, budget in zip(panels, shared, strict=True):
            _any_time(axes, [entry for entry in entries if entry["budget"] == budget], style)
            axes.set_title(f"{budget}", fontsize=10)
        panels[-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        drawn.append(_save(figure, folder / "tokens.svg"))
    figure = Figure(figsize=(1.5 + 4.5 * len(shared), 0.32 * len(methods) + 1.4), layout="constrained")
    for axes, budget in zip(figure.subplots(1, len(shared), squeeze=False)[0], shared, strict=True):
        _recovery(
            axes, [row for row in rows if row["budget"] == budget], bool(about["full_model"].get("tasks"))
        )
        axes.set_title(f"{budget}", fontsize=10)
    drawn.append(_save(figure, folder / "recovery.svg"))
    return drawn


def draw_divergence(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    entries: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> list[Path]:
    """KL of every method, with its spread over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.45 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    shown = list(reversed(rows))
    axes.barh(
        [row["method"] for row in shown],
        [row["kl"] for row in shown],
        xerr=[row["kl_std"] for row in shown],
        color=[_bar_colour(row) for row in shown],
        error_kw={"lw": 1, "capsize": 3},
    )
    axes.set_xlabel("KL to the full model on held-out text (nats per token)")
    axes.set_title(about["title"], fontsize=10)
    _plain(axes)
    return [_save(figure, folder / "comparison.svg")]


def _bar_colour(row: Mapping[str, Any]) -> str:
    return _COLOURS[0] if row["method"].startswith("rco") else "#b8c4cc"


def _style(method: str, place: int) -> dict[str, Any]:
    leading = method.startswith("rco")
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "linewidth": 2.0 if leading else 1.0,
        "markersize": 5 if leading else 4,
        "label": method,
    }


def _quality(axes: Axes, rows: Sequence[Mapping[str, Any]], style: Mapping[str, dict[str, Any]]) -> None:
    files = all("bytes" in row for row in rows)

    def size(row: Mapping[str, Any]) -> float:
        return float(row["bytes"]) / 1e6 if files else float(row["bits"])

    for method, look in style.items():
        mine = sorted((row for row in rows if row["method"] == method), key=size)
        axes.errorbar(
            [size(row) for row in mine],
            [row["kl"] for row in mine],
            yerr=[row["kl_std"] for row in mine],
            capsize=2,
            **look,
        )
    _logarithmic(axes)
    axes.set_xlabel("size of the file (MB)" if files else "average width (bits)")
    axes.set_ylabel("KL to the full model (nats per token)")
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _plain(axes)


def _any_time(axes: Axes, entries: Sequence[Mapping[str, Any]], style: Mapping[str, dict[str, Any]]) -> None:
    for method, look in style.items():
        for entry in entries:
            if entry["label"] == method and "curve" in entry:
                axes.plot(*zip(*entry["curve"], strict=True), **look)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")
    _logarithmic(axes)
    axes.set_xlabel("tokens (a backward counts as two)")
    axes.set_ylabel("KL to the full model")
    _plain(axes)


def _recovery(axes: Axes, rows: Sequence[Mapping[str, Any]], tasks: bool) -> None:
    shown = sorted(rows, key=lambda row: float(row["recovery"]))
    bars = axes.barh(
        [row["method"] for row in shown],
        [row["recovery"] for row in shown],
        color=[_bar_colour(row) for row in shown],
    )
    axes.bar_label(bars, [f" {row['recovery']:.1f} %, {row['seconds']:.0f} s" for row in shown], fontsize=7)
    low, high = shown[0]["recovery"], max(100.0, shown[-1]["recovery"])  # recovery may exceed 100 %
    axes.set_xlim(max(0.0, low - max(0.2 * (high - low), 1.0)), high)
    axes.set_xlabel(
        "accuracy, % of the full model's" if tasks else "full model's perplexity, % of this one's"
    )
    axes.tick_params(labelsize=8)
    _plain(axes)


def _logarithmic(axes: Axes) -> None:
    """A logarithmic KL axis with plain numbers as in the tables, also between powers of ten."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if high < 20 * low else "")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> Path:
    (written,) = save_figures(path.parent, {path.stem: figure}, ["svg"])
    return written
