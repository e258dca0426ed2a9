"""Which linears share a width, and what such a group is called."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rco.compression.engines import ExpertGroups
from rco.models.layout import Layout, LinearInfo
from rco.models.moe.linears import ExpertLinear

__all__ = ["cluster_name", "clusters_of"]


def clusters_of(
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
    """What experts' matrices must have in common to share a width."""
    if experts == "model":
        return ()
    if experts == "layer":
        return (info.layer.index,)
    if experts == "layer-projection":
        return (info.layer.index, info.projection)
    if experts == "projection":
        return (info.layer.index, info.expert, info.projection == "down")
    return (info.layer.index, info.expert)


def cluster_name(members: Sequence[LinearInfo]) -> str:
    """The name of a group of these linears."""
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
    own = dict(zip(("gate", "up", "down"), layer.architecture.projections, strict=True))
    part = "" if len(kinds) == len(own) else "." + "+".join(own[kind] for kind in kinds)
    if len(numbers) == 1:
        return f"{layer.experts_name}.{members[0].expert}{part}"
    return f"{layer.experts_name}{'.*' if part else ''}{part}"
