"""Groups of linears and the options that each group may take.

An option is a format: a packed one, the original, or removal of an expert. Locks, skips, ties and the rules of a
serving engine become constraints here, before any work, so that the engine loads every possible result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, get_args

import numpy as np

from rco.compression.engines import Engine, ExpertGroups, find_engine
from rco.compression.gguf_target import GGUFTarget
from rco.compression.llama_quantize import GGUF_WIDTHS, GGUFFile
from rco.formats.base import Format
from rco.formats.floating import FloatingPoint
from rco.formats.ggml.block_types import GGMLFormat
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.embeddings import EMBEDDING_ROLE, embedding_obstacle
from rco.models.layout import Layout, LinearInfo
from rco.models.moe.expert_discovery import UnreadExperts
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import EXPERT_ROLE, ExpertLinear

__all__ = [
    "CompressionPlan",
    "ExpertGroups",
    "Group",
    "make_gguf_plan",
    "make_plan",
    "make_removal_plan",
    "stored_width",
]

_BYTES = FloatingPoint("int8")  # of embeddings alone, unless it is asked for
ROLES = ("attention", "mlp", EXPERT_ROLE, "shared_expert", "outer", "head", EMBEDDING_ROLE)


@dataclass(frozen=True)
class Group:
    """Linears that share an option."""

    name: str
    members: tuple[LinearInfo, ...]
    options: tuple[Format, ...]  # allowed

    @property
    def widths(self) -> tuple[int, ...]:
        """Nominal bits of the allowed options."""
        return tuple(option.bits for option in self.options)

    @property
    def block(self) -> int | None:
        """Block of all members; None if they are not in one block."""
        blocks = {member.block for member in self.members}
        return blocks.pop() if len(blocks) == 1 else None

    @property
    def parameters(self) -> int:
        """Number of weights in the group."""
        return sum(member.parameters for member in self.members)

    @property
    def switched(self) -> bool:
        """Whether the group has other options than the original weights."""
        return self.options != (ORIGINAL,)


@dataclass(frozen=True)
class CompressionPlan:
    """Groups and options; an option is a column of the gates.

    For GGUF files an option is a width; :meth:`format_of` gives the format of a linear at that width.
    """

    groups: tuple[Group, ...]
    linears: tuple[LinearInfo, ...]  # of all groups, in the order of the model
    options: tuple[Format, ...]
    group_size: int | None
    symmetric: bool
    engine: Engine
    skipped: tuple[str, ...] = field(default=())  # unquantized linears outside the budget
    gguf: GGUFFile | None = None
    target: GGUFTarget | None = None  # the GGUF file to write, whose types are the options
    unread: tuple[UnreadExperts, ...] = ()  # counted at their original width

    @property
    def widths(self) -> tuple[int, ...]:
        """Nominal bits of the options."""
        return tuple(option.bits for option in self.options)

    def format_of(self, info: LinearInfo, option: Format) -> Format:
        """Format of a linear under an option."""
        if self.gguf is not None and option not in (ORIGINAL, REMOVED):
            return self.gguf.scheme_of(info, option.bits)
        return option

    def fits(self, info: LinearInfo, option: Format) -> bool:
        """Whether a linear has a candidate for an option."""
        if self.target is not None:
            return self.target.fits(info, option)
        return option in self.menus[info.role == EMBEDDING_ROLE] and _divides(info, option)

    @cached_property
    def menus(self) -> dict[bool, frozenset[Format]]:
        """Options of embeddings (True), and of all others."""
        return {
            embedding: frozenset(
                option
                for group in self.groups
                if (group.members[0].role == EMBEDDING_ROLE) == embedding
                for option in group.options
            )
            for embedding in (True, False)
        }

    def label(self, option: Format) -> str:
        """Name of an option within the plan: bits of an integer grid if unique, else the format's name."""
        if self.removes_only:
            return "prune" if option == REMOVED else "keep"
        if self.target is not None:
            return option.name
        same = [each for each in self.options if each.bits == option.bits and each != _BYTES]
        plain = isinstance(option, IntegerGrid) or option in (ORIGINAL, REMOVED)
        return str(option.bits) if plain and same == [option] else option.name

    @property
    def allowed(self) -> np.ndarray:
        """(N, K) options that each group may take."""
        return np.array([[option in group.options for option in self.options] for group in self.groups])

    @property
    def block_types(self) -> list[str]:
        """Available types of a GGUF file; empty for other plans."""
        if self.target is not None:
            return list(self.labels)
        file = self.gguf
        if file is None:
            return []
        pairs = {(m.in_features, w): m for group in self.groups for w in group.widths for m in group.members}
        kinds = [file.type_of(member, width) for (_, width), member in pairs.items()]
        return list(dict.fromkeys(kind.name for kind in kinds if kind is not None))

    @property
    def removes_only(self) -> bool:
        """Whether experts are only kept or removed, with nothing quantized."""
        return not self.packed

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the options, one per column of the gates."""
        return tuple(self.label(option) for option in self.options)

    @property
    def sparse_layers(self) -> list[MoELayer]:
        """The sparse layers whose experts are among the linears, in order."""
        return list({info.layer.index: info.layer for info in self.experts}.values())

    @property
    def layer_of_group(self) -> np.ndarray:
        """(N,) index into :attr:`sparse_layers` of the layer of a group's experts; -1 for other groups."""
        position = {layer.index: place for place, layer in enumerate(self.sparse_layers)}
        layers = []
        for group in self.groups:
            inside = {m.layer.index if isinstance(m, ExpertLinear) else None for m in group.members}
            (only,) = inside if len(inside) == 1 else (None,)
            layers.append(-1 if only is None else position[only])
        return np.array(layers, dtype=np.int64)

    @property
    def packed(self) -> tuple[Format, ...]:
        """Options that need candidates: all but the original weight and removal."""
        return tuple(option for option in self.options if option not in (ORIGINAL, REMOVED))

    @property
    def packed_alone(self) -> tuple[LinearInfo, ...]:
        """Linears with packed options alone, whose original weights a search never reads.

        The experts of a layer are one tensor, so they are included only if this holds for all of them.
        """
        read = {
            member.layer.index
            for group in self.groups
            if ORIGINAL in group.options or REMOVED in group.options
            for member in group.members
            if isinstance(member, ExpertLinear)
        }
        return tuple(
            member
            for group in self.groups
            if ORIGINAL not in group.options
            for member in group.members
            if not (isinstance(member, ExpertLinear) and member.layer.index in read)
        )

    @property
    def fetched_together(self) -> list[list[LinearInfo]]:
        """Linears whose options are needed at once: each by itself, and all experts of a layer.

        Linears whose only option is the original weight are left out.
        """
        found: dict[str, list[LinearInfo]] = {}
        switched = set()
        for group in self.groups:
            for info in group.members:
                owner = info.layer.experts_name if isinstance(info, ExpertLinear) else info.name
                found.setdefault(owner, []).append(info)
                if group.switched:
                    switched.add(owner)
        return [members for owner, members in found.items() if owner in switched]

    @property
    def unverified(self) -> str:
        """A sentence on experts that could not be verified; empty if there are none."""
        if not self.unread:
            return ""
        reasons = dict.fromkeys(each.reason for each in self.unread)
        first = self.unread[0].name
        return (
            f"{len(self.unread)} stacks of experts, such as {first}, stay at their original width and count in the "
            f"budget: {'; '.join(reasons)}"
        )

    @property
    def not_for_experts(self) -> tuple[str, ...]:
        """Options that experts do not have because they round inputs."""
        if not self.experts:
            return ()
        return tuple(o.name for o in self.options if o.rounds_inputs)

    @property
    def experts(self) -> tuple[ExpertLinear, ...]:
        """The experts' matrices among the linears."""
        return tuple(info for info in self.linears if isinstance(info, ExpertLinear))


