"""Conversion of arguments in messages to flags.

Messages of the library name arguments between backquotes: `group_size`, `serve="vllm"`, `symmetric=False`. On the
command line these become ``--group-size``, ``--serve vllm`` and ``--no-symmetric``.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from functools import cache

__all__ = ["as_flags", "flag_of"]

_ARGUMENT = re.compile(r"`([a-z][a-z_]*)(?:=([^`]*))?`")


def as_flags(text: str) -> str:
    """Text with every argument between backquotes replaced by its flag."""
    return _ARGUMENT.sub(lambda found: _flag(found[0], found[1], found[2]), text)


def flag_of(name: str) -> str:
    """The flag of an argument: ``--group-size`` of ``group_size``."""
    return f"--{name.replace('_', '-')}"


def _flag(whole: str, name: str, value: str | None) -> str:
    kind = _arguments().get(name)
    if kind is None:
        return whole
    if kind == "positional":
        return name.upper()
    if value is None or value == "True":
        return flag_of(name)
    if value == "False":
        return flag_of(f"no_{name}")
    unquoted = re.fullmatch(r"""\[?(["'])(.*)\1\]?""", value)
    return f"{flag_of(name)} {shlex.quote(unquoted[2]) if unquoted else value}"


@cache
def _arguments() -> dict[str, str]:
    """Arguments of all commands by name, and whether each is positional."""
    from rco.pipeline import configs

    found: dict[str, str] = {}
    public = [getattr(configs, name) for name in configs.__all__]
    for config in filter(dataclasses.is_dataclass, public):
        for field in dataclasses.fields(config):
            missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            found[field.name] = "positional" if missing else "flag"
    return found
