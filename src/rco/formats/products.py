"""Inner products of a gradient with every option of a layer.

Coded weights and dense matrices take one fused pass over the gradient. Any other format computes its inner product
itself, one option after the other, so that at most one of them is dense at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rco.formats.base import Stored
from rco.formats.coded import CodedWeight, decode_rows, on_triton_path
from rco.formats.integer_kernels_cpu import on_compiled_path, products_compiled
from rco.formats.removed import REMOVED

__all__ = ["Option", "OptionProducts", "inner_products", "unwrapped"]

Option = Stored | Tensor
"""A stored weight, or a dense matrix: the original weight."""

_CHUNK_ELEMENTS = 1 << 22


def unwrapped(option: Option) -> Option:
    """The option, or the dense matrix itself if that is how it is stored."""
    dense = option.format.dense(option) if isinstance(option, Stored) else None
    return option if dense is None else dense


def inner_products(gradient: Tensor, options: Sequence[Option | None], segments: int = 1) -> Tensor:
    """``<gradient, W_k>`` for every option of one layer.

    Args:
        gradient: Gradient of the loss with respect to the layer's effective weight, (out, in).
        options: Stored weights, dense matrices, or None for an option whose weight is zero.
        segments: Number of matrices of equal height that the rows consist of (experts); each has its own
            products.

    Returns:
        (K,) one number per option on the gradient's device, in float64 (float32 where the device has no float64);
        (K, segments) if there are several segments.
    """
    return OptionProducts(options, segments)(gradient)


class OptionProducts:
    """The products of :func:`inner_products` for fixed options and many gradients.

    Everything that depends on the options alone is prepared once: on a GPU most layers' products take less time
    than inspecting their options.

    Args:
        options: As for :func:`inner_products`.
        segments: Likewise.
    """

    def __init__(self, options: Sequence[Option | None], segments: int = 1) -> None:
        self._segments = segments
        self._fused: list[CodedWeight | Tensor | None] = []
        self._others: dict[int, Stored] = {}
        for index, option in enumerate(options):
            plain = None if option is None else unwrapped(option)
            fused = isinstance(plain, CodedWeight | Tensor)
            self._fused.append(plain if fused else None)  # type: ignore[arg-type]
            if isinstance(plain, Stored) and not fused and plain.format != REMOVED:
                self._others[index] = plain
        self._kernels: dict[Any, Callable[[Tensor], Tensor] | None] = {}  # by the kind of gradient

    def __call__(self, gradient: Tensor) -> Tensor:
        """(K,) or (K, segments), see :func:`inner_products`."""
        kind = (gradient.shape, gradient.device, gradient.dtype)
        if kind not in self._kernels:
            self._check(gradient)
            self._kernels[kind] = self._kernel(gradient)
        kernel = self._kernels[kind]
        gradient = (gradient.detach() if gradient.requires_grad else gradient).contiguous()
        if kernel is not None:
            found = kernel(gradient)
        else:
            products = _products_compiled if on_compiled_path(gradient) else _products_torch
            found = products(gradient, self._fused, self._segments)
            found = found[:, 0] if self._segments == 1 else found
        for index, option in self._others.items():
            each = option.format.inner_products(option, gradient, self._segments)
            found[index] = each[0] if self._segments == 1 else each
        return found

    def _check(self, gradient: Tensor) -> None:
        if gradient.shape[0] % self._segments:
            raise ValueError(
                f"{gradient.shape[0]} rows cannot be cut into {self._segments} segments of equal height."
            )
        for index, fused in enumerate(self._fused):
            option = self._others.get(index, fused)
            if option is not None and (
                tuple(option.shape) != tuple(gradient.shape) or option.device != gradient.device
            ):
                raise ValueError(
                    f"Option {index} is {tuple(option.shape)} on {option.device}, "
                    f"the gradient {tuple(gradient.shape)} on {gradient.device}; they must agree."
                )

    def _kernel(self, gradient: Tensor) -> Callable[[Tensor], Tensor] | None:
        if not on_triton_path(gradient):
            return None
        from rco.formats import integer_kernels_gpu

        rows, cols = gradient.shape
        return integer_kernels_gpu.multiplier(
            self._fused, self._segments, gradient.dtype, (rows, cols), gradient.device
        )


def _products_torch(
    gradient: Tensor, options: Sequence[CodedWeight | Tensor | None], segments: int
) -> Tensor:
    rows, cols = gradient.shape
    exact = torch.float32 if gradient.device.type == "mps" else torch.float64
    total = torch.zeros(len(options), rows, dtype=exact, device=gradient.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, cols))
    for start in range(0, rows, step):
        part = gradient[start : start + step]
        for index, option in enumerate(options):
            if option is None:
                continue
            if isinstance(option, CodedWeight):
                value = decode_rows(option, start, start + step)
            else:
                value = option.detach()[start : start + step]
            work = torch.promote_types(torch.promote_types(part.dtype, value.dtype), torch.float32)
            total[index, start : start + step] = torch.linalg.vecdot(part.to(work), value.to(work))
    return total.view(len(options), segments, -1).sum(dim=2)


def _products_compiled(
    gradient: Tensor, options: Sequence[CodedWeight | Tensor | None], segments: int
) -> Tensor:
    grids = [option.operands if isinstance(option, CodedWeight) else None for option in options]
    total = products_compiled(gradient, grids, segments)
    dense = [index for index, option in enumerate(options) if isinstance(option, Tensor)]
    if dense:
        total[dense] = _products_torch(gradient, [options[index] for index in dense], segments)
    return total
