"""Pruned experts as a picture: one row per layer, one cell per expert, and how many each layer keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rco.report.charts import legend, picture
from rco.report.data import MoeLayer, ReportError
from rco.report.markup import Markup, element, fragment
from rco.report.numbers import count, percent, plural, significant
from rco.report.tables import Column, table

__all__ = ["domain_matrix", "expert_map", "layer_table"]

_MOST_HOVERS = 1024  # cells that get a hover text of their own


def expert_map(layers: Sequence[MoeLayer]) -> Markup:
    """Which experts stayed; where REAP's scores are there, also where REAP would have chosen otherwise."""
    most = max(layer.experts for layer in layers)
    wide = min(22.0, max(1.25, 800 / most))
    high = 20 if len(layers) <= 32 else 14
    gap = 1.5 if wide >= 5 else 0.0
    left, top, bars = 64, 24, 130
    states: dict[str, list[str]] = {"kept": [], "pruned": [], "gained": [], "lost": []}
    hovers, labels = [], []
    right = left + most * wide
    kept, total = sum(len(layer.kept) for layer in layers), sum(layer.experts for layer in layers)
    hover_cells = total <= _MOST_HOVERS
    for row, layer in enumerate(layers):
        y = top + row * high
        row_states = _states(layer)
        for state, start, end in _stretches(row_states, merge=not gap):
            x = left + start * wide
            states[state].append(
                f"M{x:.4g} {y + 1}h{(end - start) * wide - gap:.4g}v{high - 2}h{gap - (end - start) * wide:.4g}z"
            )
        hovers.append(_hover(layer, row_states, left, y, wide, high, each=hover_cells))
        middle = y + high / 2 + 4
        length = 80 * len(layer.kept) / most
        labels += [
            element("text", layer.layer, x=left - 10, y=middle, class_="kind", text_anchor="end"),
            element(
                "rect",
                x=right + 12,
                y=y + 3,
                width=80 * layer.experts / most,
                height=high - 6,
                rx=2,
                class_="cell pruned",
            ),
            element("rect", x=right + 12, y=y + 3, width=length, height=high - 6, rx=2, class_="cell kept"),
            element("text", len(layer.kept), x=right + 98, y=middle, class_="mean"),
        ]
    head = [
        element("text", "layer", x=left - 10, y=top - 8, class_="tick", text_anchor="end"),
        element("text", f"experts 0 to {most - 1}", x=left, y=top - 8, class_="tick"),
        element("text", "kept", x=right + 12, y=top - 8, class_="tick"),
    ]
    cells = [element("path", d="".join(d), class_=f"cell {state}") for state, d in states.items() if d]
    drawing = picture(
        "Experts kept in every layer",
        f"{count(kept)} of {plural(total, 'expert')} in {plural(len(layers), 'layer')}; "
        "the table below has the counts.",
        right + bars,
        top + len(layers) * high + 6,
        fragment(head, cells, labels, hovers),
        class_="map",
    )
    entries = [("cell", "kept", "kept"), ("cell", "pruned", "pruned")]
    if states["gained"] or states["lost"]:
        entries = [
            ("cell", "kept", "kept, by REAP too"),
            ("cell", "gained", "kept, not by REAP"),
            ("cell", "lost", "pruned, kept by REAP"),
            ("cell", "pruned", "pruned, by REAP too"),
        ]
    region = element(
        "div", drawing, class_="scroll", tabindex="0", role="group", aria_label="Experts kept in every layer"
    )
    return fragment(region, legend(entries))


def _states(layer: MoeLayer) -> list[str]:
    kept = set(layer.kept)
    reap = layer.best("reap")
    if reap is None:
        return ["kept" if expert in kept else "pruned" for expert in range(layer.experts)]
    names = {(True, True): "kept", (True, False): "gained", (False, True): "lost", (False, False): "pruned"}
    return [names[expert in kept, expert in reap] for expert in range(layer.experts)]


