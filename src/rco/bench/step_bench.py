"""Time and memory of a sample of the search and its parts, compared with a plain forward and backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rco.bench.timing import as_graph, floor, measure
from rco.compression.candidates import candidate_name
from rco.compression.memory import search_memory
from rco.core.knapsack import solve_choices
from rco.core.result import StepRecord
from rco.core.search import RCO
from rco.formats.base import Format, Stored
from rco.formats.products import inner_products
from rco.formats.switchable import WeightBuffer
from rco.losses import chunked_kl
from rco.models.loading import pick_device
from rco.models.shapes import random_model
from rco.plotting import save_figures
from rco.runs import environment, free_memory
from rco.testing.search_cases import (
    Case,
    Job,
    job_of,
    make_case,
    random_tokens,
    sample_of,
    sampled_values,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["expected_bytes", "run", "run_memory", "to_markdown", "write_figure", "write_memory_figure"]

OnProgress = Callable[[int, int], None]
_GIB = 2**30


def run(
    shape: str,
    *,
    device: str = "auto",
    length: int = 2048,
    samples: int = 16,
    steps: int = 3,
    repeats: int = 10,
    layers: int | None = None,
    modes: Sequence[bool] = (False, True),
    job: Job | None = None,
    formats: Sequence[Format] = (),
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Measure floor and sample with and without checkpointing, whole steps, and the parts of a sample.

    Args:
        shape: Name of the shape, see :mod:`rco.models.shapes`.
        device: Device to measure on; an error if this machine does not have it.
        length: Tokens of the one sequence of a sample.
        samples: Samples per step.
        steps: Whole steps to time; 0: none.
        repeats: Timed repeats of floor and sample.
        layers: Fewer blocks than the shape has.
        modes: Values of checkpointing to measure; False is always included.
        job: Kind of search; None: experts are pruned, all else is quantized.
        formats: Formats of the options, instead of the integer widths.
        on_progress: Called with (parts done, all parts).
    """
    tell = on_progress or (lambda done, total: None)
    job, place = job_of(shape, job), pick_device(device)
    _check_memory(shape, place, layers)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    loaded = random_model(shape, device=place, dtype=dtype, layers=layers)
    rows: dict[str, Any] = {}
    total = 2 * len(modes) + bool(steps)
    for done, checkpointing in enumerate(modes):
        tell(done, total)
        with floor(loaded, random_tokens(loaded, 1, length), checkpointing) as work:
            lowest = measure(work, place, repeats)
        rows["checkpointing" if checkpointing else "plain"] = {"floor": lowest.to_dict()}
    case = make_case(shape, place, length=length, loaded=loaded, job=job, formats=formats)
    for done, checkpointing in enumerate(modes):
        tell(len(modes) + done, total)
        case.backend.checkpointing = checkpointing
        row = rows["checkpointing" if checkpointing else "plain"]
        with sample_of(case) as work:
            row["sample"] = measure(work, place, repeats).to_dict()
        row["ratio"] = row["sample"]["seconds"] / row["floor"]["seconds"]
        row["expected_bytes"] = expected_bytes(case, length, checkpointing, offload=False)
    case.backend.checkpointing = False
    report = {
        "shape": shape,
        "kind": case.backend.kind,
        "groups": case.problem.num_groups,
        "options": case.problem.num_options,
        "formats": [option.name for option in case.backend.plan.options],
        "layers": len(case.loaded.layout.blocks(case.loaded.model)),
        "parameters": sum(p.numel() for p in case.loaded.model.parameters()),
        "tokens": length,
        "samples_per_step": samples,
        "dtype": str(case.loaded.dtype).removeprefix("torch."),
        "environment": environment(),
        **rows,
    }
    report["breakdown"] = breakdown(case, samples, report["plain"]["sample"]["seconds"])
    if steps:
        tell(total - 1, total)
        report["steps"] = whole_steps(case, samples, steps)
        floors = samples * report["plain"]["floor"]["seconds"]
        report["steps"]["ratio"] = report["steps"]["seconds"] / floors
    tell(total, total)
    return report


