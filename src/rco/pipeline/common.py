"""Stages that every kind of compression shares: timing, making a searcher, running it resumably."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rco import tables
from rco.core.problem import AllocationProblem
from rco.core.protocols import Objective
from rco.core.result import SearchResult, StepRecord
from rco.pipeline.progress import Progress
from rco.runs import RunDirectory

__all__ = ["make_searcher", "run_search", "slug", "timed"]


class timed:
    """Adds the seconds spent inside to the run's timings."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run, self._name = run, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        timings = dict(self._run.metrics.get("timings", {}))
        timings[self._name] = timings.get(self._name, 0.0) + time.perf_counter() - self._began
        self._run.update_metrics({"timings": timings})


def make_searcher(method: str, settings: Mapping[str, Any]) -> Any:
    """A method of the table with those of the settings that it has."""
    cls = tables.load(tables.METHODS, method, "method")
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in settings.items() if name in known})


def run_search(
    run: RunDirectory,
    searcher: Any,
    problem: AllocationProblem,
    objective: Objective,
    prior: Tensor | None,
    progress: Progress,
) -> SearchResult:
    """Search with a checkpoint after every step, from the newest checkpoint if there is one; keep the result."""
    checkpoint = run.load_checkpoint()
    step, state = checkpoint if checkpoint is not None else (0, None)
    run.truncate_history(step)

    def on_checkpoint(current: dict[str, Any]) -> None:
        run.append_history(current["history"][-1])
        run.save_checkpoint(current["step"], current)

    def on_step(record: StepRecord) -> None:
        progress.step(record)
        if record.phase == "refine":  # search steps are written with their checkpoint
            run.append_history(record)

    arguments: dict[str, Any] = {"prior": prior}
    if "on_checkpoint" in inspect.signature(searcher.search).parameters:
        arguments.update(on_checkpoint=on_checkpoint, resume=state)
    result: SearchResult = searcher.search(problem, objective, on_step=on_step, **arguments)
    run.write_result(result)
    run.clear_checkpoints()
    return result


def slug(text: str) -> str:
    """A folder's name from any text."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in text)
