"""Microseconds of one Riemannian Adam step: projection, Adam, retraction and transport, under one budget and 48.

    python benchmarks/manifold_step.py --label numba --out benchmarks/results/manifold_step.json

Each call adds its records to the file under a label, so that two versions of the package can be compared. The
file holds the package as it is ("numba") and with the loops of ``rco.core.manifold_kernels`` written in numpy,
vectorised over groups and blocks, with the same bracket and accuracy ("numpy"): 2.1 to 2.5 times the time of a
step.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import rco
from rco.runs import environment

SIZES = [(56, 7, 1), (252, 7, 1), (1024, 2, 1), (1024, 2, 16), (6144, 4, 1), (6144, 4, 48)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for groups, options, blocks in SIZES:
        rng = np.random.default_rng(0)
        weights = rng.integers(1, 50, size=groups)
        ids = np.arange(groups) * blocks // groups
        share = [int(0.4 * (options - 1) * weights[ids == b].sum()) for b in range(blocks)]
        arguments = {"budget": share, "blocks": ids} if blocks > 1 else {"budget": share[0]}
        manifold = rco.BudgetManifold(rco.AllocationProblem(np.arange(options), weights=weights, **arguments))
        x = manifold.random_point(0)
        optimizer = rco.RiemannianAdam([x], manifold, lr=0.05)
        values = torch.from_numpy(rng.normal(size=(groups, options)))
        times = []
        for _ in range(settings.steps):
            p = torch.softmax(x, dim=1)
            noise = torch.from_numpy(rng.normal(size=(groups, options)))
            x.grad = p * ((p * values).sum(dim=1, keepdim=True) - values) + 0.1 * noise
            began = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - began)
        record = {
            "groups": groups,
            "options": options,
            "budgets": blocks,
            "microseconds": 1e6 * float(np.median(times)),
            "evaluations": manifold.softmax_evaluations / manifold.retractions,
        }
        records.append(record)
        print(settings.label, json.dumps(record), flush=True)
    known = json.loads(settings.out.read_text()) if settings.out.exists() else {"study": "manifold step"}
    known[settings.label] = {"environment": environment(), "steps": settings.steps, "records": records}
    settings.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