def make_plan(
    layout: Layout,
    linears: Sequence[LinearInfo],
    *,
    widths: Sequence[int] | None = None,
    formats: Sequence[Format] = (),
    group_size: int | None = 128,
    symmetric: bool | None = None,
    serve: str = "any",
    locks: Sequence[str] = (),
    skips: Sequence[str] = (),
    ties: Sequence[str] = (),
    experts: ExpertGroups | None = None,
    allow_prune: bool = False,
    embeddings: bool | None = False,
    gguf: GGUFFile | None = None,
    unread: Sequence[UnreadExperts] = (),
    unpackable: Collection[str] = (),
) -> CompressionPlan:
    """Make groups and options from the user's settings.

    Args:
        layout: The model's layout.
        linears: All linears, output layer and embedding last; the output layer is a group only with ``embeddings``,
            or if a lock names it, the embedding only with ``embeddings``.
        widths: Widths to choose from; 16 keeps a linear unquantized. None: all that the engine supports, none if
            there are ``formats``.
        formats: Further formats to choose from. Linears whose rows do not divide into a format's groups do not get
            it as an option.
        group_size: Columns that share a scale; None for one scale per row.
        symmetric: Grid without zero points; None: as the engine needs, else asymmetric.
        serve: Name of an engine, whose rules become constraints.
        locks: ``regex=width`` or ``regex=format``: linears whose name matches, or whose role is named, get it. A
            lock at 16 (``original``) is possible even if it is not among the options.
        skips: Regexes or roles: matching linears are unquantized and outside the budget.
        ties: Comma-separated kinds, e.g. ``q_proj,k_proj,v_proj``, that share a width within a block.
        experts: Matrices of experts that share a width; None: those of one expert, or as the engine needs.
        allow_prune: Make removal an option of every expert; the problem keeps at least each router's top-k.
        embeddings: Make output layer and embedding groups, one if they share their weight; None: as far as the
            engine reads them.
        gguf: The model's tensors in a GGUF file, for an engine that reads one.
        unread: Experts that could not be verified: unchanged, and counted in the budget.
        unpackable: Paths of linears that a packed checkpoint cannot hold: locked at 16 bits.
    """
    engine = find_engine(serve)
    if engine.gguf != (gguf is not None):
        raise ValueError(f"`serve='{serve}'` {'needs' if engine.gguf else 'does not take'} a GGUF file.")
    if engine.gguf and symmetric is not None:
        raise ValueError(f"`serve='{serve}'`: each block type has its own grid; leave out `symmetric`.")
    if engine.fused and layout.fused_paths is None:
        raise ValueError(
            f"`serve='{serve}'` merges some linears of a block into one matrix, and which ones is not known for "
            f"{layout.model_type}: use `serve='any'` or `serve='transformers'`, or add the architecture to "
            "rco.models.layout.FUSED."
        )
    if widths is None:
        widths = () if formats else engine.widths
    widths = tuple(sorted(set(widths)))
    sparse = any(info.role == EXPERT_ROLE for info in linears)
    experts = _expert_groups(engine, experts, sparse=sparse, allow_prune=allow_prune)
    values: dict[str, int | Format] = {str(width): width for width in (*widths, ORIGINAL.bits)}
    values |= {each.name: each for each in (*formats, ORIGINAL)}
    for_embeddings = engine.embedding_options(layout.model_type, widths, formats, group_size)
    if any(info.role == EMBEDDING_ROLE for info in linears):
        values |= {each.name: each for each in for_embeddings}
    locked = _parse_locks(locks, values, lambda pattern: _matching(pattern, "lock", linears))
    if engine.format == "compressed-tensors":
        for info in linears:
            if info.path in unpackable and info.block is not None:
                locked.setdefault(info.name, ORIGINAL)
    skipped_names = {info.name for pattern in skips for info in _matching(pattern, "skip", linears)}
    # An engine's rules for packed experts bind only those that will be packed.
    packed_experts = [
        info
        for info in linears
        if info.role == EXPERT_ROLE
        and info.name not in skipped_names
        and locked.get(info.name) not in (ORIGINAL, ORIGINAL.bits)
    ]
    symmetric = _grid(engine, widths, symmetric, sparse=bool(packed_experts))
    _check_widths(engine, widths, symmetric, group_size, formats)

    def option(asked: int | Format) -> Format:
        if isinstance(asked, Format):
            return asked
        if asked in (ORIGINAL.bits, REMOVED.bits):
            return ORIGINAL if asked == ORIGINAL.bits else REMOVED
        return IntegerGrid(asked, group_size, symmetric)

    offered = {*map(option, widths), *formats}
    if set(widths) - {ORIGINAL.bits}:
        _check_expert_rows(engine, packed_experts, group_size)

    chosen: list[LinearInfo] = []
    skipped: list[str] = []
    for info in linears:
        end = info.role in ("head", EMBEDDING_ROLE)
        if end and info.name not in skipped_names:
            wanted = _takes_end(engine, layout, info, locked.get(info.name), for_embeddings, embeddings)
        else:
            wanted = info.name not in skipped_names
        if wanted:
            chosen.append(info)
        else:
            skipped.append(info.name)
    # A tied output layer is the embedding's group.
    grouped = {info.twin for info in chosen}
    skipped = [name for name in skipped if name not in grouped]
    if engine.fused:
        for names in layout.fused_sets(linears):
            left = [name for name in names if name in skipped]
            if left and len(left) < len(names):
                raise ValueError(
                    f"`serve='{engine.name}'` merges {', '.join(names)} into one matrix: skip all of them or none, "
                    f"not {', '.join(left)} alone."
                )
    left_out = {i.layer.name for i in linears if isinstance(i, ExpertLinear) and i.name in set(skipped)}
    torn = next((i for i in chosen if isinstance(i, ExpertLinear) and i.layer.name in left_out), None)
    if torn is not None:
        raise ValueError(
            f"`skip` leaves out some experts of {torn.layer.name} and not others: skip all of a layer, or lock "
            "those to leave alone at 16 bits."
        )
    if not chosen:
        raise ValueError("Every linear is skipped, so nothing is left to quantize; skip fewer.")
    clusters = _clusters_of(layout, chosen, ties, fused=engine.fused, experts=experts)
    groups = []
    for members in clusters:
        if members[0].role == EMBEDDING_ROLE:
            info = members[0]
            groups.append(_embedding_group(engine, info, locked.get(info.name), for_embeddings))
            continue
        allowed = {option(locked[m.name]) for m in members if m.name in locked}
        if len(allowed) > 1:
            asked = ", ".join(sorted(each.name for each in allowed))
            raise ValueError(
                f"{', '.join(m.name for m in members)} share one width, but are locked to {asked}; "
                "lock them alike or drop the tie."
            )
        prunable = allow_prune and all(isinstance(member, ExpertLinear) for member in members)
        open_to = {REMOVED, *offered} if prunable else offered
        fitting = _fitting(members, _ordered(allowed or open_to), gguf, engine)
        if engine.experts in ("layer", "model") and fitting != (ORIGINAL,):
            _check_separable(engine, members)
        groups.append(Group(_cluster_name(members), tuple(members), fitting))
    every = _ordered({*offered, *(each for group in groups for each in group.options)})
    return CompressionPlan(
        tuple(groups),
        tuple(chosen),
        every,
        group_size,
        symmetric,
        engine,
        tuple(skipped),
        gguf,
        unread=tuple(unread),
    )


