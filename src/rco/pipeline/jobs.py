"""Independent jobs in parallel processes; each result is written when done, so that runs can be resumed.

A job is any picklable value with a name. Each process builds its worker once, from a function and its argument,
and runs jobs with it one after the other.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rco.atomic_files import read_json, write_json_atomic

__all__ = ["Named", "Worker", "run_jobs", "using_threads"]


class Named(Protocol):
    """A job; its name is also the name of its file."""

    @property
    def name(self) -> str:
        """Unique name, valid as a file name."""
        ...


class Worker(Protocol):
    """Runs jobs, one after the other."""

    def do(self, job: Any) -> dict[str, Any]:
        """Run a job; returns its result, ready for JSON."""
        ...


Job = TypeVar("Job", bound=Named)
Argument = TypeVar("Argument")


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    make_worker: Callable[[Argument], Worker],
    argument: Argument,
    *,
    workers: int = 1,
    threads: int = 1,
    here: Worker | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run jobs; returns results by name and reasons of failure by name.

    Jobs with a result in ``folder`` are not run again. A job that fails with a ValueError (say, an allowance too
    small for a method) does not stop the others and is tried again next time; any other error, or an interruption,
    stops all processes at once and keeps the finished jobs.

    Args:
        jobs: Jobs in the order of their start.
        folder: Folder with one JSON file per finished job.
        make_worker: Called with ``argument`` once in every process; both must be picklable.
        argument: Argument of ``make_worker``.
        workers: Processes; 1: run in this process.
        threads: Torch threads of each process.
        here: An existing worker of this process, for jobs that run in it.
        on_done: Called with (jobs done, total jobs).
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for job in jobs:
        path = folder / f"{job.name}.json"
        if path.exists():
            results[job.name] = read_json(path)
    missing = [job for job in jobs if job.name not in results]

    def finish(job: Job, outcome: Callable[[], dict[str, Any]]) -> None:
        try:
            results[job.name] = outcome()
        except ValueError as error:
            failed[job.name] = str(error)
        else:
            write_json_atomic(folder / f"{job.name}.json", results[job.name])
        if on_done is not None:
            on_done(len(results) + len(failed), len(jobs))

    if on_done is not None:
        on_done(len(results), len(jobs))
    if not missing:
        return results, failed
    if workers == 1:
        with using_threads(threads):
            worker = make_worker(argument) if here is None else here
            for job in missing:
                finish(job, lambda job=job: worker.do(job))  # type: ignore[misc]
        return results, failed
    with ProcessPoolExecutor(
        min(workers, len(missing)),
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(make_worker, argument, threads),
    ) as pool:
        futures: Mapping[Future[dict[str, Any]], Job] = {pool.submit(_do, job): job for job in missing}
        try:
            for future in as_completed(futures):
                finish(futures[future], future.result)
        except BaseException:
            _stop(pool)
            raise
    return results, failed


def _stop(pool: ProcessPoolExecutor) -> None:
    """Terminate a pool and its running jobs, which a shutdown would wait for."""
    # Like terminate_workers() of Python 3.14; a shutdown drops the list of processes.
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


_worker: Worker | None = None


def _start(make_worker: Callable[[Any], Worker], argument: Any, threads: int) -> None:
    global _worker
    # Ctrl-C reaches every process of a terminal; only the parent handles it and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    import torch

    torch.set_num_threads(threads)
    _worker = make_worker(argument)


def _leave_with_parent() -> None:
    """End this process when its parent has ended, for any reason."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(job: Any) -> dict[str, Any]:
    assert _worker is not None
    return _worker.do(job)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch compute with that many threads inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
