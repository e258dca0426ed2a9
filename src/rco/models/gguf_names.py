"""Names and shapes of a model's weights in a GGUF file.

One table maps the linears of :mod:`rco.models.layout` to llama.cpp's names; llama.cpp's converter renames, splits,
stacks and transposes them, and its changes of shapes are repeated here, because block types divide *its* rows.
Tensors that the converter always keeps in float32 (norms, biases, routers) are float32 here as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rco.models.layout import Layout
from rco.models.zoo import ModelError

__all__ = ["GGUFTensor", "gguf_names", "gguf_tensors"]

_GATE_UP_DOWN = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_SHARED = ("shared_expert", "shared_experts")

# Path inside a block -> names of its tensors in the file, without "blk.N." and ".weight".
_LINEARS: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("attn_q",),
    "self_attn.k_proj": ("attn_k",),
    "self_attn.v_proj": ("attn_v",),
    "self_attn.o_proj": ("attn_output",),
    "self_attn.qkv_proj": ("attn_qkv",),
    "self_attn.q_a_proj": ("attn_q_a",),
    "self_attn.q_b_proj": ("attn_q_b",),
    "self_attn.kv_a_proj_with_mqa": ("attn_kv_a_mqa",),
    "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),
    "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
    "linear_attn.in_proj_ba": ("ssm_ba",),
    "linear_attn.out_proj": ("ssm_out",),
    "mlp.gate_up_proj": ("ffn_up",),  # Phi-3: stays one matrix
    **{f"mlp.{path}": (f"ffn_{name}",) for path, name in _GATE_UP_DOWN.items()},
    **{f"mlp.{s}.{path}": (f"ffn_{name}_shexp",) for s in _SHARED for path, name in _GATE_UP_DOWN.items()},
    **{f"mlp.experts.{path}": (f"ffn_{name}_exps",) for path, name in _GATE_UP_DOWN.items()},
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.w1": ("ffn_gate_exps",),  # Mixtral
    "mlp.experts.w2": ("ffn_down_exps",),
    "mlp.experts.w3": ("ffn_up_exps",),
    "attn.c_attn": ("attn_qkv",),
    "attn.c_proj": ("attn_output",),
    "mlp.c_fc": ("ffn_up",),
    "mlp.c_proj": ("ffn_down",),
    "attention.query_key_value": ("attn_qkv",),
    "attention.dense": ("attn_output",),
    "mlp.dense_h_to_4h": ("ffn_up",),
    "mlp.dense_4h_to_h": ("ffn_down",),
}
_EXPERT_INDEX = re.compile(r"(?<=\.experts\.)\d+\.")
# Two-dimensional tensors that are float32 in every file: routers, positions, convolutions, norms per head.
_FLOAT32 = re.compile(
    r"(norm|mlp\.gate|mlp\.router|shared_expert_gate|wpe|conv1d)\.weight$|_bias$|bias$|sinks$"
)


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    Attributes:
        name: Name in the file; for a tensor that stays float32, its name in the model.
        rows: Rows in all, those of every expert together.
        columns: Length of a row, which blocks must divide.
        float32: Stored as float32 whatever the recipe.
    """

    name: str
    rows: int
    columns: int
    float32: bool = False


def gguf_names(layout: Layout, linear: str) -> tuple[str, ...]:
    """Names in the file of a linear's weight, most often one; a single expert's is that of all experts.

    Raises:
        ModelError: llama.cpp has no name for it, or it is not in the table.
    """
    if linear in ("lm_head", "embed_out"):
        return ("output.weight",)
    block = re.fullmatch(rf"{re.escape(layout.prefix)}\.(\d+)\.(.+)", linear)
    stems = _LINEARS.get(_EXPERT_INDEX.sub("", block[2])) if block else None
    if block is None or stems is None:
        raise ModelError(
            f"{linear} of a {layout.model_type} model has no known name in a GGUF file; leave it out (`skip`) or "
            "add it to the table in rco.models.gguf_names."
        )
    return tuple(f"blk.{block[1]}.{stem}.weight" for stem in stems)


def gguf_tensors(layout: Layout, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[GGUFTensor]:
    """Every tensor that llama.cpp's converter writes for a model.

    Args:
        layout: Row of the architecture table.
        config: The model's text configuration.
        shapes: Name and shape of every distinct tensor of the state dict, a tied weight once.
    """
    found: dict[str, GGUFTensor] = {}
    for name, shape in shapes.items():
        for tensor in _converted(layout, config, name, shape):
            earlier = found.get(tensor.name)
            if earlier is None:
                found[tensor.name] = tensor
            else:  # one more expert of the same stack
                found[tensor.name] = GGUFTensor(tensor.name, earlier.rows + tensor.rows, tensor.columns)
    for name, count in _made_by_the_converter(config):
        found[name] = GGUFTensor(name, 1, count, float32=True)
    return list(found.values())


def _converted(layout: Layout, config: Any, name: str, shape: tuple[int, ...]) -> list[GGUFTensor]:
    inside = name.startswith(f"{layout.backbone}.")
    head = name in ("lm_head.weight", "embed_out.weight")
    if not (inside or head):
        return []  # a vision tower has its own file
    size = 1
    for extent in shape:
        size *= extent
    if len(shape) < 2 or _FLOAT32.search(name):
        halves = 2 if "gate_up_proj_bias" in name else 1  # split like the weight
        return [GGUFTensor(f"{name}.{i}", 1, size // halves, float32=True) for i in range(halves)]
    if name.endswith(("embed_tokens.weight", "embed_in.weight", "wte.weight")):
        return [GGUFTensor("token_embd.weight", *_matrix(shape))]
    names = gguf_names(layout, name.removesuffix(".weight"))
    return [
        GGUFTensor(stored, *extents)
        for stored, extents in zip(names, _extents(config, name, shape, size), strict=True)
    ]


def _extents(config: Any, name: str, shape: tuple[int, ...], size: int) -> list[tuple[int, int]]:
    """(rows, columns) of the tensors that a weight becomes."""
    if len(shape) == 3:  # a stack of experts, stored either way round
        hidden = config.hidden_size
        if name.endswith("gate_up_proj"):
            return [(size // hidden // 2, hidden)] * 2
        return [(shape[0] * hidden, size // shape[0] // hidden)]
    if name.endswith("kv_b_proj.weight"):  # keys transposed, values not, head by head
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        return [(heads * rank, config.qk_nope_head_dim), (heads * config.v_head_dim, rank)]
    if name.endswith("in_proj_qkvz.weight"):
        gate = config.linear_num_value_heads * config.linear_value_head_dim
        return [(shape[0] - gate, shape[1]), (gate, shape[1])]
    transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return [_matrix(shape[::-1] if transposed else shape)]


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


def _made_by_the_converter(config: Any) -> list[tuple[str, int]]:
    """Name and size of tensors that are in no checkpoint: factors of long-context rotary embeddings."""
    rope = getattr(config, "rope_parameters", None) or {}
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rope.get("rope_type") == "llama3":
        return [("rope_freqs.weight", dim // 2)]
    if rope.get("rope_type") == "longrope":
        return [(f"rope_factors_{kind}.weight", len(rope[f"{kind}_factor"])) for kind in ("long", "short")]
    return []
