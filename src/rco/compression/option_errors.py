"""Errors of options without a search: of weights, of outputs of linears and of expert layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rco.compression.candidates import packed_candidate, recorded
from rco.compression.costs import EXPERT_ROLES
from rco.compression.plan import CompressionPlan
from rco.compression.switched_model import expert_options, option_list
from rco.formats.base import Format, Stored
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.formats.streaming import OptionStream
from rco.models.layout import LinearInfo
from rco.models.moe.expert_statistics import SharedOptions, layer_output_errors
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import sparse_layers
from rco.store import CandidateStore

__all__ = ["layer_errors", "recorded_errors", "weight_distances", "weight_errors"]


def layer_errors(
    model: nn.Module,
    plan: CompressionPlan,
    packed: Mapping[str, Mapping[str, Stored]],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    experts_only: bool,
    stream: OptionStream | None = None,
) -> Tensor:
    """(N, K) L2 norm of the change in a layer's output by each option of a group, summed over single members.

    Args:
        model: The full model.
        plan: Groups and widths. Groups outside experts (shared ones are experts) have no such sensitivity.
        packed: Candidates from the store.
        batches: Token ids, and a mask of those that count.
        experts_only: Require that groups outside experts are locked.
        stream: Streams the candidates of experts from host memory, if they are there.

    Raises:
        ValueError: With ``experts_only``, another group has a choice.
    """
    others = [g for g in plan.groups if g.members[0].role not in EXPERT_ROLES and len(g.options) > 1]
    if others and experts_only:
        locks = " ".join(f"`lock='{role}=16'`" for role in sorted({g.members[0].role for g in others}))
        raise ValueError(
            f"Layer-output sensitivities exist for experts only, and {len(others)} other groups, such as "
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
    """Shared experts that have a choice, by sparse layer, and the gate row of each of their linears."""
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


def recorded_errors(plan: CompressionPlan, store: CandidateStore, name: str) -> Tensor:
    """(N, K) a recorded error of the candidates, summed over a group's members.

    The original weights have error 0, as have options that a linear cannot take; a pruned expert has 1.
    """

    def error(info: LinearInfo, option: Format) -> float:
        if option in (ORIGINAL, REMOVED) or not plan.fits(info, option):
            return float(option == REMOVED)
        return recorded(store.statistics, info, plan.label(option), name)

    rows = [
        [sum(error(member, option) for member in group.members) for option in plan.options]
        for group in plan.groups
    ]
    return torch.tensor(rows, dtype=torch.float64)


@torch.no_grad()
def weight_errors(
    plan: CompressionPlan, packed: Mapping[str, Mapping[str, Stored]], device: torch.device
) -> Tensor:
    """(N, K) squared error of a group's weights under every option, relative to the squared full weights.

    Computed on ``device``, wherever weights and options are stored.
    """
    errors = torch.zeros(len(plan.groups), len(plan.options), dtype=torch.float64)
    for row, group in enumerate(plan.groups):
        whole = 0.0
        for member in group.members:
            weight = _option_weight(plan, packed, member, ORIGINAL, device)
            whole += float(weight.double().square().sum())
            for column, choice in enumerate(plan.options):
                option = _option_weight(plan, packed, member, choice, device)
                errors[row, column] += float((option - weight).double().square().sum())
        errors[row] /= whole or 1.0
    return errors


@torch.no_grad()
def weight_distances(
    plan: CompressionPlan, packed: Mapping[str, Mapping[str, Stored]], device: torch.device
) -> Tensor:
    """(N, K) mean squared difference of every option's weights from those of the group's widest option.

    Summed over a group's members; zero for options that a group does not have.
    """
    distances = torch.zeros(len(plan.groups), len(plan.options), dtype=torch.float64)
    for row, group in enumerate(plan.groups):
        for member in group.members:
            widest = _option_weight(plan, packed, member, group.options[-1], device)
            for column, choice in enumerate(plan.options):
                if choice in group.options:
                    option = _option_weight(plan, packed, member, choice, device)
                    distances[row, column] += float((option - widest).double().square().mean())
    return distances


def _option_weight(
    plan: CompressionPlan,
    packed: Mapping[str, Mapping[str, Stored]],
    member: LinearInfo,
    option: Format,
    device: torch.device,
) -> Tensor:
    """A linear's weights under one option, in float32."""
    if option not in (ORIGINAL, REMOVED) and plan.fits(member, option):
        return packed_candidate(packed, member, plan.label(option)).to(device).dequantize(torch.float32)
    weight = member.weight.detach().to(device).float()
    return torch.zeros_like(weight) if option == REMOVED else weight
