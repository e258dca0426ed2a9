"""Softmax evaluations per retraction: safeguarded Newton beside the paper's bisection.

    python benchmarks/retraction.py --quick
    python benchmarks/retraction.py --out benchmarks/results

Both retract the same iterates, those of Riemannian Adam on the knapsack scenarios of the paper's appendix A.2; the
Newton result is the one that the run goes on with. Bisection has the printed setting: ``t`` between -50 and 50,
stopping at ``|C - B| <= 1e-8``, where Newton goes on to 1e-12 of B.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from knapsack_scenarios import make_instance
from parts import start_worker, write_report
from torch import Tensor

from rco.core.manifold import BudgetManifold
from rco.core.optimizer import RiemannianAdam
from rco.core.problem import AllocationProblem
from rco.runs import environment

RETRACTION_SCENARIOS = ("huge", "large", "medium", "correlated tight", "adversarial")
_PAPER_TOLERANCE = 1e-8

Progress = Callable[[int, int, str], None]


class _Recorder(BudgetManifold):
    """A manifold that retracts by Newton and notes what bisection would have taken."""

    def __init__(self, problem: AllocationProblem) -> None:
        super().__init__(problem, surface="==")
        budget = float(problem.budgets[0] - problem.feasible_range[0])
        # Bisection stops at half its tolerance, as Newton does; tolerances are relative to what can be spent.
        self.other = BudgetManifold(
            problem, retraction="bisection", tol=2 * _PAPER_TOLERANCE / budget, surface="=="
        )
        self.newton: list[tuple[int, float]] = []
        self.bisection: list[tuple[int, float]] = []

    def retract(self, x: Tensor, held: Tensor | None = None) -> Tensor:
        began = time.perf_counter()
        self.other.retract(x)
        between = time.perf_counter()
        moved = super().retract(x, held)
        ended = time.perf_counter()
        self.bisection.append((self.other.last_iterations, between - began))
        self.newton.append((self.last_iterations, ended - between))
        return moved


def run_retraction(
    scenarios: Sequence[str] = RETRACTION_SCENARIOS,
    steps: int = 1000,
    lr: float = 0.01,
    quick: bool = False,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Count evaluations on one instance of each scenario.

    Args:
        scenarios: Names of knapsack scenarios.
        steps: Retractions per scenario.
        lr: Learning rate of Adam.
        quick: At most 50 retractions.
        seed: Of the instance and the first logits.
        on_progress: Called with finished scenarios, their total, and the latest name.

    Returns:
        A JSON-ready record: mean, median, largest count and histogram of each, and microseconds per retraction.
    """
    if quick:
        steps = min(steps, 50)
    began = time.perf_counter()
    results = {}
    for number, name in enumerate(scenarios):
        instance = make_instance(name, 0, seed)
        manifold = _Recorder(instance.problem)
        values = torch.from_numpy(instance.values)
        x = manifold.random_point(seed)
        manifold.newton.clear()
        manifold.bisection.clear()
        optimizer = RiemannianAdam([x], manifold, lr=lr)
        for _ in range(steps):
            p = torch.softmax(x, dim=1)
            x.grad = p * ((p * values).sum(dim=1, keepdim=True) - values)
            optimizer.step()
        results[name] = {
            "groups": instance.problem.num_groups,
            "options": instance.problem.num_options,
            "newton": _statistics(manifold.newton),
            "bisection": _statistics(manifold.bisection),
        }
        if on_progress is not None:
            on_progress(number + 1, len(scenarios), name)
    return {
        "study": "retraction",
        "settings": {
            "steps": steps,
            "lr": lr,
            "seed": seed,
            "quick": quick,
            "bisection_tol": _PAPER_TOLERANCE,
        },
        "environment": environment(),
        "seconds": time.perf_counter() - began,
        "scenarios": results,
    }


def _statistics(records: list[tuple[int, float]]) -> dict[str, Any]:
    counts = np.array([count for count, _ in records])
    values, times = np.unique(counts, return_counts=True)
    return {
        "mean": float(counts.mean()),
        "median": float(np.median(counts)),
        "max": int(counts.max()),
        "histogram": {str(v): int(t) for v, t in zip(values, times, strict=True)},
        "microseconds": 1e6 * float(np.median([seconds for _, seconds in records])),
    }


def retraction_table(bench: Mapping[str, Any]) -> str:
    """Counts and times of both retractions as a Markdown table."""
    lines = [
        f"{bench['settings']['steps']} retractions per scenario, one instance. Newton to 1e-12 of the budget, "
        f"bisection on [-50, 50] to {bench['settings']['bisection_tol']:g}.",
        "",
        "| Scenario | N × K | Newton mean (max) | µs | Bisection mean (max) | µs |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, s in bench["scenarios"].items():
        newton, bisection = s["newton"], s["bisection"]
        lines.append(
            f"| {name} | {s['groups']} × {s['options']} | {newton['mean']:.2f} ({newton['max']}) | "
            f"{newton['microseconds']:.0f} | {bisection['mean']:.1f} ({bisection['max']}) | "
            f"{bisection['microseconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="retractions per scenario")
    parser.add_argument("--seed", type=int, default=0, help="of the instances and the first logits")
    parser.add_argument("--quick", action="store_true", help="at most 50 retractions")
    parser.add_argument("--out", type=Path, help="folder of retraction.json and retraction.md")
    options = parser.parse_args()
    start_worker(1)
    record = run_retraction(steps=options.steps, quick=options.quick, seed=options.seed)
    write_report(record, retraction_table(record), options.out, "retraction")


if __name__ == "__main__":
    main()
