"""Small plots as inline SVG: axes, lines, dots, names. Colours are CSS classes, so that themes can change them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rco.report.markup import Markup, element, fragment
from rco.report.numbers import short

__all__ = ["Plot", "Scale", "legend", "picture", "spread", "thin"]

Point = tuple[float, float]


class Scale:
    """Maps a range of values to pixels, linearly or by logarithm, with round ticks."""

    def __init__(self, values: Sequence[float], *, log: bool = False, include: Sequence[float] = ()) -> None:
        usable = [v for v in (*values, *include) if math.isfinite(v) and (v > 0 or not log)]
        if not usable:
            raise ValueError("A scale needs at least one value that can be drawn.")
        self.log = log
        low, high = min(usable), max(usable)
        if log:
            pad = 0.06 * math.log10(high / low) or 0.3
            self.low, self.high = math.log10(low) - pad, math.log10(high) + pad
        else:
            pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
            self.low = low if low in include else low - pad
            self.high = high if high in include else high + pad
            if self.low == self.high:
                self.high += pad
        self.start, self.end = 0.0, 1.0

    def fit(self, start: float, end: float) -> None:
        """Set the pixels at both ends."""
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        """Where a value lies, in pixels."""
        position = math.log10(value) if self.log else value
        return self.start + (position - self.low) / (self.high - self.low) * (self.end - self.start)

    def shows(self, value: float) -> bool:
        """Whether the value has a place on this scale."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the range, at most about ``most``."""
        if not self.log:
            return _linear_ticks(self.low, self.high, most)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        for factors in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            found = [factor * 10.0**decade for decade in decades for factor in factors]
            found = [tick for tick in found if self.low <= math.log10(tick) <= self.high]
            if len(found) <= most:
                break
        if len(found) > most:
            found = found[:: math.ceil(len(found) / most)]
        if len(found) < 2:  # a range too narrow for round numbers on a logarithmic axis
            found = [tick for tick in _linear_ticks(10**self.low, 10**self.high, most) if tick > 0]
        return found


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    span = (high - low) / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(span))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= span * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


class Plot:
    """One panel with two axes. Draw with :meth:`line` and :meth:`dots`, then :meth:`render`.

    Args:
        title: What is shown, for people who do not see it.
        description: The same in a sentence with the main numbers.
        x: Horizontal scale.
        y: Vertical scale.
        x_label: Written below.
        y_label: Written above the vertical axis, so that no text is turned.
        width: In pixels, before the page scales it.
        height: In pixels.
        x_ticks: Labels by value, instead of round numbers.
        y_ticks: Likewise.
    """

    left, right, top, bottom = 56, 16, 30, 40

    def __init__(
        self,
        title: str,
        description: str,
        x: Scale,
        y: Scale,
        *,
        x_label: str,
        y_label: str,
        width: int = 460,
        height: int = 260,
        x_ticks: dict[float, str] | None = None,
        y_ticks: dict[float, str] | None = None,
    ) -> None:
        self.title, self.description = title, description
        self.x, self.y, self.width, self.height = x, y, width, height
        self.x_label, self.y_label = x_label, y_label
        self._ticks = (x_ticks, y_ticks)
        x.fit(self.left, width - self.right)
        y.fit(height - self.bottom, self.top)
        self._marks: list[Markup] = []

    def _visible(self, points: Sequence[Point]) -> list[Point]:
        return [(px, py) for px, py in points if self.x.shows(px) and self.y.shows(py)]

    def line(self, points: Sequence[Point], class_: str) -> None:
        """Join points, with a gap where a value cannot be drawn."""
        pieces, pen = [], "M"
        for px, py in thin(points):
            if self.x.shows(px) and self.y.shows(py):
                pieces.append(f"{pen}{self.x(px):.1f} {self.y(py):.1f}")
                pen = "L"
            else:
                pen = "M"
        if pieces:
            self._marks.append(element("path", d="".join(pieces), class_=f"curve {class_}"))

    def dots(
        self,
        points: Sequence[Point],
        class_: str,
        titles: Sequence[str] = (),
        radii: Sequence[float] = (),
    ) -> None:
        """Circles, each with a title that shows on hover."""
        for index, (px, py) in enumerate(points):
            if not (self.x.shows(px) and self.y.shows(py)):
                continue
            tip = element("title", titles[index]) if index < len(titles) else None
            radius = radii[index] if index < len(radii) else 3.0
            self._marks.append(
                element(
                    "circle",
                    *([tip] if tip else []),
                    cx=f"{self.x(px):.1f}",
                    cy=f"{self.y(py):.1f}",
                    r=f"{radius:.1f}",
                    class_=f"dot {class_}",
                )
            )

    def names(self, points: Sequence[Point], names: Sequence[str], classes: Sequence[str]) -> None:
        """Names beside points, moved apart vertically where they would overlap."""
        drawn = [
            (self.x(px), self.y(py), name, class_)
            for (px, py), name, class_ in zip(points, names, classes, strict=True)
            if self.x.shows(px) and self.y.shows(py)
        ]
        heights = spread([y for _, y, _, _ in drawn], 15, self.top + 6, self.height - self.bottom - 6)
        for (px, py, name, class_), label_y in zip(drawn, heights, strict=True):
            length = 16 + 7 * len(name)
            # To the right, unless that leaves the panel or covers another point and the left does not.
            beside = 1 if px + length < self.width else -1
            if _covers(drawn, px, label_y, beside * length) and not _covers(
                drawn, px, label_y, -beside * length
            ):
                beside = -beside if self.left < px - beside * length < self.width else beside
            if abs(label_y - py) > 4:
                self._marks.append(
                    element(
                        "path",
                        d=f"M{px + 5 * beside:.1f} {py:.1f}L{px + 12 * beside:.1f} {label_y:.1f}",
                        class_="leader",
                    )
                )
            self._marks.append(
                element(
                    "text",
                    name,
                    x=f"{px + 14 * beside:.1f}",
                    y=f"{label_y + 4:.1f}",
                    class_=f"name {class_}",
                    text_anchor="start" if beside > 0 else "end",
                )
            )

    def rule(self, y: float, class_: str = "") -> None:
        """A horizontal line across the panel."""
        if self.y.shows(y):
            d = f"M{self.left} {self.y(y):.1f}H{self.width - self.right}"
            self._marks.append(element("path", d=d, class_=f"rule {class_}"))

    def band(self, start: float, end: float, label: str) -> None:
        """A shaded stretch of the horizontal axis, behind what is drawn."""
        left, right = self.x(start), self.x(end)
        self._marks[:0] = [
            element(
                "rect",
                x=f"{left:.1f}",
                y=self.top,
                width=f"{max(0.0, right - left):.1f}",
                height=self.height - self.top - self.bottom,
                class_="band",
            ),
            element(
                "text",
                label,
                x=f"{right - 6:.1f}",
                y=self.top + 15,
                class_="tick",
                text_anchor="end",
            ),
        ]

    def _axes(self) -> Markup:
        pieces = []
        x_ticks, y_ticks = self._ticks
        base = self.height - self.bottom
        for value, label in (y_ticks or {tick: _tick(tick) for tick in self.y.ticks()}).items():
            height = f"{self.y(value):.1f}"
            pieces.append(
                element("path", d=f"M{self.left} {height}H{self.width - self.right}", class_="grid")
            )
            pieces.append(
                element(
                    "text",
                    label,
                    x=self.left - 8,
                    y=f"{self.y(value) + 4:.1f}",
                    class_="tick",
                    text_anchor="end",
                )
            )
        for value, label in (x_ticks or {tick: _tick(tick) for tick in self.x.ticks()}).items():
            place = f"{self.x(value):.1f}"
            pieces.append(element("path", d=f"M{place} {base}v4", class_="axis"))
            pieces.append(element("text", label, x=place, y=base + 18, class_="tick", text_anchor="middle"))
        pieces.append(element("path", d=f"M{self.left} {base}H{self.width - self.right}", class_="axis"))
        pieces.append(element("text", self.y_label, x=4, y=14, class_="label"))
        pieces.append(
            element(
                "text",
                self.x_label,
                x=self.width - self.right,
                y=self.height - 5,
                class_="label",
                text_anchor="end",
            )
        )
        return fragment(pieces)

    def render(self) -> Markup:
        """The panel."""
        return picture(
            self.title,
            self.description,
            self.width,
            self.height,
            fragment(self._axes(), self._marks),
            class_="plot",
        )


