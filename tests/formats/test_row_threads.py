"""Rows of the compiled kernels spread over threads."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from rco.formats.integer_kernels_cpu import over_rows


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 64, 1001])
@pytest.mark.parametrize("row_bytes", [0, 1 << 16, 1 << 20])
def test_every_row_is_visited_once(threads, rows, row_bytes):
    visits = np.zeros(rows, dtype=np.int64)

    def task(start, stop):
        assert start < stop
        visits[start:stop] += 1

    over_rows(rows, 1 << 16, task, row_bytes)
    assert (visits == 1).all()


def test_several_threads_work_at_the_same_time(threads):
    # Nobody passes the barrier before all three are there.
    together = threading.Barrier(3, timeout=30)
    over_rows(3, 1 << 16, lambda start, stop: together.wait() and None)


def test_small_jobs_stay_on_the_calling_thread(threads):
    seen = set()
    over_rows(1000, 1, lambda start, stop: seen.add(threading.get_ident()))
    assert seen == {threading.get_ident()}


def test_a_failure_reaches_the_caller_and_the_threads_go_on(threads):
    def task(start, stop):
        if start <= 500 < stop:
            raise KeyError("row 500")

    with pytest.raises(KeyError, match="row 500"):
        over_rows(1000, 1 << 16, task, row_bytes=1 << 16)
    over_rows(1000, 1 << 16, lambda start, stop: None)


FORK = """
import os
import torch
from rco.formats.integer_kernels_cpu import over_rows

torch.set_num_threads(2)
count = lambda: (seen := [], over_rows(64, 1 << 16, lambda a, b: seen.append(b - a)))[0]
assert sum(count()) == 64
child = os.fork()
if child == 0:
    os._exit(0 if sum(count()) == 64 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_threads_of_its_own():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=120)
