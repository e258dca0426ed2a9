"""Sixteen joint budgets (the paper's appendix A.8): violations of the manifold and of two Lagrangian methods.

    python benchmarks/multi_budget.py --quick
    python benchmarks/multi_budget.py --out runs/multi-budget

knapsack_study.py runs this study, too, and draws its figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import start_worker, write_report
from torch import Tensor

from rco.core.manifold import BudgetManifold
from rco.core.optimizer import RiemannianAdam
from rco.core.problem import AllocationProblem
from rco.runs import environment

_TITLES = {
    "manifold": "Manifold",
    "lagrangian": "Lagrangian",
    "augmented_lagrangian": "Augmented Lagrangian",
}
_RATES = (0.01, 0.1, 1.0, 10.0)  # Lagrangian
_STARTS = (3.0, 30.0, 300.0, 3000.0)  # augmented Lagrangian
_EVERY, _GROWTH, _LARGEST = 20, 1.05, 1e5
_POINTS = 100

Progress = Callable[[int, int, str], None]


def make_multi_budget_problem(
    groups: int = 500, options: int = 32, budgets: int = 16, seed: int = 0
) -> tuple[AllocationProblem, np.ndarray]:
    """Independent integer costs under every budget, and values (N, K).

    The budgets are the expected costs of some distribution that favours options cheap under all of them, so they
    can be met together and bind.
    """
    rng = np.random.default_rng([seed, groups, options, budgets])
    costs = rng.integers(1, 21, (budgets, groups, options))
    values = rng.uniform(0, 1, (groups, options))
    logits = rng.normal(size=(groups, options)) - 0.05 * costs.sum(axis=0) / np.sqrt(budgets)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    targets = [int(v) for v in (costs * shares).sum(axis=(1, 2))]
    return AllocationProblem(costs, targets), values


def run_multi_budget(
    groups: int = 500,
    options: int = 32,
    budgets: int = 16,
    steps: int = 2000,
    lr: float = 0.01,
    quick: bool = False,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Manifold, Lagrangian and augmented Lagrangian under q joint budgets; the best schedule of each is shown.

    Args:
        groups: N.
        options: K.
        budgets: q.
        steps: Optimizer steps.
        lr: Learning rate of Adam.
        quick: At most 120 groups of 16 options and 150 steps, and two schedules for each Lagrangian.
        seed: Of the instance and the first logits.
        on_progress: Called with finished runs, their total, and a label.

    Returns:
        A JSON-ready record with relative violations and continuous values against the linear relaxation's.
    """
    began = time.perf_counter()
    if quick:
        groups, options, steps = min(groups, 120), min(options, 16), min(steps, 150)
    problem, array = make_multi_budget_problem(groups, options, budgets, seed)
    values = torch.from_numpy(array)
    manifold = BudgetManifold(problem)
    start = manifold.random_point(seed)
    rates, starts = (_RATES[1:3], _STARTS[1:3]) if quick else (_RATES, _STARTS)
    plan: list[tuple[str, float]] = [("manifold", 0.0)]
    plan += [("lagrangian", rate) for rate in rates] + [("augmented_lagrangian", s) for s in starts]
    results: dict[str, list[dict[str, Any]]] = {}
    for number, (method, setting) in enumerate(plan):
        if method == "manifold":
            run = _run_manifold(manifold, values, start, steps, lr)
        else:
            run = _run_multipliers(problem, values, start, steps, lr, method, setting)
        results.setdefault(method, []).append(_summary(run, setting))
        if on_progress is not None:
            on_progress(number + 1, len(plan), f"{budgets} budgets: {method}")
    bound = _linear_optimum(problem, array)
    shown = {}
    for method, runs in results.items():
        best = min(runs, key=lambda r: r["violation_mean"])
        best["gap_percent"] = 100 * (1 - best.pop("value") / bound)
        best["sweep"] = [{"setting": r["setting"], "violation_mean": r["violation_mean"]} for r in runs]
        shown[method] = best
    return {
        "study": "multi_budget",
        "settings": {
            "groups": groups, "options": options, "budgets": budgets, "steps": steps, "lr": lr, "seed": seed,
            "quick": quick,
        },
        "environment": environment(),
        "seconds": time.perf_counter() - began,
        "methods": shown,
    }  # fmt: skip


def _gradient(p: Tensor, reward: Tensor) -> Tensor:
    """Of ``-sum <p, reward>`` with respect to the logits."""
    return p * ((p * reward).sum(dim=1, keepdim=True) - reward)


