"""Choice of the GPU kernel for a packed weight: the one for regular bfloat16 matrices, or the general one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rco.core.async_copy import send
from rco.formats import integer_kernels_bfloat16, integer_kernels_triton
from rco.formats.coded import CodedWeight
from rco.formats.integer_kernels_triton import DENSE, Operand

__all__ = ["chosen_decoder", "decoder", "multiplier"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Option = CodedWeight | Tensor | None


def _takes(dtype: torch.dtype, options: Sequence[Option], shape: tuple[int, int]) -> bool:
    """Whether the kernels support gradients (or decoded matrices) of this type and shape and these options."""
    if dtype not in _DTYPES or not shape[0] * shape[1]:
        return False
    for option in options:
        if isinstance(option, CodedWeight):
            width = integer_kernels_triton.segment_width(option.group_size, option.shape[1])
            if option.scales.dtype not in _DTYPES or not width:
                return False
        elif option is not None and (option.dtype not in _DTYPES or not option.is_contiguous()):
            return False
    return True


def decoder(weight: CodedWeight, dtype: torch.dtype) -> Callable[[Tensor], None] | None:
    """Kernel that decodes a weight to contiguous matrices of a type; None if no kernel supports it.

    All preparation happens here, once: most launches take the GPU less time than the host needs to inspect a
    weight.
    """
    if not _takes(dtype, [weight], weight.shape):
        return None
    operand, group, shape = _operand(weight), weight.group_size, weight.shape
    general = integer_kernels_triton.decoder(operand, group, shape)
    if not integer_kernels_bfloat16.decodes(dtype, [operand], group, shape):
        return general
    regular = integer_kernels_bfloat16.decoder(operand, group, shape)

    def decode(out: Tensor) -> None:
        (general if out.data_ptr() % 16 else regular)(out)

    return decode


def chosen_decoder(
    options: Sequence[CodedWeight | Tensor],
    dtype: torch.dtype,
    shape: tuple[int, int],
    parts: int = 1,
) -> Callable[[Tensor, Tensor], None] | None:
    """Kernel that decodes the option whose index is on the device; None if no kernel supports these options.

    The index is read when the kernel runs, so a recorded launch can be replayed with another choice. There is one
    index for each of ``parts`` of the rows; several only for regular bfloat16 matrices of one group size.
    """
    groups = {option.group_size for option in options if isinstance(option, CodedWeight)}
    if not groups or not _takes(dtype, options, shape):
        return None
    # A dense option has no groups: it goes along with the longest ones, which take the fewest segments.
    listed = [
        (_operand(o), o.group_size) if isinstance(o, CodedWeight) else (_dense_operand(o), max(groups))
        for o in options
    ]
    operands, group = [operand for operand, _ in listed], max(groups)
    if (
        len(groups) == 1
        and integer_kernels_bfloat16.decodes(dtype, operands, group, shape)
        and integer_kernels_bfloat16.decodes_parts(shape, parts)
    ):
        return integer_kernels_bfloat16.chosen_decoder(operands, group, shape, parts)
    return integer_kernels_triton.chosen_decoder(listed, shape) if parts == 1 else None


def multiplier(
    options: Sequence[Option], parts: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> Callable[[Tensor], Tensor] | None:
    """Kernel of ``<G, W_k>`` for all options and contiguous gradients G; None if no kernel supports them.

    The products are in float64: (K,), or (K, parts) with one per part of the rows; zero for options that are None.
    """
    if not _takes(dtype, options, shape):
        return None
    groups = [option.group_size for option in options if isinstance(option, CodedWeight)]
    by_group: dict[int, list[tuple[int, Operand]]] = {}
    for index, option in enumerate(options):
        if isinstance(option, CodedWeight):
            by_group.setdefault(option.group_size, []).append((index, _operand(option)))
        elif option is not None:
            # A dense option has no groups: it goes along with the longest ones, which take the fewest segments.
            group = max(groups) if groups else shape[1]
            by_group.setdefault(group, []).append((index, _dense_operand(option)))
    launches, places = [], []
    for group, members in by_group.items():
        operands = [operand for _, operand in members]
        launch = integer_kernels_triton.multiplier(operands, group, shape, parts, device)
        if integer_kernels_bfloat16.multiplies(dtype, operands, group, shape):
            launch = _aligned(
                integer_kernels_bfloat16.multiplier(operands, group, shape, parts, device), launch
            )
        launches.append(launch)
        places += [index for index, _ in members]
    if len(launches) == 1 and places == list(range(len(options))):
        return launches[0]
    where = send(torch.tensor(places, dtype=torch.int64), device)
    size = (len(options),) if parts == 1 else (len(options), parts)

    def multiply(gradient: Tensor) -> Tensor:
        total = torch.zeros(size, dtype=torch.float64, device=device)
        if launches:
            total.index_copy_(0, where, torch.cat([launch(gradient) for launch in launches]))
        return total

    return multiply


def _aligned(
    regular: Callable[[Tensor], Tensor], general: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda gradient: (general if gradient.data_ptr() % 16 else regular)(gradient)


def _operand(weight: CodedWeight) -> Operand:
    return Operand(
        weight.packed,
        weight.scales,
        weight.zeros,
        weight.bits,
        weight.minima,
        weight.table,
        weight.rounded_to == torch.bfloat16,
        weight.element,
    )


def _dense_operand(weight: Tensor) -> Operand:
    dense = weight.detach()
    return Operand(dense, dense, None, DENSE)