def whole_steps(case: Case, samples: int, steps: int) -> dict[str, Any]:
    """Seconds of whole steps of RCO, sampling, knapsacks and the optimizer included."""
    seconds, redone = [0.0], [0]
    search = RCO(steps=steps + 1, samples=samples, refine=0)
    with case.backend.objective(case.data) as objective:

        def note(record: StepRecord) -> None:
            seconds.append(record.seconds)
            redone.append(objective.samples_redone)

        search.search(case.problem, objective, on_step=note)
    taken = np.diff(seconds)[1:].tolist()  # the first warms up
    return {
        "seconds": float(np.median(taken)),
        "repeats": taken,
        "fifty_steps_seconds": 50 * float(np.mean(taken)),
        "samples_redone": np.diff(redone)[1:].tolist(),
    }


def expected_bytes(case: Case, length: int, checkpointing: bool, offload: bool) -> int:
    """Memory that a search on a case is expected to take on its device."""
    return search_memory(
        case.loaded,
        case.backend.plan,
        tokens=length,
        dtype=case.backend.compute_dtype,
        checkpointing=checkpointing,
        offload=offload,
    ).search


# ----------------------------------------------------------------------- the parts


def breakdown(case: Case, samples: int, seconds: float) -> dict[str, Any]:
    """Seconds per sample of each part, measured separately; ``rest`` is the remainder of the sample."""
    place = case.loaded.device
    values = sampled_values(case, samples)
    parts = {"knapsack": measure(lambda: solve_choices(values, case.problem), place, 5).median / samples}
    kernels: dict[str, Any] = {}
    if not case.backend.plan.removes_only:
        matrices = Counter(candidate_name(info) for info in case.backend.plan.linears)
        layers = [(list(options.values()), matrices[name]) for name, options in case.backend.packed().items()]
        decoding, products, kernels = _kernels(layers, case.backend.compute_dtype, place)
        # Once for the output, once more for the gradient of the input.
        parts["dequantise"], parts["inner products"] = 2 * decoding, products
    parts["KL"] = _loss(case)
    parts["rest"] = seconds - sum(parts.values())
    return {"seconds": parts, "kernels": kernels}


def _loss(case: Case) -> float:
    head = case.backend.full_head()
    length = case.data.length - 1
    shape = (length, head.weight.shape[1])
    student, reference = (torch.randn(shape, device=head.weight.device).to(head.weight.dtype) for _ in "ab")

    def work() -> object:
        leaf = student.clone().requires_grad_()
        return torch.autograd.grad(chunked_kl(leaf, head, reference, head), leaf)

    return measure(work, head.weight.device, 5).median


