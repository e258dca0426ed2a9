"""From chosen widths to what is written: packed weights by the names they have in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from rco.backends.candidates import option_label
from rco.backends.expert_candidates import kept_experts, packed_candidate
from rco.backends.plan import LEAVE_ALONE, PRUNED, QuantizationPlan
from rco.compressors.packing import PackedWeight
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe_linears import ExpertLinear, sparse_layers
from rco.models.moe_prune import prune_experts

__all__ = ["chosen_weights", "deploy", "written_names"]

Choices = Mapping[str, int]  # linear name -> width


def chosen_weights(
    plan: QuantizationPlan, packed: Mapping[str, Mapping[str, PackedWeight]], choices: Choices
) -> dict[str, PackedWeight]:
    """The packed weight of every quantized linear; those left alone are missing."""
    return {
        info.name: packed_candidate(packed, info, option_label(choices[info.name]))
        for info in plan.linears
        if choices[info.name] not in (LEAVE_ALONE, PRUNED)
    }


def written_names(plan: QuantizationPlan, choices: Choices) -> dict[str, LinearInfo]:
    """The linears that are in the checkpoint: all that are planned, but for pruned experts.

    Experts that follow a pruned one have moved up.
    """
    kept = kept_experts(plan, choices)
    found: dict[str, LinearInfo] = {}
    for info in plan.linears:
        if choices[info.name] == PRUNED:
            continue
        name = info.name
        if isinstance(info, ExpertLinear) and info.layer.index in kept:
            name = info.renumbered(kept[info.layer.index].index(info.expert))
        found[name] = info
    return found


def deploy(
    loaded: LoadedModel,
    plan: QuantizationPlan,
    packed: Mapping[str, Mapping[str, PackedWeight]],
    choices: Choices,
) -> tuple[LoadedModel, dict[str, PackedWeight]]:
    """What is exported: the model without its pruned experts, and the packed weights by their names there."""
    weights, written = chosen_weights(plan, packed, choices), written_names(plan, choices)
    kept = kept_experts(plan, choices)
    named = {name: weights[info.name] for name, info in written.items() if info.name in weights}
    if not kept:
        return loaded, named
    masks = []
    for layer in sparse_layers(loaded.model):
        mask = torch.ones(layer.num_experts, dtype=torch.bool)
        if layer.index in kept:
            mask = torch.zeros_like(mask).index_fill_(0, torch.tensor(kept[layer.index]), True)
        masks.append(mask)
    return replace(loaded, model=prune_experts(loaded.model, masks)), named
