"""The knapsack's contract: budgets, status, certified gaps, invariances, batches, joint budgets, bad input."""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.core.knapsack import BatchSolution, Solution, single_budget, solve_choices, solve_mckp
from rco.core.problem import AllocationProblem


def _enumerate(values, problem):
    """Best value over all affordable choices, or -inf."""
    rows = np.arange(problem.num_groups)
    best = -math.inf
    for choice in itertools.product(range(problem.num_options), repeat=problem.num_groups):
        picked = values[rows, choice]
        if (picked > -math.inf).all() and problem.is_feasible(np.array(choice)):
            best = max(best, float(picked.sum()))
    return best


def _qwen(seed=0, samples=None):
    rng = np.random.default_rng(seed)
    weights = np.array([4, 1, 1, 4, 12, 12, 12] * 36) * 4099 + rng.integers(0, 512, 252)
    problem = AllocationProblem(np.arange(2, 9), int(weights.sum() * 5 // 2), weights)
    shape = (252, 7) if samples is None else (samples, 252, 7)
    return problem, rng.normal(0, 2, shape) + rng.gumbel(size=shape)


# ------------------------------------------------------------------ degenerate input

_VALUE = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, -math.inf, 1e-300, 1e300, -1e30, 5e-324, -1.7e308, 1.7e308, 0.1]),
    st.floats(-1e3, 1e3, allow_nan=False, width=32),
)
_COST = st.one_of(
    st.integers(0, 5),
    st.integers(-100, 100),
    st.sampled_from([2**61, 2**62, 2**80 + 1, 10**30]),
    st.integers(0, 10**9),
)


@st.composite
def _degenerate(draw):
    n, k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    costs = [[draw(_COST) for _ in range(k)] for _ in range(n)]
    values = [[draw(_VALUE) for _ in range(k)] for _ in range(n)]
    low, high = sum(min(row) for row in costs), sum(max(row) for row in costs)
    budget = draw(st.one_of(st.just(low), st.just(high), st.integers(low, high + 3)))
    return np.array(costs, dtype=object), np.array(values), budget


@settings(max_examples=300, deadline=None)
@given(_degenerate())
def test_never_over_budget_and_never_worse_than_certified(case):
    costs, values, budget = case
    problem = AllocationProblem(costs, budget, sense="<=")
    solution = solve_mckp(values, problem)
    with np.errstate(over="ignore"):
        best = _enumerate(values, problem)
    if solution.status == "infeasible":
        assert best == -math.inf
        return
    assert problem.is_feasible(solution.allocation)
    assert (values[np.arange(len(values)), solution.allocation] > -math.inf).all()
    assert Fraction(solution.cost) <= budget
    finite = np.abs(values[np.isfinite(values)])
    if finite.max() < 1e300:  # beyond that, sums of values overflow
        assert solution.value + solution.gap >= best - 1e-12 * finite.max()


def test_penalties_out_of_play_do_not_blur_the_rest():
    """A finite "never" of -1e30 must not make ordinary differences look like ties."""
    problem, values = _qwen(3)
    free = solve_mckp(values, problem)
    penalised = values.copy()
    rows = np.arange(252)
    others = (free.allocation + 1 + np.arange(252) % 6) % 7
    penalised[rows, others] = -1e30
    forbidden = np.where(penalised == -1e30, -math.inf, penalised)
    assert (others != free.allocation).all()
    expected = solve_mckp(forbidden, problem)
    assert solve_mckp(penalised, problem).value == pytest.approx(expected.value, rel=1e-13)
    # A group that is stuck with a penalty shifts the total and nothing else.
    stuck = values.copy()
    stuck[0] = -math.inf
    stuck[0, 3] = -1e30
    calm = stuck.copy()
    calm[0, 3] = 0.0
    assert (solve_mckp(stuck, problem).allocation == solve_mckp(calm, problem).allocation).all()


def test_concave_values_with_slopes_over_many_magnitudes():
    """Marginal gains of unit steps: taking the largest is optimal, however far apart they lie."""
    rng = np.random.default_rng(0)
    gains = np.exp(rng.normal(0, 60, (3000, 1))) * np.sort(rng.uniform(1, 9, (3000, 3)), axis=1)[:, ::-1]
    values = np.concatenate([np.zeros((3000, 1)), np.cumsum(gains, axis=1)], axis=1)
    problem = AllocationProblem([0, 1, 2, 3], 4000, np.ones(3000, dtype=int))
    solution = solve_mckp(values, problem)
    taken = np.sort(gains.reshape(-1))[::-1][:4000]
    assert solution.status == "optimal"
    assert solution.value == pytest.approx(taken.sum(), rel=1e-12)
    # The sum hides the small ones; the choice does not: no gain left out exceeds one taken.
    left_out = np.arange(1, 4) > solution.allocation[:, None]
    assert gains[left_out].max() <= taken[-1] * (1 + 1e-9)


