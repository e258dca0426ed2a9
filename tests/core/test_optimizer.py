"""Optimizers on the manifold: exact budgets, tangent momentum, and everything a torch optimizer can do."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.optimize import minimize as minimize_scipy
from torch import Tensor

from rco.core.manifold import BudgetManifold
from rco.core.optimizer import Adam, ManifoldOptimizer, RiemannianAdam, RiemannianOptimizer
from rco.core.problem import AllocationProblem

N, K = 20, 6


def _problem(kind: str = "one") -> AllocationProblem:
    rng = np.random.default_rng(0)
    costs = rng.integers(1, 40, (N, K))
    if kind == "one":
        return AllocationProblem(costs, int(costs.mean(axis=1).sum()))
    if kind == "blocks":
        blocks = np.arange(N) % 3
        return AllocationProblem(
            costs, [int(costs[blocks == b].mean(axis=1).sum()) for b in range(3)], blocks=blocks
        )
    if kind == "locked":
        allowed = rng.random((N, K)) < 0.7
        allowed[:, :2] = True
        return AllocationProblem(costs, int(costs[:, :2].mean(axis=1).sum()), allowed=allowed)
    if kind == "joint":
        costs = rng.integers(1, 40, (4, N, K))
        return AllocationProblem(costs, [int(c.mean(axis=1).sum()) for c in costs])
    if kind == "slack":
        return AllocationProblem(costs, int(costs.mean(axis=1).sum()), sense="<=")
    assert kind == "joint slack"
    costs = rng.integers(1, 40, (3, N, K))
    return AllocationProblem(costs, [int(c.mean(axis=1).sum()) for c in costs], sense="<=")


KINDS = ["one", "blocks", "locked", "joint", "slack", "joint slack"]


def _loss(x: Tensor) -> Tensor:
    """Smooth and not separable over groups."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(N, K, generator=generator, dtype=torch.float64)
    mixing = torch.randn(N, N, generator=generator, dtype=torch.float64) / N
    scores = (torch.softmax(x, dim=1) * values).sum(dim=1)
    return -scores.sum() + scores @ mixing @ scores


