"""GPU kernel that rounds the inputs of layers, and measures what that changes to first order.

Inputs are a matrix of units, tokens or groups of a token's columns, which have a scale each. A program reads some
units once and writes them once. Every operation is rounded to the type that torch rounds it to, so that the result
equals :meth:`rco.formats.input_rounding.InputRounding.by_torch` bit for bit (except for the sign of zeros).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rco.formats.launching import launching_at

if TYPE_CHECKING:
    from rco.formats.input_rounding import InputRounding

__all__ = ["change_along", "rounded", "rounded_by_choice", "takes", "takes_rows"]

_ELEMENTS = 2048  # of one program, if a unit is not larger
_WIDEST = 1 << 15
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDE_EXPONENTS = (torch.bfloat16, torch.float32)  # types that hold all powers of two of MX formats

E2M1, E4M3, INT8 = 0, 1, 2
PLAIN, POWERS, STORED = 0, 1, 2  # scales
_ELEMENT_CODES = {"e2m1": E2M1, "e4m3": E4M3, "int8": INT8}


@triton.jit
def _nearest(value, ELEMENT: tl.constexpr):
    """The nearest element of float32 values, ties to even; beyond the range, its end."""
    if ELEMENT == 2:
        step = tl.full(value.shape, 1.0, tl.float32)
        value = tl.minimum(tl.maximum(value, -128.0), 127.0)
    else:
        top: tl.constexpr = 6.0 if ELEMENT == 0 else 448.0
        smallest: tl.constexpr = 127 if ELEMENT == 0 else 121  # biased exponent of the least normal element
        mantissa: tl.constexpr = 1 if ELEMENT == 0 else 3
        value = tl.minimum(tl.maximum(value, -top), top)
        exponent = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.maximum(exponent, smallest) - mantissa
        step = (exponent << 23).to(tl.float32, bitcast=True)
    # Whole numbers of steps: the spacing of float32 near this number is one step.
    shift = 12582912.0 * step
    return (value + shift) - shift


@triton.jit
def _rounded_units(
    x, global_scale, ELEMENT: tl.constexpr, SCALES: tl.constexpr, EPSILON: tl.constexpr
):  # fmt: skip
    """Units (units, members) after rounding, in their own type."""
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)[:, None]
    if SCALES == 1:
        offset: tl.constexpr = 2 if ELEMENT == 0 else 8
        exponent = (((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) & 0xFF) - offset
        exponent = tl.minimum(tl.maximum(exponent, 0), 254)
        bits = tl.where(exponent > 0, exponent << 23, 1 << 22)
        scale = bits.to(tl.float32, bitcast=True).to(x.dtype).to(tl.float32)
        scale = tl.where(largest > 0, scale, 1.0)
    elif SCALES == 2:
        top: tl.constexpr = 6.0 if ELEMENT == 0 else 448.0
        wanted = tl.div_rn(largest, tl.full(largest.shape, top, tl.float32)).to(x.dtype).to(tl.float32)
        scale = _nearest(wanted * global_scale, 1)
        scale = tl.where(scale == 0, 0.125, scale)
        scale = tl.div_rn(scale, tl.zeros(scale.shape, tl.float32) + global_scale)
    else:
        steps: tl.constexpr = 127.5 if ELEMENT == 2 else (6.0 if ELEMENT == 0 else 448.0)
        scale = tl.div_rn(largest, tl.full(largest.shape, steps, tl.float32)).to(x.dtype).to(tl.float32)
        scale = tl.where(scale == 0, EPSILON, scale)
    quotient = tl.div_rn(wide, tl.broadcast_to(scale, wide.shape))
    if SCALES != 2:  # stored scales are float32 numbers, and so are their quotients
        quotient = quotient.to(x.dtype).to(tl.float32)
    return (_nearest(quotient, ELEMENT) * scale).to(x.dtype)


@triton.jit
def _own_units(units, members, UNITS: tl.constexpr, MEMBERS: tl.constexpr):
    """Places (units, members) of a program's inputs, and which of them exist."""
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)[:, None]
    member = tl.arange(0, MEMBERS)[None, :]
    return unit * members + member, (unit < units) & (member < members)


