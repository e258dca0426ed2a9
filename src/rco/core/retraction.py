"""Root finding behind the retraction: shift logits along the costs until every expected cost meets its budget.

Shifting by ``t`` along the costs gives the convex function (a sum of cumulant generating functions)
``Phi(t) = sum_i w_i logsumexp(x_i + sum_l t_l d_li) - t . B``, whose gradient is ``C(t) - B`` and whose Hessian is
``sum_i w_i Cov_{p_i}[d]``. The equality retraction minimises it over all ``t``; the inequality retraction over
``t <= 0``, which for one budget is the two-branch retraction of the paper's appendix A.7.

Budgets that share no group are scalar problems and are solved side by side (:class:`SeparableShift`); joint
budgets are one problem in ``q`` variables (:class:`JointShift`). Far from the root ``C(t)`` is a staircase whose
flat parts have an underflowing derivative, so Newton steps are only ever taken inside a bracket or a trust region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rco.core.expected_cost import ExpectedCost, LocalCost

__all__ = [
    "JointPoint",
    "JointShift",
    "NoConvergenceError",
    "SeparableShift",
    "solve_joint",
    "solve_separable",
]

_GROWTH = 4.0  # of the bracket or trust region per step while the root is not yet enclosed
_SEPARABLE_LIMIT = 2000  # evaluations; doubling to the edge of float64 takes about 500
_JOINT_LIMIT = 120
_DIRECT_LIMIT = 40  # evaluations of the joint solver before it damps the logits
_PAPER_HALF_WIDTH = 50.0  # of the bisection's first bracket, in units of the costs (appendix A.2)


class NoConvergenceError(ArithmeticError):
    """The root was not reached at the resolution of the current logits; ``best`` is the closest shift."""

    def __init__(self, best: np.ndarray) -> None:
        super().__init__("the retraction did not converge")
        self.best = best


# ------------------------------------------------------------------------------------------- separable budgets


def solve_separable(
    evaluate: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    target: np.ndarray,
    span: np.ndarray,
    tolerance: np.ndarray,
    bisect_from: np.ndarray | None = None,
    first: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Solve ``C_j(t_j) = target_j`` for every j at once; each ``C_j`` rises from 0 to ``span_j``.

    Args:
        evaluate: Maps shifts (J,) to expected costs and their derivatives, both (J,).
        target: Budgets, strictly between 0 and ``span`` where anything is to be solved.
        span: Largest expected costs.
        tolerance: Largest accepted ``|C_j - target_j|``.
        bisect_from: Half width of the first bracket for plain bisection; None for safeguarded Newton.
        first: What ``evaluate`` gives at zero, if that is known already.

    Returns:
        The shifts; ``evaluate`` was last called with exactly these.

    Raises:
        NoConvergenceError: The bracket shrank to neighbouring floats first.
    """
    shift = np.zeros_like(target)
    enclosed_low = np.zeros(
        target.shape, dtype=bool
    )  # whether the bracket's ends are known to enclose the root
    enclosed_high = np.zeros(target.shape, dtype=bool)
    reach = np.ones_like(target) if bisect_from is None else bisect_from
    low, high = shift - reach, shift + reach
    previous = np.full_like(target, np.inf)

    for _ in range(_SEPARABLE_LIMIT):
        cost, slope = evaluate(shift) if first is None else first
        first = None
        residual = cost - target
        size = np.abs(residual)
        pending = ~(size <= tolerance)
        if not pending.any():
            return shift

        above, below = pending & (residual > 0), pending & (residual < 0)
        high, enclosed_high = np.where(above, shift, high), enclosed_high | above
        low, enclosed_low = np.where(below, shift, low), enclosed_low | below
        if bisect_from is None:
            # Until it encloses the root, the bracket reaches a growing way beyond the last point.
            low = np.where(above & ~enclosed_low, shift - reach, low)
            high = np.where(below & ~enclosed_high, shift + reach, high)
            following = _log_odds_step(shift, residual, slope, target, span)
            inside = (following > low) & (following < high)
            # A step to the far side of an end not yet verified goes to that end and moves it further.
            outward = np.where(above & ~enclosed_low, low, np.where(below & ~enclosed_high, high, np.nan))
            middle = np.where(np.isnan(outward), low + 0.5 * (high - low), outward)
            converging = (size <= 0.5 * previous) | ~np.isnan(outward)
            following = np.where(inside & converging, following, middle)
            reach = np.where(np.isnan(outward), reach, _GROWTH * reach)
        else:
            following = low + 0.5 * (high - low)
            stuck = (following == low) | (following == high)
            widen_low, widen_high = pending & stuck & ~enclosed_low, pending & stuck & ~enclosed_high
            if (widen_low | widen_high).any():
                reach = np.where(widen_low | widen_high, _GROWTH * reach, reach)
                low, high = np.where(widen_low, low - reach, low), np.where(widen_high, high + reach, high)
                following = low + 0.5 * (high - low)

        collapsed = pending & enclosed_low & enclosed_high & ((following == low) | (following == high))
        if collapsed.any() or not np.isfinite(np.where(pending, following, 0.0)).all():
            raise NoConvergenceError(shift)
        previous = size
        shift = np.where(pending, following, shift)
    raise NoConvergenceError(shift)


