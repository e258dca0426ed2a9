"""The verbs of the command line, each in a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from rco.cli import bench, compare, evaluate, export, ls, prune, quantize, report, solve

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


app.command()(quantize.quantize)
app.command()(prune.prune)
app.command()(evaluate.evaluate)
app.command()(export.export)
app.command()(report.report)
app.command()(solve.solve)
app.command()(ls.ls)
app.add_typer(bench.app, name="bench")
app.add_typer(compare.app, name="compare")
