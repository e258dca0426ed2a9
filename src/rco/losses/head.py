"""The output layer and its products, with logits in a wider type than the layer's.

Half-precision inputs are multiplied exactly and accumulated in float32: logits are never rounded to half
precision, which would add noise of the size of a good quantization's divergence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "LOGITS_BYTES",
    "Head",
    "accumulate_outer",
    "chunk_length",
    "describe",
    "multiply",
    "project",
    "sample_tokens",
]

LOGITS_BYTES = 64 * 2**20  # of one chunk's logits (twice that on a GPU); a pass holds up to four such buffers
_SLICE_ELEMENTS = 2**21  # of a half-precision output layer that are widened at a time
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Head:
    """The output layer: ``logits = cap(scale * (hidden @ weight.T + bias))``.

    Args:
        weight: (vocabulary, hidden).
        bias: (vocabulary,) or None.
        softcap: Bound of the logits, ``cap(z) = softcap * tanh(z / softcap)`` (as in Gemma 2), or None.
        scale: Factor on the logits (as in Cohere, or one over Granite's divisor).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.is_floating_point():
            raise ValueError(
                f"The head's weight is a (vocabulary, hidden) matrix of floats, got {describe(self.weight)}."
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"The head's bias must have shape ({self.weight.shape[0]},), got {describe(self.bias)}."
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, or None for no cap; got {self.softcap}.")

    @property
    def vocabulary(self) -> int:
        """Number of tokens the head scores."""
        return self.weight.shape[0]

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient of the head itself is required."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    @torch.no_grad()
    def probabilities(self, hidden: Tensor) -> Tensor:
        """(tokens, vocabulary) in float32, for at most :func:`chunk_length` tokens at a time."""
        logits = hidden.float() @ self.weight.float().T
        if self.bias is not None:
            logits += self.bias
        logits *= self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return torch.softmax(logits, dim=-1)


def chunk_length(vocabulary: int, dtype: torch.dtype = torch.float32, allowance: int = LOGITS_BYTES) -> int:
    """Tokens per chunk such that one chunk's logits take at most ``allowance`` bytes (at least one token)."""
    return max(1, allowance // (vocabulary * dtype.itemsize))


def sample_tokens(hidden: Tensor, head: Head, generator: torch.Generator) -> Tensor:
    """(tokens,) one token per hidden state (tokens, hidden), drawn from the model's own distribution."""
    parts = torch.split(hidden, chunk_length(head.vocabulary))
    drawn = [torch.multinomial(head.probabilities(part), 1, generator=generator)[:, 0] for part in parts]
    return torch.cat(drawn)


def _native_mixed(a: Tensor, b: Tensor) -> bool:
    """Whether the device multiplies these half-precision tensors into float32 natively."""
    return a.is_cuda and a.dtype == b.dtype and a.dtype in _HALF


def _slices(weight: Tensor) -> Iterator[slice]:
    step = max(1, _SLICE_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        yield slice(start, min(start + step, weight.shape[0]))


def project(hidden: Tensor, head: Head, out: Tensor) -> None:
    """Logits of a chunk in ``out``'s dtype."""
    weight = head.weight.detach()
    if _native_mixed(hidden, weight) and out.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    elif weight.dtype == out.dtype:
        torch.mm(hidden.to(out.dtype), weight.t(), out=out)
    else:  # widened slice by slice, so that no wide copy of the whole layer exists
        hidden = hidden.to(out.dtype)
        for part in _slices(weight):
            torch.mm(hidden, weight[part].to(out.dtype).t(), out=out[:, part])
    if head.bias is not None:
        out.add_(head.bias.detach())
    if head.scale != 1.0:
        out.mul_(head.scale)
    if head.softcap is not None:
        out.div_(head.softcap).tanh_().mul_(head.softcap)


def multiply(slope: Tensor, weight: Tensor) -> Tensor:
    """``slope @ weight`` in the slope's dtype."""
    if weight.dtype == slope.dtype:
        return torch.mm(slope, weight)
    if weight.is_cuda and weight.dtype in _HALF and slope.dtype == torch.float32:
        return torch.mm(slope.to(weight.dtype), weight, out_dtype=torch.float32)
    product = slope.new_zeros(slope.shape[0], weight.shape[1])
    for part in _slices(weight):
        product.addmm_(slope[:, part], weight[part].to(slope.dtype))
    return product


def accumulate_outer(total: Tensor, slope: Tensor, rows: Tensor, factor: float) -> None:
    """``total += factor * slope.T @ rows`` without a second tensor of the total's size."""
    for part in _slices(total):
        if rows.is_cuda and rows.dtype in _HALF and total.dtype == torch.float32:
            product = torch.mm(slope[:, part].t().to(rows.dtype), rows, out_dtype=torch.float32)
            total[part].add_(product, alpha=factor)
        else:
            total[part].addmm_(slope[:, part].t(), rows.to(total.dtype), alpha=factor)


def describe(tensor: Tensor) -> str:
    """Type and shape, for messages."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
