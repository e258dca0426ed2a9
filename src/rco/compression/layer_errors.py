"""Sensitivities of experts as MxMoE takes them: what an option does to the output of its layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rco.compression.costs import EXPERT_ROLES
from rco.compression.plan import CompressionPlan
from rco.compression.switched_model import expert_options, option_list
from rco.formats.base import Format, Stored
from rco.formats.streaming import OptionStream
from rco.models.moe.expert_statistics import SharedOptions, layer_output_errors
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import sparse_layers

__all__ = ["layer_errors"]


def layer_errors(
    model: nn.Module,
    plan: CompressionPlan,
    packed: Mapping[str, Mapping[str, Stored]],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    experts_only: bool,
    stream: OptionStream | None = None,
) -> Tensor:
    """(N, K) L2 norm of what a group's option does to the output of its layer, its members one at a time, summed.

    Args:
        model: The full model.
        plan: Groups and widths. Groups outside experts (shared ones are experts) have no such sensitivity.
        packed: Candidates as the store gives them.
        batches: Token ids, and a mask that says which of them count.
        experts_only: Groups outside experts must be locked.
        stream: Brings the candidates of experts from host memory, where they then are.

    Raises:
        ValueError: They are not.
    """
    others = [g for g in plan.groups if g.members[0].role not in EXPERT_ROLES and len(g.options) > 1]
    if others and experts_only:
        locks = " ".join(f"`lock='{role}=16'`" for role in sorted({g.members[0].role for g in others}))
        raise ValueError(
            f"Layer-output sensitivities are those of experts; {len(others)} other groups, such as "
            f"{others[0].name}, have a choice: lock them ({locks})."
        )
    options, rows = expert_options(plan, packed, plan.options, stream=stream)
    shared, shared_rows = _shared_options(plan, sparse_layers(model), packed, plan.options)
    found, found_shared = layer_output_errors(model, options, batches, shared)
    table = torch.zeros(len(plan.groups), len(plan.options), dtype=torch.float64)
    for layer, squares in found.items():
        places = torch.from_numpy(rows[layer]).reshape(-1)
        table.index_add_(0, places, squares.sqrt().flatten(0, 1))
    for layer, linears in found_shared.items():
        for name, squares in linears.items():
            table[shared_rows[layer][name]] += squares.sqrt()
    return table


def _shared_options(
    plan: CompressionPlan,
    layers: Sequence[MoELayer],
    packed: Mapping[str, Mapping[str, Stored]],
    columns: Sequence[Format],
) -> tuple[dict[int, SharedOptions], dict[int, dict[str, int]]]:
    """The shared experts that have a choice, by sparse layer, and the row of the gates of each of their linears."""
    by_block = {layer.decoder_index: layer for layer in layers if layer.shared is not None}
    linears: dict[int, dict[str, list[Stored | None]]] = {}
    rows: dict[int, dict[str, int]] = {}
    for row, group in enumerate(plan.groups):
        for info in group.members:
            if info.role == "shared_expert" and group.switched and info.block in by_block:
                index, name = by_block[info.block].index, info.name.rpartition(".")[2]
                linears.setdefault(index, {})[name] = option_list(plan, packed[info.name], columns)
                rows.setdefault(index, {})[name] = row
    found = {
        layer.index: SharedOptions(layer, linears[layer.index])
        for layer in by_block.values()
        if layer.index in linears
    }
    return found, rows
