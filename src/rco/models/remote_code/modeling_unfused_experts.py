"""Mixture-of-experts models whose experts are separate linear layers, so that each can have its own precision.

transformers keeps the experts of a layer in stacked tensors and loads packed ones with a single width for the
whole model. Here the stock model is built, and its stacked experts are replaced by one gated MLP each before any
weight is loaded; a quantization config then names every projection of every expert. Everything else is the stock
implementation.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["UnfusedExperts", "UnfusedExpertsMixin", "unfused_class"]

PROJECTION_NAMES = {"mixtral": ("w1", "w3", "w2")}  # of checkpoints that do not list them
KEY_MAPPINGS = {"mixtral": {r"\.block_sparse_moe\.": ".mlp."}}  # from the names in checkpoints to the model's


class UnfusedExperts(nn.ModuleList):
    """The experts of one layer as separate gated MLPs, called as the stacked ones are.

    Args:
        fused: The stacked experts; their weights are dropped, their activation is used.
        names: Names of the gate, up and down projection; of up and down for experts without a gate.
    """

    down_proj_bias: nn.Parameter | None

    def __init__(self, fused: Any, names: tuple[str, ...]) -> None:
        self._gated = len(names) > 2
        self._rising = "gate_up_proj" if self._gated else "up_proj"
        up, down = getattr(fused, self._rising), fused.down_proj
        transposed = bool(getattr(fused, "is_transposed", False))
        width, inner = (up.shape[1], down.shape[1]) if transposed else (up.shape[2], down.shape[2])
        self._names = names
        self._interleaved = not getattr(fused, "is_concatenated", True)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=up.dtype, device=up.device)

        experts = []
        for _ in range(up.shape[0]):
            risen = [linear(width, inner) for _ in names[:-1]]
            parts = (*risen, linear(inner, width))
            expert = nn.Module()
            for name, part in zip(names, parts, strict=True):
                expert.add_module(name, part)
            experts.append(expert)
        super().__init__(experts)
        for name in (f"{self._rising}_bias", "down_proj_bias"):
            self.register_parameter(name, fused._parameters.get(name))
        fused._parameters.clear()
        # In a tuple, so that the stacked experts do not become a child of this module.
        self._stock = (fused,)

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, width) weighted sum of the chosen experts' outputs."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        result = torch.zeros_like(hidden)
        for expert in torch.bincount(top_k_index.reshape(-1)).nonzero().squeeze(-1).tolist():
            tokens, slots = torch.where(top_k_index == expert)
            *rising, down = (getattr(self[expert], name) for name in self._names)
            seen = hidden[tokens]
            parts = [linear(seen) for linear in rising]
            joined = torch.stack(parts, dim=-1).flatten(-2) if self._interleaved else torch.cat(parts, dim=-1)
            bias = getattr(self, f"{self._rising}_bias")
            if bias is not None:
                joined = joined + bias[expert]
            stock = self._stock[0]
            out = down(stock._apply_gate(joined) if self._gated else stock.act_fn(joined))
            if self.down_proj_bias is not None:
                out = out + self.down_proj_bias[expert]
            result.index_add_(0, tokens, (out * top_k_weights[tokens, slots, None]).to(result.dtype))
        return result.view(hidden_states.shape)


class UnfusedExpertsMixin:
    """Replaces stacked experts by separate ones when the model is built."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        default = PROJECTION_NAMES.get(text.model_type, ("gate_proj", "up_proj", "down_proj"))
        names = tuple(getattr(config, "expert_projections", None) or default)
        blocks = [
            block
            for block in self.modules()  # type: ignore[attr-defined]
            if isinstance(getattr(getattr(block, "experts", None), "down_proj", None), nn.Parameter)
        ]
        for block in blocks:
            block.experts = UnfusedExperts(block.experts, names)
        # transformers stacks experts on loading, except in models with remote code.
        for part in self.modules():  # type: ignore[attr-defined]
            if part is not self and hasattr(type(part), "is_custom_code") and not part.is_custom_code():
                stock: Any = type(part)
                part.__class__ = _own_class(stock)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load with the renaming that transformers applies to models without remote code."""
        mapping = KEY_MAPPINGS.get(cls.config_class.model_type)  # type: ignore[attr-defined]
        if mapping is not None:
            kwargs.setdefault("key_mapping", mapping)
        return super().from_pretrained(*args, **kwargs)  # type: ignore[misc]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return False


@cache
def _own_class(stock: type) -> type:
    return type(f"Unfused{stock.__name__}", (stock,), {"__module__": __name__})


@cache
def unfused_class(stock: type) -> type:
    """The class of models like ``stock`` with separate experts."""
    return type(f"Unfused{stock.__name__}", (UnfusedExpertsMixin, stock), {"__module__": __name__})
