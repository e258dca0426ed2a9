"""Execution of experts on lists of (token, expert) pairs: one grouped multiplication per projection, no loop.

Gates need more pairs than the output: *probes*, the output of an expert for a token that was not routed to it. Only
the inner product of a probe's output with the output's gradient is used: no gradient flows back through a probe,
which so costs half of a real pair, and none is computed before the backward pass has that gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rco.models.moe.grouped import grouped_linear, grouped_outer

__all__ = [
    "Ask",
    "ExpertPairs",
    "ExpertSource",
    "ExpertWeights",
    "PairedExperts",
    "expert_weights",
    "pair_outputs",
    "routed_tokens",
    "sorted_outputs",
]

_UNFUSED_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one layer as stacked matrices that multiply from the right.

    Attributes:
        up: (experts, width, 2 x inner) view of gate and up projection; (experts, width, inner) without a gate.
        down: (experts, inner, width) view.
        up_bias: (experts, 2 x inner) or None.
        down_bias: (experts, width) or None.
        activate: Maps (pairs, 2 x inner) to (pairs, inner).
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activate: Callable[[Tensor], Tensor]

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return int(self.up.shape[0])

    def dense(self) -> ExpertWeights:
        """The weights themselves, which need no decoding."""
        return self

    def option_gradient(self, up: Tensor, down: Tensor, idle: Tensor) -> Tensor:
        """Raise an error: plain weights have no options."""
        raise TypeError(
            "Only experts with options have gradients for them; see rco.models.moe.switchable_experts."
        )


class ExpertSource(Protocol):
    """Source of the weights of :class:`PairedExperts`, in the forward and again in the backward pass."""

    def dense(self) -> ExpertWeights:
        """The weights to compute with; valid until the next call."""
        ...

    def option_gradient(self, up: Tensor, down: Tensor, idle: Tensor) -> Tensor:
        """Gradient of the option gates from the gradients of the weights, (experts, out, in).

        Gradients of ``idle`` experts, which no token visited, are undefined and count as zero.
        """
        ...


def expert_weights(experts: nn.Module, *, trained: bool = False) -> ExpertWeights:
    """View fused experts as stacked matrices, or stack unfused ones.

    Unfused experts (an ``nn.ModuleList`` of gated MLPs) are stacked once, and their parameters then become
    views of the stack: values, names and the state dict stay as they are and no second copy is kept.

    Args:
        experts: The experts of a layer.
        trained: Let gradients pass to the matrices of fused experts.
    """
    if isinstance(experts, nn.ModuleList):
        return _stack(experts)
    module: Any = experts
    gated = getattr(module, "has_gate", True)
    name = "gate_up_proj" if gated else "up_proj"
    up, down = getattr(module, name), module.down_proj
    if not getattr(module, "is_transposed", False):
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    has_bias = bool(getattr(module, "has_bias", False))
    return ExpertWeights(
        up if trained else up.detach(),
        down if trained else down.detach(),
        getattr(module, f"{name}_bias").detach() if has_bias else None,
        module.down_proj_bias.detach() if has_bias else None,
        module._apply_gate if gated else module.act_fn,
    )


def _stack(experts: nn.ModuleList) -> ExpertWeights:
    first: Any = experts[0]
    names = next((n for n in _UNFUSED_NAMES if all(hasattr(first, part) for part in n)), None)
    activation = getattr(first, "act_fn", None)
    if names is None or activation is None:
        raise ValueError(
            f"experts of type {type(first).__name__} are not gated MLPs; "
            f"expected act_fn and linear layers named {' or '.join('/'.join(n) for n in _UNFUSED_NAMES)}"
        )
    linears = [[getattr(expert, part) for part in names] for expert in experts]
    if any(linear.bias is not None for row in linears for linear in row):
        raise ValueError("unfused experts with biases are not supported; load the model with fused experts")
    inner = linears[0][0].weight.shape[0]
    with torch.no_grad():
        up = torch.stack([torch.cat([gate.weight, rise.weight]) for gate, rise, _ in linears])
        down = torch.stack([lower.weight for _, _, lower in linears])
        for index, (gate, rise, lower) in enumerate(linears):
            gate.weight.data, rise.weight.data = up[index, :inner], up[index, inner:]
            lower.weight.data = down[index]

    def activate(both: Tensor) -> Tensor:
        gate, rise = both.chunk(2, dim=-1)
        out: Tensor = activation(gate) * rise
        return out

    return ExpertWeights(up.transpose(1, 2), down.transpose(1, 2), None, None, activate)


@dataclass(frozen=True)
class ExpertPairs:
    """(token, expert) pairs in the order of the experts.

    Attributes:
        order: (pairs,) position in the unsorted list.
        tokens: (pairs,) token of each sorted pair.
        experts: (pairs,) expert of each sorted pair.
        ends: (experts,) int32 ends of the experts' runs.
    """

    order: Tensor
    tokens: Tensor
    experts: Tensor
    ends: Tensor

    @classmethod
    def build(cls, indices: Tensor, num_experts: int) -> ExpertPairs:
        """The pairs of a routing (tokens, top_k), token by token before they are sorted."""
        ordered, order = torch.sort(indices.reshape(-1), stable=True)
        tokens = order.div(indices.shape[1], rounding_mode="floor")
        return cls(order, tokens, ordered, _run_ends(ordered, num_experts))

    @classmethod
    def sort(cls, tokens: Tensor, experts: Tensor, num_experts: int) -> ExpertPairs:
        """Any pairs, sorted by expert; those of one expert stay in their order."""
        ordered, order = torch.sort(experts, stable=True)
        return cls(order, tokens[order], ordered, _run_ends(ordered, num_experts))

    def unsort(self, values: Tensor) -> Tensor:
        """Sorted rows in the original order of the pairs."""
        return values.index_select(0, self.places)

    @cached_property
    def places(self) -> Tensor:
        """(pairs,) position in the sorted list; gathering rows by it is several times faster than scattering."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(places), device=places.device)
        return places


