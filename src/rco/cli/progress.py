"""Progress bars on stderr: one line per stage, and for a search its loss, spread and time left."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rco.core.result import StepRecord

__all__ = ["BarProgress", "LineProgress", "make_progress"]


def make_progress(quiet: bool = False) -> BarProgress | LineProgress:
    """Bars on a terminal, occasional lines elsewhere, nothing when quiet."""
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
    """Bars for people who watch."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

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
        """A bar of its own."""
        return lambda done, total: self._set(name, done, total)

    def step(self, record: StepRecord, spent: str = "") -> None:
        """The search's bar, or the refinement's."""
        self._set(record.phase, record.step, record.steps, _search_text(record, spent))

    def message(self, text: str) -> None:
        """A line above the bars."""
        self._bars.console.print(text)


class LineProgress:
    """A line now and then, for logs."""

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
        """A line at every tenth."""

        def count(done: int, total: int) -> None:
            if self._due(name, done, total):
                self.message(f"{name}: {done}/{total}")

        return count

    def step(self, record: StepRecord, spent: str = "") -> None:
        """A line at every tenth of the search."""
        if not self._due(record.phase, record.step, record.steps):
            return
        text = f"{record.phase}: {record.step}/{record.steps}, {_search_text(record, spent)}"
        if record.seconds and record.step < record.steps:
            left = record.seconds / record.step * (record.steps - record.step)
            text += f", about {left:.0f} s left"
        self.message(text)

    def message(self, text: str) -> None:
        """The line itself, however long."""
        self._console.print(text, soft_wrap=True)
