"""Mixture-of-experts layers: one view of a layer for every architecture.

Everything else that deals with experts (gates, scores, physical pruning, export) takes the location of
routers and experts and the routing rule from this module; no other module refers to an architecture by name.
Architectures without a table row are read off the module tree (:mod:`rco.models.moe.expert_discovery`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rco.models.layout import text_config
from rco.models.moe.routing import RoutingRule

__all__ = [
    "CHOSEN_GROUPS",
    "GROUP_COUNTS",
    "MOE_ARCHITECTURES",
    "PROJECTIONS",
    "MoEArchitecture",
    "MoELayer",
    "Projection",
    "UnsupportedMoEError",
    "merge_groups",
    "moe_architecture",
    "moe_layers",
    "named_class",
    "set_num_experts",
    "stock_class",
    "stored_names",
]

RoutingKind = Literal["softmax_topk", "topk_softmax", "sigmoid_topk"]
Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
GROUP_COUNTS = ("n_group", "num_group", "num_expert_group")
CHOSEN_GROUPS = "topk_group"
_OWN_PREFIXES = re.compile("^(Unfused|Pruned)+")  # of classes in checkpoints


class UnsupportedMoEError(ValueError):
    """The model has no experts, or its architecture is not in the table."""


@dataclass(frozen=True)
class MoEArchitecture:
    """Location of the experts and routing rule of one architecture: a table row, or found in a model.

    Attributes:
        model_type: ``config.model_type`` of the (text) model.
        causal_lm: ``module:class`` of the stock causal language model.
        count_field: Configuration field with the number of routed experts.
        routing: ``softmax_topk`` (softmax over all, then top-k), ``topk_softmax`` (top-k, then softmax over
            the selected) or ``sigmoid_topk`` (independent scores, a correction bias for the choice alone).
        router: Path in the sparse block of the module that holds the router's weight.
        experts: Attribute of the experts in the sparse block.
        shared: Attribute of the expert that every token visits, if the architecture has one.
        shared_gate: Attribute of the sigmoid gate on the shared expert, if there is one.
        correction: Path in the sparse block of a bias that takes part in the choice but not in the weights, if any.
        float32_router: The router multiplies in float32 for any dtype of the model.
        always_renormalises: Selected weights are made to sum to one without a configuration switch.
        casts_weights: Routing weights are cast to the type of hidden states before they multiply expert outputs.
        projections: Names of an expert's gate, up and down projection in checkpoints; of up and down alone for
            experts without a gate.
        interleaved: Rows of gate and up projection alternate in the stacked tensor, instead of following each
            other.
        stored_block: Name of the sparse block in checkpoints, if it differs from the model's.
        separable: Checkpoints of the stock model may store every expert separately.
        replayed: The routing rule was found by replaying decisions: what the router returns is not known, only what
            the experts receive.
    """

    model_type: str
    causal_lm: str
    count_field: str
    routing: RoutingKind = "softmax_topk"
    router: str = "gate"
    experts: str = "experts"
    shared: str | None = None
    shared_gate: str | None = None
    correction: str | None = None
    float32_router: bool = False
    always_renormalises: bool = False
    casts_weights: bool = True
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    interleaved: bool = False
    stored_block: str | None = None
    separable: bool = True
    replayed: bool = False

    @property
    def kinds(self) -> tuple[Projection, ...]:
        """Projections of an expert: gate, up and down, or up and down alone."""
        return PROJECTIONS[-len(self.projections) :]

    @property
    def stacks(self) -> tuple[str, str]:
        """Parameters that hold a layer's experts: gate and up together (or up alone), and down."""
        return ("gate_up_proj" if "gate" in self.kinds else "up_proj"), "down_proj"

    @property
    def class_name(self) -> str:
        """Name of the stock causal language model class."""
        return self.causal_lm.partition(":")[2]


def _row(name: str, camel: str, count: str, **extra: Any) -> MoEArchitecture:
    return MoEArchitecture(
        name, f"transformers.models.{name}.modeling_{name}:{camel}ForCausalLM", count, **extra
    )


_QWEN_SHARED = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}
_MIXTRAL = {
    "always_renormalises": True, "casts_weights": False,
    "projections": ("w1", "w3", "w2"), "stored_block": "block_sparse_moe",
}  # fmt: skip
_GPT_OSS = {"routing": "topk_softmax", "router": "router", "interleaved": True, "separable": False}
_FLOAT32 = {"shared": "shared_experts", "float32_router": True, "casts_weights": False}
_SIGMOID = {"routing": "sigmoid_topk", "correction": "gate.e_score_correction_bias", **_FLOAT32}

