"""The widths as a picture: blocks across, kinds of linears down, and how the weights are shared among widths."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rco.report.charts import legend, picture
from rco.report.data import GroupWidth
from rco.report.markup import Markup, element, fragment
from rco.report.numbers import count, percent, plural

__all__ = ["bit_map", "level", "width_grid", "width_shares"]

_LEVELS = (2, 3, 4, 5, 6, 7, 8, 16)  # the widths that have a colour of their own in the style sheet
_MOST_COLUMNS = 36


@dataclass
class _Cell:
    """What stands in one block and kind: one group as a rule, many where experts are quantized one by one."""

    groups: list[GroupWidth]

    @property
    def width(self) -> float:
        return _average(self.groups)

    @property
    def label(self) -> str:
        same = len({group.width for group in self.groups}) == 1
        return f"{self.width:g}" if same else f"{self.width:.1f}"

    @property
    def title(self) -> str:
        if len(self.groups) == 1:
            group = self.groups[0]
            tied = f" ({len(group.members)} linears tied)" if len(group.members) > 1 else ""
            return f"{group.name}: {group.width:g} bits, {plural(group.parameters, 'weight')}{tied}"
        widths = Counter(f"{group.width:g}" for group in self.groups)
        listed = ", ".join(f"{n} × {width}" for width, n in sorted(widths.items()))
        return f"{plural(len(self.groups), 'group')}: average {self.width:.3f} bits ({listed})"


def level(width: float) -> str:
    """CSS class of a width's colour: the nearest width that has one, and one for what is pruned."""
    if width == 0:
        return "w0"
    nearest = min(_LEVELS, key=lambda known: (abs(known - width), known))
    return f"w{nearest}"


def _average(groups: Iterable[GroupWidth]) -> float:
    groups = list(groups)
    weights = [group.parameters or 1 for group in groups]
    return sum(w * group.width for w, group in zip(weights, groups, strict=True)) / sum(weights)


