"""Config fields that carry their own help text, so that flags can be made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["setting"]


def setting(default: Any = dataclasses.MISSING, *, help: str, panel: str | None = None) -> Any:
    """A config field with the text that ``--help`` shows."""
    return dataclasses.field(default=default, metadata={"help": help, "panel": panel})