def _takes_end(
    engine: Engine,
    layout: Layout,
    info: LinearInfo,
    locked: int | Format | None,
    options: Collection[Format],
    asked: bool | None,
) -> bool:
    """Whether output layer or embedding becomes a group.

    Raises:
        ValueError: It is asked for, and the engine does not read it, or its computation is not known.
    """
    kept = locked in (ORIGINAL, ORIGINAL.bits)
    if info.role == "head":
        if locked is not None and info.tied:
            raise ValueError(
                f"{info.name} shares its weight with the embedding: lock the embedding instead "
                "(`embeddings=True`, `lock='embedding=8'`)."
            )
        if info.tied or (locked is None and asked is False):
            return False
        if kept or engine.reads_packed_head(layout.model_type):
            return True
        obstacle = f"vLLM reads no packed output layer of {layout.model_type}"
        instead = f"lock='{info.name}=16'"
        asked = asked if locked is None else True
    else:
        if asked is False:
            return False
        unknown = embedding_obstacle(info)
        if unknown is None and (kept or options):
            return True
        obstacle = unknown or f"vLLM reads no packed embedding of {layout.model_type}"
        instead = "skip='embedding'" if unknown else "lock='embedding=16'"
    if asked is None:
        return False
    raise ValueError(
        f"{obstacle}: leave it as it is (`{instead}`), or use `serve='transformers'` (embedding at 8 bits) or "
        "`format='gguf'`."
    )


