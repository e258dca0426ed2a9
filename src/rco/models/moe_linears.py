"""The matrices of experts as linears of their own, though the model keeps them stacked in one tensor.

Each expert has a gate, an up and a down projection. They get the names that checkpoints give them, so that plans,
candidates and exports speak of ``model.layers.3.mlp.experts.17.down_proj`` whatever the model in memory looks like.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from rco.models.layout import Layout, LinearInfo
from rco.models.moe import MOE_ARCHITECTURES, MoELayer, moe_layers

__all__ = [
    "EXPERT_ROLE",
    "PROJECTIONS",
    "ExpertLinear",
    "Projection",
    "expert_linears",
    "model_linears",
    "original_stacks",
    "sparse_layers",
]

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
EXPERT_ROLE = "experts"


@dataclass(frozen=True, eq=False)
class ExpertLinear(LinearInfo):
    """One projection of one expert.

    Attributes:
        layer: Its sparse layer.
        expert: Which expert.
        projection: ``gate``, ``up`` or ``down``.
    """

    layer: MoELayer = field(kw_only=True)
    expert: int = field(kw_only=True)
    projection: Projection = field(kw_only=True)

    @property
    def weight(self) -> Tensor:
        """The weight as (out_features, in_features); a view of the stacked tensor."""
        up, down = original_stacks(self.layer)
        return down[self.expert, 0] if self.projection == "down" else up[self.expert, self.part]

    @property
    def part(self) -> int:
        """Position among the matrices that are stacked together: 1 for up, which follows gate."""
        return int(self.projection == "up")

    @property
    def stored_in(self) -> str:
        """Entry of the state dict that holds the stacked tensor."""
        tensor = "down_proj" if self.projection == "down" else "gate_up_proj"
        return f"{self.layer.name}.{self.layer.architecture.experts}.{tensor}"


def sparse_layers(model: nn.Module) -> list[MoELayer]:
    """The sparse layers of a model; none for a dense one."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return moe_layers(model) if text.model_type in MOE_ARCHITECTURES else []


def original_stacks(layer: MoELayer) -> tuple[Tensor, Tensor]:
    """Views of a layer's weights: gate and up (experts, 2, inner, width), down (experts, 1, width, inner)."""
    experts: Any = layer.experts
    if not layer.fused:
        raise ValueError(
            f"{layer.name} keeps its experts as separate modules; load the model with the implementation in "
            "transformers (without remote code), which keeps them as stacked tensors."
        )
    up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    if getattr(experts, "is_transposed", False):
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    inner = up.shape[1] // 2
    parts = up.unflatten(1, (inner, 2)).transpose(1, 2) if layer.architecture.interleaved else None
    return (up.unflatten(1, (2, inner)) if parts is None else parts), down.unsqueeze(1)


def expert_linears(layer: MoELayer) -> list[ExpertLinear]:
    """Gate, up and down projection of every expert of a layer."""
    up, down = original_stacks(layer)
    row, found = layer.architecture, []
    inside = f"{layer.name.rpartition('.')[2]}.{row.experts}"
    has_bias = bool(getattr(layer.experts, "has_bias", False))
    for expert in range(layer.num_experts):
        for projection, own in zip(PROJECTIONS, row.projections, strict=True):
            rows, columns = (down if projection == "down" else up).shape[2:]
            found.append(
                ExpertLinear(
                    f"{layer.stored_prefix}.{expert}.{own}", layer.experts, f"experts.{own}", EXPERT_ROLE,
                    layer.decoder_index, f"{inside}.{expert}.{own}", columns, rows, False, has_bias,
                    layer=layer, expert=expert, projection=projection,
                )  # fmt: skip
            )
    return found


def model_linears(layout: Layout, model: nn.Module, *, include_head: bool = False) -> list[LinearInfo]:
    """Every linear of a model, block by block, the experts of a sparse layer after the other linears of its block."""
    linears = layout.linears(model, include_head=include_head)
    layers = {layer.decoder_index: layer for layer in sparse_layers(model)}
    if not layers:
        return linears
    blocks: dict[int | None, list[LinearInfo]] = {}
    for info in linears:
        blocks.setdefault(info.block, []).append(info)
    for block, layer in layers.items():
        blocks.setdefault(block, []).extend(expert_linears(layer))
    numbers = sorted(block for block in blocks if block is not None)
    return [info for block in numbers for info in blocks[block]] + blocks.get(None, [])

