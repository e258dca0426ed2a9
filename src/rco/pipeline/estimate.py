"""Estimates of memory and time, before a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rco.compression.candidates import reads_text
from rco.compression.compression import Compression, Residency
from rco.compression.memory import SearchMemory, search_memory
from rco.compression.plan import CompressionPlan
from rco.formats.ggml.block_types import GGMLFormat
from rco.models.capture import LoneBlockError, block_kinds, lone_block
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.linears import ExpertLinear, model_linears
from rco.models.precision import compute_dtype

__all__ = ["Estimate", "choose_residency", "encoding_seconds", "estimate", "forward_seconds"]

# A block is timed on few tokens first, then on more while a pass stays below the limit.
_FEWEST_TOKENS = 16
_GROWTH = 4
_REPEATS = 5
_SECONDS = 0.1

# Million weights that one core encodes in a second with an importance matrix (benchmarks/gguf_menu.py).
_ENCODED = {
    "iq2_xxs": 1.3, "iq2_xs": 0.5, "iq2_s": 2.3, "q2_k": 3.2, "iq3_xxs": 1.2, "iq3_s": 1.2, "q3_k": 9.6,
    "iq4_xs": 2.0, "iq4_nl": 2.2, "q4_k": 2.9, "q4_0": 17.0, "q4_1": 3.5, "q5_0": 17.0, "q5_1": 3.0, "q5_k": 2.9,
    "q6_k": 14.0, "q8_0": 100.0,
}  # fmt: skip

_COMPARED = 6  # allocations compared on the selection text
_EVALUATED = 8  # evaluated allocations, including the full model
_SEARCHES_BY_DOMAIN = 4  # one on all text, and one on each of about three domains

clock, cpu_clock = time.perf_counter, time.process_time


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds; seconds are scaled from short passes of the model's blocks on this machine.

    Attributes:
        model_bytes: Weights on the device while searching.
        candidate_bytes: Packed candidates on the device, or the buffers they stream through.
        reference_bytes: The full model's hidden states, in host memory.
        activation_bytes: Activations for the backward pass.
        workspace_bytes: Temporary dense weight, gradient and logits.
        original_bytes: Weights that are on the device before the search, and in host memory during it.
        seconds: Time of the whole run.
        residency: Place of the candidates: ``resident`` or ``offload``.
        on_gpu: Whether the device has its own memory, which the reference does not use.
    """

    model_bytes: int
    candidate_bytes: int
    reference_bytes: int
    activation_bytes: int
    seconds: float
    workspace_bytes: int = 0
    original_bytes: int = 0
    residency: Residency = "resident"
    on_gpu: bool = False

    @property
    def memory(self) -> int:
        """Peak on the device."""
        return (
            self.model_bytes
            + self.original_bytes
            + self.candidate_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + (0 if self.on_gpu else self.reference_bytes)
        )

    @property
    def search_memory(self) -> int:
        """Peak on the device during the search, when a GPU keeps the original weights in host memory."""
        return self.memory - (self.original_bytes if self.on_gpu else 0)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {
            "memory_bytes": self.memory,
            "model_bytes": self.model_bytes,
            "candidate_bytes": self.candidate_bytes,
            "reference_bytes": self.reference_bytes,
            "activation_bytes": self.activation_bytes,
            "workspace_bytes": self.workspace_bytes,
            "original_bytes": self.original_bytes,
            "search_bytes": self.search_memory,
            "residency": self.residency,
            "seconds": self.seconds,
        }


def choose_residency(
    loaded: LoadedModel, plan: CompressionPlan, config: Any
) -> tuple[Residency, SearchMemory]:
    """Place of the candidates, as requested or by free memory, and the memory that the search needs.

    Raises:
        ValueError: The search does not fit the GPU in either place.
    """
    dtype = compute_dtype(config.compute, loaded.device, loaded.dtype)

    def needed(offload: bool) -> SearchMemory:
        return search_memory(
            loaded,
            plan,
            tokens=config.length * config.batch_size,
            dtype=dtype,
            checkpointing=config.checkpointing,
            offload=offload,
        )

    devices = {parameter.device for parameter in loaded.model.parameters()}
    asked: Literal["auto", "resident", "offload"] = getattr(config, "memory", "auto")
    if len(devices) > 1 and asked == "offload":
        raise ValueError(
            "`memory='offload'` streams to one GPU, but this model is spread over several devices; leave "
            "`memory` out to keep every linear's candidates on its device."
        )
    if loaded.device.type != "cuda" or len(devices) > 1 or loaded.place is not None:
        return "resident", needed(False)
    resident, offload = needed(False), needed(True)
    if asked != "auto":
        return asked, offload if asked == "offload" else resident
    # The model is loaded already; a tenth stays free for fragmentation.
    free = 0.9 * torch.cuda.mem_get_info(loaded.device)[0] + offload.weights + offload.originals
    if resident.peak <= free:
        return "resident", resident
    if offload.peak <= free:
        return "offload", offload
    advice = "" if config.checkpointing else "`checkpointing=True`, "
    raise ValueError(
        f"The search needs about {offload.peak / 2**30:.1f} GiB of GPU memory even with its candidates in host "
        f"memory, but {free / 2**30:.1f} GiB are free. It needs less with {advice}a shorter `length` or a "
        "smaller `batch_size`. To try anyway, use `memory='offload'`."
    )


