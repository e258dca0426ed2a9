"""Physical removal of experts from a model: router rows, expert tensors and biases shrink together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rco.models.layout import text_config
from rco.models.moe.layers import MoELayer, merge_groups, moe_layers, set_num_experts
from rco.models.remote_code.modeling_pruned_experts import (
    PrunedExpertsMixin,
    RaggedGroupsMixin,
    pruned_class,
    ragged_groups,
    replace_tensor,
    set_count,
    tensors_by_expert,
)

__all__ = ["KeepPlan", "keep_plan", "pad_experts", "prune_experts", "split_keep"]


@dataclass(frozen=True)
class KeepPlan:
    """Experts of a model that stay, and the kinds of checkpoint that can hold the choice.

    Attributes:
        kept: For every sparse layer, the (sorted) experts that stay.
        group_sizes: For every sparse layer, the experts that stay in each group; None for routers without groups.
        stock_obstacle: Reason why a stock checkpoint cannot hold this choice; None if it can.
        pad_obstacle: Reason why padding to one count cannot hold it; None if it can.
    """

    kept: tuple[tuple[int, ...], ...]
    group_sizes: tuple[tuple[int, ...], ...] | None
    stock_obstacle: str | None
    pad_obstacle: str | None

    @property
    def counts(self) -> tuple[int, ...]:
        """Experts that stay in each sparse layer."""
        return tuple(len(layer) for layer in self.kept)


def split_keep(layers: Sequence[MoELayer], keep: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One boolean tensor per layer from a flat mask or from masks per layer, checked against the layers.

    Raises:
        ValueError: The mask belongs to another model, or a layer keeps fewer experts than its router picks.
    """
    counts = [layer.num_experts for layer in layers]
    if isinstance(keep, Tensor):
        if keep.shape != (sum(counts),):
            raise ValueError(
                f"mask has shape {tuple(keep.shape)}; the model has {len(counts)} sparse layers with {sum(counts)} "
                f"experts together, so the shape must be ({sum(counts)},). Was it made for another model?"
            )
        keep = list(torch.split(keep, counts))
    if [tuple(part.shape) for part in keep] != [(count,) for count in counts]:
        raise ValueError(
            f"masks per layer have shapes {[tuple(part.shape) for part in keep]}; expected lengths {counts}. "
            "Were they made for another model?"
        )
    masks = [part.detach().cpu() > 0.5 for part in keep]
    for layer, mask in zip(layers, masks, strict=True):
        if int(mask.sum()) < layer.top_k:
            raise ValueError(
                f"{layer.name} would keep {int(mask.sum())} of {layer.num_experts} experts, but its router picks "
                f"{layer.top_k} per token; keep at least {layer.top_k} in every layer"
            )
    return masks


def keep_plan(model: nn.Module, keep: Tensor | Sequence[Tensor]) -> KeepPlan:
    """Turn a mask into the experts that stay, and determine which kinds of checkpoint can hold the choice."""
    layers = moe_layers(model)
    masks = split_keep(layers, keep)
    kept = tuple(tuple(mask.nonzero().squeeze(-1).tolist()) for mask in masks)
    grouped = any(layer.known_rule.grouped for layer in layers)
    sizes = None
    if grouped:
        sizes = tuple(
            tuple(int(part.sum()) for part in torch.split(mask, list(layer.known_rule.group_sizes)))
            for layer, mask in zip(layers, masks, strict=True)
        )
    return KeepPlan(kept, sizes, _stock_obstacle(layers, kept, sizes), _pad_obstacle(layers, sizes))


def prune_experts(model: nn.Module, keep: Tensor | Sequence[Tensor]) -> Any:
    """A model without the pruned experts; every tensor that pruning does not change is shared with ``model``.

    The same count in every layer gives the stock class with a smaller count in its configuration. Different
    counts give a subclass that reads ``num_experts_per_layer``.
    """
    plan = keep_plan(model, keep)
    new, layers = _shared_copy(model)
    for layer, kept in zip(layers, plan.kept, strict=True):
        _take(layer, torch.tensor(kept))
    text = text_config(new.config)
    set_num_experts(new.config, max(plan.counts), layers[0].architecture)
    _drop_idle_groups(text, layers)
    if plan.stock_obstacle is None:
        return new
    per_layer = [0] * int(text.num_hidden_layers)
    groups: list[list[int] | None] = [None] * int(text.num_hidden_layers)
    for layer, count in zip(layers, plan.counts, strict=True):
        per_layer[layer.decoder_index] = count
    if plan.group_sizes is not None:
        for layer, sizes in zip(layers, plan.group_sizes, strict=True):
            groups[layer.decoder_index] = list(sizes)
            ragged_groups(layer.gate, list(sizes))
        text.expert_group_sizes = groups
    text.num_experts_per_layer = per_layer
    new.__class__ = pruned_class(new.__class__)
    return new


