"""A sample's forward and backward pass, recorded as a CUDA graph and replayed with other inputs.

A sample launches thousands of kernels. If layers are small, launching them one by one takes longer than running
them; a graph is launched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rco.models.device_map import on_one_gpu

__all__ = ["Recording", "captured"]

T = TypeVar("T")


class NumbersOnDevice(TorchFunctionMode):
    """Make ``torch.tensor(number, device=...)`` fill on the device instead of copying from the host.

    A copy from the host cannot be recorded unless its source is pinned. Some models build their masks with one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or ``torch.full`` instead of ``torch.tensor``."""
        given = dict(kwargs or {})
        number = bool(args) and isinstance(args[0], (bool, int, float))
        if func is torch.tensor and number and given.get("device") is not None:
            return torch.full((), args[0], **given)
        return func(*args, **given)


def captured(work: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """A replayable graph of some work, and its outputs, which every replay overwrites.

    Raises:
        RuntimeError: The work cannot be recorded, for example because it contains a synchronous copy.
        torch.OutOfMemoryError: There is not enough memory to record it.
    """
    work()  # once without recording, for compilation and permanent allocations
    graph, one = torch.cuda.CUDAGraph(), torch.ones(1, device=device)
    # The outer context selects the GPU to record on, and restores the current stream if recording fails.
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.stream(stream), torch.cuda.graph(graph), NumbersOnDevice():
            outputs = work()
    except RuntimeError:
        # torch's random generator still takes part in the broken recording, and would refuse to draw; the end of
        # another one releases it.
        with torch.cuda.stream(stream), torch.cuda.graph(torch.cuda.CUDAGraph()):
            one.fill_(1.0)
        raise
    return graph, outputs


class Recording:
    """Recorded work on tensors of one device, replayed by each call.

    Temporary memory of the work stays allocated for the next replay, until the recording is freed.

    Args:
        work: Function from inputs to outputs. Its kernels may depend on the inputs' values alone, and its host code
            on nothing that changes.
        inputs: Tensors of the shapes of every replay.

    Raises:
        RuntimeError: As for :func:`captured`.
        torch.OutOfMemoryError: As for :func:`captured`.
    """

    @staticmethod
    def possible(model: nn.Module) -> bool:
        """Whether work on a model can be recorded: a graph belongs to one GPU."""
        return on_one_gpu(model)

    def __init__(self, work: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        self._graph, self._outputs = captured(lambda: work(*self._inputs), self._inputs[0].device)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs for other inputs, asynchronously; the next replay does not overwrite them."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)

    def takes(self, *inputs: Tensor) -> bool:
        """Whether it was recorded for inputs of these shapes."""
        return [tensor.shape for tensor in self._inputs] == [tensor.shape for tensor in inputs]
