"""GPTQ for any number of grids at once, and coordinate descent on its codes.

Columns are quantized in turn, and the error of each is compensated by those not yet quantized (Frantar et al.,
2023). One damped Hessian and one factor of its inverse serve every grid. With ``H + damp I = R R^T`` (R upper
triangular) the factor is ``U = R^-1``, since ``(H + damp I)^-1 = U^T U``. Within a block of columns corrections are
applied one by one, to the columns after the block by one matrix product per grid. The corrections satisfy
``W - Q = E U``, so the squared errors in the norm of the damped Hessian are the row sums of ``E^2``.

GPTQ never returns to a column; coordinate descent does. With ranges and all other codes fixed, the best
code of a column has a closed form in the residual ``(W - Q) H``. Every move lowers the error in the norm of the
damped Hessian, so any number of sweeps is safe.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rco.formats import gptq_kernels_cpu
from rco.formats.coded import on_triton_path
from rco.formats.integer import IntegerGrid, PackedWeight
from rco.formats.integer_kernels_cpu import on_compiled_path, over_rows
from rco.formats.rounding import (
    Clip,
    FitSettings,
    assemble,
    check_weight,
    differences,
    fit_groups,
    fit_span,
    nearest_codes,
    normalized_importance,
    on_fitting_kernels,
    working_dtype,
)

__all__ = ["GPTQResult", "descend", "gptq"]

log = logging.getLogger(__name__)

# Running sums in float32 decide between GPTQ and rounding where they are this far apart, relative to their terms.
_CLEAR_MARGIN = 1e-3
_DAMP_GROWTH, _DAMP_ATTEMPTS = 10.0, 8


@dataclass(frozen=True)
class GPTQResult:
    """Result of GPTQ on one layer, one entry per grid.

    Attributes:
        candidates: The quantized weights.
        errors: ``tr(D H D^T)`` of the difference D from the original weight, float64 (K,).
        relative_errors: The same as a part of ``tr(W H W^T)``.
        nearest_errors: The error of rounding to nearest on the same settings.
        nearest_rows: Number of rows that are rounded to nearest because that is better.
        damp: The dampening used, as a part of the mean of the Hessian's diagonal.
    """

    candidates: list[PackedWeight]
    errors: Tensor
    relative_errors: Tensor
    nearest_errors: Tensor
    nearest_rows: Tensor
    damp: float


def gptq(
    weight: Tensor,
    hessian: Tensor,
    grids: Sequence[IntegerGrid],
    *,
    damp: float = 0.01,
    act_order: bool = False,
    block: int = 128,
    clip: Clip = "search",
    storage_dtype: torch.dtype | None = None,
    sweeps: int = 0,
) -> GPTQResult:
    """Quantize a linear layer's weight to each of several grids.

    Every row is GPTQ's or rounded to nearest, whichever has the smaller error in the norm of the
    Hessian, so that no candidate is worse than rounding. Results for one grid do not depend on the others.

    Args:
        weight: (out, in), any floating-point type; float64 is worked on in float64, all else in float32.
        hessian: (in, in), as :class:`~rco.formats.hessian.HessianAccumulator` gives it.
        grids: The grids, in the order of the result.
        damp: Part of the mean of the diagonal to add to it; grows if the matrix still has no factor.
        act_order: Take columns by falling diagonal instead of from left to right. Groups stay those of
            neighbouring columns, with ranges fitted to the original weights, so nothing extra is stored.
        block: Most columns that are corrected one by one before the rest is corrected at once.
        clip: Search each group's range, or take the extremes.
        storage_dtype: Type of the scales and of decoded values; that of the weight if not given.
        sweeps: After GPTQ, pass over all columns at most this often and move each code to the value of least
            error with all others fixed. Zero is GPTQ proper; a few take about a tenth off the error.
    """
    check_weight(weight)
    if damp < 0 or block < 1 or sweeps < 0:
        raise ValueError(
            f"damp and sweeps must not be negative and block at least 1, got {damp=}, {sweeps=}, {block=}."
        )
    settings = FitSettings(clip, storage_dtype or weight.dtype)
    values = weight.detach().to(working_dtype(weight)).contiguous()
    factors = factorize(hessian, values, damp, act_order)
    diagonal = normalized_importance(factors.hessian.diagonal() + factors.shift, values)

    nearest = _round_all(values, grids, settings, diagonal)
    importance = diagonal
    if not act_order:
        # Cost of an error in a column after the later columns have compensated for it as far as possible.
        importance = normalized_importance(factors.inverse_root.diagonal().double() ** -2, values)
    damped = factors.hessian.clone()
    damped.diagonal().add_(factors.shift)
    damped = damped.to(device=values.device, dtype=values.dtype)
    solution = Solution([], [], [], torch.zeros_like(nearest.losses))
    for k in range(len(grids)):
        solution.codes.append(torch.empty_like(nearest.codes[k]))
        solution.scales.append(nearest.scales[k].clone())
        solution.zeros.append(nearest.zeros[k].clone())
    # Blocks are cut where groups allow; grids of one group size share them.
    sizes = [grid.columns_per_group(values.shape[1]) for grid in grids]
    for size in sorted(set(sizes)):
        members = [k for k, other in enumerate(sizes) if other == size]
        part = solution.subset(members)
        run_columns(
            values,
            factors,
            [grids[k] for k in members],
            size,
            settings,
            importance,
            block,
            part,
            not act_order,
        )
        solution.losses[members] = part.losses
    for k, grid in enumerate(grids):
        fitted = (solution.codes[k], solution.scales[k], solution.zeros[k])
        if sweeps:
            solution.losses[k] += descend(values, damped, grid, settings, *fitted, sweeps=sweeps, block=block)

    errors, nearest_errors, nearest_rows = _keep_better(values, factors, grids, settings, solution, nearest)
    norm = root_losses(values, factors).sum() - factors.shift * values.double().square().sum()
    candidates = [
        assemble(codes, scales, zeros, grid, settings.storage_dtype)
        for codes, scales, zeros, grid in zip(
            solution.codes, solution.scales, solution.zeros, grids, strict=True
        )
    ]
    relative = errors / norm.clamp_min(torch.finfo(torch.float64).tiny).to(errors.device)
    return GPTQResult(candidates, errors, relative, nearest_errors, nearest_rows, factors.damp)


# ---------------------------------------------------------------------- the Hessian and its factors


@dataclass(frozen=True)
class Factors:
    """A layer's Hessian and its factors."""

    hessian: Tensor  # float64, dead columns made independent, not damped
    root: Tensor  # R, upper, in the working type
    inverse_root: Tensor  # U = R^-1
    order: Tensor | None  # column taken at each position, None for the natural order
    shift: float  # added to the diagonal
    damp: float


