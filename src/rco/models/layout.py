"""Layout of decoder-only models: one table row per architecture.

A row holds the path of the blocks, the linears of a block, those that a serving engine merges into one matrix, and
the steps from the last hidden state to the logits. The rest of the package takes these from the row.
To support another architecture, add a row to :data:`ARCHITECTURES` and a tiny configuration to
:mod:`rco.testing.tiny_models`; the tests then cover it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rco.losses import Head
from rco.models.sequences import whole_sequences
from rco.models.zoo import ModelError

__all__ = ["ARCHITECTURES", "HeadSpec", "Layout", "LinearInfo", "layout_for", "text_config"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LinearInfo:
    """One linear map of a model.

    Attributes:
        name: Full dotted name, as in the state dict without ``.weight``.
        module: The ``nn.Linear`` or ``Conv1D`` itself.
        kind: Short name shared by the same linear of every block, unique within a block (``q_proj``).
        role: ``"attention"``, ``"mlp"``, ``"shared_expert"``, ``"experts"`` or ``"head"``.
        block: Index of the block, None for the output layer.
        path: Dotted name inside the block (inside the model for the output layer).
        in_features: Columns of the weight as a map y = W x.
        out_features: Rows of it.
        transposed: The module stores W transposed, (in, out), as GPT-2 does.
        bias: Whether a bias is added.
        tied: The weight is also the embedding's (output layer only).
    """

    name: str
    module: nn.Module
    kind: str
    role: str
    block: int | None
    path: str
    in_features: int
    out_features: int
    transposed: bool
    bias: bool
    tied: bool = False

    @property
    def weight(self) -> Tensor:
        """The weight as (out_features, in_features); a view, also if it is stored transposed."""
        stored: Tensor = self.module.weight  # type: ignore[assignment]
        return stored.T if self.transposed else stored

    @property
    def stored_name(self) -> str:
        """Its name in a checkpoint."""
        return self.name

    @property
    def parameters(self) -> int:
        """Number of weights, the bias not counted."""
        return self.in_features * self.out_features

    @property
    def stored_in(self) -> str:
        """Entry of the state dict that holds the weight."""
        return f"{self.name}.weight"


@dataclass(frozen=True, eq=False)
class HeadSpec(Head):
    """The map from last hidden states to logits, as an input of the losses, and its origin.

    Attributes:
        tied: The weight is also the embedding's.
        name: Dotted name of the output layer.
    """

    tied: bool = False
    name: str = "lm_head"

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., H), as the model itself computes them."""
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True)
class Layout:
    """One row of the architecture table.

    Attributes:
        model_type: ``config.model_type`` of the architecture.
        linear_paths: Linears inside a block, in the order they run. A block need not have all of them: layers may
            alternate between kinds of attention, or between a dense and a sparse feed-forward part.
        fused_paths: Sets of those that serving engines merge into one matrix. They have the same input, so one
            input statistic is enough for a set.
        backbone: The stack below the output layer.
        block_list: The list of blocks inside the backbone.
        norm: The norm after the last block, inside the backbone.
        moe: The sparse feed-forward part inside a block; :mod:`rco.models.moe` handles its modules except the
            linears named above.
        kept: Linears inside a block that are never compressed: routers and gates of a few rows.
        softcap: Field of the config with the bound of the logits.
        logit_multiplier: Field of the config that multiplies the logits.
        logit_divisor: Field of the config that divides them.
    """

    model_type: str
    linear_paths: tuple[str, ...]
    fused_paths: tuple[tuple[str, ...], ...] = ()
    backbone: str = "model"
    block_list: str = "layers"
    norm: str = "norm"
    moe: str | None = None
    kept: tuple[str, ...] = ()
    softcap: str | None = None
    logit_multiplier: str | None = None
    logit_divisor: str | None = None

    # ------------------------------------------------------------------ blocks and linears

    def stack(self, model: nn.Module) -> nn.Module:
        """The module that maps token ids to the last hidden state."""
        return _get(model, self.backbone, self.model_type)

    def blocks(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Full name and module of every block, first to last."""
        prefix = f"{self.backbone}.{self.block_list}"
        blocks = cast(nn.ModuleList, _get(model, prefix, self.model_type))
        return [(f"{prefix}.{i}", block) for i, block in enumerate(blocks)]

    def final_norm(self, model: nn.Module) -> nn.Module:
        """The norm between the last block and the output layer."""
        return _get(model, f"{self.backbone}.{self.norm}", self.model_type)

    def linears(self, model: nn.Module, *, include_head: bool = False) -> list[LinearInfo]:
        """Every linear of every block, in the order of the table, block by block.

        Args:
            model: The causal language model.
            include_head: Add the output layer at the end, flagged ``tied`` when its weight is the embedding's.

        Raises:
            ModelError: A linear has been replaced by something else, as in a checkpoint that is already quantized.
        """
        found: list[LinearInfo] = []
        for index, (prefix, block) in enumerate(self.blocks(model)):
            modules = dict(block.named_modules())
            for path in self.linear_paths:
                module = modules.pop(path, None)
                if module is not None:
                    found.append(self._describe(f"{prefix}.{path}", module, path, index))
            for path, module in modules.items():
                if path not in self.kept and _is_linear(module):
                    logger.warning(
                        "%s.%s is a linear that is not in the table row of %s; it is not compressed.",
                        prefix, path, self.model_type,
                    )  # fmt: skip
        if include_head:
            name, module = _output_layer(model)
            spec = self.head(model)
            rows, columns = spec.weight.shape
            kind, biased = name.rpartition(".")[2], spec.bias is not None
            found.append(
                LinearInfo(name, module, kind, "head", None, name, columns, rows, False, biased, spec.tied)
            )
        return found

    def _describe(self, name: str, module: nn.Module, path: str, block: int) -> LinearInfo:
        if not _is_linear(module):
            raise ModelError(
                f"{name} is a {type(module).__name__}, not a plain linear layer: the model is already quantized or "
                "wrapped. Load the original full-precision checkpoint."
            )
        weight: Tensor = module.weight  # type: ignore[assignment]
        transposed = not isinstance(module, nn.Linear)
        rows, columns = weight.shape[::-1] if transposed else weight.shape
        return LinearInfo(
            name, module, self.kind(path), _role(path), block, path,
            columns, rows, transposed, getattr(module, "bias", None) is not None,
        )  # fmt: skip

    def kind(self, path: str) -> str:
        """Short name of a linear: the last part of its path, with the part before it where that is ambiguous."""
        parts = path.split(".")
        alike = sum(other.rpartition(".")[2] == parts[-1] for other in self.linear_paths)
        return parts[-1] if alike == 1 else ".".join(parts[-2:])

    @property
    def fused_groups(self) -> tuple[tuple[str, ...], ...]:
        """Kinds that a serving engine merges into one matrix, and so must share one scheme per block."""
        return tuple(tuple(self.kind(path) for path in group) for group in self.fused_paths)

    def fused_sets(self, linears: Sequence[LinearInfo]) -> list[tuple[str, ...]]:
        """Names of the given linears that are merged, one tuple per merged matrix of two or more."""
        by_place = {(info.block, info.path): info.name for info in linears}
        blocks = sorted({info.block for info in linears if info.block is not None})
        sets = (
            tuple(by_place[block, path] for path in group if (block, path) in by_place)
            for block in blocks
            for group in self.fused_paths
        )
        return [names for names in sets if len(names) > 1]

    # ------------------------------------------------------------------ the two ends

    def embedding(self, model: nn.Module) -> nn.Embedding:
        """The token embedding."""
        return cast(nn.Embedding, cast(Any, model).get_input_embeddings())

    def head(self, model: nn.Module) -> HeadSpec:
        """The map from last hidden states to logits."""
        name, module = _output_layer(model)
        config = text_config(cast(Any, model).config)
        scale = 1.0
        if self.logit_multiplier:
            scale *= float(getattr(config, self.logit_multiplier))
        if self.logit_divisor:
            scale /= float(getattr(config, self.logit_divisor))
        softcap = getattr(config, self.softcap) if self.softcap else None
        weight: Tensor = module.weight  # type: ignore[assignment]
        return HeadSpec(
            weight=weight,
            bias=getattr(module, "bias", None),
            softcap=None if softcap is None else float(softcap),
            scale=scale,
            tied=weight is self.embedding(model).weight,
            name=name,
        )

    def final_hidden(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, T, H) after the final norm: exactly the input of the output layer.

        Gradients flow if they are enabled. No tensor of size tokens x vocabulary is made.
        """
        stack = self.stack(model)
        with whole_sequences(stack):
            output = stack(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return cast(Tensor, output.last_hidden_state)


def _get(model: nn.Module, path: str, model_type: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise ModelError(
            f"A {model_type} model should hold {path!r}, but {type(model).__name__} does not. Pass the causal "
            "language model itself, not a part or a wrapper of it."
        ) from None


def _output_layer(model: nn.Module) -> tuple[str, nn.Module]:
    module = cast(Any, model).get_output_embeddings()
    if module is None:
        raise ModelError(f"{type(model).__name__} has no output layer; pass a causal language model.")
    return next(name for name, other in model.named_modules() if other is module), module


def text_config(config: Any) -> Any:
    """The language part of a configuration; all of it for text-only models."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_linear(module: nn.Module) -> bool:
    # GPT-2's Conv1D is recognised by name: importing its class would import transformers.
    if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()


def _role(path: str) -> str:
    if "shared_expert" in path:
        return "shared_expert"
    return "mlp" if path.startswith("mlp.") else "attention"


# ---------------------------------------------------------------------- the table

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (*_QKV, "self_attn.o_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_MLP = (*_GATE_UP, "mlp.down_proj")
_LATENT_ATTENTION = (
    "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj",
)  # fmt: skip
_LATENT_FUSED = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")


def _shared(module: str) -> tuple[str, ...]:
    return tuple(f"mlp.{module}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))


def _rows() -> Iterator[Layout]:
    llama_like = (_ATTENTION + _MLP, (_QKV, _GATE_UP))
    one, several = _shared("shared_expert"), _shared("shared_experts")
    for name in ("llama", "qwen2", "qwen3", "mistral", "olmo", "olmo2", "olmo3", "smollm3"):
        yield Layout(name, *llama_like)
    for name in ("gemma2", "gemma3_text"):
        yield Layout(name, *llama_like, softcap="final_logit_softcapping")
    yield Layout("gemma3", *llama_like, backbone="model.language_model")
    yield Layout("granite", *llama_like, logit_divisor="logits_scaling")
    for name in ("cohere", "cohere2"):
        yield Layout(name, *llama_like, logit_multiplier="logit_scale")
    yield Layout("phi3", ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"))
    yield Layout(
        "gpt2",
        ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        backbone="transformer", block_list="h", norm="ln_f",
    )  # fmt: skip
    yield Layout(
        "gpt_neox",
        ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        backbone="gpt_neox", norm="final_layer_norm",
    )  # fmt: skip
    for name in ("mixtral", "olmoe", "gpt_oss"):
        yield Layout(name, _ATTENTION, (_QKV,), moe="mlp", kept=("mlp.gate", "mlp.router"))
    yield Layout("qwen3_moe", *llama_like, moe="mlp", kept=("mlp.gate",))
    yield Layout(
        "qwen2_moe",
        _ATTENTION + _MLP + one,
        (_QKV, _GATE_UP, one[:2]),
        moe="mlp", kept=("mlp.gate", "mlp.shared_expert_gate"),
    )  # fmt: skip
    yield Layout(
        "qwen3_next",
        (
            *_ATTENTION,
            "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj",
            *_MLP, *one,
        ),
        (_QKV, _GATE_UP, one[:2]),
        moe="mlp", kept=("mlp.gate", "mlp.shared_expert_gate"),
    )  # fmt: skip
    yield Layout(
        "glm4_moe", _ATTENTION + _MLP + several, (_QKV, _GATE_UP, several[:2]), moe="mlp", kept=("mlp.gate",)
    )
    for name in ("deepseek_v2", "deepseek_v3"):
        yield Layout(
            name,
            _LATENT_ATTENTION + _MLP + several,
            (_LATENT_FUSED, _GATE_UP, several[:2]),
            moe="mlp", kept=("mlp.gate",),
        )  # fmt: skip


ARCHITECTURES: dict[str, Layout] = {row.model_type: row for row in _rows()}


def layout_for(model_or_config: Any) -> Layout:
    """The table row of a model, of its config, or of a ``model_type`` string.

    Raises:
        ModelError: The architecture has no row; the message lists those that do.
    """
    if isinstance(model_or_config, str):
        model_type = model_or_config
    else:
        config = getattr(model_or_config, "config", model_or_config)
        model_type = str(getattr(config, "model_type", type(model_or_config).__name__))
    row = ARCHITECTURES.get(model_type)
    if row is None:
        raise ModelError(
            f"The architecture {model_type!r} is not supported yet; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}. A new one is a row in rco/models/layout.py."
        )
    return row