def pad_experts(model: nn.Module, keep: Tensor | Sequence[Tensor]) -> Any:
    """Like :func:`prune_experts`, with every layer (and group) filled to one count by slots that never win.

    A filled slot has a router row of zeros, expert weights of zero and a constant in its router so low that no
    survivor can rank below it. Only routers with such a constant support this.

    Raises:
        ValueError: The router has no constant per expert, or groups get too small.
    """
    plan = keep_plan(model, keep)
    if plan.pad_obstacle is not None:
        raise ValueError(plan.pad_obstacle)
    new, layers = _shared_copy(model)
    group_sizes = plan.group_sizes or tuple((count,) for count in plan.counts)
    widest = max(size for sizes in group_sizes for size in sizes)
    for layer, kept, sizes in zip(layers, plan.kept, group_sizes, strict=True):
        slots = torch.full((len(sizes), widest), -1)
        for slot, members in zip(slots, torch.split(torch.tensor(kept), list(sizes)), strict=True):
            slot[: len(members)] = members
        _take(layer, slots.reshape(-1))
    set_num_experts(new.config, widest * len(group_sizes[0]), layers[0].architecture)
    _drop_idle_groups(text_config(new.config), layers)
    return new


def _shared_copy(model: nn.Module) -> tuple[Any, list[MoELayer]]:
    """Copy the modules and the configuration of a model, but none of its tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    new: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    layers = moe_layers(new)
    for layer in layers:
        if not layer.fused:
            raise ValueError(
                f"{layer.name} keeps its experts as separate modules; load the model with the implementation in "
                "transformers (without remote code), which keeps them as stacked tensors"
            )
    _forget_earlier_pruning(new, layers)
    return new, layers


def _forget_earlier_pruning(model: Any, layers: Sequence[MoELayer]) -> None:
    """Remove the counts per layer of an earlier pruning; the next one sets its own."""
    _drop_base(model, PrunedExpertsMixin)
    for layer in layers:
        _drop_base(layer.gate, RaggedGroupsMixin)
    text = text_config(model.config)
    for name in ("num_experts_per_layer", "expert_group_sizes"):
        if hasattr(text, name):
            delattr(text, name)


def _drop_base(module: Any, mixin: type) -> None:
    """Reset the class of a module from one made with a mixin to the original class."""
    order = type(module).__mro__
    if mixin in order:
        module.__class__ = order[order.index(mixin) + 1]


def _take(layer: MoELayer, slots: Tensor) -> None:
    """Fill a layer's router and experts from the experts named in ``slots``; -1 is a slot that never wins."""
    if torch.equal(slots, torch.arange(layer.num_experts)):
        return  # nothing changes: the tensors stay shared
    empty, constants = slots < 0, layer.constants
    gate = layer.gate
    for module, name, tensor in tensors_by_expert(layer.block, gate, layer.experts):
        taken = tensor.detach()[slots.clamp(min=0).to(tensor.device)]
        if bool(empty.any()):
            # Low enough for any survivor, yet finite: sums of two of them must not overflow.
            low = max(-1e30, torch.finfo(tensor.dtype).min / 4)
            taken[empty.to(tensor.device)] = low if any(tensor is each for each in constants) else 0.0
        replace_tensor(module, name, taken)
    set_count(layer.block, gate, layer.experts, len(slots))


def _drop_idle_groups(text: Any, layers: Sequence[MoELayer]) -> None:
    """Merge groups that a token may all use into one, which has no divisibility constraint."""
    if any(layer.known_rule.grouped for layer in layers):
        return
    for place in (text, *(layer.gate for layer in layers)):
        merge_groups(place)


def _short(layer: MoELayer, sizes: Sequence[int]) -> bool:
    """Whether some choice of groups could hold fewer experts than the router picks."""
    alive = sorted(size for size in sizes if size)
    return (
        len(alive) < layer.known_rule.chosen_groups
        or sum(alive[: layer.known_rule.chosen_groups]) < layer.top_k
    )


def _stock_obstacle(
    layers: Sequence[MoELayer], kept: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]] | None
) -> str | None:
    counts = {len(layer) for layer in kept}
    if len(counts) > 1:
        return f"layers keep different numbers of experts ({min(counts)} to {max(counts)})"
    if sizes is None:
        return None
    if len({size for layer in sizes for size in layer}) > 1:
        return "groups keep different numbers of experts, and a stock group-limited router supports one size"
    if layers[0].known_rule.score == "sigmoid" and sizes[0][0] < 2:
        return "groups keep one expert each, and the stock router ranks a group by its two best"
    if any(_short(layer, s) for layer, s in zip(layers, sizes, strict=True)):
        return "the groups that a token may use hold fewer experts than its router picks"
    return None


def _pad_obstacle(layers: Sequence[MoELayer], sizes: Sequence[Sequence[int]] | None) -> str | None:
    if not all(layer.constants for layer in layers):
        return (
            f"{layers[0].architecture.model_type} routers have no bias: the logit of a padded slot is a linear "
            "function of the hidden state, which changes sign with it, so no router row can lose for every token. "
            "Export with per-layer counts instead (loads with the remote code in the checkpoint and with the vLLM "
            "plugin), or search with the same count in every layer"
        )
    if sizes is None:
        return None
    for layer, layer_sizes in zip(layers, sizes, strict=True):
        if layer.known_rule.score == "sigmoid" and 1 in layer_sizes:
            return (
                f"{layer.name} keeps a single expert in a group, and a stock router ranks a group by its two best, "
                "one of which would be padding; keep two or none"
            )
        if _short(layer, layer_sizes):
            return (
                f"the groups that a token of {layer.name} may use hold fewer survivors than the {layer.top_k} that "
                "its router picks, so padding would be picked too"
            )
    return None