def _run(optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _inner_products(manifold: BudgetManifold, x: Tensor, momentum: Tensor, along: Tensor | None) -> Tensor:
    """Cosines of the momentum with each augmented normal."""
    problem = manifold.problem
    normals = manifold.normal(x).reshape(-1, N, K)
    if problem.block_index is not None:
        own = torch.from_numpy(problem.block_index)[None, :] == torch.arange(problem.num_budgets)[:, None]
        normals = own[:, :, None] * normals
    last = torch.zeros(problem.num_budgets).double() if along is None else 2 * manifold.slack(x).reshape(-1)
    inner = (normals * momentum).sum(dim=(1, 2)) + (0 if along is None else last * along)
    size = (normals.square().sum(dim=(1, 2)) + last.square()).sqrt() * momentum.norm()
    return inner / size


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_holds_at_every_step_while_the_loss_falls(kind: str) -> None:
    manifold = BudgetManifold(_problem(kind))
    x = manifold.random_point(0).requires_grad_()
    optimizer = RiemannianAdam([x], manifold, lr=0.05)
    first = float(_loss(x.detach()))
    for _ in range(150):
        _run(optimizer, x, 1)
        assert manifold.check_point(x) == (True, None)
    assert float(_loss(x.detach())) < first - 1.0


@pytest.mark.parametrize("steps", [120, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_momentum_stays_tangent_under_an_adversarial_bias(kind: str, steps: int) -> None:
    """Proposition 6: steps of gradients that mostly push along the normals leave no trace."""
    manifold = BudgetManifold(_problem(kind))
    x = manifold.random_point(1).requires_grad_()
    optimizer = RiemannianAdam([x], manifold, lr=0.02, one_sided=False)
    generator = torch.Generator().manual_seed(2)
    allowed = torch.tensor(manifold.problem.allowed)
    worst = 0.0
    for _ in range(steps):
        normals = manifold.normal(x).reshape(-1, N, K)
        bias = sum(100 * n / n.norm() for n in normals)
        x.grad = torch.where(allowed, bias + torch.randn(N, K, generator=generator, dtype=torch.float64), 0.0)
        optimizer.step()
        state = optimizer.state[x]
        cosines = _inner_products(manifold, x.detach(), state["exp_avg"], state.get("slack_momentum"))
        worst = max(worst, float(cosines.abs().max()))
    assert worst < 1e-12
    assert manifold.check_point(x) == (True, None)


def test_the_bias_would_otherwise_reach_the_momentum() -> None:
    """The property above is not vacuous: plain Adam's momentum ends up along the normal."""
    manifold = BudgetManifold(_problem())
    x = manifold.random_point(1).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.02)
    for _ in range(50):
        n = manifold.normal(x)
        x.grad = 100 * n / n.norm()
        optimizer.step()
    momentum = optimizer.state[x]["exp_avg"]
    assert float(_inner_products(manifold, x.detach(), momentum, None).abs()) > 0.9


def test_equal_to_torch_adam_where_the_manifold_is_the_whole_space() -> None:
    """A budget no assignment can exceed by choosing: zero normal, so projection and retraction are identities."""
    costs = np.repeat(np.arange(1, N + 1)[:, None], K, axis=1)
    manifold = BudgetManifold(AllocationProblem(costs, int(costs[:, 0].sum()), sense="<="))
    start = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    riemannian = RiemannianAdam([ours], manifold, lr=0.03, betas=(0.8, 0.99), eps=1e-7)
    adam = torch.optim.Adam([theirs], lr=0.03, betas=(0.8, 0.99), eps=1e-7)
    for _ in range(200):
        _run(riemannian, ours, 1)
        _run(adam, theirs, 1)
        assert torch.equal(ours, theirs)


def test_equal_to_torch_adam_along_tangent_gradients() -> None:
    """Groups whose options all cost the same are free of the budget: Adam on them is plain Adam."""
    costs = np.full((N, K), 3)
    costs[0] = np.arange(K)
    manifold = BudgetManifold(AllocationProblem(costs, 3 * (N - 1) + 2))
    ours = manifold.random_point(0).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    riemannian, adam = RiemannianAdam([ours], manifold, lr=0.03), torch.optim.Adam([theirs], lr=0.03)
    for step in range(100):
        gradient = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        gradient[0] = 0
        ours.grad, theirs.grad = gradient, gradient.clone()
        riemannian.step()
        adam.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["one", "joint"])
def test_one_step_is_the_printed_algorithm(kind: str) -> None:
    manifold = BudgetManifold(_problem(kind))
    x = manifold.random_point(0)
    parameter = x.clone().requires_grad_()
    optimizer = RiemannianAdam([parameter], manifold, lr=0.1)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, 6):
        optimizer.zero_grad()
        _loss(parameter).backward()
        gradient = parameter.grad.clone()
        optimizer.step()
        normals = manifold.normal(x).reshape(-1, N * K)
        tangent = gradient.flatten() - normals.T @ torch.linalg.lstsq(normals.T, gradient.flatten()).solution
        tangent = tangent.view(N, K)
        m = 0.9 * m + 0.1 * tangent
        v = 0.999 * v + 0.001 * tangent**2
        x = x - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        x = manifold.retract(x)
        m = manifold.transport(x, m)
        torch.testing.assert_close(parameter.detach(), x, rtol=0, atol=1e-10)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], m, rtol=0, atol=1e-10)


@pytest.mark.parametrize("unit", [1, 10**7])
@pytest.mark.parametrize("joint", [False, True])
def test_the_slack_lets_the_cost_fall(unit: int, joint: bool) -> None:
    """With the cheapest options best, "<=" leaves the budget unspent where "==" must spend it.

    So from a start on the budget itself, and whatever the unit of cost.
    """
    costs = np.tile(np.arange(1, K + 1), (N, 1))
    values = torch.from_numpy(-costs.astype(float))
    left = {}
    for sense in ("==", "<="):
        all_costs, budget = (
            (np.stack([costs, costs]) * unit, [3 * N * unit, 4 * N * unit])
            if joint
            else (costs * unit, 3 * N * unit)
        )
        if joint and sense == "==":
            budget = [3 * N * unit, 3 * N * unit]
        manifold = BudgetManifold(AllocationProblem(all_costs, budget, sense=sense))
        x = manifold.random_point(0).requires_grad_()
        optimizer = RiemannianAdam([x], manifold, lr=0.2)
        for _ in range(150):
            optimizer.zero_grad()
            (-(torch.softmax(x, dim=1) * values).sum()).backward()
            optimizer.step()
        left[sense] = 3 * N - float(manifold.expected_cost(x.detach()).reshape(-1)[0]) / unit
    assert abs(left["=="]) < 1e-9
    assert left["<="] > 1.9 * N


