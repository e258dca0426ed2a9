"""Routing: from logits to a choice of experts and their weights, with pruned experts removed first.

The formulas are those of the deployed model: an expert that is pruned leaves before anything is normalised,
grouped or picked, so that masking it here and deleting its router row there give the same choice and weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Routing", "RoutingRule", "choose_groups", "group_scores", "route"]


@dataclass(frozen=True)
class RoutingRule:
    """A router's rule, without its weights.

    Attributes:
        top_k: Experts per token.
        score: ``softmax`` over all experts, ``sigmoid`` of each, or the ``logit`` itself.
        denominator: Divisor of a selected expert's mass: the mass of the ``selected`` experts, of all
            ``survivors`` (softmax without renormalisation), or nothing (``none``).
        scale: Constant factor on the weights.
        group_sizes: Experts per group, in order; one group unless the router is group-limited.
        chosen_groups: Groups that a token may use.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "logit"]
    denominator: Literal["selected", "survivors", "none"]
    scale: float = 1.0
    group_sizes: tuple[int, ...] = (0,)
    chosen_groups: int = 1

    @property
    def grouped(self) -> bool:
        """Whether groups limit the choice."""
        return self.chosen_groups < len(self.group_sizes)

    def group_of(self, device: torch.device) -> Tensor:
        """(experts,) group of every expert."""
        return _group_of(self.group_sizes, device)


@dataclass(frozen=True)
class Routing:
    """The routing of a batch of tokens.

    Attributes:
        indices: (tokens, top_k) chosen experts.
        weights: (tokens, top_k) their weights; differentiable in the logits. Zero where a token's groups
            hold fewer survivors than ``top_k``.
        choice: (tokens, experts) values that the choice ranked, ``-inf`` for experts that could not be chosen.
        mass: (tokens, experts) non-negative scores of *all* experts, pruned ones too, on one scale.
    """

    indices: Tensor
    weights: Tensor
    choice: Tensor
    mass: Tensor


def route(
    rule: RoutingRule, logits: Tensor, correction: Tensor | None = None, keep: Tensor | None = None
) -> Routing:
    """Choose experts as a deployed router without the pruned experts does.

    Args:
        rule: The rule.
        logits: (tokens, experts) router logits.
        correction: (experts,) added to the scores for the choice alone.
        keep: (experts,) booleans; None keeps all.
    """
    # Routers score in float32; float64 is kept for exact gradient checks.
    exact = logits if logits.dtype == torch.float64 or rule.score == "logit" else logits.float()
    gone = None if keep is None else ~keep
    if rule.score == "sigmoid":
        return _route_sigmoid(rule, exact, correction, gone)

    masked = exact if gone is None else exact.masked_fill(gone, -torch.inf)
    if rule.score == "logit":
        top, indices = torch.topk(masked, rule.top_k, dim=-1)
        weights, choice = torch.softmax(top, dim=-1), masked
    else:
        choice = torch.softmax(masked, dim=-1)
        if rule.grouped:
            # Group-limited softmax routers zero the scores outside, so a short group gives weights of zero.
            choice = choice.masked_fill(~_inside(rule, choice, keep), 0.0)
        weights, indices = torch.topk(choice, rule.top_k, dim=-1)
        if rule.denominator == "selected":
            weights = weights / weights.sum(dim=-1, keepdim=True)
    with torch.no_grad():
        values = exact.detach()
        values = values.float() if values.dtype not in (torch.float32, torch.float64) else values
        mass = torch.exp(values - values.amax(dim=-1, keepdim=True))
    return Routing(indices, _scaled(weights, rule), choice.detach(), mass)


def _route_sigmoid(
    rule: RoutingRule, logits: Tensor, correction: Tensor | None, gone: Tensor | None
) -> Routing:
    scores = torch.sigmoid(logits)
    choice = scores.detach() if correction is None else scores.detach() + correction
    if gone is not None:
        choice = choice.masked_fill(gone, -torch.inf)
    if rule.grouped:
        choice = choice.masked_fill(~_inside(rule, choice, None if gone is None else ~gone), -torch.inf)
    best, indices = torch.topk(choice, rule.top_k, dim=-1, sorted=True)
    # A token whose groups hold fewer survivors than top_k uses those alone.
    weights = scores.gather(-1, indices).masked_fill(best.isneginf(), 0.0)
    if rule.denominator == "selected":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(indices, _scaled(weights, rule), choice, scores.detach())


def group_scores(rule: RoutingRule, choice: Tensor, keep: Tensor | None = None) -> Tensor:
    """(tokens, groups) by which a group-limited router ranks its groups; ``-inf`` for a group without survivors.

    Softmax routers take a group's best expert, sigmoid routers the sum of its two best. A group that has one
    survivor left is ranked by that one.
    """
    padded = _by_group(rule, choice)
    if keep is not None:
        padded = padded.masked_fill(~_by_group(rule, keep[None])[0], -torch.inf)
    if rule.score == "softmax":
        return padded.amax(dim=-1)
    best = padded.topk(min(2, padded.shape[-1]), dim=-1).values
    first = best[..., 0]
    return first + best[..., 1:].masked_fill(best[..., 1:].isneginf(), 0.0).sum(dim=-1)


def choose_groups(rule: RoutingRule, scores: Tensor) -> Tensor:
    """(tokens, groups) booleans: the groups that each token may use."""
    chosen = torch.topk(scores, rule.chosen_groups, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def _inside(rule: RoutingRule, choice: Tensor, keep: Tensor | None) -> Tensor:
    allowed = choose_groups(rule, group_scores(rule, choice.detach(), keep))
    return allowed[:, rule.group_of(choice.device)]


@lru_cache(maxsize=64)
def _group_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)


def _by_group(rule: RoutingRule, values: Tensor) -> Tensor:
    """(tokens, groups, largest group) with ``-inf`` (False for booleans) where a group is smaller."""
    sizes = rule.group_sizes
    if len(set(sizes)) == 1:
        return values.view(values.shape[0], len(sizes), sizes[0])
    parts = torch.split(values, list(sizes), dim=-1)
    filler = False if values.dtype == torch.bool else -torch.inf
    return torch.stack(
        [torch.nn.functional.pad(part, (0, max(sizes) - part.shape[-1]), value=filler) for part in parts],
        dim=1,
    )


def _scaled(weights: Tensor, rule: RoutingRule) -> Tensor:
    return weights if rule.scale == 1.0 else weights * rule.scale
