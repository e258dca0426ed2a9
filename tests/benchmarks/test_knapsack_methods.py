"""The study's runs do what they say: the product's manifold, torch's Adam, an exact and feasible repair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from knapsack_methods import RECORD_EVERY, SWEEPS, repaired_value, run_method, start_logits
from knapsack_scenarios import SCENARIOS, make_instance, stack

from rco.core.knapsack import solve_mckp
from rco.core.manifold import BudgetManifold
from rco.core.optimizer import RiemannianAdam
from rco.core.problem import AllocationProblem


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_are_what_they_are_called(name: str) -> None:
    scenario = SCENARIOS[name]
    one, again, other = make_instance(name, 0), make_instance(name, 0), make_instance(name, 1)
    assert one.problem == again.problem
    assert np.array_equal(one.values, again.values)
    assert not np.array_equal(one.values, other.values)
    assert one.values.shape == (scenario.groups, scenario.options)
    assert one.values.min() >= 0
    solution = solve_mckp(one.values, one.problem)
    assert solution.status == "optimal"
    unspent = 1 - float(solution.cost) / float(one.problem.budgets[0])
    assert (unspent > 0.2) == (name in ("cheap optimal", "mixed slack"))


def test_the_thirteen_scenarios_and_their_sizes() -> None:
    assert len(SCENARIOS) == 13
    sizes = {name: (s.groups, s.options) for name, s in SCENARIOS.items()}
    assert sizes.pop("large") == sizes.pop("float costs") == (200, 16)
    assert sizes.pop("huge") == (1000, 32)
    assert set(sizes.values()) == {(50, 8)}
    with pytest.raises(ValueError, match="No scenario is called 'vast'"):
        make_instance("vast", 0)


@pytest.mark.parametrize(("method", "surface", "printed"), [
    ("manifold", "==", False), ("manifold_printed", "==", True),
    ("manifold_slack", "<=", False), ("manifold_slack_printed", "<=", True),
])  # fmt: skip
def test_stacked_runs_equal_the_optimizer_on_each_instance(method: str, surface: str, printed: bool) -> None:
    """Blocks side by side are the instances one by one, step for step."""
    instances = [make_instance("nonuniform", i) for i in range(3)]
    steps = 60
    traces = run_method(method, instances, steps, 0.01, seed=0)[0]
    start = start_logits(instances, 0)
    for j, instance in enumerate(instances):
        manifold = BudgetManifold(instance.problem, surface=surface)
        values = torch.from_numpy(instance.values)
        x = start[50 * j : 50 * (j + 1)].clone().requires_grad_()
        optimizer = RiemannianAdam([x], manifold, lr=0.01, one_sided=not printed, straighten=not printed)
        excess = []
        for _ in range(steps):
            optimizer.zero_grad()
            (-(torch.softmax(x, dim=1) * values).sum()).backward()  # autograd, not the closed form
            optimizer.step()
            excess.append(float(manifold.expected_cost(x.detach())) - float(instance.problem.budgets[0]))
        np.testing.assert_allclose(traces[j].excess, excess, rtol=0, atol=1e-7)
        final = repaired_value(
            x.detach().numpy(),
            instance.values,
            instance.problem.unit_costs[0],
            instance.problem.unit_budgets[0],
        )
        assert traces[j].values[-1] == pytest.approx(final, rel=1e-12)


@pytest.mark.parametrize("method", SWEEPS)
def test_multiplier_runs_equal_torch_adam(method: str) -> None:
    instance = make_instance("correlated", 0)
    setting = SWEEPS[method][-1]
    steps = 100
    trace = run_method(method, [instance], steps, 0.01, 0, [setting])[0][0]

    costs, values = torch.from_numpy(instance.problem.float_costs[0]), torch.from_numpy(instance.values)
    cost_range = float((costs.amax(1) - costs.amin(1)).sum())
    unit = float((values.amax(1) - values.amin(1)).sum()) / cost_range**2
    x = start_logits([instance], 0).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.01)
    multiplier, penalty = 0.0, setting.get("start", 0.0) * unit
    excess = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        p = torch.softmax(x, dim=1)
        over = (p * costs).sum() - float(instance.problem.budgets[0])
        (-(p * values).sum() + multiplier * over + penalty / 2 * over**2).backward()
        optimizer.step()
        p = torch.softmax(x.detach(), dim=1)
        excess.append(float((p * costs).sum()) - float(instance.problem.budgets[0]))
        multiplier += setting.get("rate", 0.0) * unit * excess[-1]
        if penalty and step % 20 == 0:
            multiplier += penalty * excess[-1]
            penalty = min(setting["growth"] * penalty, 1e4 * unit)
    np.testing.assert_allclose(trace.excess, excess, rtol=1e-7, atol=1e-7)
    assert len(trace.values) == steps // RECORD_EVERY


def test_repair_is_feasible_and_never_better_than_the_optimum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        costs = rng.integers(1, 12, (4, 3))
        values = rng.uniform(0, 1, (4, 3)).round(2)
        low, high = int(costs.min(axis=1).sum()), int(costs.max(axis=1).sum())
        budget = int(rng.integers(low, high + 1))
        feasible = [
            sum(values[i, k] for i, k in enumerate(choice))
            for choice in itertools.product(range(3), repeat=4)
            if sum(costs[i, k] for i, k in enumerate(choice)) <= budget
        ]
        repaired = repaired_value(rng.normal(size=(4, 3)), values, costs, budget)
        assert (
            min(abs(repaired - f) for f in feasible) < 1e-12
        )  # some assignment within the budget has this value
        # Started at the optimum itself, repair has nothing to do.
        solution = solve_mckp(values, AllocationProblem(costs, budget, sense="<="))
        best = np.eye(3)[np.asarray(solution.allocation)]
        assert repaired_value(best, values, costs, budget) == pytest.approx(max(feasible), abs=1e-12)


def test_repair_does_not_look_for_cheaper_and_better_options() -> None:
    values, costs = np.array([[5.0, 1.0]]), np.array([[1, 9]])
    assert repaired_value(np.array([[0.0, 1.0]]), values, costs, 10) == 1.0


def test_stacking_keeps_costs_weights_and_budgets() -> None:
    instances = [make_instance("nonuniform", i) for i in range(2)]
    problem, values = stack(instances)
    assert problem.sense == "<="
    assert problem.budget == tuple(i.problem.budget for i in instances)
    choices = np.zeros(100, dtype=int)
    assert problem.cost(choices) == tuple(i.problem.cost(np.zeros(50, dtype=int)) for i in instances)
    assert values.shape == (100, 8)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="No method is called 'magic'"):
        run_method("magic", [make_instance("medium", 0)], 5, 0.01, 0)
