"""Searches on models of known shapes with random weights, options and tokens, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rco.compression.budget import Budget
from rco.compression.candidates import candidate_name
from rco.compression.compression import Compression, Residency
from rco.compression.plan import make_plan, make_removal_plan
from rco.core.knapsack import solve_mckp
from rco.core.objective import one_hot
from rco.core.problem import AllocationProblem
from rco.core.sampling import gumbel_noise
from rco.data.calibration import CalibrationSet
from rco.formats.base import EncodeSettings, Format, Stored
from rco.formats.coded import packed_words
from rco.formats.integer import PackedWeight
from rco.formats.streaming import pinned_together
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.linears import model_linears
from rco.models.shapes import random_model, shape_settings

__all__ = [
    "Case",
    "Job",
    "job_of",
    "make_case",
    "quick_shape",
    "random_packed",
    "random_tokens",
    "sample_of",
    "sampled_gates",
    "sampled_values",
    "stored_shapes",
]

WIDTHS = (2, 3, 4, 5, 6, 7, 8)

Job = Literal["quantize", "prune"]


@dataclass(frozen=True)
class Case:
    """A model with a compression backend on it, ready to be searched."""

    loaded: LoadedModel
    backend: Compression
    problem: AllocationProblem
    data: CalibrationSet


def job_of(shape: str, job: Job | None) -> Job:
    """Kind of search on a shape: as given, else experts are pruned and all else is quantized."""
    if job == "prune" and not _sparse(shape):
        raise ValueError(f"{shape} has no experts to prune; take olmoe or qwen3-30b-a3b, or quantize it.")
    return job or ("prune" if _sparse(shape) else "quantize")


def quick_shape(shape: str, job: str) -> str:
    """The small shape of the same kind (with or without experts)."""
    if shape.startswith("quick"):
        return shape
    return "quick-moe" if job == "prune" or _sparse(shape) else "quick"


def _sparse(shape: str) -> bool:
    return "num_experts" in shape_settings(shape)[1]


def random_packed(rows: int, cols: int, bits: int, group: int, device: torch.device) -> PackedWeight:
    """Random codes whose values have the spread of initial weights."""
    size = min(group, cols)
    words = torch.randint(
        -(2**31), 2**31 - 1, (rows, packed_words(cols, bits)), dtype=torch.int32, device=device
    )
    shape = (rows, -(-cols // size))
    spread = 0.02 * 12**0.5 / (1 << bits)
    scales = (torch.rand(shape, device=device) * 0.2 + 0.9) * spread
    middle = 1 << (bits - 1)
    zeros = torch.randint(middle - 1, middle + 1, shape, dtype=torch.uint8, device=device)
    return PackedWeight(words, scales.to(torch.bfloat16), zeros, bits, (rows, cols), size)


def random_tokens(loaded: LoadedModel, sequences: int, length: int, seed: int = 0) -> CalibrationSet:
    """Sequences of random token ids."""
    vocabulary = loaded.layout.head(loaded.model).vocabulary
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (sequences, length), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    return CalibrationSet(tokens, mask, ("random",) * sequences, "random", seed, "search")


def make_case(
    shape: str,
    device: torch.device,
    *,
    length: int,
    sequences: int = 4,
    group: int = 128,
    layers: int | None = None,
    loaded: LoadedModel | None = None,
    checkpointing: bool = False,
    memory: Residency = "resident",
    packed: Mapping[str, Mapping[str, Stored]] | None = None,
    job: Job | None = None,
    formats: Sequence[Format] = (),
) -> Case:
    """A model of a shape, its options and its tokens.

    Args:
        shape: Name of the shape.
        device: Device of the model.
        length: Tokens per sequence.
        sequences: Number of sequences.
        group: Columns that share a scale.
        layers: Fewer blocks than the shape has.
        loaded: The model, if it exists already.
        checkpointing: Recompute activations in the backward pass.
        memory: Memory that holds the packed options.
        packed: The options, if they exist already.
        job: Kind of search, see :func:`job_of`.
        formats: Formats of the options, instead of the integer widths.
    """
    if loaded is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        loaded = random_model(shape, device=device, dtype=dtype, layers=layers)
    data = random_tokens(loaded, sequences, length)
    if job_of(shape, job) == "prune":
        plan = make_removal_plan(model_linears(loaded.layout, loaded.model))
        pruning = Compression(loaded, plan, checkpointing=checkpointing)
        return Case(loaded, pruning, pruning.problem(Budget.parse(experts="0.25")), data)
    linears = model_linears(loaded.layout, loaded.model)
    if formats:
        return _format_case(loaded, linears, formats, data, checkpointing)
    plan = make_plan(loaded.layout, linears, widths=WIDTHS, group_size=group, symmetric=False)
    backend = Compression(loaded, plan, Path("unused"), checkpointing=checkpointing, memory=memory)
    if packed is None:
        made: dict[str, dict[str, PackedWeight]] = {}
        for members in plan.fetched_together:
            options = {
                name: {str(width): random_packed(rows, cols, width, group, device) for width in WIDTHS}
                for name, (rows, cols) in stored_shapes(members).items()
            }
            made |= pinned_together(options) if backend.memory == "offload" else options
        packed = made
    backend.set_packed(packed)
    return Case(loaded, backend, backend.problem(Budget.parse(bits="4")), data)


def _format_case(
    loaded: LoadedModel,
    linears: Sequence[LinearInfo],
    formats: Sequence[Format],
    data: CalibrationSet,
    checkpointing: bool,
) -> Case:
    """Options in given formats, of the model's own weights; the budget is between the two narrowest of them."""
    plan = make_plan(loaded.layout, linears, formats=formats)
    backend = Compression(loaded, plan, Path("unused"), checkpointing=checkpointing)
    settings = EncodeSettings(storage_dtype=loaded.dtype, clip="minmax", input_peak=8.0)
    backend.set_packed(
        {
            info.name: {
                plan.label(each): each.encode(info.weight.detach(), settings=settings)
                for each in plan.packed
                if plan.fits(info, each)
            }
            for info in plan.linears
        }
    )
    bits = sum(option.bits for option in plan.options[:2]) / 2
    return Case(loaded, backend, backend.problem(Budget.parse(bits=str(bits))), data)


def stored_shapes(linears: Sequence[LinearInfo]) -> dict[str, tuple[int, int]]:
    """Shapes of their candidates in a store: linears, and the experts of a layer stacked."""
    found: dict[str, tuple[int, int]] = {}
    for info in linears:
        name = candidate_name(info)
        found[name] = found.get(name, (0, 0))[0] + info.out_features, info.in_features
    return found


def sampled_gates(case: Case, samples: int) -> list[Tensor]:
    """Gates (N, K) of feasible random samples."""
    found = (solve_mckp(values, case.problem).allocation for values in sampled_values(case, samples))
    return [one_hot(np.asarray(choices), case.problem.num_options) for choices in found]


@contextmanager
def sample_of(case: Case) -> Iterator[Callable[[], Tensor]]:
    """One sample as in a search: gates in, loss and gate gradients out."""
    (gates,) = sampled_gates(case, 1)
    with case.backend.objective(case.data) as objective:
        yield lambda: objective.enqueue(gates, 0)()[1]


def sampled_values(case: Case, samples: int) -> np.ndarray:
    """Gumbel noise (samples, N, K), the values of random knapsacks; minus infinity for options not allowed."""
    shape = (case.problem.num_groups, case.problem.num_options)
    draws = [gumbel_noise(shape, seed=0, step=0, sample=j) for j in range(samples)]
    return (torch.stack(draws) + case.problem.log_allowed).numpy()