def _log_odds_step(
    shift: np.ndarray, residual: np.ndarray, slope: np.ndarray, target: np.ndarray, span: np.ndarray
) -> np.ndarray:
    """A Newton step on ``log(C / (span - C))``, which is nearly linear in t where ``C`` itself is exponential."""
    room = span - target
    with np.errstate(all="ignore"):
        cost = target + residual
        gap = np.log1p(residual / target) - np.log1p(-residual / room)
        step: np.ndarray = shift - gap * cost * (span - cost) / (slope * span)
    return step


# ----------------------------------------------------------------------------------------------- joint budgets


@dataclass(frozen=True)
class JointPoint:
    """``Phi``, its gradient (q,) and its Hessian (q, q) at some shift, all in normalised units."""

    value: float
    gradient: np.ndarray
    hessian: np.ndarray


def solve_joint(
    evaluate: Callable[[np.ndarray], JointPoint],
    start: np.ndarray,
    tolerance: np.ndarray,
    upper: np.ndarray,
    limit: int = _JOINT_LIMIT,
) -> np.ndarray:
    """Minimise ``Phi`` over ``t <= upper`` by a projected Newton method.

    Args:
        evaluate: ``Phi`` and its derivatives at a shift (q,).
        start: First shift.
        tolerance: Largest accepted gradient entries.
        upper: Bounds on the shifts (q,): zero for "<=", infinity for "==".
        limit: Largest number of evaluations.

    Returns:
        The shift; ``evaluate`` was last called with exactly this one.

    Raises:
        NoConvergenceError: The line search stalled or the limit was reached.
    """
    shift: np.ndarray = np.minimum(start, upper)
    point = evaluate(shift)
    used, radius = 1, 1.0
    while True:
        if not np.isfinite(point.value):
            raise NoConvergenceError(shift)
        excess = _excess(shift, point.gradient, upper)
        if (excess <= tolerance).all():
            return shift
        # Variables at (or within reach of) their bound that want to cross it stay out of the Newton system.
        margin = min(1e-3, float(np.abs(shift - np.minimum(shift - point.gradient, upper)).max()))
        fixed = (shift >= upper - margin) & (point.gradient <= 0)
        step, clipped = _trust_step(point, ~fixed, tolerance, radius)
        step = np.where(fixed, upper - shift, step)

        scale, accepted = 1.0, False
        while not accepted:
            if used >= limit:
                raise NoConvergenceError(shift)
            trial = np.minimum(shift + scale * step, upper)
            if np.array_equal(trial, shift):
                raise NoConvergenceError(shift)
            candidate = evaluate(trial)
            used += 1
            predicted = float(point.gradient @ (trial - shift))
            # Near the minimum the decrease drowns in the rounding of Phi; the gradient still tells.
            left = _excess(trial, candidate.gradient, upper)
            smaller = (left / tolerance).max() <= 0.5 * (excess / tolerance).max()
            accepted = candidate.value <= point.value + 1e-4 * predicted or bool(smaller)
            if not accepted:
                scale *= 0.25 if scale == 1.0 else 0.5
        if scale < 1.0:
            radius = max(scale * float(np.abs(step).max()), 1e-6)
        elif clipped:
            radius *= _GROWTH
        shift, point = trial, candidate


