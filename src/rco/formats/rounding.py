"""Range fitting and rounding to nearest on integer grids.

The range of a grid is searched for every row and group: the extremes are
shrunk step by step, the zero point moved to its neighbours (or, on a symmetric grid, the extra level turned to the
other side by the sign of the scale), the squared error compared, and the best scale refined by least squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rco.formats import rounding_kernels_cpu
from rco.formats.coded import on_triton_path, pack
from rco.formats.integer import IntegerGrid, PackedWeight
from rco.formats.integer_kernels_cpu import on_compiled_path, over_rows

__all__ = ["Clip", "FitSettings", "fit_groups", "nearest_codes", "round_to_nearest"]

Clip = Literal["search", "minmax"]

_STORAGE = {
    torch.float64: rounding_kernels_cpu.STORE_DOUBLE,
    torch.float32: rounding_kernels_cpu.STORE_FLOAT,
    torch.float16: rounding_kernels_cpu.STORE_HALF,
    torch.bfloat16: rounding_kernels_cpu.STORE_BFLOAT16,
}
# Smallest part of the full range worth trying, by width: fine grids lose more by clipping than they gain.
_SMALLEST_SHRINK = {1: 0.2, 2: 0.3, 3: 0.4, 4: 0.5, 5: 0.6, 6: 0.7, 7: 0.8, 8: 0.8}
# Ranges tried: each with three zero points, or on a symmetric grid with both signs. Measured on trained weights,
# more change nothing in the third digit once the scale is refined.
_STEPS, _STEPS_SYMMETRIC, _REFINEMENTS = 8, 12, 5
_CHUNK_ELEMENTS = 1 << 25
_CHUNK_CODES = 1 << 22


@dataclass(frozen=True)
class FitSettings:
    """Settings of the range fit.

    Attributes:
        clip: Fit by search, or by the extremes.
        storage_dtype: Type of the scales.
        signed_scales: Let the scales of a symmetric grid be negative, so that its extra level can be on the
            positive side. Decoding is the same product; at 2 bits this takes a sixth off the squared error.
    """

    clip: Clip
    storage_dtype: torch.dtype
    signed_scales: bool = True

    def __post_init__(self) -> None:
        if self.clip not in ("search", "minmax"):
            raise ValueError(f"clip must be 'search' or 'minmax', got {self.clip!r}.")
        if self.storage_dtype not in _STORAGE:
            raise ValueError(f"Scales are stored as one of {list(_STORAGE)}, got {self.storage_dtype}.")

    @property
    def storage(self) -> int:
        """Code of the storage type in the compiled kernels."""
        return _STORAGE[self.storage_dtype]

    def limits(self, grid: IntegerGrid, working: torch.dtype) -> tuple[float, float]:
        """Smallest scale at full precision and largest one whose outermost codes do not overflow."""
        kinds = torch.finfo(self.storage_dtype), torch.finfo(working)
        return max(kind.tiny for kind in kinds), min(kind.max for kind in kinds) / (1 << grid.bits)

    def search(self, grid: IntegerGrid) -> NDArray[np.float64]:
        """(steps, smallest shrink, refinements, signed), as the kernels take it."""
        if self.clip == "minmax":
            return np.zeros(4)
        steps = _STEPS_SYMMETRIC if grid.symmetric else _STEPS
        steps = steps if grid.bits <= 5 else steps // 2
        return np.array([steps, _SMALLEST_SHRINK[grid.bits], _REFINEMENTS, self.signed_scales], np.float64)


def check_weight(weight: Tensor) -> None:
    """Raise an error for a weight that cannot be quantized."""
    if weight.ndim != 2 or not weight.dtype.is_floating_point or not weight.numel():
        raise ValueError(
            f"Expected a floating-point matrix (out, in), got {weight.dtype} of shape {tuple(weight.shape)}."
        )
    finite = torch.isfinite(weight)
    if not bool(finite.all()):
        row, col = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"The weight has {int((~finite).sum())} values that are NaN or infinite, the first "
            f"({weight[row, col].item()}) at row {row}, column {col}; check the checkpoint."
        )


def working_dtype(weight: Tensor) -> torch.dtype:
    """Precision in which a weight is quantized."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def normalized_importance(importance: Tensor | None, weight: Tensor) -> Tensor:
    """Weights of the columns' squared errors, scaled to at most 1; equal where none are given."""
    if importance is None:
        return torch.ones(weight.shape[1], dtype=weight.dtype, device=weight.device)
    if importance.shape != (weight.shape[1],):
        raise ValueError(f"importance must be ({weight.shape[1]},), got {tuple(importance.shape)}.")
    importance = importance.to(device=weight.device, dtype=weight.dtype)
    largest = importance.max()
    if not bool(torch.isfinite(largest)) or bool((importance < 0).any()):
        raise ValueError("importance must be finite and not negative.")
    if largest == 0:
        return torch.ones_like(importance)
    # A lower bound, so that groups of unimportant columns are fitted too.
    return (importance / largest).clamp_min(1e-9)


