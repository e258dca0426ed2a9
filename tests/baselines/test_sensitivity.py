"""The proxies predict what they should, and their knapsacks are those of an independent solver."""

import dataclasses

import numpy as np
import pytest
import torch

from rco import AllocationProblem, solve_mckp
from rco.baselines.first_order import FirstOrder
from rco.baselines.fisher_information import Fisher
from rco.baselines.higgs import HIGGS, HIGGSNoise, fit_coefficients
from rco.baselines.one_at_a_time import OneAtATime
from rco.baselines.output_error import OutputError
from rco.testing import QuadraticObjective, random_problem

from .conftest import TableObjective, highs_optimum, make, total


class LinearInErrors(TableObjective):
    """The linearity theorem as it stands: sum_i alpha_i t_i^2."""

    def __init__(self, alpha, errors):
        super().__init__(torch.as_tensor(alpha)[:, None] * torch.as_tensor(errors))
        self.option_errors = torch.as_tensor(errors)
        self.alpha, self.draws = alpha, []

    def noisy_loss(self, gates, batch, group, squared_error, seed):
        self.draws.append(seed)
        return self.loss(gates, batch) + self.alpha[group] * squared_error


def case(seed, groups=9, options=4, **arguments):
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, groups, options, **arguments)
    alpha = rng.lognormal(size=groups)
    errors = rng.uniform(0.5, 2.0, size=(groups, 1)) * 4.0 ** -np.arange(options, dtype=float)
    return problem, alpha, errors


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("kind", [HIGGS, HIGGSNoise])
def test_higgs_recovers_the_coefficients_and_their_optimum(seed, levels, kind):
    problem, alpha, errors = case(seed)
    objective = LinearInErrors(alpha, errors)
    result = kind(levels=levels).search(problem, objective)
    assert len(set(objective.draws)) == len(objective.draws) == (9 * levels if kind is HIGGSNoise else 0)
    np.testing.assert_allclose(result.settings["coefficients"], alpha, rtol=1e-9)
    best = highs_optimum(-alpha[:, None] * errors, problem)
    assert result.loss == pytest.approx(-best, rel=1e-9)


def test_coefficients_are_least_squares_through_the_origin():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(6, 5)), rng.normal(size=(6, 5)) + 1
    measured = rng.uniform(size=(6, 5)) < 0.6
    measured[0] = False
    expected = [
        max(np.linalg.lstsq(x[i, m][:, None], y[i, m], rcond=None)[0][0], 0.0) if m.any() else 0.0
        for i, m in enumerate(measured)
    ]
    np.testing.assert_allclose(fit_coefficients(x, y, measured), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [OneAtATime, FirstOrder])
def test_decomposable_losses_are_solved_exactly(seed, kind):
    blocks = {"blocks": [0, 0, 0, 1, 1, 1, 1, 2, 2]} if seed == 3 else {}
    problem = random_problem(seed, 9, 3, sense="<=")
    if blocks:
        costs = problem.unit_costs[0]
        lows = np.add.reduceat(costs.min(axis=1), [0, 3, 7])
        problem = AllocationProblem(costs, (lows + 4).tolist(), sense="<=", **blocks)
    table = np.random.default_rng(seed).normal(size=(9, 3))
    result = kind().search(problem, TableObjective(table, num_batches=2))
    assert result.loss == pytest.approx(-highs_optimum(-table, problem), abs=1e-9)


def test_output_error_minimises_its_table_and_prefers_outputs():
    problem, alpha, errors = case(1, sense="<=")
    objective = LinearInErrors(alpha, errors)
    objective.output_errors = np.random.default_rng(1).uniform(size=errors.shape)
    result = OutputError().search(problem, objective)
    assert result.settings["errors"] == "output_errors"
    chosen = np.asarray(solve_mckp(-objective.output_errors, problem).allocation)
    picked = total(objective.output_errors, chosen)
    assert picked == pytest.approx(-highs_optimum(-objective.output_errors, problem), abs=1e-9)
    assert result.candidates["knapsack"] == pytest.approx(total(objective.table.numpy(), chosen))
    del objective.output_errors
    assert OutputError().search(problem, objective).settings["errors"] == "option_errors"


def table_of(searcher, problem, objective):
    tables = []

    class Watched(type(searcher)):
        def table(self, run):
            tables.append(super().table(run))
            return tables[-1]

    Watched(**dataclasses.asdict(searcher)).search(problem, objective)
    return tables[0].predicted()


@pytest.mark.parametrize("base", ["dearest", "uniform"])
def test_tables_against_finite_differences(base):
    problem = random_problem(2, 6, 3)
    objective = QuadraticObjective(6, 3, seed=2, num_batches=3, batch_noise=0.5)
    searcher = Fisher(base=base)
    start = searcher.base_choices(problem)
    gates = torch.nn.functional.one_hot(torch.from_numpy(start), 3).double()
    step = 1e-6
    slopes = np.zeros((3, 6, 3))
    for batch in range(3):
        for group, option in np.ndindex(6, 3):
            shift = torch.zeros(6, 3, dtype=torch.float64)
            shift[group, option] += step
            shift[group, start[group]] -= step
            up, down = (float(objective.loss(gates + s * shift, batch)) for s in (1, -1))
            slopes[batch, group, option] = (up - down) / (2 * step)
    np.testing.assert_allclose(
        table_of(searcher, problem, objective), 0.5 * (slopes**2).mean(axis=0), atol=1e-6
    )
    first = table_of(FirstOrder(base=base), problem, objective)
    np.testing.assert_allclose(first, slopes.mean(axis=0), atol=1e-6)


def test_one_at_a_time_measures_every_switch_once_per_batch():
    problem = random_problem(0, 5, 3)
    objective = QuadraticObjective(5, 3, num_batches=3, batch_noise=0.3)
    result = OneAtATime(batches=2).search(problem, objective)
    compared = 2 * 3  # the knapsack and the uniform assignment on all batches
    assert result.forwards == 2 * (1 + 5 * 2) + compared
    measured = table_of(OneAtATime(), problem, objective)
    base = OneAtATime().base_choices(problem)
    switched = base.copy()
    switched[3] = 0

    def loss(choices):
        gates = torch.nn.functional.one_hot(torch.from_numpy(choices), 3).double()
        return np.mean([float(objective.loss(gates, b)) for b in range(3)])

    assert measured[3, 0] == pytest.approx(loss(switched) - loss(base))


def test_higgs_beats_uniform_where_the_theorem_holds():
    problem, alpha, errors = case(4, groups=12)
    objective = LinearInErrors(alpha, errors)
    assert (
        make("higgs").search(problem, objective).loss < 0.8 * make("uniform").search(problem, objective).loss
    )
