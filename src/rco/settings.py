"""Config fields that carry their own help text and limits, so that flags can be made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["DEVICE_HELP", "check_settings", "device_setting", "setting"]

DEVICE_HELP = "auto (cuda if there is one, else mps, else cpu), cpu, cuda, cuda:N or mps."


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


def device_setting(panel: str | None = None) -> Any:
    """The field ``device`` of a config; :func:`check_settings` replaces ``auto`` by the device it stands for."""
    return setting("auto", help=DEVICE_HELP, panel=panel)


def check_settings(config: Any) -> None:
    """Refuse numbers below what their fields allow, before any work is done with them; settle ``device``.

    A config holds the name of a device and never ``auto``, so that a run's folder records what it ran on and
    processes that are handed the config agree.

    Raises:
        ValueError: Names the flag, what was got and what is allowed.
    """
    if getattr(config, "device", None) == "auto":
        from rco.models.loading import pick_device

        object.__setattr__(config, "device", pick_device("auto").type)  # configs are frozen
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
