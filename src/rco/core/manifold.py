"""The budget manifold: logits whose expected cost is the budget (paper, section 2 and appendix A).

A point is an (N, K) tensor of logits ``x`` with ``p_i = softmax(x_i)`` and expected cost
``C(x) = sum_i w_i <p_i, c_i>``. Three operations turn an optimizer into one that stays on ``C(x) = B``:
:meth:`BudgetManifold.project` (gradients to the tangent space), :meth:`BudgetManifold.retract` (back onto the
surface, by a shift along the costs) and :meth:`BudgetManifold.transport` (momentum to the new tangent space).
"""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from rco.core.expected_cost import ExpectedCost, LocalCost
from rco.core.manifold_kernels import project_rows
from rco.core.problem import AllocationProblem, InfeasibleBudgetError
from rco.core.retraction import JointShift, NoConvergenceError, SeparableShift

__all__ = ["BudgetManifold"]


class BudgetManifold:
    """The logits whose expected cost equals the budget, or on the surface ``"<="`` does not exceed it.

    Points and vectors are (N, K) float64 tensors on the CPU; narrower floats are converted exactly. Entries of
    forbidden options are ignored on input; they are 0 in normals and tangent vectors and untouched by a
    retraction. Under ``"<="`` every point has a slack ``s = sqrt(B - C(x))``, and geometry happens on
    ``C(x) + s^2 = B`` (appendix A.7); the slack follows from the point and is not stored.

    Args:
        problem: Costs, weights, budgets, blocks and forbidden options.
        retraction: ``"newton"`` (safeguarded, about 3 softmax evaluations inside a run) or ``"bisection"`` (the
            paper's; one budget or blocks only).
        tol: Largest accepted ``|C(x) - B|`` relative to what the budget allows above the cheapest assignment, so
            that neither the unit of cost nor an offset matters.
        surface: ``"=="`` or ``"<="``. None: ``"<="`` if that is the problem's sense, ``"=="`` otherwise.

    Attributes:
        softmax_evaluations: Softmax evaluations of all retractions so far.
        retractions: Retractions so far.
        last_iterations: Softmax evaluations of the latest retraction.
        iterations_per_budget: The same for each budget (J,); blocks are solved independently.

    Raises:
        InfeasibleBudgetError: A budget is an end of its range, which finite logits only approach.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        retraction: Literal["newton", "bisection"] = "newton",
        tol: float = 1e-12,
        surface: Literal["==", "<="] | None = None,
    ) -> None:
        if surface not in ("==", "<=", None):
            raise ValueError(f'surface must be "==", "<=" or None, got {surface!r}.')
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
        self.iterations_per_budget = np.zeros(problem.num_budgets, dtype=np.int64)
        self._shape = (problem.num_groups, problem.num_options)
        self._one_budget = problem.block_ids is None and problem.num_joint == 1
        self.surface: Literal["==", "<="] = surface or ("<=" if problem.sense == "<=" else "==")
        self._inequality = self.surface == "<="
        self._cost = ExpectedCost(problem, self.tol)
        self._check_interior()

    def _check_interior(self) -> None:
        cost = self._cost
        for j in range(cost.num_budgets):
            if cost.span[j] == 0 or (cost.target[j] >= cost.span[j] and self._inequality):
                continue  # an inequality that never binds
            if cost.target[j] == 0:
                end, option = "lowest", "cheapest"
                way_out = "Nothing is left to search: take that assignment, or raise the budget."
            elif cost.target[j] == cost.span[j]:
                end, option = "highest", "costliest"
                way_out = (
                    "If the budget is to be met exactly, that assignment is the only one. If it may be left "
                    'unspent, it forbids nothing: use surface="<=".'
                )
            else:
                continue
            raise InfeasibleBudgetError(
                f"{cost.name(j)} is the {end} reachable total ({float(self.problem.budgets[j]):.12g}), which the "
                f"expected cost of finite logits only approaches: every group would take its {option} option for "
                f"certain. {way_out}"
            )

    def __repr__(self) -> str:
        return f"BudgetManifold({self.problem!r}, retraction={self.retraction!r}, tol={self.tol:g})"

    # ------------------------------------------------------------------------------------------------- points

    def _point(self, x: Tensor, name: str = "x") -> Tensor:
        """``x`` as float64, checked for shape and device."""
        if x.shape != self._shape:
            raise ValueError(f"{name} must have shape {self._shape}, got {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise TypeError(f"{name} must hold floating-point numbers, got {x.dtype}.")
        if x.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, where budgets are kept in float64; got {x.device}.")
        return x.to(torch.float64).contiguous()

    def _logits(self, x: Tensor) -> Tensor:
        return self._cost.masked(self._point(x.detach()))

    def _vector(self, v: Tensor) -> Tensor:
        """``v`` as float64, zero at forbidden options."""
        v = self._point(v.detach(), "v")
        return v if self._cost.forbidden is None else v.masked_fill(self._cost.forbidden, 0.0)

    def _per_budget(self, values: Tensor) -> Tensor:
        return values[0] if self._one_budget else values

    def expected_cost(self, x: Tensor) -> Tensor:
        """Expected cost in the problem's units: 0-d for one budget, (J,) for several; differentiable."""
        return self._per_budget(self._cost.value(self._cost.masked(self._point(x))))

    @torch.no_grad()
    def slack(self, x: Tensor) -> Tensor:
        """``s = sqrt(B - C(x))``, 0 where the budget is met to tolerance: 0-d, or (J,) for several budgets."""
        return self._per_budget(self._slack(self._cost.local(self._logits(x))))

    def _slack(self, local: LocalCost) -> Tensor:
        return (self._cost.unit * self._cost.unspent_share(local)).sqrt()

    def check_point(self, x: Tensor) -> tuple[bool, str | None]:
        """Whether ``x`` lies on the manifold; if not, why."""
        try:
            self._check_finite(self._logits(x))
        except (TypeError, ValueError) as error:
            return False, str(error)
        cost = self._cost
        residual = cost.evaluate(self._logits(x)).expected.numpy() - cost.target
        excess = residual if self._inequality else np.abs(residual)
        if (excess <= cost.tolerance).all():
            return True, None
        j = int(np.argmax(excess - cost.tolerance))
        return False, (
            f"{cost.name(j)} is not met: C(x) - B = {residual[j] * cost.unit[j]:.3e}, where C(x) "
            f"{self.surface} B must hold to {cost.tolerance[j] * cost.unit[j]:.3e}."
        )

    def random_point(self, seed: int = 0) -> Tensor:
        """A point from standard normal logits; equal seeds give equal points."""
        generator = torch.Generator().manual_seed(seed)
        return self.retract(torch.randn(self._shape, generator=generator, dtype=torch.float64))

    # ----------------------------------------------------------------------------------------- tangent spaces

    @torch.no_grad()
    def normal(self, x: Tensor) -> Tensor:
        """Gradient of the expected cost: ``w_i p_ik (c_ik - E_{p_i}[c])``.

        (N, K) for one budget and for blocks, whose normals have disjoint rows; (q, N, K) for joint budgets.
        """
        normal = self._cost.in_problem_units(self._cost.local(self._logits(x)).normal)
        return normal[0] if self.problem.num_joint == 1 else normal

    @overload
    def project(
        self, x: Tensor, v: Tensor, slack_component: None = None, one_sided: bool = False
    ) -> Tensor: ...
    @overload
    def project(
        self, x: Tensor, v: Tensor, slack_component: Tensor, one_sided: bool = False
    ) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def project(
        self, x: Tensor, v: Tensor, slack_component: Tensor | None = None, one_sided: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The part of ``v`` in the tangent space at ``x``; the identity where the normal vanishes.

        Args:
            x: The point, (N, K).
            v: The vector, (N, K).
            slack_component: The vector's component along the slack, shaped as :meth:`slack`. Given, the projected
                pair is returned; not given, it is taken as zero and the (N, K) part is returned.
            one_sided: Under ``"<="``, project ``-v`` onto the directions that the feasible set allows: only the
                part that would raise a cost already at its budget is removed. Without effect under ``"=="``. The
                printed projection (False) removes a part of every rise and fall of a cost, the more the larger the
                unit in which costs are counted, so that a search can stick to a budget or drift below it.
        """
        cost = self._cost
        local = cost.local(self._logits(x))
        v = self._vector(v)
        along = (
            v.new_zeros(cost.num_budgets)
            if slack_component is None
            else slack_component.detach().double().reshape(-1)
        )
        if self._inequality and one_sided:
            projected, moved = self._hold(local, v)[0], torch.zeros_like(along)
        elif self._inequality:
            # The augmented normal is (n, 2s).
            projected, moved = self._without_normals(
                cost.in_problem_units(local.normal), v, 2 * self._slack(local), along
            )
        else:
            projected, moved = self._without_normals(local.normal, v, torch.zeros_like(along), along)
        return projected if slack_component is None else (projected, moved.reshape(slack_component.shape))

    def _without_normals(
        self, normal: Tensor, v: Tensor, last: Tensor, along: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Project the augmented normals ``(n_j, last_j)`` out of ``(v, along)``."""
        cost = self._cost
        if not cost.separable:
            rows = _unit_rows(torch.cat([normal.flatten(1), torch.diag(last)], dim=1))
            whole = _remove(rows, torch.cat([v.flatten(), along]))
            return whole[: v.numel()].view_as(v), whole[v.numel() :]
        projected, moved = torch.empty_like(v), torch.empty_like(along)
        project_rows(
            normal[0].numpy(),
            last.numpy(),
            v.numpy(),
            along.numpy(),
            cost.order,
            cost.offsets,
            projected.numpy(),
            moved.numpy(),
        )
        return projected, moved

    def _hold(self, local: LocalCost, v: Tensor) -> tuple[Tensor, Tensor]:
        """``v`` without the part by which ``-v`` raises costs at their budget; and those budgets (J,)."""
        cost = self._cost
        binding = cost.unspent_share(local) == 0
        held = torch.zeros_like(binding)
        if not bool(binding.any()):
            return v.clone(), held
        none = v.new_zeros(cost.num_budgets)
        if cost.separable:
            held = binding & (cost.total((local.normal * v).sum(dim=-1)) < 0)
            per_group = held if cost.blocks is None else held[cost.blocks]
            normal = torch.where(per_group[:, None], local.normal, 0.0)  # a zero normal removes nothing
            return self._without_normals(normal, v, none, none)[0], held
        projected, held[binding] = _onto_cone(_unit_rows(local.normal.flatten(1)[binding]), v)
        return projected, held

    @torch.no_grad()
    def hold(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The one-sided projection of :meth:`project` under ``"<="``, and the budgets (J,) that it held.

        A held budget is at its limit and would be exceeded if ``-v`` were followed. Meeting it exactly in the
        retraction after the step (``retract(x, held)``) keeps an iterate that moves along it from leaving and
        returning at every other step.
        """
        local = self._cost.local(self._logits(x))
        return self._hold(local, self._vector(v))

    @overload
    def transport(
        self, x: Tensor, v: Tensor, slack_component: None = None, one_sided: bool = False
    ) -> Tensor: ...
    @overload
    def transport(
        self, x: Tensor, v: Tensor, slack_component: Tensor, one_sided: bool = False
    ) -> tuple[Tensor, Tensor]: ...

    def transport(
        self, x: Tensor, v: Tensor, slack_component: Tensor | None = None, one_sided: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Carry ``v`` to the tangent space at ``x``, the new point: transport by projection (appendix A.5)."""
        if slack_component is None:
            return self.project(x, v, None, one_sided)
        return self.project(x, v, slack_component, one_sided)

    # ------------------------------------------------------------------------------------------------ retract

    @torch.no_grad()
    def straighten(self, x: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        """The step nearest to ``step``, in the metric ``1 / scale``, that keeps every budget to first order.

        Adam divides each coordinate by its own size, which turns a tangent direction off the tangent plane; the
        retraction then compensates by shifting all logits, including those of decided groups. Removing the normal
        in Adam's own metric leaves only the curvature for the retraction to correct. Under ``"<="`` only the part
        that would raise a cost already at its budget is removed.

        Args:
            x: Start of the step, (N, K).
            step: The step, (N, K).
            scale: Positive, (N, K): the factor of each coordinate of the gradient.
        """
        root = scale.sqrt()  # in coordinates divided by it the metric is the plain one
        local = self._cost.local(self._logits(x))
        stretched = LocalCost(local.normal * root, local.expected)
        against = -self._point(step) / root
        if self._inequality:
            return -root * self._hold(stretched, against)[0]
        none = against.new_zeros(self._cost.num_budgets)
        return -root * self._without_normals(stretched.normal, against, none, none)[0]

    def retract(self, x: Tensor, held: Tensor | None = None) -> Tensor:
        """Shift ``x`` along the costs onto the manifold; a point already there is returned unchanged.

        Under ``"<="`` only exceeded budgets and ``held`` ones (J,) cause a shift; held budgets are met exactly, see
        :meth:`hold`.

        Raises:
            ValueError: ``x`` holds NaN or infinity at an allowed option. (Minus infinity, a probability of zero, is
                accepted if the budget can still be met.)
            InfeasibleBudgetError: A budget could not be met; the message names it.
        """
        cost = self._cost
        given = self._point(x.detach())
        base = cost.masked(given)
        below = np.full(cost.num_budgets, self._inequality)  # budgets that may be left unspent
        if held is not None:
            below &= ~held.numpy()
        solve: JointShift | SeparableShift
        if cost.separable:
            solve = SeparableShift(cost, below, bisect=self.retraction == "bisection")
        else:
            solve = JointShift(cost, below)
        try:
            moved = self._descend(solve, base)
        finally:
            self.retractions += 1
            self.iterations_per_budget = solve.used
            self.last_iterations = int(solve.used.max())
            self.softmax_evaluations += self.last_iterations
        if cost.forbidden is not None:
            return torch.where(cost.forbidden, given, moved)
        return given.clone() if moved is given else moved

    def _descend(self, solve: JointShift | SeparableShift, base: Tensor) -> Tensor:
        """Solve at the resolution of the logits as given, then at ever finer ones until that succeeds."""
        for _ in range(solve.attempts):
            try:
                return solve(base)
            except NoConvergenceError as stop:
                self._check_finite(base)
                # Large logits are spaced too coarsely around the root. Moving each row's maximum to zero, which
                # leaves the softmax unchanged, resolves the competing options finely.
                moved = self._cost.shifted(base, stop.best)
                base = moved - moved.amax(dim=-1, keepdim=True)
        raise self._unreached(base)

    def _check_finite(self, masked: Tensor) -> None:
        forbidden = self._cost.forbidden
        allowed = masked if forbidden is None else masked.masked_fill(forbidden, 0.0)
        if not torch.isfinite(allowed).all():
            i, k = (int(v) for v in torch.nonzero(~torch.isfinite(allowed))[0])
            raise ValueError(f"Logits must be finite, got {float(allowed[i, k])} at group {i}, option {k}.")

    def _unreached(self, base: Tensor) -> InfeasibleBudgetError:
        cost = self._cost
        residual = cost.evaluate(base).expected.numpy() - cost.target
        excess = residual if self._inequality else np.abs(residual)
        j = int(np.argmax(excess / cost.tolerance))
        return InfeasibleBudgetError(
            f"{cost.name(j)} ({float(self.problem.budgets[j]):.12g}) could not be reached: C - B stays at "
            f"{residual[j] * cost.unit[j]:.3e} where {cost.tolerance[j] * cost.unit[j]:.3e} is allowed. Finite "
            "logits cannot meet budgets that hold together only if some group takes one option with probability 1; "
            "loosen that budget."
        )


def _unit_rows(rows: Tensor) -> Tensor:
    """Rows of norm one; rows of zeros stay."""
    rows = rows / rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-300)
    norms = rows.norm(dim=1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1.0)


def _onto_cone(rows: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The vector nearest to ``v`` with no negative inner product with any row; and the active rows (booleans).

    By Moreau's decomposition it is ``v`` plus the non-negative combination of rows nearest to ``-v``: non-negative
    least squares, for which bounded-variable least squares is the more dependable of scipy's two solvers.
    """
    vector = v.flatten()
    held = rows @ vector < 0
    if bool(held.any()) and len(rows) > 1:
        from scipy.optimize import lsq_linear  # takes half a second

        basis, small = torch.linalg.qr(rows.T)
        solution = lsq_linear(
            small.numpy(), -(basis.T @ vector).numpy(), bounds=(0.0, np.inf), method="bvls", tol=1e-15
        )
        held = torch.from_numpy(solution.x > 0.0)
    return (_remove(rows[held], vector) if bool(held.any()) else vector).view_as(v), held


def _remove(rows: Tensor, vector: Tensor) -> Tensor:
    """The part of ``vector`` orthogonal to ``rows``, which have norm one, or zero, and may be dependent."""
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    keep = values > 1e-13 * values[-1].clamp_min(1e-300)
    inverse = torch.where(keep, 1 / values.clamp_min(1e-300), 0.0)
    for _ in range(2):  # the second pass removes what rounding left of the rows in the first
        vector = vector - (vectors @ (inverse * (vectors.T @ (rows @ vector)))) @ rows
    return vector
