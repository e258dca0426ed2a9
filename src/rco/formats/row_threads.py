"""Spreading compiled loops over the rows of a layer on the threads that torch computes with.

Between its own operations torch's OpenMP threads wait awake for milliseconds. Threads beside them would share
their cores with that waiting: on two cores they take twice as long for a layer. So rows are handled by torch's own
threads, entered by the function that its compiled loops enter them by; where torch has no such function (a build
without OpenMP, an OpenMP that calls it otherwise), plain threads do.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

__all__ = ["over_rows"]

_PARALLEL_WORK = 1 << 16
_CACHE_BYTES = 1 << 19

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Task = Callable[[int, int], None]


def over_rows(rows: int, row_work: int, task: _Task, row_bytes: int = 0) -> None:
    """Call ``task(start, stop)`` over all rows, on as many threads as torch is set to use.

    Args:
        rows: Number of rows.
        row_work: Elements visited per row; small jobs run on the calling thread.
        task: Handles rows ``start`` to ``stop``; must release the GIL to gain from threads.
        row_bytes: If given, ranges are cut so that this much per row stays within a core's cache.
    """
    threads = torch.get_num_threads() if rows * row_work >= _PARALLEL_WORK else 1
    # As many ranges for every thread: of three, one of two threads would have two.
    turns = max(1, -(-rows * row_bytes // (_CACHE_BYTES * threads)))
    span = max(1, -(-rows // (threads * turns)))
    ranges = [(start, min(start + span, rows)) for start in range(0, rows, span)]
    if len(ranges) <= 1 or threads == 1:
        for start, stop in ranges:
            task(start, stop)
        return
    region = None if _forked else _torch_region()
    if region is None:
        for _ in _pool(threads).map(lambda ends: task(*ends), ranges):
            pass
    else:
        _in_region(region, threads, ranges, task)


def _in_region(region: Any, threads: int, ranges: Sequence[tuple[int, int]], task: _Task) -> None:
    """Let torch's threads take the ranges, each the next one as soon as it is free."""
    left: Iterator[tuple[int, int]] = iter(ranges)
    failures: list[BaseException] = []

    def body(_: Any) -> None:
        try:
            for start, stop in left:
                task(start, stop)
        except BaseException as failure:  # noqa: BLE001 - nothing may leave a C callback; raised again below
            failures.append(failure)

    # Always all of torch's threads: OpenMP ends those that a smaller team leaves out, and starts them anew later.
    region(_Body(body), None, threads, 0)
    if failures:
        raise failures[0]


@cache
def _torch_region() -> Any:
    """OpenMP's entry to a parallel region in the very library that torch is linked with; None if there is none."""
    extension: Any = torch._C
    try:
        region: Any = ctypes.CDLL(extension.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    region.argtypes, region.restype = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return region


_pools: dict[int, ThreadPoolExecutor] = {}
_pools_guard = threading.Lock()
_forked = False


def _pool(threads: int) -> ThreadPoolExecutor:
    with _pools_guard:
        if threads not in _pools:
            _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="rco-rows")
        return _pools[threads]


def _after_fork() -> None:
    """Threads do not survive a fork: a child makes plain ones of its own and never waits for OpenMP's."""
    global _forked
    _forked = True
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
