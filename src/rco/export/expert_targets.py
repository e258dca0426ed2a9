"""Names of experts in a quantization config: one pattern if they share a scheme, else one by one.

Patterns keep the config of a model with thousands of experts short. They also determine loading: transformers
unpacks stacked experts by the one scheme whose pattern contains ``experts``, and vLLM looks up the name of a
layer's first expert, with the block named as in vLLM's own model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rco.formats.base import Format
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.models.layout import LinearInfo
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import ExpertLinear

__all__ = ["expert_pattern", "name_experts", "one_scheme", "written_schemes"]


def written_schemes(linears: Iterable[LinearInfo], schemes: Mapping[str, Format]) -> dict[str, Format]:
    """Scheme of every linear in the config.

    A row of one group has one scale, grouped or not. In experts it is written as grouped if others of its layer
    are, because engines need one scheme for all of them.
    """
    linears = list(linears)
    written = {info.name: schemes.get(info.name, ORIGINAL).on(info.in_features) for info in linears}
    experts = [info for info in linears if isinstance(info, ExpertLinear)]
    present = {(info.layer.index, written[info.name]) for info in experts}
    for info in experts:
        scheme = written[info.name]
        if isinstance(scheme, IntegerGrid) and scheme.group_size is None:
            grouped = replace(scheme, group_size=info.in_features)
            if (info.layer.index, grouped) in present:
                written[info.name] = grouped
    return written


def one_scheme(linears: Iterable[LinearInfo], written: Mapping[str, Format]) -> IntegerGrid | None:
    """The scheme of all packed experts, if stock transformers can unpack them; else None.

    transformers stacks experts on loading and supports one scheme for all of them, without zero points. A whole
    layer may be unquantized.
    """
    layers: dict[int, set[Format]] = {}
    for info in linears:
        if isinstance(info, ExpertLinear):
            if not info.layer.architecture.separable:
                return None
            layers.setdefault(info.layer.index, set()).add(written[info.name])
    used = {scheme for found in layers.values() for scheme in found if found != {ORIGINAL}}
    only = next(iter(used)) if len(used) == 1 else None
    return only if isinstance(only, IntegerGrid) and only.symmetric else None


def name_experts(
    targets: Iterable[str], linears: Iterable[LinearInfo], written: Mapping[str, Format]
) -> list[str]:
    """Targets of one scheme, with patterns for layers whose experts all have it."""
    experts = {info.name: info for info in linears if isinstance(info, ExpertLinear)}
    mine = [experts[name] for name in targets if name in experts]
    if not mine:
        return list(targets)
    if one_scheme(experts.values(), written) is not None:
        return [name for name in targets if name not in experts] + [expert_pattern()]
    sizes: dict[int, int] = {}
    for info in experts.values():
        sizes[info.layer.index] = sizes.get(info.layer.index, 0) + 1
    named, whole = [], {}
    for info in mine:
        sizes[info.layer.index] -= 1
        if sizes[info.layer.index] == 0:
            whole[info.layer.index] = expert_pattern(info.layer)
    for name in targets:
        if name not in experts or experts[name].layer.index not in whole:
            named.append(name)
    return named + list(whole.values())


def expert_pattern(layer: MoELayer | None = None) -> str:
    """Pattern of every projection of every expert, of one layer or of all, for any name of the block."""
    if layer is None:
        return r"re:.*\.experts\.\d+\.\w+$"
    parent, _, own = layer.name.rpartition(".")
    block = "|".join(dict.fromkeys([own, layer.stored_name.rpartition(".")[2]]))
    block = f"({block})" if "|" in block else block
    return rf"re:{re.escape(parent)}\.{block}\.{layer.architecture.experts}\.\d+\.\w+$"