@pytest.mark.parametrize("unit", [1, 10**6])
@pytest.mark.parametrize("kind", ["slack", "joint slack"])
def test_below_the_budget_nothing_is_held(kind: str, unit: int) -> None:
    problem = _problem(kind)
    manifold = BudgetManifold(
        AllocationProblem(problem.unit_costs * unit, [b * unit for b in problem.unit_budgets], sense="<=")
    )
    costs = torch.from_numpy(problem.relative_costs).sum(dim=0)
    on = manifold.retract(10 * costs)  # far too expensive before
    below = on - 0.01 * costs
    assert manifold.check_point(below) == (True, None)
    assert (manifold.slack(below) > 0).all()
    raises = -manifold.normal(on).reshape(-1, N, K).sum(dim=0)  # following the negative raises every cost
    projected, held = manifold.hold(below, raises)
    assert torch.equal(projected, raises)
    assert not held.any()
    assert torch.equal(manifold.project(below, raises, one_sided=True), raises)
    binding = (manifold.slack(on) == 0).reshape(-1)
    assert binding.any()
    projected, held = manifold.hold(on, raises)
    assert held.any()
    assert not (held & ~binding).any()
    inner = (manifold.normal(on).reshape(-1, N, K) * projected).sum(dim=(1, 2)) / raises.norm() / unit
    assert (inner[binding] > -1e-12).all()


@pytest.mark.parametrize("kind", ["slack", "joint slack"])
def test_one_sided_steps_keep_what_lowers_the_cost_and_no_more(kind: str) -> None:
    manifold = BudgetManifold(_problem(kind))
    x = manifold.random_point(1).requires_grad_()
    optimizer = RiemannianAdam([x], manifold, lr=0.02)
    generator = torch.Generator().manual_seed(2)
    lowest, met = 0.0, 0
    for _ in range(300):
        n = manifold.normal(x).reshape(-1, N, K).sum(dim=0)
        x.grad = torch.randn(N, K, generator=generator, dtype=torch.float64) - 30 * n / n.norm()
        optimizer.step()
        state = optimizer.state[x]
        cosines = _inner_products(manifold, x.detach(), state["exp_avg"], state["slack_momentum"])
        binding = (manifold.slack(x.detach()) == 0).reshape(-1)
        met += int(binding.sum())
        lowest = min(lowest, float(torch.where(binding, cosines, 0.0).min()))
    assert met > 100  # the gradient pushes against the budget
    assert lowest > -1e-12  # following the negative momentum raises no cost that is at its budget
    inward = manifold.normal(x).reshape(-1, N, K).sum(dim=0)
    assert torch.equal(manifold.project(x, inward, one_sided=True), inward)


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_is_bit_identical(kind: str) -> None:
    manifold = BudgetManifold(_problem(kind))
    x = manifold.random_point(0).requires_grad_()
    optimizer = RiemannianAdam([x], manifold, lr=0.05)
    _run(optimizer, x, 30)
    saved = io.BytesIO()
    torch.save({"x": x.detach(), "optimizer": optimizer.state_dict()}, saved)
    _run(optimizer, x, 30)

    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)  # the state holds tensors and numbers only
    y = loaded["x"].clone().requires_grad_()
    resumed = RiemannianAdam([y], BudgetManifold(_problem(kind)), lr=123.0)
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.05
    _run(resumed, y, 30)
    assert torch.equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_repeat_bit_for_bit(kind: str) -> None:
    ends = []
    for _ in range(2):
        manifold = BudgetManifold(_problem(kind))
        x = manifold.random_point(0).requires_grad_()
        losses = _run(RiemannianAdam([x], manifold), x, 40)
        ends.append((x.detach(), losses))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_closures_and_schedulers() -> None:
    manifold = BudgetManifold(_problem())
    x, y = (manifold.random_point(0).requires_grad_() for _ in range(2))
    one, two = RiemannianAdam([x], manifold, lr=0.1), RiemannianAdam([y], manifold, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20) for o in (one, two)]

    def closure() -> Tensor:
        one.zero_grad()
        loss = _loss(x)
        loss.backward()
        return loss.detach()

    for _ in range(20):
        expected = float(_loss(x.detach()))
        assert one.step(closure).item() == expected
        _run(two, y, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(x, y)
    assert one.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_groups_with_their_own_manifold_or_none() -> None:
    first, second = BudgetManifold(_problem()), BudgetManifold(_problem("blocks"))
    x, y = first.random_point(0).requires_grad_(), second.random_point(0).requires_grad_()
    free = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = RiemannianAdam(
        [{"params": [x]}, {"params": [y], "manifold": second, "lr": 0.2}], first, lr=0.05
    )
    optimizer.add_param_group({"params": [free], "manifold": None})
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.2, 0.05]
    for _ in range(10):
        optimizer.zero_grad()
        (_loss(x) + _loss(y) + (free - 1).square().sum()).backward()
        optimizer.step()
    assert first.check_point(x) == (True, None)
    assert second.check_point(y) == (True, None)
    assert (free > 0.3).all()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert [g["manifold"] for g in optimizer.param_groups] == [first, second, None]
    assert all("manifold" not in g for g in state["param_groups"])


