"""Device of Triton's kernel launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

__all__ = ["launching_at"]

_HERE = nullcontext()


def launching_at(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which kernels are launched on the GPU that holds a tensor.

    By default Triton launches on the current GPU, wherever the arguments are: all layers of a model that is spread
    over several GPUs would be decoded on the first, and the GPU that needs the result would not wait for it.
    """
    return torch.cuda.device(tensor.device) if _several_gpus() else _HERE


@cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1
