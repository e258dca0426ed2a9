"""The budget manifold: logits whose expected cost is the budget (paper, section 2 and appendix A).

A point is an (N, K) tensor of logits ``x`` with ``p_i = softmax(x_i)`` and expected cost
``C(x) = sum_i w_i <p_i, c_i>``. Three operations turn an optimizer into one that stays on ``C(x) = B``:
:meth:`BudgetManifold.project` (gradients to the tangent space), :meth:`BudgetManifold.retract` (back onto the
surface, by a shift along the costs) and :meth:`BudgetManifold.transport` (momentum to the new tangent space).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from rco.core.exact import ExactArray
from rco.core.problem import AllocationProblem, InfeasibleBudgetError
from rco.core.retraction import JointPoint, NoConvergenceError, solve_joint, solve_separable

__all__ = ["BudgetManifold"]

# Sums of float64 terms cannot be resolved below this share of their size, whatever tolerance is asked for.
_RESOLUTION = 2.0**-48
_TINY = 1e-250  # squared norms below this have lost digits to underflow
_RUNGS = 8  # renormalisations of the logits before a retraction gives up
_DIRECT_LIMIT = 40  # evaluations of the joint solver before it damps the logits
_PAPER_HALF_WIDTH = 50.0  # of the bisection's first bracket (appendix A.2)


class _Local(NamedTuple):
    """What the geometry at one point is made of; expected costs are counted from the cheapest assignment's."""

    normal: Tensor  # (q, N, K), rows of a block hold that block's normal
    expected: Tensor  # (J,)


