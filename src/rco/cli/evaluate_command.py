"""``rco evaluate``: perplexity, KL and tasks of models side by side."""

from __future__ import annotations

import dataclasses
import json

from rco.cli.config_options import Switches, command_from_config
from rco.pipeline.configs import EvaluateConfig

__all__ = ["evaluate"]


def _evaluate(config: EvaluateConfig, switches: Switches) -> None:
    """Measure models: perplexity, KL to a reference, tasks.

    rco evaluate tiny-llama

    rco evaluate runs/tiny-llama-bits-2.5 --reference tiny-llama
    """
    import typer
    from rich.console import Console
    from rich.table import Table

    from rco import api
    from rco.data.sources import resolve_source
    from rco.pipeline.evaluate import headline

    if switches.dry_run:
        resolve_source(config.data)  # raises for an unknown name
        also = f" and by {config.tasks}" if config.tasks else ""
        typer.echo(
            f"would measure {', '.join(config.paths)} on {config.sequences} x {config.length} tokens of "
            f"{config.data}{also}"
        )
        return
    models, reference = config.paths, config.reference
    if reference is not None:  # always first
        models = [reference, *(path for path in models if path != reference)]
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del settings["paths"]
    rows = api.evaluate(models, progress=not (switches.quiet or switches.as_json), **settings)
    if switches.as_json:
        typer.echo(json.dumps(rows))
        return
    tasks = list(dict.fromkeys(task for row in rows for task in row.get("tasks", {})))
    table = Table()
    table.add_column("model", overflow="fold")
    for name in ["perplexity", "KL", "bytes", *tasks, *(["recovery"] if tasks and len(rows) > 1 else [])]:
        table.add_column(name, justify="right")
    for row in rows:
        error = row["perplexity"]["stderr"]
        cells = [f"{row['perplexity']['perplexity']:.3f}" + (f" ± {error:.3f}" if error else "")]
        kl = row.get("kl")
        cells.append(f"{kl['kl']:.4f} ± {kl['stderr'] or 0.0:.4f}" if kl else "")
        cells.append(f"{row['bytes']:,}" if "bytes" in row else "")
        for task in tasks:
            value = headline(row.get("tasks", {}).get(task, {}))
            cells.append("" if value is None else f"{value:.3f}")
        if tasks and len(rows) > 1:
            cells.append(f"{row['recovery']:.1f} %" if "recovery" in row else "")
        table.add_row(row["model"], *cells)
    Console().print(table)


evaluate = command_from_config(EvaluateConfig, _evaluate)
