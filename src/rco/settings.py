"""Config fields with help text and limits, from which flags and arguments are made.

Messages and help texts name a setting as an argument between backquotes: `steps`, or `serve="vllm"`. The command
line shows these as its flags.
"""

from __future__ import annotations

import dataclasses
import types
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["DEVICE_HELP", "check_settings", "device_setting", "setting"]

DEVICE_HELP = "auto (cuda if there is one, else mps, else cpu), cpu, cuda, cuda:N or mps."


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    panel: str | None = None,
    least: float | None = None,
    positive: bool = False,
    flag: Any = None,
) -> Any:
    """A config field with its help text; a list as default is copied for each config.

    Args:
        default: As for a field of a dataclass.
        help: Help text.
        panel: Heading under which it is listed.
        least: The smallest allowed number, see :func:`check_settings`.
        positive: Whether a number must be larger than zero.
        flag: Type of the command line's flag, if Python accepts more types than a flag can express.
    """
    metadata = {"help": help, "panel": panel, "least": least, "positive": positive, "flag": flag}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def device_setting(panel: str | None = None) -> Any:
    """The field ``device`` of a config; :func:`check_settings` replaces ``auto`` by the actual device."""
    return setting("auto", help=DEVICE_HELP, panel=panel)


def check_settings(config: Any) -> None:
    """Raise errors for wrong types and too small numbers, before any work; resolve ``device``.

    A config holds the name of a device and never ``auto``, so that a run's folder records the actual device and
    processes that get the config agree.

    Raises:
        TypeError: A value is not of the field's type; the message names setting, value and allowed types.
        ValueError: The same for a number that is too small, or a word that is not one of the choices.
    """
    if getattr(config, "device", None) == "auto":
        from rco.models.loading import pick_device

        object.__setattr__(config, "device", pick_device("auto").type)  # configs are frozen
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        _check_type(field.name, value, hints[field.name])
        least, positive = field.metadata.get("least"), field.metadata.get("positive")
        for number in value if isinstance(value, tuple) else (value,):
            if number is None:
                continue
            # Written so that NaN is rejected, too.
            if least is not None and not number >= least:
                raise ValueError(f"`{field.name}` must be at least {least}, got {number}.")
            if positive and not number > 0:
                raise ValueError(f"`{field.name}` must be positive, got {number}.")


def _check_type(name: str, value: Any, hint: Any) -> None:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(_fits(value, one) for one in alternatives):
        return
    choices = [choice for one in alternatives if get_origin(one) is Literal for choice in get_args(one)]
    if choices and isinstance(value, str):
        raise ValueError(f"`{name}` must be one of {', '.join(map(str, choices))}, got {value!r}.")
    allowed = " or ".join(_type_name(one) for one in alternatives)
    raise TypeError(f"`{name}` must be {allowed}, got {value!r} ({type(value).__name__}).")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(entry, arguments[0]) for entry in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        return f"a list of {'strings' if arguments[0] is str else 'values'}"
    if origin is tuple:
        return f"{len(arguments)} numbers"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "a string", Path: "a path"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))
