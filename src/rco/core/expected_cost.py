"""The expected cost of logits, and its gradient in a form that float64 keeps accurate."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rco.core.manifold_kernels import local_cost
from rco.core.problem import AllocationProblem

__all__ = ["ExpectedCost", "LocalCost", "expected_cost"]

# Sums of float64 terms cannot be resolved below this share of their size, whatever the requested tolerance.
_RESOLUTION = 2.0**-48


def expected_cost(problem: AllocationProblem, logits: Tensor) -> Tensor:
    """(J,) expected total cost of softmax(logits) under each budget (paper, Eq. 1), with gradient."""
    p = torch.softmax(logits + problem.log_allowed, dim=-1)
    per_group = (p * torch.from_numpy(problem.float_costs)).sum(dim=-1)  # (q, N)
    if problem.block_index is None:
        return per_group.sum(dim=-1)
    totals = torch.zeros(problem.num_budgets, dtype=per_group.dtype)
    return totals.index_add(0, torch.from_numpy(problem.block_index), per_group[0])


class LocalCost(NamedTuple):
    """Expected cost and its gradient at one point, as shares of the budgets' ranges."""

    normal: Tensor  # (q, N, K); the rows of a block hold that block's normal
    expected: Tensor  # (J,), counted from the cheapest assignment's cost


class ExpectedCost:
    """``C(x) = sum_i w_i <softmax(x_i), c_i>`` for q joint budgets or J separable blocks.

    Costs are counted from each group's cheapest option, which leaves the softmax unchanged, and in units of their
    budget's range. The geometry is therefore bit for bit independent of the problem's unit and offset.
    Directions, along which a retraction shifts logits, are the unweighted costs, divided by the widest spread under
    their budget so that shifts of size 1 are the natural scale.

    Args:
        problem: Costs, weights, budgets and blocks.
        tol: Accepted ``|C - B|`` relative to what the budget allows above the cheapest assignment.

    Attributes:
        costs: (q, N, K) weighted costs above each group's cheapest option.
        directions: (q, N, K) normalised directions of the retraction.
        weights: (N,) as shares of the largest weight.
        scale: (J,) divisors of the directions, in the problem's units.
        slope: (J,) a share of the range in units of direction times weight.
        base: (J,) cost of the cheapest assignment in the problem's units.
        unit: (J,) width of the range in the problem's units; 1 where it is empty.
        target: (J,) budgets as shares of their range.
        span: (J,) 1, or 0 where the range is empty.
        tolerance: (J,) accepted ``|C - B|`` as a share of the range.
        blocks: (N,) block of each group, or None.
        forbidden: (N, K) booleans, or None where everything is allowed.
        separable: Whether no group counts under two budgets.
        order: (N,) groups, block by block.
        offsets: (J + 1,) start of each block in ``order``.
    """

    def __init__(self, problem: AllocationProblem, tol: float) -> None:
        self.problem = problem
        index = problem.block_index
        self.blocks = None if index is None else torch.from_numpy(index.copy())
        self.forbidden = None if problem.allowed.all() else torch.from_numpy(~problem.allowed)

        directions, widest = problem.relative_directions
        self.costs = torch.from_numpy(np.ascontiguousarray(problem.relative_costs))
        self.directions = torch.from_numpy(np.ascontiguousarray(directions))
        self.weights = torch.from_numpy(problem.relative_weights)

        low, high = problem.unit_range
        spans = [Fraction(h - v, problem.denominator) for h, v in zip(high, low, strict=True)]
        self.base = torch.tensor([float(Fraction(v, problem.denominator)) for v in low], dtype=torch.float64)
        self.unit = torch.tensor([float(span) or 1.0 for span in spans], dtype=torch.float64)
        self.span = np.array([float(span > 0) for span in spans])
        self.scale = np.array([float(w) for w in widest])
        heaviest = problem.largest_weight
        self.slope = np.array([float(span / (w * heaviest)) for span, w in zip(spans, widest, strict=True)])
        self.target = problem.relative_budgets
        self.tolerance = max(tol, _RESOLUTION) * np.minimum(self.target, self.span)
        order = np.arange(problem.num_groups) if index is None else np.argsort(index, kind="stable")
        ends = [problem.num_groups] if index is None else np.cumsum(np.bincount(index))
        self.separable = problem.num_joint == 1
        self.order = order
        self.offsets = np.concatenate([[0], ends]).astype(np.int64)
        self._known: tuple[Tensor, LocalCost] | None = None

    @property
    def num_budgets(self) -> int:
        """Number of budgets, joint ones or blocks."""
        return len(self.target)

    def name(self, j: int) -> str:
        """Name of budget j for messages."""
        if self.problem.block_ids is not None:
            return f"The budget of block {self.problem.block_ids[j]!r}"
        return "The budget" if self.num_budgets == 1 else f"Joint budget {j}"

    def masked(self, x: Tensor) -> Tensor:
        """Logits with forbidden options at minus infinity."""
        return x if self.forbidden is None else x.masked_fill(self.forbidden, -torch.inf)

    def total(self, rows: Tensor) -> Tensor:
        """Sums (q, N) values of groups to one value per budget (J,)."""
        if self.blocks is None:
            return rows.sum(dim=1)
        return rows.new_zeros(self.num_budgets).index_add(0, self.blocks, rows[0])

    def value(self, masked: Tensor) -> Tensor:
        """Expected costs (J,) in the problem's units; differentiable."""
        probabilities = torch.softmax(masked, dim=-1)
        return self.base + self.unit * self.total((probabilities * self.costs).sum(dim=-1))

    def local(self, masked: Tensor) -> LocalCost:
        """Expected cost and normal at a point, cached, since a step needs them twice or more."""
        if self._known is None or not torch.equal(self._known[0], masked):
            self.remember(masked, self.evaluate(masked))
        assert self._known is not None
        return self._known[1]

    def evaluate(self, masked: Tensor) -> LocalCost:
        """As :meth:`local`, without the cache."""
        if self.separable:
            normal = torch.empty_like(masked)
            costs = self.costs[0].numpy()
            totals = local_cost(masked.numpy(), costs, self.order, self.offsets, normal.numpy())
            return LocalCost(normal[None], torch.from_numpy(totals))
        probabilities = torch.softmax(masked, dim=-1)
        expected = (probabilities * self.costs).sum(dim=-1, keepdim=True)
        return LocalCost(probabilities * (self.costs - expected), self.total(expected.squeeze(-1)))

    def remember(self, masked: Tensor, local: LocalCost) -> None:
        """Cache the values computed at a point."""
        self._known = (masked.clone(), local)

    def shifted(self, base: Tensor, shift: np.ndarray) -> Tensor:
        """Logits moved by ``shift`` (J,) along the directions."""
        if self.separable:
            per_group = shift[:1] if self.blocks is None else shift[self.blocks.numpy()]
            return base + torch.from_numpy(per_group)[:, None] * self.directions[0]
        return base + (torch.from_numpy(shift) @ self.directions.flatten(1)).view_as(base)

    def in_problem_units(self, normal: Tensor) -> Tensor:
        """Gradients (q, N, K) of the expected cost in the problem's units."""
        return normal * (self.unit[:, None, None] if self.blocks is None else self.unit[self.blocks, None])

    def unspent_share(self, local: LocalCost) -> Tensor:
        """``B - C`` (J,) as a share of the range, zero where the budget is met to tolerance."""
        room = torch.from_numpy(self.target) - local.expected
        return torch.where(room > torch.from_numpy(self.tolerance), room, 0.0)
