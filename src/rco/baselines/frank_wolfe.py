"""Frank-Wolfe on the relaxed budget: probabilities move towards the vertex of steepest descent.

The feasible set is the product of the groups' simplices cut by the linear budgets, so that a linear program solves
each step and every iterate keeps the budget without projection (as HardCoRe-NAS does for latency). If the loss
is only defined at one-hot gates the gradient is the straight-through one, at feasible samples of the iterate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rco.core.choice import Candidates, SampleTracker
from rco.core.knapsack import knapsack
from rco.core.moves import Ladder
from rco.core.objective import one_hot
from rco.core.optimizer import search_surface
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.sampling import batch_order, draw_feasible
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["BudgetPolytope", "FrankWolfe"]

# Lower bound of a probability when drawing, so that an option that vanished can return.
_LEAST = 1e-6


class BudgetPolytope:
    """All (N, K) probabilities within the simplices, the locks and the budgets: C = B, or C <= B.

    Which of the two is decided as for RCO, see :func:`rco.core.optimizer.search_surface`.
    """

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
        self._exact = search_surface(problem) == "=="
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
        """softmax(prior), mixed with as little of a cheap or dear vertex as needed to meet the budget.

        With several budgets no single share meets them all; the best vertex for the prior is returned then.
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


class _Iterate(SearchState):
    """The probabilities and the running mean of the gradient."""

    saved = ("p", "slope", "best")
    candidates = 2

    def __init__(self, run: SearchRun, polytope: BudgetPolytope) -> None:
        super().__init__(run)
        self.p = polytope.start(run.scores())
        self.slope = np.zeros_like(self.p)
        self.best = SampleTracker(run.evaluator.objective.num_batches)

    def log_p(self) -> Tensor:
        return torch.from_numpy(np.log(np.maximum(self.p, _LEAST)))

    def propose(self, candidates: Candidates) -> None:
        log_p = self.log_p()
        candidates.add("rounded", knapsack(log_p, self.problem), log_p)
        if self.best.choices is not None:
            candidates.add("best sample", self.best.choices, log_p)


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
    meets_exactly: ClassVar[bool] = True

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

    def loop(self, run: SearchRun) -> SearchResult:
        """Compute the gradient, find the best vertex, step towards it."""
        problem, polytope = run.problem, BudgetPolytope(run.problem)
        sampled = self.gates == "sampled"
        points = self.samples if sampled else 1
        cost = 3 * points * self.batches_per_sample
        state = run.resume(_Iterate(run, polytope))
        with run.allowance():
            for step in run.steps(run.planned(self.steps, cost), cost):
                drawn = None
                if sampled:  # feasible samples of the iterate: knapsacks of perturbed log-probabilities
                    drawn, _ = draw_feasible(
                        state.log_p(), problem, seed=self.seed, step=step, samples=points
                    )
                gradients, losses = [], []
                for j in range(points):
                    gates = (
                        torch.from_numpy(state.p) if drawn is None else one_hot(drawn[j], problem.num_options)
                    )
                    batches = batch_order(
                        run.evaluator.objective.num_batches,
                        seed=self.seed,
                        first=(step * points + j) * self.batches_per_sample,
                        count=self.batches_per_sample,
                    )
                    loss, gradient = run.evaluator.loss_and_gradient(gates, batches)
                    losses.append(loss)
                    gradients.append(gradient.numpy())
                    if drawn is not None:
                        state.best.add(drawn[j], batches, loss)
                # A running mean of the gradient, so that vertices do not depend on the noise of single samples.
                weight = 1.0 if not sampled or step == 0 else 1.0 / (1.0 + step) ** self.averaging
                state.slope = (1.0 - weight) * state.slope + weight * np.mean(gradients, axis=0)
                vertex = polytope.minimise(state.slope)
                rate = 2.0 / (step + self.delay)
                state.p = (1.0 - rate) * state.p + rate * vertex
                run.record(float(np.mean(losses)))
        return run.choose()
