"""What each option would cost in KL, to second order, from gradients of the full model alone.

At the full model the KL has no first-order term. Its second-order term is the Fisher form: for a weight change D,
KL per token is about E[<g, D>^2] / 2, where g is the gradient of log p(y | x) and y is drawn from the model itself.
A switchable layer gives <G, W_k> for all options from one backward pass, so one pass per sequence yields an
unbiased estimate for every group and option at once. It serves as a prior and,
with an exact knapsack, as a baseline.

One squared number per sequence is a noisy estimate: its relative error is sqrt(2 / sequences). But within a group
the losses of the options are nearly proportional to their output errors, which are known exactly from the
calibration; pooling over the options and over the groups takes out most of the noise, see :func:`predicted_losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rco.compression.plan import QuantizationPlan
from rco.compression.quantization import QuantizationBackend
from rco.core.problem import AllocationProblem
from rco.data.calibration import CalibrationSet
from rco.losses import chunked_cross_entropy, sample_tokens
from rco.models.moe.linears import ExpertLinear

__all__ = [
    "SecondOrder",
    "alike_groups",
    "curvature",
    "fisher_differences",
    "logits_from_losses",
    "logits_from_weights",
    "predicted_losses",
    "second_order",
    "steadied_losses",
]

# Added to errors of weights before their logarithm is taken, as in the paper's own code.
_WEIGHT_ERROR_FLOOR = 1e-8


@dataclass(frozen=True)
class SecondOrder:
    """What gradients of the full model say of every option.

    Attributes:
        losses: (N, K) KL of changing one group alone.
        curvature: (N, K, K) KL of moving a group from one option to another.
    """

    losses: Tensor
    curvature: Tensor


def second_order(
    backend: QuantizationBackend, differences: Tensor, layer_errors: Tensor | None = None
) -> SecondOrder:
    """Losses and curvature that a search is started with.

    Args:
        backend: With its candidates.
        differences: (S, N, K) from :func:`fisher_differences`.
        layer_errors: (N, K) what experts' options do to the output of their layers, with which the losses of
            experts are steadied; None: they stay as they are.
    """
    errors = backend.relative_errors()
    losses = predicted_losses(differences, errors)
    if layer_errors is not None:
        losses = steadied_losses(losses, layer_errors, alike_groups(backend.plan))
    return SecondOrder(losses, curvature(differences, losses))


def fisher_differences(
    backend: QuantizationBackend,
    calibration: CalibrationSet,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """(S, N, K): <G, W_k - W> of every sequence, G the gradient of its sampled log-likelihood, per root token."""
    loaded = backend.loaded
    count, original = len(backend.plan.groups), len(backend.plan.widths)
    with backend.switchable(original=True) as switched:
        full = backend.full_head()

        def difference(index: int) -> Tensor:
            tokens = calibration.tokens[index : index + 1].to(loaded.device)
            mask = calibration.mask[index : index + 1, :-1].to(loaded.device)
            gates = torch.zeros(count, original + 1, dtype=torch.float64)
            gates[:, original] = 1.0
            gates.requires_grad_()
            switched.set_gates(gates)
            hidden = loaded.layout.final_hidden(loaded.model, tokens)[:, :-1]
            # Every sequence has noise of its own, so that it does not matter who draws it.
            noise = int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)
            generator = torch.Generator(device=loaded.device).manual_seed(noise)
            targets = sample_tokens(hidden.detach()[0], full, generator)[None]
            head = backend.present_head()
            loss = chunked_cross_entropy(hidden, head, targets, mask, reduction="sum")
            gradient: Tensor = torch.autograd.grad(loss, gates)[0]
            per_token: float = max(int(mask.sum()), 1) ** 0.5
            if on_progress is not None:
                on_progress(index + 1, len(calibration))
            return (gradient[:, :original] - gradient[:, original:]) / per_token

        parts = backend.ranks.map(lambda mine: [difference(index) for index in mine], len(calibration))
    if on_progress is not None:
        on_progress(len(calibration), len(calibration))
    return torch.stack(parts)


def predicted_losses(differences: Tensor, errors: Tensor | None = None) -> Tensor:
    """(N, K) second-order KL of changing one group alone.

    With ``errors``, the output error of every option (N, K), the estimates are shrunk towards
    (a factor per group) x (a factor per option) x error, by as much as their scatter around that product is noise.

    Args:
        differences: (S, N, K) from :func:`fisher_differences`.
        errors: Positive where an option changes anything; None: the plain mean of squares.
    """
    raw = 0.5 * differences.square().mean(dim=0)
    if errors is None:
        return raw
    known = (raw > 0) & (errors > 0)
    count = known.sum(dim=1, keepdim=True).clamp_min(1)
    # The best estimate of a scale from chi-squared numbers is their mean.
    ratio = torch.where(known, raw / errors.where(known, 1.0), 0.0)
    scale = ratio.sum(dim=1, keepdim=True) / count
    scatter = torch.where(known, (ratio / scale.where(scale > 0, 1.0)).where(known, 1.0).log(), 0.0)
    centre = scatter.sum(dim=1, keepdim=True) / count
    scatter = torch.where(known, scatter - centre, 0.0)
    # What the logarithm of a mean of S squares scatters by chance.
    noise = float(torch.special.polygamma(1, torch.tensor(len(differences) / 2.0, dtype=torch.float64)))
    rows = known.sum(dim=0).clamp_min(1)
    by_option = scatter.sum(dim=0) / rows
    by_option = by_option * _share_of_signal(by_option.square(), noise / rows)
    rest = torch.where(known, scatter - by_option, 0.0)
    variance = rest.square().sum() / (known.sum() - len(known)).clamp_min(1)
    rest = (centre + rest) * _share_of_signal(variance, torch.tensor(noise))
    return torch.where(known, scale * errors * (by_option + rest).exp(), raw)


def steadied_losses(losses: Tensor, layer_errors: Tensor, alike: Sequence[object | None]) -> Tensor:
    """(N, K) losses of experts, half of them replaced by what their layer's experts have in common.

    A layer has many experts, each with a noisy estimate of its own and an error of the layer's output that is known
    exactly. Experts that are ``alike`` share, for every option, one factor from squared error to loss; it is their
    mean, and so nearly free of noise.

    Args:
        losses: (N, K) from :func:`predicted_losses`.
        layer_errors: (N, K) L2 norms (:meth:`QuantizationBackend.layer_errors`); zero where nothing is known.
        alike: What a group shares a factor with, such as its layer and projection; None: it stays as it is.
    """
    squares, result = layer_errors.square(), losses.clone()
    for kind in dict.fromkeys(key for key in alike if key is not None):
        rows = torch.tensor([index for index, key in enumerate(alike) if key == kind])
        total = squares[rows].sum(dim=0)
        factor = losses[rows].sum(dim=0) / total.where(total > 0, 1.0)
        common = torch.where(total > 0, factor * squares[rows], losses[rows])
        result[rows] = 0.5 * (losses[rows] + common)
    return result


def alike_groups(plan: QuantizationPlan) -> list[tuple[int, ...] | None]:
    """For every group what makes its sensitivities comparable: layer and projections of experts, else None."""
    found: list[tuple[int, ...] | None] = []
    for group in plan.groups:
        parts = [m for m in group.members if isinstance(m, ExpertLinear)]
        kinds = sorted({("gate", "up", "down").index(m.projection) for m in parts})
        found.append((parts[0].layer.index, *kinds) if len(parts) == len(group.members) else None)
    return found


def _share_of_signal(total: Tensor, noise: Tensor) -> Tensor:
    """The part of an observed variance that is not noise, in [0, 1]."""
    return ((total - noise) / total.clamp_min(1e-300)).clamp(0.0, 1.0)


def curvature(differences: Tensor, losses: Tensor | None = None) -> Tensor:
    """(N, K, K) second-order KL of moving a group from one option to another.

    With ``losses`` (N, K), better known than from the differences alone, how far two options' errors point the same
    way is taken from all groups together.
    """
    if losses is None:
        gram = torch.einsum("sia,sib->iab", differences, differences) / len(differences)
        square = gram.diagonal(dim1=1, dim2=2)
        return (0.5 * (square[:, :, None] + square[:, None, :] - 2.0 * gram)).clamp_min(0.0)
    size = losses.sqrt()
    unit = differences / size.where(size > 0, torch.inf)
    agreement = torch.einsum("sia,sib->ab", unit, unit)
    length = agreement.diagonal().sqrt()
    agreement = agreement / (length[:, None] * length[None, :]).clamp_min(1e-300)
    together = agreement * size[:, :, None] * size[:, None, :]
    bend = (losses[:, :, None] + losses[:, None, :] - 2.0 * together).clamp_min(0.0)
    bend.diagonal(dim1=1, dim2=2).zero_()
    return bend


def logits_from_losses(losses: Tensor, problem: AllocationProblem, strength: float = 1.0) -> Tensor:
    """(N, K) initial logits: the losses of the options, with the price of their cost at the budget added.

    The sums are regrets in one currency. They are divided by the median regret of the second-best option, so that
    ``strength`` 1 leaves half of the groups undecided.
    """
    total = losses + torch.from_numpy(_priced_costs(losses.numpy(), problem))
    allowed = torch.tensor(problem.allowed)
    total = torch.where(allowed, total, torch.inf)
    regret = total - total.min(dim=1, keepdim=True).values
    second = regret.sort(dim=1).values[:, 1]
    scale = second[torch.isfinite(second) & (second > 0)]
    unit = float(scale.median()) if scale.numel() else 1.0
    # Beyond this many units an option is as good as ruled out; a bound keeps the logits finite and movable.
    return torch.where(allowed, -strength * (regret / unit).clamp(max=20.0), 0.0)


def logits_from_weights(distances: Tensor, problem: AllocationProblem, strength: float = 1.0) -> Tensor:
    """(N, K) logits as the paper's own code starts from: minus the logarithm of the error of the weights.

    Args:
        distances: (N, K) mean squared differences to the weights of the widest option, see
            :meth:`QuantizationBackend.weight_distances`.
        problem: Says which options are allowed.
        strength: Factor on the logits; 1 as in that code.
    """
    logits = -(distances + _WEIGHT_ERROR_FLOOR).log()
    logits = strength * (logits - logits.mean(dim=1, keepdim=True))
    return torch.where(torch.tensor(problem.allowed), logits, 0.0)


def _priced_costs(losses: np.ndarray, problem: AllocationProblem) -> np.ndarray:
    """(N, K) costs times the price at which the separate choices just fit the budget, each block at its own."""
    if problem.num_joint > 1:
        raise ValueError(
            f"Initial logits from losses need one budget, or one per block; got {problem.num_joint} joint budgets."
        )
    costs, open_losses = problem.relative_costs[0], np.where(problem.allowed, losses, np.inf)
    if problem.block_index is None:
        return np.asarray(costs * _price(open_losses, costs, float(problem.relative_budgets[0])))
    priced: np.ndarray = np.empty_like(costs)
    for block, budget in enumerate(problem.relative_budgets):
        rows = problem.block_index == block
        priced[rows] = costs[rows] * _price(open_losses[rows], costs[rows], float(budget))
    return priced


def _price(losses: np.ndarray, costs: np.ndarray, budget: float) -> float:
    """The price of a unit of cost at which every group's own best choice just fits the budget, by bisection."""

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