def routed_tokens(indices: Tensor) -> Tensor:
    """(tokens x top_k,) token of every entry of a routing (tokens, top_k)."""
    tokens = torch.arange(indices.shape[0], device=indices.device)
    return tokens.unsqueeze(1).expand_as(indices).reshape(-1)


def _run_ends(ordered: Tensor, num_experts: int) -> Tensor:
    # Unlike bincount, searchsorted does not need the largest value, so the host does not wait for the device.
    experts = torch.arange(num_experts, device=ordered.device)
    return torch.searchsorted(ordered, experts, right=True, out_int32=True)


def pair_outputs(hidden: Tensor, pairs: ExpertPairs, weights: ExpertWeights) -> Tensor:
    """(pairs, width) unweighted expert outputs of the sorted pairs."""
    return sorted_outputs(hidden.index_select(0, pairs.tokens), pairs, weights)


def sorted_outputs(rows: Tensor, pairs: ExpertPairs, weights: ExpertWeights) -> Tensor:
    """(pairs, width) the same from the hidden state of every sorted pair; differentiable."""
    inner = weights.activate(_raised(rows, pairs, weights))
    return _lower(inner, pairs.experts, pairs.ends, weights)


def _rise(hidden: Tensor, pairs: ExpertPairs, weights: ExpertWeights) -> Tensor:
    return _raised(hidden.index_select(0, pairs.tokens), pairs, weights)


def _raised(rows: Tensor, pairs: ExpertPairs, weights: ExpertWeights) -> Tensor:
    out = grouped_linear(rows, weights.up, pairs.ends)
    return out if weights.up_bias is None else out + weights.up_bias[pairs.experts]


def _lower(inner: Tensor, experts: Tensor, ends: Tensor, weights: ExpertWeights) -> Tensor:
    out = grouped_linear(inner, weights.down, ends)
    return out if weights.down_bias is None else out + weights.down_bias[experts]


Ask = Callable[[Tensor, Tensor], Tensor]
"""Tokens and experts of probes -> their inner products, see :class:`PairedExperts`."""