@triton.jit
def _round_tile(
    x, out, units, members, global_scale,
    ELEMENT: tl.constexpr, SCALES: tl.constexpr, EPSILON: tl.constexpr,
    UNITS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    place, live = _own_units(units, members, UNITS, MEMBERS)
    value = tl.load(x + place, mask=live, other=0.0)
    found = _rounded_units(value, global_scale, ELEMENT, SCALES, EPSILON)
    tl.store(out + place, found, mask=live)


@triton.jit
def _round_kernel(
    x, out, units, members, global_scale,
    ELEMENT: tl.constexpr, SCALES: tl.constexpr, EPSILON: tl.constexpr,
    UNITS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    _round_tile(x, out, units, members, global_scale, ELEMENT, SCALES, EPSILON, UNITS, MEMBERS)


@triton.jit
def _round_chosen_kernel(
    choice, numbers, x, out, units, members, global_scale,
    NUMBER: tl.constexpr, ELEMENT: tl.constexpr, SCALES: tl.constexpr, EPSILON: tl.constexpr,
    UNITS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers + tl.load(choice)) == NUMBER:
        _round_tile(x, out, units, members, global_scale, ELEMENT, SCALES, EPSILON, UNITS, MEMBERS)


@triton.jit
def _change_kernel(
    x, gradient, sums, units, members, global_scale,
    ELEMENT: tl.constexpr, SCALES: tl.constexpr, EPSILON: tl.constexpr,
    UNITS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    place, live = _own_units(units, members, UNITS, MEMBERS)
    value = tl.load(x + place, mask=live, other=0.0)
    slope = tl.load(gradient + place, mask=live, other=0.0).to(tl.float32)
    found = _rounded_units(value, global_scale, ELEMENT, SCALES, EPSILON)
    change = found.to(tl.float32) - value.to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(change * slope, axis=1), axis=0))


def takes(rule: InputRounding, x: Tensor) -> bool:
    """Whether the kernel rounds these inputs."""
    return x.numel() > 0 and takes_rows(rule, x.shape[-1], x.dtype)


def takes_rows(rule: InputRounding, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernel rounds inputs of so many columns in a type."""
    whole = rule.group is None or columns % rule.group == 0
    return dtype in (_WIDE_EXPONENTS if rule.powers else _DTYPES) and whole and columns <= _WIDEST


@cache
class _Launch:
    """Arguments of a launch for a rule and inputs of a size, made once: most launches are short."""

    def __init__(self, rule: InputRounding, columns: int, elements: int, dtype: torch.dtype) -> None:
        self.members = rule.group or columns
        self.units = elements // self.members
        wide = triton.next_power_of_2(self.members)
        at_once = max(1, _ELEMENTS // wide)
        self.programs = triton.cdiv(self.units, at_once)
        self.global_scale = 1.0 if rule.global_scale is None else rule.global_scale
        self.constants = {
            "ELEMENT": _ELEMENT_CODES[rule.element],
            "SCALES": POWERS if rule.powers else PLAIN if rule.global_scale is None else STORED,
            "EPSILON": torch.finfo(dtype).eps,
            "UNITS": at_once,
            "MEMBERS": wide,
            "num_warps": min(16, max(4, wide * at_once // 512)),
            # A product that is rounded before the next operation must not be fused with it.
            "enable_fp_fusion": False,
        }


def rounded(rule: InputRounding, x: Tensor) -> Tensor:
    """The rounded inputs."""
    x = x.contiguous()
    out, launch = torch.empty_like(x), _Launch(rule, x.shape[-1], x.numel(), x.dtype)
    with launching_at(x):
        _round_kernel[(launch.programs,)](
            x, out, launch.units, launch.members, launch.global_scale, **launch.constants
        )
    return out


def rounded_by_choice(rules: Sequence[InputRounding], numbers: Tensor, choice: Tensor, x: Tensor) -> Tensor:
    """Inputs as the option rounds them whose index is on the device.

    Args:
        rules: Different roundings.
        numbers: (K,) on the device, the index of every option's rounding; -1 for none.
        choice: () index of the option, read when the kernels run.
        x: Inputs.
    """
    x = x.contiguous()
    out = x.clone()
    with launching_at(x):
        for number, rule in enumerate(rules):
            launch = _Launch(rule, x.shape[-1], x.numel(), x.dtype)
            _round_chosen_kernel[(launch.programs,)](
                choice, numbers, x, out, launch.units, launch.members, launch.global_scale,
                NUMBER=number, **launch.constants,
            )  # fmt: skip
    return out


def change_along(rule: InputRounding, x: Tensor, gradient: Tensor) -> Tensor:
    """``<gradient, rule(x) - x>``, float64 (): summed in float32 within a program, in float64 over programs."""
    x, gradient = x.contiguous(), gradient.contiguous()
    launch = _Launch(rule, x.shape[-1], x.numel(), x.dtype)
    sums = torch.empty(launch.programs, dtype=torch.float32, device=x.device)
    with launching_at(x):
        _change_kernel[(launch.programs,)](
            x, gradient, sums, launch.units, launch.members, launch.global_scale, **launch.constants
        )
    return sums.sum(dtype=torch.float64)