def fit_groups(
    weight: Tensor, grid: IntegerGrid, settings: FitSettings, importance: Tensor
) -> tuple[Tensor, Tensor]:
    """Scales (rows, groups) in the weight's type, already rounded to storage, and zero points, uint8.

    Args:
        weight: Float32 or float64 (rows, in).
        grid: The grid to fit.
        settings: Settings of the fit.
        importance: Weight of each column's squared error, (in,).
    """
    rows, cols = weight.shape
    group = grid.columns_per_group(cols)
    scales = torch.empty(rows, grid.groups(cols), dtype=weight.dtype, device=weight.device)
    zeros = torch.empty(scales.shape, dtype=torch.uint8, device=weight.device)
    if on_fitting_kernels(weight, group, settings):
        fit_span(weight, (0, cols), grid, settings, importance, scales, zeros, 0)
        return scales, zeros
    if not on_compiled_path(weight):
        for g in range(scales.shape[1]):
            span = slice(g * group, (g + 1) * group)
            scales[:, g], zeros[:, g] = _fit_torch(weight[:, span], grid, settings, importance[span])
        return scales, zeros
    source, target, zero = weight.contiguous().numpy(), scales.numpy(), zeros.numpy()
    columns, search = importance.contiguous().numpy(), settings.search(grid)
    limits = np.array(settings.limits(grid, weight.dtype), dtype=source.dtype)

    def task(a: int, b: int) -> None:
        rounding_kernels_cpu.fit_rows(
            source[a:b], columns, group, grid.bits, grid.symmetric, settings.storage, limits, search,
            target[a:b], zero[a:b],
        )  # fmt: skip

    over_rows(rows, cols * 16, task)
    return scales, zeros


def on_fitting_kernels(weight: Tensor, group: int, settings: FitSettings) -> bool:
    """Whether the GPU kernels can fit groups of this many columns."""
    if not on_triton_path(weight) or torch.float64 in (weight.dtype, settings.storage_dtype):
        return False
    from rco.formats.gptq_kernels_triton import WIDEST_GROUP

    return group <= WIDEST_GROUP


def fit_span(
    weight: Tensor,
    span: tuple[int, int],
    grid: IntegerGrid,
    settings: FitSettings,
    importance: Tensor,
    scales: Tensor,
    zeros: Tensor,
    first_group: int,
) -> None:
    """On a GPU, fit the groups of the columns ``span`` into the columns of ``scales`` from ``first_group`` on."""
    from rco.formats import gptq_kernels_triton

    steps, shrink, refinements, signed = settings.search(grid).tolist()
    gptq_kernels_triton.fit(
        weight,
        importance,
        scales,
        zeros,
        span=span,
        group=grid.columns_per_group(weight.shape[1]),
        first_group=first_group,
        bits=grid.bits,
        symmetric=grid.symmetric,
        storage=settings.storage_dtype,
        limits=settings.limits(grid, weight.dtype),
        search=(steps, shrink, refinements, signed),
    )


