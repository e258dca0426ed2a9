"""``rco export``: a finished run in another format."""

from __future__ import annotations

import json

import typer

from rco.cli.config_options import Switches, command_from_config
from rco.cli.run_job import print_loading
from rco.pipeline.configs import ExportConfig

__all__ = ["export"]


def _export(config: ExportConfig, switches: Switches) -> None:
    """Write the checkpoint of a finished run in another format, without a new search.

    rco export runs/tiny-llama-bits-2.5 --format dense

    rco export runs/mine --format compressed-tensors --out checkpoints/mine --overwrite
    """
    from rco.pipeline.export import export_run, plan_export

    if switches.dry_run:
        _, _, out = plan_export(config)
        typer.echo(f"would write {config.format} to {out}")
        return
    written = export_run(config)["export"]
    if switches.as_json:
        typer.echo(json.dumps(written))
        return
    typer.echo(f"format      {written['format']}")
    if written.get("tensors"):
        typer.echo(f"size        {written['total_bytes']:,} bytes in {len(written['tensors'])} tensors")
    typer.echo(f"folder      {written['path']}")
    print_loading(written)
    if written.get("usage"):
        typer.echo(f"\n{written['usage'].rstrip()}")


export = command_from_config(ExportConfig, _export)
