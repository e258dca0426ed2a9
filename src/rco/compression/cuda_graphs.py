"""A sample's forward and backward pass recorded as a CUDA graph and replayed with other numbers.

A sample launches thousands of kernels. Where layers are small, the host takes longer to launch them than the GPU to
run them; a graph is launched at once.
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
    """Lets ``torch.tensor(number, device=...)`` write the number on the device instead of copying it there.

    A copy from the host cannot be recorded unless its source is pinned. Some models make their masks with one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or ``torch.full`` in its place."""
        given = dict(kwargs or {})
        number = bool(args) and isinstance(args[0], (bool, int, float))
        if func is torch.tensor and number and given.get("device") is not None:
            return torch.full((), args[0], **given)
        return func(*args, **given)


def captured(work: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Work as a graph that can be launched again, and its outputs, which every launch overwrites.

    Raises:
        RuntimeError: The work asks for something that cannot be recorded, such as a copy that the host waits for.
        torch.OutOfMemoryError: There is not enough memory to record it.
    """
    work()  # once without recording: what is compiled or allocated for good is so now
    graph = torch.cuda.CUDAGraph()
    # The outer context: a graph is recorded on the current GPU, whichever that is, and a recording that fails would
    # leave the host on the stream that it was made on.
    stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream), torch.cuda.graph(graph), NumbersOnDevice():
        outputs = work()
    return graph, outputs


class Recording:
    """Work on tensors of one device, launched once and replayed from then on.

    Memory that the work takes on its way is kept for the next replay, as long as the recording lives.

    Args:
        work: From the inputs to the outputs. All that it launches must depend on the inputs' values alone, and its
            host code on nothing that changes.
        inputs: Tensors of the shapes that it will be replayed with.

    Raises:
        RuntimeError: As for :func:`captured`.
        torch.OutOfMemoryError: Likewise.
    """

    @staticmethod
    def possible(model: nn.Module) -> bool:
        """Whether work on a model can be recorded: a graph belongs to one GPU."""
        return on_one_gpu(model)

    def __init__(self, work: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        self._graph, self._outputs = captured(lambda: work(*self._inputs), self._inputs[0].device)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for other inputs; nobody waits for them, and the next replay leaves them alone."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)

    def takes(self, *inputs: Tensor) -> bool:
        """Whether it was recorded for inputs of these shapes."""
        return [tensor.shape for tensor in self._inputs] == [tensor.shape for tensor in inputs]
