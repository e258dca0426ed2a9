"""Torch optimizers on the budget manifold: project the gradient, step, retract, transport the momentum.

The three operations wrap around any torch optimizer (paper, section 2; Algorithm 1, lines 9 to 14).
:class:`RiemannianAdam` is that wrapper around ``torch.optim.Adam``. A search moves its logits with a
:class:`LogitOptimizer`; RCO's is :class:`ManifoldOptimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rco.core.manifold import BudgetManifold
from rco.core.problem import AllocationProblem, InfeasibleBudgetError

__all__ = [
    "Adam",
    "LogitOptimizer",
    "ManifoldOptimizer",
    "RiemannianAdam",
    "RiemannianOptimizer",
    "Surface",
    "search_surface",
]

Surface = Literal["==", "<="]

_MOMENTUM_KEYS = ("exp_avg", "momentum_buffer")  # as torch's optimizers name their first moments
_SLACK_KEY = "slack_momentum"


class RiemannianOptimizer(torch.optim.Optimizer):
    """Keeps the parameters of any torch optimizer with a momentum on a budget manifold.

    Each step projects the gradients onto the tangent space, lets the wrapped optimizer step, retracts the
    parameters and transports the first moment (``exp_avg`` or ``momentum_buffer``); second moments are magnitudes
    per coordinate and stay unchanged. ``param_groups`` and ``state`` are those of the wrapped optimizer, so
    learning-rate schedulers and checkpoints work on this object. On the surface ``"<="`` the momentum's component
    along the slack is kept beside it in the state.

    The first step starts at the parameters as given; retract them before if its gradient should be taken on the
    manifold.

    Args:
        optimizer: The torch optimizer, with (N, K) float64 CPU parameters.
        manifold: Manifold of the parameters. A param group may carry its own under the key ``"manifold"``; a
            group whose manifold is None is optimized without constraint.
        one_sided: On the surface ``"<="``, whether a gradient or momentum that lowers a cost is left unchanged. The
            printed algorithm (False) projects it as well and can stick to the budget; see
            :meth:`BudgetManifold.project`.
        straighten: With an optimizer of Adam's kind, make its step keep the budgets in its own metric before the
            retraction; see :meth:`BudgetManifold.straighten`. The printed algorithm does not (False).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        manifold: BudgetManifold | None = None,
        one_sided: bool = True,
        straighten: bool = False,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS takes several inner steps per call and keeps no momentum to transport; wrap SGD, Adam or "
                "another first-order optimizer."
            )
        self._inner = optimizer
        self._manifold = manifold
        self._one_sided = one_sided
        self._straighten = straighten
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._link()

    def _link(self) -> None:
        """Share groups and state between this object and the wrapped optimizer."""
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``"manifold"`` defaults to the one given at construction."""
        manifold = param_group.setdefault("manifold", self._manifold)
        if not any(param_group is known for known in self._inner.param_groups):
            self._inner.add_param_group(param_group)
        if manifold is not None:
            for parameter in param_group["params"]:
                _check_parameter(parameter, manifold)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the manifold.

        Args:
            closure: Re-evaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        constrained = [
            (parameter, group)
            for group in self.param_groups
            if group["manifold"] is not None
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        gradients = [parameter.grad for parameter, _ in constrained]
        projected = [self._project_gradient(parameter, group) for parameter, group in constrained]
        before = [parameter.clone() if self._straighten else None for parameter, _ in constrained]
        try:
            self._inner.step()
        finally:
            for (parameter, _), gradient in zip(constrained, gradients, strict=True):
                parameter.grad = gradient  # restore the caller's gradient
        for (parameter, group), (along, held), start in zip(constrained, projected, before, strict=True):
            if start is not None:
                self._straighten_step(parameter, group, start)
            parameter.copy_(_retracted(group["manifold"], parameter, held))
            self._transport_momentum(parameter, group, along)
        return loss

    def _project_gradient(
        self, parameter: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Replace the gradient by its tangent part; returns its part along the slack and the budgets it held."""
        manifold: BudgetManifold = group["manifold"]
        assert parameter.grad is not None
        if manifold.surface == "==":
            parameter.grad = manifold.project(parameter, parameter.grad)
            return None, None
        sign = -1.0 if group.get("maximize") else 1.0  # momenta always point against the descent
        descent = sign * parameter.grad
        none = parameter.new_zeros(manifold.problem.num_budgets)
        held = None
        if self._one_sided:
            projected, held = manifold.hold(parameter, descent)
            along = none
        else:
            projected, along = manifold.project(parameter, descent, none)
        parameter.grad = sign * projected
        return along, held

    def _straighten_step(self, parameter: Tensor, group: dict[str, Any], start: Tensor) -> None:
        """Remove the normal from the step just made, in the metric of Adam's second moment."""
        manifold: BudgetManifold = group["manifold"]
        second = self.state[parameter].get("exp_avg_sq")
        if second is None:
            return
        count = float(self.state[parameter]["step"])
        correction = 1.0 - float(group["betas"][1]) ** count
        scale = 1.0 / ((second / correction).sqrt() + float(group["eps"]))
        parameter.copy_(start + manifold.straighten(start, parameter - start, scale))

    def _transport_momentum(self, parameter: Tensor, group: dict[str, Any], along: Tensor | None) -> None:
        manifold: BudgetManifold = group["manifold"]
        state = self.state[parameter]
        for key in _MOMENTUM_KEYS:
            momentum = state.get(key)
            if momentum is None:
                continue
            if along is None:
                momentum.copy_(manifold.transport(parameter, momentum))
            else:
                component = _slack_momentum(state.get(_SLACK_KEY), along, group)
                moved, state[_SLACK_KEY] = manifold.transport(parameter, momentum, component, self._one_sided)
                momentum.copy_(moved)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state; manifolds are left out, as they are rebuilt from their problems."""
        described: dict[str, Any] = self._inner.state_dict()
        for group in described["param_groups"]:
            group.pop("manifold", None)
        return described

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the output of :meth:`state_dict`; the manifolds of this object's groups stay."""
        manifolds = [group["manifold"] for group in self.param_groups]
        self._inner.load_state_dict(state_dict)
        self._link()
        for group, manifold in zip(self.param_groups, manifolds, strict=True):
            group["manifold"] = manifold

    def __getstate__(self) -> dict[str, Any]:
        """State for copying and pickling; torch's base class covers only groups and state."""
        names = ("_inner", "_manifold", "_one_sided", "_straighten")
        kept = {name: self.__dict__[name] for name in names}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse of ``__getstate__``."""
        super().__setstate__(state)
        self._link()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"


class RiemannianAdam(RiemannianOptimizer):
    """Adam on the budget manifold (Algorithm 1, lines 9 to 14).

    Step for step equal to ``torch.optim.Adam`` wherever projection and retraction change nothing.

    Args:
        params: (N, K) float64 CPU tensors, or param groups, each of which may carry its own ``"manifold"``.
        manifold: Manifold of the parameters.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        one_sided: On the surface ``"<="``, leave a gradient that lowers the cost unchanged; False: project it, as
            the paper does.
        straighten: Correct each step so that it keeps the budget to first order before the retraction; the paper
            does not.
    """

    def __init__(
        self,
        params: Any,
        manifold: BudgetManifold | None = None,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        one_sided: bool = True,
        straighten: bool = False,
    ) -> None:
        if manifold is not None and not isinstance(manifold, BudgetManifold):
            raise TypeError(
                f"The second argument is the manifold, got {type(manifold).__name__}: "
                "RiemannianAdam([x], rco.BudgetManifold(problem), lr=0.1)."
            )
        adam = torch.optim.Adam(params, lr=lr, betas=betas, eps=eps)
        super().__init__(adam, manifold, one_sided, straighten)


def search_surface(problem: AllocationProblem) -> Surface:
    """The surface on which a search keeps its expected cost, whichever way allocations meet the budget.

    C = B where spending is required or never hurts; elsewhere C <= B, since the best allocation may leave budget.
    Several budgets can rarely be spent all at once, so that C <= B for them, too.
    """
    return "==" if problem.exact or (problem.monotone and problem.num_joint == 1) else "<="


class LogitOptimizer(Protocol):
    """Optimizer of the logits of a gradient search; methods differ in how it treats the budget."""

    logits: Tensor  # (N, K) float64, requires grad

    def step(self, gradient: Tensor, loss: float) -> None:
        """Move the logits given the estimated gradient of the loss."""
        ...

    def state(self) -> dict[str, Any]:
        """Logits and optimizer state as plain tensors and numbers."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        ...