def _stretches(states: Sequence[str], *, merge: bool) -> list[tuple[str, int, int]]:
    """(state, first, after the last); without ``merge`` every cell by itself."""
    found: list[tuple[str, int, int]] = []
    for index, state in enumerate(states):
        if merge and found and found[-1][0] == state:
            found[-1] = (state, found[-1][1], index + 1)
        else:
            found.append((state, index, index + 1))
    return found


def _hover(
    layer: MoeLayer, states: Sequence[str], left: float, y: float, wide: float, high: float, *, each: bool
) -> list[Markup]:
    def area(x: float, width: float, words: str) -> Markup:
        return element(
            "rect",
            element("title", words),
            x=f"{x:.4g}",
            y=y,
            width=f"{width:.4g}",
            height=high,
            class_="hover",
        )

    if not each:
        words = f"Layer {layer.layer}: {len(layer.kept)} of {layer.experts} experts kept"
        return [area(left, layer.experts * wide, words)]
    found = []
    for expert, state in enumerate(states):
        scores = "".join(
            f", {name} {significant(values[expert], 3)}" for name, values in layer.scores.items()
        )
        fate = "kept" if state in ("kept", "gained") else "pruned"
        words = f"Layer {layer.layer}, expert {expert}: {fate}{scores}"
        found.append(area(left + expert * wide, wide, words))
    return found


def layer_table(layers: Sequence[MoeLayer]) -> Markup:
    """Counts per layer, and how far each agrees with the scores at the same count."""
    scores = [name for name in ("reap", "frequency") if all(name in layer.scores for layer in layers)]
    scores += sorted({name for layer in layers for name in layer.scores} - {"reap", "frequency"})
    scores = [name for name in scores if all(name in layer.scores for layer in layers)]
    columns = [Column("Layer", number=True), Column("Experts", number=True), Column("Kept", number=True)]
    columns += [Column("Share kept", number=True)]
    columns += [Column(f"Same as by {_score_name(name)}", number=True) for name in scores]
    rows = []
    for layer in layers:
        overlaps = []
        for name in scores:
            best = layer.best(name) or frozenset()
            overlaps.append(percent(len(best & set(layer.kept)) / len(layer.kept)) if layer.kept else "–")
        rows.append(
            [layer.layer, layer.experts, len(layer.kept), percent(len(layer.kept) / layer.experts), *overlaps]
        )
    caption = "Experts kept per layer" + (
        ", and how many of them the scores would keep at the same count" if scores else ""
    )
    return table(columns, rows, caption=caption, sortable=True)


def _score_name(name: str) -> str:
    return {"reap": "REAP", "fisher": "sensitivity"}.get(name, name.replace("_", " "))


def domain_matrix(by_domain: Mapping[str, Any]) -> Markup:
    """KL per domain (columns) of models pruned on each domain (rows)."""
    rows: dict[str, dict[str, float | None]] = {}
    for pruned_on, measured in by_domain.items():
        if not isinstance(measured, Mapping):
            raise ReportError(
                f"'by_domain' under 'moe' of metrics.json maps a domain to its measurements, got {measured!r} "
                f"for {pruned_on!r}."
            )
        rows[str(pruned_on)] = {
            str(domain): value.get("kl") if isinstance(value, Mapping) else value
            for domain, value in measured.items()
        }
    domains = list(dict.fromkeys(domain for measured in rows.values() for domain in measured))
    lowest = {}
    for domain in domains:
        known = [value for value in (measured.get(domain) for measured in rows.values()) if value is not None]
        lowest[domain] = min(known, default=None)
    body = []
    for name, measured in rows.items():
        cells: list[Any] = [name]
        for domain in domains:
            value = measured.get(domain)
            best = len(rows) > 1 and value is not None and value == lowest[domain]
            cells.append(element("strong", significant(value)) if best else significant(value))
        body.append(cells)
    columns = [Column("Pruned on"), *(Column(domain, number=True) for domain in domains)]
    caption = "KL to the full model by domain of the evaluation text; the lowest of each column is bold"
    return table(columns, body, caption=caption)
