"""Every linear at every width, built block by block and written to the store as each block is done.

One Hessian per distinct input serves all widths. Blocks see the full model's hidden states: the candidates belong
to no particular allocation, so one store serves every budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rco.backends.plan import QuantizationPlan
from rco.compressors.gptq import gptq
from rco.compressors.grid import Grid, round_to_nearest
from rco.compressors.hessian import HessianAccumulator
from rco.compressors.packing import PackedWeight
from rco.data.calibration import CalibrationSet
from rco.models.capture import BlockInputs, linear_inputs
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.store import CandidateStore

__all__ = ["CandidateSettings", "build_candidates", "candidate_identity", "option_label"]

Method = Literal["gptq", "rtn"]


@dataclass(frozen=True, kw_only=True)
class CandidateSettings:
    """How candidates are made, beside the plan's widths and grid."""

    method: Method = "gptq"
    damp: float = 0.01
    act_order: bool = False
    clip: Literal["search", "minmax"] = "search"
    sweeps: int = 4
    batch_size: int = 8


def option_label(width: int) -> str:
    """The store's name of a width."""
    return str(width)


def candidate_identity(
    loaded: LoadedModel,
    plan: QuantizationPlan,
    calibration: CalibrationSet,
    settings: CandidateSettings,
    dtype: torch.dtype,
) -> dict[str, object]:
    """Everything the candidates depend on; two runs share a store only if all of it agrees."""
    return {
        "model": loaded.fingerprint,
        "data": calibration.fingerprint if settings.method == "gptq" else None,
        "widths": list(plan.packed_widths),
        "group_size": plan.group_size,
        "symmetric": plan.symmetric,
        "linears": [info.name for info in plan.linears],
        "storage": str(dtype).removeprefix("torch."),
        "method": settings.method,
        "damp": settings.damp,
        "act_order": settings.act_order,
        "clip": settings.clip,
        "sweeps": settings.sweeps,
    }


def blocks_of(plan: QuantizationPlan) -> list[list[LinearInfo]]:
    """The plan's linears by block, the output layer in one of its own at the end."""
    by_block: dict[int, list[LinearInfo]] = {}
    head: list[LinearInfo] = []
    for info in plan.linears:
        if info.block is None:
            head.append(info)
        else:
            by_block.setdefault(info.block, []).append(info)
    return [by_block[index] for index in sorted(by_block)] + ([head] if head else [])


def build_candidates(
    loaded: LoadedModel,
    plan: QuantizationPlan,
    calibration: CalibrationSet,
    store: CandidateStore,
    settings: CandidateSettings,
    storage_dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill what the store is missing.

    Args:
        loaded: The full model, computing in its present type.
        plan: Linears, widths and grid.
        calibration: Sequences for the Hessians.
        store: Made for :func:`candidate_identity`.
        settings: How to quantize.
        storage_dtype: Type of the scales: the checkpoint's.
        on_progress: Called with (linears done, linears in all).
    """
    groups = blocks_of(plan)
    missing = set(store.missing_blocks)
    total = sum(len(group) for group in groups)
    done = sum(len(group) for index, group in enumerate(groups) if index not in missing)
    if on_progress is not None:
        on_progress(done, total)
    if not missing:
        return
    inputs = (
        BlockInputs.capture(
            loaded.model, loaded.layout, calibration.tokens, batch_size=settings.batch_size, storage="cpu"
        )
        if settings.method == "gptq"
        else None
    )
    for index, group in enumerate(groups):
        if index not in missing:
            continue
        hessians: dict[str, HessianAccumulator] = {}
        if inputs is not None:
            block = group[0].block
            target = len(loaded.layout.blocks(loaded.model)) if block is None else block
            while inputs.position < target:
                inputs.advance()
            hessians = (
                _head_hessian(loaded, inputs, group[0])
                if block is None
                else _block_hessians(loaded, inputs, group)
            )
        candidates: dict[str, dict[str, PackedWeight]] = {}
        statistics: dict[str, dict[str, dict[str, float]]] = {}
        for info in group:
            options, measured = _quantize(info, plan, hessians.get(info.name), settings, storage_dtype)
            candidates[info.name], statistics[info.name] = options, measured
            done += 1
            if on_progress is not None:
                on_progress(done, total)
        store.write_block(index, candidates, statistics)


def _shared_inputs(loaded: LoadedModel, group: Sequence[LinearInfo]) -> dict[str, str]:
    """Linear name -> path of the linear whose input statistic it uses (the first of its fused set)."""
    path_of = {info.name: info.path for info in group}
    source = {info.name: info.path for info in group}
    for names in loaded.layout.fused_sets(group):
        for name in names:
            source[name] = path_of[names[0]]
    return source


def _block_hessians(
    loaded: LoadedModel, inputs: BlockInputs, group: Sequence[LinearInfo]
) -> dict[str, HessianAccumulator]:
    source = _shared_inputs(loaded, group)
    width = {info.path: info.in_features for info in group}
    accumulators = {
        path: HessianAccumulator(width[path], device=loaded.device) for path in dict.fromkeys(source.values())
    }
    _, block = loaded.layout.blocks(loaded.model)[inputs.position]

    def add(path: str, x: Tensor) -> None:
        accumulators[path].add(x)

    with linear_inputs(block, accumulators, add):
        inputs.observe()
    return {name: accumulators[path] for name, path in source.items()}


def _head_hessian(
    loaded: LoadedModel, inputs: BlockInputs, head: LinearInfo
) -> dict[str, HessianAccumulator]:
    accumulator = HessianAccumulator(head.in_features, device=loaded.device)
    for rows in inputs.finish():
        accumulator.add(rows)
    return {head.name: accumulator}


def _quantize(
    info: LinearInfo,
    plan: QuantizationPlan,
    hessian: HessianAccumulator | None,
    settings: CandidateSettings,
    storage_dtype: torch.dtype,
) -> tuple[dict[str, PackedWeight], dict[str, dict[str, float]]]:
    grids = [Grid(width, plan.group_size, plan.symmetric) for width in plan.packed_widths]
    weight = info.weight.detach().float()
    if hessian is None:
        packed = round_to_nearest(weight, grids, clip=settings.clip, storage_dtype=storage_dtype)
        scale = float(weight.double().square().sum()) or 1.0
        errors = [float((p.dequantize(torch.float32) - weight).double().square().sum()) for p in packed]
        relative = [error / scale for error in errors]
    else:
        result = gptq(
            weight,
            hessian.matrix(),
            grids,
            damp=settings.damp,
            act_order=settings.act_order,
            clip=settings.clip,
            storage_dtype=storage_dtype,
            sweeps=settings.sweeps,
        )
        packed = result.candidates
        errors = result.errors.tolist()
        relative = result.relative_errors.tolist()
    labels = [option_label(width) for width in plan.packed_widths]
    return dict(zip(labels, packed, strict=True)), {
        label: {"error": error, "relative_error": share}
        for label, error, share in zip(labels, errors, relative, strict=True)
    }
