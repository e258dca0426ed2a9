"""Time and status of the exact knapsack with minimum counts: experts that may be removed or take 2, 3 or 4 bits.

    python benchmarks/min_counts.py --out benchmarks/results/min_counts.json

Values are Gumbel-perturbed logits as in a search. ``costs`` "equal": all experts have one size; "odd": every
expert has its own, up to 10**6. ``share`` is the budget above what the minimum counts cost, as a share of the
range.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix, kron

import rco
from rco.runs import environment

SHAPES = {"8 layers x 16": (8, 16, 4), "16 layers x 64": (16, 64, 8), "48 layers x 128": (48, 128, 8)}


def instance(shape, costs, share, samples, seed):
    layers, experts, top_k = SHAPES[shape]
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(layers), experts)
    size = np.ones(len(ids), dtype=np.int64) if costs == "equal" else rng.integers(1, 10**6, size=len(ids))
    minima = {"blocks": ids, "counts": [top_k] * layers, "options": [1, 2, 3]}
    ample = rco.AllocationProblem(size[:, None] * [0, 9, 13, 17], 10**12, sense="<=", min_counts=minima)
    low, high = ample.counted_range
    problem = ample.replace(budget=low[0] + int((high[0] - low[0]) * share))
    layer_scale = np.exp(rng.normal(size=layers))[ids][:, None]
    logits = np.cumsum(rng.exponential(size=(len(ids), 4)) * [0, 4, 1, 0.5] * layer_scale, axis=1)
    return problem, logits + rng.gumbel(size=(samples, len(ids), 4))


def highs(values, problem):
    """Value by HiGHS within 60 seconds, and its seconds."""
    counts = problem.min_counts
    cells = values.size
    choose = kron(csr_matrix(np.eye(problem.num_groups)), np.ones((1, problem.num_options)))
    counting = np.flatnonzero(np.tile(counts.counting, problem.num_groups))
    rows = counts.blocks[counting // problem.num_options]
    minima = csr_matrix((np.ones(len(counting)), (rows, counting)), shape=(len(counts.counts), cells))
    began = time.perf_counter()
    result = milp(
        -values.reshape(-1),
        integrality=np.ones(cells),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(choose, 1, 1),
            LinearConstraint(csr_matrix(problem.float_costs.reshape(1, -1)), -np.inf, problem.float_budgets),
            LinearConstraint(minima, counts.counts, np.inf),
        ],
        options={"mip_rel_gap": 1e-12, "time_limit": 60.0},
    )
    seconds = time.perf_counter() - began
    return (None if result.x is None else -result.fun), seconds, int(result.status)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=8)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for shape in SHAPES:
        for costs in ("equal", "odd"):
            for share in (0.02, 0.1, 0.3, 0.6):
                problem, values = instance(shape, costs, share, settings.samples, 0)
                rco.solve_mckp(values[:1], problem)  # compilation and preparation
                began = time.perf_counter()
                found = rco.solve_mckp(values, problem)
                seconds = time.perf_counter() - began
                counts = problem.min_counts
                binding = [(counts.taken(c) == counts.counts).mean() for c in found.allocation]
                free = rco.solve_mckp(values, problem.replace(min_counts=None))
                record = {
                    "shape": shape,
                    "costs": costs,
                    "share": share,
                    "milliseconds": 1e3 * seconds / settings.samples,
                    "status": {name: found.status.count(name) for name in set(found.status)},
                    "largest_gap": float(found.gap.max()),
                    "blocks_at_their_minimum": float(np.mean(binding)),
                    "samples_that_break_a_minimum_without_it": sum(
                        not counts.met(c) for c in free.allocation
                    ),
                }
                if shape == "8 layers x 16":
                    value, highs_seconds, status = highs(values[0], problem)
                    record["highs"] = {
                        "milliseconds": 1e3 * highs_seconds,
                        "status": status,
                        "value_above_ours": value - float(found.value[0]),
                    }
                records.append(record)
                print(json.dumps(record), flush=True)
    report = {"study": "minimum counts", "environment": environment(), "records": records}
    settings.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