def _kernels(
    layers: list[tuple[list[Stored], int]], dtype: torch.dtype, place: torch.device
) -> tuple[float, float, dict[str, Any]]:
    """Seconds to decode one option of every layer, and for all options' inner products with a gradient.

    A layer is its options, and the number of stacked matrices in them.
    """
    buffer = WeightBuffer()
    middle = [options[len(options) // 2] for options, _ in layers]
    by_shape = {option.shape: _gradient(option.shape, dtype, place) for option in middle}

    def decode() -> None:
        for option in middle:
            option.dequantize(out=buffer.take(option.shape, dtype, place))

    def multiply() -> None:
        for options, matrices in layers:
            inner_products(by_shape[options[0].shape], options, matrices)

    decoding, products = (measure(as_graph(work, place), place, 5).median for work in (decode, multiply))
    elements = sum(option.shape[0] * option.shape[1] for option in middle)
    read = sum(option.nbytes for options, _ in layers for option in options) + elements * dtype.itemsize
    written = sum(option.nbytes for option in middle) + elements * dtype.itemsize
    copy = _copy_bandwidth(place)
    return (
        decoding,
        products,
        {
            "copy_bytes_per_second": copy,
            "inner_products": {"bytes": read, "seconds": products, "share_of_copy": read / products / copy},
            "dequantise": {"bytes": written, "seconds": decoding, "share_of_copy": written / decoding / copy},
        },
    )


def _gradient(shape: tuple[int, int], dtype: torch.dtype, place: torch.device) -> Tensor:
    return torch.randn(shape, device=place).to(dtype)


def _copy_bandwidth(place: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    size = 2**31 if place.type == "cuda" else 2**24
    source, target = (torch.empty(size, dtype=torch.uint8, device=place).fill_(7) for _ in "ab")
    return 2 * size / measure(lambda: target.copy_(source), place, 10).median


# -------------------------------------------------------------------------- memory


def _check_memory(shape: str, place: torch.device, layers: int | None = None) -> None:
    """Raise an error for a shape whose weights exceed the free host memory, if they would be loaded there.

    Raises:
        ValueError: The weights do not fit; the message names needed and free memory, and smaller choices.
    """
    free = free_memory()
    if place.type != "cpu" or free is None:
        return
    model = random_model(shape, device="meta", dtype=torch.float32, layers=layers).model
    needed = sum(parameter.nbytes for parameter in model.parameters())
    if needed > free:
        raise ValueError(
            f"{shape} has weights of {needed / 2**30:.1f} GiB in float32, and {free / 2**30:.1f} GiB are free on "
            "this machine: take fewer --layers, --shape quick, or a machine with a GPU."
        )


def run_memory(
    shape: str,
    *,
    device: str = "auto",
    length: int = 2048,
    repeats: int = 3,
    layers: int | None = None,
    job: Job | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Peak memory and time of a sample: candidates resident or streamed, with and without checkpointing.

    Without ``job`` experts are pruned, which keeps no candidates.
    """
    tell = on_progress or (lambda done, total: None)
    job, place = job_of(shape, job), pick_device(device)
    _check_memory(shape, place, layers)
    modes: list[tuple[Any, bool]] = [("resident", False), ("resident", True)]
    if place.type == "cuda" and job == "quantize":
        modes += [("offload", False), ("offload", True)]
    loaded, packed = None, None
    rows: list[dict[str, Any]] = []
    for done, (memory, checkpointing) in enumerate(modes):
        tell(done, len(modes))
        if memory == "offload" and rows[-1]["memory"] == "resident":
            packed = None  # made anew in host memory
        case = make_case(
            shape,
            place,
            length=length,
            layers=layers,
            loaded=loaded,
            checkpointing=checkpointing,
            memory=memory,
            packed=packed,
            job=job,
        )
        loaded = case.loaded
        if not case.backend.plan.removes_only:
            packed = case.backend.packed()
        with sample_of(case) as work:
            timed = measure(work, place, repeats)
        rows.append(
            {
                "memory": "none" if job == "prune" else memory,
                "checkpointing": checkpointing,
                **timed.to_dict(),
                "expected_bytes": expected_bytes(case, length, checkpointing, memory == "offload"),
            }
        )
    tell(len(modes), len(modes))
    assert loaded is not None
    return {
        "shape": shape,
        "kind": case.backend.kind,
        "tokens": length,
        "layers": len(loaded.layout.blocks(loaded.model)),
        "modes": rows,
        "reference": _reference_cache(case),
        "environment": environment(),
    }


@torch.no_grad()
def _reference_cache(
    case: Case, sequences: int = 256, length: int = 2048, checked: int = 64
) -> dict[str, Any]:
    """Bytes of the reference for a usual calibration set, and the difference of its KL from that of full logits."""
    head = case.backend.full_head()
    hidden = case.loaded.layout.final_hidden(case.loaded.model, case.data.tokens[:1].to(case.loaded.device))[
        0
    ]
    reference = hidden[:checked]
    student = reference + torch.randn_like(reference)
    found = float(chunked_kl(student, head, reference, head))
    weight = head.weight.double()
    p, q = (torch.log_softmax(rows.double() @ weight.T, dim=1) for rows in (reference, student))
    exact = float((p.exp() * (p - q)).sum(1).mean())
    return {
        "sequences": sequences,
        "length": length,
        "bytes": sequences * length * hidden.shape[-1] * hidden.element_size(),
        "full_log_probabilities_bytes": sequences * length * head.vocabulary * 2,
        "kl": found,
        "kl_of_full_log_probabilities": exact,
        "relative_error": abs(found - exact) / exact,
    }


# -------------------------------------------------------------------------- tables


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / _GIB:.2f}"


def to_markdown(report: dict[str, Any]) -> str:
    """A step's or a memory report as tables."""
    if "modes" in report:
        lines = [
            f"# Memory of a sample: {report['shape']}, {report['tokens']} tokens",
            "",
            "| candidates | checkpointing | peak GiB | expected GiB | seconds per sample |",
            "|---|---|---:|---:|---:|",
        ]
        for row in report["modes"]:
            lines.append(
                f"| {row['memory']} | {'yes' if row['checkpointing'] else 'no'} | {_gib(row['peak_bytes'])} | "
                f"{_gib(row['expected_bytes'])} | {row['seconds']:.4g} |"
            )
        cache = report["reference"]
        lines += [
            "",
            f"Reference cache for {cache['sequences']} x {cache['length']} tokens: {cache['bytes'] / 1e9:.2f} GB; "
            f"its KL differs from that of full log-probabilities by {cache['relative_error']:.1e}.",
        ]
        return "\n".join(lines)
    lines = [
        f"# A sample of the search: {report['shape']} ({report['kind']}), {report['tokens']} tokens",
        "",
        "| | floor s | sample s | ratio | floor GiB | sample GiB | expected GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in ("plain", "checkpointing"):
        if name not in report:
            continue
        row = report[name]
        lines.append(
            f"| {name} | {row['floor']['seconds']:.4g} | {row['sample']['seconds']:.4g} | {row['ratio']:.3f} | "
            f"{_gib(row['floor']['peak_bytes'])} | {_gib(row['sample']['peak_bytes'])} | "
            f"{_gib(row['expected_bytes'])} |"
        )
    lines += ["", "| part | ms per sample |", "|---|---:|"]
    lines += [f"| {name} | {1e3 * value:.3f} |" for name, value in report["breakdown"]["seconds"].items()]
    for name, kernel in report["breakdown"]["kernels"].items():
        if isinstance(kernel, dict):
            lines.append(f"| {name}: share of the copy bandwidth | {100 * kernel['share_of_copy']:.0f} % |")
    if "steps" in report:
        steps, twice = report["steps"], sum(report["steps"]["samples_redone"])
        lines += [
            "",
            f"A step of {report['samples_per_step']} samples takes {steps['seconds']:.4g} s, "
            f"{steps['ratio']:.3f} times the floor{f' ({twice} samples were done twice)' if twice else ''}; "
            f"50 steps would take {steps['fifty_steps_seconds'] / 60:.2f} minutes.",
        ]
    return "\n".join(lines)


# ------------------------------------------------------------------------- figures

_COLOURS = {
    "knapsack": "#c44536",
    "dequantise": "#197278",
    "inner products": "#283d3b",
    "KL": "#772e25",
    "rest": "#b8c4cc",
}


def write_figure(report: dict[str, Any], path: Path) -> None:
    """Draw a step report."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for name, seconds in report["breakdown"]["seconds"].items():
        width = 1e3 * max(seconds, 0.0)
        axes.barh(["sample"], [width], left=[left], color=_COLOURS.get(name, "#888888"), label=name)
        left += width
    axes.barh(["floor"], [1e3 * report["plain"]["floor"]["seconds"]], color="#dddddd")
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"{report['shape']}, {report['tokens']} tokens: {report['plain']['ratio']:.2f} x the floor"
    )
    axes.legend(ncols=5, fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    _save(figure, axes, path)


def write_memory_figure(report: dict[str, Any], path: Path) -> None:
    """Draw a memory report."""
    from matplotlib.figure import Figure

    modes = report["modes"]
    figure = Figure(figsize=(7, 0.8 + 0.6 * len(modes)), layout="constrained")
    axes = figure.subplots()
    bars = [("expected_bytes", "expected", -0.2, "#b8c4cc"), ("peak_bytes", "measured", 0.2, "#197278")]
    for key, label, shift, colour in bars:
        found = [(place + shift, row[key] / 2**30) for place, row in enumerate(modes) if row[key] is not None]
        if found:  # peaks are not measured on a CPU
            places, sizes = zip(*found, strict=True)
            axes.barh(places, sizes, height=0.4, color=colour, label=label)
    names = [f"{row['memory']}{', checkpointing' if row['checkpointing'] else ''}" for row in modes]
    axes.set_yticks(range(len(modes)), names)
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_title(f"{report['shape']}, {report['tokens']} tokens: memory of a sample")
    axes.legend(fontsize=7, frameon=False)
    _save(figure, axes, path)


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    save_figures(path.parent, {path.stem: figure}, [path.suffix[1:]])
