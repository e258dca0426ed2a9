"""Computation in another type than the checkpoint's, with an exact way back.

A bfloat16 checkpoint on a CPU is computed in float32: faster on most machines, and exact. Widening and narrowing
again restores every bit, so the context leaves the model unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["compute_dtype", "computing_in", "default_compute_dtype"]


def default_compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """float32 on a CPU, the checkpoint's own type elsewhere."""
    return torch.float32 if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) else dtype


def compute_dtype(name: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type of that name; the default for ``auto``.

    Raises:
        ValueError: It is narrower than the checkpoint's.
    """
    if name == "auto":
        return default_compute_dtype(device, dtype)
    found: torch.dtype = getattr(torch, name)
    if torch.finfo(found).bits < torch.finfo(dtype).bits:
        raise ValueError(
            f"The checkpoint is {str(dtype).removeprefix('torch.')}, and computing in {name} would change its "
            f"weights: load it as {name} (`dtype='{name}'`), or leave out `compute`."
        )
    return found


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Floating-point parameters and buffers narrower than ``dtype`` are widened to it inside the context."""
    seen: set[int] = set()
    widened: list[tuple[torch.Tensor, torch.dtype]] = []
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in seen or not tensor.is_floating_point():
            continue
        seen.add(id(tensor))
        if torch.finfo(tensor.dtype).bits < torch.finfo(dtype).bits:
            widened.append((tensor, tensor.dtype))
    try:
        for tensor, _ in widened:
            tensor.data = tensor.data.to(dtype)
        yield model
    finally:
        for tensor, before in widened:
            tensor.data = tensor.data.to(before)
