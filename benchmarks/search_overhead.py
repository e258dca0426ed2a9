"""What a search costs beside the loss: CPU time per sample of its loop, and of the first call in a new process.

    python benchmarks/search_overhead.py --out benchmarks/results/search_overhead.json

A sample is one loss and its gradient. Its overhead is the CPU time of a search by :func:`rco.minimize` without
exchanges, less that of as many losses with gradient alone, by the number of samples; for a plain function and for
one that takes a batch. The first call is one of two steps in a process that has imported torch and rco, with the
compiled code in numba's cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import rco
from rco.atomic_files import write_json_atomic
from rco.core.moves import uniform_allocation
from rco.core.objective import one_hot
from rco.runs import environment

GROUPS, OPTIONS, SAMPLES = 50, 5, 16


def case() -> tuple[rco.AllocationProblem, Callable[[Tensor], Tensor]]:
    """A problem of 50 x 5 and a quadratic loss, which takes gates (..., N, K)."""
    rng = np.random.default_rng(0)
    costs = rng.integers(1, 31, (GROUPS, OPTIONS))
    values = torch.from_numpy(rng.normal(size=GROUPS * OPTIONS))
    factors = torch.from_numpy(rng.normal(size=(GROUPS * OPTIONS, 16)))

    def loss(gates: Tensor) -> Tensor:
        flat = gates.flatten(-2)
        return flat @ values + 0.1 * (flat @ factors).square().sum(-1)

    return rco.AllocationProblem(costs, int(costs.mean() * GROUPS), sense="<="), loss


def seconds_alone(loss: Callable[[Tensor], Tensor], gates: Tensor, calls: int) -> float:
    """CPU seconds of so many losses with gradient."""
    began = time.process_time()
    for _ in range(calls):
        leaf = gates.detach().requires_grad_()
        value = loss(leaf).sum()
        torch.autograd.grad(value, leaf)
        value.item()
    return time.process_time() - began


def overhead(batched: bool, steps: int) -> float:
    """CPU milliseconds per sample beside the loss and its gradient."""
    problem, loss = case()
    gates = one_hot(uniform_allocation(problem), OPTIONS)
    alone = (
        seconds_alone(loss, gates.expand(SAMPLES, -1, -1), steps)
        if batched
        else seconds_alone(loss, gates, steps * SAMPLES)
    )
    began = time.process_time()
    rco.minimize(loss, problem, batched=batched, steps=steps, samples=SAMPLES, refine=0)
    return 1e3 * (time.process_time() - began - alone) / (steps * SAMPLES)


def first_call() -> float:
    """CPU seconds of the first call, in a new process."""
    code = (
        "import time, search_overhead, rco; problem, loss = search_overhead.case(); began = time.process_time(); "
        "rco.minimize(loss, problem, steps=2, refine=64); print(time.process_time() - began)"
    )
    here = Path(__file__).parent
    found = subprocess.run([sys.executable, "-c", code], cwd=here, check=True, capture_output=True, text=True)
    return float(found.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=7)
    settings = parser.parse_args(arguments)
    torch.set_num_threads(1)
    overhead(True, 2), overhead(False, 2)  # compiles
    found = {
        "plain_ms_per_sample": [overhead(False, settings.steps) for _ in range(settings.repeats)],
        "batched_ms_per_sample": [overhead(True, settings.steps) for _ in range(settings.repeats)],
        "first_call_s": [first_call() for _ in range(settings.repeats)],
    }
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(medians)
    write_json_atomic(
        settings.out,
        {
            "study": "search overhead",
            "groups": GROUPS,
            "options": OPTIONS,
            "steps": settings.steps,
            "samples": SAMPLES,
            "medians": medians,
            "repeats": found,
            "environment": environment(),
        },
    )


if __name__ == "__main__":
    main()
