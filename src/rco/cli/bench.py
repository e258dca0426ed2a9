"""``rco bench``: the studies and speed measurements, each printing a table and writing JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from rco.cli.options import Switches, command_from_config, taken_device
from rco.pipeline.configs import AblationConfig
from rco.settings import DEVICE_HELP

__all__ = ["app"]

app = typer.Typer(help="Studies and speed measurements.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", help="Folder for JSON, Markdown and figures.")]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller version, in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _write(report: dict[str, object], markdown: str, out: Path | None, name: str, as_json: bool) -> None:
    from rco.folders import make_folder, write_json_atomic, write_text_atomic

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
    repeats: Annotated[int, typer.Option("--repeats", help="Batches of fresh noise per shape.")] = 9,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time the exact knapsack against HiGHS, interleaved, fresh noise each call.

    rco bench solver --quick

    rco bench solver --out benchmarks/results
    """
    from rco.pipeline.progress import make_progress
    from rco.studies.solver_bench import run, to_markdown

    with make_progress(as_json) as progress:
        report = run(families or None, repeats, quick, progress.stage("solver"))
    _write(report, to_markdown(report), out, "solver", as_json)


@app.command()
def knapsack(
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="A scenario by name, repeatable; all by default.")
    ] = None,
    instances: Annotated[int, typer.Option("--instances", help="Random instances per scenario.")] = 3,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps per run.")] = 5000,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 0.01,
    workers: Annotated[int, typer.Option("--workers", help="Processes.")] = 2,
    seed: Annotated[int, typer.Option("--seed", help="Of instances and starting points.")] = 0,
    quick: Quick = False,
    out: Out = Path("runs/knapsack-study"),
    as_json: AsJson = False,
) -> None:
    """Compare ways to handle a budget on 13 knapsack scenarios, with 16 joint budgets and retraction counts.

    rco bench knapsack --quick

    rco bench knapsack --scenario huge --scenario 'cheap optimal' --workers 2
    """
    from rco.pipeline.progress import make_progress
    from rco.studies.knapsack_report import study_markdown, write_study
    from rco.studies.knapsack_study import run_study
    from rco.studies.multi_budget import run_multi_budget
    from rco.studies.retraction_bench import run_retraction_bench

    with make_progress(as_json) as progress:

        def told(stage: str) -> Callable[[int, int, str], None]:
            count = progress.stage(stage)
            return lambda done, total, _latest: count(done, total)

        study = run_study(scenario or None, instances, steps, lr, workers, quick, seed, told("scenarios"))
        whole = not scenario
        multi = run_multi_budget(quick=quick, seed=seed, on_progress=told("joint budgets")) if whole else None
        retraction = (
            run_retraction_bench(quick=quick, seed=seed, on_progress=told("retraction")) if whole else None
        )
    if as_json:
        typer.echo(json.dumps({"knapsack": study, "multi_budget": multi, "retraction": retraction}))
    else:
        typer.echo(study_markdown(study, multi, retraction))
    if out is not None:
        for path in write_study(out, study, multi, retraction):
            typer.echo(f"wrote {path}", err=True)


@app.command()
def retraction(
    steps: Annotated[int, typer.Option("--steps", help="Retractions per scenario.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Of instances and starting points.")] = 0,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Count the softmax evaluations of a retraction: safeguarded Newton beside the paper's bisection.

    rco bench retraction --quick

    rco bench retraction --out benchmarks/results
    """
    from rco.pipeline.progress import make_progress
    from rco.studies.knapsack_report import retraction_table
    from rco.studies.retraction_bench import run_retraction_bench

    with make_progress(as_json) as progress:
        count = progress.stage("retraction")
        report = run_retraction_bench(
            steps=steps, quick=quick, seed=seed, on_progress=lambda done, total, _latest: count(done, total)
        )
    _write(report, retraction_table(report), out, "retraction", as_json)


Shape = Annotated[
    str, typer.Option("--shape", help="qwen3-8b, llama3-8b, qwen3-30b-a3b, olmoe, quick or quick-moe.")
]
Device = Annotated[str, typer.Option("--device", help=DEVICE_HELP)]
Length = Annotated[int, typer.Option("--length", min=2, help="Tokens of the sequence that a sample sees.")]
JobOption = Annotated[
    Literal["auto", "quantize", "prune"],
    typer.Option("--job", help="What is searched for; auto prunes experts and quantizes all else."),
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="Fewer blocks than the shape has.")]


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
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repeats of floor and sample.")] = 10,
    layers: Layers = None,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time a sample of the search beside a plain forward and backward pass, and each part of it.

    rco bench step --quick

    rco bench step --shape qwen3-8b --device cuda --out benchmarks/results
    """
    from rco.pipeline.progress import make_progress
    from rco.studies.step_bench import run, to_markdown
    from rco.studies.step_cases import quick_shape
    from rco.studies.step_figure import write_figure

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
            on_progress=progress.stage("step"),
        )
    _write(report, to_markdown(report), out, f"step_{_title(shape, job)}", as_json)
    if out is not None:
        write_figure(report, out / f"step_{_title(shape, job)}.svg")


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
    """Measure a sample's peak memory beside what was expected, candidates on the GPU or in host memory.

    rco bench memory --quick

    rco bench memory --shape qwen3-8b --device cuda --out benchmarks/results
    """
    from rco.pipeline.progress import make_progress
    from rco.studies.step_bench import run_memory, to_markdown
    from rco.studies.step_cases import quick_shape
    from rco.studies.step_figure import write_memory_figure

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


def _ablations(config: AblationConfig, switches: Switches) -> None:
    """Sweep the settings of the search one by one: the nine ablations of the paper, on any model.

    rco bench ablations --quick

    rco bench ablations --sweep samples=1,4,16 --sweep temperature --seeds 5 --workers 2 --resume
    """
    from rco.cli.jobs import interruptible
    from rco.pipeline.ablations import plan_ablations, run_ablations
    from rco.pipeline.progress import make_progress
    from rco.studies.ablation_report import ablation_markdown

    if switches.dry_run:
        plan = plan_ablations(config)
        typer.echo(
            f"{len(plan.runs)} runs for {len(plan.sweeps)} sweeps ({', '.join(s.name for s in plan.sweeps)}), "
            f"about {plan.seconds / 60:.0f} minutes on one core of this machine"
        )
        return
    with interruptible(), make_progress(switches.quiet or switches.as_json) as progress:
        record, written = run_ablations(config, progress)
    typer.echo(json.dumps(record) if switches.as_json else ablation_markdown(record))
    for path in written:
        typer.echo(f"wrote {path}", err=True)


app.command("ablations")(command_from_config(AblationConfig, _ablations))
