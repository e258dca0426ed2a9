"""What rounding one projection of one expert does to the output of its layer, for all of them at once.

Shared experts are experts that every token visits, with the weight of their gate if they have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from rco.formats.base import Stored
from rco.models.moe.experts import ExpertPairs, ExpertWeights
from rco.models.moe.grouped import grouped_linear
from rco.models.moe.layers import MoELayer
from rco.models.moe.options import ExpertOptions, PlacedChoices
from rco.models.moe.routing import route

__all__ = ["SharedOptions", "layer_output_errors"]


@dataclass(frozen=True)
class SharedOptions:
    """Candidates of the shared expert of one layer.

    Attributes:
        layer: The sparse layer.
        linears: Name of a linear inside the shared expert -> its options; None leaves the weight as it is.
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
    pass per projection and option serves every expert of a layer.

    Args:
        model: The full model.
        options: Sparse layer -> its experts' options.
        batches: Token ids (batch, length), and a mask of the same shape that says which tokens count.
        shared: Sparse layer -> options of its shared expert.

    Returns:
        Sparse layer -> (experts, 3, K); sparse layer -> linear of its shared expert -> (K,).
    """
    shared = shared or {}
    totals = {
        index: torch.zeros(layer.layer.num_experts, 3, layer.num_options, dtype=torch.float64)
        for index, layer in options.items()
    }
    shared_totals: dict[int, dict[str, Tensor]] = {index: {} for index in shared}
    chosen = torch.zeros(0)
    device = next(model.parameters()).device

    def watch(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before_block(_: nn.Module, args: tuple[Any, ...]) -> None:
            hidden = args[0].reshape(-1, args[0].shape[-1])[chosen]
            if index in options:
                totals[index] += _changes(options[index], hidden).cpu()
            if index in shared:
                for name, squares in shared[index].changes(hidden).items():
                    known = shared_totals[index].get(name)
                    shared_totals[index][name] = squares.cpu() if known is None else known + squares.cpu()

        return before_block

    with ExitStack() as undo:
        for index in options.keys() | shared.keys():
            layer = options[index].layer if index in options else shared[index].layer
            undo.callback(layer.block.register_forward_pre_hook(watch(index)).remove)
        for tokens, mask in batches:
            chosen = mask.reshape(-1).to(device)
            model(tokens.to(device), use_cache=False)
    return totals, shared_totals


def _changes(options: ExpertOptions, hidden: Tensor) -> Tensor:
    """(experts, 3, K) squared norms on some tokens."""
    layer = options.layer
    routing = route(layer.rule, layer.logits(hidden), layer.correction)
    pairs = ExpertPairs.build(routing.indices, layer.num_experts)
    weight = routing.weights.reshape(-1)[pairs.order].double()
    seen = hidden.index_select(0, pairs.tokens)
    own = options.own()
    rise = _rise(seen, pairs, own)
    inner = own.activate(rise)
    out = grouped_linear(inner, own.down, pairs.ends)
    half = rise.shape[1] // 2
    result = torch.zeros(layer.num_experts, 3, options.num_options, dtype=torch.float64, device=hidden.device)

    def note(part: int, k: int, changed: Tensor) -> None:
        squares = (changed - out).double().square().sum(dim=1) * weight.square()
        result[:, part, k].index_add_(0, pairs.experts, squares)

    for k in range(options.num_options):
        if options.up[k] is None:
            continue
        everywhere = np.full((layer.num_experts, 3), k, dtype=np.int64)
        rounded = options.decode(PlacedChoices.of(everywhere, options.device))
        moved = _rise(seen, pairs, rounded)
        for part, columns in ((0, slice(0, half)), (1, slice(half, None))):
            mixed = rise.clone()
            mixed[:, columns] = moved[:, columns]
            note(part, k, grouped_linear(own.activate(mixed), own.down, pairs.ends))
        note(2, k, grouped_linear(inner, rounded.down, pairs.ends))
    return result


def _rise(seen: Tensor, pairs: ExpertPairs, weights: ExpertWeights) -> Tensor:
    out = grouped_linear(seen, weights.up, pairs.ends)
    return out if weights.up_bias is None else out + weights.up_bias[pairs.experts]
