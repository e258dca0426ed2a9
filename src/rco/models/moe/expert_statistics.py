"""Calibration statistics of experts: input Hessians, errors of the layer output, Fisher sensitivities.

:class:`ExpertHessians` collects the inputs of every expert for GPTQ. :func:`layer_output_errors` measures the
change of a layer's output when one projection is rounded. :func:`expert_sensitivity` predicts the KL of removing
one expert from gradients of the full model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from rco.formats.base import Stored
from rco.losses import Head, chunked_cross_entropy, sample_tokens
from rco.models.loading import LoadedModel
from rco.models.moe.decisions import watch_decisions
from rco.models.moe.expert_pairs import ExpertPairs, ExpertWeights, expert_weights, routed_tokens
from rco.models.moe.gates import ExpertGates
from rco.models.moe.grouped import grouped_linear, grouped_outer
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import original_stacks
from rco.models.moe.routing import Routing
from rco.models.moe.switchable_experts import ExpertOptions, PlacedChoices

__all__ = ["ExpertHessians", "SharedOptions", "expert_sensitivity", "layer_output_errors"]


class ExpertHessians:
    """Hessians of every expert's inputs, one for gate and up and one for down, from the tokens routed to it.

    An expert that few tokens visit would be fitted to those few. In each batch, an expert with fewer tokens than
    its share of ``minimum`` therefore also gets the tokens with the highest router score for it among those routed
    elsewhere; its down projection gets the expert's activations for them. The numbers of added tokens are kept for
    the report.

    Args:
        layer: The sparse layer.
        tokens: Total number of tokens to be added.
        minimum: Least tokens per expert; 0 adds none.

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
    def add(self, flat: Tensor, routing: Routing) -> None:
        """Add a batch of states (tokens, width) of the layer with their routing."""
        layer = self.layer
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
        if quota == 0 or self.layer.rule is None:  # without a rule, the scores of other tokens are not known
            return none
        short = quota - routed.sum(dim=0)
        # Routed tokens come last, so that the best of the others are taken.
        order = mass.masked_fill(routed, -1.0).topk(quota, dim=0).indices
        wanted = torch.arange(quota, device=mass.device)[:, None] < short[None, :]
        return none.scatter_(0, order, wanted) & ~routed

    def matrices(self, down: bool) -> Tensor:
        """(experts, in, in) Hessians of the down projections, or of gate and up: mean over tokens of 2 x x^T."""
        tokens = (self.visits + self.added).clamp(min=1)
        total = self._down if down else self._up
        if not bool(torch.isfinite(total).all()):
            raise ValueError(
                f"The inputs of experts in {self.layer.name} held NaN or infinite values; check the model and the "
                "data."
            )
        return total / tokens[:, None, None]


@dataclass(frozen=True)
class SharedOptions:
    """Candidates of the shared expert of one layer, which every token visits, with the weight of its gate if any.

    Attributes:
        layer: The sparse layer.
        linears: Name of a linear inside the shared expert -> its options; None leaves the weight unchanged.
    """

    layer: MoELayer
    linears: Mapping[str, Sequence[Stored | None]]

    def changes(self, hidden: Tensor) -> dict[str, Tensor]:
        """(K,) squared norms for every linear on some tokens, one linear at one option at a time."""
        expert, row = self.layer.shared, self.layer.architecture
        assert expert is not None
        gate: Any = getattr(self.layer.block, row.shared_gate) if row.shared_gate else None
        weight = 1.0 if gate is None else torch.sigmoid(gate(hidden)).double()
        out, found = expert(hidden), {}
        for name, options in self.linears.items():
            found[name] = torch.zeros(len(options), dtype=torch.float64, device=hidden.device)
            for k, option in enumerate(options):
                if option is not None:
                    rounded = {f"{name}.weight": option.dequantize(hidden.dtype).to(hidden.device)}
                    changed = functional_call(expert, rounded, (hidden,))
                    found[name][k] = ((changed - out).double() * weight).square().sum()
        return found