def _embedding_group(
    engine: Engine, info: LinearInfo, locked: int | Format | None, options: Collection[Format]
) -> Group:
    """The group of an embedding: its own formats and its original weight, or the one that a lock names."""
    known = {option for option in options if _divides(info, option) and _whole_groups(info, option)}
    open_to = _ordered({*known, ORIGINAL})
    if locked is not None:
        open_to = tuple(each for each in open_to if locked in (each, each.bits))
    if not open_to:
        names = ", ".join(each.name for each in _ordered({*known, ORIGINAL}))
        raise ValueError(
            f"{info.name}: `serve='{engine.name}'` reads an embedding as {names}, not as "
            f"{locked.name if isinstance(locked, Format) else f'{locked} bits'}; change its lock."
        )
    return Group(info.name, (info,), open_to)


def _whole_groups(info: LinearInfo, option: Format) -> bool:
    """Whether groups of a grid divide a row, as packed checkpoints need."""
    return (
        not isinstance(option, IntegerGrid)
        or info.in_features % option.columns_per_group(info.in_features) == 0
    )


def make_gguf_plan(
    layout: Layout,
    linears: Sequence[LinearInfo],
    target: GGUFTarget,
    types: Sequence[Format],
    *,
    locks: Sequence[str] = (),
    skips: Sequence[str] = (),
    ties: Sequence[str] = (),
) -> CompressionPlan:
    """Groups for a GGUF file: one for every tensor of linears, with the types that fit its rows.

    A tensor that no type fits is copied, as are those of skipped linears.

    Args:
        layout: Row of the architecture table.
        linears: All linears, the output layer last.
        target: The file.
        types: Types to choose from.
        locks: ``regex=type`` or ``role=type``; ``original`` copies a tensor.
        skips: Regexes or roles: matching tensors are copied.
        ties: Kinds that share a type within a block, as for :func:`make_plan`.

    Raises:
        ValueError: A lock, skip or tie is invalid, or nothing is left to choose.
    """
    values = {option.name: option for option in (*types, ORIGINAL)}
    locked = _parse_locks(locks, values, lambda pattern: _matching(pattern, "lock", linears))
    left_out = {info.name for pattern in skips for info in _matching(pattern, "skip", linears)}
    chosen = [info for info in linears if info.name not in left_out and target.entry(info) is not None]
    # A tied output layer is the embedding's group.
    skipped = tuple(
        info.name for info in linears if info not in chosen and not (info.role == "head" and info.tied)
    )
    groups = []
    for members in _clusters_of(layout, chosen, ties, fused=False, experts="layer-projection"):
        named = {locked[m.name] for m in members if m.name in locked}
        offered = _ordered(named or types)
        fitting = tuple(o for o in offered if all(_storable(target, member, o) for member in members))
        if len(named) > 1 or (named and not fitting):
            raise ValueError(
                f"{_cluster_name(members)} has rows of {members[0].in_features} and one type, but is locked to "
                f"{', '.join(sorted(o.name for o in named))}; lock it to one type that fits."
            )
        groups.append(Group(_cluster_name(members), tuple(members), fitting or (ORIGINAL,)))
    if all(len(group.options) == 1 for group in groups):
        raise ValueError(
            f"No tensor has a choice among {', '.join(o.name for o in types)}: give more `types`, or drop locks."
        )
    every = _ordered({option for group in groups for option in group.options})
    return CompressionPlan(
        tuple(groups), tuple(chosen), every, None, True, find_engine("gguf"), skipped, target=target
    )


