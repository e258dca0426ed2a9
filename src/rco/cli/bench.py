"""``rco bench``: the studies and speed measurements, each printing a table and writing JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Studies and speed measurements.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", help="Folder for JSON, Markdown and figures.")]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller version, in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _write(report: dict[str, object], markdown: str, out: Path | None, name: str, as_json: bool) -> None:
    from rco.folders import write_json_atomic

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json_atomic(out / f"{name}.json", report)
        (out / f"{name}.md").write_text(markdown + "\n", encoding="utf-8")
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
    from rco.cli.progress import make_progress
    from rco.studies.solver_bench import run, to_markdown

    with make_progress(as_json) as progress:
        report = run(families or None, repeats, quick, progress.stage("solver"))
    _write(report, to_markdown(report), out, "solver", as_json)