class PairedExperts(torch.autograd.Function):
    """Weighted sum of expert outputs, with gradients for hidden states, routing weights and gates.

    ``apply(hidden, routing_weights, gates, option_gates, pairs, source, gate_gradient)`` returns (tokens, width).
    Backward forms ``a = <dL/dy_token, f_expert(token)>`` for every pair: it is the gradient of the routing weight.
    ``gate_gradient(a, ask)`` turns it into the gradient of ``gates``; ``ask(tokens, experts)`` returns the same
    number for probes, which are computed only then.

    If ``option_gates`` are given, the gradients of the experts' weights are formed, one matrix per expert and
    projection, and ``source.option_gradient`` forms their inner products with every option; otherwise expert
    weights get no gradient, since they are frozen in a search.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        routing_weights: Tensor,
        gates: Tensor | None,
        option_gates: Tensor | None,
        pairs: ExpertPairs,
        source: ExpertSource,
        gate_gradient: Callable[[Tensor, Ask], Tensor] | None,
    ) -> Tensor:
        """See the class."""
        weights = source.dense()
        risen = _rise(hidden, pairs, weights)
        outputs = _lower(weights.activate(risen), pairs.experts, pairs.ends, weights)
        slot_weights = routing_weights.reshape(-1)[pairs.order]
        # The hidden states are needed only for probes and for the weights' gradients.
        kept = hidden if ctx.needs_input_grad[2] or ctx.needs_input_grad[3] else None
        ctx.save_for_backward(risen, slot_weights, kept)
        ctx.pairs, ctx.source, ctx.gate_gradient = pairs, source, gate_gradient
        ctx.shape = (routing_weights.shape, hidden.dtype, routing_weights.dtype)
        ctx.gate_dtype = None if gates is None else gates.dtype
        weighted = pairs.unsort(outputs * slot_weights.unsqueeze(-1))
        total: Tensor = weighted.view(*routing_weights.shape, -1).sum(dim=1)
        return total.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """See the class."""
        (grad,) = grads
        pairs: ExpertPairs = ctx.pairs
        weights: ExpertWeights = ctx.source.dense()
        risen, slot_weights, hidden = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype = ctx.shape
        spread = grad.index_select(0, pairs.tokens)
        # q = W_down^T g is used twice: <q, activation> is <g, f>, and w * q is the gradient of the activation.
        q = grouped_linear(spread, weights.down.transpose(1, 2), pairs.ends)
        with torch.enable_grad():
            leaf = risen.detach().requires_grad_()
            inner = weights.activate(leaf)
        products = _products(q, inner.detach(), spread, pairs, weights)
        real = pairs.unsort(products).view(shape)

        grad_hidden = grad_gates = grad_options = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            (grad_risen,) = torch.autograd.grad(inner, leaf, q * slot_weights.unsqueeze(-1).to(q.dtype))
        if ctx.needs_input_grad[0]:
            rows = grouped_linear(grad_risen, weights.up.transpose(1, 2), pairs.ends)
            grad_hidden = pairs.unsort(rows).view(*shape, -1).sum(dim=1).to(hidden_dtype)
        if ctx.needs_input_grad[3]:
            seen = hidden.index_select(0, pairs.tokens).to(grad_risen.dtype)
            weighted = spread.to(q.dtype) * slot_weights.unsqueeze(-1).to(q.dtype)
            grad_options = ctx.source.option_gradient(
                grouped_outer(grad_risen, seen, pairs.ends),
                grouped_outer(weighted, inner.detach(), pairs.ends),
                _run_lengths(pairs.ends) == 0,
            )
        if ctx.needs_input_grad[2]:
            grad_gates = ctx.gate_gradient(real, partial(_probe, hidden, grad, weights)).to(ctx.gate_dtype)
        return grad_hidden, real.to(weight_dtype), grad_gates, grad_options, None, None, None


def _probe(hidden: Tensor, grad: Tensor, weights: ExpertWeights, tokens: Tensor, experts: Tensor) -> Tensor:
    """(probes,) ``<dL/dy_token, f_expert(token)>`` of tokens that were not sent to the experts."""
    pairs = ExpertPairs.sort(tokens, experts, weights.num_experts)
    spread = grad.index_select(0, pairs.tokens)
    q = grouped_linear(spread, weights.down.transpose(1, 2), pairs.ends)
    inner = weights.activate(_rise(hidden, pairs, weights))
    return pairs.unsort(_products(q, inner, spread, pairs, weights))


def _products(q: Tensor, inner: Tensor, spread: Tensor, pairs: ExpertPairs, weights: ExpertWeights) -> Tensor:
    """(pairs,) ``<g, f>`` of an output and its gradient, from ``q = W_down^T g`` and the activation."""
    products = (q * inner).sum(dim=-1)
    if weights.down_bias is not None:
        products = products + (spread * weights.down_bias[pairs.experts]).sum(dim=-1)
    return products


def _run_lengths(ends: Tensor) -> Tensor:
    return torch.diff(ends, prepend=ends.new_zeros(1))