def _storable(target: GGUFTarget, info: LinearInfo, option: Format) -> bool:
    """Whether a type fits a linear; an embedding that is not multiplied has no importances."""
    needs = isinstance(option, GGMLFormat) and option.type.needs_importance
    if needs and info.role == EMBEDDING_ROLE and not info.tied:
        return False
    return target.fits(info, option)


def _ordered(options: Iterable[Format]) -> tuple[Format, ...]:
    """Options by their bits, then by their names."""
    return tuple(sorted(options, key=lambda option: (stored_width(option), option.name)))


def stored_width(option: Format) -> float:
    """Bits per weight that options are ordered by: nominal ones, of ggml's types those with scales."""
    return option.type.bits_per_weight if isinstance(option, GGMLFormat) else option.bits


def make_removal_plan(linears: Sequence[LinearInfo], locks: Sequence[str] = ()) -> CompressionPlan:
    r"""Plan with every expert of a model as a group that is kept or removed; all else is unchanged.

    Args:
        linears: All linears of the model.
        locks: ``REGEX=keep`` or ``REGEX=prune``; a pattern is searched in an expert's name, so ``layers\.3\.``
            locks a layer and ``layers\.3\..*\.17$`` one expert. The last lock that matches decides.
    """
    experts: dict[tuple[int, int], list[ExpertLinear]] = {}
    for info in linears:
        if isinstance(info, ExpertLinear):
            experts.setdefault((info.layer.index, info.expert), []).append(info)
    groups = [
        Group(_cluster_name(members), tuple(members), (REMOVED, ORIGINAL)) for members in experts.values()
    ]
    values = {"keep": ORIGINAL, "prune": REMOVED}
    locked = _parse_locks(locks, values, lambda pattern: _named(pattern, "lock", groups, "expert"))
    groups = [
        replace(group, options=(locked[group.name],)) if group.name in locked else group for group in groups
    ]
    chosen = tuple(member for members in experts.values() for member in members)
    skipped = tuple(info.name for info in linears if not isinstance(info, ExpertLinear))
    return CompressionPlan(
        tuple(groups), chosen, (REMOVED, ORIGINAL), None, True, find_engine("any"), skipped
    )