def test_gradients_are_left_as_they_were_and_missing_ones_skipped() -> None:
    manifold = BudgetManifold(_problem())
    x = manifold.random_point(0).requires_grad_()
    y = manifold.random_point(1).requires_grad_()
    optimizer = RiemannianAdam([x, y], manifold)
    _loss(x).backward()
    before, y_before = x.grad.clone(), y.detach().clone()
    optimizer.step()
    assert torch.equal(x.grad, before)
    assert torch.equal(y, y_before)


WRAPPED = {
    "sgd momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "momentum_buffer"),
    "sgd nesterov": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), "momentum_buffer"),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.01), "exp_avg"),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=0.05), "exp_avg"),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=0.05), "exp_avg"),
    "rmsprop momentum": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9), "momentum_buffer"),
}


@pytest.mark.parametrize("kind", ["one", "slack", "joint"])
@pytest.mark.parametrize("name", WRAPPED)
def test_any_optimizer_with_a_momentum_can_be_wrapped(name: str, kind: str) -> None:
    make, key = WRAPPED[name]
    manifold = BudgetManifold(_problem(kind))
    x = manifold.random_point(0).requires_grad_()
    optimizer = RiemannianOptimizer(make([x]), manifold, one_sided=False)
    first = float(_loss(x.detach()))
    for _ in range(100):
        _run(optimizer, x, 1)
        assert manifold.check_point(x) == (True, None)
        state = optimizer.state[x]
        cosines = _inner_products(manifold, x.detach(), state[key], state.get("slack_momentum"))
        assert float(cosines.abs().max()) < 1e-12
    assert float(_loss(x.detach())) < first - 1.0


@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_wrapped_optimizers_resume_and_equal_the_plain_ones_without_a_constraint(name: str) -> None:
    make, _ = WRAPPED[name]
    costs = np.repeat(np.arange(1, N + 1)[:, None], K, axis=1)
    inert = BudgetManifold(AllocationProblem(costs, int(costs[:, 0].sum()), sense="<="))
    start = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    wrapped, plain = RiemannianOptimizer(make([ours]), inert), make([theirs])
    _run(wrapped, ours, 20)
    _run(plain, theirs, 20)
    assert torch.equal(ours, theirs)

    manifold = BudgetManifold(_problem("slack"))
    x = manifold.random_point(0).requires_grad_()
    optimizer = RiemannianOptimizer(make([x]), manifold)
    _run(optimizer, x, 10)
    y, state = x.detach().clone().requires_grad_(), copy.deepcopy(optimizer.state_dict())
    _run(optimizer, x, 10)
    resumed = RiemannianOptimizer(make([y]), BudgetManifold(_problem("slack")))
    resumed.load_state_dict(state)
    _run(resumed, y, 10)
    assert torch.equal(x, y)


