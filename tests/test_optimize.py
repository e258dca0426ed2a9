"""minimize and sweep: methods by name, stopping, failures, checkpoints, starts, and what a result offers."""

import json

import numpy as np
import pytest
import torch

import rco
from rco import registry
from rco.core.moves import uniform_allocation
from rco.testing import QuadraticObjective, random_problem

PROBLEM = random_problem(3, 8, 3, sense="<=")
OBJECTIVE = QuadraticObjective(8, 3, seed=3, coupling=1.5)
QUICK = {"steps": 8, "samples": 2, "refine": 40}


def loss(gates):
    return OBJECTIVE.loss(gates, 0)


def without_time(result):
    described = result.to_dict()
    for part in [described, *described["history"]]:
        part.pop("seconds")
    return described


@pytest.mark.parametrize(
    "method", ["rco", "penalty", "frank-wolfe", "evopress", "annealing", "greedy", "random"]
)
def test_every_method_by_name_with_one_allowance(method):
    result = rco.minimize(loss, PROBLEM, method=method, max_evaluations=300)
    assert result.method == method
    assert PROBLEM.is_feasible(result.allocation)
    assert result.forwards + 2 * result.backwards <= 300
    assert result.status == "finished"


def test_unknown_methods_and_settings_are_named():
    with pytest.raises(ValueError, match="annealing"):
        rco.minimize(loss, PROBLEM, method="anealing")
    with pytest.raises(TypeError, match="greedy takes"):
        rco.minimize(loss, PROBLEM, method="greedy", samples=3)
    assert "annealing" in registry.METHODS


def test_black_boxes_are_minimised_without_gradient():
    def black_box(gates):
        return float(loss(gates.double()))

    found = rco.minimize(black_box, PROBLEM, method="annealing", max_evaluations=600)
    assert found.backwards == 0
    assert found.loss == float(loss(found.allocation.one_hot(3)))  # in double precision
    assert found.loss < float(loss(PROBLEM.allocation(uniform_allocation(PROBLEM)).one_hot(3)))


@pytest.mark.parametrize("stop", [lambda record: record.step >= 3, lambda record: next(iter(()))])
def test_on_step_ends_the_search(stop):
    result = rco.minimize(loss, PROBLEM, on_step=stop, **QUICK)
    assert result.status == "stopped"
    assert len(result.history) <= 3
    assert PROBLEM.is_feasible(result.allocation)
    bar = rco.minimize(loss, PROBLEM, on_step=lambda record: "shown", **QUICK)  # what a progress bar returns
    assert bar.status == "finished"


def test_exchanges_can_be_stopped_too():
    result = rco.minimize(
        loss, PROBLEM, on_step=lambda record: record.phase == "refine", **{**QUICK, "steps": 0}
    )
    assert result.status == "stopped"
    assert [record.phase for record in result.history] == ["refine"]


def test_target_and_patience():
    best = rco.minimize(loss, PROBLEM, max_evaluations=800)
    hit = rco.minimize(loss, PROBLEM, max_evaluations=800, target=best.loss + 1e-9)
    assert (hit.status, hit.loss) == ("target", pytest.approx(best.loss))
    assert hit.forwards + 2 * hit.backwards < 800
    tired = rco.minimize(loss, PROBLEM, steps=200, samples=1, refine=0, patience=5)
    assert tired.status == "patience"
    assert len(tired.history) < 200


@pytest.mark.parametrize("failure", [KeyboardInterrupt, None])
@pytest.mark.parametrize("method", ["rco", "annealing"])
def test_interrupts_and_nan_return_the_best_so_far(failure, method):
    seen = []

    def failing(gates):
        value = loss(gates)
        if len(seen) >= 60:
            if failure is not None:
                raise failure
            return value * float("nan")
        seen.append(float(value.detach()))
        return value

    result = rco.minimize(failing, PROBLEM, method=method, max_evaluations=500)
    assert result.status == ("not finite" if failure is None else "interrupted")
    assert result.loss == pytest.approx(float(loss(result.allocation.one_hot(3))))
    assert result.loss <= min(seen) + 1e-9
    with pytest.raises(KeyboardInterrupt if failure else FloatingPointError):  # nothing is known yet
        rco.minimize(failing, PROBLEM, method=method, max_evaluations=500)


def test_checkpoints_through_minimize(tmp_path):
    whole = rco.minimize(loss, PROBLEM, seed=1, **QUICK)
    states = []
    rco.minimize(loss, PROBLEM, seed=1, on_checkpoint=states.append, **QUICK)
    assert without_time(rco.minimize(loss, PROBLEM, seed=1, resume=states[4], **QUICK)) == without_time(whole)

    class Stop(Exception):
        pass

    def fail(record):
        if record.step == 5 and record.phase == "search":
            raise Stop

    path = tmp_path / "search.pt"
    with pytest.raises(Stop):
        rco.minimize(loss, PROBLEM, seed=1, checkpoint=path, on_step=fail, **QUICK)
    assert without_time(rco.minimize(loss, PROBLEM, seed=1, checkpoint=path, **QUICK)) == without_time(whole)


