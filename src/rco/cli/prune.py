"""``rco prune``: from a mixture-of-experts model and a budget to a smaller checkpoint."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rco.cli.options import Switches, command_from_config
from rco.pipeline.configs import PruneConfig

if TYPE_CHECKING:
    from rco.pipeline.prune import PlannedPruning, PruneOutcome

__all__ = ["prune"]


def _prune(config: PruneConfig, switches: Switches) -> None:
    """Prune the experts of a mixture-of-experts model that matter least, exactly as many as asked.

    rco prune tiny-moe --experts 0.25

    rco prune MODEL --experts 0.5 --uniform --data code.jsonl --out runs/mine
    """
    import typer

    from rco.cli.progress import make_progress
    from rco.pipeline.prune import plan_pruning
    from rco.pipeline.prune import prune as run_job

    if switches.dry_run:
        _print_plan(plan_pruning(config), switches)
        return
    progress = make_progress(switches.quiet or switches.as_json)
    try:
        with progress:
            outcome = run_job(config, progress)
    except KeyboardInterrupt:
        arguments = [a for a in sys.argv[1:] if a != "--resume"]
        command = " ".join(["rco", *arguments, "--resume"])
        sys.stderr.write(f"\nStopped. What is done is kept; continue with:\n  {command}\n")
        raise typer.Exit(130) from None
    if switches.as_json:
        typer.echo(json.dumps(_summary(outcome)))
    else:
        _print_outcome(outcome)


prune = command_from_config(PruneConfig, _prune)


def _print_plan(planned: PlannedPruning, switches: Switches) -> None:
    import typer

    backend, problem = planned.backend, planned.problem
    low, high = problem.feasible_range
    described: dict[str, Any] = {
        "model": planned.loaded.name,
        "layers": len(backend.layers),
        "experts": len(backend.names),
        "experts_per_layer": list(backend.counts),
        "top_k": [layer.top_k for layer in backend.layers],
        "locked": int((~problem.allowed.all(axis=1)).sum()),
        "requested": str(planned.budget),
        "keeps": planned.kept,
        "prunes": len(backend.names) - planned.kept,
        "range": [_total(low), _total(high)],
        "estimate": planned.estimate.to_dict(),
        "folder": str(planned.folder),
    }
    if switches.as_json:
        typer.echo(json.dumps(described))
        return
    counts = sorted(set(backend.counts))
    typer.echo(f"model       {described['model']}")
    typer.echo(
        f"experts     {described['experts']} in {described['layers']} sparse layers of "
        f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))}; routers pick {max(described['top_k'])}"
    )
    if described["locked"]:
        typer.echo(f"locked      {described['locked']}")
    typer.echo(
        f"budget      {planned.budget}: {described['prunes']} pruned, {described['keeps']} kept"
        f"{', the same number in every layer' if backend.uniform else ''}"
    )
    memory = planned.estimate.memory
    shown = f"{memory / 2**30:.2f} GiB" if memory >= 2**28 else f"{memory / 2**20:.1f} MiB"
    typer.echo(f"memory      about {shown}")
    typer.echo(f"time        about {planned.estimate.seconds / 60:.1f} minutes on this machine")
    typer.echo(f"folder      {planned.folder}")


def _total(end: Any) -> int:
    return int(sum(end)) if isinstance(end, tuple) else int(end)


def _summary(outcome: PruneOutcome) -> dict[str, Any]:
    metrics = {k: v for k, v in outcome.metrics.items() if k not in ("scores", "export")}
    return {
        "folder": str(outcome.folder),
        "report": str(outcome.report),
        "checkpoint": str(outcome.checkpoint) if outcome.checkpoint else None,
        "shape": outcome.metrics.get("export", {}).get("shape"),
        "loss": outcome.result.loss,
        "chosen_from": outcome.result.chosen_from,
        **metrics,
    }


def _print_outcome(outcome: PruneOutcome) -> None:
    import typer
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None)
    for name in ("experts by", "kept", "KL to the full model", "perplexity"):
        table.add_column(name, justify="left" if name == "experts by" else "right")
    for row in outcome.metrics["evaluation"]:
        error = row["kl_error"] or 0.0
        table.add_row(
            row["name"],
            str(row["experts"]),
            "" if row["name"] == "full model" else f"{row['kl']:.4f} ± {error:.4f}",
            f"{row['perplexity']:.3f}",
        )
    Console().print(table)
    budget, layers = outcome.metrics["budget"], outcome.metrics["moe"]["layers"]
    typer.echo(f"budget      asked {budget['requested']} {budget['kind']}: {budget['used']}")
    typer.echo(f"per layer   {' '.join(str(len(layer['kept'])) for layer in layers)}")
    if outcome.checkpoint:
        shape = outcome.metrics["export"]["shape"].replace("_", " ")
        typer.echo(f"checkpoint  {outcome.checkpoint} ({shape})")
    typer.echo(f"report      {outcome.report}")
