"""Root finding behind the retraction: shift logits along the costs until every expected cost meets its budget.

Shifting by ``t`` along the costs gives the convex function (a sum of cumulant generating functions)
``Phi(t) = sum_i w_i logsumexp(x_i + sum_l t_l d_li) - t . B``, whose gradient is ``C(t) - B`` and whose Hessian is
``sum_i w_i Cov_{p_i}[d]``. The equality retraction minimises it over all ``t``; the inequality retraction over
``t <= 0``, which for one budget is the two-branch retraction of the paper's appendix A.7.

Budgets that share no group are scalar problems and are solved side by side (:func:`solve_separable`); joint
budgets are one problem in ``q`` variables (:func:`solve_joint`). Far from the root ``C(t)`` is a staircase whose
flat parts have an underflowing derivative, so Newton steps are only ever taken inside a bracket or a trust region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["JointPoint", "NoConvergenceError", "solve_joint", "solve_separable"]

_GROWTH = 4.0  # of the bracket or trust region per step while the root is not yet enclosed
_SEPARABLE_LIMIT = 2000  # evaluations; doubling to the edge of float64 takes about 500
_JOINT_LIMIT = 120


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
