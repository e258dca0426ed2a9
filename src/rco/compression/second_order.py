"""Second-order KL of each option, from gradients of the full model alone.

At the full model the KL has no first-order term. Its second-order term is the Fisher form: for a weight change D,
KL per token is about E[<g, D>^2] / 2, where g is the gradient of log p(y | x) and y is drawn from the model itself.
A switchable layer gives <G, W_k> for all options from one backward pass, so one pass per sequence yields an
unbiased estimate for every group and option at once. It serves as a prior and, with an exact knapsack, as a
baseline.

One squared number per sequence is a noisy estimate: its relative error is sqrt(2 / sequences). But within a group
the losses of the options are nearly proportional to their output errors, which are known exactly from the
calibration; pooling over options and groups removes most of the noise, see :func:`predicted_losses`.

Recorded output errors are those of weights alone. Where options also round inputs, :func:`diagonal_losses` take
their place: squared gradients at outputs times squared changes of these, which have little noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rco.compression.plan import CompressionPlan
from rco.compression.switched_model import SwitchedModel
from rco.data.calibration import CalibrationSet
from rco.losses import chunked_cross_entropy, sample_tokens
from rco.models.loading import LoadedModel
from rco.models.moe.linears import ExpertLinear

__all__ = [
    "SecondOrder",
    "alike_groups",
    "curvature",
    "diagonal_losses",
    "diagonal_sequences",
    "fisher_difference",
    "predicted_losses",
    "second_order",
    "steadied_losses",
]


@dataclass(frozen=True)
class SecondOrder:
    """Second-order estimates for every option.

    Attributes:
        losses: (N, K) KL of changing one group alone.
        curvature: (N, K, K) KL of moving a group from one option to another.
    """

    losses: Tensor
    curvature: Tensor


def second_order(
    plan: CompressionPlan,
    errors: Tensor,
    differences: Tensor,
    layer_errors: Tensor | None = None,
    diagonal: Tensor | None = None,
) -> SecondOrder:
    """Losses and curvature for the start of a search.

    Args:
        plan: Groups and options.
        errors: (N, K) relative output error of every option.
        differences: (S, N, K) from :meth:`rco.compression.compression.Compression.differences`.
        layer_errors: (N, K) changes in layers' outputs by options of experts, for :func:`steadied_losses`; None:
            losses are unchanged.
        diagonal: (N, K) from :func:`diagonal_losses`, instead of ``errors``; None: they are unknown.
    """
    losses = predicted_losses(differences, errors if diagonal is None else diagonal, diagonal is not None)
    if layer_errors is not None:
        losses = steadied_losses(losses, layer_errors, alike_groups(plan))
    return SecondOrder(losses, curvature(differences, losses))


def fisher_difference(
    loaded: LoadedModel, switched: SwitchedModel, calibration: CalibrationSet, index: int, seed: int
) -> Tensor:
    """(N, K): <G, W_k - W> of a sequence, G the gradient of its sampled log-likelihood, per root token.

    Args:
        loaded: The model.
        switched: The same model with its options, and the original weights as an additional last column.
        calibration: All sequences.
        index: Index of the sequence.
        seed: Seed of the sampled tokens; every sequence has its own noise, so the result does not depend on the
            rank that computes it.
    """
    tokens = calibration.tokens[index : index + 1].to(loaded.device)
    mask = calibration.mask[index : index + 1, :-1].to(loaded.device)
    gates = torch.zeros(switched.num_groups, switched.num_options, dtype=torch.float64)
    gates[:, -1] = 1.0
    gates.requires_grad_()
    switched.set_gates(gates)
    hidden = loaded.layout.final_hidden(loaded.model, tokens)[:, :-1]
    noise = int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator(device=loaded.device).manual_seed(noise)
    targets = sample_tokens(hidden.detach()[0], switched.full_head, generator)[None]
    loss = chunked_cross_entropy(hidden, switched.present_head(), targets, mask, reduction="sum")
    gradient: Tensor = torch.autograd.grad(loss, gates)[0]
    per_token: float = max(int(mask.sum()), 1) ** 0.5
    return (gradient[:, :-1] - gradient[:, -1:]) / per_token


def diagonal_losses(
    loaded: LoadedModel, switched: SwitchedModel, calibration: CalibrationSet, index: int, seed: int
) -> Tensor:
    """(N, K) second-order KL of a sequence as if outputs of a layer affected the loss independently of each other.

    Arguments are those of :func:`fisher_difference`. Inputs count as every option rounds them.
    """
    with switched.output_scores() as table:
        fisher_difference(loaded, switched, calibration, index, seed)
    return 0.5 * table[:, :-1] / max(int(calibration.mask[index, :-1].sum()), 1)


def diagonal_sequences(sensitivity: int) -> int:
    """Sequences for :func:`diagonal_losses`, of those for gradients: fewer, since they have less noise."""
    return max(1, sensitivity // 4)


def predicted_losses(differences: Tensor, errors: Tensor | None = None, comparable: bool = False) -> Tensor:
    """(N, K) second-order KL of changing one group alone.

    With ``errors``, the output error of every option (N, K), the estimates are shrunk towards
    (a factor per group) x (a factor per option) x error, in proportion to the noise in their scatter around it.

    Args:
        differences: (S, N, K) from :meth:`rco.compression.compression.Compression.differences`.
        errors: Positive where an option changes anything; None: the plain mean of squares.
        comparable: Whether errors of different groups compare, so that the factors of groups are shrunk as well.
    """
    raw = 0.5 * differences.square().mean(dim=0)
    if errors is None:
        return raw
    known = (raw > 0) & (errors > 0)
    count = known.sum(dim=1, keepdim=True).clamp_min(1)
    # The best estimate of a scale from chi-squared values is their mean.
    ratio = torch.where(known, raw / errors.where(known, 1.0), 0.0)
    scale = ratio.sum(dim=1, keepdim=True) / count
    scatter = torch.where(known, (ratio / scale.where(scale > 0, 1.0)).where(known, 1.0).log(), 0.0)
    centre = scatter.sum(dim=1, keepdim=True) / count
    scatter = torch.where(known, scatter - centre, 0.0)
    # Variance of the logarithm of a mean of S squares.
    noise = float(torch.special.polygamma(1, torch.tensor(len(differences) / 2.0, dtype=torch.float64)))
    if comparable:
        scale = _shrunk(scale, noise)
    rows = known.sum(dim=0).clamp_min(1)
    by_option = scatter.sum(dim=0) / rows
    by_option = by_option * _share_of_signal(by_option.square(), noise / rows)
    rest = torch.where(known, scatter - by_option, 0.0)
    variance = rest.square().sum() / (known.sum() - len(known)).clamp_min(1)
    rest = (centre + rest) * _share_of_signal(variance, torch.tensor(noise))
    return torch.where(known, scale * errors * (by_option + rest).exp(), raw)


def steadied_losses(losses: Tensor, layer_errors: Tensor, alike: Sequence[object | None]) -> Tensor:
    """(N, K) losses of experts, averaged with an estimate that is pooled over their layer.

    Every expert has a noisy loss and an exactly known error of the layer's output. Experts that are ``alike``
    share, for every option, one factor from squared error to loss; as a mean over many experts it has little noise.

    Args:
        losses: (N, K) from :func:`predicted_losses`.
        layer_errors: (N, K) L2 norms, see :mod:`rco.compression.option_errors`; zero where unknown.
        alike: Key of the groups that share a factor, such as layer and projection; None: the loss is unchanged.
    """
    squares, result = layer_errors.square(), losses.clone()
    for kind in dict.fromkeys(key for key in alike if key is not None):
        rows = torch.tensor([index for index, key in enumerate(alike) if key == kind])
        total = squares[rows].sum(dim=0)
        factor = losses[rows].sum(dim=0) / total.where(total > 0, 1.0)
        common = torch.where(total > 0, factor * squares[rows], losses[rows])
        result[rows] = 0.5 * (losses[rows] + common)
    return result


def alike_groups(plan: CompressionPlan) -> list[tuple[int, ...] | None]:
    """Key of groups with comparable sensitivities: layer and projections of experts, None for other groups."""
    found: list[tuple[int, ...] | None] = []
    for group in plan.groups:
        parts = [m for m in group.members if isinstance(m, ExpertLinear)]
        kinds = sorted({("gate", "up", "down").index(m.projection) for m in parts})
        found.append((parts[0].layer.index, *kinds) if len(parts) == len(group.members) else None)
    return found


def _shrunk(factors: Tensor, noise: float) -> Tensor:
    """Factors (N, 1) whose logarithms are moved to their mean by the share of noise in their variance."""
    known = factors > 0
    logs = factors.where(known, 1.0).log()
    count = known.sum().clamp_min(1)
    middle = torch.where(known, logs, 0.0).sum() / count
    spread = torch.where(known, logs - middle, 0.0)
    share = _share_of_signal(spread.square().sum() / (count - 1).clamp_min(1), torch.tensor(noise))
    return torch.where(known, (middle + share * spread).exp(), factors)


def _share_of_signal(total: Tensor, noise: Tensor) -> Tensor:
    """The part of an observed variance that is not noise, in [0, 1]."""
    return ((total - noise) / total.clamp_min(1e-300)).clamp(0.0, 1.0)


def curvature(differences: Tensor, losses: Tensor | None = None) -> Tensor:
    """(N, K, K) second-order KL of moving a group from one option to another.

    With ``losses`` (N, K), more precise than the differences alone, the correlation of two options' errors is
    pooled over all groups.
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
