"""The parts of a sample as one bar beside the floor, and what it holds beside what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rco.studies.drawing import save_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["write_figure", "write_memory_figure"]

_COLOURS = {
    "knapsack": "#c44536",
    "dequantise": "#197278",
    "inner products": "#283d3b",
    "KL": "#772e25",
    "rest": "#b8c4cc",
}


def write_figure(report: dict[str, Any], path: Path) -> bool:
    """Draw a step report; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for name, seconds in report["breakdown"]["seconds"].items():
        width = 1e3 * max(seconds, 0.0)
        axes.barh(["sample"], [width], left=[left], color=_COLOURS.get(name, "#888888"), label=name)
        left += width
    axes.barh(["floor"], [1e3 * report["plain"]["floor"]["seconds"]], color="#dddddd")
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"{report['shape']}, {report['tokens']} tokens: {report['plain']['ratio']:.2f} x the floor"
    )
    axes.legend(ncols=5, fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    _save(figure, axes, path)
    return True


def write_memory_figure(report: dict[str, Any], path: Path) -> bool:
    """Draw a memory report; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    modes = report["modes"]
    figure = Figure(figsize=(7, 0.8 + 0.6 * len(modes)), layout="constrained")
    axes = figure.subplots()
    bars = [("expected_bytes", "expected", -0.2, "#b8c4cc"), ("peak_bytes", "measured", 0.2, "#197278")]
    for key, label, shift, colour in bars:
        found = [(place + shift, row[key] / 2**30) for place, row in enumerate(modes) if row[key] is not None]
        if found:  # nobody measures a CPU's
            places, sizes = zip(*found, strict=True)
            axes.barh(places, sizes, height=0.4, color=colour, label=label)
    names = [f"{row['memory']}{', checkpointing' if row['checkpointing'] else ''}" for row in modes]
    axes.set_yticks(range(len(modes)), names)
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_title(f"{report['shape']}, {report['tokens']} tokens: memory of a sample")
    axes.legend(fontsize=7, frameon=False)
    _save(figure, axes, path)
    return True


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    save_figures(path.parent, {path.stem: figure}, [path.suffix[1:]])
