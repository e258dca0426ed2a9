"""Coordinate descent on codes: what GPTQ leaves on the table, since it never returns to a column.

With ranges fixed and all other codes as they are, the best code of a column has a closed form in the residual
``(W - Q) H``. Every move lowers the error in the norm of the damped Hessian, so any number of sweeps is safe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rco.formats import column_kernels
from rco.formats.compiled import on_compiled_path
from rco.formats.grid import FitSettings, Grid, differences
from rco.formats.packing import on_triton_path
from rco.formats.row_threads import over_rows

__all__ = ["descend"]


def descend(
    weight: Tensor,
    damped: Tensor,
    grid: Grid,
    settings: FitSettings,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    sweeps: int,
    block: int = 128,
) -> Tensor:
    """Improve ``codes`` in place until no code moves or ``sweeps`` passes are done.

    Args:
        weight: The original weight (rows, in), float32 or float64.
        damped: The damped Hessian (in, in) in the same type.
        grid: The grid of the codes.
        settings: Names the storage type, to which decoded values are rounded.
        codes: (rows, in), updated.
        scales: (rows, groups).
        zeros: (rows, groups).
        sweeps: Most passes over all columns.
        block: Columns between two updates of the whole residual.

    Returns:
        The change of each row's squared error in the norm of the damped Hessian, float64; never positive.
    """
    rows, cols = weight.shape
    residual = differences(weight, codes, scales, zeros, grid, settings)[0] @ damped
    place = torch.device("cpu") if weight.device.type == "mps" else weight.device
    losses = torch.zeros(rows, dtype=torch.float64, device=place)
    step = _block_compiled if on_compiled_path(weight) else _block_torch
    if on_triton_path(weight) and torch.float64 not in (weight.dtype, settings.storage_dtype):
        step = _block_triton
    for _ in range(sweeps):
        before = losses.clone()
        for start in range(0, cols, block):
            share = damped[start : start + block, start : start + block].contiguous()
            changes = step(residual, share, start, grid, settings, codes, scales, zeros, losses)
            # On a CPU it pays to skip blocks that have settled; elsewhere asking would stall the device.
            if not residual.is_cpu or bool(changes.any()):
                residual.addmm_(changes, damped[start : start + block], alpha=-1.0)
        if torch.equal(before, losses):
            break
    return losses


def _block_compiled(
    residual: Tensor,
    hessian: Tensor,
    start: int,
    grid: Grid,
    settings: FitSettings,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    losses: Tensor,
) -> Tensor:
    rows, width = residual.shape[0], hessian.shape[0]
    changes = torch.empty(rows, width, dtype=residual.dtype)
    share, moved = hessian.numpy(), changes.numpy()
    rest, scale, zero, code, loss = (t.numpy() for t in (residual, scales, zeros, codes, losses))
    group = grid.columns_per_group(residual.shape[1])

    def task(a: int, b: int) -> None:
        column_kernels.descend_columns(
            rest[a:b], share, start, group, grid.bits, settings.storage,
            scale[a:b], zero[a:b], code[a:b], moved[a:b], loss[a:b],
        )  # fmt: skip

    over_rows(rows, width * width, task)
    return changes


def _block_triton(
    residual: Tensor,
    hessian: Tensor,
    start: int,
    grid: Grid,
    settings: FitSettings,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    losses: Tensor,
) -> Tensor:
    from rco.formats import triton_gptq

    group = grid.columns_per_group(residual.shape[1])
    return triton_gptq.descend(
        residual, hessian, start, group, grid.bits, settings.storage_dtype, scales, zeros, codes, losses
    )


def _block_torch(
    residual: Tensor,
    hessian: Tensor,
    start: int,
    grid: Grid,
    settings: FitSettings,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    losses: Tensor,
) -> Tensor:
    width = hessian.shape[0]
    tile = residual[:, start : start + width].clone()
    changes = torch.zeros_like(tile)
    group, top = grid.columns_per_group(residual.shape[1]), (1 << grid.bits) - 1
    curvatures = hessian.diagonal().tolist()

    def stored(value: Tensor) -> Tensor:
        return value.to(settings.storage_dtype).to(tile.dtype)

    for j, curvature in enumerate(curvatures):
        if not curvature > 0:
            continue
        column, code = tile[:, j], codes[:, start + j]
        scale = scales[:, (start + j) // group]
        zero = zeros[:, (start + j) // group].to(tile.dtype)
        before = stored((code.to(tile.dtype) - zero) * scale)
        taken = torch.round(torch.clamp((before + column / curvature) / scale, -zero, top - zero))
        by = stored(taken * scale) - before
        gain = by * (by * curvature - 2 * column)
        better = gain < 0
        by = torch.where(better, by, 0)
        codes[:, start + j] = torch.where(better, (taken + zero).to(torch.uint8), code)
        changes[:, j] = by
        losses += torch.where(better, gain, 0).to(losses)
        tile[:, j + 1 :] -= by[:, None] * hessian[j, j + 1 :]
    return changes
