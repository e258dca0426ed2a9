"""How a quantization config names experts: by one pattern where they share a scheme, one by one where they do not.

A model with thousands of experts would otherwise have a config of that many names. The pattern also decides what
loads it: transformers unpacks stacked experts by the one scheme that a pattern with ``experts`` belongs to, and
vLLM asks for the name of a layer's first expert, under the name that *its* model gives the block.
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
    """The scheme of every linear as the config states it.

    A row that is one group long has one scale, grouped or not. Among experts it is called grouped if others of its
    layer are: engines want one scheme for all of them.
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
    """The scheme of all experts that are packed, if stock transformers can unpack them; else None.

    It stacks experts as it loads them and knows one scheme for all of them, without zero points. A layer may be
    left alone as a whole.
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
    """The targets of one scheme with its experts named by patterns, as far as they fill layers."""
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
    """Matches every projection of every expert, of a layer or of all, whatever the block is called."""
    if layer is None:
        return r"re:.*\.experts\.\d+\.\w+$"
    parent, _, own = layer.name.rpartition(".")
    block = "|".join(dict.fromkeys([own, layer.stored_name.rpartition(".")[2]]))
    block = f"({block})" if "|" in block else block
    return rf"re:{re.escape(parent)}\.{block}\.{layer.architecture.experts}\.\d+\.\w+$"
