"""Floating-point formats and 8-bit integers per channel: FP8, NVFP4, MXFP4, MXFP8 and INT8.

A weight is an element (E2M1, E4M3 or an 8-bit integer) times the scale of its row, its 128 x 128 block, or its
group of 16 or 32 columns. Tensors and arithmetic are those of compressed-tensors, bit for bit. Names with a suffix
(``-dynamic``, ``-a4``, ``-a8``) also round the inputs of the layer; the others concern weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rco.formats.base import (
    ActivationRule,
    Encoded,
    EncodeSettings,
    Format,
    Shape,
    Stored,
    TensorLayout,
    Tunable,
    measured,
)
from rco.formats.coded import CodedFormat, CodedWeight, decode_codes, on_triton_path, pack
from rco.formats.elements import TOP, Element, ascending, levels_of, nearest_codes, power_of_two
from rco.formats.gptq import exact_errors, factorize
from rco.formats.input_rounding import InputRounding
from rco.formats.integer_kernels_cpu import on_compiled_path, over_rows
from rco.formats.rounding import check_weight, normalized_importance, working_dtype

__all__ = ["FloatingPoint", "FloatingWeight", "TunableFloating"]

Scaling = Literal["channel", "block", "group16", "group32"]
Inputs = Literal["token", "group16", "group32", "group128"]

_BLOCK = 128
_GROUP: dict[Scaling, int] = {"group16": 16, "group32": 32, "block": _BLOCK}
_COLUMNS_AT_ONCE = 128
_NEAREST = 0.499  # largest offset that rounds to the same element in any floating-point type
# Shares of the range that takes the largest weight of a group to the largest element. Above one, it lands lower.
_FACTORS = tuple(0.5 + 0.05 * step for step in range(11)) + (1.1, 1.2, 1.35, 1.5)


@dataclass(frozen=True)
class _Kind:
    """What a name stands for."""

    element: Element
    scaling: Scaling
    inputs: Inputs | None = None


_KINDS: dict[str, _Kind] = {
    "fp8": _Kind("e4m3", "channel"),
    "fp8-dynamic": _Kind("e4m3", "channel", "token"),
    "fp8-block": _Kind("e4m3", "block"),
    "fp8-block-dynamic": _Kind("e4m3", "block", "group128"),
    "int8": _Kind("int8", "channel"),
    "int8-dynamic": _Kind("int8", "channel", "token"),
    "nvfp4": _Kind("e2m1", "group16"),
    "nvfp4-a4": _Kind("e2m1", "group16", "group16"),
    "mxfp4": _Kind("e2m1", "group32"),
    "mxfp4-a4": _Kind("e2m1", "group32", "group32"),
    "mxfp8": _Kind("e4m3", "group32"),
    "mxfp8-a8": _Kind("e4m3", "group32", "group32"),
}


# ---------------------------------------------------------------------- the format


@dataclass(frozen=True)
class FloatingPoint(CodedFormat):
    """A floating-point format, or 8-bit integers per channel; see the table of names in this module."""

    name: str = "fp8"

    family = "floating"

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise ValueError(f"Unknown floating-point format {self.name!r}; known: {', '.join(_KINDS)}.")

    @classmethod
    def parse(cls, name: str) -> FloatingPoint | None:
        """The format of that name."""
        return cls(name) if name in _KINDS else None

    @classmethod
    def listed(cls) -> dict[str, str]:
        """All names."""
        return {name: cls(name)._summary() for name in _KINDS}

    @property
    def kind(self) -> _Kind:
        """Element, scaling and rounding of the inputs."""
        return _KINDS[self.name]

    @property
    def bits(self) -> int:  # type: ignore[override]
        """Bits of an element."""
        return 4 if self.kind.element == "e2m1" else 8

    def _summary(self) -> str:
        """Elements, scales and rounding of the inputs, in one line."""
        element = {"e2m1": "4-bit E2M1", "e4m3": "8-bit E4M3", "int8": "8-bit integers"}[self.kind.element]
        scale = {
            "channel": "a scale per row",
            "block": "a scale per block of 128 x 128",
            "group16": "an E4M3 scale per 16 weights and a scale of the tensor",
            "group32": "a power of two per 32 weights",
        }[self.kind.scaling]
        inputs = {
            None: "inputs as they are",
            "token": "inputs likewise, a scale per token",
            "group128": "inputs likewise, a scale per token and 128 columns",
            "group16": "inputs likewise, the scale of the tensor from calibration",
            "group32": "inputs likewise",
        }[self.kind.inputs]
        return f"{element}, {scale}; {inputs}"

    def __str__(self) -> str:
        return self.name.upper() if self.kind.inputs is None else f"{self.name.upper()} with rounded inputs"

    def fits(self, columns: int) -> bool:
        """Whether rows divide into groups of weights, and of inputs."""
        if self.kind.inputs == "group128" and columns % _BLOCK:
            return False
        return self.kind.scaling not in ("group16", "group32") or columns % _GROUP[self.kind.scaling] == 0

    def group_size(self, columns: int) -> int:
        """Columns that share a scale."""
        return columns if self.kind.scaling == "channel" else _GROUP[self.kind.scaling]

    @property
    def rows_per_scale(self) -> int:  # type: ignore[override]
        """Rows that share a scale."""
        return _BLOCK if self.kind.scaling == "block" else 1

    @property
    def rounds_inputs(self) -> bool:  # type: ignore[override]
        """Whether the inputs of the layer are rounded, too."""
        return self.kind.inputs is not None

    @property
    def calibrates_inputs(self) -> bool:  # type: ignore[override]
        """Whether inputs are rounded by a fixed scale, which depends on their largest size."""
        return self.kind.inputs == "group16"

    def layout(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorLayout]:
        """The tensors of compressed-tensors' format for it."""
        rows, columns = shape
        kind = self.kind
        if kind.element == "e2m1":
            found = {"weight_packed": TensorLayout(torch.uint8, (rows, columns // 2))}
        else:
            stored = torch.int8 if kind.element == "int8" else torch.float8_e4m3fn
            found = {"weight": TensorLayout(stored, (rows, columns))}
        groups = -(-columns // self.group_size(columns)) if columns else 0
        match kind.scaling:
            case "channel":
                found["weight_scale"] = TensorLayout(dtype, (rows, 1))
            case "block":
                found["weight_scale"] = TensorLayout(dtype, (-(-rows // _BLOCK), groups))
            case "group32":
                found["weight_scale"] = TensorLayout(torch.uint8, (rows, groups))
            case "group16":
                found["weight_scale"] = TensorLayout(torch.float8_e4m3fn, (rows, groups))
                found["weight_global_scale"] = TensorLayout(torch.float32, (1,))
        if kind.inputs == "group16":
            found["input_global_scale"] = TensorLayout(torch.float32, (1,))
        return found

    def file_tensors(self, stored: Stored) -> dict[str, Tensor]:
        """The tensors of the checkpoint file."""
        kind, tensors = self.kind, stored.tensors
        scales = tensors["scales"]
        # A row of codes is padded to whole words in memory.
        codes = tensors["packed"].view(torch.uint8)[:, : stored.shape[1] * self.bits // 8].contiguous()
        if kind.element == "e2m1":
            found = {"weight_packed": codes}
        else:
            found = {"weight": codes.view(torch.int8 if kind.element == "int8" else torch.float8_e4m3fn)}
        if kind.scaling == "block":
            scales = scales[::_BLOCK].contiguous()
        found["weight_scale"] = scales.view(torch.float8_e4m3fn) if kind.scaling == "group16" else scales
        for name in ("weight_global_scale", "input_global_scale"):
            if name in tensors:
                found[name] = tensors[name][:1, 0].clone()
        return found

    def restore(self, shape: Shape, tensors: Mapping[str, Tensor]) -> FloatingWeight:
        """The weight over its tensors."""
        return FloatingWeight(self, shape, tensors)

    # ------------------------------------------------------------------ encoding

    def encode(
        self, weight: Tensor, statistics: Tensor | None = None, *, settings: EncodeSettings | None = None
    ) -> FloatingWeight:
        """Encode with compensated errors if there are statistics of the inputs, else to the nearest element."""
        return floating_weight(self.encode_all([self], weight, statistics, settings=settings)[0].stored)

    @classmethod
    def encode_all(
        cls,
        formats: Sequence[Format],
        weight: Tensor,
        statistics: Tensor | None = None,
        *,
        settings: EncodeSettings | None = None,
    ) -> list[Encoded]:
        """Encode in several formats; one factor of the Hessian serves them all."""
        settings = settings or EncodeSettings()
        check_weight(weight)
        kinds = [each for each in formats if isinstance(each, FloatingPoint)]
        if len(kinds) < len(formats):
            raise ValueError(f"Expected floating-point formats, got {', '.join(f.name for f in formats)}.")
        shape = (weight.shape[0], weight.shape[1])
        for each in kinds:
            if not each.fits(shape[1]):
                raise ValueError(
                    f"{each.name} stores groups of {each.group_size(shape[1])} columns; rows of {shape[1]} do "
                    "not divide into them: choose another format for this layer."
                )
        values = weight.detach().to(working_dtype(weight)).contiguous()
        if statistics is None:
            return [
                measured(each._rounded(values, None, settings, weight.dtype), weight, None) for each in kinds
            ]
        factors = factorize(statistics, values, settings.damp, act_order=False)
        importance = normalized_importance(factors.hessian.diagonal() + factors.shift, values)
        damped = factors.hessian.clone()
        damped.diagonal().add_(factors.shift)
        damped = damped.to(device=values.device, dtype=values.dtype)
        found = []
        for each in kinds:
            nearest = each._rounded(values, importance, settings, weight.dtype)
            better = _compensated(nearest, values, factors.inverse_root, damped, settings.sweeps)
            found.append(_better_rows(nearest, better, values, factors))
        return [measured(each, weight, statistics) for each in found]

    def _rounded(
        self, values: Tensor, importance: Tensor | None, settings: EncodeSettings, dtype: torch.dtype
    ) -> FloatingWeight:
        """Scales of least weighted error, and the nearest elements under them."""
        storage = settings.storage_dtype or dtype
        scaling = self._fitted(values, importance, settings, storage)
        none = torch.empty(0, dtype=torch.int32, device=values.device)
        scaled = self.restore((values.shape[0], values.shape[1]), {"packed": none, **scaling})
        return scaled.with_codes(nearest_codes(values / scaled.wide_scales(values.dtype), self.kind.element))

    def _fitted(
        self, values: Tensor, importance: Tensor | None, settings: EncodeSettings, storage: torch.dtype
    ) -> dict[str, Tensor]:
        """The stored scales, one row of them per row of the weight."""
        kind, rows = self.kind, values.shape[0]
        extra: dict[str, Tensor] = {}
        peak = float(values.abs().max()) if values.numel() else 0.0
        if kind.scaling == "group16":
            whole = max(settings.weight_peak or 0.0, peak)
            tensor_scale = _global_scale(whole)
            extra["weight_global_scale"] = values.new_full((rows, 1), tensor_scale, dtype=torch.float32)
        if kind.inputs == "group16":
            inputs = settings.input_peak
            extra["input_global_scale"] = values.new_full(
                (rows, 1), 1.0 if inputs is None else _global_scale(inputs), dtype=torch.float32
            )
        grouped = _groups(values, kind.scaling)  # (units, groups, members)
        weights = torch.ones_like(values[:1]) if importance is None else importance.view(1, -1).to(values)
        weighted = _groups(weights.expand(rows, -1), kind.scaling)
        largest = grouped.abs().amax(dim=2)

        def stored(factor: float) -> tuple[Tensor, Tensor]:
            """Scales at a share of the range, as stored and as multiplied with."""
            return _stored_scales(largest * factor, kind, storage, extra.get("weight_global_scale"))

        factors = (1.0,) if settings.clip == "minmax" else _shares(kind)
        best, lowest = None, None
        for factor in factors:
            codes, effective = stored(factor)
            decoded = levels_of(kind.element, values.device).to(values.dtype)[
                nearest_codes(grouped / effective.to(values.dtype).unsqueeze(2), kind.element).int()
            ] * effective.to(values.dtype).unsqueeze(2)
            error = ((decoded - grouped).square_().mul_(weighted)).sum(dim=2)
            if best is None or lowest is None:
                best, lowest = codes, error
                continue
            wins = error < lowest
            best, lowest = torch.where(wins, codes.view(best.dtype), best), torch.where(wins, error, lowest)
        assert best is not None
        if kind.scaling == "block":
            best = best.repeat_interleave(_BLOCK, dim=0)[:rows].contiguous()
        return {"scales": best, **extra}

    # ------------------------------------------------------------------ use

    def tunable(
        self, stored: Stored, original: Tensor | None = None, *, codes: bool = True
    ) -> TunableFloating | None:
        """The weight with trainable elements, and scales where they are numbers of a wide type."""
        weight = floating_weight(stored)
        if not codes and weight.tensors["scales"].dtype == torch.uint8:
            return None
        return TunableFloating(weight, original, codes=codes)

    def input_rule(self, stored: Stored) -> ActivationRule | None:
        """The rounding of the inputs."""
        element = self.kind.element
        match self.kind.inputs:
            case None:
                return None
            case "token":
                return InputRounding(element)
            case "group128":
                return InputRounding(element, group=_BLOCK)
            case "group32":
                return InputRounding(element, group=32, powers=True)
            case "group16":
                scale = float(stored.tensors["input_global_scale"][0, 0])
                return InputRounding(element, group=16, global_scale=scale)


def _global_scale(peak: float) -> float:
    """Scale of a whole tensor that makes the scales of its groups fit E4M3; as a float32."""
    if not 0 < peak < float("inf"):
        return 1.0
    found = float(torch.tensor(TOP["e4m3"] * TOP["e2m1"] / peak, dtype=torch.float32))
    return found if 0 < found < float("inf") else 1.0


def _shares(kind: _Kind) -> tuple[float, ...]:
    # Powers of two: only neighbouring exponents differ.
    return (1.0, 0.5, 2.0) if kind.scaling == "group32" else (1.0, *(f for f in _FACTORS if f != 1.0))


def _groups(values: Tensor, scaling: Scaling) -> Tensor:
    """A matrix as (units, groups, members): members share a scale; a unit is a row, or 128 rows."""
    rows, columns = values.shape
    if scaling == "channel":
        return values.unsqueeze(1)
    if scaling != "block":
        return values.reshape(rows, -1, _GROUP[scaling])
    padded = torch.nn.functional.pad(values, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.view(padded.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK).transpose(1, 2)
    return blocks.reshape(*blocks.shape[:2], -1)


def _stored_scales(
    largest: Tensor, kind: _Kind, storage: torch.dtype, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scales that take ``largest`` to the largest element: as stored, and as multiplied with."""
    top = TOP[kind.element]
    if kind.scaling == "group32":
        # By parts of the number, because logarithms of powers of two are not exact on every device.
        mantissa, exponent = torch.frexp(largest.double() / top)
        exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(-126, 127)
        stored = torch.where(largest > 0, exponent + 127, 127).to(torch.uint8)
        return stored, power_of_two(stored)
    if kind.scaling == "group16":
        assert global_scale is not None
        wanted = largest.float() / top * global_scale
        smallest = 2.0**-9
        codes = wanted.clamp(smallest, TOP["e4m3"]).to(torch.float8_e4m3fn)
        codes = torch.where(largest > 0, codes.float(), torch.ones_like(wanted)).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), codes.float() / global_scale
    limits = torch.finfo(storage)
    found = (largest / top).clamp(limits.tiny, limits.max).to(storage)
    found = torch.where(largest > 0, found, torch.ones_like(found))
    return found, found


class FloatingWeight(CodedWeight):
    """One weight in a floating-point format.

    Its tensors are ``packed`` codes and ``scales`` as stored, with one row per row of the weight, even if a block
    of rows or the whole tensor shares them. :attr:`scales` are the factors of the values that codes stand for.
    """

    format: FloatingPoint

    def __init__(self, format: FloatingPoint, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(format, shape, tensors)
        self.packed, self.zeros = tensors["packed"], None
        self.bits, self.group_size = format.bits, format.group_size(shape[1])
        self.element = format.kind.element
        self.rounded_to = torch.bfloat16 if tensors["scales"].dtype == torch.uint8 else None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the decoded values: bfloat16 where scales have a format of their own."""
        return self.rounded_to or self.tensors["scales"].dtype

    @cached_property
    def table(self) -> Tensor:  # type: ignore[override]
        """Value of every code."""
        return levels_of(self.format.kind.element, self.device)

    @cached_property
    def scales(self) -> Tensor:  # type: ignore[override]
        """(out, groups) scales in the type that they are multiplied in."""
        scales, scaling = self.tensors["scales"], self.format.kind.scaling
        if scaling == "group16":
            return scales.view(torch.float8_e4m3fn).float() / self.tensors["weight_global_scale"]
        if scaling == "group32":
            return power_of_two(scales)
        return scales

    def with_codes(self, codes: Tensor) -> FloatingWeight:
        """The same scales with other codes, uint8 (out, in)."""
        return self.format.restore(
            self.shape, {**self.tensors, "packed": pack(codes.contiguous(), self.bits)}
        )

    def wide_scales(self, dtype: torch.dtype) -> Tensor:
        """(out, in) the scale of every weight."""
        return self.widened(self.scales.to(dtype))

    def widened(self, scales: Tensor) -> Tensor:
        """(out, in) of scales (out, groups)."""
        return scales.repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]


def floating_weight(stored: Stored) -> FloatingWeight:
    """A stored weight known to be in a floating-point format."""
    assert isinstance(stored, FloatingWeight)
    return stored


# ---------------------------------------------------------------------- error compensation


def _compensated(
    start: FloatingWeight, values: Tensor, inverse_root: Tensor, hessian: Tensor, sweeps: int
) -> FloatingWeight:
    """GPTQ under the scales of ``start``, then passes of coordinate descent over the elements."""
    element, device = start.format.kind.element, values.device
    order, _ = ascending(element, device)
    levels = levels_of(element, device)[order.int()].to(values.dtype)
    grid = _Columns(levels, start.scales.to(values.dtype).contiguous(), start.group_size)
    current, columns = values.clone(), values.shape[1]
    places = torch.empty(values.shape, dtype=torch.int16, device=device)
    for first in range(0, columns, _COLUMNS_AT_ONCE):
        last = min(first + _COLUMNS_AT_ONCE, columns)
        errors = grid.gptq(current, inverse_root[first:last, first:last].contiguous(), first, places)
        current[:, last:].addmm_(errors, inverse_root[first:last, last:], alpha=-1.0)
    decoded = levels[places.int()] * start.wide_scales(values.dtype)
    for _ in range(sweeps):
        moved = torch.zeros((), dtype=torch.int64, device=device)
        for first in range(0, columns, _COLUMNS_AT_ONCE):
            last = min(first + _COLUMNS_AT_ONCE, columns)
            residual = (values - decoded) @ hessian[:, first:last]
            block = hessian[first:last, first:last].contiguous()
            grid.descend(residual, block, first, places, decoded, moved)
        if not bool(moved):
            break
    return start.with_codes(order[places.int()])


@dataclass(frozen=True)
class _Columns:
    """Loops over the columns of a block: compiled on a CPU, by kernels on a GPU, one column at a time elsewhere.

    Attributes:
        levels: Levels in ascending order.
        scales: (rows, groups).
        group: Columns per group.
    """

    levels: Tensor
    scales: Tensor
    group: int

    @cached_property
    def between(self) -> Tensor:
        """Midpoints of neighbouring levels."""
        return (self.levels[1:] + self.levels[:-1]) / 2

    def gptq(self, current: Tensor, factor: Tensor, first: int, places: Tensor) -> Tensor:
        """Round a block of columns in turn; returns the errors (rows, width) to correct later columns for."""
        rows, width = len(current), len(factor)
        errors = torch.empty(rows, width, dtype=current.dtype, device=current.device)
        if on_compiled_path(current):
            from rco.formats import floating_kernels_cpu

            arrays = [t.numpy() for t in (current, self.scales, places, errors)]
            share, tables = factor.numpy(), (self.levels.numpy(), self.between.numpy())

            def task(a: int, b: int) -> None:
                weight, scales, index, miss = (array[a:b] for array in arrays)
                floating_kernels_cpu.gptq_levels(
                    weight, share, scales, self.group, first, *tables, index, miss
                )

            over_rows(rows, width * width, task)
            return errors
        if on_triton_path(current) and current.dtype == torch.float32:
            from rco.formats import floating_kernels_triton

            floating_kernels_triton.gptq_levels(
                current, factor, self.scales, self.group, first, self.levels, self.between, places, errors
            )
            return errors
        for j in range(width):
            column = first + j
            value, scale = current[:, column], self.scales[:, column // self.group]
            place = torch.searchsorted(self.between, (value / scale).contiguous())
            error = (value - self.levels[place] * scale) / factor[j, j]
            places[:, column], errors[:, j] = place, error
            current[:, column + 1 : first + width] -= error[:, None] * factor[j, j + 1 :]
        return errors

    def descend(
        self, residual: Tensor, hessian: Tensor, first: int, places: Tensor, decoded: Tensor, moved: Tensor
    ) -> None:
        """Move the elements of a block of columns in turn; adds the number of those that moved to ``moved``."""
        rows, width = residual.shape
        if on_compiled_path(residual):
            from rco.formats import floating_kernels_cpu

            arrays = [t.numpy() for t in (residual, self.scales, places, decoded)]
            share, tables = hessian.numpy(), (self.levels.numpy(), self.between.numpy())
            counts: list[int] = []

            def task(a: int, b: int) -> None:
                rest, scales, index, weight = (array[a:b] for array in arrays)
                counts.append(
                    floating_kernels_cpu.descend_levels(
                        rest, share, scales, self.group, first, *tables, index, weight
                    )
                )

            over_rows(rows, width * width, task)
            moved += sum(counts)
            return
        if on_triton_path(residual) and residual.dtype == torch.float32:
            from rco.formats import floating_kernels_triton

            floating_kernels_triton.descend_levels(
                residual, hessian, self.scales, self.group, first, self.levels, self.between, places, decoded, moved
            )  # fmt: skip
            return
        before = places[:, first : first + width].clone()
        for j, curvature in enumerate(hessian.diagonal().tolist()):
            if not curvature > 0:
                continue
            column = first + j
            scale, old = self.scales[:, column // self.group], decoded[:, column].clone()
            target = (old + residual[:, j] / curvature) / scale
            place = torch.searchsorted(self.between, target.contiguous())
            new = self.levels[place] * scale
            places[:, column], decoded[:, column] = place, new
            residual -= (new - old)[:, None] * hessian[j]
        moved += (before != places[:, first : first + width]).sum()


def _better_rows(
    nearest: FloatingWeight, compensated: FloatingWeight, values: Tensor, factors: Any
) -> FloatingWeight:
    """Row by row the one with the smaller error in the norm of the Hessian."""
    rows = torch.arange(values.shape[0])
    first, second = (
        exact_errors(each.dequantize(values.dtype) - values, factors, rows) for each in (nearest, compensated)
    )
    chosen = (second < first).to(values.device)
    return nearest.with_codes(torch.where(chosen[:, None], compensated.codes(), nearest.codes()))


# ---------------------------------------------------------------------- training


class TunableFloating(Tunable):
    """A floating-point weight with trainable elements, and scales per channel or block.

    An offset counts steps to the next larger element, rounded to a whole number; its gradient is the size of that
    step. Scales of groups of 16 or 32 columns have few bits and stay.

    Args:
        weight: The stored weight.
        original: The weight before it was stored: an offset then starts between the elements around it. None:
            at zero.
        codes: Whether elements are trained, or scales alone.
    """

    spacing: ClassVar[Mapping[str, float]] = {"offsets": 1.0}

    def __init__(self, weight: FloatingWeight, original: Tensor | None = None, *, codes: bool = True) -> None:
        super().__init__()
        self._weight = weight
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        element = weight.format.kind.element
        order, places = ascending(element, weight.device)
        self.register_buffer("places", places[weight.codes().int()], persistent=False)
        self.register_buffer("order", order, persistent=False)
        levels = levels_of(element, weight.device)[order.int()]
        self.register_buffer("sorted", levels, persistent=False)
        self.offsets: nn.Parameter | None = None
        if codes:
            start = torch.zeros(weight.shape, dtype=exact, device=weight.device)
            if original is not None:
                start = _fractions(original.to(start) / weight.wide_scales(exact), levels)
            self.offsets = nn.Parameter(start)
        self._shared = weight.format.kind.scaling == "block"
        scales = weight.tensors["scales"]
        self.scales: nn.Parameter | None = None
        if scales.dtype != torch.uint8:
            self.scales = nn.Parameter(self._own(scales).to(exact).clone())

    def _own(self, scales: Tensor) -> Tensor:
        return scales[::_BLOCK] if self._shared else scales

    def _stored_scales(self) -> Tensor:
        assert self.scales is not None
        scales = self.scales.to(self._weight.dtype)
        rows = self._weight.shape[0]
        return scales.repeat_interleave(_BLOCK, dim=0)[:rows] if self._shared else scales

    def forward(self) -> Tensor:
        """The decoded matrix in the type of the decoded values."""
        decoded: Tensor = _Stepped.apply(self.offsets, self.scales, self)  # type: ignore[no-untyped-call]
        return decoded

    def present(self) -> tuple[Tensor, Tensor]:
        """Codes, uint8 (out, in), and scales (out, groups) as they would be stored."""
        order, places = self.order, self.places
        assert isinstance(order, Tensor)
        assert isinstance(places, Tensor)
        offsets = None if self.offsets is None else self.offsets.detach()
        scales = self._weight.scales if self.scales is None else self._stored_scales().detach()
        return order[_moved(places, offsets, len(order))], scales

    def stored(self) -> FloatingWeight:
        """The weight of the present elements and scales."""
        codes, scales = self.present()
        found = self._weight.with_codes(codes)
        return found if self.scales is None else found.over({**found.tensors, "scales": scales.contiguous()})


def _fractions(values: Tensor, levels: Tensor) -> Tensor:
    """Places of values between the elements around them, from -1/2 to 1/2: offsets that change no element."""
    levels = levels.to(values.dtype)
    above = torch.searchsorted(levels, values.contiguous()).clamp_(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    share = ((values - low) / (high - low)).clamp_(0, 1)
    return (share - share.round()).clamp_(-_NEAREST, _NEAREST)


def _moved(places: Tensor, offsets: Tensor | None, count: int) -> Tensor:
    if offsets is None:
        return places
    # Wide enough for a sum that offsets of 16 bits would round.
    raw = places + offsets.to(torch.promote_types(offsets.dtype, torch.float32))
    return torch.round(raw).clamp_(0, count - 1).long()


class _Stepped(torch.autograd.Function):
    """The decoded matrix; the gradient of an offset is the step to the next larger element, times the scale."""

    @staticmethod
    def forward(ctx: Any, offsets: Tensor | None, scales: Tensor | None, tuned: TunableFloating) -> Tensor:
        weight = tuned._weight
        codes, own = tuned.present()
        ctx.tuned = tuned
        ctx.save_for_backward(offsets, own)
        decoded = decode_codes(codes, own, 0, weight.group_size, table=weight.table)
        return decoded if weight.rounded_to is None else decoded.to(weight.rounded_to)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        offsets, scales = ctx.saved_tensors
        tuned, weight = ctx.tuned, ctx.tuned._weight
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        levels, gradient = tuned.sorted.to(exact), gradient.to(exact)
        place = _moved(tuned.places, offsets, len(levels))
        by_offset = by_scale = None
        if ctx.needs_input_grad[0]:
            raw = tuned.places + offsets
            steps = levels.diff()[place.clamp_max(len(levels) - 2)]
            inside = (raw >= -0.5) & (raw <= len(levels) - 0.5)
            wide = weight.widened(scales.to(exact))
            by_offset = torch.where(inside, gradient * steps * wide, 0.0).to(offsets.dtype)
        if ctx.needs_input_grad[1]:
            by_scale = _groups(gradient * levels[place], weight.format.kind.scaling).sum(dim=2)
        return by_offset, by_scale, None