def estimate(compression: Compression, config: Any, residency: Residency, memory: SearchMemory) -> Estimate:
    """Memory as counted; time as forward passes of all stages times the time of one on this machine."""
    loaded, dtype = compression.loaded, compression.compute_dtype
    hidden = loaded.layout.head(loaded.model).weight.shape[1]
    sequences = config.sequences + config.selection
    removal = compression.plan.removes_only
    sensitivity = 0 if removal and config.start != "fisher" else config.sensitivity
    # Hessians or largest inputs for candidates, or scores of experts.
    statistics = removal or reads_text(compression.plan, compression.settings)
    passes = (
        3 * config.steps * config.samples * config.batch_size
        + config.selection * (_COMPARED + config.refine_passes)
        + 3 * sensitivity
        + 2 * config.sequences * statistics
        + sequences  # the reference
        + _EVALUATED * config.evaluation
    )
    encoding = 0.0
    if compression.plan.target is not None:
        encoding = encoding_seconds(compression.plan, torch.get_num_threads())
    elif not removal:
        passes += _candidate_passes(compression, config)
    elif config.by_domain:
        passes *= _SEARCHES_BY_DOMAIN
    return Estimate(
        model_bytes=memory.weights,
        original_bytes=memory.originals,
        candidate_bytes=memory.candidates,
        reference_bytes=sequences * config.length * hidden * dtype.itemsize,
        activation_bytes=memory.activations,
        workspace_bytes=memory.workspace,
        seconds=encoding + passes * forward_seconds(loaded, dtype, config.length),
        residency=residency,
        on_gpu=loaded.device.type == "cuda",
    )


def encoding_seconds(plan: CompressionPlan, threads: int) -> float:
    """Time in which ggml encodes every option of a GGUF plan."""
    million = sum(
        sum(member.parameters for member in group.members) / _ENCODED[option.name]
        for group in plan.groups
        for option in group.options
        if isinstance(option, GGMLFormat)
    )
    return million / 1e6 / threads


def _candidate_passes(compression: Compression, config: Any) -> float:
    """Cost of quantization in forward passes: a Hessian and a column loop per linear, for all widths."""
    plan, loaded = compression.plan, compression.loaded
    if compression.settings.method == "rtn":
        return 0.0
    products = sum(
        2 * info.in_features**2 * config.length * config.sequences * _share(info) / 3
        + len(plan.packed) * info.out_features * info.in_features**2
        for info in plan.linears
    )
    head = loaded.layout.head(loaded.model).weight
    return float(products / (2 * config.length * (head.numel() + _weights_per_token(loaded))))


def forward_seconds(loaded: LoadedModel, dtype: torch.dtype, length: int) -> float:
    """Time of one forward pass over a sequence in ``dtype``; a backward takes about twice that.

    One block of every kind is timed; the output layer is assumed to run at the same rate. Without weights, or where
    a block cannot be run alone, all linears are assumed to run at the rate of one product.
    """
    products = loaded.layout.head(loaded.model).weight.numel() + _weights_per_token(loaded)
    if loaded.place is not None:
        return 2 * products * length * _seconds_per_operation(loaded.place, dtype)
    try:
        blocks = sum(
            count * _block_seconds(loaded, index, dtype, length)
            for index, count in block_kinds(loaded.model, loaded.layout)
        )
    except LoneBlockError:
        return 2 * products * length * _seconds_per_operation(loaded.device, dtype)
    head = loaded.layout.head(loaded.model).weight
    return blocks * length * (1 + head.numel() / _weights_per_token(loaded))


def _seconds_per_operation(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of one multiplication or addition in a product of matrices of moderate size."""
    rows, width = 64, 2048
    left = torch.ones(rows, width, dtype=dtype, device=device)
    right = torch.ones(width, width, dtype=dtype, device=device)
    best = min(_seconds(lambda: left @ right, device) for _ in range(_REPEATS))
    return best / (2 * rows * width * width)


@torch.no_grad()
def _block_seconds(loaded: LoadedModel, index: int, dtype: torch.dtype, length: int) -> float:
    """Seconds per token of a block: the best of a few passes, over more tokens while passes are short."""
    tokens = min(_FEWEST_TOKENS, length)
    while True:
        with lone_block(loaded.model, loaded.layout, index, tokens=tokens, dtype=dtype) as lone:
            times: list[float] = []
            stop = clock() + _SECONDS
            while not times or (len(times) < _REPEATS and clock() < stop):  # the first one warms up
                times.append(_seconds(lone, loaded.device))
        best = min(times)
        if tokens == length or _GROWTH * best > _SECONDS:
            return best / tokens
        tokens = min(_GROWTH * tokens, length)


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of some work; on a CPU the compute time of its threads, independent of other load."""
    began, computed = clock(), cpu_clock()
    float(work().sum())  # synchronizes
    passed = clock() - began
    if device.type != "cpu":
        return passed
    return min(passed, (cpu_clock() - computed) / torch.get_num_threads())


def _weights_per_token(loaded: LoadedModel) -> float:
    """Number of weights of linears that a token uses in all blocks."""
    return sum(info.parameters * _share(info) for info in model_linears(loaded.layout, loaded.model))


def _share(info: LinearInfo) -> float:
    """Share of the tokens that use a linear: less than one for experts."""
    return info.layer.top_k / info.layer.num_experts if isinstance(info, ExpertLinear) else 1.0
