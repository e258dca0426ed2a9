"""The commands of ``rco``; each is in its own file."""

from __future__ import annotations

from typing import Annotated

import typer

from rco.cli.bench_command import app as bench_app
from rco.cli.compare_command import app as compare_app
from rco.cli.evaluate_command import evaluate
from rco.cli.export_command import export
from rco.cli.frontier_command import frontier
from rco.cli.ls_command import ls
from rco.cli.prune_command import prune
from rco.cli.quantize_command import quantize
from rco.cli.report_command import report
from rco.cli.solve_command import solve
from rco.cli.tune_command import tune

__all__ = ["app"]

app = typer.Typer(
    name="rco",
    help="Choose one option per group under an exact budget, and compress language models with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from rco import __version__

        typer.echo(f"rco {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Choose one option per group under an exact budget, and compress language models with it."""


app.command()(quantize)
app.command()(frontier)
app.command()(prune)
app.command()(evaluate)
app.command()(tune)
app.command()(export)
app.command()(report)
app.command()(solve)
app.command()(ls)
app.add_typer(bench_app, name="bench")
app.add_typer(compare_app, name="compare")
