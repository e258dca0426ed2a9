"""``rco compare``: methods side by side at equal tokens, one table and one plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from rco.cli.jobs import interruptible
from rco.cli.options import Switches, command_from_config
from rco.pipeline.compare_configs import CompareQuantizeConfig
from rco.pipeline.configs import ComparePruneConfig

if TYPE_CHECKING:
    from pathlib import Path

    from rco.pipeline.compare import Comparison
    from rco.pipeline.compare_quantize import QuantizeComparison

__all__ = ["app", "show_comparison"]

app = typer.Typer(
    name="compare",
    help="Methods side by side on one problem: the same tokens, the same evaluation, several seeds.",
    no_args_is_help=True,
)


def _prune(config: ComparePruneConfig, switches: Switches) -> None:
    """Compare ways of choosing experts: searches at equal tokens, and the plain scores.

    rco compare prune tiny-moe --experts 0.25

    rco compare prune MODEL --experts 0.5 --methods rco,rco@0.1,evoesap,reap --seeds 5
    """
    from rco.cli.progress import make_progress
    from rco.pipeline.compare import parse_methods
    from rco.pipeline.compare_prune import PruneContest, compare_pruning, resolve_method
    from rco.pipeline.prune import plan_pruning

    if switches.dry_run:
        planned = plan_pruning(config)
        listed = [label for label, name, _ in parse_methods(config.methods) if resolve_method(name)]
        tokens = PruneContest(config, planned).tokens
        typer.echo(
            f"would run {', '.join(listed)} with {config.seeds} seeds and {tokens:,} tokens each; "
            f"{len(planned.backend.names) - planned.kept} of {len(planned.backend.names)} experts pruned"
        )
        return
    with interruptible(), make_progress(switches.quiet or switches.as_json) as progress:
        outcome = compare_pruning(config, progress)
    show_comparison(outcome, switches.as_json)


# Heading, and how a cell is written.
Column = tuple[str, Callable[[dict[str, Any]], str]]

_METHOD: list[Column] = [("method", lambda row: row["method"])]
_QUALITY: list[Column] = [
    ("KL to the full model", lambda row: f"{row['kl']:.4f} ± {row['kl_std']:.4f}"),
    ("perplexity", lambda row: f"{row['perplexity']:.3f} ± {row['perplexity_std']:.3f}"),
]
_WORK: list[Column] = [
    ("tokens", lambda row: f"{row['tokens']:,.0f}"),
    ("seconds", lambda row: f"{row['seconds']:.0f}"),
    ("seeds", lambda row: str(row["seeds"])),
]
_BUDGET: list[Column] = [("budget", lambda row: row["budget"])]
_BITS: list[Column] = [("bits", lambda row: f"{row['bits']:.4f}")]


def _show(
    rows: list[dict[str, Any]], words: list[Column], numbers: list[Column], folder: Path, plots: list[Path]
) -> None:
    """The table on stdout, and where the files are."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name, _ in words:
        table.add_column(name)
    for name, _ in numbers:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(text(row) for _, text in (*words, *numbers)))
    Console().print(table)
    typer.echo(f"tables      {folder}/comparison.md, .csv, .json")
    for path in plots:
        typer.echo(f"plot        {path}")


def show_comparison(outcome: Comparison, as_json: bool) -> None:
    """Methods on one pruning problem."""
    if as_json:
        files = {"folder": str(outcome.folder), "plot": str(outcome.plot) if outcome.plot else None}
        typer.echo(json.dumps({**files, "rows": outcome.rows}))
        return
    plots = [outcome.plot] if outcome.plot else []
    _show(outcome.rows, _METHOD, [*_QUALITY, *_WORK], outcome.folder, plots)


def _quantize(config: CompareQuantizeConfig, switches: Switches) -> None:
    """Compare ways of choosing widths: the same candidates, tokens and evaluation, several seeds.

    rco compare quantize tiny-llama --bits 2.5 --seeds 1 --workers 2

    rco compare quantize MODEL --bits 2.25,2.5,3.0 --methods rco,rco@0.1,evopress,higgs --allowance tokens=5e6
    """
    from rco.cli.progress import make_progress
    from rco.pipeline.compare_quantize import QuantizeContest, compare_quantization, list_jobs

    if switches.dry_run:
        jobs, contest = list_jobs(config), QuantizeContest(config)
        most = f"{contest.allowance.tokens:,} tokens" if contest.allowance.tokens else "unlimited tokens"
        typer.echo(f"would run {len(jobs)} searches, at most {most} each:")
        for job in jobs:
            typer.echo(f"  {job.name}")
        return
    with interruptible(), make_progress(switches.quiet or switches.as_json) as progress:
        outcome = compare_quantization(config, progress)
    show_widths(outcome, switches.as_json)


def show_widths(outcome: QuantizeComparison, as_json: bool) -> None:
    """Methods at several budgets of bits."""
    if as_json:
        files = {"folder": str(outcome.folder), "plots": [str(path) for path in outcome.plots]}
        typer.echo(json.dumps({**files, "rows": outcome.rows, "failed": outcome.failed}))
        return
    words, numbers = [*_BUDGET, *_METHOD], [*_QUALITY, *_BITS, *_WORK]
    _show(outcome.rows, words, numbers, outcome.folder, outcome.plots)


app.command("quantize")(command_from_config(CompareQuantizeConfig, _quantize))
app.command("prune")(command_from_config(ComparePruneConfig, _prune))
