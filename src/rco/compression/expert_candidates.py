"""Packed candidates for the experts of a layer: each expert by its own Hessian, all stacked in one weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rco.compression.plan import CompressionPlan
from rco.formats import encode_all
from rco.formats.base import EncodeSettings, Format, Stored
from rco.formats.removed import REMOVED
from rco.formats.stacks import stack_rows
from rco.models.layout import LinearInfo
from rco.models.moe.expert_statistics import ExpertHessians
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import ExpertLinear, original_stacks

__all__ = [
    "expert_layer_of",
    "kept_experts",
    "packed_candidate",
    "quantize_experts",
    "quantize_matrix",
    "recorded",
]

Options = dict[str, Stored]
Statistics = dict[str, dict[str, Any]]


def expert_layer_of(linears: Sequence[LinearInfo]) -> MoELayer | None:
    """The sparse layer among the linears of one block, if it has one."""
    return next((info.layer for info in linears if isinstance(info, ExpertLinear)), None)


def quantize_experts(
    layer: MoELayer,
    hessians: ExpertHessians | None,
    grids: Mapping[str, Mapping[str, Format]],
    settings: Mapping[str, Any],
    storage_dtype: torch.dtype,
    on_expert: Callable[[], None],
) -> tuple[dict[str, Options], dict[str, Statistics]]:
    """Every expert of a layer on every grid.

    Args:
        layer: The layer.
        hessians: Its input statistics; None rounds to nearest.
        grids: State-dict name of a stacked tensor -> label -> grid.
        settings: Further fields of :class:`rco.formats.base.EncodeSettings`.
        storage_dtype: Type of the scales.
        on_expert: Called after each expert's stack.

    Returns:
        State-dict name of a stacked tensor -> label -> packed weight of all its rows, and statistics of the same
        shape with one number per expert: ``error``, ``relative_error``, ``tokens`` and ``added_tokens``.
    """
    candidates: dict[str, Options] = {}
    statistics: dict[str, Statistics] = {}
    for name, stack in zip(("gate_up_proj", "down_proj"), original_stacks(layer), strict=True):
        key = f"{layer.experts_name}.{name}"
        matrices = None if hessians is None else hessians.matrices(down=name == "down_proj")
        parts: list[list[Stored]] = []
        errors, relative = [], []
        for expert in range(layer.num_experts):
            weight = stack[expert].reshape(-1, stack.shape[3]).float()
            hessian = None if matrices is None else matrices[expert]
            packed, error, share = quantize_matrix(
                weight, hessian, list(grids[key].values()), settings, storage_dtype
            )
            parts.append(packed)
            errors.append(error)
            relative.append(share)
            on_expert()
        candidates[key] = {
            label: stack_rows([packed[k] for packed in parts]) for k, label in enumerate(grids[key])
        }
        statistics[key] = {
            label: {
                "error": [error[k] for error in errors],
                "relative_error": [share[k] for share in relative],
                "tokens": None if hessians is None else hessians.visits.tolist(),
                "added_tokens": None if hessians is None else hessians.added.tolist(),
            }
            for k, label in enumerate(grids[key])
        }
    return candidates, statistics


def quantize_matrix(
    weight: Tensor,
    hessian: Tensor | None,
    grids: Sequence[Format],
    settings: Mapping[str, Any],
    storage_dtype: torch.dtype,
) -> tuple[list[Stored], list[float], list[float]]:
    """Candidates, errors and relative errors of one matrix on several grids."""
    found = encode_all(
        grids, weight, hessian, settings=EncodeSettings(storage_dtype=storage_dtype, **settings)
    )
    packed, errors, relative = zip(*found, strict=True)
    return list(packed), list(errors), list(relative)


def packed_candidate(packed: Mapping[str, Mapping[str, Stored]], info: LinearInfo, label: str) -> Stored:
    """One linear's candidate; an expert's is cut out of its layer's stack."""
    if not isinstance(info, ExpertLinear):
        return packed[info.name][label]
    parts = 1 if info.projection == "down" else 2
    start = (info.expert * parts + info.part) * info.out_features
    return packed[info.stored_in][label].rows(start, start + info.out_features)


def recorded(
    statistics: Callable[[str, str], dict[str, Any]], info: LinearInfo, label: str, key: str
) -> float:
    """A statistic of one linear. Gate and up were quantized as one matrix: its number stands with the gate."""
    if not isinstance(info, ExpertLinear):
        return float(statistics(info.name, label)[key])
    return 0.0 if info.projection == "up" else float(statistics(info.stored_in, label)[key][info.expert])


def kept_experts(plan: CompressionPlan, choices: Mapping[str, Format]) -> dict[int, list[int]]:
    """Sparse layer -> the experts that stay, for the layers that lose some; ``choices`` are options by linear."""
    kept: dict[int, list[int]] = {}
    pruned: set[int] = set()
    for info in plan.experts:
        if info.projection != "gate":
            continue
        if choices[info.name] == REMOVED:
            pruned.add(info.layer.index)
        else:
            kept.setdefault(info.layer.index, []).append(info.expert)
    return {layer: kept.get(layer, []) for layer in sorted(pruned)}
