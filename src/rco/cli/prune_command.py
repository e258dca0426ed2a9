"""``rco prune``: from a mixture-of-experts model and a budget to a smaller checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from rco.cli.config_options import Switches, command_from_config
from rco.cli.run_job import print_evaluation, print_loading, report_of, run_job
from rco.pipeline.configs import PruneConfig

if TYPE_CHECKING:
    from rco.compressed import CompressedModel
    from rco.pipeline.planning import Planned

__all__ = ["prune"]


def _prune(config: PruneConfig, switches: Switches) -> None:
    """Prune the least important experts of a mixture-of-experts model to an exact budget.

    rco prune tiny-moe --experts 0.25

    rco prune MODEL --experts 0.5 --uniform --data code.jsonl --out runs/mine
    """
    run_job(
        config,
        switches,
        describe=_describe,
        summarize=lambda result: {"shape": result.metrics.get("export", {}).get("shape")},
        show=_show,
    )


prune = command_from_config(PruneConfig, _prune)


def _describe(planned: Planned) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    compression, problem = planned.compression, planned.problem
    names = compression.plan.groups
    locked = int((~problem.allowed.all(axis=1)).sum())
    data: dict[str, Any] = {
        "layers": len(compression.layers),
        "experts": len(names),
        "experts_per_layer": compression.expert_counts,
        "top_k": [layer.top_k for layer in compression.layers],
        "locked": locked,
        "keeps": planned.kept_experts,
        "prunes": len(names) - planned.kept_experts,
        "range": [_total(end) for end in problem.feasible_range],
    }
    counts = sorted(set(compression.expert_counts))
    per_layer = " to ".join(map(str, counts[:1] + counts[1:][-1:]))
    evenly = ", the same number in every layer" if compression.uniform else ""
    lines = [
        (
            "experts",
            f"{len(names)} in {len(compression.layers)} sparse layers of {per_layer}; "
            f"routers pick {max(data['top_k'])}",
        ),
        *([("locked", str(locked))] if locked else []),
        ("budget", f"{planned.budget}: {data['prunes']} pruned, {data['keeps']} kept{evenly}"),
    ]
    return data, lines


def _total(end: Any) -> int:
    return int(sum(end)) if isinstance(end, tuple) else int(end)


def _show(result: CompressedModel) -> None:
    print_evaluation(result, first="experts by", amount=("kept", lambda row: str(row["experts"])))
    budget, layers = result.metrics["budget"], result.metrics["moe"]["layers"]
    typer.echo(f"budget      {budget['requested']} {budget['kind']} requested: {budget['used']}")
    typer.echo(f"per layer   {' '.join(str(len(layer['kept'])) for layer in layers)}")
    if result.checkpoint:
        shape = result.metrics["export"]["shape"].replace("_", " ")
        typer.echo(f"checkpoint  {result.checkpoint} ({shape})")
        print_loading(result.metrics["export"])
    typer.echo(f"report      {report_of(result)}")
