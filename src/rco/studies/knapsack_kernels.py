"""Compiled loops of the knapsack study: greedy repair, and the two Lagrangian methods with torch's Adam."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rco.core.knapsack_dual import entry, internal

__all__ = ["repaired_value", "run_multiplier"]

_compiled: Callable[[Any], Any] = entry
_inlined: Callable[[Any], Any] = internal


@_inlined
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


@_inlined
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


@_compiled
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


@_compiled
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
