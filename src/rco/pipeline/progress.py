"""Progress of a long job: bars on a terminal, lines in a log, or calls of a function.

Stages are ``candidates``, ``sensitivities``, ``scores``, ``search``, ``refine``, ``tuning``,
``evaluation``, ``export``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rco.core.result import StepRecord

if TYPE_CHECKING:  # plans, which show no progress, need not import it
    import rich.progress
    from rich.console import Console

__all__ = [
    "BarProgress",
    "Calls",
    "LineProgress",
    "Progress",
    "ProgressEvent",
    "Silent",
    "follow",
    "make_progress",
]


@dataclass(frozen=True)
class ProgressEvent:
    """Argument of a progress function.

    Attributes:
        stage: The stage of the job; empty for a message.
        done: Finished parts of the stage, or steps of the search.
        total: All parts of the stage.
        text: The message, or a line about the step.
        record: The step of the search, in the stages ``search`` and ``refine``.
    """

    stage: str = ""
    done: int = 0
    total: int = 0
    text: str = ""
    record: StepRecord | None = None


@runtime_checkable
class Progress(Protocol):
    """Receives stages, counts within a stage, search steps and messages."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Begin a stage; the returned function takes (done, total)."""
        ...

    def step(self, record: StepRecord, spent: str = "") -> None:
        """Report a step of the search, whose expected cost is ``spent``."""
        ...

    def message(self, text: str) -> None:
        """Report a message."""
        ...


class Silent:
    """Ignores all progress."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Ignore it."""
        return lambda done, total: None

    def step(self, record: StepRecord, spent: str = "") -> None:
        """Ignore it."""

    def message(self, text: str) -> None:
        """Ignore it."""


class Calls:
    """Calls a function with a :class:`ProgressEvent` for every report."""

    def __init__(self, function: Callable[[ProgressEvent], object]) -> None:
        self._function = function

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Call the function for every finished part of the stage."""

        def count(done: int, total: int) -> None:
            self._function(ProgressEvent(name, done, total))

        return count

    def step(self, record: StepRecord, spent: str = "") -> None:
        """Call the function for every step."""
        text = _search_text(record, spent)
        self._function(ProgressEvent(record.phase, record.step, record.steps, text, record))

    def message(self, text: str) -> None:
        """Call the function with the text alone."""
        self._function(ProgressEvent(text=text))


@contextmanager
def follow(progress: bool | Progress | Callable[[ProgressEvent], object]) -> Iterator[Progress]:
    """Progress of a call: True shows it on stderr, False is silent, a function is called.

    Raises:
        TypeError: ``progress`` is of another type.
    """
    if isinstance(progress, bool):
        with make_progress(quiet=not progress) as shown:
            yield shown
    elif isinstance(progress, Progress):
        yield progress
    elif callable(progress):
        yield Calls(progress)
    else:
        raise TypeError(
            f"`progress` must be True, False, or a function of one ProgressEvent, got {progress!r} "
            f"({type(progress).__name__})."
        )


def make_progress(quiet: bool = False) -> BarProgress | LineProgress:
    """Bars on a terminal, occasional lines elsewhere, nothing when quiet."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet, highlight=False)
    return BarProgress(console) if console.is_terminal and not quiet else LineProgress(console)


def _search_text(record: StepRecord, spent: str) -> str:
    parts = [f"loss {record.loss:.4g}"]
    if spent:
        parts.append(spent)
    if record.entropy is not None:
        parts.append(f"entropy {record.entropy:.2f}")
    if record.decided is not None:
        parts.append(f"{record.decided} decided")
    if record.temperature is not None:
        parts.append(f"tau {record.temperature:.3g}")
    return ", ".join(parts)


class BarProgress:
    """Progress bars on a terminal."""

    def __init__(self, console: Console) -> None:
        import rich.progress

        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:<14}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def __enter__(self) -> BarProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _set(self, name: str, done: int, total: int, note: str = "") -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note=note)
        self._bars.update(self._tasks[name], completed=done, total=total, note=note)

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Add a bar."""
        return lambda done, total: self._set(name, done, total)

    def step(self, record: StepRecord, spent: str = "") -> None:
        """Update the bar of the search or of the refinement."""
        self._set(record.phase, record.step, record.steps, _search_text(record, spent))

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text)


class LineProgress:
    """Occasional lines, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, int] = {}

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr.flush()

    def _due(self, name: str, done: int, total: int) -> bool:
        tenth = 10 * done // max(total, 1)
        if self._shown.get(name) == tenth:
            return False
        self._shown[name] = tenth
        return True

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Print a line at every tenth."""

        def count(done: int, total: int) -> None:
            if self._due(name, done, total):
                self.message(f"{name}: {done}/{total}")

        return count

    def step(self, record: StepRecord, spent: str = "") -> None:
        """Print a line at every tenth of the search."""
        if not self._due(record.phase, record.step, record.steps):
            return
        text = f"{record.phase}: {record.step}/{record.steps}, {_search_text(record, spent)}"
        if record.seconds and record.step < record.steps:
            left = record.seconds / record.step * (record.steps - record.step)
            text += f", about {left:.0f} s left"
        self.message(text)

    def message(self, text: str) -> None:
        """Print the text on one line, however long."""
        self._console.print(text, soft_wrap=True)
