"""Small heat maps of an allocation: text with colours for a terminal, a table for a notebook.

Widths: kinds of linears down, blocks across. Pruned experts: layers down, experts across.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from markupsafe import Markup

from rco.report.data import GroupWidth, MoeLayer
from rco.report.maps import average_width, width_grid
from rco.report.theme import WIDTHS, level

__all__ = ["coloured", "experts_html", "experts_text", "widths_html", "widths_text"]

_KEPT, _PRUNED = "■", "·"
_MOST_GROUPS_OUTSIDE = 8
_NOTHING = Markup("<td></td>")


def coloured() -> bool:
    """Whether standard output is a terminal with colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def widths_text(groups: Sequence[GroupWidth], *, colour: bool = False) -> str:
    """One digit per block and kind of linear: its width, or the rounded mean if groups differ.

    ``-`` is for pruned experts, ``+`` for 16 bits or more.
    """
    grid, kinds, loose = width_grid(groups)
    blocks = sorted(grid)
    title = max([len("block"), *(len(kind) for kind in kinds)])
    lines = []
    if blocks:
        tens = "".join(str(block // 10) if block % 10 == 0 and block else " " for block in blocks)
        if tens.strip():
            lines.append(f"{'':{title}}  {tens}".rstrip())
        lines.append(f"{'block':{title}}  {''.join(str(block % 10) for block in blocks)}")
    for kind in kinds:
        cells = [grid[block].get(kind) for block in blocks]
        row = "".join(
            " " if cell is None else _painted(_digit(cell.width), cell.width, colour) for cell in cells
        )
        mean = average_width(group for cell in cells if cell is not None for group in cell.groups)
        lines.append(f"{kind:{title}}  {row}  {mean:.2f} bits")
    for group in loose[:_MOST_GROUPS_OUTSIDE]:
        lines.append(f"{group.name:{title}}  {_painted(_digit(group.width), group.width, colour)}")
    if len(loose) > _MOST_GROUPS_OUTSIDE:
        lines.append(f"and {len(loose) - _MOST_GROUPS_OUTSIDE} more outside the blocks")
    return "\n".join(lines)


def experts_text(layers: Sequence[MoeLayer], *, colour: bool = False) -> str:
    """One mark per expert: ``■`` kept, ``·`` pruned."""
    title = max(len("layer"), *(len(str(layer.layer)) for layer in layers))
    lines = [f"{'layer':{title}}  experts ({_KEPT} kept, {_PRUNED} pruned)"]
    for layer in layers:
        kept = set(layer.kept)
        row = "".join(
            _painted(_KEPT, 8, colour) if expert in kept else _PRUNED for expert in range(layer.experts)
        )
        lines.append(f"{layer.layer:>{title}}  {row}  {len(kept)} of {layer.experts}")
    return "\n".join(lines)


def widths_html(groups: Sequence[GroupWidth]) -> str:
    """A table with one coloured cell per block and kind of linear."""
    grid, kinds, loose = width_grid(groups)
    blocks = sorted(grid)
    rows = [_row("<th>block</th>", [Markup("<th>{}</th>").format(block) for block in blocks])]
    for kind in kinds:
        found = [grid[block].get(kind) for block in blocks]
        cells = [_NOTHING if cell is None else _cell(cell.label, cell.width, cell.title) for cell in found]
        rows.append(_row(_heading(kind), cells))
    for group in loose[:_MOST_GROUPS_OUTSIDE]:
        shown = _cell(f"{group.width:g}", group.width, f"{group.name}: {group.width:g} bits")
        rows.append(_row(_heading(group.name), [shown]))
    return _table(rows)


def experts_html(layers: Sequence[MoeLayer]) -> str:
    """A table with one cell per expert, coloured if kept."""
    pruned = Markup('<td title="layer {}, expert {}: pruned"></td>')
    rows = []
    for layer in layers:
        kept = set(layer.kept)
        cells = [
            _cell("", 8, f"layer {layer.layer}, expert {expert}: kept")
            if expert in kept
            else pruned.format(layer.layer, expert)
            for expert in range(layer.experts)
        ]
        counted = _heading(f"{len(kept)} of {layer.experts}")
        rows.append(_row(_heading(f"layer {layer.layer}"), [*cells, counted]))
    return _table(rows)


def _digit(width: float) -> str:
    if width == 0:
        return "-"
    return "+" if width > 9 else str(round(width))


def _painted(mark: str, width: float, colour: bool) -> str:
    if not colour:
        return mark
    fill, ink = WIDTHS[level(width)][:2]
    return f"\x1b[48;2;{_rgb(fill)}m\x1b[38;2;{_rgb(ink)}m{mark}\x1b[0m"


def _rgb(hexadecimal: str) -> str:
    return ";".join(str(int(hexadecimal[start : start + 2], 16)) for start in (1, 3, 5))


def _cell(label: str, width: float, title: str) -> Markup:
    fill, ink = WIDTHS[level(width)][:2]
    style = f"background:{fill};color:{ink};text-align:center;min-width:1.2em;padding:2px 4px"
    return Markup('<td style="{}" title="{}">{}</td>').format(style, title, label)


def _heading(text: str) -> Markup:
    return Markup('<th style="text-align:left;padding:2px 8px">{}</th>').format(text)


def _row(heading: str, cells: Sequence[Markup]) -> str:
    return f"<tr>{heading}{''.join(cells)}</tr>"


def _table(rows: Sequence[str]) -> str:
    style = "border-collapse:separate;border-spacing:2px;font-size:12px"
    return f'<table style="{style}">{"".join(rows)}</table>'