def factorize(hessian: Tensor, values: Tensor, damp: float, act_order: bool) -> Factors:
    """Factor the Hessian of a weight with these ``values``, with as much dampening as needed.

    Args:
        hessian: (in, in).
        values: (out, in); sets type and device.
        damp: Part of the mean of the diagonal to add to it at least.
        act_order: Whether columns are taken by falling diagonal.
    """
    cols = values.shape[1]
    if hessian.shape != (cols, cols):
        raise ValueError(
            f"A weight of {cols} columns needs a ({cols}, {cols}) Hessian, got {tuple(hessian.shape)}."
        )
    # Factors are computed in float64 whatever the type of the weights; on the CPU if the device has no float64.
    place = exact_place(values)
    matrix = hessian.detach().to(device=place, dtype=torch.float64, copy=True)
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("The Hessian has NaN or infinite values; check the layer's calibration inputs.")
    diagonal = matrix.diagonal()
    if bool((diagonal < 0).any()):
        raise ValueError(
            "The Hessian has a negative diagonal entry, so it is not a sum of squares of inputs; check how it was "
            "accumulated."
        )
    dead = diagonal == 0
    mean = float(diagonal.mean()) or 1.0
    order = None
    if act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
        matrix = matrix[order][:, order]
        dead = dead[order]
    shift, used = damp * mean, damp
    for _ in range(_DAMP_ATTEMPTS):
        damped = matrix.clone()
        # A column whose input was always zero is rounded to nearest, independently of the others.
        damped.diagonal().add_(shift + mean * dead.to(torch.float64))
        # The flipped matrix has a lower factor where this one has an upper.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not bool(failed):
            break
        used = max(used, 1e-3) * _DAMP_GROWTH
        shift = used * mean
        log.warning(
            "The damped Hessian (%d columns) has no Cholesky factor; dampening raised to %g.", cols, used
        )
    else:
        raise ValueError(
            f"The Hessian has no Cholesky factor even with {used:g} times its mean diagonal added; "
            f"it must be symmetric and positive semidefinite."
        )
    root = lower.flip(0, 1)
    identity = torch.eye(cols, dtype=root.dtype, device=place)
    inverse_root = torch.linalg.solve_triangular(root, identity, upper=True)
    natural = hessian.detach().to(device=place, dtype=torch.float64)
    return Factors(
        hessian=natural,
        root=root.to(dtype=values.dtype, device=values.device).contiguous(),
        inverse_root=inverse_root.to(dtype=values.dtype, device=values.device).contiguous(),
        order=None if order is None else order.to(values.device),
        shift=shift,
        damp=used,
    )


