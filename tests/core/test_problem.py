"""AllocationProblem: exact arithmetic, shapes, errors at construction, JSON."""

import itertools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rco
from rco.core.exact import exact_array, exact_ratio


def test_shared_costs_with_weights_are_exact():
    problem = rco.AllocationProblem([2, 3, 4], budget="7.5", weights=["1/2", 1, 2])
    assert problem.cost([0, 0, 0]) == 7
    assert problem.cost([1, 0, 0]) == Fraction(15, 2)
    assert problem.feasible_range == (7, 14)
    assert problem.is_feasible([1, 0, 0])
    assert not problem.is_feasible([0, 1, 0])


def test_written_decimals_are_read_as_decimals():
    problem = rco.AllocationProblem([0.1, 0.2, 0.3], budget=0.3, weights=[1, 1])
    assert problem.cost([0, 1]) == Fraction(3, 10)  # 0.1 + 0.2 in floats is above 0.3
    assert problem.is_feasible([0, 1])


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_floats_are_the_decimals_that_print_them(kind):
    values = np.concatenate([[0.1, 1 / 3, 1e-7], np.random.default_rng(0).normal(size=20) * 1e3]).astype(kind)
    exact = exact_array(values, "x")
    for n, v in zip(exact.numerators, values, strict=True):
        assert Fraction(int(n), exact.denominator) == Fraction(str(v))
        assert kind(float(Fraction(int(n), exact.denominator))) == v  # and they read back


def test_what_a_float_means_does_not_depend_on_its_neighbours():
    """A third beside tenths must not turn them into binary fractions, of which three exceed 0.3."""
    costs = [[0.1, 0.2], [0.1, 0.2], [0.1, 1 / 3]]
    problem = rco.AllocationProblem(costs, budget=0.3, sense="<=")
    assert problem.cost([0, 0, 0]) == Fraction(3, 10)
    assert problem.is_feasible([0, 0, 0])
    alone, beside = exact_array([0.1], "x"), exact_array([0.1, 1 / 3, 1e-9], "x")
    assert Fraction(int(alone.numerators[0]), alone.denominator) == Fraction(1, 10)
    assert Fraction(int(beside.numerators[0]), beside.denominator) == Fraction(1, 10)


def test_quotients_are_rounded_once_whatever_their_size():
    rng = np.random.default_rng(0)
    small = rng.integers(0, 10**6, 50)
    for factor in (1, 10**9, 10**30):
        numerators = np.array([int(v) * factor for v in small], dtype=object)
        got = exact_ratio(numerators, np.array([7 * 10**6 * factor], dtype=object))
        assert got.tolist() == [float(Fraction(int(v), 7 * 10**6)) for v in small]
    odd = np.array([3**40, 5**30, 7**25, 0], dtype=object)
    assert exact_ratio(odd, np.array(11**20, dtype=object)).tolist() == [int(v) / 11**20 for v in odd]


@pytest.mark.parametrize(
    "kind", [int, float, Fraction, Decimal, str, np.int32, np.float32], ids=lambda kind: kind.__name__
)
def test_number_types_agree(kind):
    costs = [kind(2), kind(3), kind(5)]
    problem = rco.AllocationProblem(costs, budget=kind(8), weights=[kind(1), kind(2)])
    assert problem.cost([2, 0]) == 9
    assert type(problem.cost([2, 0])) is int


