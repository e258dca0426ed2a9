"""Maps of an allocation: widths by block and kind of linear, experts by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rco.report.data import ExpertWidths, GroupWidth, MoeLayer
from rco.report.numbers import percent, plural, significant
from rco.report.theme import level

__all__ = [
    "Band",
    "Cell",
    "ExpertRow",
    "Share",
    "Spot",
    "Strip",
    "average_width",
    "expert_map",
    "frequency_map",
    "width_bands",
    "width_grid",
    "width_map",
    "width_shares",
]

_MOST_BLOCKS = 36  # side by side
_MOST_TITLES = 1024  # cells with a hover text each; a larger map merges equal neighbours
_SHADES = 8  # steps of the frequency's colour
_PARTS = ("gate", "up", "down")


# ------------------------------------------------------------- widths of linears


@dataclass
class Cell:
    """The groups of one block and kind: usually one, many if experts have their own widths."""

    groups: list[GroupWidth]

    @property
    def width(self) -> float:
        """Average width, weighted by parameters."""
        return average_width(self.groups)

    @property
    def level(self) -> int:
        """The width whose colour the cell has."""
        return level(self.width)

    @property
    def tied(self) -> bool:
        """Whether the cell is one group of several linears."""
        return len(self.groups) == 1 and len(self.groups[0].members) > 1

    @property
    def label(self) -> str:
        """The width, with a decimal if it is an average."""
        same = len({group.width for group in self.groups}) == 1
        return f"{self.width:g}" if same else f"{self.width:.1f}"

    @property
    def title(self) -> str:
        """The hover text."""
        if len(self.groups) == 1:
            group = self.groups[0]
            tied = f" ({len(group.members)} linears tied)" if self.tied else ""
            return f"{group.name}: {group.width:g} bits, {plural(group.parameters, 'weight')}{tied}"
        widths = Counter(f"{group.width:g}" for group in self.groups)
        listed = ", ".join(f"{n} × {width}" for width, n in sorted(widths.items()))
        return f"{plural(len(self.groups), 'group')}: average {self.width:.3f} bits ({listed})"


def average_width(groups: Iterable[GroupWidth]) -> float:
    """Average width of groups, weighted by parameters."""
    groups = list(groups)
    weights = [group.parameters or 1 for group in groups]
    return sum(w * group.width for w, group in zip(weights, groups, strict=True)) / sum(weights)


def width_grid(
    groups: Sequence[GroupWidth],
) -> tuple[dict[int, dict[str, Cell]], list[str], list[GroupWidth]]:
    """Cells by block and kind, the kinds in order of appearance, and the groups outside the blocks."""
    paths = {
        (group.block, member): _path(member, group.block)
        for group in groups
        if group.block is not None
        for member in group.members
    }
    longer = defaultdict(set)  # short names shared by several paths, such as GPT-2's two c_proj
    for path in paths.values():
        longer[path.rpartition(".")[2]].add(path)
    grid: dict[int, dict[str, Cell]] = {}
    kinds: dict[str, None] = {}
    loose = []
    for group in groups:
        if group.block is None:
            loose.append(group)
            continue
        row = grid.setdefault(group.block, {})
        for kind in dict.fromkeys(_kind(paths[group.block, member], longer) for member in group.members):
            kinds.setdefault(kind)
            row.setdefault(kind, Cell([])).groups.append(group)
    return grid, list(kinds), loose


def _path(member: str, block: int | None) -> str:
    """A linear's name inside its block, with ``*`` for the numbers of experts."""
    parts = member.split(".")
    if str(block) in parts:
        parts = parts[parts.index(str(block)) + 1 :] or parts
    return ".".join("*" if part.isdigit() else part for part in parts)


def _kind(path: str, longer: dict[str, set[str]]) -> str:
    """The shortest name that is unique within the block; names of experts contain the word."""
    parts = [part for part in path.split(".") if part != "*"]
    if len(longer[parts[-1]]) == 1 and "experts" not in parts:
        return parts[-1]
    pair = ".".join(parts[-2:])
    alike = [other for other in longer[parts[-1]] if other.replace(".*", "").endswith(f".{pair}")]
    return pair if len(alike) <= 1 else path