def test_maximising_is_minimising_the_negative() -> None:
    manifold = BudgetManifold(_problem("slack"))
    x, y = (manifold.random_point(0).requires_grad_() for _ in range(2))
    down = RiemannianOptimizer(torch.optim.Adam([x], lr=0.05), manifold)
    up = RiemannianOptimizer(torch.optim.Adam([y], lr=0.05, maximize=True), manifold)
    for _ in range(30):
        _run(down, x, 1)
        up.zero_grad()
        (-_loss(y)).backward()
        up.step()
    assert torch.equal(x, y)


def test_copies_go_on_like_the_original() -> None:
    manifold = BudgetManifold(_problem("slack"))
    x = manifold.random_point(0).requires_grad_()
    optimizer = RiemannianAdam([x], manifold, lr=0.05)
    _run(optimizer, x, 5)
    y, copied = copy.deepcopy((x, optimizer))
    _run(optimizer, x, 10)
    _run(copied, y, 10)
    assert torch.equal(x, y)


def test_hooks_run_once_per_step() -> None:
    manifold = BudgetManifold(_problem())
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # installs hooks on the class it is an instance of
    x = manifold.random_point(0).requires_grad_()
    optimizer = RiemannianAdam([x], manifold)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    _run(optimizer, x, 3)
    assert len(calls) == 3


def test_wrong_use_is_named() -> None:
    manifold = BudgetManifold(_problem())
    with pytest.raises(TypeError, match=r"must be float64 on the CPU.*float32"):
        RiemannianAdam([torch.zeros(N, K, requires_grad=True)], manifold)
    with pytest.raises(ValueError, match=r"have shape \(20, 6\), got \(3, 3\)"):
        RiemannianAdam([torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)], manifold)
    with pytest.raises(TypeError, match="LBFGS"):
        RiemannianOptimizer(torch.optim.LBFGS([manifold.random_point(0).requires_grad_()]), manifold)


def _linear_program(seed: int) -> tuple[BudgetManifold, torch.Tensor, float]:
    """Several joint budgets that can be met together, losses of the options, and the relaxation's optimum."""
    rng = np.random.default_rng(seed)
    q, groups, options = int(rng.integers(2, 6)), int(rng.integers(2, 9)), int(rng.integers(2, 5))
    costs = rng.integers(0, 30, (q, groups, options))
    inside = (costs * rng.dirichlet(np.ones(options), groups)).sum(axis=(1, 2))
    width = costs.max(axis=2).sum(axis=1) - costs.min(axis=2).sum(axis=1)
    budgets = np.ceil(inside + rng.uniform(0.0, 0.3, q) * width).astype(int) + 1
    losses = rng.normal(size=(groups, options))
    best = linprog(
        losses.ravel(),
        A_ub=costs.reshape(q, -1),
        b_ub=budgets,
        A_eq=np.kron(np.eye(groups), np.ones(options)),
        b_eq=np.ones(groups),
    )
    manifold = BudgetManifold(AllocationProblem(costs, budgets.tolist(), sense="<="))
    return manifold, torch.from_numpy(losses), float(best.fun)


def _reaches_the_optimum(seed: int) -> None:
    """Adam with a falling rate, from where it is again while an early decision still has to be undone."""
    manifold, losses, best = _linear_program(seed)
    width = float((losses.amax(dim=1) - losses.amin(dim=1)).sum())
    x = manifold.retract(torch.zeros_like(losses)).requires_grad_()
    for _ in range(12):
        optimizer = RiemannianAdam([x], manifold, lr=0.3, betas=(0.9, 0.9), eps=1e-30)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.985)
        for step in range(250):
            optimizer.zero_grad()
            loss = (torch.softmax(x, dim=1) * losses).sum()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 25 < 24:
                continue
            assert manifold.check_point(x.detach()) == (True, None)
            reached = float((torch.softmax(x.detach(), dim=1) * losses).sum())
            assert reached >= best - 1e-9 * width
            if reached <= best + 1e-6 * width:
                return
    raise AssertionError(
        f"problem {seed} ended {(reached - best) / width:.1e} of its width above the optimum"
    )


