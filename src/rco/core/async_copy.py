"""Asynchronous host-to-device copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["send", "send_together"]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, copied in stream order without making the host wait.

    Copies to a GPU go through pinned memory; from pageable memory the driver may wait for all launched work.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Torch reuses pinned memory only after the copy is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def send_together(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Several arrays on a device, in their shapes, by one copy."""
    together = send(torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])), device)
    parts = torch.split(together, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