def test_costs_beyond_int64_stay_exact():
    big = 10**30
    problem = rco.AllocationProblem([[big, big + 1], [1, 2]], budget=big + 2)
    assert problem.cost([1, 0]) == big + 2
    assert problem.is_feasible([1, 0])
    assert not problem.is_feasible([1, 1])
    assert problem.reduced.costs.dtype == np.int64  # what differs between options is small
    assert problem.reduced.capacity == (1,)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cost_equals_fraction_arithmetic(data):
    n, k, q = (data.draw(st.integers(1, 4)) for _ in range(3))
    number = st.fractions(min_value=-5, max_value=5, max_denominator=50)
    costs = data.draw(st.lists(number, min_size=q * n * k, max_size=q * n * k))
    weights = data.draw(
        st.lists(st.fractions(min_value="1/9", max_value=9, max_denominator=9), min_size=n, max_size=n)
    )
    costs = np.array(costs, dtype=object).reshape(q, n, k)
    budget = [max(sum(weights[i] * max(costs[j, i]) for i in range(n)), 1) for j in range(q)]
    problem = rco.AllocationProblem(costs, budget=budget if q > 1 else budget[0], weights=weights, sense="<=")
    choices = data.draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n))
    expected = [sum(weights[i] * costs[j, i, choices[i]] for i in range(n)) for j in range(q)]
    got = problem.cost(choices)
    assert (list(got) if q > 1 else [got]) == expected
    assert rco.AllocationProblem.from_json(problem.to_json()) == problem


def test_blocks_have_budgets_of_their_own():
    problem = rco.AllocationProblem([0, 1], budget={"b": 2, "a": 1}, blocks=["a", "b", "a", "b", "b"])
    assert problem.block_ids == ("a", "b")
    assert problem.budget == (1, 2)
    assert problem.cost([1, 0, 0, 1, 1]) == (1, 2)
    assert not problem.is_feasible([1, 0, 1, 0, 0])  # within the sum, but block a is over


def test_joint_budgets():
    costs = np.array([[[0, 1], [0, 1]], [[2, 0], [2, 0]]])
    problem = rco.AllocationProblem(costs, budget=[1, 2])
    assert problem.cost([0, 1]) == (1, 2)
    assert problem.is_feasible([0, 1])
    assert not problem.is_feasible([1, 1])
    assert not problem.is_feasible([0, 0])


def test_locks_narrow_the_range():
    allowed = np.array([[True, False, False], [True, True, True]])
    problem = rco.AllocationProblem([2, 3, 4], budget=5, weights=[1, 1], allowed=allowed)
    assert problem.feasible_range == (4, 6)
    assert not problem.is_feasible([1, 0])
    costs = np.array([[2.0, np.nan, np.inf], [2.0, 3.0, 4.0]])
    assert rco.AllocationProblem(costs, budget=5, allowed=allowed).feasible_range == (4, 6)


