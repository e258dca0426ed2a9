"""Experts of architectures without a table row, read off the module tree and verified by running them.

transformers keeps the experts of a layer as stacked matrices in one module, called with hidden states, the chosen
experts and their weights. A few of a layer's experts are run on random states, and the same is computed from
their matrices; experts for which the two differ are not touched.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rco.models.layout import text_config
from rco.models.moe.expert_pairs import ExpertPairs, expert_weights, pair_outputs
from rco.models.moe.layers import MoEArchitecture, MoELayer, stock_class
from rco.models.moe.replay import FoundRule, find_rule
from rco.models.moe.routing import RoutingRule

__all__ = ["UnreadExperts", "find_layers"]

_TOKENS, _CHECKED = 7, 3  # tokens and experts of a check
_TOLERANCE = 1e-4  # of the outputs, relative
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PICKED = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_ARGUMENTS = 4  # the module itself, hidden states, the chosen experts, their weights
_STORED = re.compile(r"\.0\.(\w+)\.weight$")


@dataclass(frozen=True)
class UnreadExperts:
    """Stacked matrices that are left unchanged.

    Attributes:
        name: The parameter.
        weight: Its values.
        reason: Reason why they are left.
    """

    name: str
    weight: Tensor
    reason: str


def find_layers(model: nn.Module) -> tuple[list[MoELayer], list[UnreadExperts]]:
    """The sparse layers of a model whose experts were verified, and the stacked matrices of all others."""
    layers: list[MoELayer] = []
    unread: list[UnreadExperts] = []
    rows: dict[tuple[object, ...], _Facts | str] = {}
    for name, block in model.named_modules():
        for child, experts in block.named_children():
            stacks = _stacks(experts)
            if not stacks:
                continue
            place = f"{name}.{child}" if name else child
            shapes = tuple((key, tuple(value.shape)) for key, value in stacks.items())
            # Routers of one architecture may differ from layer to layer.
            routers = tuple(type(other) for other in block.children())
            kind = (type(experts), type(block), child, shapes, routers)
            if kind not in rows:
                rows[kind] = _facts(model, place, block, child, experts)
            found = rows[kind]
            if isinstance(found, str):
                unread += [UnreadExperts(f"{place}.{key}", value, found) for key, value in stacks.items()]
            else:
                layers.append(_layer(len(layers), name, block, experts, found, text_config(model.config)))
    return layers, unread


def _stacks(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of stacked matrices in a module that is named after experts, or whose parameters are.

    Matrices of several experts below each other are stacked, too.
    """
    named = "expert" in type(module).__name__.lower() and not isinstance(module, nn.Linear)
    found: dict[str, Tensor] = {
        name: value
        for name, value in module.named_parameters(recurse=False)
        if value.is_floating_point()
        and min(value.shape[-2:], default=0) > 1
        and (value.ndim == 3 or (named and value.ndim == 2 and name != "weight" and "bias" not in name))
    }
    return found if named or {"gate_up_proj", "down_proj"} <= found.keys() else {}


@dataclass(frozen=True)
class _Facts:
    """What layers of one kind have in common."""

    architecture: MoEArchitecture
    rule: RoutingRule | None
    obstacle: str  # reason why the rule is not known


def _facts(model: nn.Module, place: str, block: nn.Module, child: str, experts: nn.Module) -> _Facts | str:
    """Facts about the experts of a layer, or the reason why they cannot be used."""
    own = dict(experts.named_parameters(recurse=False))
    gated = getattr(experts, "has_gate", True)
    rising = "gate_up_proj" if gated else "up_proj"
    up, down = own.get(rising), own.get("down_proj")
    if up is None or down is None:
        return f"{type(experts).__name__} does not hold {rising} and down_proj"
    if up.ndim != 3 or not hasattr(experts, "_apply_gate" if gated else "act_fn"):
        return f"{type(experts).__name__} is not a stack of plain experts"
    if getattr(experts, "has_post_expert_norm", False) or up.shape[0] != down.shape[0]:
        return f"{type(experts).__name__} computes more than plain experts"
    if len(inspect.signature(_plain_forward(experts)).parameters) < _ARGUMENTS:
        return f"{type(experts).__name__} is not called with the chosen experts and their weights"
    interleaved = not getattr(experts, "is_concatenated", True)
    if not up.is_meta:
        error = _difference(experts)
        if error > _TOLERANCE:
            return f"the matrices of {type(experts).__name__} do not reproduce its output (error {error:.1e})"
    projections, separable = _stored(model, place, (rising, "down_proj"))
    stock = stock_class(type(model))
    text = text_config(model.config)
    count = int(up.shape[0])
    # Layers of a pruned model may have fewer experts than the configuration's number, which is the largest.
    most = max(getattr(text, "num_experts_per_layer", None) or (count,))
    field = next((field for field in _COUNTS if getattr(text, field, None) == most), "")
    found: FoundRule | str = "its configuration does not name the number of experts"
    if field:
        found = find_rule(block, child, count, text)
    known = found if isinstance(found, FoundRule) else None
    row = MoEArchitecture(
        model_type=str(text.model_type),
        causal_lm=f"{stock.__module__}:{stock.__name__}",
        count_field=field,
        router=known.router if known else _router(block, child, count),
        experts=child,
        correction=known.correction if known else None,
        float32_router=known is not None and known.float32,
        casts_weights=known is None or known.casts,
        projections=projections,
        interleaved=interleaved,
        separable=separable,
        replayed=True,
    )
    return _Facts(row, known.rule if known else None, found if isinstance(found, str) else "")


