"""The methods of the knapsack study: ways to handle the budget, on the same closed-form gradient and Adam.

Maximising ``sum_i <p_i, v_i>`` has the gradient ``p_ik (v_ik - <p_i, v_i>)``. The manifold methods run through the
package's own :class:`BudgetManifold` and :class:`RiemannianAdam`, the instances of a scenario side by side as
separable blocks; Adam acts per coordinate, so that is the same as running them one by one. The two Lagrangian
methods run in a compiled loop that does what ``torch.optim.Adam`` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from knapsack_scenarios import Instance, stack
from numba import njit

from rco.core.manifold import BudgetManifold
from rco.core.optimizer import RiemannianAdam

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
    problem, values = stack(instances)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    return BudgetManifold(problem, surface="==").retract(logits)


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
    surface: Literal["==", "<="] = "<=" if "slack" in method else "=="
    return [_run_manifold(instances, start, steps, lr, surface, printed=method in _PRINTED)]


def _repaired(x: np.ndarray, instance: Instance) -> float:
    problem = instance.problem
    return float(repaired_value(x, instance.values, problem.unit_costs[0], problem.unit_budgets[0]))


def _run_manifold(
    instances: list[Instance],
    start: torch.Tensor,
    steps: int,
    lr: float,
    surface: Literal["==", "<="],
    printed: bool,
) -> list[Trace]:
    problem, stacked = stack(instances)
    manifold = BudgetManifold(problem, surface=surface)
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


# ---------------------------------------------------------------- compiled loops


@njit(error_model="numpy")
def _best_saving(values: np.ndarray, costs: np.ndarray, i: int, current: int) -> tuple[int, float]:
    """Of the cheaper options of group i, the one that loses the least value per unit of cost saved."""
    best, loss = -1, math.inf
    for k in range(values.shape[1]):
        saved = costs[i, current] - costs[i, k]
        if saved > 0:
            rate = (values[i, current] - values[i, k]) / saved
            if rate < loss:
                best, loss = k, rate
    return best, loss


@njit(error_model="numpy")
def _best_gain(values: np.ndarray, costs: np.ndarray, i: int, current: int, room: int) -> tuple[int, float]:
    """Of the costlier options of group i that fit, the one that gains the most value per unit of cost."""
    best, gain = -1, 0.0
    for k in range(values.shape[1]):
        extra = costs[i, k] - costs[i, current]
        if 0 < extra <= room:
            rate = (values[i, k] - values[i, current]) / extra
            if rate > gain:
                best, gain = k, rate
    return best, gain


@njit(cache=True, error_model="numpy")
def repaired_value(x: np.ndarray, values: np.ndarray, costs: np.ndarray, budget: int) -> float:
    """Value of the likeliest assignment after greedy repair.

    While it costs too much, switch where the least value is lost per unit of cost saved; then, while a costlier
    option of higher value fits, switch where the most is gained per unit. Options that are cheaper and better are
    not sought: a method that does not find them by itself gets no help. Costs are integers, so the test is exact.
    """
    n = len(x)
    chosen = np.empty(n, dtype=np.int64)
    room = budget
    for i in range(n):
        chosen[i] = np.argmax(x[i])
        room -= costs[i, chosen[i]]
    option, rate = np.empty(n, dtype=np.int64), np.empty(n)

    if room < 0:
        for i in range(n):
            option[i], rate[i] = _best_saving(values, costs, i, chosen[i])
        while room < 0:
            i = int(np.argmin(rate))
            room += costs[i, chosen[i]] - costs[i, option[i]]
            chosen[i] = option[i]
            option[i], rate[i] = _best_saving(values, costs, i, chosen[i])

    for i in range(n):
        option[i], rate[i] = _best_gain(values, costs, i, chosen[i], room)
    while True:
        i = int(np.argmax(rate))
        if rate[i] <= 0.0:
            break
        extra = costs[i, option[i]] - costs[i, chosen[i]]
        if extra > room:  # the room has shrunk since this was found
            option[i], rate[i] = _best_gain(values, costs, i, chosen[i], room)
            continue
        room -= extra
        chosen[i] = option[i]
        option[i], rate[i] = _best_gain(values, costs, i, chosen[i], room)

    total = 0.0
    for i in range(n):
        total += values[i, chosen[i]]
    return total


@njit(cache=True, error_model="numpy")
def run_multiplier(
    x: np.ndarray,
    values: np.ndarray,
    costs: np.ndarray,
    budget: float,
    unit_costs: np.ndarray,
    unit_budget: int,
    steps: int,
    lr: float,
    rate: float,
    penalty: float,
    growth: float,
    largest: float,
    every: int,
    record_every: int,
    violation: np.ndarray,
    recorded: np.ndarray,
) -> None:
    """Minimise ``-sum p.v + (lambda + penalty/2 (C - B)) (C - B)`` by Adam on the logits; ``x`` ends at the result.

    Lagrangian: no penalty, ``lambda += rate (C - B)`` at every step. Augmented Lagrangian: no rate, and every
    ``every`` steps ``lambda += penalty (C - B)``, then the penalty grows up to ``largest``.

    ``violation[t]`` receives C - B after step t + 1, ``recorded[t // record_every]`` the repaired value.
    """
    n, k = x.shape
    first, second, p = np.zeros((n, k)), np.zeros((n, k)), np.empty((n, k))
    mean_cost, mean_value = np.empty(n), np.empty(n)
    multiplier = 0.0
    excess = 0.0
    for step in range(steps + 1):
        excess = -budget
        for i in range(n):
            top = x[i].max()
            weight, mean_cost[i], mean_value[i] = 0.0, 0.0, 0.0
            for o in range(k):
                e = math.exp(x[i, o] - top)
                p[i, o] = e
                weight += e
                mean_cost[i] += e * costs[i, o]
                mean_value[i] += e * values[i, o]
            for o in range(k):
                p[i, o] /= weight
            mean_cost[i] /= weight
            mean_value[i] /= weight
            excess += mean_cost[i]

        if step > 0:  # what the step before has led to
            violation[step - 1] = excess
            if step % record_every == 0:
                recorded[step // record_every - 1] = repaired_value(x, values, unit_costs, unit_budget)
            multiplier += rate * excess
            if penalty > 0.0 and step % every == 0:
                multiplier += penalty * excess
                penalty = min(growth * penalty, largest)
        if step == steps:
            break

        force = multiplier + penalty * excess
        scale_first = 1.0 - 0.9 ** (step + 1)
        scale_second = math.sqrt(1.0 - 0.999 ** (step + 1))
        for i in range(n):
            for o in range(k):
                g = p[i, o] * (force * (costs[i, o] - mean_cost[i]) - (values[i, o] - mean_value[i]))
                first[i, o] += 0.1 * (g - first[i, o])
                second[i, o] = 0.999 * second[i, o] + 0.001 * g * g
                denominator = math.sqrt(second[i, o]) / scale_second + 1e-8
                x[i, o] -= (lr / scale_first) * first[i, o] / denominator
