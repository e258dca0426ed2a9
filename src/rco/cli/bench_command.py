"""``rco bench``: speed and memory measurements, as tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from rco.cli.config_options import taken_device
from rco.settings import DEVICE_HELP

__all__ = ["app"]

app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", help="Folder for JSON, Markdown and figures.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small version that takes seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _write(report: dict[str, object], markdown: str, out: Path | None, name: str, as_json: bool) -> None:
    from rco.atomic_files import make_folder, write_json_atomic, write_text_atomic

    if out is not None:
        make_folder(out)
        write_json_atomic(out / f"{name}.json", report)
        write_text_atomic(out / f"{name}.md", markdown + "\n")
    typer.echo(json.dumps(report) if as_json else markdown)


@app.command()
def solver(
    families: Annotated[
        list[str] | None, typer.Option("--family", help="Shapes to time, repeatable; all by default.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Batches of new noise per shape.")] = 9,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time the exact knapsack and HiGHS alternately, with new noise in every call.

    rco bench solver --quick

    rco bench solver --out benchmarks/results
    """
    from rco.bench.solver_bench import run, to_markdown
    from rco.pipeline.progress import make_progress

    with make_progress(as_json) as progress:
        report = run(families or None, repeats, quick, progress.stage("solver"))
    _write(report, to_markdown(report), out, "solver", as_json)


Shape = Annotated[
    str, typer.Option("--shape", help="qwen3-8b, llama3-8b, qwen3-30b-a3b, olmoe, quick or quick-moe.")
]
Device = Annotated[str, typer.Option("--device", help=DEVICE_HELP)]
Length = Annotated[int, typer.Option("--length", min=2, help="Tokens per sample.")]
JobOption = Annotated[
    Literal["auto", "quantize", "prune"],
    typer.Option("--job", help="Kind of search; auto: prune if the shape has experts, else quantize."),
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="Blocks; default: all of the shape.")]


def _title(shape: str, job: str) -> str:
    return shape if job == "auto" else f"{shape}_{job}"


@app.command()
def step(
    shape: Shape = "qwen3-8b",
    job: JobOption = "auto",
    device: Device = "auto",
    length: Length = 2048,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Gumbel samples per step.")] = 16,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Whole steps to time; 0: none.")] = 3,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repeats of each measurement.")] = 10,
    layers: Layers = None,
    formats: Annotated[
        str | None,
        typer.Option("--formats", help="Formats of the options, e.g. nvfp4-a4,fp8-dynamic; default: widths."),
    ] = None,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time a sample of the search and its parts, compared with a plain forward and backward pass.

    rco bench step --quick

    rco bench step --shape qwen3-8b --device cuda --out benchmarks/results
    """
    from rco import formats as stored
    from rco.bench.step_bench import run, to_markdown, write_figure
    from rco.pipeline.progress import make_progress
    from rco.testing.search_cases import quick_shape

    if quick:
        shape = quick_shape(shape, job)
        device, length, samples, steps, repeats = "cpu", 32, 2, 1, 2
    with make_progress(as_json) as progress:
        report = run(
            shape,
            device=taken_device(device, quiet=as_json),
            length=length,
            samples=samples,
            steps=steps,
            repeats=repeats,
            layers=layers,
            job=None if job == "auto" else job,
            formats=[stored.parse(name) for name in formats.split(",")] if formats else (),
            on_progress=progress.stage("step"),
        )
    title = f"step_{_title(shape, job)}" + ("_formats" if formats else "")
    _write(report, to_markdown(report), out, title, as_json)
    if out is not None:
        write_figure(report, out / f"{title}.svg")


@app.command()
def memory(
    shape: Shape = "qwen3-8b",
    job: JobOption = "auto",
    device: Device = "auto",
    length: Length = 2048,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repeats of a sample.")] = 3,
    layers: Layers = None,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare the peak memory of a sample with the estimate, candidates on the GPU or in host memory.

    rco bench memory --quick

    rco bench memory --shape qwen3-8b --device cuda --out benchmarks/results
    """
    from rco.bench.step_bench import run_memory, to_markdown, write_memory_figure
    from rco.pipeline.progress import make_progress
    from rco.testing.search_cases import quick_shape

    if quick:
        shape = quick_shape(shape, job)
        device, length, repeats = "cpu", 32, 1
    with make_progress(as_json) as progress:
        report = run_memory(
            shape,
            device=taken_device(device, quiet=as_json),
            length=length,
            repeats=repeats,
            layers=layers,
            job=None if job == "auto" else job,
            on_progress=progress.stage("memory"),
        )
    _write(report, to_markdown(report), out, f"memory_{_title(shape, job)}", as_json)
    if out is not None:
        write_memory_figure(report, out / f"memory_{_title(shape, job)}.svg")
