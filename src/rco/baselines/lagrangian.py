"""Penalty, Lagrangian and augmented Lagrangian: RCO's loop with another optimizer of the logits.

All three add a term for the relative violation h(x) = (C(x) - B) / (C_max - C_min) to the loss, in units of the
first measured loss, so that one setting fits objectives of any scale:

* penalty: (rho / 2) h^2 with a fixed rho;
* Lagrangian: lambda h, lambda raised by ``multiplier_lr`` * h after every step (dual ascent);
* augmented Lagrangian: lambda h + (rho / 2) h^2, lambda raised by rho h, and rho multiplied by ``growth`` when
  the violation has not shrunk to a quarter over ``patience`` steps.

Their samples are made feasible by the same knapsack, and their candidates are chosen as RCO's are, so that the
handling of the constraint is the only difference. The defaults are round numbers under which all three converge on
the convex problem of the tests; they are not tuned to any model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rco.core.expected_cost import expected_cost
from rco.core.optimizer import Adam, LogitOptimizer, Surface
from rco.core.problem import AllocationProblem
from rco.core.search import GumbelSearch

__all__ = ["AugmentedLagrangian", "Lagrangian", "Penalty"]


class PenalizedOptimizer:
    """Adam on the loss plus a term for the violation of the budget; feasible only in the limit, if at all."""

    def __init__(
        self,
        problem: AllocationProblem,
        prior: Tensor,
        *,
        surface: Surface = "==",
        lr: float,
        multiplier_lr: float = 0.0,
        rho: float = 0.0,
        growth: float = 1.0,
        patience: int = 1,
    ) -> None:
        self.problem = problem
        self._one_sided = surface == "<="
        self.logits = prior.clone().requires_grad_()
        self.optimizer = Adam(self.logits.detach(), lr)
        self.multiplier_lr, self.growth, self.patience = multiplier_lr, growth, patience
        low, high = problem.unit_range
        width = torch.tensor([(h - lo) / problem.denominator for lo, h in zip(low, high, strict=True)])
        self._width = width.double().clamp_min(torch.finfo(torch.float64).tiny)
        self._budget = torch.from_numpy(problem.float_budgets)
        self.multipliers = torch.zeros(problem.num_budgets, dtype=torch.float64)
        self.rho = torch.full((problem.num_budgets,), rho, dtype=torch.float64)
        self.unit = 0.0
        self._reference = torch.full((problem.num_budgets,), float("inf"), dtype=torch.float64)
        self._steps = 0

    def violation(self) -> Tensor:
        """Relative violation per budget, with gradient; only overspending counts on the surface "<="."""
        cost = expected_cost(self.problem, self.logits)
        return (cost - self._budget) / self._width

    def step(self, gradient: Tensor, loss: float) -> None:
        """One Adam step on the loss and the violation's term, then the multipliers' update."""
        if self.unit == 0.0:
            self.unit = abs(loss) or 1.0
        violation = self.violation()
        push = self.multipliers + self.rho * violation.detach()
        if self._one_sided:
            push = push.clamp_min(0.0)
        (direction,) = torch.autograd.grad(violation, self.logits, push)
        self.optimizer.step(gradient + self.unit * direction)
        self._steps += 1
        with torch.no_grad():
            self._update(self.violation().detach())

    def _update(self, violation: Tensor) -> None:
        rate = self.rho if self.growth > 1.0 else self.multiplier_lr
        self.multipliers = self.multipliers + rate * violation
        if self._one_sided:
            self.multipliers = self.multipliers.clamp_min(0.0)
        if self.growth > 1.0 and self._steps % self.patience == 0:
            stuck = violation.abs() > 0.25 * self._reference
            self.rho = torch.where(stuck, self.rho * self.growth, self.rho)
            self._reference = violation.abs()

    def state(self) -> dict[str, Any]:
        """Logits, optimizer, multipliers and penalty coefficients."""
        return {
            "logits": self.logits.detach().clone(),
            "optimizer": self.optimizer.state(),
            "multipliers": self.multipliers.clone(),
            "rho": self.rho.clone(),
            "unit": self.unit,
            "reference": self._reference.clone(),
            "steps": self._steps,
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.logits.copy_(state["logits"])
        self.optimizer.load(state["optimizer"])
        self.multipliers = state["multipliers"].clone()
        self.rho = state["rho"].clone()
        self.unit = state["unit"]
        self._reference = state["reference"].clone()
        self._steps = state["steps"]


@dataclass(frozen=True, kw_only=True)
class Penalty(GumbelSearch):
    """A quadratic penalty on the relative violation, with a fixed coefficient."""

    name: ClassVar[str] = "penalty"
    rho: float = 100.0

    def make_optimizer(self, problem: AllocationProblem, prior: Tensor, surface: Surface) -> LogitOptimizer:
        """Adam with a fixed penalty."""
        return PenalizedOptimizer(problem, prior, surface=surface, lr=self.lr, rho=self.rho)


@dataclass(frozen=True, kw_only=True)
class Lagrangian(GumbelSearch):
    """One multiplier per budget, raised by dual ascent."""

    name: ClassVar[str] = "lagrangian"
    multiplier_lr: float = 1.0

    def make_optimizer(self, problem: AllocationProblem, prior: Tensor, surface: Surface) -> LogitOptimizer:
        """Adam with multipliers."""
        return PenalizedOptimizer(
            problem, prior, surface=surface, lr=self.lr, multiplier_lr=self.multiplier_lr
        )


@dataclass(frozen=True, kw_only=True)
class AugmentedLagrangian(GumbelSearch):
    """Multipliers and a quadratic penalty whose coefficient grows while the violation does not shrink."""

    name: ClassVar[str] = "augmented-lagrangian"
    rho: float = 10.0
    growth: float = 2.0
    patience: int = 10

    def make_optimizer(self, problem: AllocationProblem, prior: Tensor, surface: Surface) -> LogitOptimizer:
        """Adam with multipliers and a growing penalty."""
        return PenalizedOptimizer(
            problem,
            prior,
            surface=surface,
            lr=self.lr,
            rho=self.rho,
            growth=self.growth,
            patience=self.patience,
        )
