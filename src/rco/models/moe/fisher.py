"""How much the model's own predictions change when one expert is left out, from gradients of the full model.

At the full model the KL has no first-order term; its second-order term is the Fisher form. With y drawn from the
model and c_t the first-order change of log p(y) when the expert leaves the router at token t (the next in line
steps in, weights are normalised anew), the KL of leaving it out is about E[c^2] / 2. Squares are summed token by
token: what one expert does to different tokens is taken as independent, so that a few sequences suffice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rco.losses import Head, chunked_cross_entropy, sample_tokens
from rco.models.loading import LoadedModel
from rco.models.moe.gates import ExpertGates

__all__ = ["expert_sensitivity"]


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
    """Predicted KL per token of leaving out each expert alone: one (experts,) float64 tensor per layer.

    Args:
        loaded: The full model.
        gates: Gates on its experts, in ``deployed`` mode.
        head: Its output layer.
        tokens: (sequences, length) ids.
        mask: (sequences, length) booleans: the positions whose predictions count.
        seed: Of the tokens that the model draws.
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
