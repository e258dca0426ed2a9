"""The plots of a run: KL against size, the search step by step, width against sensitivity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rco.core.result import StepRecord
from rco.report.data import Evaluated, GroupWidth, RunData
from rco.report.numbers import count, plural, short, significant
from rco.report.svg import Panel, Point, draw
from rco.report.theme import LIGHT

__all__ = ["Plot", "convergence", "quality_against_bits", "sensitivity", "tuning_curve"]

_MOST_DOTS = 1200


@dataclass(frozen=True)
class Plot:
    """A drawing and its legend: (mark, text), the mark being a class of the style sheet."""

    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()


def quality_against_bits(rows: Sequence[tuple[Evaluated, str]], name: str) -> Plot | None:
    """KL against the average width, logarithmic.

    Args:
        rows: Measurements, each with the name to write beside it.
        name: Unique on the page.
    """
    drawn = [
        (row, label, (row.bits, row.kl))
        for row, label in rows
        if row.bits is not None and row.kl is not None and 0 < row.kl < math.inf and not row.full
    ]
    if len(drawn) < 2:
        return None
    points = [point for _, _, point in drawn]
    texts = [f"{label}: {short(bits)} bits, KL {significant(kl)}" for _, label, (bits, kl) in drawn]
    with draw(
        name,
        "KL to the full model against average width",
        "; ".join(texts),
        x_label="average bits per quantized weight",
        y_label="KL to the full model (log)",
        y_log=True,
        size=(480, 300),
    ) as panel:
        low, high = min(x for x, _ in points), max(x for x, _ in points)
        span = (high - low) or 0.2 * abs(high) or 1.0
        panel.axes.set_xlim(low - 0.06 * span, high + 0.44 * span)  # with space for names on the right
        uniform = sorted({point for row, _, point in drawn if row.uniform_width is not None})
        panel.line(uniform, "c0", dashes=(2, 3))
        for chosen in (False, True):  # this run's result on top
            marks = [index for index, (row, _, _) in enumerate(drawn) if row.chosen is chosen]
            panel.dots(
                [points[index] for index in marks],
                "c1" if chosen else "c0",
                [texts[index] for index in marks],
                6.0 if chosen else 4.5,
            )
        panel.axes.margins(y=0.08)
        panel.axes.autoscale_view(scalex=False)
        panel.names(
            points, [label for _, label, _ in drawn], ["own" if r.chosen else "" for r, _, _ in drawn]
        )
    return Plot(panel.svg)


# ------------------------------------------------------------------------- search


def convergence(run: RunData, name: str) -> list[Plot]:
    """Loss, entropy, decided groups and temperature, step by step; exchanges follow the steps."""
    search = [record for record in run.history if record.phase == "search"]
    refine = [record for record in run.history if record.phase != "search"]
    total = run.problem.num_groups if run.problem else None
    panels = [
        _loss(search, refine, run, f"{name}loss"),
        _course(
            search,
            lambda record: record.entropy,
            "Entropy of the choice (1 open, 0 decided)",
            "c2",
            f"{name}entropy",
            limits=(0, 1),
        ),
        _course(
            search,
            lambda record: record.decided,
            f"Decided groups of {count(total)} (p > 0.9)" if total else "Decided groups (p > 0.9)",
            "c3",
            f"{name}decided",
            limits=(0, total or 1),
        ),
        _course(
            search,
            lambda record: record.temperature,
            "Temperature (log)",
            "c0",
            f"{name}temperature",
            log=True,
        ),
    ]
    return [panel for panel in panels if panel is not None]


def _loss(search: Sequence[StepRecord], refine: Sequence[StepRecord], run: RunData, name: str) -> Plot | None:
    loss = [(float(record.step), record.loss) for record in search]
    best = [(float(record.step), record.best_loss) for record in search]
    end = max((record.step for record in search), default=0)
    # Exchanges are few compared to steps: they have their own stretch at the end.
    stretch = max(len(refine), 0.24 * end) if refine else 0.0
    exchanges = [
        (end + stretch * (index + 1) / (len(refine) + 1), record.loss) for index, record in enumerate(refine)
    ]
    final = run.result.loss if run.result else None
    values = [y for _, y in (*loss, *best, *exchanges)] if run.history else []
    if not any(math.isfinite(value) for value in values):
        return None
    values = [value for value in (*values, final) if value is not None and math.isfinite(value)]
    log = min(values) > 0 and max(values) / min(values) > 4
    first, last = (loss or exchanges)[0][1], (loss or exchanges)[-1][1]
    description = f"From {significant(first)} to {significant(last)} in {plural(len(loss), 'step')}"
    if refine:
        description += f", then {plural(len(refine), 'accepted exchange')}"
    legend = []
    with draw(
        name,
        "Loss per step of the search",
        description,
        x_label="step",
        y_label="Loss (log)" if log else "Loss",
        y_log=log,
    ) as panel:
        _steps_axis(panel, loss, end, stretch)
        if refine:
            panel.axes.axvspan(end, end + stretch, facecolor=LIGHT["band"], edgecolor="none", zorder=0)
            left, _ = panel.axes.transData.transform((end + stretch / 2, min(values)))
            panel.text(left, panel.size[1] - 44, "exchanges", align="center")
        if final is not None and math.isfinite(final):
            panel.axes.axhline(final, color=LIGHT["c1"], linewidth=1.3, linestyle=(0, (5, 3)))
        if loss:
            panel.line(loss, "c0")
            panel.line(best, "c2")
            _hover_dots(panel, loss, "c0", [f"step {r.step}: loss {significant(r.loss)}" for r in search])
            legend += [
                ("line c0", "mean of the step's samples"),
                ("line c2", "lowest sample so far (one batch: noisy)"),
            ]
        if exchanges:
            panel.line(exchanges, "c1")
            titles = [
                f"exchange {place}: {significant(y)} on the selection split"
                for place, (_, y) in enumerate(exchanges, 1)
            ]
            _hover_dots(panel, exchanges, "c1", titles)
            legend.append(("line c1", "exchanges, on the selection split"))
        if final is not None:
            legend.append(("rule c1", f"result on the selection split: {significant(final)}"))
    return Plot(panel.svg, tuple(legend))


def tuning_curve(curve: Sequence[Mapping[str, Any]], name: str) -> Plot | None:
    """Loss on the selection text against tokens of an end-to-end tuning; None with fewer than two points.

    Measurements of single blocks have another loss and are left out.
    """
    drawn = [entry for entry in curve if not str(entry["stage"]).startswith("block ")]
    points = [(entry["tokens"] / 1000, entry["selection"]) for entry in drawn]
    points = [point for point in points if 0 < point[1] < math.inf]
    if len(points) < 2:
        return None
    texts = [f"{short(x)} thousand tokens: {significant(y, 4)}" for x, y in points]
    with draw(
        name,
        "Loss on the selection text during tuning",
        "; ".join(texts),
        x_label="thousand tokens",
        y_label="selection loss",
        size=(480, 260),
    ) as panel:
        panel.line(points, "c1")
        panel.dots(points, "c1", texts, 4.5)
        panel.axes.margins(0.06)
    return Plot(panel.svg)


def _steps_axis(panel: Panel, points: Sequence[Point], end: float, stretch: float = 0.0) -> None:
    """Ticks at whole steps from the first to the last, then space for exchanges."""
    from matplotlib.ticker import MaxNLocator

    start = points[0][0] if points else end
    pad = 0.5 if end == start and not stretch else 0.03 * (end + stretch - start)
    panel.axes.set_xlim(start - pad, end + (stretch or pad))
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10], integer=True).tick_values(start, max(end, start + 1))
    panel.axes.set_xticks([tick for tick in ticks if start <= tick <= end])


def _course(
    search: Sequence[StepRecord],
    value_of: Callable[[StepRecord], float | None],
    label: str,
    colour: str,
    name: str,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Plot | None:
    """Plot of one value per step."""
    points = [(float(r.step), float(value)) for r in search if (value := value_of(r)) is not None]
    shown = [y for _, y in points if math.isfinite(y) and (y > 0 or not log)]
    if not shown:
        return None
    ends = "; ".join(f"{significant(y)} at step {x:g}" for x, y in (points[0], points[-1]))
    with draw(name, label, ends, x_label="step", y_label=label, y_log=log) as panel:
        _steps_axis(panel, points, points[-1][0])
        if limits is not None:
            low, high = min(limits[0], *shown), max(limits[1], *shown)
            panel.axes.set_ylim(low - 0.02 * (high - low), high + 0.02 * (high - low))
        panel.line(points, colour)
        _hover_dots(panel, points, colour, [f"step {x:g}: {significant(y)}" for x, y in points])
    return Plot(panel.svg)


def _hover_dots(panel: Panel, points: Sequence[Point], colour: str, titles: Sequence[str]) -> None:
    """Dots with hover texts: visible if few, left out if very many."""
    if len(points) <= 15:
        panel.dots(points, colour, titles, 3.0)
    elif len(points) <= 300:
        panel.dots(points, colour, titles, 4.0, class_="hover")


# -------------------------------------------------------------------- sensitivity


def sensitivity(groups: Sequence[GroupWidth], name: str) -> tuple[list[Plot], int]:
    """Width against the KL predicted for the narrowest option, for whole groups and per weight.

    Returns:
        The plots, and the number of groups left out because their prediction is not positive.
    """
    common = set.intersection(*({*group.sensitivity} for group in groups)) if groups else set()
    option = next((each for each in groups[0].sensitivity if each in common), "") if groups else ""
    known = [group for group in groups if group.sensitivity.get(option, 0) > 0]
    if not known:
        return [], 0
    meant = "if pruned" if option == "0" else f"at {option} bits" if option.isdigit() else f"as {option}"
    label = f"predicted KL {meant}"
    plots = [_scatter(known, [g.sensitivity[option] for g in known], f"{label} (log)", f"{name}sensitivity")]
    sized = [group for group in known if group.parameters > 0]
    if len({group.parameters for group in sized}) > 1:
        per_weight = [group.sensitivity[option] / group.parameters for group in sized]
        plots.append(
            _scatter(sized, per_weight, f"{label}, per weight (log)", f"{name}sensitivity-per-weight")
        )
    return plots, len(groups) - len(known)


def _scatter(groups: Sequence[GroupWidth], values: Sequence[float], label: str, name: str) -> Plot:
    widths = sorted({group.width for group in groups})
    rank = {width: float(index) for index, width in enumerate(widths)}
    description = (
        f"{plural(len(groups), 'group')}, predictions from {significant(min(values), 2)} to "
        f"{significant(max(values), 2)}"
    )
    with draw(
        name,
        f"Width against {label}",
        description,
        x_label=label,
        y_label="Bits chosen",
        x_log=True,
        size=(440, 280),
    ) as panel:
        panel.axes.set_ylim(-0.6, len(widths) - 0.4)
        panel.axes.set_yticks(range(len(widths)), [f"{width:g}" for width in widths])
        if len(groups) <= _MOST_DOTS:
            largest = max(group.parameters for group in groups) or 1
            # A fixed, reproducible scatter about the width separates equal values.
            points = [
                (value, rank[group.width] + 0.5 * ((0.618034 * index) % 1 - 0.5))
                for index, (group, value) in enumerate(zip(groups, values, strict=True))
            ]
            titles = [
                f"{group.name}: {group.width:g} bits, {significant(value, 3)}"
                for group, value in zip(groups, values, strict=True)
            ]
            radii = [2.5 + 4 * math.sqrt(group.parameters / largest) for group in groups]
        else:
            points, titles, radii = _binned(groups, values, rank)
        panel.dots(points, "c0", titles, radii, class_="dot soft")
    return Plot(panel.svg)


def _binned(
    groups: Sequence[GroupWidth], values: Sequence[float], rank: dict[float, float]
) -> tuple[list[Point], list[str], list[float]]:
    """One dot for all groups of one width and similar sensitivity."""
    low, high = math.log10(min(values)), math.log10(max(values))
    size = (high - low) / 60 or 1.0
    bins: Counter[tuple[float, int]] = Counter()
    for group, value in zip(groups, values, strict=True):
        bins[rank[group.width], math.floor((math.log10(value) - low) / size)] += 1
    largest = max(bins.values())
    points = [(10 ** (low + (place + 0.5) * size), row) for row, place in bins]
    titles = [plural(number, "group") for number in bins.values()]
    return points, titles, [1 + 8 * math.sqrt(number / largest) for number in bins.values()]
