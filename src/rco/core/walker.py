"""What moves the logits of a search, given the estimated gradient of the loss."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from torch import Tensor

from rco.core.manifold import BudgetManifold
from rco.core.optimizer import RiemannianAdam
from rco.core.problem import AllocationProblem

__all__ = ["ManifoldWalker", "Walker"]


class Walker(Protocol):
    """Moves the logits; how it keeps them near the budget is what tells the methods apart."""

    logits: Tensor  # (N, K) float64, requires grad

    def step(self, gradient: Tensor, loss: float) -> None:
        """Move the logits given the estimated gradient of the loss."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything but the logits, as plain tensors and numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        ...


class ManifoldWalker:
    """Lines 9 to 14 of Algorithm 1: project, Adam, retract, transport."""

    def __init__(self, problem: AllocationProblem, prior: Tensor, lr: float) -> None:
        manifold = BudgetManifold(_with_interior(problem))
        self.logits = manifold.retract(prior.clone()).requires_grad_()
        self._optimizer = RiemannianAdam([self.logits], manifold, lr=lr)

    def step(self, gradient: Tensor, loss: float) -> None:
        """One step of Riemannian Adam."""
        self.logits.grad = gradient
        self._optimizer.step()
        self.logits.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return copy.deepcopy(dict(self._optimizer.state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._optimizer.load_state_dict(state)


def _with_interior(problem: AllocationProblem) -> AllocationProblem:
    """An equivalent problem whose manifold has points, where a budget sits at an end of its range.

    At its lowest total a budget leaves the cheapest options alone; at its highest it forbids nothing. Both are
    only reached at infinite logits under "==", and hold trivially under "<=".
    """
    if problem.sense == "<=":
        return _cheapest_only(problem)
    low, high = problem.unit_range
    if all(lowest < b < highest for lowest, b, highest in zip(low, problem.unit_budgets, high, strict=True)):
        return problem
    return _cheapest_only(problem.replace(sense="<="))


def _cheapest_only(problem: AllocationProblem) -> AllocationProblem:
    """Forbid what a budget at its lowest total forbids anyway."""
    low, _ = problem.unit_range
    allowed = problem.allowed.copy()
    for j, (lowest, budget) in enumerate(zip(low, problem.unit_budgets, strict=True)):
        if budget > lowest:
            continue
        costs = problem.unit_costs[j if problem.block_index is None else 0]
        members = slice(None) if problem.block_index is None else problem.block_index == j
        allowed[members] &= (costs == costs.min(axis=1, keepdims=True))[members]
    return problem if (allowed == problem.allowed).all() else problem.replace(allowed=allowed)
