"""Two budgets at once: both are met exactly, whatever the search."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from rco.compression.assignment import assignment_problem
from rco.compression.budget import Budget
from rco.compression.costs import Costs
from rco.compression.plan import make_plan
from rco.compression.priors import logits_from_losses
from rco.compression.second_budget import SecondBudget
from rco.core.knapsack import solve_mckp
from rco.core.moves import is_spent
from rco.core.problem import InfeasibleBudgetError
from rco.core.search import RCO
from rco.formats import parse
from rco.models.layout import layout_for
from rco.testing import QuadraticObjective
from rco.testing.tiny_models import tiny_model

NAMES = ["nvfp4", "nvfp4-a4", "fp8-dynamic", "original"]


@pytest.fixture(scope="module")
def costs():
    model = tiny_model("llama", num_hidden_layers=1)
    layout = layout_for(model)
    linears = layout.linears(model, include_head=True)
    plan = make_plan(layout, linears, formats=[parse(name) for name in NAMES])
    return Costs(model, plan, "bits")


def spent(problem, allocation):
    return [
        units <= budget for units, budget in zip(problem.units(allocation), problem.unit_budgets, strict=True)
    ]


def test_multiplications_cost_the_width_of_the_wider_operand(costs):
    matrix, most, unit = SecondBudget(Fraction(2, 5)).costs(costs.plan)
    parameters = np.array([group.parameters for group in costs.plan.groups])
    widths = {"nvfp4": 16, "nvfp4-a4": 4, "fp8-dynamic": 8, "original": 16}
    for column, option in enumerate(costs.plan.options):
        assert (matrix[:, column] == widths[option.name] * parameters).all()
    assert most == Fraction(2, 5) * 16 * int(parameters.sum())
    assert unit == 16 * int(parameters.sum())


def test_both_budgets_hold_and_the_knapsack_is_that_of_all_allocations(costs):
    second = SecondBudget(Fraction(1, 2))
    problem = assignment_problem(costs, Budget("bits", Fraction(7)), second=second)
    assert problem.num_joint == 2
    values = -np.random.default_rng(0).uniform(0, 1, (problem.num_groups, problem.num_options))
    found = solve_mckp(values, problem)
    feasible = (
        choices for choices in product(range(problem.num_options), repeat=problem.num_groups)
        if problem.is_feasible(choices)
    )  # fmt: skip
    rows = np.arange(problem.num_groups)
    best = max(float(values[rows, list(choices)].sum()) for choices in feasible)
    assert found.value == pytest.approx(best)
    # With this budget of bits alone, the best allocation takes more time than allowed.
    alone = solve_mckp(values, assignment_problem(costs, Budget("bits", Fraction(7))))
    assert alone.value > best


def test_a_search_meets_both(costs):
    problem = assignment_problem(costs, Budget("bits", Fraction(6)), second=SecondBudget(Fraction(45, 100)))
    objective = QuadraticObjective(problem.num_groups, problem.num_options)
    for seed in range(3):
        result = RCO(steps=15, samples=2, refine=4, seed=seed).search(problem, objective)
        assert all(spent(problem, result.allocation))
        assert is_spent(problem, np.asarray(result.allocation))  # no upgrade is left that fits both


def test_initial_logits_price_both_costs(costs):
    """At the multipliers of the relaxation, a group's best option by the logits is its best by loss and prices."""
    problem = assignment_problem(costs, Budget("bits", Fraction(7)), second=SecondBudget(Fraction(1, 2)))
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(problem.num_groups, problem.num_options, generator=generator, dtype=torch.float64)
    losses = losses.sort(dim=1, descending=True).values
    logits = logits_from_losses(losses, problem, 1.0)
    found = solve_mckp(-losses.numpy(), problem)
    agree = int((logits.argmax(dim=1).numpy() == np.asarray(found.allocation)).sum())
    assert agree >= problem.num_groups - problem.num_joint  # at most q groups of a vertex are split


def test_a_table_of_costs_is_read_exactly(costs, tmp_path):
    table = tmp_path / "costs.csv"
    kinds = sorted({info.kind for info in costs.plan.linears})
    lines = [f"{kind},{name},0.{number + 1}" for kind in kinds for number, name in enumerate(NAMES)]
    lines.append("model.layers.0.mlp.up_proj,original,0.25")
    table.write_text("linear,format,cost\n" + "\n".join(lines) + "\n")
    second = SecondBudget.parse(None, table, "1.05")
    matrix, most, unit = second.costs(costs.plan)
    assert Fraction(int(matrix[0, costs.plan.options.index(parse("nvfp4"))]), unit) == Fraction(1, 10)
    row = next(r for r, group in enumerate(costs.plan.groups) if "up_proj" in group.name)
    assert Fraction(int(matrix[row, costs.plan.options.index(parse("original"))]), unit) == Fraction(1, 4)
    assert most / unit == Fraction(105, 100)
    problem = assignment_problem(costs, Budget("bits", Fraction(8)), second=second)
    cheapest = [costs.plan.options.index(parse("nvfp4"))] * problem.num_groups
    assert problem.is_feasible(cheapest)  # 7 linears at 0.1
    assert not problem.is_feasible([costs.plan.options.index(parse("nvfp4-a4"))] * problem.num_groups)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linear,format\nq_proj,nvfp4\n", "columns linear, format, cost"),
        ("linear,format,cost\nq_proj,nvfp4,-1\n", "negative"),
        ("linear,format,cost\nq_proj,nvfp4,1\n", "no cost of model.layers.0.self_attn.q_proj"),
    ],
)
def test_bad_tables_are_refused(costs, tmp_path, text, message):
    (tmp_path / "costs.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        SecondBudget.parse(None, tmp_path / "costs.csv", "3").costs(costs.plan)


def test_contradicting_settings_are_refused(costs, tmp_path):
    assert SecondBudget.parse(None, None, None) is None
    for settings in [("0.5", tmp_path, "3"), (None, tmp_path, None), (None, None, "3")]:
        with pytest.raises(ValueError, match="together with"):
            SecondBudget.parse(*settings)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        SecondBudget.parse("1.5", None, None)
    with pytest.raises(InfeasibleBudgetError, match=r"`flops_share` alone must be at least 0.25"):
        assignment_problem(costs, Budget("bits", Fraction(7)), second=SecondBudget(Fraction(1, 5)))
