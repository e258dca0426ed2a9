"""The compared ways of handling the budget, on the same closed-form gradient and the same Adam.

Maximising ``sum_i <p_i, v_i>`` has the gradient ``p_ik (v_ik - <p_i, v_i>)``. The manifold methods run through the
package's own :class:`BudgetManifold` and :class:`RiemannianAdam`, the instances of a scenario side by side as
separable blocks; Adam acts per coordinate, so that is the same as running them one by one. The two Lagrangian
methods run in a compiled loop that does what ``torch.optim.Adam`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rco.core.manifold import BudgetManifold
from rco.core.optimizer import RiemannianAdam
from rco.studies.knapsack_kernels import repaired_value, run_multiplier
from rco.studies.knapsack_scenarios import Instance, stack

__all__ = ["METHODS", "RECORD_EVERY", "SWEEPS", "Trace", "run_method", "start_logits"]

RECORD_EVERY = 5  # steps between repaired values

METHODS: dict[str, str] = {
    "manifold": "Manifold",
    "manifold_printed": "Manifold as printed",
    "manifold_slack": "Manifold, slack",
    "manifold_slack_printed": "Manifold, slack as printed",
    "lagrangian": "Lagrangian",
    "augmented_lagrangian": "Augmented Lagrangian",
}

# As printed, Adam's step leaves the tangent space (it scales each coordinate by its own second moment) and the
# projection at a zero slack is two-sided; the package's own methods straighten the one and free the other.
_PRINTED = {"manifold_printed", "manifold_slack_printed"}

# Multiplier schedules, in units free of the instance: u is the range of total value over that of total cost R.
# Lagrangian: lambda += rate * u / R * (C - B) every step.
# Augmented: penalty starts at start * u / R; every 20 steps lambda += penalty * (C - B) and the penalty grows by
# the factor, up to 10^4 u / R.
SWEEPS: dict[str, list[dict[str, float]]] = {
    "lagrangian": [{"rate": rate} for rate in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)],
    "augmented_lagrangian": [
        {"start": start, "growth": growth} for start in (3.0, 30.0, 300.0) for growth in (1.0, 1.05)
    ],
}
_AUGMENTED_EVERY = 20
_AUGMENTED_LARGEST = 1e4


@dataclass
class Trace:
    """One method on one instance."""

    excess: np.ndarray  # (steps,) C - B after each step
    values: np.ndarray  # (steps // RECORD_EVERY,) value of the repaired assignment
    setting: dict[str, float]  # multiplier schedule; empty for the manifold
    evaluations: float = 0.0  # mean softmax evaluations per retraction


def start_logits(instances: list[Instance], seed: int) -> torch.Tensor:
    """Where every method starts: standard normal logits, shifted onto ``C = B``; all instances stacked."""
    problem, values = stack(instances, "==")
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    return BudgetManifold(problem).retract(logits)


def run_method(
    method: str,
    instances: list[Instance],
    steps: int,
    lr: float,
    seed: int,
    sweep: list[dict[str, float]] | None = None,
) -> list[list[Trace]]:
    """All runs of one method on a scenario's instances: one list of traces per multiplier schedule."""
    start = start_logits(instances, seed)
    if method in SWEEPS:
        settings = SWEEPS[method] if sweep is None else sweep
        return [_run_multipliers(instances, start, steps, lr, setting) for setting in settings]
    if method not in METHODS:
        raise ValueError(f"No method is called {method!r}; there are {', '.join(METHODS)}.")
    sense: Literal["==", "<="] = "<=" if "slack" in method else "=="
    return [_run_manifold(instances, start, steps, lr, sense, printed=method in _PRINTED)]


def _repaired(x: np.ndarray, instance: Instance) -> float:
    problem = instance.problem
    return float(repaired_value(x, instance.values, problem.unit_costs[0], problem.unit_budgets[0]))


def _run_manifold(
    instances: list[Instance],
    start: torch.Tensor,
    steps: int,
    lr: float,
    sense: Literal["==", "<="],
    printed: bool,
) -> list[Trace]:
    problem, stacked = stack(instances, sense)
    manifold = BudgetManifold(problem)
    values, budgets = torch.from_numpy(stacked), problem.float_budgets
    x = start.clone()
    optimizer = RiemannianAdam([x], manifold, lr=lr, one_sided=not printed, straighten=not printed)
    ends = np.cumsum([instance.problem.num_groups for instance in instances])
    rows = [slice(end - i.problem.num_groups, end) for end, i in zip(ends, instances, strict=True)]
    excess = np.empty((len(instances), steps))
    repaired = np.empty((len(instances), steps // RECORD_EVERY))
    used = np.zeros(len(instances))
    costs, first_rows = problem.float_costs[0], ends - [i.problem.num_groups for i in instances]
    p = torch.softmax(x, dim=1)
    for step in range(steps):
        x.grad = p * ((p * values).sum(dim=1, keepdim=True) - values)
        optimizer.step()
        used += manifold.iterations_per_budget
        p = torch.softmax(x, dim=1)
        # The plain formula, not the manifold's own account of it.
        excess[:, step] = np.add.reduceat((p.numpy() * costs).sum(axis=1), first_rows) - budgets
        if (step + 1) % RECORD_EVERY == 0:
            logits = x.numpy()
            for j, (where, instance) in enumerate(zip(rows, instances, strict=True)):
                repaired[j, step // RECORD_EVERY] = _repaired(logits[where], instance)
    return [Trace(excess[j], repaired[j], {}, float(used[j] / steps)) for j in range(len(instances))]


def _run_multipliers(
    instances: list[Instance], start: torch.Tensor, steps: int, lr: float, setting: dict[str, Any]
) -> list[Trace]:
    traces, first = [], 0
    for instance in instances:
        problem = instance.problem
        costs = problem.float_costs[0]
        x = start[first : first + problem.num_groups].numpy().copy()
        first += problem.num_groups
        cost_range = float((costs.max(axis=1) - costs.min(axis=1)).sum())
        value_range = float((instance.values.max(axis=1) - instance.values.min(axis=1)).sum())
        unit = value_range / cost_range / cost_range
        trace = Trace(np.empty(steps), np.empty(steps // RECORD_EVERY), dict(setting))
        run_multiplier(
            x,
            instance.values,
            costs,
            float(problem.budgets[0]),
            problem.unit_costs[0],
            problem.unit_budgets[0],
            steps,
            lr,
            setting.get("rate", 0.0) * unit,
            setting.get("start", 0.0) * unit,
            setting.get("growth", 1.0),
            _AUGMENTED_LARGEST * unit,
            _AUGMENTED_EVERY,
            RECORD_EVERY,
            trace.excess,
            trace.values,
        )
        traces.append(trace)
    return traces
