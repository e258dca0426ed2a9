"""``rco frontier``: checkpoints of several sizes, and the KL of each."""

from __future__ import annotations

import json

import typer

from rco.cli.config_options import Switches, command_from_config
from rco.cli.run_job import interruptible
from rco.pipeline.configs import FrontierConfig

__all__ = ["frontier"]


def _frontier(config: FrontierConfig, switches: Switches) -> None:
    """Quantize a language model to several sizes from one set of candidates, with a table and a plot of KL by size.

    rco frontier model-bf16.gguf --format gguf --sizes 0.6GB..1.2GB

    rco frontier MODEL --sizes 3GB,3.5GB,4GB --out runs/sizes
    """
    from rco.pipeline.frontier import frontier as run
    from rco.pipeline.frontier import plan_frontier
    from rco.pipeline.progress import make_progress

    if switches.dry_run:
        plans = plan_frontier(config)
        typer.echo(f"would write {len(plans)} sizes to {config.folder()}:")
        for planned in plans:
            typer.echo(f"  {planned.budget}")
        minutes = plans[0].estimate.seconds / 60
        typer.echo(f"the first takes about {minutes:.1f} minutes, candidates included")
        return
    with interruptible(), make_progress(switches.quiet or switches.as_json) as progress:
        found = run(config, progress)
    if switches.as_json:
        typer.echo(json.dumps({"folder": str(found.folder), "points": found.points}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None)
    for name in ("size asked for", "bytes", "KL to the full model", "perplexity", "evaluations"):
        table.add_column(name, justify="right")
    for point in found.points:
        table.add_row(
            f"{point['size']:,}",
            f"{point['bytes']:,}",
            f"{point['kl']:.4f} ± {point['kl_error'] or 0.0:.4f}",
            f"{point['perplexity']:.3f}",
            str(point["evaluations"]),
        )
    Console().print(table)
    typer.echo(f"tables      {found.folder}/frontier.md, .csv, .json")
    typer.echo(f"plot        {found.folder}/frontier.svg")


frontier = command_from_config(
    FrontierConfig, _frontier, hidden=("bits", "bpw", "size", "active_bits", "count", "tune", "tune_tokens")
)
