"""The column loop of GPTQ: blocks of columns, each rounded in turn, for any number of grids at once.

Within a block of columns corrections are applied one by one, to the columns after the block by one matrix product
per grid. With U as in :mod:`rco.formats.gptq_factors` the corrections satisfy ``W - Q = E U``: the squared
errors in the norm of the damped Hessian are the row sums of ``E^2``, at no cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rco.formats import column_kernels
from rco.formats.compiled import on_compiled_path
from rco.formats.gptq_factors import Factors
from rco.formats.grid import FitSettings, Grid, fit_groups, fit_span, on_fitting_kernels
from rco.formats.row_threads import over_rows

__all__ = ["Solution", "block_edges", "run_columns"]


@dataclass
class Solution:
    """Codes and grids of every width, in the natural order of columns."""

    codes: list[Tensor]
    scales: list[Tensor]
    zeros: list[Tensor]
    losses: Tensor  # (K, rows), in the norm of the damped Hessian

    def subset(self, members: Sequence[int]) -> Solution:
        """Some of the widths; codes, scales and zero points are the same tensors, losses a copy."""
        codes, scales, zeros = ([part[k] for k in members] for part in (self.codes, self.scales, self.zeros))
        return Solution(codes, scales, zeros, self.losses[list(members)])


def block_edges(cols: int, group: int, block: int) -> list[int]:
    """Where blocks end: at most ``block`` columns, and no group that starts inside one reaches past it.

    A group's range is fitted when its first column's turn comes, on weights that carry all corrections so far;
    within a block those are known for the block's own columns alone.
    """
    edges = [0]
    while edges[-1] < cols:
        start = edges[-1]
        end = min(start + block, cols)
        last_group = end - end % group
        if end < cols and start < last_group:
            end = last_group
        edges.append(end)
    return edges


def run_columns(
    values: Tensor,
    factors: Factors,
    grids: Sequence[Grid],
    size: int,
    settings: FitSettings,
    importance: Tensor,
    block: int,
    solution: Solution,
    fit: bool,
) -> None:
    """Fill ``solution`` by the column loop over grids with groups of ``size``; scales are given unless ``fit``."""
    cols = values.shape[1]
    order = factors.order
    ordered = values if order is None else values[:, order].contiguous()
    current = [ordered.clone() for _ in grids]
    positions = torch.arange(cols, device=values.device) if order is None else order
    group_of = torch.div(positions, size, rounding_mode="floor")
    step = _columns_compiled if on_compiled_path(values) else _columns_torch
    if on_fitting_kernels(values, size, settings):
        # Ranges are fitted between launches: a block has at most one group to fit, and that at its start.
        step, block = _columns_triton, min(block, size) if fit else block
    # Given ranges tie no block to any group.
    for start, end in itertools.pairwise(block_edges(cols, size if fit else 1, block)):
        ends = _group_ends(start, end, size, cols) if fit else [0] * (end - start)
        share = factors.inverse_root[start:end, start:end].contiguous()
        groups = group_of[start:end].contiguous()
        errors = step(current, share, importance, start, groups, ends, grids, settings, solution)
        for weight, error in zip(current, errors, strict=True):
            weight[:, end:].addmm_(error, factors.inverse_root[start:end, end:], alpha=-1.0)
    if order is not None:
        for codes in solution.codes:
            codes.copy_(torch.empty_like(codes).index_copy_(1, order, codes))


def _group_ends(start: int, end: int, size: int, cols: int) -> list[int]:
    """Per column of a block, where the group that starts there ends; 0 if none does."""
    return [min(col + size, cols) if col % size == 0 else 0 for col in range(start, end)]


def _columns_compiled(
    current: list[Tensor],
    factor: Tensor,
    importance: Tensor,
    start: int,
    groups: Tensor,
    ends: list[int],
    grids: Sequence[Grid],
    settings: FitSettings,
    solution: Solution,
) -> list[Tensor]:
    """Quantize a block of columns for every grid; returns the errors that later columns are to make up for."""
    rows, width = current[0].shape[0], factor.shape[0]
    errors = [torch.empty(rows, width, dtype=factor.dtype) for _ in grids]
    share, columns = factor.numpy(), importance.numpy()
    group_of, fits = groups.numpy(), np.array(ends, dtype=np.int64)
    tables = [
        (
            current[k].numpy(), grid, np.array(settings.limits(grid, factor.dtype), dtype=share.dtype),
            settings.search(grid), solution.scales[k].numpy(),
            solution.zeros[k].numpy(), solution.codes[k].numpy(), errors[k].numpy(), solution.losses[k].numpy(),
        )
        for k, grid in enumerate(grids)
    ]  # fmt: skip

    def task(a: int, b: int) -> None:
        for weight, grid, limits, search, scales, zeros, codes, error, loss in tables:
            column_kernels.gptq_columns(
                weight[a:b],
                share,
                columns,
                start,
                group_of,
                fits,
                grid.bits,
                grid.symmetric,
                settings.storage,
                limits,
                search,
                scales[a:b],
                zeros[a:b],
                codes[a:b],
                error[a:b],
                loss[a:b],
            )

    over_rows(rows, width * width * len(grids), task)
    return errors


def _columns_torch(
    current: list[Tensor],
    factor: Tensor,
    importance: Tensor,
    start: int,
    groups: Tensor,
    ends: list[int],
    grids: Sequence[Grid],
    settings: FitSettings,
    solution: Solution,
) -> list[Tensor]:
    """The same with all grids in one batch, for devices where each operation has a fixed price."""
    width = factor.shape[0]
    tile = torch.stack([weight[:, start : start + width] for weight in current])
    scales, zeros, errors = torch.ones_like(tile), torch.zeros_like(tile), torch.empty_like(tile)
    top = torch.tensor([[(1 << grid.bits) - 1] for grid in grids], dtype=tile.dtype, device=tile.device)

    def spread(first: int, last: int) -> None:
        for k in range(len(grids)):
            scales[k, :, first:last] = solution.scales[k][:, groups[first:last]]
            zeros[k, :, first:last] = solution.zeros[k][:, groups[first:last]].to(tile.dtype)

    # Up to the first group that starts in this block, ranges are known.
    spread(0, next((j for j, end in enumerate(ends) if end), width))
    for j, end in enumerate(ends):
        if end:
            inside = min(end - start, width)
            for k, grid in enumerate(grids):
                values = torch.cat([tile[k, :, j:inside], current[k][:, start + inside : end]], dim=1)
                whole = replace(grid, group_size=None)
                scale, zero = fit_groups(values, whole, settings, importance[start + j : end])
                solution.scales[k][:, groups[j]] = scale[:, 0]
                solution.zeros[k][:, groups[j]] = zero[:, 0]
            spread(j, inside)
        column, scale, zero = tile[:, :, j], scales[:, :, j], zeros[:, :, j]
        taken = torch.round(torch.clamp(column / scale, -zero, top - zero))
        decoded = (taken * scale).to(settings.storage_dtype).to(tile.dtype)
        error = (column - decoded) / factor[j, j]
        errors[:, :, j] = error
        tile[:, :, j] = taken + zero
        tile[:, :, j + 1 :] -= error[..., None] * factor[j, j + 1 :]
    for k, codes in enumerate(solution.codes):
        codes[:, start : start + width] = tile[k].to(torch.uint8)
    solution.losses += errors.to(solution.losses).square().sum(dim=2)
    return list(errors.unbind(0))


def _columns_triton(
    current: list[Tensor],
    factor: Tensor,
    importance: Tensor,
    start: int,
    groups: Tensor,
    ends: list[int],
    grids: Sequence[Grid],
    settings: FitSettings,
    solution: Solution,
) -> list[Tensor]:
    """The same with one launch for a block's columns, and one before it where a group starts."""
    from rco.formats import triton_gptq

    errors = []
    for k, grid in enumerate(grids):
        scales, zeros, codes = solution.scales[k], solution.zeros[k], solution.codes[k]
        if ends[0]:
            size = grid.columns_per_group(current[k].shape[1])
            fit_span(current[k], (start, ends[0]), grid, settings, importance, scales, zeros, start // size)
        errors.append(
            triton_gptq.columns(
                current[k],
                factor,
                start,
                groups,
                grid.bits,
                settings.storage_dtype,
                scales,
                zeros,
                codes,
                solution.losses[k],
            )
        )
    return errors