@dataclass(frozen=True)
class Spot:
    """A place in the map of widths: a cell and the number of kinds it spans; no cell if there is no such linear."""

    cell: Cell | None
    rows: int = 1


@dataclass(frozen=True)
class Band:
    """Some neighbouring blocks of the map of widths.

    Attributes:
        blocks: Their numbers.
        rows: Per kind: its name, its places (those covered by a tied group above are left out), its average.
        averages: Average width of every block.
        last: Whether these are the last blocks; they also show the averages of kinds over all blocks.
    """

    blocks: list[int]
    rows: list[tuple[str, list[Spot], float]]
    averages: list[float]
    last: bool


def width_bands(groups: Sequence[GroupWidth]) -> tuple[list[Band], list[GroupWidth]]:
    """The map of widths, cut into bands if there are many blocks; and the groups outside the blocks."""
    grid, kinds, loose = width_grid(groups)
    blocks = sorted(grid)
    if not blocks:
        return [], loose
    per_band = -(-len(blocks) // -(-len(blocks) // _MOST_BLOCKS))
    averages = [
        average_width({g.name: g for cell in grid[block].values() for g in cell.groups}.values())
        for block in blocks
    ]
    kind_averages = [
        average_width(g for cells in grid.values() if kind in cells for g in cells[kind].groups)
        for kind in kinds
    ]
    columns = [_spots(grid[block], kinds) for block in blocks]
    bands = []
    for start in range(0, len(blocks), per_band):
        end = start + per_band
        rows = [
            (kind, [spot for column in columns[start:end] if (spot := column[row]) is not None], mean)
            for row, (kind, mean) in enumerate(zip(kinds, kind_averages, strict=True))
        ]
        bands.append(Band(blocks[start:end], rows, averages[start:end], end >= len(blocks)))
    return bands, loose


def _spots(cells: dict[str, Cell], kinds: Sequence[str]) -> list[Spot | None]:
    """The places of one block; neighbouring kinds of one tied group share the first place."""
    found: list[Spot | None] = []
    while len(found) < len(kinds):
        cell = cells.get(kinds[len(found)])
        span = 1
        while cell and len(found) + span < len(kinds):
            below = cells.get(kinds[len(found) + span])
            if below is None or below.groups != cell.groups:
                break
            span += 1
        found += [Spot(cell, span), *[None] * (span - 1)]
    return found


@dataclass(frozen=True)
class Share:
    """Share of all weights with one width."""

    width: float
    start: float
    share: float
    groups: int

    @property
    def level(self) -> int:
        """The width whose colour it has."""
        return level(self.width)

    @property
    def words(self) -> str:
        """The share in words."""
        name = f"{self.width:g} bits" if self.width else "pruned"
        return f"{name}: {percent(self.share)} of the weights, {plural(self.groups, 'group')}"


def width_shares(groups: Sequence[GroupWidth]) -> list[Share]:
    """Shares of the weights by width; empty if numbers of weights are unknown."""
    weights: Counter[float] = Counter()
    numbers: Counter[float] = Counter()
    for group in groups:
        weights[group.width] += group.parameters
        numbers[group.width] += 1
    total, start, found = sum(weights.values()), 0.0, []
    for width in sorted(weights) if total else ():
        found.append(Share(width, start, weights[width] / total, int(numbers[width])))
        start += weights[width] / total
    return found


# ------------------------------------------------------------------------ experts


@dataclass(frozen=True)
class Strip:
    """Neighbouring experts drawn alike.

    Attributes:
        colours: Style class of their colour; one, or one for each of gate, up and down.
        experts: Number of experts.
        title: The hover text; None in a map too large for one per expert.
    """

    colours: tuple[str, ...]
    experts: int = 1
    title: str | None = None


@dataclass(frozen=True)
class ExpertRow:
    """One layer of a map of experts.

    Attributes:
        layer: Its number.
        strips: Its experts.
        title: The hover text of the row, in a map too large for one per expert.
        note: A number beside the row.
        share: The part of the experts that are kept.
    """

    layer: int
    strips: list[Strip]
    title: str | None
    note: str = ""
    share: float | None = None


def _expert_row(
    layer: int,
    strips: list[Strip],
    title: str,
    large: bool,
    note: str = "",
    share: float | None = None,
) -> ExpertRow:
    if large:
        return ExpertRow(layer, _merged(strips), title, note, share)
    return ExpertRow(layer, strips, None, note, share)


def _merged(strips: Sequence[Strip]) -> list[Strip]:
    """Strips with equal neighbours merged, without hover texts."""
    merged: list[Strip] = []
    for strip in strips:
        if merged and merged[-1].colours == strip.colours:
            merged[-1] = Strip(strip.colours, merged[-1].experts + strip.experts)
        else:
            merged.append(Strip(strip.colours, strip.experts))
    return merged


def expert_map(layers: Sequence[MoeLayer]) -> list[ExpertRow]:
    """Kept and pruned experts; with REAP's scores, also those where REAP's choice differs."""
    large = sum(layer.experts for layer in layers) > _MOST_TITLES
    found = []
    for layer in layers:
        kept, reap = set(layer.kept), layer.best("reap")
        strips = []
        for expert in range(layer.experts):
            stays = expert in kept
            differs = reap is not None and (expert in reap) != stays
            colour = ("gained" if stays else "lost") if differs else ("kept" if stays else "pruned")
            scores = "".join(f", {name} {significant(v[expert], 3)}" for name, v in layer.scores.items())
            fate = "kept" if stays else "pruned"
            strips.append(Strip((colour,), 1, f"Layer {layer.layer}, expert {expert}: {fate}{scores}"))
        title = f"Layer {layer.layer}: {len(kept)} of {layer.experts} experts kept"
        share = len(kept) / layer.experts
        found.append(_expert_row(layer.layer, strips, title, large, str(len(kept)), share))
    return found


def width_map(layers: Sequence[ExpertWidths]) -> list[ExpertRow]:
    """Width of every expert; if its projections differ, widths of gate, up and down."""
    large = sum(len(layer.widths) for layer in layers) > _MOST_TITLES
    found = []
    for layer in layers:
        strips = []
        for expert, (parts, share) in enumerate(zip(layer.widths, layer.frequency, strict=True)):
            shown = parts[:1] if len(set(parts)) == 1 else parts
            colours = tuple(f"w{level(width)}" for width in shown)
            strips.append(Strip(colours, 1, _expert_title(layer.layer, expert, parts, share)))
        title = f"Layer {layer.layer}: {layer.mean:.2f} bits on average"
        found.append(_expert_row(layer.layer, strips, title, large, f"{layer.mean:.2f}"))
    return found


def frequency_map(layers: Sequence[ExpertWidths]) -> list[ExpertRow]:
    """Share of the tokens routed to every expert, in shades."""
    large = sum(len(layer.widths) for layer in layers) > _MOST_TITLES
    highest = max((share for layer in layers for share in layer.frequency), default=0.0) or 1.0
    found = []
    for layer in layers:
        strips = []
        for expert, (parts, share) in enumerate(zip(layer.widths, layer.frequency, strict=True)):
            shade = min(_SHADES, 1 + int(_SHADES * share / highest)) if share > 0 else 0
            strips.append(Strip((f"s{shade}",), 1, _expert_title(layer.layer, expert, parts, share)))
        title = f"Layer {layer.layer}: the busiest expert has {percent(max(layer.frequency))} of the tokens"
        found.append(_expert_row(layer.layer, strips, title, large))
    return found


def _expert_title(layer: int, expert: int, parts: tuple[int, int, int], share: float) -> str:
    if len(set(parts)) == 1:
        bits = "pruned" if parts[0] == 0 else f"{parts[0]} bits"
    else:
        bits = ", ".join(f"{name} {width}" for name, width in zip(_PARTS, parts, strict=True)) + " bits"
    return f"Layer {layer}, expert {expert}: {bits}, chosen by {percent(share)} of the tokens"
