"""Experts whose stacked weights are trained, by grouped products that the host does not wait for.

The implementations in transformers loop over the experts that some token visits, or copy the number of their tokens
to the host. Either way the host waits in every layer, and a step cannot be recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from rco.models.moe.expert_pairs import ExpertPairs, expert_weights, sorted_outputs
from rco.models.moe.gates import override_forward
from rco.models.moe.layers import MoELayer

__all__ = ["trained_experts"]


@contextmanager
def trained_experts(layers: Iterable[MoELayer]) -> Iterator[None]:
    """Run fused experts by grouped products that pass gradients to their weights; leaving restores the layers."""
    with ExitStack() as undo:
        for layer in layers:
            override_forward(layer.experts, _forward(layer), undo)
        yield


def _forward(layer: MoELayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(hidden: Tensor, indices: Tensor, routing_weights: Tensor) -> Tensor:
        weights = expert_weights(layer.experts, trained=True)
        pairs = ExpertPairs.build(indices, layer.num_experts)
        # Every pair has a row of its own: gradients of a token are then summed in one order, the same every time.
        spread = hidden.unsqueeze(1).expand(-1, indices.shape[1], -1).reshape(-1, hidden.shape[1])
        outputs = pairs.unsort(sorted_outputs(spread.index_select(0, pairs.order), pairs, weights))
        total = (outputs * routing_weights.reshape(-1, 1)).view(*indices.shape, -1).sum(dim=1)
        return total.to(hidden.dtype)

    return forward