def root_losses(difference: Tensor, factors: Factors, width: int = 256) -> Tensor:
    """Row sums of ``(D R)^2``, skipping the half of R that is zero; float64."""
    if factors.order is not None:
        difference = difference[:, factors.order]
    total = torch.zeros(difference.shape[0], dtype=torch.float64, device=exact_place(difference))
    for start in range(0, difference.shape[1], width):
        # Column block of R: rows below its end are zero.
        end = min(start + width, difference.shape[1])
        part = difference[:, :end] @ factors.root[:end, start:end]
        total += part.square().sum(dim=1).to(total)
    return total


def exact_errors(difference: Tensor, factors: Factors, rows: Tensor) -> Tensor:
    """``tr(D H D^T)`` of chosen rows of D, in float64 and without dampening."""
    chosen = difference[rows.to(difference.device)].to(device=factors.hessian.device, dtype=torch.float64)
    return ((chosen @ factors.hessian) * chosen).sum(dim=1).clamp_min(0)


def exact_place(values: Tensor) -> torch.device:
    """Device for float64 arithmetic: the weight's own, or the CPU if that has no float64."""
    return torch.device("cpu") if values.device.type == "mps" else values.device


# ---------------------------------------------------------------------- the loop over columns


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
    """Ends of the blocks: at most ``block`` columns, and no group that starts inside one reaches past it.

    A group's range is fitted at its first column, on weights that carry all corrections so far; within a block
    only the block's own columns carry them.
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


@dataclass(frozen=True)
class ColumnBlock:
    """Columns that are quantized before the errors are passed on to later ones.

    Attributes:
        current: The weight under each grid, (rows, in), with all corrections so far.
        factor: (width, width) part of the factor of the inverse Hessian.
        importance: (in,) importance of every column, for fitted ranges.
        start: The first column.
        groups: (width,) group of every column.
        ends: Per column, the end of the group that starts there and is to be fitted; 0 if none does.
        grids: The grids.
    """

    current: Sequence[Tensor]
    factor: Tensor
    importance: Tensor
    start: int
    groups: Tensor
    ends: Sequence[int]
    grids: Sequence[IntegerGrid]


def run_columns(
    values: Tensor,
    factors: Factors,
    grids: Sequence[IntegerGrid],
    size: int,
    settings: FitSettings,
    importance: Tensor,
    block: int,
    solution: Solution,
    fit: bool,
) -> None:
    """Fill ``solution`` by the column loop over grids with groups of ``size``; scales are fitted if ``fit``."""
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
    # With given ranges, blocks need not align with groups.
    for start, end in itertools.pairwise(block_edges(cols, size if fit else 1, block)):
        ends = _group_ends(start, end, size, cols) if fit else [0] * (end - start)
        share = factors.inverse_root[start:end, start:end].contiguous()
        columns = ColumnBlock(
            current, share, importance, start, group_of[start:end].contiguous(), ends, grids
        )
        errors = step(columns, settings, solution)
        for weight, error in zip(current, errors, strict=True):
            weight[:, end:].addmm_(error, factors.inverse_root[start:end, end:], alpha=-1.0)
    if order is not None:
        for codes in solution.codes:
            codes.copy_(torch.empty_like(codes).index_copy_(1, order, codes))


def _group_ends(start: int, end: int, size: int, cols: int) -> list[int]:
    """Per column of a block, the end of the group that starts there; 0 if none does."""
    return [min(col + size, cols) if col % size == 0 else 0 for col in range(start, end)]


def _columns_compiled(block: ColumnBlock, settings: FitSettings, solution: Solution) -> list[Tensor]:
    """Quantize a block of columns for every grid; returns the errors for later columns to compensate."""
    current, factor, grids = block.current, block.factor, block.grids
    rows, width = current[0].shape[0], factor.shape[0]
    errors = [torch.empty(rows, width, dtype=factor.dtype) for _ in grids]
    share, columns = factor.numpy(), block.importance.numpy()
    group_of, fits = block.groups.numpy(), np.array(block.ends, dtype=np.int64)
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
            gptq_kernels_cpu.gptq_columns(
                weight[a:b],
                share,
                columns,
                block.start,
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


def _columns_torch(block: ColumnBlock, settings: FitSettings, solution: Solution) -> list[Tensor]:
    """The same with all grids in one batch, for devices where each operation has a fixed cost."""
    current, factor, grids, groups = block.current, block.factor, block.grids, block.groups
    start, width = block.start, factor.shape[0]
    tile = torch.stack([weight[:, start : start + width] for weight in current])
    scales, zeros, errors = torch.ones_like(tile), torch.zeros_like(tile), torch.empty_like(tile)
    top = torch.tensor([[(1 << grid.bits) - 1] for grid in grids], dtype=tile.dtype, device=tile.device)

    def spread(first: int, last: int) -> None:
        for k in range(len(grids)):
            scales[k, :, first:last] = solution.scales[k][:, groups[first:last]]
            zeros[k, :, first:last] = solution.zeros[k][:, groups[first:last]].to(tile.dtype)

    # Up to the first group that starts in this block, ranges are known.
    spread(0, next((j for j, end in enumerate(block.ends) if end), width))
    for j, end in enumerate(block.ends):
        if end:
            inside = min(end - start, width)
            for k, grid in enumerate(grids):
                values = torch.cat([tile[k, :, j:inside], current[k][:, start + inside : end]], dim=1)
                whole = replace(grid, group_size=None)
                scale, zero = fit_groups(values, whole, settings, block.importance[start + j : end])
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


def _columns_triton(block: ColumnBlock, settings: FitSettings, solution: Solution) -> list[Tensor]:
    """The same with one launch for a block's columns, and one before it where a group starts."""
    from rco.formats import gptq_kernels_triton

    errors, current, start = [], block.current, block.start
    for k, grid in enumerate(block.grids):
        scales, zeros, codes = solution.scales[k], solution.zeros[k], solution.codes[k]
        if block.ends[0]:
            size = grid.columns_per_group(current[k].shape[1])
            span = (start, block.ends[0])
            fit_span(current[k], span, grid, settings, block.importance, scales, zeros, start // size)
        errors.append(
            gptq_kernels_triton.columns(
                current[k],
                block.factor,
                start,
                block.groups,
                grid.bits,
                settings.storage_dtype,
                scales,
                zeros,
                codes,
                solution.losses[k],
            )
        )
    return errors


# ---------------------------------------------------------------------- coordinate descent


def descend(
    weight: Tensor,
    damped: Tensor,
    grid: IntegerGrid,
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
            # On a CPU it pays to skip unchanged blocks; on a GPU the check would wait for the device.
            if not residual.is_cpu or bool(changes.any()):
                residual.addmm_(changes, damped[start : start + block], alpha=-1.0)
        if torch.equal(before, losses):
            break
    return losses


def _block_compiled(
    residual: Tensor,
    hessian: Tensor,
    start: int,
    grid: IntegerGrid,
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
        gptq_kernels_cpu.descend_columns(
            rest[a:b], share, start, group, grid.bits, settings.storage,
            scale[a:b], zero[a:b], code[a:b], moved[a:b], loss[a:b],
        )  # fmt: skip

    over_rows(rows, width * width, task)
    return changes


def _block_triton(
    residual: Tensor,
    hessian: Tensor,
    start: int,
    grid: IntegerGrid,
    settings: FitSettings,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    losses: Tensor,
) -> Tensor:
    from rco.formats import gptq_kernels_triton

    group = grid.columns_per_group(residual.shape[1])
    return gptq_kernels_triton.descend(
        residual, hessian, start, group, grid.bits, settings.storage_dtype, scales, zeros, codes, losses
    )


def _block_torch(
    residual: Tensor,
    hessian: Tensor,
    start: int,
    grid: IntegerGrid,
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


# ---------------------------------------------------------------------- the better of GPTQ and rounding


def _round_all(
    values: Tensor, grids: Sequence[IntegerGrid], settings: FitSettings, importance: Tensor
) -> Solution:
    fitted = [fit_groups(values, grid, settings, importance) for grid in grids]
    codes = [nearest_codes(values, *fit, grid) for fit, grid in zip(fitted, grids, strict=True)]
    losses = torch.zeros(len(grids), values.shape[0], dtype=torch.float64, device=exact_place(values))
    return Solution(codes, [scale for scale, _ in fitted], [zero for _, zero in fitted], losses)


def _keep_better(
    values: Tensor,
    factors: Factors,
    grids: Sequence[IntegerGrid],
    settings: FitSettings,
    solution: Solution,
    nearest: Solution,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace rows of ``solution`` by rounding to nearest where that is better; the errors of all."""
    place = solution.losses.device
    errors = torch.zeros(len(grids), dtype=torch.float64, device=place)
    nearest_errors = torch.zeros_like(errors)
    nearest_rows = torch.zeros(len(grids), dtype=torch.int64, device=place)
    for k, grid in enumerate(grids):
        kinds = []
        for part in (solution, nearest):
            difference, size = differences(
                values, part.codes[k], part.scales[k], part.zeros[k], grid, settings
            )
            loss = solution.losses[k] if part is solution else root_losses(difference, factors)
            kinds.append((difference, loss, size.to(solution.losses)))
        (ours, our_loss, our_size), (theirs, their_loss, their_size) = kinds
        # Losses are in the norm of the damped Hessian; the guarantee is for the Hessian itself.
        our_error = our_loss - factors.shift * our_size
        their_error = their_loss - factors.shift * their_size
        doubtful = (our_error - their_error).abs() <= _CLEAR_MARGIN * (our_loss + their_loss)
        doubtful |= (our_error <= _CLEAR_MARGIN * our_loss) | (their_error <= _CLEAR_MARGIN * their_loss)
        if bool(doubtful.any()):
            chosen = doubtful.nonzero()[:, 0]
            our_error[chosen] = exact_errors(ours, factors, chosen)
            their_error[chosen] = exact_errors(theirs, factors, chosen)
        worse = (our_error > their_error).to(values.device)
        if bool(worse.any()):
            solution.codes[k][worse] = nearest.codes[k][worse]
            solution.scales[k][worse] = nearest.scales[k][worse]
            solution.zeros[k][worse] = nearest.zeros[k][worse]
        errors[k] = torch.minimum(our_error, their_error).sum()
        nearest_errors[k] = their_error.sum()
        nearest_rows[k] = worse.sum().to(place)
    return errors, nearest_errors, nearest_rows
