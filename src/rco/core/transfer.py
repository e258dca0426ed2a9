"""Numbers on their way to a device that is at work."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["send"]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, copied there in its turn: the host waits neither for it nor for what is before it.

    To a GPU it goes from pinned memory. From any other the driver may first wait for everything that was launched.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Torch reuses pinned memory, and not before the copy is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