@pytest.mark.parametrize(("size", "options"), [(252, 7), (1000, 32)])
def test_equal_value_per_cost_is_solved_by_an_exact_fit(size, options):
    """The case where bounds prune nothing: only an allocation that spends everything is optimal."""
    rng = np.random.default_rng(1)
    costs = rng.integers(1, 10**6, (size, options))
    budget = int(0.7 * costs.mean() * size)
    solution = solve_mckp(costs + 1e5, AllocationProblem(costs, budget))
    assert solution.status == "optimal"
    assert solution.cost == budget
    assert solution.value == budget + 1e5 * size


# ----------------------------------------------------------------------- the limit


def _subset_sum(rng):
    weights = rng.integers(10**3, 10**4, 16) * 2 + 1
    costs = np.stack([np.zeros(16, dtype=int), weights], axis=1)
    return AllocationProblem(costs, int(weights.sum() // 2)), costs * (1 + 1e-7 * rng.random((16, 2)))


@pytest.mark.parametrize("max_states", [1, 10, 200, 4000])
def test_limit_comes_with_a_certified_gap(max_states):
    rng = np.random.default_rng(max_states)
    limited = 0
    for _ in range(40):
        problem, values = _subset_sum(rng)
        best = solve_mckp(values, problem)
        assert best.status == "optimal"
        solution = solve_mckp(values, problem, max_states=max_states)
        assert problem.is_feasible(solution.allocation)
        assert solution.value <= best.value + 1e-9
        assert solution.value + solution.gap >= best.value - 1e-9
        limited += solution.status == "limit"
        assert (solution.gap > 0) == (solution.status == "limit")
    assert limited > 0 or max_states == 4000


def test_optimum_where_lists_must_grow_equals_meeting_in_the_middle():
    rng = np.random.default_rng(5)
    for _ in range(5):
        problem, values = _subset_sum(rng)
        costs, budget = problem.unit_costs[0], problem.unit_budgets[0]
        bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
        half_cost = [bits @ costs[h : h + 8, 1] for h in (0, 8)]
        half_value = [bits @ values[h : h + 8, 1] for h in (0, 8)]
        total = half_cost[0][:, None] + half_cost[1][None]
        worth = half_value[0][:, None] + half_value[1][None]
        best = worth[total <= budget].max() + values[:, 0].sum()
        assert solve_mckp(values, problem).value == pytest.approx(best, rel=1e-13)


def test_integers_beyond_int64_stay_within_budget_and_state_what_they_cannot_prove():
    """The relaxed optimum is one unit too dear: it must not be returned, nor another called optimal wrongly."""
    big = 2**90
    costs = np.array([[0, big + 1], [0, big + 1], [0, 5]], dtype=object)
    values = np.array([[0.0, 5.0], [0.0, 4.0], [0.0, 1.0]])
    problem = AllocationProblem(costs, 2 * big + 1, sense="<=")
    solution = solve_mckp(values, problem)
    assert problem.is_feasible(solution.allocation)
    assert solution.status == "limit"
    assert solution.value + solution.gap >= _enumerate(values, problem)
    roomy = AllocationProblem(costs, 2 * big + 2, sense="<=")
    assert solve_mckp(values, roomy).value == _enumerate(values, roomy)
    # Forbidden by its value, the cheap option no longer saves the day; the exact check tells.
    values[:2, 0] = -math.inf
    assert solve_mckp(values, problem).status == "infeasible"
    assert solve_mckp(values, roomy).allocation.tolist() == [1, 1, 0]


# -------------------------------------------------------------------- invariances


def test_scaling_by_powers_of_two_changes_nothing():
    problem, values = _qwen(0, 4)
    reference = solve_choices(values, problem).choices
    for power in (-1000, -60, 7, 900):
        assert (solve_choices(values * 2.0**power, problem).choices == reference).all()


def test_shifts_units_and_order_change_no_value():
    problem, values = _qwen(1)
    best = solve_mckp(values, problem)
    rng = np.random.default_rng(0)
    shift = rng.normal(size=(252, 1))
    assert solve_mckp(values + shift, problem).value == pytest.approx(best.value + shift.sum(), rel=1e-12)
    costs = problem.unit_costs[0]
    groups, options = rng.permutation(252), rng.permutation(7)
    moved = AllocationProblem(costs[groups][:, options], problem.budget)
    assert solve_mckp(values[groups][:, options], moved).value == pytest.approx(best.value, rel=1e-13)
    offset = rng.integers(-1000, 1000, (252, 1))
    other_units = AllocationProblem(3 * costs + offset, 3 * problem.budget + int(offset.sum()) + 2)
    assert (solve_mckp(values, other_units).allocation == best.allocation).all()


def test_blocks_are_independent_knapsacks():
    rng = np.random.default_rng(2)
    costs, values, blocks = rng.integers(0, 50, (300, 4)), rng.normal(size=(300, 4)), rng.integers(0, 40, 300)
    budget = [int(costs[blocks == b].mean() * (blocks == b).sum()) for b in range(40)]
    joined = solve_mckp(values, AllocationProblem(costs, budget, blocks=blocks, sense="<="))
    apart = [
        solve_mckp(values[blocks == b], AllocationProblem(costs[blocks == b], budget[b], sense="<="))
        for b in range(40)
    ]
    assert joined.status == "optimal"
    assert joined.cost == tuple(s.cost for s in apart)
    assert joined.value == pytest.approx(sum(s.value for s in apart), rel=1e-12)
    # One block out of reach makes the whole infeasible.
    values[np.flatnonzero(blocks == 7)[0]] = -math.inf
    assert (
        solve_mckp(values, AllocationProblem(costs, budget, blocks=blocks, sense="<=")).status == "infeasible"
    )


def test_selection_takes_the_first_of_equal_gains():
    problem = AllocationProblem([0, 1], 3, np.ones(6, dtype=int))
    values = np.array([[0.0, 1.0], [0, 2], [0, 1], [0, 1], [0, -1], [0, 2]])
    assert solve_mckp(values, problem).allocation.tolist() == [1, 1, 0, 0, 0, 1]
    values[[2, 3, 4], 0] = -math.inf
    assert solve_mckp(values, problem).allocation.tolist() == [0, 0, 1, 1, 1, 0]
    values[0, 0] = -math.inf
    assert solve_mckp(values, problem).status == "infeasible"


def test_selection_at_the_ends_of_the_floats():
    problem = AllocationProblem([0, 1], 1, np.ones(3, dtype=int))
    tiny = np.array([[0.0, 5e-324], [0.0, 1e-323], [0.0, 5e-324]])
    assert solve_mckp(tiny, problem).allocation.tolist() == [0, 1, 0]
    large = np.array([[-1.5e308, 1.5e308], [-1.7e308, 1.7e308], [-1.0, 1.6e308]])
    assert solve_mckp(large, problem).allocation.tolist() == [0, 1, 0]


# ----------------------------------------------------------------- shapes and input


def test_batch_equals_singles():
    problem, values = _qwen(4, 12)
    values[5, 0] = -math.inf
    together = solve_mckp(values, problem)
    assert isinstance(together, BatchSolution)
    assert len(together) == 12
    assert together.allocation.shape == (12, 252)
    assert together.status == tuple("infeasible" if b == 5 else "optimal" for b in range(12))
    found = solve_choices(values, problem)
    assert (found.choices == together.allocation).all()
    for b, one in enumerate(together):
        alone = solve_mckp(values[b], problem)
        assert isinstance(one, Solution)
        assert (alone.allocation == one.allocation).all()
        assert one.value == alone.value == together.value[b]
        assert one.cost == alone.cost == together.cost[b]
        assert one.status == alone.status
        assert one.gap == alone.gap == together.gap[b] == 0.0
    assert [s.value for s in together[2:4]] == [together[2].value, together[3].value]
    assert together[-1].value == together[11].value
    with pytest.raises(IndexError):
        together[12]
    assert "12 samples" in repr(together)
    assert len(solve_mckp(values[:0], problem)) == 0


def test_torch_and_other_dtypes():
    problem, values = _qwen(6)
    single = values.astype(np.float32)
    expected = solve_mckp(single.astype(np.float64), problem).allocation
    assert (solve_mckp(single, problem).allocation == expected).all()
    tensor = torch.tensor(single, requires_grad=True)
    assert (solve_mckp(tensor, problem).allocation == expected).all()
    assert (solve_mckp(np.asfortranarray(single), problem).allocation == expected).all()
    half = torch.tensor(values).bfloat16()
    assert (solve_mckp(half, problem).allocation == solve_mckp(half.double(), problem).allocation).all()
    whole = np.round(values).astype(int)
    assert solve_mckp(whole, problem).value == solve_mckp(whole.astype(float), problem).value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((3, 2), math.nan), "got nan at \\(0, 0\\)"),
        (np.array([[0, 1], [0, math.inf], [0, 0]]), "got inf at \\(1, 1\\)"),
        (np.zeros((2, 2)), "shape \\(3, 2\\) or \\(batch, 3, 2\\), got \\(2, 2\\)"),
        (np.zeros(6), "shape"),
        (np.full((3, 2), "x"), "must hold numbers"),
    ],
)
def test_bad_values_are_refused(values, message):
    problem = AllocationProblem([0, 1], 2, np.ones(3, dtype=int))
    with pytest.raises(ValueError, match=message):
        solve_mckp(values, problem)


