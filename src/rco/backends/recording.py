"""A sample's forward and backward pass recorded as a CUDA graph and replayed with other numbers.

A sample launches thousands of kernels. Where layers are small, the host takes longer to launch them than the GPU to
run them; a graph is launched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Recording"]


class Recording:
    """Work on tensors of one device, launched once and replayed from then on.

    Memory that the work takes on its way is kept for the next replay, as long as the recording lives.

    Args:
        work: From the inputs to the outputs. All that it launches must depend on the inputs' values alone, and its
            host code on nothing that changes.
        inputs: Tensors of the shapes that it will be replayed with.

    Raises:
        RuntimeError: The work asks for something that cannot be recorded, such as a copy that the host waits for.
        torch.OutOfMemoryError: There is not enough memory to record it.
    """

    def __init__(self, work: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        work(*self._inputs)  # once without recording: what is compiled or allocated for good is so now
        self._graph = torch.cuda.CUDAGraph()
        # The outer context: a graph is recorded on the current GPU, whichever that is, and a recording that fails
        # would leave the host on the stream that it was made on.
        here = torch.cuda.current_stream(self._inputs[0].device)
        with torch.cuda.stream(here), torch.cuda.graph(self._graph):
            self._outputs = work(*self._inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for other inputs; nobody waits for them, and the next replay leaves them alone."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)

    def takes(self, *inputs: Tensor) -> bool:
        """Whether it was recorded for inputs of these shapes."""
        return [tensor.shape for tensor in self._inputs] == [tensor.shape for tensor in inputs]
