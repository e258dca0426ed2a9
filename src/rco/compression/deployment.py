"""Packed weights of a choice of widths for export, and decoded ones for computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rco.compression.candidates import kept_experts, packed_candidate
from rco.compression.plan import CompressionPlan
from rco.formats.base import Format, Stored
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.expert_removal import prune_experts
from rco.models.moe.linears import ExpertLinear, model_linears, sparse_layers
from rco.models.rounded_inputs import round_inputs

__all__ = ["chosen_weights", "decode_into", "deploy", "written_names"]

Choices = Mapping[str, Format]  # linear name -> option


def chosen_weights(
    plan: CompressionPlan, packed: Mapping[str, Mapping[str, Stored]], choices: Choices
) -> dict[str, Stored]:
    """The packed weight of every quantized linear."""
    return {
        info.name: packed_candidate(packed, info, plan.label(choices[info.name]))
        for info in plan.linears
        if choices[info.name] not in (ORIGINAL, REMOVED)
    }


def written_names(plan: CompressionPlan, choices: Choices) -> dict[str, LinearInfo]:
    """Linears of the checkpoint by their names there: all planned ones except pruned experts.

    Experts after a pruned one are renumbered.
    """
    kept = kept_experts(plan, choices)
    found: dict[str, LinearInfo] = {}
    for info in plan.linears:
        if choices[info.name] == REMOVED:
            continue
        name = info.name
        if isinstance(info, ExpertLinear) and info.layer.index in kept:
            name = info.renumbered(kept[info.layer.index].index(info.expert))
        found[name] = info
    return found


def deploy(
    loaded: LoadedModel,
    plan: CompressionPlan,
    packed: Mapping[str, Mapping[str, Stored]],
    choices: Choices,
) -> tuple[LoadedModel, dict[str, Stored]]:
    """The export: the model without its pruned experts, and the packed weights by their names in it."""
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


def decode_into(loaded: LoadedModel, weights: Mapping[str, Stored]) -> None:
    """Replace a model's weights by decoded packed ones, bit for bit as the checkpoint loads.

    Linears whose format rounds inputs do so from then on.
    All are decoded before the first is replaced, so that a failure leaves the model unchanged.

    Args:
        loaded: The model, without pruned experts; changed in place.
        weights: Packed weights by linear, as :func:`deploy` returns them.
    """
    for parameter, values in list(_decoded(loaded, weights)):
        parameter.data = values
    round_inputs(loaded.model, weights)


def _decoded(loaded: LoadedModel, weights: Mapping[str, Stored]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters and their new values; unquantized experts of a stack keep their values."""
    linears = {
        info.name: info
        for info in model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    }
    stacks: dict[str, tuple[nn.Parameter, Tensor]] = {}
    with torch.no_grad():
        for name, packed in weights.items():
            info = linears[name]
            if isinstance(info, ExpertLinear):
                if info.stored_in not in stacks:
                    stack = loaded.model.get_parameter(info.stored_in)
                    stacks[info.stored_in] = (stack, stack.detach().clone())
                info.place(stacks[info.stored_in][1]).copy_(packed.dequantize())
                continue
            weight = info.module.get_parameter("weight")
            dense = packed.dequantize().to(weight.device, weight.dtype)
            yield weight, dense.T.contiguous() if info.transposed else dense
    yield from stacks.values()
