"""One pass over calibration tokens that scores every expert of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rco.models.moe.expert_scores import ExpertScores
from rco.models.moe.experts import ExpertPairs, expert_weights, pair_outputs
from rco.models.moe.layers import MoELayer, moe_layers
from rco.models.moe.routing import route

__all__ = ["collect_expert_scores", "count_visits"]


@torch.no_grad()
def collect_expert_scores(
    model: nn.Module, batches: Iterable[Tensor | tuple[Tensor, Tensor | None]]
) -> ExpertScores:
    """Score all experts of ``model`` on tokens.

    Args:
        model: A model with experts.
        batches: Token ids (batch, length), alone or with a boolean mask of the same shape that says which
            tokens count.
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
            routing = route(layer.rule, layer.logits(hidden), layer.correction)
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
    """For every sparse layer, how many tokens are routed to each of its experts.

    Args:
        model: A model with experts.
        batches: Token ids (batch, length), and a boolean mask of the same shape that says which tokens count.
    """
    layers = moe_layers(model)
    device = next(model.parameters()).device
    counts = [torch.zeros(layer.num_experts, dtype=torch.int64, device=device) for layer in layers]
    chosen = torch.zeros(0)

    def watch(layer: MoELayer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before_block(_: nn.Module, args: tuple[Any, ...]) -> None:
            hidden = args[0].reshape(-1, args[0].shape[-1])[chosen]
            routing = route(layer.rule, layer.logits(hidden), layer.correction)
            visited = routing.indices[routing.weights != 0]
            counts[layer.index] += torch.bincount(visited, minlength=layer.num_experts).to(device)

        return before_block

    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.block.register_forward_pre_hook(watch(layer)).remove)
        for tokens, mask in batches:
            chosen = mask.reshape(-1).to(device)
            model(tokens.to(device), use_cache=False)
    return [layer.tolist() for layer in counts]