class Adam:
    """Adam on one CPU tensor, bit for bit as ``torch.optim.Adam``, which would import torch's compiler: seconds.

    Args:
        x: The tensor, which is moved in place.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
    """

    def __init__(
        self, x: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.x, self.lr, self.betas, self.eps = x, lr, betas, eps
        self.steps = 0
        self.first, self.second = torch.zeros_like(x), torch.zeros_like(x)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Move ``x`` against the gradient."""
        one, two = self.betas
        self.steps += 1
        self.first.lerp_(gradient, 1 - one)
        self.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        scale = (self.second.sqrt() / (1 - two**self.steps) ** 0.5).add_(self.eps)
        self.x.addcdiv_(self.first, scale, value=-self.lr / (1 - one**self.steps))

    def state(self) -> dict[str, Any]:
        """Moments and number of steps."""
        return {"steps": self.steps, "first": self.first.clone(), "second": self.second.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.steps = state["steps"]
        self.first, self.second = state["first"].clone(), state["second"].clone()


class ManifoldOptimizer:
    """RCO's logits: on the budget manifold from the start, moved as by :class:`RiemannianAdam`.

    Args:
        problem: Costs and budgets.
        prior: (N, K) logits, which are retracted onto the manifold.
        lr: Learning rate.
        surface: Of the manifold, where the budgets lie inside their ranges.
    """

    def __init__(self, problem: AllocationProblem, prior: Tensor, lr: float, surface: Surface = "==") -> None:
        self._manifold = _manifold_with_interior(problem, surface)
        self.logits = self._manifold.retract(prior.clone()).requires_grad_()
        self._adam = Adam(self.logits.detach(), lr)
        self._slack = torch.zeros(problem.num_budgets, dtype=torch.float64)  # the momentum along it

    def step(self, gradient: Tensor, loss: float) -> None:
        """Lines 9 to 14 of Algorithm 1: project, Adam, retract, transport."""
        manifold, adam, x = self._manifold, self._adam, self._adam.x
        if manifold.surface == "==":
            adam.step(manifold.project(x, gradient))
            x.copy_(manifold.retract(x))
            adam.first = manifold.transport(x, adam.first)
            return
        projected, held = manifold.hold(x, gradient)
        adam.step(projected)
        x.copy_(_retracted(manifold, x, held))
        slack = self._slack.lerp(torch.zeros_like(self._slack), 1 - adam.betas[0])
        adam.first, self._slack = manifold.transport(x, adam.first, slack, one_sided=True)

    def state(self) -> dict[str, Any]:
        """Logits and moments."""
        return {
            "logits": self.logits.detach().clone(),
            "adam": self._adam.state(),
            "slack": self._slack.clone(),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.logits.copy_(state["logits"])
        self._adam.load(state["adam"])
        self._slack = state["slack"].clone()


def _retracted(manifold: BudgetManifold, x: Tensor, held: Tensor | None) -> Tensor:
    """``x`` on the manifold, with held budgets met exactly if that is possible."""
    if held is not None and bool(held.any()):
        with contextlib.suppress(InfeasibleBudgetError):
            return manifold.retract(x, held)
    return manifold.retract(x)


def _slack_momentum(previous: Tensor | None, along: Tensor, group: dict[str, Any]) -> Tensor:
    """The slack's first moment, updated by the rule that the wrapped optimizer applies to the parameters."""
    if "betas" in group:  # Adam and its relatives
        start = torch.zeros_like(along) if previous is None else previous
        return start.lerp(along, 1 - float(group["betas"][0]))
    if previous is None:  # SGD starts from the first gradient
        return along
    return previous * float(group.get("momentum", 0.0)) + along * (1 - float(group.get("dampening", 0.0)))


def _check_parameter(parameter: Tensor, manifold: BudgetManifold) -> None:
    expected = (manifold.problem.num_groups, manifold.problem.num_options)
    if tuple(parameter.shape) != expected:
        raise ValueError(f"Parameters on this manifold have shape {expected}, got {tuple(parameter.shape)}.")
    if parameter.dtype != torch.float64 or parameter.device.type != "cpu":
        raise TypeError(
            "Parameters on a budget manifold must be float64 on the CPU, which keeps the budget to twelve digits; "
            f"got {parameter.dtype} on {parameter.device}. Use x.double().cpu()."
        )


def _manifold_with_interior(problem: AllocationProblem, surface: Surface) -> BudgetManifold:
    """The manifold, with points even where a budget sits at an end of its range.

    At its lowest total a budget admits only the cheapest options; at its highest it forbids nothing or, to be met
    exactly, all but the dearest. On C = B both are only reached at infinite logits; on "<=" they hold trivially.
    """
    low, high = problem.unit_range
    inside = all(
        lowest < b < highest for lowest, b, highest in zip(low, problem.unit_budgets, high, strict=True)
    )
    allowed = problem.allowed.copy()
    for j, (lowest, highest, budget) in enumerate(zip(low, high, problem.unit_budgets, strict=True)):
        costs = problem.unit_costs[j if problem.block_index is None else 0]
        members = slice(None) if problem.block_index is None else problem.block_index == j
        if budget <= lowest:
            allowed[members] &= (costs == costs.min(axis=1, keepdims=True))[members]
        elif problem.exact and budget >= highest:
            allowed[members] &= (costs == costs.max(axis=1, keepdims=True))[members]
    if (allowed != problem.allowed).any():
        problem = problem.relaxed.replace(allowed=allowed, sense="<=")
    return BudgetManifold(problem, surface=surface if inside else "<=")