def test_bad_limits_are_refused():
    problem = AllocationProblem([0, 1], 2, np.ones(3, dtype=int))
    with pytest.raises(ValueError, match="max_states"):
        solve_mckp(np.zeros((3, 2)), problem, max_states=0)
    joint = AllocationProblem(np.ones((2, 3, 2), dtype=int) * [0, 1], [2, 2])
    with pytest.raises(ValueError, match="time_limit"):
        solve_mckp(np.ones((3, 2)) * [0, 1], joint, time_limit=0)


def test_a_result_over_budget_is_an_internal_error(monkeypatch):
    problem = AllocationProblem([0, 1], 1, np.ones(3, dtype=int))

    def spendthrift(self, values, problem, max_states):
        return single_budget.Choices(
            np.ones((1, 3), dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1)
        )

    monkeypatch.setattr(single_budget.Plans, "solve", spendthrift)
    with pytest.raises(RuntimeError, match="exceeded a budget"):
        solve_mckp(np.zeros((3, 2)), problem)


def test_preparation_leaves_with_its_problem():
    problem, values = _qwen(7)
    solve_mckp(values, problem)
    made = weakref.ref(single_budget.plans(problem))
    assert made() is single_budget.plans(problem)
    del problem
    gc.collect()
    assert made() is None


