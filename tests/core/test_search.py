"""RCO end to end on problems whose optimum is known; resume, determinism, records, boundary budgets."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rco
import rco.core.evaluator
import rco.core.search
from rco.compression.priors import logits_from_losses
from rco.core.expected_cost import expected_cost
from rco.core.moves import is_spent
from rco.core.objective import Objective
from rco.core.sampling import batch_order, gumbel_noise
from rco.core.search import temperature
from rco.testing import NetworkObjective, QuadraticObjective, random_problem, true_optimum


def small_case(seed, most_groups=8, most_options=4):
    rng = np.random.default_rng(seed)
    groups, options = int(rng.integers(4, most_groups + 1)), int(rng.integers(2, most_options + 1))
    problem = random_problem(seed, groups, options, sense=("==", "<=")[seed % 2])
    kind = QuadraticObjective if seed % 4 < 2 else NetworkObjective
    return problem, kind(groups, options, seed=seed)


def solve_cases(seeds, sizes=(), **settings):
    found = 0
    for seed in seeds:
        problem, objective = small_case(seed, *sizes)
        result = rco.minimize(lambda g, o=objective: o.loss(g, 0), problem, seed=seed, **settings)
        assert problem.is_feasible(result.allocation)
        assert result.loss <= min(result.candidates.values())  # never worse than what it was started from
        found += result.loss <= true_optimum(problem, objective)[1] + 1e-9
    return found


def test_finds_known_optima():
    assert solve_cases(range(12), sizes=(6, 3), steps=60, samples=4, refine=60) >= 11


@pytest.mark.slow
def test_finds_the_optimum_of_nine_in_ten():
    """Half of the default steps and samples, which is harder, and a quarter of the time."""
    assert solve_cases(range(50), steps=100, samples=8) >= 45


def run(settings, **arguments):
    problem = random_problem(3, 8, 3)
    objective = QuadraticObjective(8, 3, seed=3, num_batches=5, batch_noise=0.2)
    return rco.RCO(**settings).search(problem, objective, **arguments)


def without_time(result):
    described = result.to_dict()
    described.pop("seconds")
    for record in described["history"]:
        record.pop("seconds")
    return described


@pytest.mark.parametrize("stop", [1, 7, 12])
def test_resume_gives_the_uninterrupted_result(stop, tmp_path):
    settings = {"steps": 12, "samples": 3, "seed": 4}
    whole = run(settings)
    states = []
    run(settings, on_checkpoint=states.append)
    torch.save(states[stop - 1], tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = run(settings, resume=state)
    assert without_time(resumed) == without_time(whole)


def test_resume_refuses_another_search():
    states = []
    run({"steps": 3, "samples": 2}, on_checkpoint=states.append)
    with pytest.raises(ValueError, match="lr"):
        run({"steps": 3, "samples": 2, "lr": 0.2}, resume=states[0])
    with pytest.raises(ValueError, match="prior"):
        run({"steps": 3, "samples": 2}, resume=states[0], prior=torch.ones(8, 3))
    with pytest.raises(ValueError, match="another problem"):
        rco.RCO(steps=3, samples=2).search(
            random_problem(5, 8, 3), QuadraticObjective(8, 3), resume=states[0]
        )


def test_same_seed_same_result_other_seed_other_noise():
    first, second, third = (run({"steps": 8, "samples": 2, "seed": s}) for s in (1, 1, 2))
    assert without_time(first) == without_time(second)
    assert [r.loss for r in first.history] != [r.loss for r in third.history]


def test_records_follow_the_schedule_and_the_budget():
    records = []
    problem = random_problem(3, 8, 3)
    result = rco.RCO(steps=10, samples=2, refine=0, surface="==").search(
        problem, QuadraticObjective(8, 3, seed=3), on_step=records.append
    )
    assert [r.step for r in records] == list(range(1, 11))
    # As printed: the first step is already one step down, the last one at the end of the schedule.
    assert [r.temperature for r in records] == pytest.approx([0.01 ** (t / 10) for t in range(1, 11)])
    assert all(abs(r.expected_cost[0] - problem.budget) <= 1e-12 * problem.budget for r in records)
    assert records[-1].backwards == 20
    assert result.history == records


class Many(QuadraticObjective):
    """Enough batches that each part of an allowance is worth something."""

    def __init__(self):
        super().__init__(8, 3, seed=3, num_batches=12, batch_noise=0.2)


@pytest.mark.parametrize("allowance", [60, 200, 399, 400, 2000])
@pytest.mark.parametrize("batches", [1, 2])
def test_an_allowance_shortens_every_part(allowance, batches):
    searcher = rco.RCO(
        steps=None,
        refine=None,
        samples=4,
        batches_per_sample=batches,
        max_evaluations=allowance,
        monotone=False,
    )
    result = searcher.search(random_problem(3, 8, 3), Many())
    spent = result.forwards + 2 * result.backwards
    # Exchanges may end before the allowance does, when none pays any more.
    assert 0.6 * allowance < spent <= allowance
    history = [record for record in result.history if record.phase == "search"]
    assert len(history) >= 5
    assert 0.01 ** (1.5 / len(history)) < history[0].temperature < 1.0
    assert history[-1].temperature <= 0.01 ** (1 - 1.01 / len(history))
    assert {"final", "averaged", "uniform"} <= set(result.candidates)


def test_settings_are_upper_bounds_within_an_allowance():
    result = rco.RCO(steps=6, samples=2, refine=0, max_evaluations=10_000).search(
        random_problem(3, 8, 3), Many()
    )
    assert (len(result.history), result.backwards) == (6, 12)
    with pytest.raises(ValueError, match="too little for rco"):
        rco.RCO(steps=None, max_evaluations=5).search(random_problem(3, 8, 3), Many())
    with pytest.raises(ValueError, match="steps=None goes on until"):
        rco.RCO(steps=None)


def test_a_time_limit_lets_the_temperature_fall_all_the_way(monkeypatch):
    ticks = itertools.count()  # a clock that advances by a millisecond at every reading
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks))
    monkeypatch.setattr(rco.core.evaluator, "time", clock)
    result = rco.RCO(steps=None, refine=None, samples=2, max_seconds=0.6).search(
        random_problem(3, 8, 3), Many()
    )
    assert result.seconds < 3.0
    assert [r for r in result.history if r.phase == "search"][-1].temperature < 0.03
    assert result.candidates["averaged"] is not None


def test_the_printed_algorithm_returns_its_final_knapsack():
    problem = random_problem(3, 8, 3)
    result = rco.RCO(steps=8, samples=2, choose=False, refine=0, monotone=False).search(problem, Many())
    assert result.candidates.keys() == {"final"}
    assert result.forwards == 8 * 2 + 12


def test_incumbents_are_feasible_and_end_at_the_final_knapsack():
    problem = random_problem(3, 8, 3)
    seen = []
    result = rco.RCO(steps=8, samples=2, choose=False, refine=0).search(
        problem, Many(), on_incumbent=lambda record, incumbent: seen.append((record.step, incumbent()))
    )
    assert [step for step, _ in seen] == list(range(1, 9))
    assert all(problem.is_feasible(choices) for _, choices in seen)
    assert seen[-1][1].tolist() == result.allocation.tolist()


def test_selection_split_decides():
    class Split(QuadraticObjective):
        def __init__(self):
            super().__init__(6, 3, seed=0)
            self.selection = QuadraticObjective(6, 3, seed=99)

    problem = random_problem(0)
    objective = Split()
    result = rco.RCO(steps=20, samples=2, refine=10).search(problem, objective)
    held_back = [
        float(objective.selection.loss(result.allocation.one_hot(3), 0)),
        min(v for k, v in result.candidates.items()),
    ]
    assert result.loss == pytest.approx(held_back[0], abs=1e-12)
    assert result.loss == pytest.approx(held_back[1], abs=1e-12)


def test_unspent_budget_is_spent_where_costlier_is_never_worse():
    # The loss falls with every unit of cost, but so little that a knapsack on log p need not notice.
    problem = rco.AllocationProblem([1, 2, 3], budget=17, weights=[2, 3, 1, 2], monotone=True)

    def loss(gates):
        return 1.0 - 1e-6 * (gates * torch.tensor([1.0, 2.0, 3.0])).sum()

    result = rco.minimize(loss, problem, steps=3, samples=2, refine=0)
    room = 17 - result.cost
    upgrades = [w for w, k in zip([2, 3, 1, 2], result.allocation, strict=True) if k < 2]
    assert all(w > room for w in upgrades)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_allocation_seen_is_the_best_of_those_that_leave_nothing_affordable(seed):
    """Even if the loss contradicts that costlier options are never worse."""
    problem = random_problem(seed, 6, 4, sense="<=", monotone=True)
    objective, seen = QuadraticObjective(6, 4, seed=seed), []

    def loss(gates):
        found = objective.loss(gates, 0) + (gates * torch.arange(4.0)).sum()
        if bool((gates.max(dim=1).values == 1).all()):
            seen.append((gates.argmax(dim=1).numpy(), found.item()))
        return found

    result = rco.RCO(steps=10, samples=4, seed=seed).search(problem, loss)
    whole = [value for choices, value in seen if problem.is_feasible(choices) and is_spent(problem, choices)]
    assert any(value < min(whole) for choices, value in seen if problem.is_feasible(choices))
    assert result.loss <= min(whole) + 1e-12
    if result.chosen_from == "best seen":
        assert is_spent(problem, np.asarray(result.allocation))


@pytest.mark.parametrize("sense", ["==", "<="])
@pytest.mark.parametrize("end", [0, 1])
def test_budgets_at_the_ends_of_the_range(sense, end):
    problem = random_problem(1, 4, 3)
    problem = problem.replace(budget=problem.feasible_range[end], sense=sense)
    objective = QuadraticObjective(4, 3, seed=1)
    result = rco.RCO(steps=40, samples=4).search(problem, objective)
    assert problem.is_feasible(result.allocation)
    if end == 0:
        assert result.loss == pytest.approx(true_optimum(problem, objective)[1])


def test_everything_locked():
    allowed = np.zeros((3, 2), dtype=bool)
    allowed[:, 1] = True
    problem = rco.AllocationProblem([1, 2], budget=6, weights=[1, 1, 1], allowed=allowed, sense="<=")
    assert list(rco.minimize(lambda g: g.sum(), problem, steps=2, samples=1).allocation) == [1, 1, 1]


def test_joint_budgets_and_blocks():
    rng = np.random.default_rng(0)
    costs = rng.integers(1, 9, size=(2, 5, 3))
    middle = (costs.min(2).sum(1) + costs.max(2).sum(1)) // 2
    problem = rco.AllocationProblem(costs, budget=middle.tolist(), sense="<=")
    result = rco.RCO(steps=20, samples=2).search(problem, QuadraticObjective(5, 3, seed=0))
    assert problem.is_feasible(result.allocation)
    blocks = rco.AllocationProblem([0, 1, 2], budget=[2, 3], blocks=[0, 0, 1, 1, 1])
    objective = QuadraticObjective(5, 3, seed=0)
    result = rco.RCO(steps=60, samples=4).search(blocks, objective)
    assert result.loss <= true_optimum(blocks, objective)[1] + 0.5


def test_bad_settings_and_priors_are_refused():
    problem = random_problem(0)
    objective = QuadraticObjective(6, 3)
    for settings in (
        {"steps": -1},
        {"samples": 0},
        {"lr": 0.0},
        {"tau": (0.1, 1.0)},
        {"samples": 3, "antithetic": True},
    ):
        with pytest.raises(
            ValueError, match=next(iter(settings)) if "antithetic" not in settings else "even"
        ):
            rco.RCO(**settings)
    with pytest.raises(ValueError, match="shape"):
        rco.RCO(steps=1).search(problem, objective, prior=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="finite"):
        rco.RCO(steps=1).search(problem, objective, prior=torch.full((6, 3), float("nan")))
    with pytest.raises(TypeError, match="Unknown settings"):
        rco.minimize(lambda g: g.sum(), problem, stepz=3)
    with pytest.raises(FloatingPointError, match="nan"):
        rco.minimize(lambda g: g.sum() * float("nan"), problem, steps=1)


def test_a_strong_prior_is_followed():
    problem = rco.AllocationProblem([1, 2], budget=3, weights=[1, 1])
    prior = torch.tensor([[0.0, 8.0], [8.0, 0.0]])
    result = rco.RCO(steps=1, samples=1, refine=0, lr=1e-6).search(
        problem, QuadraticObjective(2, 2, coupling=0.0, seed=0), prior=prior
    )
    assert "prior" in result.candidates


# ------------------------------------------------------------------ relaxation


def test_gumbel_noise_is_a_function_of_its_counters_and_gumbel_distributed():
    one = gumbel_noise((3, 4), seed=1, step=2, sample=3)
    assert torch.equal(one, gumbel_noise((3, 4), seed=1, step=2, sample=3))
    assert not torch.equal(one, gumbel_noise((3, 4), seed=1, step=2, sample=4))
    for sample in (0, 1):  # both halves of an antithetic pair
        noise = gumbel_noise((200, 200), seed=0, step=0, sample=sample, antithetic=True)
        assert float(noise.mean()) == pytest.approx(0.5772, abs=0.03)
        assert float(noise.var()) == pytest.approx(np.pi**2 / 6, rel=0.03)
    a, b = (gumbel_noise((200, 200), seed=0, step=0, sample=s, antithetic=True) for s in (0, 1))
    u, v = (torch.exp(-torch.exp(-noise)) for noise in (a, b))
    assert torch.allclose(u + v, torch.ones_like(u))


def test_batch_order_visits_every_batch_once_per_epoch():
    walk = batch_order(5, seed=0, first=0, count=20)
    for epoch in range(4):
        assert sorted(walk[5 * epoch : 5 * epoch + 5]) == [0, 1, 2, 3, 4]
    assert batch_order(5, seed=0, first=7, count=4) == walk[7:11]


def test_temperature_is_exponential():
    assert temperature(0.0, (1.0, 0.01)) == 1.0
    assert temperature(0.5, (1.0, 0.01)) == pytest.approx(0.1)
    assert temperature(1.0, (1.0, 0.01)) == pytest.approx(0.01)


def test_expected_cost_matches_the_manifold():
    problem = random_problem(2, 7, 4)
    manifold = rco.BudgetManifold(problem)
    x = torch.randn(7, 4, dtype=torch.float64)
    assert torch.allclose(expected_cost(problem, x).squeeze(), manifold.expected_cost(x))


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        rco.RCO().steps = 3


def test_a_sample_without_a_solution_takes_that_of_the_logits(monkeypatch):
    """Joint budgets may exhaust the exact solver's time: the walk goes on from the unperturbed knapsack."""
    from rco.core import sampling

    costs = np.array([[[1, 3], [2, 4], [1, 2]], [[2, 1], [1, 3], [1, 2]]])
    problem = rco.AllocationProblem(costs, [8, 6], sense="<=")
    values = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noisy = (values + torch.randn(4, 3, 2, dtype=torch.float64)).numpy()
    solved = sampling.solve_choices(noisy, problem).choices.copy()

    class Cut:
        choices = solved.copy()

    Cut.choices[1] = -1
    monkeypatch.setattr(sampling, "solve_choices", lambda *_: Cut)
    found = sampling.feasible_choices(noisy, values, problem)
    assert (found[[0, 2, 3]] == solved[[0, 2, 3]]).all()
    assert (found[1] == rco.solve_mckp(values, problem).allocation).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("monotone", [False, True])
