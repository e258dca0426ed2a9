"""The thirteen knapsack scenarios of the paper's section 4.1 and appendix G, as seeded instances.

The paper names the scenarios and, for some, sizes and character; distributions and seeds are ours. Where it gives
no size an instance has 50 groups of 8 options. All costs are exact (integers or four decimals), so that the
optimum is too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rco.core.problem import AllocationProblem

_Parts = tuple[Any, np.ndarray, float, np.ndarray | None]  # costs, values, budget share of the range, weights


@dataclass(frozen=True)
class Scenario:
    """A family of instances.

    ``make`` draws costs, values, the budget's place between the lowest and highest total, and weights.
    """

    name: str
    groups: int
    options: int
    character: str  # one line for the report
    make: Callable[[np.random.Generator, int, int], _Parts]


@dataclass(frozen=True)
class Instance:
    """One knapsack: maximise ``sum_i values[i, k_i]`` within ``problem``'s budget."""

    scenario: str
    index: int
    problem: AllocationProblem
    values: np.ndarray  # (N, K) float64


def _plain(share: float) -> Callable[[np.random.Generator, int, int], _Parts]:
    def make(rng: np.random.Generator, groups: int, options: int) -> _Parts:
        return rng.integers(1, 21, (groups, options)), rng.uniform(0, 1, (groups, options)), share, None

    return make


def _small_easy(rng: np.random.Generator, groups: int, options: int) -> _Parts:
    # Each option costs one more than the last and is worth more, with falling returns.
    costs = np.tile(np.arange(1, options + 1), (groups, 1))
    return costs, np.sqrt(costs) * rng.uniform(0.5, 1.5, (groups, 1)), 0.5, None


def _float_costs(rng: np.random.Generator, groups: int, options: int) -> _Parts:
    return rng.uniform(1, 20, (groups, options)).round(4), rng.uniform(0, 1, (groups, options)), 0.2, None


def _adversarial(rng: np.random.Generator, groups: int, options: int) -> _Parts:
    # Costs clustered near budget / N, values nearly tied.
    costs = rng.uniform(9.5, 10.5, (groups, options)).round(4)
    return costs, 1 + 0.02 * rng.uniform(0, 1, (groups, options)), 0.3, None


def _nonuniform(rng: np.random.Generator, groups: int, options: int) -> _Parts:
    # Bit widths shared by all groups, whose sizes differ by a factor of twenty; each bit halves what is lost.
    weights, widths = rng.integers(1, 21, groups), np.arange(2, 2 + options)
    values = (
        rng.lognormal(0, 1, (groups, 1)) * (1 - 0.5 ** (widths - 1)) * rng.uniform(0.98, 1, (groups, options))
    )
    return np.tile(widths, (groups, 1)), values, 0.4, weights


def _boundary(rng: np.random.Generator, groups: int, options: int) -> _Parts:
    # Value almost proportional to cost: every way of filling the budget is nearly as good as the best.
    costs = rng.integers(1, 21, (groups, options))
    return costs, costs * (1 + 0.02 * rng.uniform(0, 1, (groups, options))), 0.5, None


def _correlated(share_of_minimum: float | None) -> Callable[[np.random.Generator, int, int], _Parts]:
    def make(rng: np.random.Generator, groups: int, options: int) -> _Parts:
        costs = rng.integers(1, 21, (groups, options))
        values = costs + rng.uniform(0, 4, (groups, options))
        if share_of_minimum is None:
            return costs, values, 0.5, None
        low, high = costs.min(axis=1).sum(), costs.max(axis=1).sum()
        return costs, values, share_of_minimum * low / (high - low), None

    return make


def _cheap_optimal(rng: np.random.Generator, groups: int, options: int) -> _Parts:
    # The cheaper the better: spending the budget can only hurt.
    costs = np.sort(rng.integers(1, 21, (groups, options)), axis=1)
    return costs, (21 - costs) * rng.uniform(0.9, 1.1, (groups, options)), 0.5, None


def _mixed_slack(rng: np.random.Generator, groups: int, options: int) -> _Parts:
    # Half of the groups want cheap options, half dear ones; the budget is more than both together need.
    costs = np.sort(rng.integers(1, 21, (groups, options)), axis=1)
    cheap = (np.arange(groups) % 2 == 0)[:, None]
    values = np.where(cheap, 21 - costs, costs) * rng.uniform(0.9, 1.1, (groups, options))
    return costs, values, 0.75, None


SCENARIOS: dict[str, Scenario] = {
    s.name: s
    for s in (
        Scenario("small easy", 50, 8, "one cost ladder for all, falling returns", _small_easy),
        Scenario("medium", 50, 8, "independent costs and values", _plain(0.25)),
        Scenario("large", 200, 16, "independent costs and values", _plain(0.2)),
        Scenario("huge", 1000, 32, "independent costs and values", _plain(0.2)),
        Scenario("float costs", 200, 16, "costs with four decimals", _float_costs),
        Scenario("tight budget", 50, 8, "budget 5 % of the way up from the cheapest", _plain(0.05)),
        Scenario("adversarial", 50, 8, "costs clustered near B/N, values nearly tied", _adversarial),
        Scenario("nonuniform", 50, 8, "group weights 1 to 20 on shared costs", _nonuniform),
        Scenario("boundary", 50, 8, "value nearly proportional to cost", _boundary),
        Scenario("correlated", 50, 8, "value = cost + noise", _correlated(None)),
        Scenario("correlated tight", 50, 8, "the same, budget 15 % above the minimum", _correlated(0.15)),
        Scenario(
            "cheap optimal", 50, 8, "cheaper is better: the optimum leaves budget unspent", _cheap_optimal
        ),
        Scenario("mixed slack", 50, 8, "half the groups want cheap options; budget to spare", _mixed_slack),
    )
}


def make_instance(name: str, index: int, seed: int = 0) -> Instance:
    """Instance ``index`` of a scenario, whose budget may be left unspent; the same arguments give the same one."""
    if name not in SCENARIOS:
        raise ValueError(f"No scenario is called {name!r}; there are {', '.join(SCENARIOS)}.")
    scenario = SCENARIOS[name]
    rng = np.random.default_rng([seed, index, zlib.crc32(name.encode())])
    costs, values, share, weights = scenario.make(rng, scenario.groups, scenario.options)
    total = costs * (1 if weights is None else weights[:, None])
    low, high = total.min(axis=1).sum(), total.max(axis=1).sum()
    budget = int(np.floor(low + share * (high - low)))
    problem = AllocationProblem(costs, budget, weights=weights, sense="<=")
    return Instance(name, index, problem, np.ascontiguousarray(values, dtype=np.float64))


def stack(instances: list[Instance]) -> tuple[AllocationProblem, np.ndarray]:
    """Instances as the blocks of one problem: separable budgets run side by side on one manifold."""
    costs = np.concatenate([instance.problem.directions[0] for instance in instances])
    weights = np.concatenate([instance.problem.weights for instance in instances])
    blocks = np.repeat(np.arange(len(instances)), [instance.problem.num_groups for instance in instances])
    budgets = [instance.problem.budgets[0] for instance in instances]
    problem = AllocationProblem(costs, budgets, weights=weights, blocks=blocks, sense="<=")
    return problem, np.concatenate([instance.values for instance in instances])