def _excess(shift: np.ndarray, gradient: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """How far each optimality condition is from holding: at the bound only a positive gradient violates it."""
    excess: np.ndarray = np.where(shift >= upper, np.maximum(gradient, 0.0), np.abs(gradient))
    return excess


def _trust_step(
    point: JointPoint, free: np.ndarray, tolerance: np.ndarray, radius: float
) -> tuple[np.ndarray, bool]:
    """The Newton step of the free variables, each eigencomponent limited to ``radius``.

    Componentwise limits keep a descent direction, and keep flat directions (dependent budgets, underflowed
    variances) from shrinking the steps of the others.
    """
    step = np.zeros_like(point.gradient)
    if not free.any():
        return step, False
    curvature, basis = np.linalg.eigh(point.hessian[np.ix_(free, free)])
    slope = basis.T @ point.gradient[free]
    noise = 0.01 * float(tolerance[free].min())
    largest = max(float(curvature[-1]), 0.0)
    # A direction without curvature and without slope is a dependency between the budgets: leave it alone.
    idle = (curvature <= 1e-13 * largest) & (np.abs(slope) <= noise)
    with np.errstate(all="ignore"):
        component = np.where(idle, 0.0, -slope / np.maximum(curvature, 1e-300))
    limited = np.clip(component, -radius, radius)
    step[free] = basis @ limited
    return step, bool((limited != component).any())


# ---------------------------------------------------------------------------------------------- on the logits


class SeparableShift:
    """One retraction under one budget or separable blocks.

    Called again, from a base that is finer resolved, if the first call does not converge.

    Args:
        cost: The expected cost.
        inequality: Whether budgets may be left unspent.
        bisect: Whether to bisect as the paper does; what that leaves unsolved, Newton finishes.

    Attributes:
        evaluations: Softmax evaluations so far.
    """

    def __init__(self, cost: ExpectedCost, inequality: bool, bisect: bool = False) -> None:
        self.cost = cost
        self.inequality = inequality
        self.half_width = _PAPER_HALF_WIDTH * cost.scale if bisect else None
        self.target = cost.target
        self.evaluations = 0

    def __call__(self, base: Tensor) -> tuple[Tensor, LocalCost]:
        """The shifted logits and the expected cost there."""
        cost = self.cost
        reached: tuple[Tensor, LocalCost] = (base, LocalCost(base, base))

        def evaluate(shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            nonlocal reached
            self.evaluations += 1
            moved = cost.shifted(base, shift)
            reached = (moved, cost.evaluate(moved))
            return reached[1].expected.numpy(), cost.slope(reached[1]).numpy()

        first = None
        if self.evaluations == 0 and self.inequality:
            first = evaluate(np.zeros_like(self.target))
            # A budget that is not exceeded is met as it stands: it asks for the cost it has.
            self.target = np.minimum(self.target, first[0])
        half_width, self.half_width = self.half_width, None
        solve_separable(evaluate, self.target, cost.span, 0.5 * cost.tolerance, half_width, first)
        return reached


class JointShift:
    """One retraction under q joint budgets; arguments and use as of :class:`SeparableShift`."""

    def __init__(self, cost: ExpectedCost, inequality: bool) -> None:
        self.cost = cost
        self.upper = np.full(cost.num_budgets, 0.0 if inequality else np.inf)
        self.evaluations = 0

    def __call__(self, base: Tensor) -> tuple[Tensor, LocalCost]:
        """The shifted logits and the expected cost there."""
        cost = self.cost
        tolerance = 0.5 * cost.tolerance / cost.scale
        reached: tuple[Tensor, LocalCost] = (base, LocalCost(base, base))

        def evaluate(shift: np.ndarray, factor: float = 1.0) -> JointPoint:
            nonlocal reached
            self.evaluations += 1
            moved = cost.shifted(base if factor == 1.0 else base * factor, shift)
            local = cost.evaluate(moved)
            reached = (moved, local)
            hessian = (local.normal.flatten(1) @ cost.directions.flatten(1).T).numpy() / cost.scale[:, None]
            value = float(torch.logsumexp(moved, dim=-1) @ cost.weights)
            return JointPoint(
                value - float(shift @ (cost.target / cost.scale)),
                (local.expected.numpy() - cost.target) / cost.scale,
                0.5 * (hessian + hessian.T),
            )

        try:
            solve_joint(evaluate, np.zeros_like(tolerance), tolerance, self.upper, limit=_DIRECT_LIMIT)
        except NoConvergenceError:
            if not torch.isfinite(reached[1].expected).all():
                raise
            self._by_continuation(base, evaluate, tolerance)
        return reached

    def _by_continuation(
        self, base: Tensor, evaluate: Callable[..., JointPoint], tolerance: np.ndarray
    ) -> None:
        """Solve for damped logits first, where the costs vary smoothly, then for ever less damped ones."""
        finite = base if self.cost.forbidden is None else base.masked_fill(self.cost.forbidden, 0.0)
        factor = min(1.0, 4.0 / max(float(finite.abs().amax()), 1e-300))
        shift = np.zeros_like(tolerance)
        while factor < 1.0:
            try:
                damped = partial(evaluate, factor=factor)
                shift = solve_joint(damped, shift, np.maximum(tolerance, 1e-6), factor * self.upper)
            except NoConvergenceError as stop:
                shift = stop.best
            growth = min(2.0, 1.0 / factor)
            factor, shift = factor * growth, shift * growth
        try:
            solve_joint(evaluate, shift, tolerance, self.upper)
        except NoConvergenceError as stop:
            self.upper = self.upper - stop.best  # what a further call may still add
            raise