def bit_map(groups: Sequence[GroupWidth]) -> Markup:
    """Every group's width; one rectangle spans the kinds that share a width by a tie."""
    grid, kinds, loose = width_grid(groups)
    blocks = sorted(grid)
    pieces: list[Markup] = []
    if blocks:
        bands = -(-len(blocks) // _MOST_COLUMNS)
        per_band = -(-len(blocks) // bands)
        for start in range(0, len(blocks), per_band):
            shown = blocks[start : start + per_band]
            last = start + per_band >= len(blocks)
            pieces.append(
                element(
                    "div",
                    _band(grid, kinds, shown, _cell_size(len(blocks)), with_means=last),
                    class_="scroll",
                    tabindex="0",
                    role="group",
                    aria_label=f"Widths of blocks {shown[0]} to {shown[-1]}",
                )
            )
    if loose:
        items = [
            element(
                "li",
                element("span", f"{group.width:g}", class_=f"chip {level(group.width)}"),
                element("code", group.name),
            )
            for group in loose[:24]
        ]
        more = len(loose) - 24
        if more > 0:
            items.append(element("li", f"and {count(more)} more"))
        pieces.append(
            element(
                "div",
                element("p", "Outside the blocks", class_="small"),
                element("ul", items, class_="chips"),
            )
        )
    return fragment(pieces)


def width_grid(
    groups: Sequence[GroupWidth],
) -> tuple[dict[int, dict[str, _Cell]], list[str], list[GroupWidth]]:
    """Cells by block and kind, the kinds in the order in which they appear, and groups outside the blocks."""
    paths = {
        (group.block, member): _path(member, group.block)
        for group in groups
        if group.block is not None
        for member in group.members
    }
    longer = defaultdict(set)  # short names that stand for more than one path, such as GPT-2's two c_proj
    for path in paths.values():
        longer[path.rpartition(".")[2]].add(path)
    grid: dict[int, dict[str, _Cell]] = {}
    kinds: dict[str, None] = {}
    loose = []
    for group in groups:
        if group.block is None:
            loose.append(group)
            continue
        row = grid.setdefault(group.block, {})
        for kind in dict.fromkeys(_kind(paths[group.block, member], longer) for member in group.members):
            kinds.setdefault(kind)
            row.setdefault(kind, _Cell([])).groups.append(group)
    return grid, list(kinds), loose


def _path(member: str, block: int | None) -> str:
    """A linear's name inside its block, with the numbers of experts left out."""
    parts = member.split(".")
    if str(block) in parts:
        parts = parts[parts.index(str(block)) + 1 :] or parts
    return ".".join("*" if part.isdigit() else part for part in parts)


def _kind(path: str, longer: dict[str, set[str]]) -> str:
    """As short as tells it from the others of its block; experts are always called so."""
    parts = [part for part in path.split(".") if part != "*"]
    if len(longer[parts[-1]]) == 1 and "experts" not in parts:
        return parts[-1]
    pair = ".".join(parts[-2:])
    alike = [other for other in longer[parts[-1]] if other.replace(".*", "").endswith(f".{pair}")]
    return pair if len(alike) <= 1 else path


def _band(
    grid: dict[int, dict[str, _Cell]],
    kinds: Sequence[str],
    blocks: Sequence[int],
    size: tuple[int, int],
    *,
    with_means: bool,
) -> Markup:
    """One strip of the map."""
    wide, high = size
    shown = {kind: kind if len(kind) <= 22 else f"…{kind[-21:]}" for kind in kinds}
    left = 18 + int(7.2 * max(len(name) for name in shown.values()))
    top = 24
    pieces = []
    for column, block in enumerate(blocks):
        x = left + column * wide
        if len(blocks) <= 20 or column % 2 == 0:
            pieces.append(
                element("text", block, x=x + wide / 2, y=top - 8, class_="tick", text_anchor="middle")
            )
        pieces.extend(_column(grid[block], kinds, x, top, wide, high))
        mean = _average(
            {group.name: group for cell in grid[block].values() for group in cell.groups}.values()
        )
        pieces.append(
            element(
                "text",
                f"{mean:.1f}",
                x=x + wide / 2,
                y=top + len(kinds) * high + 17,
                class_="mean",
                text_anchor="middle",
            )
        )
    width = left + len(blocks) * wide + (52 if with_means else 4)
    for row, kind in enumerate(kinds):
        middle = top + row * high + high / 2 + 4
        pieces.append(
            element(
                "text",
                element("title", kind),
                shown[kind],
                x=left - 12,
                y=middle,
                class_="kind",
                text_anchor="end",
            )
        )
        cells = [cells[kind] for cells in grid.values() if kind in cells]
        if with_means:
            mean = _average(group for cell in cells for group in cell.groups)
            pieces.append(
                element("text", f"{mean:.1f}", x=width - 26, y=middle, class_="mean", text_anchor="middle")
            )
    pieces.append(
        element(
            "text", "average", x=left - 12, y=top + len(kinds) * high + 17, class_="mean", text_anchor="end"
        )
    )
    pieces.append(element("text", "block", x=left - 12, y=top - 8, class_="tick", text_anchor="end"))
    if with_means:
        pieces.append(
            element("text", "average", x=width - 26, y=top - 8, class_="mean", text_anchor="middle")
        )
    return picture(
        f"Width of every linear in blocks {blocks[0]} to {blocks[-1]}",
        "One column per block, one row per kind of linear; the table of all groups below has the same numbers.",
        width,
        top + len(kinds) * high + 26,
        fragment(pieces),
        class_="map",
    )


def _cell_size(blocks: int) -> tuple[int, int]:
    """Fewer blocks, larger cells."""
    if blocks <= 14:
        return 46, 32
    return (32, 28) if blocks <= 28 else (25, 25)


def _column(
    cells: dict[str, _Cell], kinds: Sequence[str], x: float, top: float, wide: float, high: float
) -> list[Markup]:
    """The cells of one block; neighbours of the same group become one."""
    pieces = []
    row = 0
    while row < len(kinds):
        cell = cells.get(kinds[row])
        if cell is None:
            row += 1
            continue
        end = row + 1
        while end < len(kinds) and kinds[end] in cells and cells[kinds[end]].groups == cell.groups:
            end += 1
        tied = " tied" if len(cell.groups) == 1 and len(cell.groups[0].members) > 1 else ""
        pieces.append(
            element(
                "g",
                element("title", cell.title),
                element(
                    "rect",
                    x=x + 1,
                    y=top + row * high + 1,
                    width=wide - 2,
                    height=(end - row) * high - 2,
                    rx=4,
                    class_=f"cell {level(cell.width)}{tied}",
                ),
                element(
                    "text",
                    cell.label,
                    x=x + wide / 2,
                    y=top + (row + end) * high / 2 + 4,
                    class_=f"on {level(cell.width)}",
                    text_anchor="middle",
                ),
            )
        )
        row = end
    return pieces


def width_shares(groups: Sequence[GroupWidth]) -> Markup:
    """How the weights are shared among the widths: one bar, which is the map's legend as well."""
    weights: Counter[float] = Counter()
    numbers: Counter[float] = Counter()
    for group in groups:
        weights[group.width] += group.parameters
        numbers[group.width] += 1
    total = sum(weights.values())
    if not total:
        return fragment()
    pieces, x, entries = [], 0.0, []
    for width in sorted(weights):
        share = weights[width] / total
        name = f"{width:g} bits" if width else "pruned"
        words = f"{name}: {percent(share)} of the weights, {plural(numbers[width], 'group')}"
        entries.append(("cell", level(width), words))
        pieces.append(
            element(
                "rect",
                element("title", words),
                x=f"{1000 * x:.1f}",
                y=0,
                width=f"{max(0.0, 1000 * share - 2):.1f}",
                height=14,
                class_=f"cell {level(width)}",
            )
        )
        x += share
    listed = "; ".join(words for _, _, words in entries)
    bar = element(
        "svg",
        pieces,
        class_="shares",
        viewBox="0 0 1000 14",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"Share of the weights at each width. {listed}",
    )
    return fragment(bar, legend(entries))
