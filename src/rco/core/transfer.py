"""Numbers on their way to a device that is at work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["send", "send_together"]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, copied there in its turn: the host waits neither for it nor for what is before it.

    To a GPU it goes from pinned memory. From any other the driver may first wait for everything that was launched.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Torch reuses pinned memory, and not before the copy is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def send_together(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Several arrays on a device, in their shapes, by one copy for all."""
    together = send(torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])), device)
    parts = torch.split(together, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
