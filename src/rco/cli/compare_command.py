"""``rco compare``: methods side by side at equal tokens, with a table and plots."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from rco.cli.config_options import Switches, command_from_config
from rco.cli.run_job import interruptible
from rco.pipeline.configs import ComparePruneConfig, CompareQuantizeConfig

if TYPE_CHECKING:
    from rco.pipeline.compare import Comparison

__all__ = ["app"]

app = typer.Typer(
    name="compare",
    help="Compare methods on one problem: the same tokens and evaluation, several seeds.",
    no_args_is_help=True,
)


def _prune(config: ComparePruneConfig, switches: Switches) -> None:
    """Compare methods for choosing experts: searches at equal tokens, and plain scores.

    rco compare prune tiny-moe --experts 0.25

    rco compare prune MODEL --experts 0.5 --methods rco,rco@0.1,evoesap,reap --seeds 5
    """
    _compare(config, switches)


def _quantize(config: CompareQuantizeConfig, switches: Switches) -> None:
    """Compare methods for choosing widths: the same candidates, tokens and evaluation, several seeds.

    rco compare quantize tiny-llama --bits 2.5 --seeds 1

    rco compare quantize MODEL --bits 2.25,2.5,4.0 --methods rco,evopress,higgs --allowance tokens=5e6 --sweep
    """
    _compare(config, switches)


def _compare(config: CompareQuantizeConfig | ComparePruneConfig, switches: Switches) -> None:
    from rco.pipeline.compare import compare, list_jobs, make_contest
    from rco.pipeline.progress import make_progress

    if switches.dry_run:
        jobs, contest = list_jobs(config), make_contest(config)
        most = f"{contest.allowance.tokens:,} tokens" if contest.allowance.tokens else "unlimited tokens"
        typer.echo(f"would run {len(jobs)} searches, at most {most} each:")
        for job in jobs:
            typer.echo(f"  {job.name}")
        return
    with interruptible(), make_progress(switches.quiet or switches.as_json) as progress:
        outcome = compare(config, progress)
    _show(outcome, switches.as_json)


def _show(outcome: Comparison, as_json: bool) -> None:
    """Print the table and the paths of the files."""
    if as_json:
        files = {"folder": str(outcome.folder), "plots": [str(path) for path in outcome.plots]}
        typer.echo(json.dumps({**files, "rows": outcome.rows, "failed": outcome.failed}))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from rco.pipeline.compare_tables import table_columns

    budgets, columns = {row["budget"] for row in outcome.rows}, table_columns(outcome.rows, corpora=False)
    if len(budgets) > 1:
        columns.insert(0, ("budget", lambda row: str(row["budget"])))
    title = None if len(budgets) > 1 else budgets.pop()
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, _ in columns:
        named = name in ("budget", "method")
        # Names are never cut, so that they can be copied; headings of numbers wrap instead.
        table.add_column(name, justify="left" if named else "right", no_wrap=named, overflow="fold")
    for row in outcome.rows:
        table.add_row(*(text(row) for _, text in columns))
    Console().print(table)
    for name, reason in outcome.failed.items():
        typer.echo(f"not run     {name}: {reason}")
    typer.echo(f"tables      {outcome.folder}/comparison.md, .csv, .json")
    for path in outcome.plots:
        typer.echo(f"plot        {path}")


app.command("quantize")(
    command_from_config(CompareQuantizeConfig, _quantize, hidden=("prior", "tune", "tune_tokens"))
)
app.command("prune")(command_from_config(ComparePruneConfig, _prune))
