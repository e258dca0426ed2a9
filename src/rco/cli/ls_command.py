"""``rco ls``: names for other commands."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rco import registry
from rco.cli.flags import as_flags

__all__ = ["ls"]


def _first_line(target: str) -> str:
    module, _, attribute = target.partition(":")
    import importlib

    text = getattr(importlib.import_module(module), attribute).__doc__ or ""
    return as_flags(text.strip().splitlines()[0]) if text.strip() else ""


def ls(
    kind: Annotated[
        str,
        typer.Argument(
            help="methods, formats (checkpoints), storage (for --formats), models, architectures or data."
        ),
    ] = "methods",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List names for other commands: search methods, checkpoint and weight formats, models, architectures, data.

    rco ls methods

    rco ls models --json
    """
    listings = {
        "methods": lambda: {name: _first_line(target) for name, target in registry.METHODS.items()},
        "formats": lambda: {name: _first_line(target) for name, target in registry.EXPORTERS.items()},
        "storage": _storage,
        "models": _models,
        "architectures": _architectures,
        "data": _data,
    }
    if kind not in listings:
        raise typer.BadParameter(str(registry.unknown_name("listing", kind, listings)))
    rows = listings[kind]()
    if as_json:
        typer.echo(json.dumps(rows))
        return
    width = max((len(name) for name in rows), default=0)
    for name, text in rows.items():
        typer.echo(f"{name:<{width}}  {text}")


def _storage() -> dict[str, str]:
    from rco import formats

    return formats.listed()


def _models() -> dict[str, str]:
    from rco.models.zoo import describe_models

    return describe_models()


def _architectures() -> dict[str, str]:
    from rco.models.architectures import describe_architectures

    return describe_architectures()


def _data() -> dict[str, str]:
    from rco.data.sources import describe_sources

    return describe_sources()
