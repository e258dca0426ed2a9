"""What a search over packed options holds at its peak, counted from shapes and one short forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rco.backends.accounting import stored_bits
from rco.backends.plan import QuantizationPlan
from rco.compressors.streaming import STREAM_SLOTS
from rco.losses import LOGITS_BYTES, chunk_length
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe_linears import EXPERT_ROLE

__all__ = ["SearchMemory", "saved_bytes_per_token", "search_memory"]

_PROBE_TOKENS = 64


@dataclass(frozen=True)
class SearchMemory:
    """Bytes on the model's device.

    Attributes:
        weights: Parameters that stay on the device: all but the linears that have packed options.
        originals: Those linears; in host memory while a GPU searches, on the device for the sensitivities.
        candidates: Packed options, or the buffers that they stream through.
        activations: What the backward pass needs.
        workspace: Dense weight and its gradient, the loss's chunks of logits.
    """

    weights: int
    originals: int
    candidates: int
    activations: int
    workspace: int

    @property
    def search(self) -> int:
        """Peak of a step, the originals in host memory."""
        return self.weights + self.candidates + self.activations + self.workspace

    @property
    def peak(self) -> int:
        """Peak of a run: the sensitivities need the original weights as well."""
        return self.search + self.originals


def saved_bytes_per_token(loaded: LoadedModel, linears: Sequence[LinearInfo]) -> float:
    """Bytes per token that autograd keeps for gradients of the given linears' weights, all blocks together."""
    owned = {t.untyped_storage().data_ptr() for t in (*loaded.model.parameters(), *loaded.model.buffers())}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and tensor.numel() >= _PROBE_TOKENS:
            found[storage.data_ptr()] = storage.nbytes()
        # Kept, so that its memory is not counted twice; detached, because a result that holds its own graph leaks.
        return tensor.detach()

    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=loaded.device)
    weights: list[Any] = [info.module.weight for info in linears if info.role != EXPERT_ROLE]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = loaded.layout.final_hidden(loaded.model, ids)
        del hidden
    finally:
        for weight in weights:
            weight.requires_grad_(False)
    return sum(found.values()) / _PROBE_TOKENS


def search_memory(
    loaded: LoadedModel,
    plan: QuantizationPlan,
    *,
    tokens: int,
    dtype: torch.dtype,
    checkpointing: bool,
    offload: bool,
) -> SearchMemory:
    """Count the memory of a search step.

    Args:
        loaded: The model.
        plan: Its linears and their widths.
        tokens: Tokens per forward pass.
        dtype: Type of the computation.
        checkpointing: Whether blocks are computed again in the backward pass.
        offload: Whether packed options stay in host memory.
    """
    width = dtype.itemsize
    on_gpu = loaded.device.type == "cuda"
    parameters = sum(p.numel() for p in loaded.model.parameters())
    own = sum(info.parameters for info in plan.linears if info.role not in ("head", EXPERT_ROLE))
    per_linear = {
        info.name: sum(stored_bits(info, plan.scheme(info, w)) for w in plan.packed_widths) // 8
        for info in plan.linears
    }
    candidates = sum(per_linear.values())
    if offload:
        # Experts are chosen one by one, and stay.
        experts = {info.name for info in plan.linears if info.role == EXPERT_ROLE}
        streamed = [size for name, size in per_linear.items() if name not in experts]
        candidates += STREAM_SLOTS * max(streamed, default=0) - sum(streamed)
    head = loaded.layout.head(loaded.model).weight
    blocks = max(len(loaded.layout.blocks(loaded.model)), 1)
    # The probe computes in the type that the model has now.
    saved = int(saved_bytes_per_token(loaded, plan.linears) * tokens * width / loaded.dtype.itemsize)
    states = tokens * head.shape[1] * width
    rows = min(chunk_length(head.shape[0], allowance=LOGITS_BYTES * (2 if on_gpu else 1)), tokens)
    # Four buffers of float32 logits, and in a half type the slope that multiplies the output layer.
    loss = rows * head.shape[0] * (16 + (width if width < 4 else 0)) + 3 * states
    largest = max((info.parameters for info in plan.linears), default=0) * width
    widest = max((max(info.in_features, info.out_features) for info in plan.linears), default=0)
    backward = largest + 4 * tokens * widest * width
    activations = saved
    if checkpointing:
        inputs = blocks * states
        activations, loss = inputs, max(loss, saved // blocks + backward)
    return SearchMemory(
        weights=(parameters - own) * width,
        originals=own * width,
        candidates=candidates,
        activations=activations,
        workspace=largest + max(loss, backward),
    )
