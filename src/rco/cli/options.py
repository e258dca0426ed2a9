"""Flags from a config dataclass: a default and its help text are written once, where the code uses them.

A field becomes an option named after it (``group_size`` -> ``--group-size``); booleans become on/off pairs. Its
help comes from ``metadata["help"]``; ``metadata["argument"]`` makes it a positional argument and
``metadata["panel"]`` puts it under a heading of ``--help``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

__all__ = ["command_from_config"]


def command_from_config(config: type, run: Callable[[Any], None]) -> Callable[..., None]:
    """A typer command whose options are the fields of ``config``; it calls ``run(config(...))``."""
    hints = get_type_hints(config)
    parameters = []
    for field in dataclasses.fields(config):
        metadata = field.metadata
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required:
            annotation = Annotated[hints[field.name], typer.Argument(help=metadata["help"])]
            default = inspect.Parameter.empty
        else:
            flag = "--" + field.name.replace("_", "-")
            if hints[field.name] is bool:
                flag = f"{flag}/--no-{field.name.replace('_', '-')}"
            annotation = Annotated[
                hints[field.name],
                typer.Option(flag, help=metadata["help"], rich_help_panel=metadata.get("panel")),
            ]
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )

    def command(**values: Any) -> None:
        run(config(**values))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
