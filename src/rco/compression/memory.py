"""Peak memory of a search, computed from shapes and a short pass of one block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rco.compression.plan import CompressionPlan
from rco.formats.removed import REMOVED
from rco.formats.streaming import STREAM_SLOTS
from rco.losses import LOGITS_BYTES, chunk_length
from rco.models.capture import LoneBlockError, block_kinds, lone_block
from rco.models.embeddings import EMBEDDING_ROLE
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.expert_pairs import expert_weights
from rco.models.moe.gates import expert_gates
from rco.models.moe.layers import MoELayer, moe_layers
from rco.models.moe.linears import EXPERT_ROLE, ExpertLinear
from rco.models.precision import computing_in

__all__ = ["SearchMemory", "saved_bytes_per_token", "search_memory"]

_PROBE_TOKENS = 64
_FEWEST_TOKENS = 16
_PROBE_PRODUCTS = 2**31  # of a parameter with a token, in one block


@dataclass(frozen=True)
class SearchMemory:
    """Bytes on the model's device.

    Attributes:
        weights: Parameters that stay on the device: all but the linears with packed options alone.
        originals: Those linears; in host memory during a search on a GPU, on the device for the sensitivities.
        candidates: Packed options, or the buffers that they stream through.
        activations: Tensors kept for the backward pass.
        workspace: Dense weight and its gradient (of all experts of a layer), the loss's chunks of logits; on a GPU
            also fragmentation of the allocator.
    """

    weights: int
    originals: int
    candidates: int
    activations: int
    workspace: int

    @property
    def search(self) -> int:
        """Peak of a step, with the originals in host memory."""
        return self.weights + self.candidates + self.activations + self.workspace

    @property
    def peak(self) -> int:
        """Peak of a run: the sensitivities need the original weights as well."""
        return self.search + self.originals


def saved_bytes_per_token(
    loaded: LoadedModel, linears: Sequence[LinearInfo], dtype: torch.dtype, *, gated: bool = False
) -> float:
    """Bytes per token that autograd keeps for gradients of the given linears' weights, all blocks together.

    One block of every kind is run on a few tokens, so that a large model costs little more than a small one.

    Args:
        loaded: The model.
        linears: Linears whose weights require a gradient.
        dtype: Type of the computation.
        gated: Whether experts run under gates that require a gradient.

    Where a block cannot be run alone, the number is estimated from the shapes of the linears.
    """
    try:
        return _measured_bytes(loaded, linears, dtype, gated)
    except LoneBlockError:
        # Input and output of every linear that a token visits, and as much again for all else. The loss takes
        # logits in chunks, and rows of the embedding are the input of the first block.
        numbers = sum(
            (info.in_features + info.out_features)
            * (info.layer.top_k / info.layer.num_experts if isinstance(info, ExpertLinear) else 1)
            for info in linears
            if info.role not in ("head", EMBEDDING_ROLE)
        )
        return 2.0 * dtype.itemsize * numbers


def _measured_bytes(
    loaded: LoadedModel, linears: Sequence[LinearInfo], dtype: torch.dtype, gated: bool
) -> float:
    norm = loaded.layout.final_norm(loaded.model)
    layers = moe_layers(loaded.model) if gated else ()
    total = 0.0
    for index, count in block_kinds(loaded.model, loaded.layout):
        tokens = probe_tokens(loaded, index)
        with lone_block(loaded.model, loaded.layout, index, tokens=tokens, dtype=dtype) as lone:
            inside = set(lone.block.modules())
            weights: list[Any] = [
                i.module.weight for i in linears if i.role != EXPERT_ROLE and i.module in inside
            ]
            sparse = [layer.index for layer in layers if layer.decoder_index == index]
            with _open_gates(loaded, sparse) if sparse else nullcontext(), _wanting_gradients(weights):
                if index == 0:  # the embedding needs no gradient
                    total += _saved_bytes(lone, lone.held, tokens, lone.hidden) / tokens
                    count -= 1
                if count:
                    entering = lone.hidden.detach().requires_grad_(True)
                    total += count * _saved_bytes(lone, lone.held, tokens, entering) / tokens
    if norm is not None:
        with computing_in(norm, dtype):
            leaving = lone.hidden.detach().requires_grad_(True)
            total += _saved_bytes(norm, norm.parameters(), tokens, leaving) / tokens
    return total


def probe_tokens(loaded: LoadedModel, index: int) -> int:
    """Number of tokens for probing a block: fewer for a large one, to bound the work."""
    parameters = sum(p.numel() for p in loaded.layout.blocks(loaded.model)[index][1].parameters())
    return max(_FEWEST_TOKENS, min(_PROBE_TOKENS, _PROBE_PRODUCTS // max(parameters, 1)))


def _saved_bytes(
    work: Callable[[Tensor], Tensor], held: Iterable[Tensor], tokens: int, hidden: Tensor
) -> int:
    """Bytes that autograd keeps for ``work``, without ``held`` tensors and those that do not grow with tokens."""
    owned = {tensor.untyped_storage()._cdata for tensor in held}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned and tensor.numel() >= tokens:
            found[storage._cdata] = storage.nbytes()
        # Returned, so that its memory is not reused and counted twice; detached, because holding its graph leaks.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work(hidden)
    return sum(found.values())


@contextmanager
def _wanting_gradients(weights: Sequence[Tensor]) -> Iterator[None]:
    try:
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(False)


@contextmanager
def _open_gates(loaded: LoadedModel, layers: Sequence[int]) -> Iterator[None]:
    """Open all gates of these sparse layers, with gradients."""
    with expert_gates(loaded.model, only=layers) as gates:
        gates.set_gates(torch.ones(gates.num_gates, device=loaded.device, requires_grad=True))
        yield


def search_memory(
    loaded: LoadedModel,
    plan: CompressionPlan,
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
    if plan.removes_only:
        return _removal_memory(loaded, tokens, dtype, checkpointing)
    width = dtype.itemsize
    parameters = sum(p.numel() for p in loaded.model.parameters())
    own = sum(info.parameters for info in plan.packed_alone if info.role not in ("head", EMBEDDING_ROLE))
    per_linear = {
        info.name: sum(
            plan.format_of(info, option).memory_bytes(
                (info.out_features, info.in_features), info.weight.dtype
            )
            for option in plan.packed
            if plan.fits(info, option)
        )
        for info in plan.linears
    }
    candidates = sum(per_linear.values())
    if offload:
        fetched = (sum(per_linear[info.name] for info in members) for members in plan.fetched_together)
        candidates = STREAM_SLOTS * max(fetched, default=0)
    saved = int(saved_bytes_per_token(loaded, plan.linears, dtype, gated=bool(plan.experts)) * tokens)
    linears = [info for info in plan.linears if info.role != EXPERT_ROLE]
    largest = max((info.parameters for info in linears), default=0) * width
    widest = max((max(info.in_features, info.out_features) for info in linears), default=0)
    backward = largest + 4 * tokens * widest * width
    # A layer's experts are decoded and differentiated all at once.
    stack = 0
    for members in plan.fetched_together:
        first = members[0]
        if not isinstance(first, ExpertLinear):
            continue
        numbers = sum(info.parameters for info in members)
        stack = max(stack, numbers * width)
        held = numbers + _layer_backward(first.layer, tokens, probed=REMOVED in plan.options)
        backward = max(backward, held * width)
    activations, workspace = _at_the_peak(loaded, tokens, width, saved, backward, checkpointing)
    counted = SearchMemory(
        weights=(parameters - own) * width,
        originals=own * width,
        candidates=candidates,
        activations=activations,
        workspace=largest + stack + workspace,
    )
    return _with_unfilled(counted, loaded.device)


def _removal_memory(
    loaded: LoadedModel, tokens: int, dtype: torch.dtype, checkpointing: bool
) -> SearchMemory:
    """Count the memory of a search step for plans that only keep or remove experts."""
    width = dtype.itemsize
    saved = int(saved_bytes_per_token(loaded, (), dtype, gated=True) * tokens)
    backward = max(_layer_backward(layer, tokens, probed=True) for layer in moe_layers(loaded.model)) * width
    activations, workspace = _at_the_peak(loaded, tokens, width, saved, backward, checkpointing)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    return _with_unfilled(SearchMemory(parameters * width, 0, 0, activations, workspace), loaded.device)


def _with_unfilled(counted: SearchMemory, device: torch.device) -> SearchMemory:
    """Add fragmentation and the libraries' workspaces: about a GiB on a GPU, less for a small search."""
    unfilled = min(2**30, counted.search // 12) if device.type == "cuda" else 0
    return replace(counted, workspace=counted.workspace + unfilled)


def _layer_backward(layer: MoELayer, tokens: int, probed: bool) -> int:
    """Elements that a sparse layer's backward pass holds beside saved tensors and gradients of weights."""
    weights = expert_weights(layer.experts)
    inner, hidden = weights.down.shape[1:]
    # Every pair's output gradient, inner states and their gradients. The same for the probes of pruned experts:
    # half as many pairs (for a quarter of the experts pruned), and one per token.
    pairs = tokens * layer.top_k
    probes = (pairs // 2 + tokens) * (2 * hidden + 5 * inner) if probed else 0
    return int(pairs * (hidden + 4 * inner) + probes)


def _at_the_peak(
    loaded: LoadedModel, tokens: int, width: int, saved: int, backward: int, checkpointing: bool
) -> tuple[int, int]:
    """Bytes kept for the backward pass, and peak of the loss or of a layer's backward pass beside them."""
    head = loaded.layout.head(loaded.model).weight
    blocks = max(len(loaded.layout.blocks(loaded.model)), 1)
    states = tokens * head.shape[1] * width
    allowance = LOGITS_BYTES * (2 if loaded.device.type == "cuda" else 1)
    rows = min(chunk_length(head.shape[0], allowance=allowance), tokens)
    # Four buffers of float32 logits, and for a half type the gradient that multiplies the output layer.
    loss = rows * head.shape[0] * (16 + (width if width < 4 else 0)) + 3 * states
    if checkpointing:
        return blocks * states, max(loss, saved // blocks + backward)
    return saved, max(loss, backward)
