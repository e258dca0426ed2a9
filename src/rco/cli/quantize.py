"""``rco quantize``: from a model and a budget to a checkpoint."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rco.cli.options import Switches, command_from_config
from rco.pipeline.configs import QuantizeConfig

if TYPE_CHECKING:
    from rco.pipeline.quantize import Planned, QuantizeOutcome

__all__ = ["quantize"]


def _quantize(config: QuantizeConfig, switches: Switches) -> None:
    """Quantize a language model to an exact budget, every layer at the width it needs.

    rco quantize tiny-llama --bits 2.5

    rco quantize MODEL --size 3.1GB --serve vllm --out runs/mine
    """
    import typer

    from rco.cli.progress import make_progress
    from rco.pipeline.quantize import plan_quantization
    from rco.pipeline.quantize import quantize as run_job

    if switches.dry_run:
        _print_plan(plan_quantization(config), switches)
        return
    progress = make_progress(switches.quiet or switches.as_json)
    try:
        with progress:
            outcome = run_job(config, progress)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nStopped. What is done is kept; continue with:\n  {_resume_command()}\n")
        raise typer.Exit(130) from None
    if switches.as_json:
        typer.echo(json.dumps(_summary(outcome)))
    else:
        _print_outcome(outcome)


quantize = command_from_config(QuantizeConfig, _quantize)


def _resume_command() -> str:
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    return " ".join(["rco", *arguments, "--resume"])


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def _print_plan(planned: Planned, switches: Switches) -> None:
    import typer

    low, high = planned.backend.budget_range(planned.budget.kind)
    described: dict[str, Any] = {
        "model": planned.loaded.name,
        "groups": planned.problem.num_groups,
        "linears": len(planned.plan.linears),
        "left_alone": list(planned.plan.skipped),
        "widths": list(planned.plan.widths),
        "grid": "symmetric" if planned.plan.symmetric else "asymmetric",
        "group_size": planned.plan.group_size,
        "range": [low, high],
        "requested": str(planned.budget),
        "effective_units": planned.problem.unit_budgets[0],
        "estimate": planned.estimate.to_dict(),
        "folder": str(planned.folder),
    }
    if switches.as_json:
        typer.echo(json.dumps(described))
        return
    typer.echo(f"model       {described['model']}")
    typer.echo(f"groups      {described['groups']} of {described['linears']} linears")
    if described["left_alone"]:
        typer.echo(f"left alone  {', '.join(described['left_alone'])}")
    grid = f"{described['grid']}, " + (
        f"groups of {planned.plan.group_size}" if planned.plan.group_size else "one scale per row"
    )
    typer.echo(f"widths      {', '.join(map(str, planned.plan.widths))} bits, {grid}")
    typer.echo(f"range       {planned.budget.kind} from {low} to {high}")
    typer.echo(f"budget      {planned.budget}: {described['effective_units']:,} units for the search")
    typer.echo(f"memory      about {_gib(planned.estimate.memory)}")
    typer.echo(f"time        about {planned.estimate.seconds / 60:.1f} minutes on this machine")
    typer.echo(f"folder      {planned.folder}")


def _summary(outcome: QuantizeOutcome) -> dict[str, Any]:
    metrics = {k: v for k, v in outcome.metrics.items() if k not in ("groups", "export")}
    return {
        "folder": str(outcome.folder),
        "report": str(outcome.report),
        "checkpoint": str(outcome.checkpoint) if outcome.checkpoint else None,
        "allocation": outcome.result.allocation.to_dict(),
        "loss": outcome.result.loss,
        "chosen_from": outcome.result.chosen_from,
        **metrics,
    }


def _print_outcome(outcome: QuantizeOutcome) -> None:
    import typer
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None)
    for name in ("allocation", "bits", "KL to the full model", "perplexity"):
        table.add_column(name, justify="left" if name == "allocation" else "right")
    for row in outcome.metrics["evaluation"]:
        error = row["kl_error"] or 0.0
        table.add_row(
            row["name"],
            f"{row['bits']:.4f}".rstrip("0").rstrip("."),
            "" if row["name"] == "full model" else f"{row['kl']:.4f} ± {error:.4f}",
            f"{row['perplexity']:.3f}",
        )
    Console().print(table)
    budget = outcome.metrics["budget"]
    typer.echo(
        f"budget      asked {budget['requested']} {budget['kind']}: {budget['effective']}, used {budget['used']}"
    )
    if outcome.checkpoint:
        typer.echo(f"checkpoint  {outcome.checkpoint}")
    typer.echo(f"report      {outcome.report}")
