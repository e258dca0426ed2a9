"""The router's decisions in a forward pass: replayed where its rule is known, else as the experts receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rco.models.moe.layers import MoELayer
from rco.models.moe.routing import Routing, route

__all__ = ["watch_decisions"]

Note = Callable[[Tensor, Routing], None]


@contextmanager
def watch_decisions(
    layer: MoELayer, note: Note, chosen: Callable[[], Tensor | None] = lambda: None
) -> Iterator[None]:
    """Call ``note(hidden, routing)`` with the flattened states of a sparse layer and their routing.

    Args:
        layer: The layer. If its rule is not known, :attr:`Routing.mass` is one for chosen experts and zero for
            others, and the states are those that the experts receive.
        note: Called before the layer runs.
        chosen: Mask of the tokens that count, asked for at every pass; None: all.
    """

    def select(values: Tensor) -> Tensor:
        mask = chosen()
        return values if mask is None else values[mask.to(values.device)]

    def before_block(_: nn.Module, args: tuple[Any, ...]) -> None:
        hidden = select(args[0].reshape(-1, args[0].shape[-1]))
        note(hidden, route(layer.known_rule, layer.logits(hidden), layer.correction))

    def before_experts(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
        hidden, indices, weights = (select(value.reshape(-1, value.shape[-1])) for value in given)
        indices = indices.clamp(max=layer.num_experts - 1)
        mass = torch.zeros(len(hidden), layer.num_experts, device=hidden.device)
        mass.scatter_(1, indices, (weights != 0).to(mass.dtype))
        note(hidden, Routing(indices, weights, mass, mass))

    if layer.rule is not None:
        hook = layer.block.register_forward_pre_hook(before_block)
    else:
        hook = layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
