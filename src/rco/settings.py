"""Config fields that carry their own help text and limits, so that flags can be made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["check_settings", "setting"]


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    panel: str | None = None,
    least: float | None = None,
    positive: bool = False,
) -> Any:
    """A config field with the text that ``--help`` shows; a list as default is copied for each config.

    Args:
        default: As for a field of a dataclass.
        help: What it is.
        panel: Under which heading it is listed.
        least: The smallest number that makes sense, see :func:`check_settings`.
        positive: Whether a number must be larger than zero.
    """
    metadata = {"help": help, "panel": panel, "least": least, "positive": positive}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(config: Any) -> None:
    """Refuse numbers below what their fields allow, before any work is done with them.

    Raises:
        ValueError: Names the flag, what was got and what is allowed.
    """
    for field in dataclasses.fields(config):
        least, positive = field.metadata.get("least"), field.metadata.get("positive")
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is None:
                continue
            flag = f"--{field.name.replace('_', '-')}"
            # Written so that what is not a number is refused, too.
            if least is not None and not number >= least:
                raise ValueError(f"{flag} must be at least {least}, got {number}.")
            if positive and not number > 0:
                raise ValueError(f"{flag} must be positive, got {number}.")