def _plain_forward(experts: nn.Module) -> Any:
    """The class's own forward; the one that chooses among implementations has no named arguments."""
    return inspect.unwrap(type(experts).forward)


@torch.no_grad()
def _difference(experts: nn.Module) -> float:
    """Relative difference between a few experts' outputs and those computed from their matrices."""
    few, count = copy.copy(experts), int(experts.down_proj.shape[0])  # type: ignore[index]
    kept = min(count, _CHECKED)
    few._parameters = {
        name: None if value is None else nn.Parameter(_first(value, count, kept), requires_grad=False)
        for name, value in experts._parameters.items()
    }
    few._buffers = {
        name: None if value is None else _first(value, count, kept)
        for name, value in experts._buffers.items()
    }
    few._forward_pre_hooks, few._forward_hooks = type(few._forward_pre_hooks)(), type(few._forward_hooks)()
    few.num_experts = kept  # type: ignore[assignment]
    weights = expert_weights(few)
    generator = torch.Generator().manual_seed(0)
    device = weights.up.device
    hidden = torch.randn(_TOKENS, weights.up.shape[1], generator=generator).to(device)
    picks = torch.stack([torch.randperm(kept, generator=generator)[:2] for _ in range(_TOKENS)]).to(device)
    shares = torch.rand(picks.shape, generator=generator).to(device)
    try:
        expected = few(hidden, picks, shares)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return torch.inf
    pairs = ExpertPairs.build(picks, kept)
    outputs = pairs.unsort(pair_outputs(hidden, pairs, weights)).view(*picks.shape, -1)
    found = (outputs * shares.unsqueeze(-1)).sum(dim=1)
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def _first(value: Tensor, count: int, kept: int) -> Tensor:
    cut = value[:kept] if value.ndim and value.shape[0] == count else value
    return cut.detach().float() if cut.is_floating_point() else cut.detach()


def _router(block: nn.Module, child: str, count: int) -> str:
    """Name of the module beside the experts that holds one row for each of them; empty if there is none."""
    for name, module in block.named_children():
        if name == child or "shared" in name:
            continue
        if any(value.ndim == 2 and value.shape[0] == count for value in module.parameters()):
            return name
    return ""


def _stored(model: nn.Module, place: str, stacks: tuple[str, str]) -> tuple[tuple[str, ...], bool]:
    """Names of an expert's projections in checkpoints, and whether checkpoints hold experts one by one."""
    gated = stacks[0] == "gate_up_proj"
    plain = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return plain, False
    experts: Any = model.get_submodule(place)
    names = {key: f"{place}.{key}" for key in stacks}
    state = {names[key]: torch.empty(getattr(experts, key).shape, device="meta") for key in names}
    stored = revert_weight_conversion(model, state)  # type: ignore[arg-type]
    found = [match[1] for key in stored if (match := _STORED.search(key))]
    if len(found) != len(plain):
        return plain, False
    # Both halves of the first tensor come before the second.
    (last,) = [name for name in found if name in ("down_proj", "w2")] or [found[-1]]
    first = [name for name in found if name != last]
    if set(found) == {"w1", "w2", "w3"}:
        return ("w1", "w3", "w2"), True
    if set(found) == set(plain):
        return plain, True
    return (*first, last), True


def _layer(
    index: int,
    name: str,
    block: nn.Module,
    experts: nn.Module,
    facts: _Facts,
    config: Any,
) -> MoELayer:
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    row = facts.architecture
    router = block.get_submodule(row.router)
    count = int(experts.down_proj.shape[0])  # type: ignore[index]
    picked = _setting((router, block, config), _PICKED)
    return MoELayer(
        index,
        int(numbers[-1]) if numbers else index,
        name,
        block,
        router,
        experts,
        count,
        facts.rule,
        row,
        picked,
        facts.obstacle,
    )


def _setting(sources: Sequence[Any], names: Sequence[str]) -> int:
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 1