def _divides(info: LinearInfo, option: Format) -> bool:
    """Whether the rows and columns of a linear divide into the groups and blocks of a format."""
    if not option.fits(info.in_features):
        return False
    # The experts of a layer are stacked, and a block of rows must not reach into the next one.
    return not isinstance(info, ExpertLinear) or info.out_features % option.rows_per_scale == 0


def _fitting(
    members: Sequence[LinearInfo], options: tuple[Format, ...], gguf: GGUFFile | None, engine: Engine
) -> tuple[Format, ...]:
    """The options that every member can take: those of a format whose groups divide it, or of a GGUF type."""
    if gguf is None:
        found = tuple(
            o for o in options if all(_takes(engine, member, o, len(members)) for member in members)
        )
        if found and (found != (ORIGINAL,) or options == (ORIGINAL,)):
            return found
        refused = next(o for o in options if o not in found)
        names, reason = (
            ", ".join(o.name for o in options if o != ORIGINAL),
            _obstacle(engine, members, refused),
        )
        raise ValueError(
            f"{_cluster_name(members)} can be stored in none of {names}: {reason}. Add a format or `widths` that "
            f"it can take, or keep it unquantized (`lock='{members[0].name}=16'`)."
        )
    found = tuple(o for o in options if all(gguf.type_of(member, o.bits) is not None for member in members))
    if not found:
        info = members[0]
        known = [str(w) for w in GGUF_WIDTHS if gguf.type_of(info, w) is not None] or ["no type under 16"]
        raise ValueError(
            f"{info.name} has rows of {info.in_features}, for which llama.cpp has {', '.join(known)} bits, not "
            f"{', '.join(str(o.bits) for o in options)}. Change `widths` (16 keeps it unquantized), or `skip` it."
        )
    return found


def _takes(engine: Engine, info: LinearInfo, option: Format, merged: int) -> bool:
    if isinstance(info, ExpertLinear):
        unknown = isinstance(option, FloatingPoint) and option.name not in engine.floating_experts
        if option.rounds_inputs or unknown:
            return False
    elif engine.fused and merged > 1 and info.out_features % option.rows_per_scale:
        return False  # a block of rows would lie in two of the merged matrices
    return _divides(info, option)


def _obstacle(engine: Engine, members: Sequence[LinearInfo], option: Format) -> str:
    """Reason why a group cannot take a format."""
    info = members[0]
    if isinstance(info, ExpertLinear):
        if isinstance(option, FloatingPoint) and option.name not in engine.floating_experts:
            return f"{engine.name} does not load experts in {option.name}"
        if option.rounds_inputs:
            return f"{option.name} rounds inputs, and a search does not round those of stacked experts"
    rows = option.rows_per_scale
    blocks = f", or blocks of {rows} rows," if rows > 1 else ""
    size = f" {option.group_size(info.in_features)}" if isinstance(option, FloatingPoint) else ""
    return f"{option.name} has groups of{size} columns{blocks} that do not divide it"


def _check_expert_rows(engine: Engine, experts: Sequence[LinearInfo], group_size: int | None) -> None:
    """Check that rows of both lengths have the same kind of scales, for engines that fuse a layer's experts."""
    rows = {info.in_features for info in experts}
    if engine.gguf or engine.experts not in ("layer", "model") or group_size is None or not rows:
        return
    if min(rows) < group_size < max(rows):
        raise ValueError(
            f"`serve='{engine.name}'` needs one scheme for a whole expert, and `group_size={group_size}` means one "
            f"scale per row for its rows of {min(rows)} but several for those of {max(rows)}: use `group_size` "
            f"{min(rows)} or less, or 0 for one scale per row."
        )


def _check_separable(engine: Engine, members: Sequence[LinearInfo]) -> None:
    torn = next(
        (m for m in members if isinstance(m, ExpertLinear) and not m.layer.architecture.separable), None
    )
    if torn is not None:
        raise ValueError(
            f"`serve='{engine.name}'` cannot unpack experts of {torn.layer.architecture.model_type}, whose "
            "checkpoints store them stacked: keep them unquantized (`lock='experts=16'`), or use `serve='any'`, "
            "whose checkpoint includes the code for them."
        )


