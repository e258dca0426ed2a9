"""``rco report``: runs as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about one or more runs.

    rco report runs/tiny-llama-bits-2.5

    rco report runs/a runs/b --out comparison.html
    """
    from rco.report import build_report
    from rco.runs import RunDirectory

    typer.echo(str(build_report([RunDirectory.open(folder) for folder in runs], out)))
