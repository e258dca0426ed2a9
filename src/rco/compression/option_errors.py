"""Tables of what options do to weights and outputs, a row per group and a column per width."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rco.compression.candidates import option_label
from rco.compression.expert_candidates import packed_candidate, recorded
from rco.compression.plan import LEAVE_ALONE, PRUNED, CompressionPlan
from rco.formats.base import Stored
from rco.models.layout import LinearInfo
from rco.store import CandidateStore

__all__ = ["recorded_errors", "weight_distances", "weight_errors"]


def recorded_errors(plan: CompressionPlan, store: CandidateStore, name: str) -> Tensor:
    """(N, K) an error that was written down with the candidates, summed over a group's members.

    The original weights have none, a pruned expert has all there is: 1.
    """

    def error(info: LinearInfo, width: int) -> float:
        if width in (LEAVE_ALONE, PRUNED):
            return float(width == PRUNED)
        return recorded(store.statistics, info, option_label(width), name)

    rows = [
        [sum(error(member, width) for member in group.members) for width in plan.widths]
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
    errors = torch.zeros(len(plan.groups), len(plan.widths), dtype=torch.float64)
    for row, group in enumerate(plan.groups):
        whole = 0.0
        for member in group.members:
            weight = _option_weight(packed, member, LEAVE_ALONE, device)
            whole += float(weight.double().square().sum())
            for column, width in enumerate(plan.widths):
                option = _option_weight(packed, member, width, device)
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
    distances = torch.zeros(len(plan.groups), len(plan.widths), dtype=torch.float64)
    for row, group in enumerate(plan.groups):
        for member in group.members:
            widest = _option_weight(packed, member, max(group.widths), device)
            for column, width in enumerate(plan.widths):
                if width in group.widths:
                    option = _option_weight(packed, member, width, device)
                    distances[row, column] += float((option - widest).double().square().mean())
    return distances


def _option_weight(
    packed: Mapping[str, Mapping[str, Stored]], member: LinearInfo, width: int, device: torch.device
) -> Tensor:
    """The weights that a linear computes with under one option, in float32."""
    if width not in (LEAVE_ALONE, PRUNED):
        return packed_candidate(packed, member, option_label(width)).to(device).dequantize(torch.float32)
    weight = member.weight.detach().to(device).float()
    return torch.zeros_like(weight) if width == PRUNED else weight
