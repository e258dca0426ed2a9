"""GPTQ for any number of grids at once.

Columns are quantized in turn and the error of each is made up for by those not yet quantized (Frantar et al.,
2023). One damped Hessian and one factor of its inverse serve every grid (:mod:`rco.formats.gptq_factors`), and
the columns are run for all grids together (:mod:`rco.formats.gptq_columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rco.formats.descent import descend
from rco.formats.gptq_columns import Solution, run_columns
from rco.formats.gptq_factors import Factors, exact_errors, exact_place, factorize, root_losses
from rco.formats.grid import (
    Clip,
    FitSettings,
    Grid,
    assemble,
    check_weight,
    differences,
    fit_groups,
    nearest_codes,
    normalized_importance,
    working_dtype,
)
from rco.formats.packing import PackedWeight

__all__ = ["GPTQResult", "gptq"]

# Running sums in float32 decide between GPTQ and rounding where they are this far apart, relative to their terms.
_CLEAR_MARGIN = 1e-3


@dataclass(frozen=True)
class GPTQResult:
    """What GPTQ made of one layer, one entry per grid.

    Attributes:
        candidates: The quantized weights.
        errors: ``tr(D H D^T)`` of the difference D from the original weight, float64 (K,).
        relative_errors: The same as a part of ``tr(W H W^T)``.
        nearest_errors: The error of rounding to nearest on the same settings.
        nearest_rows: How many rows were better rounded to nearest, and so are.
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
    grids: Sequence[Grid],
    *,
    damp: float = 0.01,
    act_order: bool = False,
    block: int = 128,
    clip: Clip = "search",
    storage_dtype: torch.dtype | None = None,
    sweeps: int = 0,
) -> GPTQResult:
    """Quantize a linear layer's weight to each of several grids.

    Every row is returned as GPTQ made it or rounded to nearest, whichever has the smaller error in the norm of the
    Hessian, so that no candidate is worse than rounding. Results do not depend on which other grids are asked for.

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
        sweeps: After GPTQ, pass over all columns at most this often and move each code to where the error is
            least with all others as they are. Zero is GPTQ proper; a few take about a tenth off the error.
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
        # What an error in a column costs once the columns after it have made up for it as far as they can.
        importance = normalized_importance(factors.inverse_root.diagonal().double() ** -2, values)
    damped = factors.hessian.clone()
    damped.diagonal().add_(factors.shift)
    damped = damped.to(device=values.device, dtype=values.dtype)
    solution = Solution([], [], [], torch.zeros_like(nearest.losses))
    for k in range(len(grids)):
        solution.codes.append(torch.empty_like(nearest.codes[k]))
        solution.scales.append(nearest.scales[k].clone())
        solution.zeros.append(nearest.zeros[k].clone())
    # Blocks are cut where groups allow; grids of one group size share them, whichever others are asked for.
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


def _round_all(values: Tensor, grids: Sequence[Grid], settings: FitSettings, importance: Tensor) -> Solution:
    fitted = [fit_groups(values, grid, settings, importance) for grid in grids]
    codes = [nearest_codes(values, *fit, grid) for fit, grid in zip(fitted, grids, strict=True)]
    losses = torch.zeros(len(grids), values.shape[0], dtype=torch.float64, device=exact_place(values))
    return Solution(codes, [scale for scale, _ in fitted], [zero for _, zero in fitted], losses)


def _keep_better(
    values: Tensor,
    factors: Factors,
    grids: Sequence[Grid],
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
        # Losses are in the norm of the damped Hessian; the promise is about the Hessian itself.
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
