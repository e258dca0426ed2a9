"""``rco tune``: train the codes and scales of a finished run."""

from __future__ import annotations

import json

import typer

from rco.cli.config_options import Switches, command_from_config
from rco.cli.run_job import interruptible
from rco.pipeline.configs import TuneConfig

__all__ = ["tune"]


def _tune(config: TuneConfig, switches: Switches) -> None:
    """Tune the chosen weights of a finished run at the same size, and write its checkpoint and report again.

    rco tune runs/tiny-llama-bits-2.5

    rco tune runs/tiny-llama-bits-2.5 --tune full --tune-tokens 500000
    """
    from rco.pipeline.progress import make_progress
    from rco.pipeline.tune_run import expected_tuning, tune_run

    if switches.dry_run:
        plan = expected_tuning(config)
        typer.echo(json.dumps({"plan": str(plan)}) if switches.as_json else str(plan))
        return
    quiet = switches.quiet or switches.as_json
    with interruptible(), make_progress(quiet=quiet) as progress:
        metrics = tune_run(config, progress)
    if switches.as_json:
        typer.echo(json.dumps({"tuning": metrics.get("tuning"), "evaluation": metrics["evaluation"]}))
        return
    found = metrics.get("tuning")
    if found is None:
        typer.echo("nothing to tune: no format of this run has trainable parts, or too little memory is free")
        return
    share = 100 * (1 - found["after"] / found["before"]) if found["before"] else 0.0
    typer.echo(f"selection   KL {found['before']:.4f} before, {found['after']:.4f} after: {share:.1f} % less")
    typer.echo(f"codes       {found['moved']:,} of {found['codes']:,} moved")
    for row in metrics["evaluation"]:
        if row["name"] != "full model":
            typer.echo(f"{row['name']:<24} KL {row['kl']:.4f}  perplexity {row['perplexity']:.3f}")
    typer.echo(f"report      {config.run / 'report.html'}")


tune = command_from_config(TuneConfig, _tune)
