"""Timing of work on a device, and the plain training pass that searches are compared with."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rco.compression.cuda_graphs import captured
from rco.data.calibration import CalibrationSet
from rco.models.loading import LoadedModel
from rco.models.switchable_model import checkpointed_blocks

__all__ = ["Timed", "as_graph", "floor", "measure"]


@dataclass(frozen=True)
class Timed:
    """Seconds of some repeats, and their peak memory on the device; None on a CPU.

    The memory is what torch had reserved, including memory that a recorded sample keeps for the next.
    """

    seconds: list[float]
    peak_bytes: int | None

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {"seconds": self.median, "repeats": self.seconds, "peak_bytes": self.peak_bytes}


def synchronize(device: torch.device) -> None:
    """Wait for all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(work: Callable[[], object], device: torch.device, repeats: int, warmup: int = 2) -> Timed:
    """Time each repeat of some work, after warm-up runs."""
    for _ in range(warmup):
        work()
    synchronize(device)
    gc.collect()  # free models in reference cycles, so that their memory does not count
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return Timed(seconds, peak)


def as_graph(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work recorded once, so that many small launches are timed without the host's overhead."""
    if device.type != "cuda":
        return work
    graph, _ = captured(work, device)
    return graph.replay


@contextmanager
def floor(loaded: LoadedModel, data: CalibrationSet, checkpointing: bool) -> Iterator[Callable[[], object]]:
    """A plain forward and backward pass with all weight gradients, each freed as soon as it is computed.

    This is the minimum cost of any method that differentiates through the model; the loss is transformers' own.
    """
    model: Any = loaded.model
    tokens = data.tokens[:1].to(loaded.device)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    def work() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    with ExitStack() as stack:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
            stack.callback(parameter.requires_grad_, False)
            stack.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
        if checkpointing:
            blocks = [block for _, block in loaded.layout.blocks(model)]
            stack.enter_context(checkpointed_blocks(blocks))
        yield work
