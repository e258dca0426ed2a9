"""The plots of a run: quality against size, how the search went, and what sensitivity bought."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rco.core.result import StepRecord
from rco.report.charts import Plot, Point, Scale, legend
from rco.report.data import Evaluated, GroupWidth, RunData
from rco.report.markup import Markup, element, fragment
from rco.report.numbers import count, plural, short, significant

__all__ = ["convergence", "quality_against_bits", "sensitivity"]

_MOST_DOTS = 1200


def quality_against_bits(rows: Sequence[tuple[Evaluated, str]]) -> Markup | None:
    """KL against the average width, logarithmic.

    Args:
        rows: Measurements, each with the name to write beside it.
    """
    drawn = [
        (row, name)
        for row, name in rows
        if row.bits is not None
        and row.kl is not None
        and row.kl > 0
        and math.isfinite(row.kl)
        and not row.full
    ]
    if len(drawn) < 2:
        return None
    points = [(float(row.bits or 0), float(row.kl or 0)) for row, _ in drawn]
    x = Scale([p[0] for p in points])
    room = 0.34 * (x.high - x.low)  # for the names beside the rightmost points
    x.high += room
    listed = "; ".join(f"{name} {short(row.bits)} bits, KL {significant(row.kl)}" for row, name in drawn)
    plot = Plot(
        "KL to the full model against average width",
        listed,
        x,
        Scale([p[1] for p in points], log=True),
        x_label="average bits per quantized weight",
        y_label="KL to the full model (log)",
        width=480,
        height=290,
    )
    uniform = sorted(
        {point for point, (row, _) in zip(points, drawn, strict=True) if row.uniform_width is not None}
    )
    plot.line(uniform, "c0 dashed")
    classes = ["c1" if row.chosen else "c0" for row, _ in drawn]
    plot.names(points, [name for _, name in drawn], ["strong" if row.chosen else "" for row, _ in drawn])
    for wanted in ("c0", "c1"):  # what this run chose lies on top
        chosen = [index for index, class_ in enumerate(classes) if class_ == wanted]
        plot.dots(
            [points[i] for i in chosen],
            wanted,
            [f"{drawn[i][1]}: {short(points[i][0])} bits, KL {significant(points[i][1])}" for i in chosen],
            [6.0 if wanted == "c1" else 4.5] * len(chosen),
        )
    return plot.render()


# ------------------------------------------------------------------------- search


def convergence(run: RunData) -> Markup | None:
    """Loss, temperature, entropy and decided groups, step by step; exchanges afterwards are marked."""
    search = [record for record in run.history if record.phase == "search"]
    refine = [record for record in run.history if record.phase != "search"]
    if not run.history:
        return None
    panels = [
        _loss_panel(search, refine, run),
        _simple_panel(
            search, "entropy", "Entropy of the choice (1 open, 0 decided)", "c2", include=(0.0, 1.0)
        ),
        _decided_panel(search, run),
        _simple_panel(search, "temperature", "Temperature (log)", "c0", log=True),
    ]
    shown = [panel for panel in panels if panel is not None]
    return element("div", shown, class_="panels") if shown else None


def _finite(points: Sequence[Point]) -> bool:
    return any(math.isfinite(y) for _, y in points)


def _loss_panel(search: Sequence[StepRecord], refine: Sequence[StepRecord], run: RunData) -> Markup | None:
    loss = [(float(record.step), record.loss) for record in search]
    best = [(float(record.step), record.best_loss) for record in search]
    end = max((record.step for record in search), default=0)
    # Exchanges are few beside steps: they get a stretch of their own at the end.
    stretch = max(len(refine), 0.2 * end) if refine else 0.0
    exchanges = [
        (end + stretch * (index + 1) / (len(refine) + 1), record.loss) for index, record in enumerate(refine)
    ]
    final = run.result.loss if run.result else None
    values = [y for _, y in (*loss, *best, *exchanges)] + ([final] if final is not None else [])
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    log = min(values) > 0 and max(values) / min(values) > 4
    x = (
        Scale([record.step for record in search], include=(end + stretch,))
        if search
        else Scale([0, 1 + stretch])
    )
    ticks = {tick: f"{tick:g}" for tick in x.ticks() if tick <= end and tick == round(tick)}
    first, last = (loss[0][1], loss[-1][1]) if loss else (exchanges[0][1], exchanges[-1][1])
    plot = Plot(
        "Loss per step of the search",
        f"From {significant(first)} to {significant(last)} in {plural(len(loss), 'step')}"
        + (f", then {plural(len(refine), 'accepted exchange')}" if refine else ""),
        x,
        Scale(values, log=log),
        x_label="step",
        y_label="Loss (log)" if log else "Loss",
        x_ticks=ticks,
    )
    if refine:
        plot.band(end, end + stretch, "exchanges")
    if final is not None:
        plot.rule(final, "c1")
    plot.line(loss, "c0")
    plot.line(best, "c2")
    plot.line(exchanges, "c1")
    _hover_dots(plot, loss, "c0", [f"step {r.step}: loss {significant(r.loss)}" for r in search])
    places = enumerate(exchanges, 1)
    titles = [f"exchange {place}: {significant(y)} on the selection split" for place, (_, y) in places]
    _hover_dots(plot, exchanges, "c1", titles)
    entries = [
        ("line", "c0", "mean of the step's samples"),
        ("line", "c2", "lowest sample so far (one batch: noisy)"),
    ]
    if not loss:
        entries = []
    if exchanges:
        entries.append(("line", "c1", "exchanges, on the selection split"))
    if final is not None:
        entries.append(("rule", "c1", f"result on the selection split: {significant(final)}"))
    return element("div", plot.render(), legend(entries))


def _simple_panel(
    search: Sequence[StepRecord],
    name: str,
    label: str,
    class_: str,
    *,
    log: bool = False,
    include: Sequence[float] = (),
) -> Markup | None:
    points = [
        (float(record.step), float(getattr(record, name)))
        for record in search
        if getattr(record, name) is not None
    ]
    if not _finite(points) or (log and not any(y > 0 for _, y in points)):
        return None
    return _panel(points, label, Scale([y for _, y in points], log=log, include=include), class_)


def _decided_panel(search: Sequence[StepRecord], run: RunData) -> Markup | None:
    points = [(float(record.step), float(record.decided)) for record in search if record.decided is not None]
    if not points:
        return None
    total = run.problem.num_groups if run.problem else None
    label = f"Decided groups of {count(total)} (p > 0.9)" if total else "Decided groups (p > 0.9)"
    return _panel(points, label, Scale([y for _, y in points], include=(0.0, float(total or 1))), "c3")


def _panel(points: Sequence[Point], label: str, y: Scale, class_: str) -> Markup:
    x = Scale([px for px, _ in points], include=(points[-1][0],))
    plot = Plot(
        label,
        "; ".join(f"{significant(py)} at step {px:g}" for px, py in (points[0], points[-1])),
        x,
        y,
        x_label="step",
        y_label=label,
        x_ticks={tick: f"{tick:g}" for tick in x.ticks() if tick == round(tick)},
    )
    plot.line(points, class_)
    _hover_dots(plot, points, class_, [f"step {px:g}: {significant(py)}" for px, py in points])
    return element("div", plot.render())


def _hover_dots(plot: Plot, points: Sequence[Point], class_: str, titles: Sequence[str]) -> None:
    """Dots that carry hover texts: seen only where they are few, left out where they are many."""
    if len(points) <= 15:
        plot.dots(points, class_, titles, [2.8] * len(points))
    elif len(points) <= 300:
        plot.dots(points, "hover", titles, [4.0] * len(points))


# -------------------------------------------------------------------- sensitivity


def sensitivity(groups: Sequence[GroupWidth]) -> Markup | None:
    """Width against the KL predicted at the smallest width, for whole groups and per weight."""
    common = set.intersection(*({*group.sensitivity} for group in groups)) if groups else set()
    if not common:
        return None
    width = min(common)
    known = [group for group in groups if group.sensitivity[width] > 0]
    if not known:
        return None
    panels = [_scatter(known, [g.sensitivity[width] for g in known], f"predicted KL at {width} bits (log)")]
    sized = [group for group in known if group.parameters > 0]
    if len({group.parameters for group in sized}) > 1:
        per_weight = [group.sensitivity[width] / group.parameters for group in sized]
        panels.append(_scatter(sized, per_weight, f"predicted KL at {width} bits, per weight (log)"))
    left_out = len(groups) - len(known)
    note = (
        element("p", f"{plural(left_out, 'group')} without a positive prediction left out.", class_="small")
        if left_out
        else None
    )
    return fragment(element("div", panels, class_="panels"), note)


def _scatter(groups: Sequence[GroupWidth], values: Sequence[float], label: str) -> Markup:
    widths = sorted({group.width for group in groups})
    rank = {width: float(index) for index, width in enumerate(widths)}
    y = Scale([0.0, len(widths) - 1.0])
    y.low, y.high = -0.6, len(widths) - 0.4
    plot = Plot(
        f"Width against {label}",
        f"{plural(len(groups), 'group')}, predictions from {significant(min(values), 2)} to "
        f"{significant(max(values), 2)}",
        Scale(values, log=True),
        y,
        x_label=label,
        y_label="Bits chosen",
        height=280,
        y_ticks={rank[width]: f"{width:g}" for width in widths},
    )
    if len(groups) <= _MOST_DOTS:
        largest = max(group.parameters for group in groups) or 1
        # A fixed scatter about the width keeps equal values apart and the page the same each time.
        points = [
            (value, rank[group.width] + 0.5 * ((0.618034 * index) % 1 - 0.5))
            for index, (group, value) in enumerate(zip(groups, values, strict=True))
        ]
        plot.dots(
            points,
            "c0 soft",
            [
                f"{group.name}: {group.width:g} bits, {significant(value, 3)}"
                for group, value in zip(groups, values, strict=True)
            ],
            [2.5 + 4 * math.sqrt(group.parameters / largest) for group in groups],
        )
    else:
        _binned(plot, groups, values, rank)
    return element("div", plot.render())


def _binned(
    plot: Plot, groups: Sequence[GroupWidth], values: Sequence[float], rank: dict[float, float]
) -> None:
    """So many groups that each dot stands for those of one width and about one sensitivity."""
    bins: Counter[tuple[float, int]] = Counter()
    size = (plot.x.high - plot.x.low) / 60
    for group, value in zip(groups, values, strict=True):
        bins[rank[group.width], math.floor((math.log10(value) - plot.x.low) / size)] += 1
    largest = max(bins.values())
    plot.dots(
        [(10 ** (plot.x.low + (place + 0.5) * size), row) for row, place in bins],
        "c0 soft",
        [plural(number, "group") for number in bins.values()],
        [1 + 8 * math.sqrt(number / largest) for number in bins.values()],
    )
