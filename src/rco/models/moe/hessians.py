"""Input statistics of every expert of a layer, from the tokens that are routed to it.

An expert that few tokens visit would be quantized to fit those few. Experts are therefore topped up: in each batch
an expert with fewer tokens than its share of a minimum also sees the tokens that came closest to being sent to it,
by the router's own score. What the expert would make of them is computed as if they had been, so that its down
projection has inputs as well. How many tokens were added is kept, for the report.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rco.models.moe.experts import ExpertPairs, expert_weights, routed_tokens
from rco.models.moe.grouped import grouped_linear, grouped_outer
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import original_stacks
from rco.models.moe.routing import route

__all__ = ["ExpertHessians"]


class ExpertHessians:
    """Streams hidden states into one Hessian per expert for gate and up, and one for down.

    Args:
        layer: The sparse layer.
        tokens: Tokens that will be seen in all.
        minimum: Least tokens per expert; 0 never tops up.

    Attributes:
        visits: (experts,) tokens routed to each expert.
        added: (experts,) tokens that were added to them.
    """

    def __init__(self, layer: MoELayer, tokens: int, minimum: int) -> None:
        self.layer, self._total, self._minimum = layer, tokens, minimum
        up, down = original_stacks(layer)
        count, device = layer.num_experts, up.device
        self._up = torch.zeros(count, up.shape[3], up.shape[3], device=device)
        self._down = torch.zeros(count, down.shape[3], down.shape[3], device=device)
        self.visits = torch.zeros(count, dtype=torch.int64, device=device)
        self.added = torch.zeros(count, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, hidden: Tensor) -> None:
        """Add a batch of the states (..., width) that enter the layer's sparse block."""
        layer = self.layer
        flat = hidden.reshape(-1, hidden.shape[-1])
        routing = route(layer.rule, layer.logits(flat), layer.correction)
        routed = torch.zeros_like(routing.mass, dtype=torch.bool)
        routed.scatter_(1, routing.indices, routing.weights != 0)
        extra = self._extra(routed, routing.mass)
        tokens, experts = extra.nonzero(as_tuple=True)
        pairs = ExpertPairs.sort(
            torch.cat([routed_tokens(routing.indices), tokens]),
            torch.cat([routing.indices.reshape(-1), experts]),
            layer.num_experts,
        )
        weights = expert_weights(layer.experts)
        seen = flat.index_select(0, pairs.tokens)
        risen = grouped_linear(seen, weights.up, pairs.ends)
        if weights.up_bias is not None:
            risen = risen + weights.up_bias[pairs.experts]
        inner = weights.activate(risen)
        for total, rows in ((self._up, seen), (self._down, inner)):
            rows = rows.float()
            part = grouped_outer(rows, rows, pairs.ends)
            counts = torch.diff(pairs.ends, prepend=pairs.ends.new_zeros(1))
            total.add_(part.masked_fill_((counts == 0)[:, None, None], 0.0), alpha=2.0)
        self.visits += routed.sum(dim=0)
        self.added += extra.sum(dim=0)

    def _extra(self, routed: Tensor, mass: Tensor) -> Tensor:
        """(tokens, experts) pairs to add: the likeliest tokens of experts that have too few."""
        tokens = routed.shape[0]
        quota = min(tokens, math.ceil(self._minimum * tokens / self._total))
        none = torch.zeros_like(routed)
        if quota == 0:
            return none
        short = quota - routed.sum(dim=0)
        # Those already there come last, so that the best of the others are taken.
        order = mass.masked_fill(routed, -1.0).topk(quota, dim=0).indices
        wanted = torch.arange(quota, device=mass.device)[:, None] < short[None, :]
        return none.scatter_(0, order, wanted) & ~routed

    def matrices(self, down: bool) -> Tensor:
        """(experts, in, in) Hessians of the down projections, or of gate and up: mean over tokens of 2 x x^T."""
        tokens = (self.visits + self.added).clamp(min=1)
        total = self._down if down else self._up
        if not bool(torch.isfinite(total).all()):
            raise ValueError(f"The inputs of experts in {self.layer.name} held NaN or infinite values.")
        return total / tokens[:, None, None]
