"""Plots drawn by matplotlib, as SVG elements of the page: its fonts, its colours in light and dark, hover texts.

Matplotlib draws with the colours of the light theme; in the SVG they become the style sheet's variables.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from rco.report.numbers import short
from rco.report.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Panel", "Point", "draw", "spread"]

Point = tuple[float, float]

_VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 30, 42  # margins in pixels
_SETTINGS: dict[Any, Any] = {
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": LIGHT["ink"],
    "axes.titlesize": 12.5,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; the page's own font replaces it
    "font.size": 12.5,
    "grid.color": LIGHT["grid"],
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.color": LIGHT["muted"],
    "xtick.labelsize": 12,
    "ytick.color": LIGHT["muted"],
    "ytick.labelsize": 12,
    "ytick.major.size": 0,
}


class Panel:
    """A plot to draw on.

    Attributes:
        axes: The axes, to draw on directly; text that is not plain ASCII goes through :meth:`text`.
        svg: The drawing, available after :func:`draw` ends.
    """

    def __init__(self, axes: Axes, size: tuple[int, int]) -> None:
        self.axes, self.size = axes, size
        self.svg = Markup("")
        self._classes: dict[str, str] = {}
        self._words: dict[str, list[str]] = {}

    def _name(self, class_: str, words: Sequence[str]) -> str:
        name = f"mark{len(self._classes)}"
        self._classes[name], self._words[name] = class_, list(words)
        return name

    def line(self, points: Sequence[Point], colour: str, dashes: tuple[float, float] | None = None) -> None:
        """Draw a line through points, with a gap at values that cannot be drawn."""
        style = {} if dashes is None else {"linestyle": (0, dashes), "linewidth": 1.4}
        shown = [point if self._shows(point) else (point[0], math.nan) for point in points]
        self.axes.plot(*_columns(shown), color=LIGHT[colour], **style)  # type: ignore[arg-type]

    def _shows(self, point: Point) -> bool:
        """Whether both coordinates can be drawn on their axes."""
        scales = (self.axes.get_xscale(), self.axes.get_yscale())
        return all(math.isfinite(v) and (v > 0 or s != "log") for v, s in zip(point, scales, strict=True))

    def dots(
        self,
        points: Sequence[Point],
        colour: str,
        titles: Sequence[str],
        radii: Sequence[float] | float = 3.0,
        class_: str = "dot",
    ) -> None:
        """Circles with hover texts; those that cannot be drawn are left out."""
        sizes = [radii] * len(points) if isinstance(radii, int | float) else radii
        by_size: dict[float, list[tuple[Point, str]]] = {}
        for point, title, size in zip(points, titles, sizes, strict=True):
            if self._shows(point):
                by_size.setdefault(round(2 * size) / 2, []).append((point, title))
        for size, marks in sorted(by_size.items(), reverse=True):  # one shape per size; small ones on top
            self.axes.plot(
                *_columns([point for point, _ in marks]),
                linestyle="",
                marker="o",
                markersize=2 * size,
                color=LIGHT[colour],
                markeredgecolor=LIGHT["page"],
                markeredgewidth=0.8,
                gid=self._name(class_, [title for _, title in marks]),
            )

    def text(self, x: float, y: float, words: str, *, align: str = "left", class_: str = "") -> None:
        """Text at a place in pixels from the lower left corner.

        Matplotlib draws a placeholder, because it warns about characters that its own font lacks.
        """
        from matplotlib.transforms import IdentityTransform

        self.axes.text(
            x,
            y,
            "x",
            ha=align,
            va="baseline",
            transform=IdentityTransform(),
            color=LIGHT["muted"],
            fontsize=12,
            gid=self._name(class_, [words]),
        )

    def names(self, points: Sequence[Point], names: Sequence[str], classes: Sequence[str]) -> None:
        """Names beside points, moved apart vertically if they would overlap; set the limits first."""
        from matplotlib.transforms import IdentityTransform

        width, height = self.size
        places = [tuple(self.axes.transData.transform(point)) for point in points]
        heights = spread([y for _, y in places], 15, _BOTTOM + 6, height - _TOP - 6)
        for (x, y), label_y, name, class_ in zip(places, heights, names, classes, strict=True):
            length = 16 + 7 * len(name)
            # To the right, unless that leaves the panel or covers another point, and the left does not.
            side = 1 if x + length < width else -1
            if _covers(places, x, label_y, side * length) and not _covers(places, x, label_y, -side * length):
                side = -side if _LEFT < x - side * length < width else side
            if abs(label_y - y) > 4:
                self.axes.plot(
                    [x + 5 * side, x + 12 * side],
                    [y, label_y],
                    color=LIGHT["muted"],
                    linewidth=0.7,
                    transform=IdentityTransform(),
                    scalex=False,
                    scaley=False,
                )
            self.text(
                x + 14 * side,
                label_y - 4,
                name,
                align="left" if side > 0 else "right",
                class_=f"name {class_}",
            )

    def _finish(self, name: str, title: str, description: str) -> None:
        import matplotlib

        for axis in (self.axes.xaxis, self.axes.yaxis):
            if axis.get_scale() == "log":
                low, high = sorted(float(end) for end in axis.get_view_interval())
                axis.set_ticks(_log_ticks(low, high))
        drawn = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": name}):
            self.axes.figure.savefig(drawn, format="svg", metadata={"Date": None})  # type: ignore[union-attr]
        self.svg = self._inline(drawn.getvalue(), f"{title}. {description}")

    def _inline(self, source: str, words: str) -> Markup:
        """Matplotlib's SVG for embedding in the page, with the page's colours and hover texts."""
        root = ElementTree.fromstring(source)
        parents = {child: parent for parent in root.iter() for child in parent}
        used = {
            value.removeprefix("#")
            for element in root.iter()
            for key, value in element.attrib.items()
            if key.endswith("href")
        }
        marked = []
        for element in list(root.iter()):
            element.tag = element.tag.rpartition("}")[2]
            if element.tag in ("metadata", "style", "clipPath"):
                parents[element].remove(element)
                continue
            element.text = (element.text or "").strip() or None
            element.tail = None
            own = element.attrib.pop("id", None)
            if own in used:
                element.set("id", str(own))
            _plain_attributes(element)
            if own in self._classes:
                marked.append((element, self._classes[own], self._words[own]))
        for element, class_, texts in marked:
            _mark(element, class_, texts)
        width, height = self.size
        root.attrib = {
            "viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height), "class": "plot",
            "role": "img", "aria-label": words,
        }  # fmt: skip
        return Markup(ElementTree.tostring(root, encoding="unicode"))


def _plain_attributes(element: ElementTree.Element) -> None:
    """Style properties as attributes, since the page allows no inline styles; short numbers, the page's colours."""
    for declaration in element.attrib.pop("style", "").split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":  # size and family in one, before matplotlib 3.11
            key, value = "font-size", value.partition(" ")[0]
        if key and key != "font-family":
            element.set(key, _VARIABLES.get(value, value))
    for key, value in list(element.attrib.items()):
        if key == "clip-path" or value.startswith("rotate(-0 "):  # everything lies within the axes' limits
            del element.attrib[key]
        elif key.startswith("{"):
            del element.attrib[key]
            element.set(key.rpartition("}")[2], value)
        elif key in ("d", "x", "y", "transform"):
            rounded = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found.group()):.1f}", value)
            element.set(key, re.sub(r"\s*([MLCQzHV])\s*", r"\1", rounded).strip())


