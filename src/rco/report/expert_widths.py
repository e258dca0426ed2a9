"""Widths of experts as a picture: layers down, experts across, beside how often each expert is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rco.report.bits import level
from rco.report.charts import legend, picture
from rco.report.data import ReportError, RunData, section
from rco.report.markup import Markup, element, fragment
from rco.report.numbers import count, percent, plural
from rco.report.tables import Column, table

__all__ = [
    "ExpertWidths",
    "expert_width_layers",
    "expert_width_map",
    "expert_width_section",
    "expert_width_table",
]

_MOST_HOVERS = 1024  # cells that get a hover text of their own
_SHADES = 8  # steps of the frequency's colour
_PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class ExpertWidths:
    """One layer: widths of every expert's gate, up and down projection, and the share of tokens it sees."""

    layer: int
    widths: tuple[tuple[int, int, int], ...]
    frequency: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Average width; the three projections of an expert have the same number of weights."""
        return sum(sum(expert) for expert in self.widths) / (3 * len(self.widths))

    @property
    def active_mean(self) -> float:
        """Average width of what tokens read: experts by how often they are chosen."""
        total = sum(self.frequency) or 1.0
        return sum(f * sum(w) / 3 for f, w in zip(self.frequency, self.widths, strict=True)) / total


def expert_width_layers(run: RunData) -> list[ExpertWidths]:
    """Every layer's experts, from the run's metrics."""
    rows = section(run.metrics, "expert_widths").get("layers") or []
    found = []
    for row in rows:
        try:
            widths = tuple((int(g), int(u), int(d)) for g, u, d in row["widths"])
            frequency = tuple(float(share) for share in row["frequency"])
            layer = int(row["layer"])
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(
                "A layer under 'expert_widths' of metrics.json needs layer, widths (gate, up, down per expert) "
                f"and frequency: {error!r}."
            ) from None
        if len(widths) != len(frequency) or not widths:
            raise ReportError(
                f"Layer {layer} under 'expert_widths' of metrics.json has {len(widths)} experts with widths and "
                f"{len(frequency)} with a frequency."
            )
        found.append(ExpertWidths(layer, widths, frequency))
    return found


def expert_width_map(layers: Sequence[ExpertWidths]) -> Markup:
    """Two maps side by side: the width of every expert, and how often it is chosen."""
    most = max(len(layer.widths) for layer in layers)
    wide = min(16.0, max(1.25, 400 / most))
    high = 20 if len(layers) <= 32 else 12
    gap = 1.0 if wide >= 4 else 0.0
    left, top, between = 64, 24, 70
    second = left + most * wide + between
    right = second + most * wide
    highest = max((share for layer in layers for share in layer.frequency), default=0.0) or 1.0
    drawn: dict[str, list[str]] = {}
    labels, hovers = [], []
    hover_cells = sum(len(layer.widths) for layer in layers) <= _MOST_HOVERS

    def cell(class_: str, x: float, y: float, height: float) -> None:
        drawn.setdefault(class_, []).append(
            f"M{x:.5g} {y:.5g}h{wide - gap:.4g}v{height:.4g}h{gap - wide:.4g}z"
        )

    for row, layer in enumerate(layers):
        y, body = top + row * high, high - 2
        for expert, (parts, share) in enumerate(zip(layer.widths, layer.frequency, strict=True)):
            x = left + expert * wide
            # An expert of one width is one cell; otherwise gate, up and down lie below each other.
            shown = parts[:1] if len(set(parts)) == 1 else parts
            for position, width in enumerate(shown):
                cell(level(width), x, y + 1 + position * body / len(shown), body / len(shown))
            shade = min(_SHADES, 1 + int(_SHADES * share / highest)) if share > 0 else 0
            cell(f"shade{shade}", second + expert * wide, y + 1, body)
            if hover_cells:
                words = _words(layer.layer, expert, parts, share)
                for start in (x, second + expert * wide):
                    hovers.append(_area(start, y, wide, high, words))
        middle = y + high / 2 + 4
        labels += [
            element("text", layer.layer, x=left - 10, y=middle, class_="kind", text_anchor="end"),
            element("text", f"{layer.mean:.2f}", x=left + most * wide + 10, y=middle, class_="mean"),
        ]
    head = [
        element("text", "layer", x=left - 10, y=top - 8, class_="tick", text_anchor="end"),
        element("text", f"widths of experts 0 to {most - 1}", x=left, y=top - 8, class_="tick"),
        element("text", "mean", x=left + most * wide + 10, y=top - 8, class_="tick"),
        element("text", f"share of tokens, darkest {percent(highest)}", x=second, y=top - 8, class_="tick"),
    ]
    cells = [element("path", d="".join(d), **_paint(class_)) for class_, d in sorted(drawn.items())]
    drawing = picture(
        "Width and routing frequency of every expert",
        "One row per layer, one column per expert; the table below has the averages.",
        right + 8,
        top + len(layers) * high + 6,
        fragment(head, cells, labels, hovers),
        class_="map",
    )
    widths = sorted({width for layer in layers for parts in layer.widths for width in parts})
    entries = [("cell", level(width), "pruned" if width == 0 else f"{width} bits") for width in widths]
    region = element(
        "div", drawing, class_="scroll", tabindex="0", role="group", aria_label="Width of every expert"
    )
    return fragment(region, legend(entries))


def _paint(class_: str) -> dict[str, Any]:
    """Attributes of a colour; frequencies are shades of one."""
    if not class_.startswith("shade"):
        return {"class_": f"cell {class_}"}
    step = int(class_.removeprefix("shade"))
    if step == 0:
        return {"class_": "cell pruned"}
    return {"class_": "cell kept", "opacity": f"{0.12 + 0.88 * step / _SHADES:.3g}"}


def _words(layer: int, expert: int, parts: tuple[int, int, int], share: float) -> str:
    if len(set(parts)) == 1:
        bits = "pruned" if parts[0] == 0 else f"{parts[0]} bits"
    else:
        bits = ", ".join(f"{name} {width}" for name, width in zip(_PARTS, parts, strict=True)) + " bits"
    return f"Layer {layer}, expert {expert}: {bits}, chosen by {percent(share)} of the tokens"


def _area(x: float, y: float, wide: float, high: float, words: str) -> Markup:
    return element(
        "rect", element("title", words), x=f"{x:.5g}", y=y, width=f"{wide:.4g}", height=high, class_="hover"
    )


def expert_width_table(layers: Sequence[ExpertWidths]) -> Markup:
    """Averages per layer."""
    columns = [Column("Layer", number=True), Column("Experts", number=True), Column("Pruned", number=True)]
    columns += [Column("Mean width", number=True), Column("Mean width by use", number=True)]
    rows = [
        [
            layer.layer,
            len(layer.widths),
            sum(parts == (0, 0, 0) for parts in layer.widths),
            f"{layer.mean:.3f}",
            f"{layer.active_mean:.3f}",
        ]
        for layer in layers
    ]
    caption = "Widths of experts per layer: plain mean, and weighted by how often experts are chosen"
    return table(columns, rows, caption=caption, sortable=True)


def expert_width_section(run: RunData) -> Markup | None:
    """The map, the table, and how experts that few tokens visit were fitted."""
    layers = expert_width_layers(run)
    if not layers:
        return None
    note = _fitted(section(run.metrics, "expert_widths"), sum(len(layer.widths) for layer in layers))
    caption = (
        "Left: the width of every expert. Right: the share of the calibration tokens that are routed to it."
    )
    return fragment(
        element("figure", expert_width_map(layers), element("figcaption", caption)),
        element("p", note, class_="small"),
        element(
            "details",
            element("summary", f"Table of {plural(len(layers), 'layer')}"),
            expert_width_table(layers),
        ),
    )


def _fitted(found: Mapping[str, Any], experts: int) -> str:
    """What the candidates of experts were fitted to."""
    least = found.get("minimum_tokens")
    if least is None:
        return "The weights of experts were rounded as they are, without calibration tokens."
    fewest, unvisited = int(found.get("fewest_tokens", least)), int(found.get("unvisited") or 0)
    topped = int(found.get("topped_up") or 0)
    note = f"Every expert was fitted to {plural(fewest, 'calibration token')} or more"
    if topped:
        none = f", {count(unvisited)} of them none," if unvisited else ","
        note += (
            f"; {plural(topped, 'expert')} of {count(experts)} saw fewer, at least in some batch{none} and were "
            "given the tokens that came closest to being routed to them, "
            f"{count(int(found.get('added_tokens') or 0))} in all."
        )
    elif fewest == 0:
        note = (
            f"To {plural(unvisited, 'expert')} of {count(experts)} no calibration token is routed: those weights "
            "were rounded as they are. The others were fitted to the tokens that are routed to them."
        )
    else:
        note += " that are routed to it."
    return note