def test_reduction_keeps_the_feasible_set():
    rng = np.random.default_rng(1)
    for _ in range(50):
        costs = rng.integers(0, 9, size=(4, 3)) * int(rng.integers(1, 5)) + rng.integers(0, 50, size=(4, 1))
        low, high = costs.min(1).sum(), costs.max(1).sum()
        budget = Fraction(int(rng.integers(low, high + 1))) + Fraction(1, 3)
        problem = rco.AllocationProblem(costs, budget=budget, sense="<=")
        reduced = problem.reduced
        for choices in itertools.product(range(3), repeat=4):
            cost = sum(int(reduced.costs[0, i, c]) for i, c in enumerate(choices))
            assert (cost <= reduced.capacity[0]) == problem.is_feasible(choices)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"option_costs": [1, 2], "budget": 1, "weights": [1, 1]}, rco.InfeasibleBudgetError, "between 2 and 4"),
        ({"option_costs": [1, 2], "budget": 5, "weights": [1, 1]}, rco.InfeasibleBudgetError, "between 2 and 4"),
        ({"option_costs": [3, 3], "budget": 6, "weights": [1, 1]}, ValueError, "not a surface"),
        ({"option_costs": [], "budget": 1}, ValueError, "empty"),
        ({"option_costs": np.zeros((0, 3)), "budget": 1}, ValueError, "empty"),
        ({"option_costs": [1, math.nan], "budget": 1, "weights": [1]}, ValueError, "finite"),
        ({"option_costs": [1, 2], "budget": math.nan, "weights": [1]}, ValueError, "finite"),
        ({"option_costs": [1, 2], "budget": math.inf, "weights": [1]}, ValueError, "finite"),
        ({"option_costs": [1, 2], "budget": 2, "weights": [1, -1]}, ValueError, "positive"),
        ({"option_costs": [1, 2], "budget": 2, "weights": [1, 0]}, ValueError, "positive"),
        ({"option_costs": [[1, 2]], "budget": 2, "weights": [1, 1]}, ValueError, "shape"),
        ({"option_costs": [[1, 2], [1]], "budget": 2}, ValueError, "rectangular"),
        ({"option_costs": [1, "two"], "budget": 2, "weights": [1]}, ValueError, "numbers"),
        ({"option_costs": {"a": 1}, "budget": 2, "weights": [1]}, ValueError, "must hold numbers"),
        ({"option_costs": [1, {2}], "budget": 2, "weights": [1]}, ValueError, "at \\(1,\\)"),
        ({"option_costs": np.ones((1, 1, 1, 1)), "budget": 2}, ValueError, "shape"),
        ({"option_costs": [1, 2], "budget": [1, 2], "weights": [1]}, ValueError, "1 numbers"),
        ({"option_costs": [1, 2], "budget": 2}, ValueError, "number of groups"),
        ({"option_costs": [1, 2], "budget": 2, "weights": [1], "sense": ">="}, ValueError, "sense"),
        ({"option_costs": [[1, 2]], "budget": 2, "allowed": [[False, False]]}, ValueError, "no allowed option"),
        ({"option_costs": [[1, 2]], "budget": 2, "allowed": [[1, 0]]}, ValueError, "booleans"),
        ({"option_costs": [[1, 2]], "budget": 2, "groups": ["a", "b"]}, ValueError, "labels"),
        ({"option_costs": [[1, 2]], "budget": 2, "blocks": [0, 1]}, ValueError, "block for each"),
    ],
)  # fmt: skip
def test_bad_input_fails_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        rco.AllocationProblem(**arguments)


def test_jointly_unreachable_budgets_are_named():
    costs = np.array([[[0, 1]], [[1, 0]]])
    with pytest.raises(rco.InfeasibleBudgetError, match="together"):
        rco.AllocationProblem(costs, budget=[0, 0], sense="<=")


def test_equal_costs_are_fine_where_the_budget_decides_nothing():
    problem = rco.AllocationProblem([3, 3], budget=6, weights=[1, 1], sense="<=")
    assert problem.is_feasible([0, 1])


def test_replace_keeps_the_rest():
    problem = rco.AllocationProblem(
        ["1.5", 2, 4], budget=5, weights=[1, 2], groups=["a", "b"], options=["x", "y", "z"], monotone=True
    )
    other = problem.replace(budget=6)
    assert other.budget == 6
    assert other.replace(budget=5) == problem
    assert other != problem


def test_unknown_json_keys_are_refused():
    with pytest.raises(ValueError, match="Unknown keys"):
        rco.AllocationProblem.from_dict({"option_costs": [1, 2], "budget": 1, "weight": [1]})
    with pytest.raises(ValueError, match="missing"):
        rco.AllocationProblem.from_dict({"option_costs": [1, 2]})
    with pytest.raises(ValueError, match="JSON"):
        rco.AllocationProblem.from_json("{")


def test_allocation_reads_as_a_sequence():
    problem = rco.AllocationProblem([2, 4], budget=6, weights=[1, 1], groups=["q", "k"], options=["2", "4"])
    allocation = problem.allocation([1, 0])
    assert list(allocation) == [1, 0]
    assert allocation == [1, 0]
    assert allocation[0] == 1
    assert np.asarray(allocation).tolist() == [1, 0]
    assert allocation.to_dict() == {"q": "4", "k": "2"}
    assert allocation.one_hot(2).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="indices"):
        problem.cost([0, 2])
    with pytest.raises(ValueError, match="2 option indices"):
        problem.cost([0])