def test_the_exact_knapsack_of_the_proxy_is_a_candidate(seed, monotone):
    """The prior's logits hold a price that rewards underspending, so their knapsack need not be the losses'."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, 10, 4, sense="<=", monotone=monotone)
    losses = torch.from_numpy(np.sort(rng.random((10, 4)), axis=1)[:, ::-1].copy())
    exact = rco.solve_mckp(-losses, problem).allocation

    class Additive:
        num_batches = 1

        def loss(self, gates, batch):
            return (gates * losses).sum()

    prior = logits_from_losses(losses, problem)
    result = rco.RCO(steps=0, refine=0).search(problem, Additive(), prior=prior, proxy=losses)
    best = float(losses[torch.arange(10), torch.from_numpy(exact)].sum())
    assert result.candidates["proxy"] == pytest.approx(best, rel=1e-12)
    # Of several estimates each has its own candidate.
    wrong = losses.flip(0)
    result = rco.RCO(steps=0, refine=0).search(
        problem, Additive(), prior=prior, proxy=torch.stack([wrong, losses])
    )
    assert result.candidates["proxy 2"] == pytest.approx(best, rel=1e-12)
    assert result.candidates["proxy"] > best
    assert result.loss <= best + 1e-12


def test_a_refined_allocation_must_win_by_the_margin():
    """A loss that differs much between batches: without a margin, the lowest mean over a few of them wins."""
    problem = random_problem(1, 12, 3, sense="<=")
    noise = torch.randn(4, 12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Noisy(Objective):
        num_batches = 4

        def loss(self, gates, batch):
            return 10.0 + (gates * noise[batch]).sum()

    objective = Noisy()
    objective.selection = Noisy()
    found = [rco.RCO(steps=1, samples=2, refine=16, margin=m).search(problem, objective) for m in (0.0, 50.0)]
    assert found[0].chosen_from == "refined"
    assert found[1].chosen_from != "refined"
    assert found[0].loss < found[1].loss
    with pytest.raises(ValueError, match="margin"):
        rco.RCO(margin=-1.0)
    # A candidate of the loop must beat the starting points by as much, and the proxy's knapsack is one of them.
    proxy = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    searches = [rco.RCO(steps=4, samples=8, refine=0, margin=m) for m in (0.0, 50.0)]
    found = [search.search(problem, objective, proxy=proxy) for search in searches]
    assert found[0].chosen_from in ("final", "averaged", "prices", "best sample")
    assert found[1].loss == min(found[1].candidates[name] for name in ("proxy", "uniform"))
    assert found[0].loss < found[1].loss


def test_the_knapsack_of_a_prior_may_underspend():
    """Why the proxy is handed over beside the prior: the smallest case in which the two differ."""
    problem = rco.AllocationProblem([[0, 1, 2]] * 2, budget=3)
    losses = torch.tensor([[1, 0.9, 0.0]] * 2, dtype=torch.float64)
    exact = rco.solve_mckp(-losses, problem)
    assert problem.cost(rco.solve_mckp(logits_from_losses(losses, problem), problem).allocation) < exact.cost
    result = rco.RCO(steps=0, refine=0).search(
        problem,
        lambda g: (g * losses).sum(),
        prior=logits_from_losses(losses, problem),
        proxy=losses,
    )
    assert result.loss == pytest.approx(-exact.value)


def test_resume_refuses_another_proxy():
    problem, states = random_problem(3, 8, 3), []
    proxy = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    searcher, objective = rco.RCO(steps=2, samples=2, refine=0), QuadraticObjective(8, 3, seed=3)
    searcher.search(problem, objective, proxy=proxy, on_checkpoint=states.append)
    with pytest.raises(ValueError, match="another proxy"):
        searcher.search(problem, objective, proxy=proxy + 1, resume=states[0])


def test_a_clock_that_ends_anywhere_ends_the_search_with_its_best(monkeypatch):
    """The clock is read many times; whichever reading is the first one too late, the result stands."""
    problem = random_problem(1, 8, 3, monotone=True)
    objective = QuadraticObjective(8, 3, seed=1, num_batches=3, batch_noise=0.1)
    searcher = rco.RCO(steps=2, samples=2, refine=None, max_seconds=1e9)
    for last in range(1, 30):
        looks = iter(range(10**9))
        in_time = property(lambda self, looks=looks, last=last: next(looks) < last)
        monkeypatch.setattr(rco.core.evaluator.Evaluator, "in_time", in_time)
        result = searcher.search(problem, objective)
        assert problem.is_feasible(result.allocation)
        assert result.loss <= min(result.candidates.values()) + 1e-12


@pytest.mark.parametrize("solved", range(9))
def test_a_joint_knapsack_that_runs_out_of_time_costs_a_candidate_and_no_more(monkeypatch, solved):
    from rco.core.knapsack import joint_budgets

    rng = np.random.default_rng(0)
    problem = rco.AllocationProblem(rng.integers(1, 20, (2, 6, 3)), budget=[60, 60], sense="<=")
    real, count = joint_budgets._solve_one, iter(range(10**9))
    out_of_time = (np.full(6, -1), 2, np.inf)
    monkeypatch.setattr(
        joint_budgets, "_solve_one", lambda *a: real(*a) if next(count) < solved else out_of_time
    )
    linear = torch.from_numpy(rng.normal(size=(6, 3)))
    result = rco.minimize(lambda g: (g * linear).sum(), problem, steps=2, samples=3)
    assert problem.is_feasible(result.allocation)
    printed = rco.minimize(
        lambda g: (g * linear).sum(), problem, steps=0, choose=False, refine=0, curvature=False
    )
    assert problem.is_feasible(printed.allocation)
    assert printed.chosen_from in {"final", "uniform"}