def test_importing_compiles_nothing():
    code = "import sys, rco.core.knapsack; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_place_for_the_cache_compilation_goes_on(monkeypatch, caplog):
    from rco.core import jit

    def njit(function, cache=False, **options):
        if cache:
            raise RuntimeError("no locator available")
        return function

    monkeypatch.setattr(jit, "njit", njit)
    assert jit.entry(len) is len
    assert "no locator available" in caplog.text


# ------------------------------------------------------------------- joint budgets


@pytest.mark.parametrize("largest", [10, 10**7, 10**12, 10**15, 2**70])
def test_joint_budgets_equal_enumeration(largest):
    rng = np.random.default_rng(largest % 2**32)
    statuses = set()
    for trial in range(8):
        q, n, k = int(rng.integers(2, 4)), int(rng.integers(2, 6)), int(rng.integers(2, 4))
        costs = np.empty((q, n, k), dtype=object)
        for cell in np.ndindex(q, n, k):
            costs[cell] = int(rng.random() * largest) + int(rng.integers(0, 3))
        values = rng.normal(size=(n, k)) * 10.0 ** rng.integers(-6, 7)
        if trial % 3 == 0:
            values[rng.random((n, k)) < 0.3] = -math.inf
        # The budget of some choice, less one unit in one place: the optimum often lies at the very edge.
        edge = costs[:, np.arange(n), rng.integers(0, k, n)].sum(axis=1)
        low = costs.min(axis=2).sum(axis=1)
        budget = [max(int(e) - int(trial % 2), int(b)) for e, b in zip(edge, low, strict=True)]
        problem = AllocationProblem(costs, budget, sense="<=")
        solution = solve_mckp(values, problem)
        best = _enumerate(values, problem)
        statuses.add(solution.status)
        if best == -math.inf:
            assert solution.status == "infeasible"
        else:
            assert solution.status == "optimal"
            assert problem.is_feasible(solution.allocation)
            assert solution.value == pytest.approx(
                best, rel=1e-9, abs=1e-9 * np.abs(values[np.isfinite(values)]).max()
            )
    assert "optimal" in statuses


def test_a_joint_solution_over_budget_by_rounding_is_cut_off():
    """Two budgets that HiGHS cannot tell from satisfied: one unit in 1e15 is far below its tolerance."""
    unit = 10**15
    costs = np.array([[[0, unit + 1], [0, unit + 1], [0, 2]]] * 2, dtype=object)
    values = np.array([[0.0, 5.0], [0.0, 4.0], [0.0, 1.0]])
    problem = AllocationProblem(costs, [2 * unit + 1, 2 * unit + 1], sense="<=")
    solution = solve_mckp(values, problem)
    assert problem.is_feasible(solution.allocation)
    assert solution.status == "optimal"
    assert solution.value == pytest.approx(_enumerate(values, problem))


def test_joint_batch_and_time_limit():
    rng = np.random.default_rng(3)
    costs = rng.integers(1, 1000, (2, 60, 6))
    problem = AllocationProblem(costs, [int(c.mean() * 60) for c in costs], sense="<=")
    values = costs.sum(axis=0) + rng.uniform(-5, 5, (2, 60, 6))
    quick = solve_mckp(values, problem, time_limit=0.3)
    assert len(quick) == 2
    for solution in quick:
        assert solution.status in ("optimal", "limit")
        assert solution.gap >= 0
        if (solution.allocation >= 0).all():
            assert problem.is_feasible(solution.allocation)
