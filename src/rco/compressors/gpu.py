"""Which GPU kernel serves a packed weight: the one for regular bfloat16 matrices, or the general one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rco.compressors import triton_bfloat16, triton_kernels
from rco.compressors.packing import PackedWeight
from rco.compressors.triton_kernels import DENSE, Operand

__all__ = ["decode", "inner_products", "serves"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Option = PackedWeight | Tensor | None


def serves(tensor: Tensor, options: Sequence[Option]) -> bool:
    """Whether the kernels take this gradient (or decoded matrix) and these options."""
    if tensor.dtype not in _DTYPES or not tensor.numel():
        return False
    for option in options:
        if isinstance(option, PackedWeight):
            width = triton_kernels.segment_width(option.group_size, option.shape[1])
            if option.scales.dtype not in _DTYPES or not width:
                return False
        elif option is not None and (option.dtype not in _DTYPES or not option.is_contiguous()):
            return False
    return True


def decode(weight: PackedWeight, out: Tensor) -> None:
    """Write the decoded matrix to ``out``."""
    operand = _operand(weight)
    regular = triton_bfloat16.decodes(out, operand, weight.group_size)
    (triton_bfloat16 if regular else triton_kernels).decode(operand, weight.group_size, out)


def inner_products(gradient: Tensor, options: Sequence[Option], parts: int) -> Tensor:
    """(K, parts) products of each part of the rows with every option, float64; zero for an option that is None."""
    groups = [option.group_size for option in options if isinstance(option, PackedWeight)]
    by_group: dict[int, list[tuple[int, Operand]]] = {}
    for index, option in enumerate(options):
        if isinstance(option, PackedWeight):
            by_group.setdefault(option.group_size, []).append((index, _operand(option)))
        elif option is not None:
            # A dense option has no groups: it goes along with the first packed one.
            group = groups[0] if groups else gradient.shape[1]
            dense = option.detach()
            by_group.setdefault(group, []).append((index, Operand(dense, dense, None, DENSE)))
    total: Tensor | None = None
    for group, members in by_group.items():
        operands = [operand for _, operand in members]
        regular = triton_bfloat16.multiplies(gradient, operands, group)
        kernels = triton_bfloat16 if regular else triton_kernels
        found: Tensor = kernels.inner_products(gradient, operands, group, parts)
        if len(members) == len(options):
            return found
        if total is None:
            total = found.new_zeros(len(options), parts)
        for row, (index, _) in enumerate(members):
            total[index] = found[row]
    if total is None:
        return torch.zeros(len(options), parts, dtype=torch.float64, device=gradient.device)
    return total


def _operand(weight: PackedWeight) -> Operand:
    return Operand(weight.packed, weight.scales, weight.zeros, weight.bits)
