"""The controlled study of section 4.1 and appendix G: how the budget is handled, all else equal."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import numpy as np

from rco.core.knapsack import Solution, solve_mckp
from rco.runs import environment
from rco.studies.knapsack_methods import METHODS, RECORD_EVERY, SWEEPS, Trace, run_method
from rco.studies.knapsack_scenarios import SCENARIOS, Instance, make_instance
from rco.studies.threads import one_thread

__all__ = ["run_study"]

_QUICK_STEPS = 400
_POINTS = 120  # of a trace that is kept for the figures
_WITHIN = 1.0  # per cent of the optimum that counts as there

Progress = Callable[[int, int, str], None]


def run_study(
    scenarios: Sequence[str] | None = None,
    instances: int = 3,
    steps: int = 5000,
    lr: float = 0.01,
    workers: int = 1,
    quick: bool = False,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Run every method on every scenario.

    Args:
        scenarios: Names from :data:`SCENARIOS`; all of them by default.
        instances: Random instances per scenario.
        steps: Optimizer steps per run.
        lr: Learning rate of Adam.
        workers: Processes.
        quick: One instance, at most 400 steps, and half of each multiplier sweep.
        seed: Of the instances and the first logits.
        on_progress: Called with the number of finished runs, their total, and what has just finished.

    Returns:
        A JSON-ready record: settings, environment, and for each scenario and method gaps, violations, steps to
        within one per cent, and thinned traces.
    """
    names = list(SCENARIOS) if scenarios is None else list(scenarios)
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown or not names:
        raise ValueError(f"Unknown scenarios {unknown}; there are {', '.join(SCENARIOS)}.")
    if instances < 1 or steps < RECORD_EVERY or lr <= 0 or workers < 1:
        raise ValueError(
            f"instances and workers must be at least 1, steps at least {RECORD_EVERY}, lr positive; got "
            f"instances={instances}, workers={workers}, steps={steps}, lr={lr}."
        )
    if quick:
        instances, steps = 1, min(steps, _QUICK_STEPS)
    began = time.perf_counter()
    # Largest first, so that no worker is left alone with a long run at the end.
    tasks = sorted(
        ((name, method, instances, steps, lr, seed, quick) for name in names for method in METHODS),
        key=lambda task: -SCENARIOS[task[0]].groups * SCENARIOS[task[0]].options,
    )
    finished: dict[tuple[str, str], dict[str, Any]] = {}

    def done(name: str, method: str, result: dict[str, Any]) -> None:
        finished[name, method] = result
        if on_progress is not None:
            on_progress(len(finished), len(tasks), f"{name}: {METHODS[method]}")

    if workers == 1:
        for task in tasks:
            done(task[0], task[1], _run_task(*task))
    else:
        context = multiprocessing.get_context("spawn")  # forking after torch has started threads is not safe
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = {pool.submit(_run_task, *task): task for task in tasks}
            for future in as_completed(futures):
                done(futures[future][0], futures[future][1], future.result())

    return {
        "study": "knapsack",
        "settings": {
            "instances": instances, "steps": steps, "lr": lr, "seed": seed, "quick": quick, "workers": workers,
            "record_every": RECORD_EVERY, "within_percent": _WITHIN,
        },
        "environment": environment(),
        "seconds": time.perf_counter() - began,
        "scenarios": {
            name: {
                "groups": SCENARIOS[name].groups,
                "options": SCENARIOS[name].options,
                "character": SCENARIOS[name].character,
                "optimum": finished[name, "manifold"]["optimum"],
                "optimum_cost": finished[name, "manifold"]["optimum_cost"],
                "budget": finished[name, "manifold"]["budget"],
                "methods": {method: finished[name, method]["result"] for method in METHODS},
            }
            for name in names
        },
    }  # fmt: skip


@one_thread()
def _run_task(
    name: str, method: str, instances: int, steps: int, lr: float, seed: int, quick: bool
) -> dict[str, Any]:
    """One method on one scenario, in a worker."""
    began = time.perf_counter()
    made = [make_instance(name, index, seed) for index in range(instances)]
    solutions = [solve_mckp(instance.values, instance.problem) for instance in made]
    for solution in solutions:
        assert isinstance(solution, Solution)
        if solution.status != "optimal":
            raise RuntimeError(
                f"The exact solver stopped at status {solution.status!r} on scenario {name!r}."
            )
    optimum = np.array([float(solution.value) for solution in solutions])
    sweep = SWEEPS[method][1::2] if quick and method in SWEEPS else None
    runs = run_method(method, made, steps, lr, seed, sweep)
    summaries = [_summary(method, traces, optimum) for traces in runs]
    best = min(range(len(runs)), key=lambda r: _preference(summaries[r]))
    result = summaries[best]
    result["seconds"] = time.perf_counter() - began
    if method in SWEEPS:
        result["sweep"] = [
            {**s["setting"], "gap_mean": s["gap_mean"], "violation_mean": s["violation_mean"]}
            for s in summaries
        ]
    return {
        "optimum": optimum.tolist(),
        "optimum_cost": [float(i.problem.cost(s.allocation)) for i, s in zip(made, solutions, strict=True)],
        "budget": [float(instance.problem.budgets[0]) for instance in made],
        "result": result,
    }


def _solve(instance: Instance) -> Solution:
    solution = solve_mckp(instance.values, instance.problem)
    assert isinstance(solution, Solution)
    if solution.status != "optimal":
        raise RuntimeError(
            f"The exact solver stopped at status {solution.status!r} on an instance of {instance.scenario!r}."
        )
    return solution


def _preference(summary: dict[str, Any]) -> tuple[float, float]:
    """Which multiplier schedule is shown: the smallest mean gap, then the smallest mean violation."""
    return round(summary["gap_mean"], 3), summary["violation_mean"]


def _summary(method: str, traces: list[Trace], optimum: np.ndarray) -> dict[str, Any]:
    gaps = np.array([100 * (1 - t.values / best) for t, best in zip(traces, optimum, strict=True)])
    # An inequality is violated by what exceeds the budget only.
    violated = np.array([np.maximum(t.excess, 0) if "slack" in method else np.abs(t.excess) for t in traces])
    reached = [np.flatnonzero(gap <= _WITHIN) for gap in gaps]
    within = [int(RECORD_EVERY * (r[0] + 1)) if r.size else None for r in reached]
    final = np.maximum(gaps[:, -1], 0.0)  # rounding puts an optimal assignment at -1e-14
    kept = np.unique(np.linspace(0, gaps.shape[1] - 1, _POINTS).round().astype(int))
    return {
        "setting": traces[0].setting,
        "gap": final.tolist(),
        "gap_mean": float(final.mean()),
        "gap_std": float(final.std()),
        "violation_mean": float(violated.mean()),
        "violation_max": float(violated.max()),
        "steps_within": within,
        "steps_within_mean": None if None in within else float(np.mean([w for w in within if w is not None])),
        "evaluations": float(np.mean([t.evaluations for t in traces])),
        "trace": {
            "step": (RECORD_EVERY * (kept + 1)).tolist(),
            "gap": [[_short(v) for v in gap[kept]] for gap in gaps],
            "excess": [[_short(v) for v in t.excess[RECORD_EVERY * (kept + 1) - 1]] for t in traces],
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")