@pytest.mark.parametrize("seed", range(6))
def test_joint_inequalities_end_at_the_optimum_of_the_linear_program(seed: int) -> None:
    """Budgets that bind at first must let go where others take over: the cone, not the span, of their normals."""
    _reaches_the_optimum(seed)


@pytest.mark.slow
def test_two_hundred_linear_programs() -> None:
    for seed in range(200):
        _reaches_the_optimum(seed)


def test_a_budget_that_does_not_bind_lets_go() -> None:
    """Two normals at an acute angle: staying with both would stop the walk where it begins."""
    costs = [[[0, 10, 10]], [[0, 10, 12]]]
    values = torch.tensor([[0.0, -1.0, -0.9]], dtype=torch.float64)
    manifold = BudgetManifold(AllocationProblem(costs, ["20/3", "22/3"], sense="<="))
    x = manifold.retract(torch.zeros_like(values)).requires_grad_()
    optimizer = RiemannianAdam([x], manifold, lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        loss = (torch.softmax(x, dim=1) * values).sum()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < -0.666  # two thirds of the first option at best, as the first budget says


@pytest.mark.parametrize("seed", range(5))
def test_the_allowed_part_is_the_nearest_allowed_direction(seed: int) -> None:
    """Against a quadratic program: nearest to the vector among those that raise no binding cost when opposed."""
    manifold, losses, _ = _linear_program(seed)
    x = manifold.retract(
        3 * torch.randn(losses.shape, generator=torch.Generator().manual_seed(seed)).double()
    )
    v = torch.randn(losses.shape, generator=torch.Generator().manual_seed(seed + 1)).double()
    got = manifold.project(x, v, one_sided=True).flatten().numpy()
    binding = (manifold.slack(x) == 0).numpy()
    normals = manifold.normal(x).reshape(len(binding), -1).numpy()[binding]
    lengths = np.linalg.norm(normals, axis=1, keepdims=True)
    normals = normals / lengths
    assert (normals @ got >= -1e-12).all()
    nearest = minimize_scipy(
        lambda w: 0.5 * float((w - v.numpy().ravel()) @ (w - v.numpy().ravel())),
        got + 0.1,
        jac=lambda w: w - v.numpy().ravel(),
        constraints=[{"type": "ineq", "fun": lambda w: normals @ w, "jac": lambda w: normals}]
        if len(normals)
        else [],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(got, nearest.x, atol=1e-5)


def test_adam_is_that_of_torch_bit_for_bit() -> None:
    rng = torch.Generator().manual_seed(0)
    mine, theirs = torch.ones(7, 3, dtype=torch.float64), torch.ones(7, 3, dtype=torch.float64)
    adam, reference = Adam(mine, lr=0.1), torch.optim.Adam([theirs], lr=0.1)
    for _ in range(30):
        gradient = torch.randn(7, 3, generator=rng, dtype=torch.float64)
        adam.step(gradient)
        theirs.grad = gradient
        reference.step()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["one", "blocks", "joint", "slack"])
def test_a_search_moves_its_logits_as_riemannian_adam(kind: str) -> None:
    problem, rng = _problem(kind), torch.Generator().manual_seed(1)
    surface = "<=" if kind == "slack" else "=="
    prior = torch.randn(N, K, generator=rng, dtype=torch.float64)
    search = ManifoldOptimizer(problem, prior, 0.1, surface)
    manifold = BudgetManifold(problem, surface=surface)
    x = manifold.retract(prior.clone()).requires_grad_()
    optimizer = RiemannianAdam([x], manifold, lr=0.1)
    again = None
    for step in range(20):
        x.grad = torch.randn(N, K, generator=rng, dtype=torch.float64)
        search.step(x.grad, 0.0)
        if again is not None:
            again.step(x.grad, 0.0)
        optimizer.step()
        assert torch.equal(search.logits, x)
        if step == 9:
            again = ManifoldOptimizer(problem, prior, 0.1, surface)
            again.load(search.state())
    assert again is not None
    assert torch.equal(again.logits, x)
