"""Methods side by side on one problem: the same tokens, the same evaluation, several seeds, one table.

:func:`run_comparison` knows nothing of what is compressed: jobs say what is run, a worker runs and judges them, and
each kind of compression makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rco.pipeline.compare_tables import Draw, write_comparison
from rco.pipeline.estimate import Estimate
from rco.pipeline.jobs import Named, Worker, run_jobs
from rco.pipeline.progress import Progress
from rco.runs import RunDirectory, available_cores, free_memory

__all__ = ["Comparison", "fitting_workers", "parse_methods", "run_comparison", "seeds_of"]

Argument = TypeVar("Argument")

_PROCESS = 2**29  # bytes that Python and torch take before there is a model


@dataclass(frozen=True)
class Comparison:
    """What was measured, and where it is written.

    Attributes:
        rows: One per budget and method: means and standard deviations over seeds.
        entries: One per search.
        failed: Searches that could not be run, and why.
        folder: Holds ``comparison.json``, ``comparison.md``, ``comparison.csv`` and the plots.
        plots: The pictures; none without matplotlib.
    """

    rows: list[dict[str, Any]]
    entries: list[dict[str, Any]]
    failed: dict[str, str]
    folder: Path
    plots: list[Path]


def parse_methods(text: str) -> list[tuple[str, str, float]]:
    """(label, method, share of the tokens) of a list such as ``rco,rco@0.1,evoesap``."""
    found = []
    for label in (part.strip() for part in text.split(",")):
        if not label:
            continue
        name, _, share = label.partition("@")
        try:
            value = float(share) if share else 1.0
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise ValueError(
                f"{label!r}: after @ comes the share of the tokens, between 0 and 1, as in rco@0.1."
            )
        found.append((label, name, value))
    if not found:
        raise ValueError("`methods` names no method; give a list such as rco,evoesap,random.")
    if len({label for label, _, _ in found}) < len(found):
        raise ValueError(f"`methods` names a method twice: {text}.")
    return found


def seeds_of(first: int, count: int) -> list[int]:
    """That many seeds from the first on."""
    if count < 1:
        raise ValueError(f"`seeds` must be at least 1, got {count}.")
    return list(range(first, first + count))


def fitting_workers(expected: Estimate, threads: int) -> int:
    """Processes that the cores and the free memory of this machine hold; one on a GPU."""
    if expected.on_gpu:
        return 1
    fitting, free = available_cores() // threads, free_memory()
    if free is not None:
        fitting = min(fitting, free // (expected.memory + _PROCESS))
    return max(1, fitting)


def run_comparison(
    run: RunDirectory,
    jobs: Sequence[Named],
    make_worker: Callable[[Argument], Worker],
    argument: Argument,
    describe: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    progress: Progress,
    *,
    draw: Draw,
    workers: int,
    threads: int,
    here: Worker | None = None,
) -> Comparison:
    """Run what the folder does not hold yet, then write the tables and the plots.

    Args:
        run: Where to.
        jobs: All searches; each makes one or more entries of the table.
        make_worker: See :func:`rco.pipeline.jobs.run_jobs`.
        argument: Of ``make_worker``.
        describe: From the entries to what the table says about all of them; see
            :func:`rco.pipeline.compare_tables.write_comparison`.
        progress: Is told of jobs that are done, and of those that failed.
        draw: Makes the plots.
        workers: Processes.
        threads: Of each process.
        here: A worker that this process has already.

    Raises:
        ValueError: Every search failed.
    """
    results, failed = run_jobs(
        jobs,
        run.folder / "jobs",
        make_worker,
        argument,
        workers=workers,
        threads=threads,
        here=here,
        on_done=progress.stage("comparison"),
    )
    for name, reason in failed.items():
        progress.message(f"{name} failed: {reason}")
    if not results:
        raise ValueError(_nothing_to_compare(failed))
    entries = [entry for job in jobs if job.name in results for entry in results[job.name]["entries"]]
    about = {**describe(entries), "failed": failed}
    rows, plots = write_comparison(run.folder, about, entries, progress, draw)
    return Comparison(rows, entries, failed, run.folder, plots)


def _nothing_to_compare(failed: Mapping[str, str]) -> str:
    """Every job that failed under its reason; many fail for the same."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed.items():
        by_reason.setdefault(reason, []).append(name)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    return f"No search succeeded, so there is nothing to compare. {reasons}"
