"""Scores of experts from one pass over calibration tokens: REAP saliency, routing frequency, router mass.

All three are sums over tokens: a pass may have batches of any size and keeps three numbers per expert. Scores are
used as baselines (prune the lowest) and as initial logits of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rco.models.moe.decisions import watch_decisions
from rco.models.moe.expert_pairs import ExpertPairs, expert_weights, pair_outputs
from rco.models.moe.layers import MoELayer, moe_layers
from rco.models.moe.routing import Routing, route

__all__ = ["ExpertScores", "ScoreName", "collect_expert_scores", "count_visits"]

ScoreName = Literal["reap", "frequency", "mass"]


class ExpertScores:
    """Running sums per layer and expert.

    Args:
        counts: Experts of each layer.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        if not counts or min(counts) < 1:
            raise ValueError(f"every layer needs at least one expert, got counts {list(counts)}")
        self.counts = tuple(int(count) for count in counts)
        self.tokens = [0] * len(self.counts)
        self._saliency = [torch.zeros(count, dtype=torch.float64) for count in self.counts]
        self._visits = [torch.zeros(count, dtype=torch.float64) for count in self.counts]
        self._mass = [torch.zeros(count, dtype=torch.float64) for count in self.counts]

    def update(
        self,
        layer: int,
        indices: Tensor,
        weights: Tensor,
        norms: Tensor,
        mass: Tensor,
        mask: Tensor | None = None,
    ) -> None:
        """Add the tokens of one batch.

        Args:
            layer: Index of the layer.
            indices: (tokens, top_k) experts that each token visits.
            weights: (tokens, top_k) routing weights.
            norms: (tokens, top_k) Euclidean norms of the experts' outputs, before weighting.
            mass: (tokens, experts) the router's share of every expert, before the choice.
            mask: (tokens,) booleans; False leaves a token out.
        """
        count = self.counts[layer]
        if mass.shape[-1] != count or not indices.shape == weights.shape == norms.shape:
            raise ValueError(
                f"layer {layer} has {count} experts; got mass of shape {tuple(mass.shape)} and slots of shapes "
                f"{tuple(indices.shape)}, {tuple(weights.shape)}, {tuple(norms.shape)}"
            )
        if mask is not None:
            indices, weights, norms, mass = indices[mask], weights[mask], norms[mask], mass[mask]
        flat = indices.reshape(-1)
        # A slot of weight zero was not filled; the token did not visit that expert.
        visited = (weights.reshape(-1) != 0).double()
        saliency = torch.zeros(count, dtype=torch.float64, device=flat.device)
        visits = torch.zeros_like(saliency)
        saliency.index_add_(0, flat, weights.double().reshape(-1) * norms.double().reshape(-1))
        visits.index_add_(0, flat, visited)
        self._saliency[layer] += saliency.cpu()
        self._visits[layer] += visits.cpu()
        self._mass[layer] += mass.double().sum(dim=0).cpu()
        self.tokens[layer] += int(indices.shape[0])

    def merge(self, other: ExpertScores) -> None:
        """Add the sums of another pass (another rank, another domain)."""
        if other.counts != self.counts:
            raise ValueError(
                f"cannot merge scores of layers {other.counts} into scores of layers {self.counts}"
            )
        for layer in range(len(self.counts)):
            self.tokens[layer] += other.tokens[layer]
            self._saliency[layer] += other._saliency[layer]
            self._visits[layer] += other._visits[layer]
            self._mass[layer] += other._mass[layer]

    def score(self, name: ScoreName) -> list[Tensor]:
        """One (experts,) float64 tensor per layer; experts with higher scores are kept.

        * ``reap``: mean over the tokens that visit an expert of routing weight times output norm; 0 for an
          expert that no token visits.
        * ``frequency``: share of the tokens that visit an expert.
        * ``mass``: mean share that the router gives an expert before the choice.
        """
        if name not in get_args(ScoreName):
            raise ValueError(f"score is {name!r}; allowed are {', '.join(get_args(ScoreName))}")
        if 0 in self.tokens:
            raise ValueError("no token was scored in some layer; pass calibration tokens first")
        if name == "reap":
            pairs = zip(self._saliency, self._visits, strict=True)
            return [torch.where(visits > 0, total / visits.clamp(min=1), 0.0) for total, visits in pairs]
        sums = self._visits if name == "frequency" else self._mass
        return [total / tokens for total, tokens in zip(sums, self.tokens, strict=True)]


@torch.no_grad()
def collect_expert_scores(
    model: nn.Module, batches: Iterable[Tensor | tuple[Tensor, Tensor | None]]
) -> ExpertScores:
    """Score all experts of ``model`` on tokens.

    Args:
        model: A model with experts.
        batches: Token ids (batch, length), alone or with a boolean mask of the same shape, true for tokens
            that count.
    """
    layers = moe_layers(model)
    scores = ExpertScores([layer.num_experts for layer in layers])
    mask: Tensor | None = None

    def watch(layer: MoELayer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        weights = expert_weights(layer.experts)

        def before_block(_: nn.Module, args: tuple[Any, ...]) -> None:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            chosen = None if mask is None else mask.reshape(-1).to(hidden.device)
            hidden = hidden if chosen is None else hidden[chosen]
            routing = route(layer.known_rule, layer.logits(hidden), layer.correction)
            pairs = ExpertPairs.build(routing.indices, layer.num_experts)
            norms = pairs.unsort(pair_outputs(hidden, pairs, weights).float().norm(dim=-1))
            share = routing.mass / routing.mass.sum(dim=-1, keepdim=True)
            scores.update(
                layer.index, routing.indices, routing.weights, norms.view_as(routing.indices), share
            )

        return before_block

    device = next(model.parameters()).device
    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.block.register_forward_pre_hook(watch(layer)).remove)
        for batch in batches:
            tokens, mask = batch if isinstance(batch, tuple) else (batch, None)
            if mask is not None and mask.shape != tokens.shape:
                raise ValueError(f"mask has shape {tuple(mask.shape)}, its tokens {tuple(tokens.shape)}")
            model(tokens.to(device), use_cache=False)
    return scores


@torch.no_grad()
def count_visits(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[list[int]]:
    """Number of tokens routed to each expert of every sparse layer.

    Args:
        model: A model with experts.
        batches: Token ids (batch, length), and a boolean mask of the same shape, true for tokens that count.
    """
    layers = moe_layers(model)
    device = next(model.parameters()).device
    counts = [torch.zeros(layer.num_experts, dtype=torch.int64, device=device) for layer in layers]
    chosen = torch.zeros(0)

    def watch(layer: MoELayer) -> Callable[[Tensor, Routing], None]:
        def note(_: Tensor, routing: Routing) -> None:
            visited = routing.indices[routing.weights != 0]
            counts[layer.index] += torch.bincount(visited, minlength=layer.num_experts).to(device)

        return note

    with ExitStack() as undo:
        for layer in layers:
            undo.enter_context(watch_decisions(layer, watch(layer), lambda: chosen))
        for tokens, mask in batches:
            chosen = mask.reshape(-1).to(device)
            model(tokens.to(device), use_cache=False)
    return [layer.tolist() for layer in counts]
