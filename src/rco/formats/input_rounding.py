"""Rounding of a layer's inputs as engines with low-precision products apply it, and its effect to first order.

A token, or every group of its columns, has a scale that follows from its largest input. Arithmetic is that of
compressed-tensors, bit for bit; on GPUs one kernel does it (:mod:`rco.formats.input_kernels_triton`), and on CPUs a
compiled loop rounds to E2M1 (:mod:`rco.formats.input_kernels_cpu`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rco.formats.base import ActivationRule
from rco.formats.coded import on_triton_path
from rco.formats.elements import TOP, Element, levels_of, nearest_codes, power_of_two
from rco.formats.integer_kernels_cpu import on_compiled_path, over_rows

__all__ = ["InputRounding", "change_along"]

_INT8_STEPS = 127.5  # steps of the integer scale from zero to the largest input
_MX_OFFSET: dict[Element, int] = {"e2m1": 2, "e4m3": 8}  # exponent of the largest element
_NO_SCALE = 0.125  # in place of an E4M3 scale that is zero
_COMPILED = (torch.float32, torch.bfloat16)  # types in which the loop in float32 gives the same bits


@dataclass(frozen=True)
class InputRounding:
    """Elements with a scale per group of columns.

    Args:
        element: What inputs are rounded to.
        group: Columns that share a scale; None: all columns of a token.
        powers: Scales are powers of two, as in the MX formats.
        global_scale: The scale of the whole tensor by which groups' scales are stored in E4M3, as in NVFP4; None:
            scales are numbers of the inputs' type.
    """

    element: Element
    group: int | None = None
    powers: bool = False
    global_scale: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded inputs, in their own type."""
        if on_triton_path(x):
            from rco.formats import input_kernels_triton

            if input_kernels_triton.takes(self, x):
                return input_kernels_triton.rounded(self, x)
        return self.by_torch(x)

    def by_torch(self, x: Tensor) -> Tensor:
        """The same with torch operations."""
        columns = x.shape[-1]
        if self.group is None:
            return self._in_groups(x)
        # The last group may be shorter.
        padded = torch.nn.functional.pad(x, (0, -columns % self.group)) if columns % self.group else x
        groups = padded.reshape(*x.shape[:-1], -1, self.group)
        return self._in_groups(groups).flatten(-2)[..., :columns]

    def _in_groups(self, x: Tensor) -> Tensor:
        scale = self._scales(x.abs().amax(dim=-1, keepdim=True))
        if self.element == "e2m1" and x.dtype in _COMPILED and on_compiled_path(x):
            return _compiled(x, scale)
        return (_rounded(x / scale, self.element).to(scale.dtype) * scale).to(x.dtype)

    def _scales(self, largest: Tensor) -> Tensor:
        """Scales of groups whose largest input is given."""
        if self.powers:
            wide = largest.float()
            # Half of E2M1's mantissa step is added, so that the exponent is that of a neighbouring power.
            exponent = (((wide.view(torch.int32) + (1 << 21)) >> 23) & 0xFF) - _MX_OFFSET[self.element]
            exponent = torch.where(wide > 0, exponent.clamp(0, 254), torch.zeros_like(exponent))
            return power_of_two(exponent).to(largest.dtype)
        if self.global_scale is not None:
            wanted = (largest / TOP[self.element]).float() * self.global_scale
            return _never_zero(_rounded(wanted, "e4m3"), _NO_SCALE) / self.global_scale
        steps = _INT8_STEPS if self.element == "int8" else TOP[self.element]
        return _never_zero(largest / steps, torch.finfo(largest.dtype).eps)


def change_along(rule: ActivationRule, x: Tensor, gradient: Tensor) -> Tensor:
    """``<gradient, rule(x) - x>``, in float64: the change of a loss by rounding inputs, to first order.

    Args:
        rule: The rounding.
        x: Inputs (..., columns).
        gradient: Gradient of the loss with respect to them.
    """
    if isinstance(rule, InputRounding) and on_triton_path(x):
        from rco.formats import input_kernels_triton

        if input_kernels_triton.takes(rule, x):
            return input_kernels_triton.change_along(rule, x, gradient)
    work = torch.promote_types(x.dtype, torch.float32)
    change = rule(x).to(work) - x.to(work)
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    rows: Tensor = torch.linalg.vecdot(change, gradient.reshape(x.shape).to(work))
    return rows.sum(dtype=exact)


def _rounded(values: Tensor, element: Element) -> Tensor:
    """The nearest elements as numbers of the same type; beyond the range, its end."""
    if element == "e4m3":
        return values.clamp(-TOP[element], TOP[element]).to(torch.float8_e4m3fn).to(values.dtype)
    if element == "int8":
        return torch.round(values.clamp(-128, 127))
    return levels_of(element, values.device)[nearest_codes(values, element).int()].to(values.dtype)


def _compiled(x: Tensor, scale: Tensor) -> Tensor:
    """Inputs (..., members) rounded to E2M1 under scales (..., 1)."""
    from rco.formats.input_kernels_cpu import round_e2m1

    members = x.shape[-1]
    values = x.detach().float().reshape(-1, members).contiguous()
    out = torch.empty_like(values)
    source, scales, target = (t.numpy() for t in (values, scale.detach().float().flatten(), out))
    over_rows(len(values), members, lambda a, b: round_e2m1(source[a:b], scales[a:b], target[a:b]))
    return out.view(x.shape).to(x.dtype)


def _never_zero(scale: Tensor, least: float) -> Tensor:
    return torch.where(scale == 0, torch.full_like(scale, least), scale)
