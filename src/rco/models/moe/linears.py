"""The matrices of experts as separate linears, although the model keeps them stacked in one tensor.

Each expert has a gate, an up and a down projection. They get the names that checkpoints give them, so that plans,
candidates and exports use ``model.layers.3.mlp.experts.17.down_proj`` whatever the layout of the model in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rco.models.embeddings import embedding_info
from rco.models.layout import Layout, LinearInfo, text_config
from rco.models.moe.expert_discovery import UnreadExperts, find_layers
from rco.models.moe.layers import MOE_ARCHITECTURES, PROJECTIONS, MoELayer, Projection, moe_layers

__all__ = [
    "EXPERT_ROLE",
    "PROJECTIONS",
    "ExpertLinear",
    "Projection",
    "expert_linears",
    "expert_matrices",
    "model_linears",
    "original_stacks",
    "sparse_layers",
    "stacked_parameters",
    "unread_experts",
]

EXPERT_ROLE = "experts"


@dataclass(frozen=True, eq=False)
class ExpertLinear(LinearInfo):
    """One projection of one expert.

    Attributes:
        layer: Its sparse layer.
        expert: Index of the expert.
        projection: ``gate``, ``up`` or ``down``.
    """

    layer: MoELayer = field(kw_only=True)
    expert: int = field(kw_only=True)
    projection: Projection = field(kw_only=True)

    @property
    def weight(self) -> Tensor:
        """The weight as (out_features, in_features); a view of the stacked tensor where there is one."""
        experts: Any = self.layer.experts
        if not self.layer.fused:
            own: Tensor = experts[self.expert].get_parameter(f"{self.name.rpartition('.')[2]}.weight")
            return own.detach()
        return self.place(getattr(experts, self._stack).detach())

    @property
    def _stack(self) -> str:
        return self.layer.architecture.stacks[int(self.projection == "down")]

    def place(self, stacked: Tensor) -> Tensor:
        """Its part of a tensor of its layer's stacked matrices: a view (out_features, in_features)."""
        return expert_matrices(self.layer, stacked, self.projection == "down")[self.expert, self.part]

    def renumbered(self, number: int, projection: str | None = None) -> str:
        """Its name as another expert of its layer, and with another name of the projection."""
        return f"{self.layer.experts_name}.{number}.{projection or self.name.rpartition('.')[2]}"

    @property
    def stored_name(self) -> str:
        """Its name in a checkpoint."""
        return self.name.replace(self.layer.name, self.layer.stored_name, 1)

    @property
    def part(self) -> int:
        """Position among the matrices that are stacked together: 1 for an up that follows its gate."""
        return int(self.projection == "up" and "gate" in self.layer.architecture.kinds)

    @property
    def stored_in(self) -> str:
        """Entry of the state dict that holds the stacked tensor; its own where experts are separate modules."""
        if not self.layer.fused:
            return f"{self.name}.weight"
        return f"{self.layer.experts_name}.{self._stack}"


def sparse_layers(model: nn.Module) -> list[MoELayer]:
    """The sparse layers of a model; none for a dense one."""
    config: Any = model.config
    text = text_config(config)
    return moe_layers(model) if text.model_type in MOE_ARCHITECTURES else find_layers(model)[0]


def unread_experts(model: nn.Module) -> list[UnreadExperts]:
    """Stacked matrices that could not be verified, and are left unchanged."""
    config: Any = model.config
    return [] if text_config(config).model_type in MOE_ARCHITECTURES else find_layers(model)[1]


def original_stacks(layer: MoELayer) -> tuple[Tensor, Tensor]:
    """Views of a layer's weights: gate and up (experts, 2, inner, width), down (experts, 1, width, inner).

    Without a gate, up is (experts, 1, inner, width).
    """
    if not layer.fused:
        raise ValueError(
            f"{layer.name} keeps its experts as separate modules; load the model with the implementation in "
            "transformers (without remote code), which keeps them as stacked tensors."
        )
    up, down = (parameter.detach() for parameter in stacked_parameters(layer))
    return expert_matrices(layer, up, False), expert_matrices(layer, down, True)


def stacked_parameters(layer: MoELayer) -> tuple[nn.Parameter, nn.Parameter]:
    """The parameters that hold a layer's experts."""
    up, down = (layer.experts.get_parameter(name) for name in layer.architecture.stacks)
    return up, down


def expert_matrices(layer: MoELayer, stacked: Tensor, down: bool) -> Tensor:
    """A stacked parameter as (experts, parts, out, in), in any memory order of the architecture."""
    if getattr(layer.experts, "is_transposed", False):
        stacked = stacked.transpose(1, 2)
    if down or "gate" not in layer.architecture.kinds:
        return stacked.unsqueeze(1)
    count, rows, columns = stacked.shape
    if layer.architecture.interleaved:
        return stacked.view(count, rows // 2, 2, columns).transpose(1, 2)
    return stacked.view(count, 2, rows // 2, columns)


def expert_linears(layer: MoELayer) -> list[ExpertLinear]:
    """Every projection of every expert of a layer."""
    row, found = layer.architecture, []
    inside = f"{layer.name.rpartition('.')[2]}.{row.experts}"
    has_bias = bool(getattr(layer.experts, "has_bias", False))
    shapes = _projection_shapes(layer)
    for expert in range(layer.num_experts):
        for projection, own, (rows, columns) in zip(row.kinds, row.projections, shapes, strict=True):
            found.append(
                ExpertLinear(
                    name=f"{layer.experts_name}.{expert}.{own}",
                    module=layer.experts,
                    kind=f"experts.{own}",
                    role=EXPERT_ROLE,
                    block=layer.decoder_index,
                    path=f"{inside}.{expert}.{own}",
                    in_features=columns,
                    out_features=rows,
                    transposed=False,
                    bias=has_bias,
                    layer=layer,
                    expert=expert,
                    projection=projection,
                )
            )
    return found


def _projection_shapes(layer: MoELayer) -> list[tuple[int, int]]:
    """Rows and columns of the projections, which all experts of a layer have in common."""
    if layer.fused:
        up, down = original_stacks(layer)
        risen = [(up.shape[2], up.shape[3])] * up.shape[1]
        return [*risen, (down.shape[2], down.shape[3])]
    experts: Any = layer.experts
    weights = [experts[0].get_parameter(f"{own}.weight") for own in layer.architecture.projections]
    return [(weight.shape[0], weight.shape[1]) for weight in weights]


def model_linears(
    layout: Layout, model: nn.Module, *, include_head: bool = False, include_embedding: bool = False
) -> list[LinearInfo]:
    """Every linear of a model, block by block, the experts of a sparse layer after the others of its block.

    With ``include_head`` and ``include_embedding`` the output layer and the token embedding follow.
    """
    linears = layout.linears(model, include_head=include_head)
    if include_embedding:
        linears.append(embedding_info(layout, model))
    layers = sparse_layers(model)
    if not layers:
        return linears
    blocks: dict[int | None, list[LinearInfo]] = {}
    for info in linears:
        blocks.setdefault(info.block, []).append(info)
    for layer in layers:
        blocks.setdefault(layer.decoder_index, []).extend(expert_linears(layer))
    numbers = sorted(block for block in blocks if block is not None)
    outside = blocks.get(None, [])
    outer = [info for info in outside if info.role == "outer"]
    ends = [info for info in outside if info.role != "outer"]
    return [*outer, *(info for block in numbers for info in blocks[block]), *ends]
