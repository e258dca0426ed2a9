"""Geometry of the budget manifold: every case through the same properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rco.core.manifold import BudgetManifold
from rco.core.problem import AllocationProblem, InfeasibleBudgetError

N, K = 12, 5


def _costs(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, shape)


def _inner_budgets(costs: np.ndarray, seed: int = 9) -> list[int]:
    """Budgets near the totals of some distribution over the options, so that they can be met together."""
    shares = np.random.default_rng(seed).dirichlet(np.ones(costs.shape[2]), costs.shape[1])
    return [int(b) for b in (costs * shares).sum(axis=(1, 2))]


def _one() -> AllocationProblem:
    return AllocationProblem(_costs(0, N, K), int(_costs(0, N, K).mean(axis=1).sum()))


def _shared_weighted() -> AllocationProblem:
    return AllocationProblem([2, 3, 4, 6, 8], "2.5", weights=["1/12"] * 6 + ["1/24"] * 12)


def _floats() -> AllocationProblem:
    costs = np.random.default_rng(1).uniform(1e-6, 3e-6, (N, K))
    return AllocationProblem(costs, float(costs.mean(axis=1).sum()))


def _signed() -> AllocationProblem:
    costs = _costs(2, N, K) - 25
    costs[0] = [-9, -5, 0, 5, 9]
    return AllocationProblem(costs, 0)


def _blocks(sense: str = "==", share: float = 0.4) -> AllocationProblem:
    costs, blocks = _costs(3, N, K), np.arange(N) % 3
    weights = np.random.default_rng(4).integers(1, 9, N)
    low, high = (costs.min(axis=1) * weights), (costs.max(axis=1) * weights)
    budgets = [int(low[blocks == b].sum() + share * (high - low)[blocks == b].sum()) for b in range(3)]
    return AllocationProblem(costs, budgets, weights=weights, blocks=blocks, sense=sense)


def _locked() -> AllocationProblem:
    costs = _costs(5, N, K)
    allowed = np.random.default_rng(6).random((N, K)) < 0.6
    allowed[:, 0] = True
    allowed[3] = [False, False, True, False, False]
    held = np.where(allowed, costs, 0).sum(axis=1) / allowed.sum(axis=1)
    return AllocationProblem(costs, int(held.sum()), allowed=allowed)


def _joint(q: int, sense: str = "==", extra: int = 0) -> AllocationProblem:
    costs = _costs(7, q, 3 * N, K)
    return AllocationProblem(costs, [b + extra for b in _inner_budgets(costs)], sense=sense)


def _dependent() -> AllocationProblem:
    costs = _costs(8, 1, N, K)
    budget = _inner_budgets(costs)[0]
    return AllocationProblem(np.concatenate([costs, 2 * costs]), [budget, 2 * budget])


def _slack(share: float) -> AllocationProblem:
    costs = _costs(0, N, K)
    low, high = costs.min(axis=1).sum(), costs.max(axis=1).sum()
    return AllocationProblem(costs, int(low + share * (high - low)), sense="<=")


def _inert() -> AllocationProblem:
    costs = np.repeat(_costs(0, N, 1), K, axis=1)
    return AllocationProblem(costs, int(costs[:, 0].sum()), sense="<=")


CASES: dict[str, Callable[[], AllocationProblem]] = {
    "one": _one,
    "shared weighted": _shared_weighted,
    "floats": _floats,
    "signed, budget zero": _signed,
    "blocks": _blocks,
    "locked": _locked,
    "joint 3": lambda: _joint(3),
    "joint 16": lambda: _joint(16),
    "dependent": _dependent,
    "slack, inside": lambda: _slack(0.9),
    "slack, at the budget": lambda: _slack(0.2),
    "slack, inert": _inert,
    "slack, blocks": lambda: _blocks("<=", 0.45),
    "slack, joint": lambda: _joint(4, "<=", 20),
}


@dataclass
class Case:
    manifold: BudgetManifold
    x: Tensor
    v: Tensor
    w: Tensor


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    manifold = BudgetManifold(CASES[request.param]())
    x = manifold.random_point(seed=3)
    generator = torch.Generator().manual_seed(5)
    v, w = torch.randn(2, *x.shape, generator=generator, dtype=torch.float64)
    return Case(manifold, x, v, w)


def _normals(case: Case) -> Tensor:
    """One full (N, K) normal per budget, blocks included."""
    normal = case.manifold.normal(case.x)
    index = case.manifold.problem.block_index
    if index is None:
        return normal.reshape(-1, *case.x.shape)
    own = torch.from_numpy(index)[None, :] == torch.arange(int(index.max()) + 1)[:, None]
    return own[:, :, None] * normal


def _tangency(case: Case, v: Tensor, along: Tensor | None = None) -> float:
    """Largest cosine between (v, along) and an augmented normal."""
    normals, slack = _normals(case), case.manifold.slack(case.x).reshape(-1)
    equality = case.manifold.problem.sense == "=="
    last = torch.zeros_like(slack) if equality or along is None else 2 * slack
    inner = (normals * v).sum(dim=(1, 2)) + (0 if along is None else last * along)
    norms = (normals.square().sum(dim=(1, 2)) + last.square()).sqrt() * v.norm()
    return float(torch.where(norms > 0, inner.abs() / norms.clamp_min(1e-300), 0.0).max())


def test_normal_is_the_gradient_of_the_expected_cost(case: Case) -> None:
    def cost(x: Tensor) -> Tensor:
        return case.manifold.expected_cost(x).reshape(-1)

    gradients = torch.autograd.functional.jacobian(cost, case.x)
    torch.testing.assert_close(
        _normals(case), gradients, rtol=1e-9, atol=1e-12 * float(gradients.abs().max())
    )


def test_expected_cost_is_that_of_the_printed_formula(case: Case) -> None:
    problem = case.manifold.problem
    p = torch.softmax(case.x + problem.log_allowed, dim=1).numpy()
    groups = (problem.float_costs * p).sum(axis=2)
    if problem.block_index is None:
        expected = groups.sum(axis=1)
    else:
        expected = np.bincount(problem.block_index, weights=groups[0])
    np.testing.assert_allclose(
        case.manifold.expected_cost(case.x).reshape(-1).numpy(), expected, rtol=1e-13, atol=1e-12
    )


def test_projection_is_tangent_idempotent_and_self_adjoint(case: Case) -> None:
    manifold, x = case.manifold, case.x
    # With slack, the projector acts on pairs; (N, K) vectors alone are pairs with a zero slack component.
    a, b = torch.randn(2, manifold.problem.num_budgets, generator=torch.Generator().manual_seed(1)).double()
    if manifold.problem.sense == "==":
        a, b = torch.zeros_like(a), torch.zeros_like(b)
    pv, pa = manifold.project(x, case.v, a)
    pw, pb = manifold.project(x, case.w, b)
    assert _tangency(case, pv, pa) < 1e-13
    again, again_a = manifold.project(x, pv, pa)
    torch.testing.assert_close(again, pv, rtol=0, atol=1e-12)
    torch.testing.assert_close(again_a, pa, rtol=0, atol=1e-12)
    allowed = torch.tensor(manifold.problem.allowed)
    v, w = (torch.where(allowed, u, 0.0) for u in (case.v, case.w))
    left, right = float((pv * w).sum() + pa @ b), float((v * pw).sum() + a @ pb)
    assert left == pytest.approx(right, rel=1e-11, abs=1e-11)
    assert float((v - pv).norm() ** 2 + (a - pa).norm() ** 2) == pytest.approx(
        float(v.norm() ** 2 + a.norm() ** 2 - pv.norm() ** 2 - pa.norm() ** 2), rel=1e-9, abs=1e-12
    )


def test_projection_without_the_pair_is_its_first_part(case: Case) -> None:
    zero = torch.zeros_like(case.manifold.slack(case.x))
    pair = case.manifold.project(case.x, case.v, zero)
    assert torch.equal(case.manifold.project(case.x, case.v), pair[0])
    assert pair[1].shape == zero.shape


def test_projection_follows_the_slack_formula() -> None:
    manifold = BudgetManifold(_slack(0.9))
    x = manifold.random_point(0)
    n, s = manifold.normal(x), manifold.slack(x)
    assert s > 1
    assert float(s**2) == pytest.approx(float(manifold.problem.budget - manifold.expected_cost(x)), rel=1e-12)
    v = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    coefficient = (v * n).sum() / (n.square().sum() + 4 * s**2)
    projected, along = manifold.project(x, v, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(projected, v - coefficient * n, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(along, -coefficient * 2 * s, rtol=1e-12, atol=1e-14)


def test_transport_is_tangent_and_linear(case: Case) -> None:
    manifold = case.manifold
    moved = manifold.retract(case.x + 0.3 * case.v)
    there = Case(manifold, moved, case.v, case.w)
    zero = torch.zeros(manifold.problem.num_budgets, dtype=torch.float64)
    tv, ta = manifold.transport(moved, case.v, zero)
    tw, tb = manifold.transport(moved, case.w, zero)
    assert _tangency(there, tv, ta) < 1e-13
    both, along = manifold.transport(moved, 2 * case.v - 3 * case.w, zero)
    torch.testing.assert_close(both, 2 * tv - 3 * tw, rtol=0, atol=1e-12)
    torch.testing.assert_close(along, 2 * ta - 3 * tb, rtol=0, atol=1e-12)


def test_random_points_lie_on_the_manifold_and_repeat(case: Case) -> None:
    assert case.manifold.check_point(case.x) == (True, None)
    assert torch.equal(case.manifold.random_point(3), case.x)
    if case.manifold.problem.num_options > 1:
        assert not torch.equal(case.manifold.random_point(4), case.x)


def test_retraction_is_the_identity_on_the_manifold(case: Case) -> None:
    again = case.manifold.retract(case.x)
    assert torch.equal(again, case.x)
    assert again.data_ptr() != case.x.data_ptr()


def test_retraction_is_first_order(case: Case) -> None:
    """``|R(x + h u) - (x + h u)|`` falls as h^2 along tangents: the slope in log-log is 2."""
    manifold, x = case.manifold, case.x
    if manifold.problem.sense == "<=" and bool((manifold.slack(x) > 0).any()):
        pytest.skip("with slack left, small steps need no retraction")
    u = manifold.project(x, case.v)
    steps = np.geomspace(1e-3, 1e-1, 9)
    errors = [float((manifold.retract(x + h * u) - (x + h * u)).norm()) for h in steps]
    if manifold.problem.sense == "<=":
        # Half of all directions lead below the budget, where nothing is to be done.
        backward = [float((manifold.retract(x - h * u) - (x - h * u)).norm()) for h in steps]
        errors = [max(pair) for pair in zip(errors, backward, strict=True)]
        if max(errors) == 0:
            pytest.skip("an inert budget")
    slope = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert slope == pytest.approx(2.0, abs=0.1)


def test_retraction_shifts_along_the_unweighted_costs(case: Case) -> None:
    """What a retraction adds is a combination of the cost directions, up to constants per row."""
    problem = case.manifold.problem
    moved = case.manifold.retract(case.x + 0.5 * case.v) - (case.x + 0.5 * case.v)
    allowed = problem.allowed.astype(float)
    share = allowed / allowed.sum(axis=1, keepdims=True)

    def centred(values: np.ndarray) -> np.ndarray:
        return (values - (values * share).sum(axis=-1, keepdims=True)) * allowed

    directions = problem.directions
    if problem.block_index is not None:
        own = problem.block_index[None, :] == np.arange(problem.num_budgets)[:, None]
        directions = directions * own[:, :, None]
    basis = centred(directions).reshape(problem.num_budgets, -1).T
    scale = np.maximum(np.abs(basis).max(axis=0), 1e-300)
    found = centred(moved.numpy()).ravel()
    residual = found - basis / scale @ np.linalg.lstsq(basis / scale, found, rcond=None)[0]
    assert np.abs(residual).max() <= 1e-11 * max(1.0, np.abs(found).max())


def test_forbidden_entries_are_ignored_and_untouched() -> None:
    manifold = BudgetManifold(_locked())
    forbidden = torch.from_numpy(~manifold.problem.allowed)
    clean = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dirty = clean.masked_fill(forbidden, torch.nan)
    allowed = ~forbidden
    assert torch.equal(manifold.retract(clean)[allowed], manifold.retract(dirty)[allowed])
    assert manifold.retract(dirty)[forbidden].isnan().all()
    assert torch.equal(manifold.retract(clean)[forbidden], clean[forbidden])
    for result in (manifold.normal(dirty), manifold.project(dirty, dirty)):
        assert (result[forbidden] == 0).all()
        assert result.isfinite().all()
    assert manifold.check_point(manifold.retract(dirty)) == (True, None)


def test_float32_is_converted_exactly() -> None:
    manifold = BudgetManifold(_one())
    x = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    assert manifold.retract(x).dtype == torch.float64
    assert torch.equal(manifold.retract(x), manifold.retract(x.double()))


def test_wrong_input_is_named() -> None:
    manifold = BudgetManifold(_one())
    with pytest.raises(ValueError, match=r"shape \(12, 5\), got \(5, 12\)"):
        manifold.retract(torch.zeros(5, 12).double())
    with pytest.raises(TypeError, match="floating-point"):
        manifold.normal(torch.zeros(12, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be on the CPU"):
        manifold.normal(torch.zeros(12, 5, device="meta"))
    with pytest.raises(ValueError, match="retraction must be"):
        BudgetManifold(_one(), retraction="secant")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tol must be positive"):
        BudgetManifold(_one(), tol=0.0)
    with pytest.raises(ValueError, match="3 joint budgets"):
        BudgetManifold(_joint(3), retraction="bisection")


def test_check_point_says_what_is_wrong() -> None:
    manifold = BudgetManifold(_one())
    ok, reason = manifold.check_point(torch.zeros(N, K).double())
    assert not ok
    assert reason is not None
    assert reason.startswith("The budget is not met: C(x) - B = ")
    assert manifold.check_point(torch.zeros(2, 2).double())[1] == "x must have shape (12, 5), got (2, 2)."
    bad = manifold.random_point(0)
    bad[2, 1] = torch.nan
    assert manifold.check_point(bad) == (False, "Logits must be finite, got nan at group 2, option 1.")
    below = BudgetManifold(_slack(0.9))
    assert below.check_point(torch.zeros(N, K).double()) == (True, None)


@pytest.mark.parametrize(("end", "word"), [(0, "lowest"), (1, "highest")])
def test_budgets_at_an_end_of_their_range_are_refused(end: int, word: str) -> None:
    problem = _one()
    at_end = problem.replace(budget=problem.feasible_range[end])
    with pytest.raises(InfeasibleBudgetError, match=f"The budget is the {word} reachable total"):
        BudgetManifold(at_end)
    blocks = _blocks()
    budgets = list(blocks.budget)
    budgets[1] = blocks.feasible_range[end][1]
    with pytest.raises(InfeasibleBudgetError, match="The budget of block 1 is the"):
        BudgetManifold(blocks.replace(budget=budgets))


def test_an_inequality_may_allow_everything() -> None:
    problem = _one().replace(sense="<=")
    manifold = BudgetManifold(problem.replace(budget=problem.feasible_range[1]))
    x = torch.randn(N, K, dtype=torch.float64) * 50
    assert torch.equal(manifold.retract(x), x)
    with pytest.raises(InfeasibleBudgetError, match="lowest reachable total"):
        BudgetManifold(problem.replace(budget=problem.feasible_range[0]))


def test_results_do_not_alias_what_is_kept() -> None:
    """Changing a returned normal or the point in place must not change later answers."""
    manifold = BudgetManifold(_one())
    x = manifold.random_point(0)
    first = manifold.normal(x).clone()
    manifold.normal(x).zero_()
    assert torch.equal(manifold.normal(x), first)
    x.mul_(2)
    assert torch.equal(manifold.normal(x), BudgetManifold(_one()).normal(x))
