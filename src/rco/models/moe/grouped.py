"""Multiplications of runs of rows, each run with the matrix of its own expert.

Torch's grouped kernel runs natively in bfloat16 on GPUs of compute capability 9 and 10. For other types and GPUs it
copies the ends of the runs to the host and loops over the experts: the host waits for the device, and no such call
can be recorded as a CUDA graph. There, runs are cut into blocks of equal length and multiplied in batches instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["grouped_linear", "grouped_outer"]

_KERNEL: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NATIVE_CAPABILITIES = (9, 10)
_SHORTEST_BLOCK = 16  # rows
_BATCH_BYTES = 256 * 2**20  # of matrices copied, or of products formed, for one batch of blocks


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(pairs, out) consecutive runs of rows, each multiplied with its own matrix; differentiable in both.

    Args:
        rows: (pairs, in), sorted by expert.
        weight: (experts, in, out).
        ends: (experts,) int32: end of each expert's run; the last is the number of pairs.
    """
    rows = rows.to(weight.dtype)
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        product: Tensor = _GroupedLinear.apply(rows, weight, ends)  # type: ignore[no-untyped-call]
        return product
    if _has_kernel(rows, weight):
        result: Tensor = _KERNEL(rows, weight, offs=ends)
        return result
    if rows.is_cuda:
        return _blocked_linear(rows, weight, ends)
    # Types and layouts that the kernel does not support (float64 in tests, odd widths).
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
        start = end
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return grouped_linear(rows, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient, of_rows, of_weight = gradient.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            of_rows = grouped_linear(gradient, weight.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            # In the memory order of parameters (experts, out, in), which ``weight`` is a view of.
            idle = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
            outer = grouped_outer(gradient, rows, ends).masked_fill_(idle[:, None, None], 0.0)
            of_weight = outer.to(weight.dtype).transpose(1, 2)
        return of_rows, of_weight, None


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``left.T @ right`` of each run of rows, (experts, left width, right width): gradients of experts' weights.

    Runs without rows are left undefined on devices whose kernel does not touch them.
    """
    if _has_kernel(left, right):
        result: Tensor = _KERNEL(left.t(), right, offs=ends)
        return result
    if left.is_cuda:
        return _blocked_outer(left, right, ends)
    out = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        start = end
    return out


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    if _KERNEL is None or rows.dtype not in _KERNEL_DTYPES or not _aligned(rows, other):
        return False
    if not rows.is_cuda:
        return True
    capable = torch.cuda.get_device_capability(rows.device)[0] in _NATIVE_CAPABILITIES
    return rows.dtype == torch.bfloat16 and capable


def _aligned(rows: Tensor, weight: Tensor) -> bool:
    """Whether strides (and addresses, for some versions) are multiples of 16 bytes, as the kernel requires."""
    unit = 16 // weight.element_size()
    strides = [s for s in (*rows.stride(), *weight.stride()) if s != 1]
    if rows.shape[0] == 0 or any(stride % unit for stride in strides):
        return False
    return rows.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0


# --- Blocks of equal length ---


@dataclass(frozen=True)
class _Blocks:
    """Runs of rows cut into blocks of ``size`` rows, as many as any division of the rows among experts needs.

    A block holds rows of one expert; the last one of a run is padded, and surplus blocks are empty.

    Attributes:
        experts: (blocks,) expert of each block.
        rows: (blocks, size) row at each position; an arbitrary row at empty positions.
        empty: (blocks, size) True at positions without a row.
        places: (pairs,) position of each row, counted through all blocks.
        counts: (experts,) blocks of each expert, without surplus ones.
    """

    experts: Tensor
    rows: Tensor
    empty: Tensor
    places: Tensor
    counts: Tensor

    @classmethod
    def cut(cls, ends: Tensor, pairs: int) -> _Blocks:
        """Blocks about as long as the mean run, so that there are at most about twice as many as experts."""
        device, experts = ends.device, len(ends)
        size = max(_SHORTEST_BLOCK, -(-pairs // experts))
        number = (pairs + experts * (size - 1)) // size
        ends = ends.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        counts = (ends - starts + size - 1).div(size, rounding_mode="floor")
        last = counts.cumsum(0)  # block after the last one of each expert
        first = last - counts
        blocks = torch.arange(number, device=device)
        # Surplus blocks count as the last expert's, beyond the end of its run.
        owner = torch.searchsorted(last, blocks, right=True).clamp_(max=experts - 1)
        begin = starts[owner] + (blocks - first[owner]) * size
        rows = begin.unsqueeze(1) + torch.arange(size, device=device)
        empty = rows >= ends[owner].unsqueeze(1)
        positions = torch.arange(pairs, device=device)
        own = torch.searchsorted(ends, positions, right=True)
        places = first[own] * size + positions - starts[own]
        return cls(owner, rows.clamp_(max=pairs - 1), empty, places, counts)

    def gather(self, rows: Tensor) -> Tensor:
        """(blocks, size, width) of (pairs, width)."""
        return rows.index_select(0, self.rows.flatten()).view(*self.rows.shape, -1)

    def gather_filled(self, rows: Tensor) -> Tensor:
        """The same, with zeros at empty positions."""
        return self.gather(rows).masked_fill_(self.empty.unsqueeze(-1), 0.0)


def _blocked_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    width = weight.shape[2]
    if len(rows) == 0:
        return rows.new_zeros(0, width)
    blocks = _Blocks.cut(ends, len(rows))
    placed = blocks.gather(rows)
    out = rows.new_empty(*placed.shape[:2], width)
    # Matrices are copied in their memory order: copying a transposed view would transpose them in memory.
    turned = weight.stride(1) == 1 and weight.stride(2) != 1
    stored = weight.transpose(1, 2) if turned else weight
    step = max(1, _BATCH_BYTES // (stored[0].numel() * stored.element_size()))
    for start in range(0, len(out), step):
        part = slice(start, start + step)
        own = stored.index_select(0, blocks.experts[part])
        torch.bmm(placed[part], own.transpose(1, 2) if turned else own, out=out[part])
    return out.view(-1, width).index_select(0, blocks.places)


def _blocked_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    rows, cols = left.shape[1], right.shape[1]
    if len(left) == 0:
        return left.new_zeros(len(ends), rows, cols)
    blocks = _Blocks.cut(ends, len(left))
    mine, others = blocks.gather_filled(left), blocks.gather_filled(right)
    out = left.new_empty(len(ends), rows, cols)
    step = max(1, _BATCH_BYTES // (len(mine) * cols * max(4, left.element_size())))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        products = _wide_products(mine[:, :, part].transpose(1, 2), others)
        # The blocks of an expert follow one another: they are summed in their order, the same every time.
        out[:, part] = torch.segment_reduce(products, "sum", lengths=blocks.counts, axis=0, unsafe=True)
    return out


def _wide_products(left: Tensor, right: Tensor) -> Tensor:
    """Batched products that are not rounded to half precision, since sums of them follow."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(left, right, out_dtype=torch.float32)
    wide = torch.promote_types(left.dtype, torch.float32)
    return torch.bmm(left.to(wide), right.to(wide))
