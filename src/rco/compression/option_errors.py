"""Tables of what options do to weights and outputs, a row per group and a column per width."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rco.compression.expert_candidates import packed_candidate, recorded
from rco.compression.plan import CompressionPlan
from rco.formats.base import Format, Stored
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.layout import LinearInfo
from rco.store import CandidateStore

__all__ = ["recorded_errors", "weight_distances", "weight_errors"]


def recorded_errors(plan: CompressionPlan, store: CandidateStore, name: str) -> Tensor:
    """(N, K) an error that was written down with the candidates, summed over a group's members.

    The original weights have none, a pruned expert has all there is: 1.
    """

    def error(info: LinearInfo, option: Format) -> float:
        if option in (ORIGINAL, REMOVED):
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
    """(N, K) squared error of every option's weights over the square of the full ones, in a group together.

    Computed on a device, wherever weights and options are at the moment.
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
    """(N, K) mean squared difference of every option's weights to those of the group's widest option.

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
    """The weights that a linear computes with under one option, in float32."""
    if option not in (ORIGINAL, REMOVED):
        return packed_candidate(packed, member, plan.label(option)).to(device).dequantize(torch.float32)
    weight = member.weight.detach().to(device).float()
    return torch.zeros_like(weight) if option == REMOVED else weight
