"""Loss of every option in the presence of the other groups' errors: curvature plus an interaction term.

To second order the loss of an assignment is |sum of the groups' errors|^2 / 2. The curvature gives each group's own
term, but not the interaction of its error with those of all others at the assignments that matter. The gradients
of a search give both: at a sample, the slope from the chosen option to the best one is twice the own term plus the
interaction term. The interaction is proportional to the error, the root of the own term, so one factor per group
determines it. The factor is averaged over the samples of a search and shrunk towards the mean of the groups
according to its noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rco.core.problem import AllocationProblem

__all__ = ["InteractionLosses"]


class InteractionLosses:
    """Estimates the loss of each option from slopes at samples.

    Args:
        problem: Monotone, so that the costliest option of a group is its best.
        curvature: (N, K, K) of the objective (:class:`rco.core.objective.Objective`).
    """

    def __init__(self, problem: AllocationProblem, curvature: Tensor) -> None:
        costs = torch.from_numpy(problem.relative_costs).sum(dim=0)
        self._best = torch.where(torch.tensor(problem.allowed), costs, -torch.inf).argmax(dim=1)
        self._rows = torch.arange(problem.num_groups)
        self._own = curvature[self._rows, :, self._best]
        # Samples of each group at another option than its best, and the sums of their factors and squared factors.
        self._seen = torch.zeros(3, problem.num_groups, dtype=self._own.dtype)

    def add(self, choices: Tensor, gradient: Tensor) -> None:
        """Record the gradient (N, K) with respect to the gates at a sample's choices (N,)."""
        rows = self._rows
        slope = gradient[rows, choices] - gradient[rows, self._best]
        own = self._own[rows, choices]
        known = own > 0
        factor = torch.where(known, (slope - 2.0 * own) / own.where(known, 1.0).sqrt(), 0.0)
        self._seen += torch.stack([known.to(factor.dtype), factor, factor.square()])

    @property
    def factors(self) -> Tensor:
        """(N,) interaction factor of each group: its interaction term over the root of its own term."""
        count, total, squares = self._seen
        known = count > 0
        if not known.any():
            return torch.zeros_like(total)
        each = total / count.clamp_min(1.0)
        spare = (count - 1.0).clamp_min(0.0).sum()
        noise = (squares - count * each.square()).sum().clamp_min(0.0) / spare.clamp_min(1.0)
        noise_of_mean = noise / count.clamp_min(1.0)
        scatter = each[known].var(correction=0) if spare > 0 else torch.zeros(())
        signal = (scatter - noise_of_mean[known].mean()).clamp_min(0.0)
        if signal == 0:
            return torch.full_like(total, float(total.sum() / count.sum()))
        weight = torch.where(known, signal / (signal + noise_of_mean), 0.0)
        middle = (weight * each).sum() / weight.sum()
        shrunk: Tensor = middle + weight * (each - middle)
        return shrunk

    @property
    def losses(self) -> Tensor:
        """(N, K) loss of every option above that of the group's best."""
        return self._own + self.factors[:, None] * self._own.sqrt()

    def state(self) -> Tensor:
        """Sample counts, and sums of the factors and squared factors."""
        return self._seen.clone()

    def load(self, state: Tensor) -> None:
        """The inverse of :meth:`state`."""
        self._seen = state.clone()
