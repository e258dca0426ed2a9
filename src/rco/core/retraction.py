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

from rco.core.expected_cost import ExpectedCost
from rco.core.manifold_kernels import retract_rows

__all__ = [
    "JointPoint",
    "JointShift",
    "NoConvergenceError",
    "SeparableShift",
    "solve_joint",
]

_GROWTH = 4.0  # of the trust region after a step that it limited
_JOINT_LIMIT = 120  # evaluations
_PHI_ROUNDING = 2.0**-48  # relative error of Phi, a sum over all groups
_DIRECT_LIMIT = 40  # evaluations of the joint solver before it damps the logits
_PAPER_HALF_WIDTH = 50.0  # of the bisection's first bracket, in units of the costs (appendix A.2)


class NoConvergenceError(ArithmeticError):
    """The root was not reached at the resolution of the current logits; ``best`` is the closest shift."""

    def __init__(self, best: np.ndarray) -> None:
        super().__init__("the retraction did not converge")
        self.best = best


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
        # Variables at (or within reach of) their bound that would cross it stay out of the Newton system.
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
            # Near the minimum the decrease is below the rounding error of Phi: a step that raises Phi by no more
            # than that error is accepted, since it may be the one that determines which budgets bind.
            rounding = _PHI_ROUNDING * abs(point.value)
            accepted = candidate.value <= point.value + 1e-4 * predicted + rounding
            if not accepted:
                scale *= 0.25 if scale == 1.0 else 0.5
        if scale < 1.0:
            radius = max(scale * float(np.abs(step).max()), 1e-6)
        elif clipped:
            radius *= _GROWTH
        shift, point = trial, candidate


def _excess(shift: np.ndarray, gradient: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Violation of each optimality condition: at the bound only a positive gradient violates it."""
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

    Called again, up to ``attempts`` times, from a base that is finer resolved if a call does not converge.

    Args:
        cost: The expected cost.
        below: (J,) booleans, whether a budget may be left unspent.
        bisect: Whether to bisect as the paper does; Newton solves the budgets that bisection leaves.

    Attributes:
        used: Softmax evaluations so far, per budget.
    """

    attempts = 32  # each resolves another sixteen decades of the logits

    def __init__(self, cost: ExpectedCost, below: np.ndarray, bisect: bool = False) -> None:
        self.cost = cost
        self.below = below
        self.bisect = bisect
        self.target = cost.target.copy()
        self.used = np.zeros(cost.num_budgets, dtype=np.int64)

    def __call__(self, base: Tensor) -> Tensor:
        """The shifted logits."""
        cost = self.cost
        moved, shift = torch.empty_like(base), np.zeros(cost.num_budgets)
        converged = retract_rows(
            base.numpy(),
            cost.costs[0].numpy(),
            cost.directions[0].numpy(),
            cost.order,
            cost.offsets,
            self.target,
            cost.span,
            0.5 * cost.tolerance,
            _PAPER_HALF_WIDTH * cost.scale,
            self.below,
            self.bisect,
            moved.numpy(),
            shift,
            self.used,
        )
        # In a further call the binding budgets are known, and Newton is used.
        self.bisect, self.below = False, np.zeros_like(self.below)
        if not converged:
            raise NoConvergenceError(shift)
        return moved if shift.any() else base


class JointShift:
    """One retraction under q joint budgets; arguments and use as for :class:`SeparableShift`."""

    attempts = 6

    def __init__(self, cost: ExpectedCost, below: np.ndarray) -> None:
        self.cost = cost
        self.upper = np.where(below, 0.0, np.inf)
        self.used = np.zeros(cost.num_budgets, dtype=np.int64)

    def __call__(self, base: Tensor) -> Tensor:
        """The shifted logits."""
        cost = self.cost
        tolerance = 0.5 * cost.tolerance * cost.slope
        moved = base

        def evaluate(shift: np.ndarray, factor: float = 1.0) -> JointPoint:
            nonlocal moved
            self.used += 1
            damped = base if factor == 1.0 else base * factor
            moved = cost.shifted(damped, shift) if shift.any() else damped
            local = cost.evaluate(moved)
            cost.remember(moved, local)
            hessian = (local.normal.flatten(1) @ cost.directions.flatten(1).T).numpy() * cost.slope[:, None]
            value = float(torch.logsumexp(moved, dim=-1) @ cost.weights)
            return JointPoint(
                value - float(shift @ (cost.target * cost.slope)),
                (local.expected.numpy() - cost.target) * cost.slope,
                0.5 * (hessian + hessian.T),
            )

        try:
            solve_joint(evaluate, np.zeros_like(tolerance), tolerance, self.upper, limit=_DIRECT_LIMIT)
        except NoConvergenceError:
            self._by_continuation(base, evaluate, tolerance)
        return moved

    def _by_continuation(
        self, base: Tensor, evaluate: Callable[..., JointPoint], tolerance: np.ndarray
    ) -> None:
        """Solve for damped logits first, where the costs vary smoothly, then for ever less damped ones."""
        finite = base if self.cost.forbidden is None else base.masked_fill(self.cost.forbidden, 0.0)
        shift = np.zeros_like(tolerance)
        if not torch.isfinite(finite).all():
            raise NoConvergenceError(shift)
        factor = min(1.0, 4.0 / max(float(finite.abs().amax()), 1e-300))
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
            self.upper = self.upper - stop.best  # the shift that a further call may still add
            raise