def _run_manifold(
    manifold: BudgetManifold, values: Tensor, start: Tensor, steps: int, lr: float
) -> dict[str, Any]:
    budgets = torch.from_numpy(manifold.problem.float_budgets)
    costs = torch.from_numpy(manifold.problem.float_costs).flatten(1)
    x = start.clone()
    optimizer = RiemannianAdam([x], manifold, lr=lr)
    manifold.softmax_evaluations = manifold.retractions = 0
    relative = np.empty((steps, len(budgets)))
    began = time.perf_counter()
    p = torch.softmax(x, dim=1)
    for step in range(steps):
        x.grad = _gradient(p, values)
        optimizer.step()
        p = torch.softmax(x, dim=1)
        relative[step] = ((costs @ p.flatten() - budgets) / budgets).numpy()
    return {
        "relative": relative,
        "value": float((p * values).sum()),
        "milliseconds": 1e3 * (time.perf_counter() - began) / steps,
        "evaluations": manifold.softmax_evaluations / manifold.retractions,
    }


def _run_multipliers(
    problem: AllocationProblem,
    values: Tensor,
    start: Tensor,
    steps: int,
    lr: float,
    method: str,
    setting: float,
) -> dict[str, Any]:
    costs = torch.from_numpy(problem.float_costs)
    flat, budgets = costs.flatten(1), torch.from_numpy(problem.float_budgets)
    cost_range = (costs.amax(dim=2) - costs.amin(dim=2)).sum(dim=1)
    unit = (values.amax(dim=1) - values.amin(dim=1)).sum() / cost_range**2
    augmented = method == "augmented_lagrangian"
    penalty = setting * unit if augmented else torch.zeros_like(unit)
    multiplier = torch.zeros_like(budgets)
    x = start.clone()
    optimizer = torch.optim.Adam([x], lr=lr)
    relative = np.empty((steps, len(budgets)))
    began = time.perf_counter()
    p = torch.softmax(x, dim=1)
    excess = flat @ p.flatten() - budgets
    for step in range(steps):
        force = multiplier + penalty * excess
        x.grad = _gradient(p, values - (force @ flat).view_as(values))
        optimizer.step()
        p = torch.softmax(x, dim=1)
        excess = flat @ p.flatten() - budgets
        relative[step] = (excess / budgets).numpy()
        if not augmented:
            multiplier = multiplier + setting * unit * excess
        elif (step + 1) % _EVERY == 0:
            multiplier = multiplier + penalty * excess
            penalty = torch.minimum(_GROWTH * penalty, _LARGEST * unit)
    return {
        "relative": relative,
        "value": float((p * values).sum()),
        "milliseconds": 1e3 * (time.perf_counter() - began) / steps,
        "evaluations": None,
    }


def _summary(run: dict[str, Any], setting: float) -> dict[str, Any]:
    relative = run.pop("relative")
    kept = np.unique(np.linspace(0, len(relative) - 1, _POINTS).round().astype(int))
    return {
        **run,
        "setting": setting,
        "violation_mean": float(np.abs(relative).mean()),
        "violation_max": float(np.abs(relative).max()),
        "violation_final": float(np.abs(relative[-1]).max()),
        "trace": {
            "step": (kept + 1).tolist(),
            "relative": [[float(f"{v:.3g}") for v in row] for row in relative[kept].T],
        },
    }


def _linear_optimum(problem: AllocationProblem, values: np.ndarray) -> float:
    """The largest expected value at exactly these expected costs."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix, kron, vstack
    from scipy.sparse import eye as identity

    n, k = values.shape
    choose = kron(identity(n), np.ones((1, k)))
    matrix = vstack([choose, csr_matrix(problem.float_costs.reshape(problem.num_joint, -1))])
    result = linprog(
        -values.ravel(),
        A_eq=matrix.tocsr(),
        b_eq=np.concatenate([np.ones(n), problem.float_budgets]),
        bounds=(0, None),
        method="highs",
        options={
            "time_limit": 300.0
        },  # without one, HiGHS has been seen to idle for minutes after it is done
    )
    if result.status != 0:
        raise RuntimeError(f"The linear relaxation could not be solved: {result.message}")
    return float(-result.fun)


def multi_budget_table(record: Mapping[str, Any]) -> str:
    """Violations, gap and time of every method as a Markdown table."""
    settings = record["settings"]
    lines = [
        f"{settings['budgets']} joint budgets, {settings['groups']} × {settings['options']}, "
        f"{settings['steps']} steps. Violations are relative to each budget; the gap is that of the expected value "
        "to the linear relaxation's optimum.",
        "",
        "| Method | mean violation | largest | at the end | gap in % | ms per step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, result in record["methods"].items():
        violations = (result[f"violation_{kind}"] for kind in ("mean", "max", "final"))
        cells = " | ".join("0" if value == 0 else f"{value:.1e}" for value in violations)
        lines.append(
            f"| {_TITLES[method]} | {cells} | {result['gap_percent']:.2f} | {result['milliseconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the instance and the first logits")
    parser.add_argument("--quick", action="store_true", help="a smaller version, in seconds")
    parser.add_argument("--out", type=Path, help="folder of multi_budget.json and multi_budget.md")
    options = parser.parse_args()
    start_worker(1)
    record = run_multi_budget(steps=options.steps, quick=options.quick, seed=options.seed)
    write_report(record, multi_budget_table(record), options.out, "multi_budget")


if __name__ == "__main__":
    main()
