"""Where Triton launches its kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

__all__ = ["launching_at"]

_HERE = nullcontext()


def launching_at(tensor: Tensor) -> AbstractContextManager[object]:
    """Inside, kernels are launched on the GPU that holds a tensor.

    Triton by itself launches on the current GPU, wherever the arguments are: the layers of a model that is spread
    over several would be decoded by the first of them, while the one that needs the result does not wait for it.
    """
    return torch.cuda.device(tensor.device) if _several_gpus() else _HERE


@cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1