class BudgetManifold:
    """The logits whose expected cost equals the budget, or with ``sense="<="`` does not exceed it.

    Points and vectors are (N, K) float64 tensors on the CPU; narrower floats are converted exactly. Entries of
    forbidden options are ignored on input; they are 0 in normals and tangent vectors and untouched by a
    retraction. Under ``"<="`` every point has a slack ``s = sqrt(B - C(x))``, and geometry happens on
    ``C(x) + s^2 = B`` (appendix A.7); the slack follows from the point and is not stored.

    Args:
        problem: Costs, weights, budgets, blocks and forbidden options.
        retraction: ``"newton"`` (safeguarded, about 3 softmax evaluations inside a run) or ``"bisection"`` (the
            paper's; one budget or blocks only).
        tol: Largest accepted ``|C(x) - B|`` relative to ``|B|``. Where costs of both signs cancel to a far smaller
            budget (0, say), what float64 resolves of the total bounds it from below.

    Attributes:
        softmax_evaluations: How many softmax evaluations all retractions so far have taken.
        retractions: How many retractions that were.
        last_iterations: Softmax evaluations of the latest retraction.

    Raises:
        InfeasibleBudgetError: A budget is an end of its range, which finite logits only approach.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        retraction: Literal["newton", "bisection"] = "newton",
        tol: float = 1e-12,
    ) -> None:
        if retraction not in ("newton", "bisection"):
            raise ValueError(f'retraction must be "newton" or "bisection", got {retraction!r}.')
        if retraction == "bisection" and problem.num_joint > 1:
            raise ValueError(
                f"Bisection is for one budget or separable blocks, but the problem has {problem.num_joint} joint "
                'budgets; use retraction="newton".'
            )
        if not tol > 0:
            raise ValueError(f"tol must be positive, got {tol}.")
        self.problem = problem
        self.retraction = retraction
        self.tol = float(tol)
        self.softmax_evaluations = 0
        self.retractions = 0
        self.last_iterations = 0
        self._scalar = problem.block_ids is None and problem.num_joint == 1
        self._inequality = problem.sense == "<="
        self._blocks = None if problem.block_index is None else torch.from_numpy(problem.block_index.copy())
        self._forbidden = None if problem.allowed.all() else torch.from_numpy(~problem.allowed)
        self._set_costs()
        self._check_interior()

    def _set_costs(self) -> None:
        problem = self.problem
        # Each group's cheapest option is taken as zero: the softmax does not see a shift of a whole row, and large
        # common offsets would cost digits. The subtraction is exact, in integers.
        units = problem.unit_costs - problem.unit_costs.min(axis=2, keepdims=True)
        costs = ExactArray(units, problem.denominator).to_float()  # (q, N, K), weighted
        weights = problem.weights
        directions = costs / weights[None, :, None]
        spread = directions.max(axis=2)  # (q, N)
        if problem.block_index is None:
            scale = spread.max(axis=1)
        else:
            scale = np.zeros(problem.num_budgets)
            np.maximum.at(scale, problem.block_index, spread[0])
        scale[scale == 0] = 1.0
        per_group = scale[:, None, None] if problem.block_index is None else scale[problem.block_index, None]
        low, high = problem.unit_range
        unit = problem.denominator
        self._costs = torch.from_numpy(np.ascontiguousarray(costs))
        self._directions = torch.from_numpy(np.ascontiguousarray(directions / per_group))
        self._weights = torch.from_numpy(weights.copy())
        self._scale = scale
        self._base = torch.tensor([float(Fraction(v, unit)) for v in low], dtype=torch.float64)
        self._target = np.array(
            [float(b - Fraction(v, unit)) for b, v in zip(problem.budgets, low, strict=True)]
        )
        self._span = np.array([float(Fraction(h - v, unit)) for h, v in zip(high, low, strict=True)])
        self._tolerance = np.maximum(
            self.tol * np.abs(problem.float_budgets), _RESOLUTION * np.minimum(self._target, self._span)
        )

    def _check_interior(self) -> None:
        problem = self.problem
        for j in range(problem.num_budgets):
            if self._span[j] == 0:
                continue  # nothing to decide; only "<=" lets such a problem through
            end = (
                "lowest" if self._target[j] == 0 else "highest" if self._target[j] == self._span[j] else None
            )
            if end is None or (end == "highest" and self._inequality):
                continue
            raise InfeasibleBudgetError(
                f"{self._name(j)} is the {end} reachable total ({float(problem.budgets[j]):.12g}), which "
                "expected costs of finite logits only approach: every group would have to take its "
                f"{'cheapest' if end == 'lowest' else 'costliest'} option for certain. Nothing is left to search; "
                "take that assignment, or move the budget inside its range."
            )

    def _name(self, j: int) -> str:
        if self.problem.block_ids is not None:
            return f"The budget of block {self.problem.block_ids[j]!r}"
        return "The budget" if self._scalar else f"Joint budget {j}"

    # ------------------------------------------------------------------------------------------------- points

    def _point(self, x: Tensor, name: str = "x") -> Tensor:
        """``x`` as float64, checked for shape and device."""
        shape = (self.problem.num_groups, self.problem.num_options)
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise TypeError(f"{name} must hold floating-point numbers, got {x.dtype}.")
        if x.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, where budgets are kept to float64, got {x.device}.")
        return x if x.dtype == torch.float64 else x.double()

    def _masked(self, x: Tensor) -> Tensor:
        return x if self._forbidden is None else x.masked_fill(self._forbidden, -torch.inf)

    def _vector(self, v: Tensor) -> Tensor:
        v = self._point(v.detach(), "v")
        return v if self._forbidden is None else v.masked_fill(self._forbidden, 0.0)

    def _total(self, rows: Tensor) -> Tensor:
        """Sums (q, N) group values to one value per budget (J,)."""
        if self._blocks is None:
            return rows.sum(dim=1)
        return rows.new_zeros(len(self._target)).index_add_(0, self._blocks, rows[0])

    def _spread_out(self, values: Tensor) -> Tensor:
        """One value per budget (J,) to the shape that multiplies (q, N, K)."""
        if self._blocks is None:
            return values[:, None, None]
        return values[self._blocks, None]

    def _local(self, masked: Tensor) -> _Local:
        probabilities = torch.softmax(masked, dim=-1)
        expected = (probabilities * self._costs).sum(dim=-1, keepdim=True)
        normal = probabilities * (self._costs - expected)
        return _Local(normal, self._total(expected.squeeze(-1)))

    def expected_cost(self, x: Tensor) -> Tensor:
        """Expected cost in the problem's units: 0-d for one budget, (J,) for several; differentiable."""
        probabilities = torch.softmax(self._masked(self._point(x)), dim=-1)
        total = self._base + self._total((probabilities * self._costs).sum(dim=-1))
        return total[0] if self._scalar else total

    def slack(self, x: Tensor) -> Tensor:
        """``s = sqrt(B - C(x))``, 0 where the budget is met to tolerance: 0-d, or (J,) for several budgets."""
        with torch.no_grad():
            slack = self._slack(self._local(self._masked(self._point(x.detach()))).expected)
        return slack[0] if self._scalar else slack

    def _slack(self, expected: Tensor) -> Tensor:
        room = torch.from_numpy(self._target) - expected
        return torch.where(room > torch.from_numpy(self._tolerance), room, 0.0).sqrt()

    def check_point(self, x: Tensor) -> tuple[bool, str | None]:
        """Whether ``x`` lies on the manifold; if not, why."""
        try:
            x = self._point(x.detach())
        except (TypeError, ValueError) as error:
            return False, str(error)
        masked = self._masked(x)
        if not torch.isfinite(masked if self._forbidden is None else masked[~self._forbidden]).all():
            return False, "x holds NaN or infinite logits."
        residual = self._local(masked).expected.numpy() - self._target
        wrong = residual > self._tolerance if self._inequality else np.abs(residual) > self._tolerance
        if not wrong.any():
            return True, None
        j = int(np.argmax(np.where(wrong, np.abs(residual) / self._tolerance, 0.0)))
        return False, (
            f"{self._name(j)} is not met: C(x) - B = {residual[j]:.3e}, where C(x) {self.problem.sense} B must "
            f"hold to {self._tolerance[j]:.3e}."
        )

    def random_point(self, seed: int = 0) -> Tensor:
        """A point from standard normal logits; equal seeds give equal points."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.problem.num_groups, self.problem.num_options)
        return self.retract(torch.randn(shape, generator=generator, dtype=torch.float64))

    # ----------------------------------------------------------------------------------------- tangent spaces

    def normal(self, x: Tensor) -> Tensor:
        """Gradient of the expected cost: ``w_i p_ik (c_ik - E_{p_i}[c])``.

        (N, K) for one budget and for blocks, whose normals have disjoint rows; (q, N, K) for joint budgets.
        """
        with torch.no_grad():
            normal = self._local(self._masked(self._point(x.detach()))).normal
        return normal[0] if self.problem.num_joint == 1 else normal

    @overload
    def project(self, x: Tensor, v: Tensor, slack_component: None = None) -> Tensor: ...
    @overload
    def project(self, x: Tensor, v: Tensor, slack_component: Tensor) -> tuple[Tensor, Tensor]: ...

    def project(
        self, x: Tensor, v: Tensor, slack_component: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The part of ``v`` in the tangent space at ``x``; the identity where the normal vanishes.

        Args:
            x: The point, (N, K).
            v: The vector, (N, K).
            slack_component: The vector's component along the slack, shaped as :meth:`slack`. Given, the projected
                pair is returned; not given, it is taken as zero and the (N, K) part is returned.
        """
        with torch.no_grad():
            local = self._local(self._masked(self._point(x.detach())))
            v = self._vector(v)
            along = v.new_zeros(len(self._target)) if slack_component is None else slack_component.reshape(-1)
            # The augmented normal is (n, 2s); without slack its last entry is zero.
            last = 2 * self._slack(local.expected) if self._inequality else torch.zeros_like(along)
            if self.problem.num_joint == 1:
                projected, along = self._project_separable(local.normal, last, v, along)
            else:
                projected, along = _project_joint(local.normal, last, v, along)
        if slack_component is None:
            return projected
        return projected, along.reshape(slack_component.shape)

    def _project_separable(
        self, normal: Tensor, last: Tensor, v: Tensor, along: Tensor
    ) -> tuple[Tensor, Tensor]:
        squared = self._total((normal * normal).sum(dim=-1)) + last * last
        if bool((squared < _TINY).any()):
            largest = torch.maximum(self._largest(normal), last)
            factor = torch.where(largest > 0, 1 / largest.clamp_min(1e-307), 1.0)
            normal, last = normal * self._spread_out(factor), last * factor
            squared = self._total((normal * normal).sum(dim=-1)) + last * last
        inner = self._total((normal * v).sum(dim=-1)) + last * along
        coefficient = torch.where(squared > 0, inner / squared, 0.0)
        projected = (v - self._spread_out(coefficient) * normal)[0]
        return projected, along - coefficient * last

    def _largest(self, normal: Tensor) -> Tensor:
        """Largest entry of each budget's normal, (J,)."""
        rows = normal.abs().amax(dim=-1)
        if self._blocks is None:
            return rows.amax(dim=1)
        return rows.new_zeros(len(self._target)).scatter_reduce_(0, self._blocks, rows[0], "amax")

    @overload
    def transport(self, x: Tensor, v: Tensor, slack_component: None = None) -> Tensor: ...
    @overload
    def transport(self, x: Tensor, v: Tensor, slack_component: Tensor) -> tuple[Tensor, Tensor]: ...

    def transport(
        self, x: Tensor, v: Tensor, slack_component: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Carry ``v`` to the tangent space at ``x``, the new point: transport by projection (appendix A.5)."""
        if slack_component is None:
            return self.project(x, v)
        return self.project(x, v, slack_component)

    # ------------------------------------------------------------------------------------------------ retract

    def retract(self, x: Tensor) -> Tensor:
        """Shift ``x`` along the costs onto the manifold; a point already there comes back unchanged.

        Under ``"<="`` only budgets that are exceeded shift anything.

        Raises:
            ValueError: ``x`` holds NaN or infinite entries at allowed options.
            InfeasibleBudgetError: A budget could not be met; the message names it.
        """
        given = self._point(x.detach())
        self.last_iterations = 0
        self.retractions += 1
        with torch.no_grad():
            base = moved = self._masked(given)
            solve = _SeparableShift(self) if self.problem.num_joint == 1 else _JointShift(self)
            for _ in range(_RUNGS):
                try:
                    moved = solve(base)
                    break
                except NoConvergenceError as stop:
                    self._check_finite(base)
                    # Large logits lie too coarsely around the root. With each row's maximum moved to zero (the
                    # softmax does not notice) the options that compete are resolved finely; go on from there.
                    moved = self._shifted(base, stop.best)
                    base = moved - moved.amax(dim=-1, keepdim=True)
            else:
                self._raise_unreached(base)
            self.softmax_evaluations += self.last_iterations
            if self._forbidden is not None:
                return torch.where(self._forbidden, given, moved)
            return given.clone() if moved is given else moved

    def _shifted(self, base: Tensor, shift: np.ndarray) -> Tensor:
        """``base`` plus the shift (J,) along the normalised directions."""
        if not shift.any():
            return base
        if self._blocks is not None:
            return torch.addcmul(base, torch.from_numpy(shift)[self._blocks, None], self._directions[0])
        if len(shift) == 1:
            return torch.add(base, self._directions[0], alpha=float(shift[0]))
        return base + (torch.from_numpy(shift) @ self._directions.flatten(1)).view_as(base)

    def _check_finite(self, base: Tensor) -> None:
        if self._forbidden is not None:
            base = base.masked_fill(self._forbidden, 0.0)
        if not torch.isfinite(base).all():
            i, k = (int(v) for v in torch.nonzero(~torch.isfinite(base))[0])
            raise ValueError(
                f"Logits must be finite to be retracted, got {float(base[i, k])} at group {i}, option {k}."
            )

    def _raise_unreached(self, base: Tensor) -> None:
        residual = self._local(base).expected.numpy() - self._target
        excess = residual if self._inequality else np.abs(residual)
        j = int(np.argmax(excess / self._tolerance))
        raise InfeasibleBudgetError(
            f"{self._name(j)} ({float(self.problem.budgets[j]):.12g}) could not be reached: C - B "
            f"stays at {residual[j]:.3e} where {self._tolerance[j]:.3e} is allowed. Budgets that only hold when "
            "some group takes one option for certain are met by no finite logits; loosen that budget."
        )


class _SeparableShift:
    """One retraction under one budget or blocks; called again from a renormalised base if the first call fails."""

    def __init__(self, manifold: BudgetManifold) -> None:
        self.manifold = manifold
        self.target = manifold._target
        self.started = False

    def __call__(self, base: Tensor) -> Tensor:
        manifold, moved = self.manifold, base

        def evaluate(shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            nonlocal moved
            manifold.last_iterations += 1
            moved = manifold._shifted(base, shift)
            local = manifold._local(moved)
            slope = manifold._total((local.normal * manifold._directions).sum(dim=-1))
            return local.expected.numpy(), slope.numpy()

        first = None
        if manifold._inequality and not self.started:
            first = evaluate(np.zeros_like(self.target))
            # A budget that is not exceeded is met as it stands: it asks for the cost it has.
            self.target = np.minimum(self.target, first[0])
        # What bisection leaves unsolved, with logits far beyond its bracket, Newton finishes.
        bisect = manifold.retraction == "bisection" and not self.started
        half = _PAPER_HALF_WIDTH * manifold._scale if bisect else None
        self.started = True
        solve_separable(evaluate, self.target, manifold._span, 0.5 * manifold._tolerance, half, first)
        return moved


class _JointShift:
    """One retraction under q joint budgets."""

    def __init__(self, manifold: BudgetManifold) -> None:
        self.manifold = manifold
        bound = 0.0 if manifold._inequality else np.inf
        self.upper = np.full(len(manifold._target), bound)

    def __call__(self, base: Tensor) -> Tensor:
        manifold, moved = self.manifold, base
        scale = manifold._scale
        tolerance = 0.5 * manifold._tolerance / scale

        def evaluate(shift: np.ndarray, factor: float = 1.0) -> JointPoint:
            nonlocal moved
            manifold.last_iterations += 1
            moved = manifold._shifted(base if factor == 1.0 else base * factor, shift)
            local = manifold._local(moved)
            hessian = (local.normal.flatten(1) @ manifold._directions.flatten(1).T).numpy() / scale[:, None]
            value = float(torch.logsumexp(moved, dim=-1) @ manifold._weights)
            return JointPoint(
                value - float(shift @ (manifold._target / scale)),
                (local.expected.numpy() - manifold._target) / scale,
                0.5 * (hessian + hessian.T),
            )

        shift = np.zeros_like(scale)
        try:
            shift = solve_joint(evaluate, shift, tolerance, self.upper, limit=_DIRECT_LIMIT)
        except NoConvergenceError:
            manifold._check_finite(base)
            shift = self._by_continuation(base, evaluate, tolerance)
        return moved

    def _by_continuation(
        self, base: Tensor, evaluate: Callable[..., JointPoint], tolerance: np.ndarray
    ) -> np.ndarray:
        """Solve for damped logits first, where the costs vary smoothly, then for ever less damped ones."""
        finite = base if self.manifold._forbidden is None else base.masked_fill(self.manifold._forbidden, 0.0)
        factor = min(1.0, 4.0 / max(float(finite.abs().amax()), 1e-300))
        shift = np.zeros_like(tolerance)
        try:
            while factor < 1.0:
                coarse = np.maximum(tolerance, 1e-6)
                try:
                    shift = solve_joint(partial(evaluate, factor=factor), shift, coarse, factor * self.upper)
                except NoConvergenceError as stop:
                    shift = stop.best
                growth = min(2.0, 1.0 / factor)
                factor, shift = factor * growth, shift * growth
            return solve_joint(evaluate, shift, tolerance, self.upper)
        except NoConvergenceError as stop:
            self.upper = self.upper - stop.best  # what a next call may still add
            raise


def _project_joint(normal: Tensor, last: Tensor, v: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Project out q augmented normals ``(n_j, last_j e_j)`` that may be nearly dependent."""
    flat = normal.flatten(1)
    largest = torch.maximum(flat.abs().amax(dim=1), last).clamp_min(1e-300)
    flat, last = flat / largest[:, None], last / largest
    norm = (flat.square().sum(dim=1) + last * last).sqrt()
    norm = torch.where(norm > 0, norm, 1.0)
    flat, last = flat / norm[:, None], last / norm
    values, vectors = torch.linalg.eigh(flat @ flat.T + torch.diag(last * last))
    keep = values > 1e-13 * values[-1].clamp_min(1e-300)
    inverse = torch.where(keep, 1 / values.clamp_min(1e-300), 0.0)
    vector = v.flatten()
    for _ in range(2):  # the second pass removes what rounding left of the normals in the first
        inner = flat @ vector + last * along
        coefficient = vectors @ (inverse * (vectors.T @ inner))
        vector, along = vector - coefficient @ flat, along - coefficient * last
    return vector.view_as(v), along
