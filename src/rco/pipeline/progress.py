"""How a long job tells whoever started it where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rco.core.result import StepRecord

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Receives stages, counts within a stage, search steps and messages."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        """A stage begins; the returned function takes (done, total)."""
        ...

    def step(self, record: StepRecord, spent: str = "") -> None:
        """A step of the search has ended, at a point whose expected cost is ``spent``."""
        ...

    def message(self, text: str) -> None:
        """Something worth a line."""
        ...


class Silent:
    """Says nothing."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Ignore it."""
        return lambda done, total: None

    def step(self, record: StepRecord, spent: str = "") -> None:
        """Ignore it."""

    def message(self, text: str) -> None:
        """Ignore it."""