@torch.no_grad()
def layer_output_errors(
    model: nn.Module,
    options: Mapping[int, ExpertOptions],
    batches: Iterable[tuple[Tensor, Tensor]],
    shared: Mapping[int, SharedOptions] | None = None,
) -> tuple[dict[int, Tensor], dict[int, dict[str, Tensor]]]:
    """Squared L2 norms of the change of a layer's output, float64, for experts and for linears of shared experts.

    One projection (gate, up or down) of one expert is at one of its options, everything else is the full model.
    An expert changes its layer's output by its routing weight times the change of its own, so that one grouped
    pass per projection and option covers every expert of a layer.

    Args:
        model: The full model.
        options: Sparse layer -> its experts' options.
        batches: Token ids (batch, length), and a mask of the same shape, true for tokens that count.
        shared: Sparse layer -> options of its shared expert.

    Returns:
        Sparse layer -> (experts, 3, K); sparse layer -> linear of its shared expert -> (K,).
    """
    shared = shared or {}
    totals = {
        index: torch.zeros(
            layer.layer.num_experts,
            len(layer.layer.architecture.kinds),
            layer.num_options,
            dtype=torch.float64,
        )
        for index, layer in options.items()
    }
    shared_totals: dict[int, dict[str, Tensor]] = {index: {} for index in shared}
    chosen = torch.zeros(0)
    device = next(model.parameters()).device

    def watch(index: int) -> Callable[[Tensor, Routing], None]:
        def note(hidden: Tensor, routing: Routing) -> None:
            if index in options:
                totals[index] += _changes(options[index], hidden, routing).cpu()
            if index in shared:
                for name, squares in shared[index].changes(hidden).items():
                    known = shared_totals[index].get(name)
                    shared_totals[index][name] = squares.cpu() if known is None else known + squares.cpu()

        return note

    with ExitStack() as undo:
        for index in options.keys() | shared.keys():
            layer = options[index].layer if index in options else shared[index].layer
            undo.enter_context(watch_decisions(layer, watch(index), lambda: chosen))
        for tokens, mask in batches:
            chosen = mask.reshape(-1).to(device)
            model(tokens.to(device), use_cache=False)
    return totals, shared_totals


def _changes(options: ExpertOptions, hidden: Tensor, routing: Routing) -> Tensor:
    """(experts, 3, K) squared norms on some tokens."""
    layer = options.layer
    pairs = ExpertPairs.build(routing.indices, layer.num_experts)
    weight = routing.weights.reshape(-1)[pairs.order].double()
    seen = hidden.index_select(0, pairs.tokens)
    own = options.own()
    rise = _rise(seen, pairs, own)
    inner = own.activate(rise)
    out = grouped_linear(inner, own.down, pairs.ends)
    kinds = len(layer.architecture.kinds)
    inside = rise.shape[1] // (kinds - 1)
    result = torch.zeros(
        layer.num_experts, kinds, options.num_options, dtype=torch.float64, device=hidden.device
    )

    def note(part: int, k: int, changed: Tensor) -> None:
        squares = (changed - out).double().square().sum(dim=1) * weight.square()
        result[:, part, k].index_add_(0, pairs.experts, squares)

    for k in range(options.num_options):
        if options.up[k] is None:
            continue
        everywhere = np.full((layer.num_experts, kinds), k, dtype=np.int64)
        rounded = options.decode(PlacedChoices.of(everywhere, options.device))
        moved = _rise(seen, pairs, rounded)
        for part in range(kinds - 1):
            columns = slice(part * inside, (part + 1) * inside)
            mixed = rise.clone()
            mixed[:, columns] = moved[:, columns]
            note(part, k, grouped_linear(own.activate(mixed), own.down, pairs.ends))
        note(kinds - 1, k, grouped_linear(inner, rounded.down, pairs.ends))
    return result


def _rise(seen: Tensor, pairs: ExpertPairs, weights: ExpertWeights) -> Tensor:
    out = grouped_linear(seen, weights.up, pairs.ends)
    return out if weights.up_bias is None else out + weights.up_bias[pairs.experts]


def expert_sensitivity(
    loaded: LoadedModel,
    gates: ExpertGates,
    head: Head,
    tokens: Tensor,
    mask: Tensor,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Predicted KL per token of removing each expert alone: one (experts,) float64 tensor per layer.

    At the full model the KL has no first-order term; its second-order term is the Fisher form. With y drawn from
    the model and c_t the first-order change of log p(y) when the expert leaves the router at token t (the runner-up
    replaces it, weights are normalised anew), the KL of removing it is about E[c^2] / 2. Squares are summed
    token by token, as if an expert's effects on different tokens were independent: a few sequences suffice.

    Args:
        loaded: The full model.
        gates: Gates on its experts, in ``deployed`` mode.
        head: Its output layer.
        tokens: (sequences, length) ids.
        mask: (sequences, length) booleans: the positions whose predictions count.
        seed: Seed of the tokens that the model draws.
        on_progress: Called with (sequences done, all sequences).
    """
    generator = torch.Generator(device=loaded.device).manual_seed(seed)
    total = torch.zeros(gates.num_gates, dtype=torch.float64)
    counted = 0
    gates.use_squares(True)
    try:
        for index in range(len(tokens)):
            row, used = (part[index : index + 1].to(loaded.device) for part in (tokens, mask))
            used = used[:, :-1]
            if not used.any():
                continue
            keep = torch.ones(gates.num_gates, dtype=torch.float64, requires_grad=True)
            gates.set_gates(keep)
            hidden = loaded.layout.final_hidden(loaded.model, row)[:, :-1]
            drawn = sample_tokens(hidden.detach()[0], head, generator)[None]
            loss = chunked_cross_entropy(hidden, head, drawn, used, reduction="sum")
            (squares,) = torch.autograd.grad(loss, keep)
            total += squares
            counted += int(used.sum())
            if on_progress is not None:
                on_progress(index + 1, len(tokens))
    finally:
        gates.use_squares(False)
        gates.clear()
    return list(torch.split(total / (2 * max(counted, 1)), list(gates.counts)))