MOE_ARCHITECTURES: dict[str, MoEArchitecture] = {
    row.model_type: row
    for row in (
        _row("olmoe", "Olmoe", "num_experts"),
        _row("qwen2_moe", "Qwen2Moe", "num_experts", **_QWEN_SHARED),
        _row("qwen3_moe", "Qwen3Moe", "num_experts"),
        _row("qwen3_next", "Qwen3Next", "num_experts", **_QWEN_SHARED),
        _row("mixtral", "Mixtral", "num_local_experts", **_MIXTRAL),
        _row("deepseek_v2", "DeepseekV2", "n_routed_experts", **_FLOAT32),
        _row("deepseek_v3", "DeepseekV3", "n_routed_experts", **_SIGMOID),
        _row("glm4_moe", "Glm4Moe", "n_routed_experts", **_SIGMOID),
        _row("gpt_oss", "GptOss", "num_local_experts", **_GPT_OSS),
    )
}


@dataclass(frozen=True)
class MoELayer:
    """One sparse layer of a model, the same view for every architecture.

    Attributes:
        index: Position among the model's sparse layers (dense layers are not counted).
        decoder_index: Position of the decoder layer in the model.
        name: Module path of the sparse block.
        block: The sparse block.
        router: The module that holds the router's weight, one row per expert.
        experts: Its experts: one module with 3-D tensors (fused) or an ``nn.ModuleList`` (unfused).
        num_experts: Experts in this layer.
        rule: The router's rule from logits to choice and weights; None if it is not known.
        architecture: The table row, or what was found in the model.
        picked: Experts that each token visits, where the rule is not known.
        obstacle: Reason why the rule is not known.
    """

    index: int
    decoder_index: int
    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    rule: RoutingRule | None
    architecture: MoEArchitecture
    picked: int = 0
    obstacle: str = ""

    @property
    def top_k(self) -> int:
        """Experts that each token visits; also the fewest that a layer may keep."""
        return self.picked if self.rule is None else self.rule.top_k

    @property
    def known_rule(self) -> RoutingRule:
        """The router's rule.

        Raises:
            UnsupportedMoEError: The rule is not known, so experts can be quantized but not removed or scored.
        """
        if self.rule is None:
            raise UnsupportedMoEError(
                f"The routing rule of {self.name} ({self.architecture.model_type}) is not known, because "
                f"{self.obstacle}: its experts can be quantized, but not removed or scored."
            )
        return self.rule

    @property
    def gate(self) -> nn.Module:
        """The child of the block that chooses the experts: the router, or the module around it."""
        child: nn.Module = getattr(self.block, self.architecture.router.partition(".")[0])
        return child

    @property
    def experts_name(self) -> str:
        """Module path of the experts, which the names of their matrices begin with."""
        return f"{self.name}.{self.architecture.experts}"

    @property
    def stored_name(self) -> str:
        """Name of the sparse block in checkpoints."""
        parent, _, own = self.name.rpartition(".")
        return f"{parent}.{self.architecture.stored_block or own}"

    @property
    def shared(self) -> nn.Module | None:
        """The expert that every token visits, if there is one."""
        name = self.architecture.shared
        return getattr(self.block, name, None) if name else None

    @property
    def fused(self) -> bool:
        """Whether the experts are 3-D tensors of one module."""
        return not isinstance(self.experts, nn.ModuleList)

    @property
    def correction(self) -> Tensor | None:
        """The bias that takes part in the choice but not in the weights, if the router has one."""
        path = self.architecture.correction
        if path is None:
            return None
        owner, _, name = path.rpartition(".")
        found: Tensor = getattr(self.block.get_submodule(owner), name)
        return found

    @property
    def constants(self) -> list[Tensor]:
        """Tensors that add a constant per expert to the choice: a bias, a correction, or none."""
        found = (getattr(self.router, "bias", None), self.correction)
        return [value for value in found if isinstance(value, Tensor)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Router logits (tokens, experts) of flattened hidden states (tokens, width), as the model forms them."""
        weight, bias = self.router.weight, getattr(self.router, "bias", None)
        assert isinstance(weight, Tensor)
        if self.architecture.float32_router and weight.dtype != torch.float64:
            return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        return F.linear(hidden, weight, bias)


def moe_architecture(config: Any) -> MoEArchitecture:
    """The table row of a configuration (the text part of it, for models with several parts).

    Raises:
        UnsupportedMoEError: The model type is not in the table.
    """
    text = text_config(config)
    row = MOE_ARCHITECTURES.get(text.model_type)
    if row is None:
        raise UnsupportedMoEError(
            f"model type {text.model_type!r} has no known mixture-of-experts layout; "
            f"supported are {', '.join(sorted(MOE_ARCHITECTURES))}"
        )
    return row


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The sparse layers of a model, in order; dense layers between or before them are skipped.

    Raises:
        UnsupportedMoEError: The architecture is unknown, or no layer of the model has experts.
    """
    config: Any = model.config
    text = text_config(config)
    if text.model_type not in MOE_ARCHITECTURES:
        from rco.models.moe.expert_discovery import find_layers

        layers, unread = find_layers(model)
        if not layers:
            reason = f": {unread[0].reason}" if unread else ""
            raise UnsupportedMoEError(
                f"This {text.model_type} model has no experts that can be compressed{reason}; pass a mixture of "
                f"experts, such as {', '.join(sorted(MOE_ARCHITECTURES))}."
            )
        return layers
    row = moe_architecture(config)
    found: list[MoELayer] = []
    for name, block in model.named_modules():
        router, experts = getattr(block, row.router, None), getattr(block, row.experts, None)
        if isinstance(router, nn.Module) and isinstance(experts, nn.Module):
            found.append(_layer(len(found), name, block, router, experts, text, row))
    if not found:
        raise UnsupportedMoEError(
            f"no layer of this {text.model_type} model has a router and experts "
            f"(looked for children {row.router!r} and {row.experts!r}); every layer is dense"
        )
    return found


def stored_names(model: nn.Module) -> Callable[[str], str]:
    """Map from a model's tensor names to those in its checkpoints, which differ if a block is renamed."""
    config: Any = getattr(model, "config", None)
    text = text_config(config)
    row = MOE_ARCHITECTURES.get(str(getattr(text, "model_type", None)))
    if row is None or row.stored_block is None:
        return lambda name: name
    renamed = {layer.name: layer.stored_name for layer in moe_layers(model)}
    blocks = re.compile("|".join(rf"^{re.escape(name)}(?=\.)" for name in renamed))
    return lambda name: blocks.sub(lambda found: renamed[found[0]], name)


def set_num_experts(config: Any, count: int, row: MoEArchitecture) -> None:
    """Write the number of routed experts into the field that the architecture reads."""
    setattr(text_config(config), row.count_field, int(count))


def merge_groups(place: Any) -> None:
    """Set the numbers of groups that a configuration or a router names to one."""
    for name in (*GROUP_COUNTS, CHOSEN_GROUPS):
        if vars(place).get(name) is not None:
            setattr(place, name, 1)


def stock_class(cls: type) -> type:
    """The class of transformers that a model's class is, or is made of."""
    return next((base for base in cls.__mro__ if base.__module__.startswith("transformers.")), cls)


def named_class(model_type: str, architectures: Sequence[str] | None) -> type:
    """The class of transformers for a checkpoint, from its model type and the classes that its config names."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    bare = [_OWN_PREFIXES.sub("", name) for name in architectures or ()]
    name = next((each for each in bare if hasattr(transformers, each)), None)
    found: type = getattr(transformers, name or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return found


def _layer(
    index: int,
    name: str,
    block: nn.Module,
    router: nn.Module,
    experts: nn.Module,
    config: Any,
    row: MoEArchitecture,
) -> MoELayer:
    weight: Any = router.weight
    count = int(weight.shape[0])
    held = len(experts) if isinstance(experts, nn.ModuleList) else int(experts.num_experts)  # type: ignore[arg-type]
    if held != count:
        raise UnsupportedMoEError(f"{name} has a router for {count} experts but holds {held}")
    # The number of the decoder layer is the last number of the path: layers.3.mlp -> 3.
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    rule = _rule(router, count, config, row)
    return MoELayer(
        index, int(numbers[-1]) if numbers else index, name, block, router, experts, count, rule, row
    )


def _rule(router: nn.Module, count: int, config: Any, row: MoEArchitecture) -> RoutingRule:
    def setting(*names: str, default: Any = None) -> Any:
        for source in (router, config):
            for field in names:
                value = getattr(source, field, None)
                if value is not None:
                    return value
        return default

    if row.routing == "softmax_topk":
        renormalises = row.always_renormalises or (
            # DeepSeek-V2 carries norm_topk_prob in its configuration, but its router never reads it.
            row.model_type != "deepseek_v2" and bool(setting("norm_topk_prob", default=False))
        )
        score, denominator = "softmax", "selected" if renormalises else "survivors"
    elif row.routing == "topk_softmax":
        score, denominator = "logit", "selected"
    else:
        score, denominator = "sigmoid", "selected" if setting("norm_topk_prob", default=True) else "none"

    grouped = row.routing == "sigmoid_topk" or setting("topk_method") == "group_limited_greedy"
    sizes = getattr(router, "group_sizes", None)  # a router that was pruned to groups of different sizes
    groups = int(setting("num_group", "n_group", default=1)) if grouped else 1
    if sizes is None:
        sizes = (count // groups,) * groups
    return RoutingRule(
        top_k=int(setting("top_k", "num_experts_per_tok")),
        score=score,  # type: ignore[arg-type]
        denominator=denominator,  # type: ignore[arg-type]
        scale=float(setting("routed_scaling_factor", default=1.0)) if row.float32_router else 1.0,
        group_sizes=tuple(int(size) for size in sizes),
        chosen_groups=int(setting("topk_group", default=1)) if grouped else 1,
    )
