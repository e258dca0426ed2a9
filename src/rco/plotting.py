"""Matplotlib figures: a common style of axes, and reproducible files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rco.atomic_files import atomic_path, make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure_class", "polish", "save_figures", "shortened"]


def figure_class() -> type[Figure]:
    """Matplotlib's figure class, which needs no display; imported on demand."""
    from matplotlib.figure import Figure

    return Figure


def polish(axis: Axes, title: str) -> None:
    """Style an axis: a small title, a light grid, no box."""
    axis.set_title(title, fontsize=9)
    axis.tick_params(which="both", labelsize=7)
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def save_figures(
    out: Path, drawn: Mapping[str, Figure], formats: Sequence[str] = ("png", "svg"), dpi: int = 90
) -> list[Path]:
    """Write every figure in every format under its name; returns the files written."""
    import matplotlib

    make_folder(out)
    written = []
    # Text stays text, which is smaller; a fixed salt and no date make files reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rco"}):
        for name, figure in drawn.items():
            for kind in formats:
                path = out / f"{name}.{kind}"
                metadata = {"Date": None} if kind == "svg" else None
                with atomic_path(path) as temporary:
                    figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)
                    if kind == "svg":
                        drawing = temporary.read_text(encoding="utf-8")
                        temporary.write_text(shortened(drawing), encoding="utf-8")
                figure.set_layout_engine("none")  # the next format keeps this layout
                written.append(path)
    return written


def shortened(drawing: str) -> str:
    """An SVG file without indentation and with five digits for every coordinate, which is finer than a screen.

    Its texts stay as they are.
    """

    def coordinates(match: re.Match[str]) -> str:
        return re.sub(r"(?<![\w.#])\d+\.\d+", lambda number: f"{float(number[0]):.5g}", match[0])

    def path(match: re.Match[str]) -> str:
        return re.sub(r"\s*([A-Za-z])\s*", r"\1", match[0])

    drawing = re.sub(r'(?<= )(?:d|x|y|transform|points)="[^"]*"', coordinates, drawing)
    drawing = re.sub(r'(?<= d=")[^"]*', path, drawing)
    return re.sub(r"\n +<", "\n<", drawing)