def test_a_limited_search_resumes_to_the_same_result():
    settings = {"max_evaluations": 500, "seed": 2}
    whole, states = rco.minimize(loss, PROBLEM, **settings), []
    rco.minimize(loss, PROBLEM, on_checkpoint=states.append, **settings)
    for state in (states[0], states[-1]):
        assert without_time(rco.minimize(loss, PROBLEM, resume=state, **settings)) == without_time(whole)


def test_start_is_among_the_candidates():
    best = rco.minimize(loss, PROBLEM, max_evaluations=600)
    again = rco.minimize(loss, PROBLEM, start=best.allocation, steps=1, samples=1, refine=0)
    assert again.loss <= best.loss + 1e-12
    with pytest.raises(rco.InfeasibleBudgetError, match="starting allocation"):
        rco.minimize(loss, PROBLEM, start=[2] * 8, **QUICK)
    with pytest.raises(ValueError, match="start="):
        rco.minimize(loss, PROBLEM, prior=torch.zeros(8), **QUICK)


def test_sweep_reuses_results_and_keeps_the_order():
    low, high = PROBLEM.feasible_range
    budgets = [high - 2, low + 3, (low + high) // 2]
    results = rco.sweep(loss, PROBLEM, budgets, max_evaluations=150)
    assert [r.problem.budget for r in results] == budgets
    assert all(r.problem.is_feasible(r.allocation) for r in results)
    assert results[0].loss <= results[2].loss <= results[1].loss
    exact = random_problem(3, 8, 3, sense="==")
    for result in rco.sweep(loss, exact, [exact.budget, low + 4], max_evaluations=100):
        assert result.cost == result.problem.budget


def test_a_result_round_trips_and_plots(tmp_path):
    result = rco.minimize(loss, PROBLEM, **QUICK)
    assert rco.SearchResult.from_json(result.to_json()) == result
    result.save(tmp_path / "result.json")
    loaded = rco.SearchResult.load(tmp_path / "result.json")
    assert loaded == result
    assert loaded.problem == PROBLEM
    assert torch.equal(loaded.logits, result.logits)
    assert json.loads((tmp_path / "result.json").read_text())["logits"]
    result.plot(tmp_path / "search.svg")
    assert (tmp_path / "search.svg").stat().st_size > 1000
    assert len(result.plot().axes) == 3
    assert len(rco.minimize(loss, PROBLEM, method="greedy").plot().axes) == 1


def test_history_holds_exchanges_and_allocations():
    records = []
    result = rco.minimize(loss, PROBLEM, on_step=records.append, **QUICK)
    assert result.history == records
    assert {record.phase for record in records} == {"search", "refine"}
    allocations = [record.allocation for record in records if record.allocation is not None]
    losses = [float(loss(PROBLEM.allocation(a).one_hot(3))) for a in allocations]
    assert losses == sorted(losses, reverse=True)
    assert allocations[-1] == tuple(result.allocation)


def test_more_steps_are_never_worse():
    for seed in range(3):
        problem = random_problem(seed, 7, 3, sense="<=")
        objective = QuadraticObjective(7, 3, seed=seed, coupling=2.0)
        losses = [
            rco.minimize(objective, problem, steps=steps, samples=2, refine=300, seed=seed).loss
            for steps in (0, 10, 40)
        ]
        assert losses == sorted(losses, reverse=True)


def test_budgets_by_name():
    problem = rco.AllocationProblem(
        [[0, 1, 2]] * 4, {"enc": 3, "dec": 2}, blocks=["enc", "enc", "dec", "dec"]
    )
    assert problem.budget.by_name == {"enc": 3, "dec": 2}
    cost = problem.cost([2, 1, 0, 1])
    assert (cost["enc"], cost["dec"]) == (3, 1)
    assert cost == (1, 3)  # in the order of the sorted ids
    assert repr(cost) == "{'enc': 3, 'dec': 1}"
    assert problem.feasible_range[1].by_name == {"enc": 4, "dec": 4}
    assert rco.AllocationProblem.from_json(problem.to_json()).budget == problem.budget
    assert problem.replace(monotone=True).budget == problem.budget
    result = rco.minimize(lambda gates: -gates[:, 2].sum(), problem, steps=2, samples=2)
    assert result.cost == problem.cost(np.asarray(result.allocation))
    assert rco.SearchResult.from_json(result.to_json()).cost.by_name == result.cost.by_name
    assert rco.solve_mckp(np.zeros((4, 3)), problem).cost == problem.cost([0, 0, 0, 0])


def test_a_learning_rate_in_the_place_of_the_manifold_is_named():
    with pytest.raises(TypeError, match="second argument is the manifold"):
        rco.RiemannianAdam([torch.zeros(2, 2, dtype=torch.float64)], 0.1)
