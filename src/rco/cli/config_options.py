"""Command-line flags from the fields of a config dataclass, with their defaults and help texts.

A field becomes an option named after it (``group_size`` -> ``--group-size``); booleans become on/off pairs; a field
without a default becomes a positional argument.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Annotated, Any, get_type_hints

import typer

from rco.cli.flags import as_flags, flag_of
from rco.cli.garbage import uncollected

__all__ = ["Switches", "command_from_config", "taken_device"]

_PANELS = ("Budget", "Output", "Candidates", "Experts", "Data", "Search", "Tuning", "Comparison", "Machine")


@dataclasses.dataclass(frozen=True)
class Switches:
    """Form of a command's output; the same for every command."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, estimate, print and stop.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False


def command_from_config(
    config: type, run: Callable[[Any, Switches], None], *, hidden: Collection[str] = ()
) -> Callable[..., None]:
    """A typer command whose options are the fields of ``config``; it calls ``run(config(...), switches)``.

    The help leaves out the ``hidden`` fields: those that a config inherits and refuses with a message.
    """
    switches = inspect.signature(Switches).parameters
    hints = get_type_hints(Switches, include_extras=True)
    fields = sorted(dataclasses.fields(config), key=_place)
    own = get_type_hints(config)
    parameters = [_parameter(field, own[field.name], field.name in hidden) for field in fields]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=p.default, annotation=hints[name])
        for name, p in switches.items()
    ]

    def command(**values: Any) -> None:
        shown = Switches(**{name: values.pop(name) for name in switches})
        with uncollected() if shown.dry_run else nullcontext():
            if "device" in values:
                values["device"] = taken_device(values["device"], quiet=shown.quiet or shown.as_json)
            run(config(**values), shown)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    command.__name__ = run.__name__.lstrip("_")
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def taken_device(asked: str, *, quiet: bool) -> str:
    """The device to use; for ``auto``, rank 0 also prints it to stderr unless ``quiet``."""
    if asked != "auto":
        return asked
    from rco.distributed import is_first_rank
    from rco.models.loading import pick_device

    taken = pick_device("auto").type
    if not quiet and is_first_rank():
        typer.echo(f"device: {taken} (--device auto)", err=True)
    return taken


def _place(field: dataclasses.Field[Any]) -> int:
    """Sort key of a field in the help: the position of its panel."""
    panel = field.metadata.get("panel")
    return _PANELS.index(panel) if panel in _PANELS else -1


def _parameter(field: dataclasses.Field[Any], hint: Any, hidden: bool) -> inspect.Parameter:
    text, panel = as_flags(field.metadata["help"]), field.metadata.get("panel")
    hint = field.metadata.get("flag") or hint
    default: Any = field.default
    factory: Any = field.default_factory
    if default is dataclasses.MISSING and factory is not dataclasses.MISSING:
        default = factory()
    declared: Any
    if default is dataclasses.MISSING:
        declared = Annotated[hint, typer.Argument(help=text)]
        default = inspect.Parameter.empty
    else:
        flag = flag_of(field.name)
        if hint in (bool, bool | None):
            flag = f"{flag}/{flag_of(f'no_{field.name}')}"
        declared = Annotated[hint, typer.Option(flag, help=text, rich_help_panel=panel, hidden=hidden)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=declared)
