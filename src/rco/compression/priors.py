"""Initial logits of a search: from additive losses, from errors of weights, or from scores of experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rco.core.problem import AllocationProblem

__all__ = [
    "logits_from_losses",
    "logits_from_ranks",
    "logits_from_scores",
    "logits_from_sensitivities",
    "logits_from_weights",
    "score_table",
]

# Added to errors of weights before their logarithm is taken, as in the paper's own code.
_WEIGHT_ERROR_FLOOR = 1e-8
# Bound on the absolute logits of experts, so that an expert without visits can still be chosen.
_FARTHEST = 4.0


def logits_from_losses(losses: Tensor, problem: AllocationProblem, strength: float = 1.0) -> Tensor:
    """(N, K) initial logits: minus (loss + Lagrange multiplier x cost) of every option.

    Values are relative to the best option of a group and divided by the median gap to the second best, so that
    ``strength`` 1 leaves half of the groups undecided.
    """
    total = losses + torch.from_numpy(_priced_costs(losses.numpy(), problem))
    allowed = torch.tensor(problem.allowed)
    total = torch.where(allowed, total, torch.inf)
    regret = total - total.min(dim=1, keepdim=True).values
    second = regret.sort(dim=1).values[:, 1]
    scale = second[torch.isfinite(second) & (second > 0)]
    unit = float(scale.median()) if scale.numel() else 1.0
    # An option at the bound is practically excluded, but its logit stays finite and can still move.
    return torch.where(allowed, -strength * (regret / unit).clamp(max=20.0), 0.0)


def logits_from_weights(distances: Tensor, problem: AllocationProblem, strength: float = 1.0) -> Tensor:
    """(N, K) initial logits of the paper's own code: minus the logarithm of the error of the weights.

    Args:
        distances: (N, K) mean squared differences from the weights of the widest option, see
            :func:`rco.compression.option_errors.weight_distances`.
        problem: Problem with the allowed options.
        strength: Factor on the logits; 1 as in that code.
    """
    logits = -(distances + _WEIGHT_ERROR_FLOOR).log()
    logits = strength * (logits - logits.mean(dim=1, keepdim=True))
    return torch.where(torch.tensor(problem.allowed), logits, 0.0)


def _priced_costs(losses: np.ndarray, problem: AllocationProblem) -> np.ndarray:
    """(N, K) costs times the Lagrange multiplier at the budget, one multiplier per block or joint budget."""
    if problem.num_joint > 1:
        return np.asarray(np.tensordot(_joint_prices(losses, problem), problem.relative_costs, axes=1))
    costs, open_losses = problem.relative_costs[0], np.where(problem.allowed, losses, np.inf)
    if problem.block_index is None:
        return np.asarray(costs * _price(open_losses, costs, float(problem.relative_budgets[0])))
    priced: np.ndarray = np.empty_like(costs)
    for block, budget in enumerate(problem.relative_budgets):
        rows = problem.block_index == block
        priced[rows] = costs[rows] * _price(open_losses[rows], costs[rows], float(budget))
    return priced


def _joint_prices(losses: np.ndarray, problem: AllocationProblem) -> np.ndarray:
    """(q,) multipliers of joint budgets, none negative: the dual of the linear relaxation."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    rows, columns = np.nonzero(problem.allowed)
    cells = np.arange(len(rows))
    once = csr_matrix((np.ones(len(rows)), (rows, cells)), shape=(problem.num_groups, len(rows)))
    solved = linprog(
        losses[rows, columns],
        A_ub=csr_matrix(problem.relative_costs[:, rows, columns]),
        b_ub=problem.relative_budgets,
        A_eq=once,
        b_eq=np.ones(problem.num_groups),
        method="highs",
    )
    if solved.status != 0:
        raise RuntimeError(f"The relaxation of the joint budgets was not solved: {solved.message}")
    prices: np.ndarray = np.maximum(-solved.ineqlin.marginals, 0.0)
    return prices


def _price(losses: np.ndarray, costs: np.ndarray, budget: float) -> float:
    """Lagrange multiplier at which every group's own best choice just fits the budget, by bisection."""

    def spent(price: float) -> float:
        choices = (losses + price * costs).argmin(axis=1)
        return float(costs[np.arange(len(costs)), choices].sum())

    if spent(0.0) <= budget:
        return 0.0
    low, high = 0.0, 1e-30
    while spent(high) > budget:
        low, high = high, high * 10.0
        if high > 1e30:
            return high
    for _ in range(100):
        middle = (low * high) ** 0.5 if low > 0 else high / 2
        low, high = (middle, high) if spent(middle) > budget else (low, middle)
    return high


# ---------------------------------------------------------------------- experts that are kept or removed


def score_table(scores: Sequence[Tensor]) -> Tensor:
    """(N, 2) scores for a searcher: the value of keeping an expert, and 0 for pruning it."""
    kept = torch.cat([values.double() for values in scores])
    return torch.stack([torch.zeros_like(kept), kept], dim=1)


def logits_from_scores(scores: Sequence[Tensor], strength: float) -> Tensor:
    """(all experts,) keep logits: ``strength`` times the logarithm of a score relative to its layer's mean.

    Experts of different layers compare by how far above or below their layer's mean they are.
    """
    return torch.cat([_log_ratios(values, values.double().mean(), strength) for values in scores])


def logits_from_sensitivities(scores: Sequence[Tensor], strength: float) -> Tensor:
    """(all experts,) keep logits from sensitivities, which are comparable across layers.

    ``strength`` times the logarithm relative to the median over the model.
    """
    values = torch.cat(list(scores))
    return _log_ratios(values, values.double().median(), strength)


def logits_from_ranks(scores: Sequence[Tensor], strength: float = 1.0) -> Tensor:
    """(all experts,) keep logits from scores: ranks within each layer, spread over +-``strength``.

    Ranks, not values: saliencies grow by orders of magnitude along a model's depth, and a search that started
    from them would first empty the first layers. Each layer is ranked by itself; ties share their rank.

    Args:
        scores: One tensor per layer.
        strength: Logit of the best expert of a layer; its worst gets ``-strength``. 0 is no prior.
    """
    if not strength >= 0:
        raise ValueError(f"strength must not be negative, got {strength}")
    parts = []
    for values in scores:
        _, which, sizes = torch.unique(values, return_inverse=True, return_counts=True)
        middle = sizes.cumsum(0).double() - (sizes.double() + 1) / 2  # mean rank of equal values, from 0
        spread = max(values.numel() - 1, 1)
        parts.append(
            (2 * middle[which] / spread - 1) * strength if values.numel() > 1 else values.double() * 0
        )
    return torch.cat(parts)


def _log_ratios(values: Tensor, middle: Tensor, strength: float) -> Tensor:
    if not strength >= 0:
        raise ValueError(f"strength must not be negative, got {strength}")
    relative = values.double() / middle.clamp(min=torch.finfo(torch.float64).tiny)
    return relative.clamp(min=1e-12).log().clamp(-_FARTHEST, _FARTHEST) * strength
