"""Mixture-of-experts models whose layers keep different numbers of experts.

The configuration names how many experts each decoder layer keeps (``num_experts_per_layer``, 0 for a dense
layer) and, for routers that choose groups of experts first, how many of each group (``expert_group_sizes``).
The stock model is built with the largest count and its routers and experts are cut to size before any weight
is loaded; everything else is the stock implementation.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "PrunedExpertsMixin",
    "RaggedGroupsMixin",
    "fit_layer",
    "pruned_class",
    "ragged_groups",
    "replace_tensor",
    "set_count",
    "tensors_by_expert",
]

ROUTER_NAMES = ("gate", "router")
COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class PrunedExpertsMixin:
    """Cuts routers and experts to the counts in the configuration."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        counts = text.num_experts_per_layer
        groups = getattr(text, "expert_group_sizes", None)
        for name, block in self.named_modules():  # type: ignore[attr-defined]
            router = next((getattr(block, n) for n in ROUTER_NAMES if hasattr(block, n)), None)
            experts = getattr(block, "experts", None)
            if not isinstance(router, nn.Module) or not isinstance(experts, nn.Module):
                continue
            layer = int(re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)[-1])
            fit_layer(block, router, experts, counts[layer], groups[layer] if groups else None)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers decides this by reading the source of the class; the stock class is the one to read.
        return bool(cls.__mro__[cls.__mro__.index(PrunedExpertsMixin) + 1]._can_set_experts_implementation())  # type: ignore[attr-defined]


def fit_layer(
    block: Any, router: Any, experts: Any, count: int, group_sizes: list[int] | None = None
) -> None:
    """Cut the router and the experts of one layer to ``count`` experts, keeping the first ones' values."""
    for module, name, tensor in tensors_by_expert(block, router, experts):
        replace_tensor(module, name, tensor.detach()[:count].clone())
    set_count(block, router, experts, count)
    if group_sizes is not None:
        ragged_groups(router, group_sizes)


def tensors_by_expert(block: Any, router: Any, experts: Any) -> list[tuple[Any, str, Tensor]]:
    """Tensors with one row per expert, as (module, name, tensor): of experts, router, and biases of the block."""
    count = max(tensor.shape[0] for tensor in experts.parameters() if tensor.dim() == 3)
    found = []
    for module in (experts, *router.modules(), block):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if tensor.dim() and tensor.shape[0] == count and (module is not block or tensor.dim() == 1):
                found.append((module, name, tensor))
    return found


def replace_tensor(module: Any, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by one of another shape."""
    before = getattr(module, name)
    if isinstance(before, nn.Parameter):
        module.register_parameter(name, nn.Parameter(value, requires_grad=before.requires_grad))
    else:
        module.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)


def set_count(block: Any, router: Any, experts: Any, count: int) -> None:
    """Write the number of experts into the attributes that the modules of a layer compute with."""
    router.num_experts = experts.num_experts = count
    for module in (block, *router.modules(), experts):
        for name in COUNT_NAMES:
            if name in vars(module):
                setattr(module, name, count)


def ragged_groups(router: Any, group_sizes: list[int]) -> None:
    """Make a group-limited router choose among groups of different sizes."""
    if not isinstance(router, RaggedGroupsMixin):
        router.__class__ = _ragged_class(router.__class__)
    router.group_sizes = tuple(int(size) for size in group_sizes)


class RaggedGroupsMixin:
    """A group-limited router over groups of different sizes.

    A group is ranked by the experts it still has, a group without any is never chosen, and a token whose groups
    hold fewer experts than it may visit uses only those.
    """

    group_sizes: tuple[int, ...]

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, weights and indices, as the stock router returns them."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(hidden.float(), self.weight.float())
        correction = getattr(self, "e_score_correction_bias", None)
        sigmoid = correction is not None
        scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
        choice = scores if correction is None else scores + correction
        sizes = list(self.group_sizes)
        padded = torch.stack(
            [
                F.pad(part, (0, max(sizes) - part.shape[-1]), value=-torch.inf)
                for part in choice.split(sizes, dim=-1)
            ],
            dim=1,
        )
        best = padded.topk(min(2 if sigmoid else 1, padded.shape[-1]), dim=-1).values
        ranks = best[..., 0] + best[..., 1:].masked_fill(best[..., 1:].isneginf(), 0.0).sum(dim=-1)
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter_(
            -1, torch.topk(ranks, self.topk_group, dim=-1).indices, True
        )
        inside = chosen.repeat_interleave(torch.tensor(sizes, device=chosen.device), dim=-1)
        best_values, indices = torch.topk(choice.masked_fill(~inside, -torch.inf), self.top_k, dim=-1)
        weights = scores.gather(-1, indices).masked_fill(best_values.isneginf(), 0.0)
        if sigmoid and self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, indices


@cache
def _ragged_class(router: type) -> type:
    return type(f"Ragged{router.__name__}", (RaggedGroupsMixin, router), {})


@cache
def pruned_class(stock: type) -> type:
    """The class of models like ``stock`` whose layers keep different numbers of experts."""
    if issubclass(stock, PrunedExpertsMixin):
        return stock
    return type(f"Pruned{stock.__name__}", (PrunedExpertsMixin, stock), {"__module__": __name__})