def nearest_codes(weight: Tensor, scales: Tensor, zeros: Tensor, grid: IntegerGrid) -> Tensor:
    """The code nearest to every weight, uint8 (rows, in)."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    top, group = (1 << grid.bits) - 1, grid.columns_per_group(weight.shape[1])
    for source, target, scale, zero in _by_group(group, weight, codes, scales, zeros):
        zero = zero.to(weight.dtype)
        target.copy_(torch.round(torch.clamp(source / scale, -zero, top - zero)).add_(zero))
    return codes


def differences(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, grid: IntegerGrid, settings: FitSettings
) -> tuple[Tensor, Tensor]:
    """``weight - decoded`` and the squared lengths of its rows, in float64 where the device has it."""
    result, group = torch.empty_like(weight), grid.columns_per_group(weight.shape[1])
    for source, code, target, scale, zero in _by_group(group, weight, codes, result, scales, zeros):
        decoded = (code.to(weight.dtype) - zero.to(weight.dtype)).mul_(scale)
        torch.sub(source, decoded.to(settings.storage_dtype).to(weight.dtype), out=target)
    exact = weight.dtype if weight.device.type == "mps" else torch.float64
    return result, result.square().sum(dim=1, dtype=exact)


def _by_group(group: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matrices (rows, in) and their last two, scales and zero points (rows, groups), as views that broadcast.

    A chunk of rows at a time, all whole groups first, then a shorter last one.
    """
    *matrices, scales, zeros = tensors
    rows, columns = matrices[0].shape
    whole = columns // group
    step = max(1, _CHUNK_CODES // max(1, columns))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        if whole:
            views = [each[part, : whole * group].view(-1, whole, group) for each in matrices]
            yield (*views, scales[part, :whole, None], zeros[part, :whole, None])
        if columns % group:
            views = [each[part, whole * group :] for each in matrices]
            yield (*views, scales[part, whole:], zeros[part, whole:])


def assemble(
    codes: Tensor, scales: Tensor, zeros: Tensor, grid: IntegerGrid, storage_dtype: torch.dtype
) -> PackedWeight:
    """A packed weight from codes and fitted grids."""
    rows, cols = codes.shape
    kept = None if grid.symmetric else zeros.contiguous()
    return PackedWeight(
        pack(codes, grid.bits),
        scales.to(storage_dtype),
        kept,
        grid.bits,
        (rows, cols),
        grid.columns_per_group(cols),
    )


def round_to_nearest(
    weight: Tensor,
    grids: Sequence[IntegerGrid],
    *,
    importance: Tensor | None = None,
    clip: Clip = "search",
    storage_dtype: torch.dtype | None = None,
    signed_scales: bool = True,
) -> list[PackedWeight]:
    """Quantize a matrix to each of several grids, every weight to its nearest code.

    Args:
        weight: (out, in) of any floating-point type.
        grids: The grids, in the order of the result.
        importance: Weight of each column's squared error in the range search, (in,), such as the diagonal of the
            Hessian; all equal if not given.
        clip: Search the range, or take the extremes.
        storage_dtype: Type of the scales and of decoded values; that of the weight if not given.
        signed_scales: Let scales of symmetric grids be negative.
    """
    check_weight(weight)
    settings = FitSettings(clip, storage_dtype or weight.dtype, signed_scales)
    values = weight.detach().to(working_dtype(weight)).contiguous()
    columns = normalized_importance(importance, values)
    result = []
    for grid in grids:
        scales, zeros = fit_groups(values, grid, settings, columns)
        result.append(
            assemble(nearest_codes(values, scales, zeros, grid), scales, zeros, grid, settings.storage_dtype)
        )
    return result


def _fit_torch(
    values: Tensor, grid: IntegerGrid, settings: FitSettings, importance: Tensor
) -> tuple[Tensor, Tensor]:
    """The fit of one group with torch operations, for devices without compiled kernels."""
    chunk = max(1, _CHUNK_ELEMENTS // (values.shape[1] * 3 * _STEPS_SYMMETRIC))
    parts = [
        _fit_torch_rows(values[start : start + chunk], grid, settings, importance)
        for start in range(0, values.shape[0], chunk)
    ]
    return torch.cat([scale for scale, _ in parts]), torch.cat([zero for _, zero in parts]).to(torch.uint8)


def _fit_torch_rows(
    values: Tensor, grid: IntegerGrid, settings: FitSettings, importance: Tensor
) -> tuple[Tensor, Tensor]:
    top, half = (1 << grid.bits) - 1, 1 << (grid.bits - 1)
    tiny, huge = settings.limits(grid, values.dtype)

    def stored(scale: Tensor) -> Tensor:
        size = scale.abs().clamp(tiny, huge).to(settings.storage_dtype).to(values.dtype)
        return torch.where(scale < 0, -size, size)

    def steps_of(scale: Tensor, zero: Tensor) -> Tensor:
        scaled = values / scale[..., None]
        return torch.round(torch.clamp(scaled, -zero[..., None], top - zero[..., None]))

    def errors_of(scale: Tensor, zero: Tensor) -> Tensor:
        miss = steps_of(scale, zero) * scale[..., None] - values
        return (importance * miss.square()).sum(dim=-1)

    most, least = values.amax(dim=1).clamp_min(0), values.amin(dim=1).clamp_max(0)
    size = torch.maximum(most, -least)
    if grid.symmetric:
        scale = stored(size * rounding_kernels_cpu.OFF_TIE / (half - 0.5))
        zero = torch.full_like(scale, half)
    else:
        scale = stored((most - least) / top)
        zero = torch.round(-least / scale).clamp(0, top)
    steps, smallest_shrink, refinements, signed = settings.search(grid).tolist()
    if not steps:
        return scale, zero
    shrink = torch.linspace(1, smallest_shrink, int(steps), dtype=values.dtype, device=values.device)[:, None]
    if grid.symmetric:
        outward = torch.where((most > -least) & bool(signed), -1.0, 1.0).to(values.dtype)
        trials = stored(outward * shrink * size / half)
        if signed:
            trials = torch.stack([trials, -trials], dim=1).flatten(0, 1)
        zeros = torch.full_like(trials, half)
    else:
        trials = stored(shrink * (most - least) / top)
        middle = torch.round(-shrink * least / trials).clamp(0, top)
        zeros = torch.stack([middle - 1, middle, middle + 1], dim=1).clamp(0, top).flatten(0, 1)
        trials = trials.repeat_interleave(3, dim=0)
    live = size > 0
    floor = (importance * values.square()).sum(dim=1) * rounding_kernels_cpu.NOISE_FLOOR
    smallest = errors_of(scale, zero)
    for trial, trial_zero, error in zip(trials, zeros, errors_of(trials, zeros), strict=True):
        better = live & (error < smallest * (1 - rounding_kernels_cpu.NOISE_MARGIN) - floor)
        scale, zero = torch.where(better, trial, scale), torch.where(better, trial_zero, zero)
        smallest = torch.where(better, error, smallest)
    for _ in range(int(refinements)):
        taken = steps_of(scale, zero)
        product, square = (importance * taken * values).sum(dim=1), (importance * taken * taken).sum(dim=1)
        trial = stored(torch.where(square > 0, product / square, scale))
        error = errors_of(trial, zero)
        better = live & (error < smallest * (1 - rounding_kernels_cpu.NOISE_MARGIN) - floor)
        scale, smallest = torch.where(better, trial, scale), torch.where(better, error, smallest)
    return scale, zero
