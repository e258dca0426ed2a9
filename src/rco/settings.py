"""Config fields that carry their own help text, so that flags can be made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["setting"]


def setting(default: Any = dataclasses.MISSING, *, help: str, panel: str | None = None) -> Any:
    """A config field with the text that ``--help`` shows; a list as default is copied for each config."""
    metadata = {"help": help, "panel": panel}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
