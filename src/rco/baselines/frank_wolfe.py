"""Frank-Wolfe on the relaxed budget: probabilities move towards the vertex that the gradient likes best.

The feasible set is the product of the groups' simplices cut by the linear budgets, so that a linear program answers
each step and every iterate keeps the budget without projection (as HardCoRe-NAS does for latency). Where the loss
can only be asked at one-hot gates the gradient is the straight-through one, at feasible samples of the iterate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rco.baselines.common import Ladder, draw_feasible
from rco.core.evaluation import Evaluator, one_hot
from rco.core.knapsack import knapsack
from rco.core.problem import AllocationProblem
from rco.core.process import BudgetedSearch, Process
from rco.core.refine import Candidates, SampleTracker
from rco.core.relaxation import batch_order

__all__ = ["BudgetPolytope", "FrankWolfe"]

# An option whose probability has vanished is drawn as if it had this one; it can come back.
_LEAST = 1e-6


class BudgetPolytope:
    """All (N, K) probabilities within the simplices, the locks and the budgets: C = B, or C <= B."""

    def __init__(self, problem: AllocationProblem) -> None:
        from scipy.sparse import csr_matrix, vstack

        self.problem = problem
        self._cells = np.flatnonzero(problem.allowed)
        rows, columns = self._cells // problem.num_options, np.arange(len(self._cells))
        costs = problem.float_costs.reshape(problem.num_joint, -1)[:, self._cells]
        if problem.block_index is not None:
            inside = problem.block_index[rows] == np.arange(problem.num_budgets)[:, None]
            costs = np.where(inside, costs, 0.0)
        scale = np.maximum(np.abs(costs).max(axis=1), np.finfo(float).tiny)
        totals, self._limits = csr_matrix(costs / scale[:, None]), problem.float_budgets / scale
        simplex = csr_matrix((np.ones(len(columns)), (rows, columns)))
        ones = np.ones(problem.num_groups)
        self._exact = problem.sense == "=="
        self._equal = vstack([simplex, totals]) if self._exact else simplex
        self._equal_to = np.concatenate([ones, self._limits]) if self._exact else ones
        self._totals = totals

    def minimise(self, slope: np.ndarray) -> np.ndarray:
        """The vertex of the least inner product with ``slope``."""
        from scipy.optimize import linprog

        objective = slope.reshape(-1)[self._cells]
        objective = objective / max(float(np.abs(objective).max()), np.finfo(float).tiny)
        result = linprog(
            objective,
            A_ub=None if self._exact else self._totals,
            b_ub=None if self._exact else self._limits,
            A_eq=self._equal,
            b_eq=self._equal_to,
            bounds=(0, None),
            method="highs",
        )
        if result.x is None:
            raise RuntimeError(f"The linear program over the budget's polytope failed: {result.message}")
        vertex = np.zeros(self.problem.allowed.shape)
        vertex.reshape(-1)[self._cells] = np.clip(result.x, 0.0, 1.0)
        return np.asarray(vertex / vertex.sum(axis=1, keepdims=True))

    def start(self, prior: Tensor) -> np.ndarray:
        """softmax(prior), mixed with as little of a cheap or dear vertex as brings it onto the budget.

        With several budgets one share cannot serve them all; the vertex that the prior likes best is taken then.
        """
        logits = prior + self.problem.log_allowed
        p = torch.softmax(logits, dim=-1).numpy()
        if self.problem.num_budgets > 1:
            return self.minimise(-torch.log_softmax(prior, dim=-1).numpy())
        costs, budget = self.problem.float_costs[0], float(self.problem.float_budgets[0])
        spent = float((p * costs).sum())
        if spent > budget or self._exact:
            ladder = Ladder(self.problem)
            vertex = one_hot(
                ladder.at("cheapest" if spent > budget else "dearest"), self.problem.num_options
            ).numpy()
            reach = float((vertex * costs).sum()) - spent
            share = min(max((budget - spent) / reach, 0.0), 1.0) if reach else 0.0
            p = (1.0 - share) * p + share * vertex
        return np.asarray(p)


class _FrankWolfe(Process):
    own_candidates = 2

    def __init__(
        self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None, settings: FrankWolfe
    ) -> None:
        super().__init__(problem, evaluator, prior)
        self.settings = settings
        self.polytope = BudgetPolytope(problem)
        self.p = self.polytope.start(self.scores())
        self.slope = np.zeros_like(self.p)
        self.best = SampleTracker(evaluator.objective.num_batches)

    @property
    def steps(self) -> int:
        return self.planned(self.settings.steps, self.cost(0))

    def _points(self) -> int:
        return 1 if self.settings.gates == "expected" else self.settings.samples

    def cost(self, step: int) -> int:
        return 3 * self._points() * self.settings.batches_per_sample

    def advance(self, step: int) -> float:
        settings = self.settings
        sampled = settings.gates == "sampled"
        drawn = self._draw(step) if sampled else None
        gradients, losses = [], []
        for j in range(self._points()):
            gates = torch.from_numpy(self.p) if drawn is None else one_hot(drawn[j], self.problem.num_options)
            position = (step * self._points() + j) * settings.batches_per_sample
            batches = batch_order(
                self.evaluator.objective.num_batches,
                seed=settings.seed,
                first=position,
                count=settings.batches_per_sample,
            )
            loss, gradient = self.evaluator.loss_and_gradient(gates, batches)
            losses.append(loss)
            gradients.append(gradient.numpy())
            if drawn is not None:
                self.best.see(drawn[j], batches, loss)
        # The gradient's own average, so that the noise of single samples does not choose vertices.
        weight = 1.0 if not sampled or step == 0 else 1.0 / (1.0 + step) ** settings.averaging
        self.slope = (1.0 - weight) * self.slope + weight * np.mean(gradients, axis=0)
        vertex = self.polytope.minimise(self.slope)
        rate = 2.0 / (step + settings.delay)
        self.p = (1.0 - rate) * self.p + rate * vertex
        return float(np.mean(losses))

    def _draw(self, step: int) -> np.ndarray:
        """Feasible samples of the iterate: knapsacks of perturbed log-probabilities."""
        log_p = torch.from_numpy(np.log(np.maximum(self.p, _LEAST)))
        settings = self.settings
        choices, _ = draw_feasible(
            log_p, self.problem, seed=settings.seed, step=step, samples=settings.samples
        )
        return choices

    def propose(self, candidates: Candidates) -> None:
        log_p = torch.from_numpy(np.log(np.maximum(self.p, _LEAST)))
        candidates.add("rounded", knapsack(log_p, self.problem), log_p)
        if self.best.choices is not None:
            candidates.add("best sample", self.best.choices, log_p)

    def state(self) -> dict[str, Any]:
        return {
            "p": torch.from_numpy(self.p.copy()),
            "slope": torch.from_numpy(self.slope.copy()),
            "best": self.best.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.p, self.slope = state["p"].numpy().copy(), state["slope"].numpy().copy()
        self.best.load(state["best"])


@dataclass(frozen=True, kw_only=True)
class FrankWolfe(BudgetedSearch):
    """Frank-Wolfe on probabilities under the linear budget, rounded by the knapsack of log p.

    Args:
        steps: Steps T; None: until the allowance ends.
        samples: Feasible samples per step whose gradients are averaged.
        batches_per_sample: Batches that each sample is evaluated on.
        gates: "sampled": one-hot gates and the straight-through gradient; "expected": the probabilities
            themselves, for objectives that accept gates between the corners.
        averaging: Weight of the newest gradient is (1 + step)^-averaging in a running mean; only for samples.
        delay: The step size is 2 / (step + delay).
    """

    name: ClassVar[str] = "frank-wolfe"

    steps: int | None = 200
    samples: int = 16
    batches_per_sample: int = 1
    gates: Literal["sampled", "expected"] = "sampled"
    averaging: float = 2 / 3
    delay: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(steps=0, samples=1, batches_per_sample=1, delay=2, averaging=0)
        self.require_end("steps")
        if self.gates not in ("sampled", "expected"):
            raise ValueError(f'gates must be "sampled" or "expected", got {self.gates!r}.')

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """Start at the prior's probabilities."""
        return _FrankWolfe(problem, evaluator, prior, self)