def _expert_groups(
    engine: Engine, asked: ExpertGroups | None, *, sparse: bool, allow_prune: bool
) -> ExpertGroups:
    """Grouping of experts: as requested, if the engine supports it."""
    if asked is not None and asked not in get_args(ExpertGroups):
        raise ValueError(f"`expert_groups` takes {', '.join(get_args(ExpertGroups))}, got {asked!r}.")
    if (asked is not None or allow_prune) and not sparse:
        raise ValueError(
            "The model has no experts: leave out `expert_groups`, `per_projection` and `allow_prune`."
        )
    # For the finest grouping that an engine loads, all groupings that it loads.
    coarser: dict[ExpertGroups, tuple[ExpertGroups, ...]] = {
        "expert": get_args(ExpertGroups),
        "projection": get_args(ExpertGroups),
        "layer": ("layer", "model"),
        "layer-projection": ("layer", "layer-projection", "model"),
        "model": ("model",),
    }
    groups = engine.experts if asked is None else asked
    if groups not in coarser[engine.experts]:
        raise ValueError(
            f"`serve='{engine.name}'` loads experts grouped by {' or '.join(coarser[engine.experts])}, not by "
            f"{groups}."
        )
    if allow_prune and groups != "expert":
        raise ValueError(
            "`allow_prune` removes experts one by one, so each needs its own width, but experts are grouped by "
            f"{groups} here. Leave out `per_projection`, or use `serve='any'`."
        )
    return groups


def _grid(engine: Engine, widths: Sequence[int], symmetric: bool | None, *, sparse: bool) -> bool:
    packed = [w for w in widths if w != ORIGINAL.bits]
    only_symmetric = sparse and not engine.asymmetric_experts
    if symmetric is None:
        return only_symmetric or any(w not in engine.asymmetric_bits for w in packed)
    if not symmetric and only_symmetric:
        raise ValueError(
            f"`serve='{engine.name}'` does not support zero points in experts; leave out `symmetric=False`."
        )
    return symmetric


def _check_widths(
    engine: Engine,
    widths: Sequence[int],
    symmetric: bool,
    group_size: int | None,
    formats: Sequence[Format],
) -> None:
    packed = [w for w in widths if w != ORIGINAL.bits]
    named = [each for each in formats if each != ORIGINAL]
    kept = ORIGINAL in formats or ORIGINAL.bits in widths
    if not (packed or named) or len(packed) + len(named) + kept < 2:
        got = [*map(str, widths), *(each.name for each in formats)]
        raise ValueError(
            f"`widths` and `formats` need at least two options, one of them below 16 bits, got {', '.join(got)}."
        )
    for each in named:
        reason = engine.refusal(each)
        if reason is not None:
            raise ValueError(f"{reason}; change `formats` or `serve`.")
    for width in packed:
        if not 2 <= width <= 8:
            raise ValueError(f"A width is 2 to 8 bits, or 16 to keep a linear unquantized; got {width}.")
        reason = engine.refusal(IntegerGrid(width, group_size, symmetric))
        if reason is not None:
            raise ValueError(f"{reason}; change `widths`, `group_size` or `symmetric`, or `serve`.")


NamedT = TypeVar("NamedT", "LinearInfo", "Group")
ValueT = TypeVar("ValueT")


def _matching(pattern: str, argument: str, linears: Sequence[LinearInfo]) -> list[LinearInfo]:
    """Linears of a role, if the pattern names one, else linears whose name contains a match."""
    if pattern in ROLES:
        found = [info for info in linears if info.role == pattern]
        if not found:
            hint = "; the embedding is a group with `embeddings=True`" if pattern == EMBEDDING_ROLE else ""
            raise ValueError(f"`{argument}` {pattern!r}: the model has no linears of that role{hint}.")
        return found
    roles = ", ".join(dict.fromkeys(info.role for info in linears))
    return _named(pattern, argument, linears, "linear", f"; roles are {roles}")