def _mark(element: ElementTree.Element, class_: str, words: Sequence[str]) -> None:
    """Give a group its class, and its text or the hover texts of its dots."""
    if class_:
        element.set("class", class_)
    for text in element.iter("text"):
        text.text = words[0]
        return
    dots = list(element.iter("use"))
    for shape in (
        *element.iter("path"),
        *dots,
    ):  # the style moves to the group, where the style sheet can change it
        for key in ("fill", "stroke", "stroke-width"):
            if (value := shape.attrib.pop(key, None)) is not None:
                element.set(key, value)
    for dot, title in zip(dots, words, strict=True):
        ElementTree.SubElement(dot, "title").text = title


@contextmanager
def draw(
    name: str,
    title: str,
    description: str,
    *,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    size: tuple[int, int] = (440, 260),
) -> Iterator[Panel]:
    """A panel to draw on; its ``svg`` is set at the end of the block.

    Args:
        name: Unique on the page: the names of the drawing's shapes are derived from it.
        title: The text alternative.
        description: The main numbers, in the text alternative.
        x_label: Label below the axis.
        y_label: Label above the axis, so that no text is rotated.
        x_log: Logarithmic horizontal axis.
        y_log: Logarithmic vertical axis.
        size: Size in pixels, before the page scales it.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        width, height = size
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        axes = figure.add_axes(
            (
                _LEFT / width,
                _BOTTOM / height,
                1 - (_LEFT + _RIGHT) / width,
                1 - (_TOP + _BOTTOM) / height,
            )
        )
        if x_log:
            axes.set_xscale("log")
        if y_log:
            axes.set_yscale("log")
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        for axis, log in ((axes.xaxis, x_log), (axes.yaxis, y_log)):
            axis.set_major_locator(NullLocator() if log else MaxNLocator(6, steps=[1, 2, 5, 10]))
            axis.set_major_formatter(FuncFormatter(lambda value, _: _tick_label(value)))
            axis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.set_xlabel(x_label, loc="right")
        # A fixed position, because matplotlib would measure all labels to find one.
        axes.set_title(y_label, loc="left", x=-_LEFT / (width - _LEFT - _RIGHT) + 0.01, y=1.0, pad=12)
        panel = Panel(axes, size)
        yield panel
        panel._finish(name, title, description)


def _log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values of a logarithmic axis: several per decade if there is space, else whole decades."""
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    if len(ticks) < 2:  # the range is too narrow for round values
        ticks = [
            float(t) for t in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= t <= high
        ]
    return ticks[:: math.ceil(len(ticks) / most)] if ticks else []


def _tick_label(value: float) -> str:
    """A round number beside an axis."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}".replace("-", "−")
    return short(value, 2)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places moved apart to keep ``gap`` between neighbours, within ``low`` and ``high``."""
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


def _covers(points: Sequence[Any], x: float, y: float, reach: float) -> bool:
    """Whether a name that starts at ``x`` and runs ``reach`` far, at height ``y``, lies on another point."""
    low, high = sorted((x, x + reach))
    return any(low <= px <= high and abs(px - x) > 4 and abs(py - y) < 10 for px, py in points)


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