def picture(
    title: str, description: str, width: float, height: float, content: Markup, *, class_: str
) -> Markup:
    """An SVG with its text alternative.

    The alternative is an attribute: a ``title`` element of the whole drawing would show as a hover text everywhere.
    """
    return element(
        "svg",
        content,
        class_=class_,
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        role="img",
        aria_label=f"{title}. {description}",
    )


def legend(entries: Sequence[tuple[str, str, str]]) -> Markup:
    """What the marks mean: (shape, class, text), the shape being ``line``, ``dot``, ``rule`` or ``cell``."""
    shapes = {
        "line": lambda class_: element("path", d="M1 7H21", class_=f"curve {class_}"),
        "rule": lambda class_: element("path", d="M1 7H21", class_=f"rule {class_}"),
        "dot": lambda class_: element("circle", cx=11, cy=7, r=4, class_=f"dot {class_}"),
        "cell": lambda class_: element("rect", x=4, y=0, width=14, height=14, rx=3, class_=f"cell {class_}"),
    }
    items = [
        element(
            "li",
            element(
                "svg", shapes[shape](class_), viewBox="0 0 22 14", width=22, height=14, aria_hidden="true"
            ),
            element("span", words),
        )
        for shape, class_, words in entries
    ]
    return element("ul", items, class_="legend")


def thin(points: Sequence[Point], limit: int = 500) -> list[Point]:
    """At most about ``limit`` points that keep every peak: the lowest and highest of each stretch."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if not finite:
            kept.append(stretch[0])
            continue
        extremes = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        kept.extend(sorted(extremes))
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places moved as little as a sweep needs to keep ``gap`` between neighbours, within ``low`` and ``high``."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [places[index] for index in order]
    for before, after in itertools.pairwise(range(len(moved))):
        moved[after] = max(moved[after], moved[before] + gap)
    if moved and moved[-1] > high:
        moved[-1] = high
        for after in range(len(moved) - 1, 0, -1):
            moved[after - 1] = min(moved[after - 1], moved[after] - gap)
    result = [0.0] * len(places)
    for position, index in enumerate(order):
        result[index] = max(low, moved[position])
    return result


def _covers(points: Sequence[tuple[float, float, str, str]], x: float, y: float, reach: float) -> bool:
    """Whether a name that starts at ``x`` and runs ``reach`` far, at height ``y``, lies on another point."""
    low, high = sorted((x, x + reach))
    return any(low <= px <= high and abs(px - x) > 4 and abs(py - y) < 10 for px, py, _, _ in points)


def _tick(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}".replace("-", "−")
    return short(value, 2)