def _named(pattern: str, argument: str, things: Sequence[NamedT], what: str, hint: str = "") -> list[NamedT]:
    """Linears or groups whose name contains a match."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{argument}` {pattern!r} is not a regular expression: {error}.") from None
    found = [each for each in things if compiled.search(each.name)]
    if not found:
        raise ValueError(
            f"`{argument}` {pattern!r} matches no {what}; names are {things[0].name} to {things[-1].name}{hint}."
        )
    return found


def _parse_locks(
    locks: Sequence[str],
    values: Mapping[str, ValueT],
    matching: Callable[[str], Sequence[LinearInfo | Group]],
) -> dict[str, ValueT]:
    """Locks ``PATTERN=VALUE`` by the names that they match; the last one decides.

    Args:
        locks: The locks.
        values: What may stand after the equals sign.
        matching: Linears or groups that a pattern matches.
    """
    locked: dict[str, ValueT] = {}
    for lock in locks:
        pattern, _, value = lock.rpartition("=")
        value = value.strip().lower()
        if not pattern or value not in values:
            raise ValueError(
                f"`lock` is REGEX=VALUE, where VALUE is one of {', '.join(values)}; got {lock!r}."
            )
        locked |= dict.fromkeys((each.name for each in matching(pattern)), values[value])
    return locked


# ---------------------------------------------------------------------- which linears share an option


def _clusters_of(
    layout: Layout, linears: Sequence[LinearInfo], ties: Sequence[str], *, fused: bool, experts: ExpertGroups
) -> list[list[LinearInfo]]:
    """Linears grouped by the ties, in the order of their first member."""
    parent = {info.name: info.name for info in linears}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    kinds = {info.kind for info in linears}
    for tie in ties:
        wanted = [kind.strip() for kind in tie.split(",") if kind.strip()]
        unknown = [kind for kind in wanted if kind not in kinds]
        if unknown or len(wanted) < 2:
            raise ValueError(
                f"`tie` takes two or more kinds of linears, comma-separated, out of {', '.join(sorted(kinds))}; "
                f"got {tie!r}."
            )
        first: dict[int | None, str] = {}
        for info in linears:
            if info.kind in wanted:
                parent[root(info.name)] = root(first.setdefault(info.block, info.name))
    if fused:
        for names in layout.fused_sets(linears):
            for name in names[1:]:
                parent[root(name)] = root(names[0])
    together: dict[tuple[object, ...], str] = {}
    for info in linears:
        if isinstance(info, ExpertLinear):
            parent[root(info.name)] = root(together.setdefault(_expert_key(info, experts), info.name))
    clusters: dict[str, list[LinearInfo]] = {}
    for info in linears:
        clusters.setdefault(root(info.name), []).append(info)
    return list(clusters.values())


def _expert_key(info: ExpertLinear, experts: ExpertGroups) -> tuple[object, ...]:
    """Key that is equal for matrices of experts that share a width."""
    if experts == "model":
        return ()
    if experts == "layer":
        return (info.layer.index,)
    if experts == "layer-projection":
        return (info.layer.index, info.projection)
    if experts == "projection":
        return (info.layer.index, info.expert, info.projection == "down")
    return (info.layer.index, info.expert)


def _cluster_name(members: Sequence[LinearInfo]) -> str:
    """Name of a group of these linears."""
    if len(members) == 1:
        return members[0].name
    inside = [member for member in members if isinstance(member, ExpertLinear)]
    if len(inside) == len(members):
        return _expert_group_name(inside)
    prefix = members[0].name.rpartition(".")[0]
    same = all(m.name.rpartition(".")[0] == prefix for m in members)
    if same:
        return f"{prefix}.{'+'.join(m.name.rpartition('.')[2] for m in members)}"
    return "+".join(m.name for m in members)


def _expert_group_name(members: Sequence[ExpertLinear]) -> str:
    """``...experts.3``, ``...experts.3.gate_proj+up_proj``, ``...experts`` or ``...experts.*.down_proj``.

    All experts of a model are ``...layers.*.mlp.experts``.
    """
    layer = members[0].layer
    if len({member.layer.index for member in members}) > 1:
        return re.sub(r"\.\d+\.", ".*.", layer.experts_name)
    numbers = {member.expert for member in members}
    kinds = list(dict.fromkeys(member.projection for member in members))
    own = dict(zip(layer.architecture.kinds, layer.architecture.projections, strict=True))
    part = "" if len(kinds) == len(own) else "." + "+".join(own[kind] for kind in kinds)
    if len(numbers) == 1:
        return f"{layer.experts_name}.{members[0].expert}{part}"
    return f"{layer.experts_name}{'.*' if part else ''}{part}"
