"""Layout of language models, read off the module tree: blocks, linears, and the steps to the logits.

:func:`layout_for` looks at a model and checks what it found with a run on a few tokens in which blocks and output
layer are replaced by stand-ins (:mod:`rco.models.skeleton`). The table :data:`FUSED` holds what cannot be seen:
linears that a serving engine merges into one matrix.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from rco.losses import Head
from rco.models.sequences import whole_sequences
from rco.models.skeleton import Tail, check_tail, head_input, inspect_blocks, read_at_start
from rco.models.zoo import ModelError

__all__ = [
    "DENSE_HEADS",
    "FUSED",
    "PACKED_EMBEDDINGS",
    "HeadSpec",
    "Layout",
    "LinearInfo",
    "layout_for",
    "text_config",
]


@dataclass(frozen=True, eq=False)
class LinearInfo:
    """One linear map of a model.

    Attributes:
        name: Full dotted name, as in the state dict without ``.weight``.
        module: The ``nn.Linear`` or ``Conv1D`` itself.
        kind: Short name shared by the same linear of every block, unique within a block (``q_proj``).
        role: ``"attention"``, ``"mlp"``, ``"shared_expert"``, ``"experts"``, ``"outer"``, ``"head"`` or
            ``"embedding"``.
        block: Index of the block, None for the output layer.
        path: Dotted name inside the block (inside the model for the output layer).
        in_features: Columns of the weight as a map y = W x.
        out_features: Rows of it.
        transposed: The module stores W transposed, (in, out), as GPT-2 does.
        bias: Whether a bias is added.
        tied: Embedding and output layer share this weight.
        twin: Name of the output layer that shares an embedding's weight.
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
    twin: str | None = None

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

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers of an embedding beside its weight, such as a factor."""
        return dict(self.module.named_buffers(recurse=False)) if self.role == "embedding" else {}


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
    """Blocks and linears of a model, and the steps from the last block to the logits.

    Attributes:
        model_type: ``config.model_type`` of the architecture.
        backbone: The stack of blocks, which maps token ids to hidden states.
        block_list: The list of blocks inside the backbone.
        linear_paths: Linears inside a block, in the order of the module tree. A block need not have all of them:
            layers may alternate between kinds of attention, or between a dense and a sparse feed-forward part.
        outer_paths: Linears of the backbone outside of the blocks, such as projections of the embedding.
        fused_paths: Sets of linears that serving engines merge into one matrix. They have the same input, so one
            input statistic is enough for a set. None: unknown for this architecture.
        kept: Linears that are never compressed: routers, and gates of one row.
        tail: Steps after the last block.
    """

    model_type: str
    backbone: str
    block_list: str
    linear_paths: tuple[str, ...]
    outer_paths: tuple[str, ...]
    fused_paths: tuple[tuple[str, ...], ...] | None
    kept: tuple[str, ...]
    tail: Tail

    # ------------------------------------------------------------------ blocks and linears

    def stack(self, model: nn.Module) -> nn.Module:
        """The module that maps token ids to the last hidden state."""
        return _get(model, self.backbone, self.model_type)

    def entry(self, model: nn.Module) -> nn.Module:
        """The module to call for a forward pass: the stack, or the model where the stack alone is not enough."""
        return self.stack(model) if self.tail.direct else model

    @property
    def prefix(self) -> str:
        """Path of the list of blocks."""
        return f"{self.backbone}.{self.block_list}" if self.backbone else self.block_list

    def blocks(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Full name and module of every block, first to last."""
        blocks = cast(nn.ModuleList, _get(model, self.prefix, self.model_type))
        return [(f"{self.prefix}.{i}", block) for i, block in enumerate(blocks)]

    def final_norm(self, model: nn.Module) -> nn.Module | None:
        """The module between the last block and the output layer, if there is exactly one."""
        return None if self.tail.norm is None else _get(model, self.tail.norm, self.model_type)

    def linears(self, model: nn.Module, *, include_head: bool = False) -> list[LinearInfo]:
        """Every linear outside of the blocks, then every linear of every block, block by block.

        Args:
            model: The causal language model.
            include_head: Add the output layer at the end, flagged ``tied`` when its weight is the embedding's.

        Raises:
            ModelError: A linear has been replaced by something else, as in a checkpoint that is already quantized.
        """
        found: list[LinearInfo] = []
        for path in self.outer_paths:
            found.append(self._describe(path, _get(model, path, self.model_type), path, None))
        for index, (prefix, block) in enumerate(self.blocks(model)):
            modules = dict(block.named_modules())
            for path in self.linear_paths:
                module = modules.get(path)
                if module is not None:
                    found.append(self._describe(f"{prefix}.{path}", module, path, index))
        if include_head:
            name, module = _output_layer(model)
            spec = self.head(model)
            rows, columns = spec.weight.shape
            kind, biased = name.rpartition(".")[2], spec.bias is not None
            found.append(
                LinearInfo(name, module, kind, "head", None, name, columns, rows, False, biased, spec.tied)
            )
        return found

    def _describe(self, name: str, module: nn.Module, path: str, block: int | None) -> LinearInfo:
        if not is_linear(module):
            raise ModelError(
                f"{name} is a {type(module).__name__}, not a plain linear layer: the model is already quantized or "
                "wrapped. Load the original full-precision checkpoint."
            )
        weight: Tensor = module.weight  # type: ignore[assignment]
        transposed = not isinstance(module, nn.Linear)
        rows, columns = weight.shape[::-1] if transposed else weight.shape
        return LinearInfo(
            name, module, self.kind(path), _role(path) if block is not None else "outer", block, path,
            columns, rows, transposed, getattr(module, "bias", None) is not None,
        )  # fmt: skip

    def kind(self, path: str) -> str:
        """Short name of a linear: the last part of its path, with the part before it where that is ambiguous."""
        return self._kinds[path]

    @cached_property
    def _kinds(self) -> dict[str, str]:
        paths = [*self.linear_paths, *self.outer_paths]
        kinds = {path: path.rpartition(".")[2] for path in paths}
        for parts in (2, 3):
            shared = [path for path in paths if list(kinds.values()).count(kinds[path]) > 1]
            kinds |= {path: ".".join(path.split(".")[-parts:]) for path in shared}
        return kinds | {path: path for path in paths if list(kinds.values()).count(kinds[path]) > 1}

    @property
    def fused_groups(self) -> tuple[tuple[str, ...], ...]:
        """Kinds that a serving engine merges into one matrix, and so must share one scheme per block."""
        present = (tuple(path for path in group if path in self._kinds) for group in self.fused_paths or ())
        return tuple(tuple(self.kind(path) for path in group) for group in present if len(group) > 1)

    def fused_sets(self, linears: Sequence[LinearInfo]) -> list[tuple[str, ...]]:
        """Names of the given linears that are merged, one tuple per merged matrix of two or more."""
        by_place = {(info.block, info.path): info.name for info in linears}
        blocks = sorted({info.block for info in linears if info.block is not None})
        sets = (
            tuple(by_place[block, path] for path in group if (block, path) in by_place)
            for block in blocks
            for group in self.fused_paths or ()
        )
        return [names for names in sets if len(names) > 1]

    def unpackable(self, model: nn.Module) -> tuple[str, ...]:
        """Paths of linears that stock transformers reads before a packed checkpoint is loaded."""
        return read_at_start(model, [block for _, block in self.blocks(model)])

    # ------------------------------------------------------------------ the two ends

    def embedding(self, model: nn.Module) -> nn.Embedding:
        """The token embedding."""
        return cast(nn.Embedding, cast(Any, model).get_input_embeddings())

    def head(self, model: nn.Module) -> HeadSpec:
        """The map from last hidden states to logits."""
        name, module = _output_layer(model)
        weight: Tensor = module.weight  # type: ignore[assignment]
        return HeadSpec(
            weight=weight,
            bias=getattr(module, "bias", None),
            softcap=self.tail.softcap,
            scale=self.tail.scale,
            tied=weight is self.embedding(model).weight,
            name=name,
        )

    def final_hidden(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, T, H) that enter the output layer.

        Gradients flow if they are enabled. No tensor of size tokens x vocabulary is made.
        """
        stack = self.stack(model)
        with whole_sequences(stack):
            if not self.tail.direct:
                return head_input(model, _output_layer(model)[1], input_ids, attention_mask)
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


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map with a floating-point weight."""
    # GPT-2's Conv1D is recognised by name: importing its class would import transformers.
    if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
        return False
    weight = getattr(module, "weight", None)
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    return plain and (not isinstance(module, nn.Linear) or _multiplies(module))


_linear_kinds: dict[type, bool] = {nn.Linear: True}


def _multiplies(module: nn.Linear) -> bool:
    """Whether a linear computes the product with its weight: a subclass may do something else, which is tried."""
    kind = type(module)
    if kind not in _linear_kinds:
        known = kind.forward is nn.Linear.forward
        if not known and not module.weight.is_meta:
            known = _is_product(module)
        elif not known:
            return False  # decided once there are weights
        _linear_kinds[kind] = known
    return _linear_kinds[kind]


@torch.no_grad()
def _is_product(module: nn.Linear) -> bool:
    few = copy.deepcopy(module).float()
    x = torch.linspace(-1, 1, 3 * module.in_features, device=module.weight.device).view(1, 3, -1)
    try:
        found = few(x)
    except (RuntimeError, TypeError, ValueError):
        return False
    expected = nn.functional.linear(x, few.weight, few.bias)
    alike = isinstance(found, Tensor) and found.shape == expected.shape  # routers may return a tuple
    return alike and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def _role(path: str) -> str:
    if "shared_expert" in path:
        return "shared_expert"
    parts = path.lower().split(".")
    feed_forward = any(part in _FEED_FORWARD or "mlp" in part or "moe" in part for part in parts)
    return "mlp" if feed_forward else "attention"


# ---------------------------------------------------------------------- facts that cannot be seen

_FEED_FORWARD = frozenset(
    {"ffn", "ff", "feed_forward", "fc1", "fc2", "experts", "wi", "wo", "intermediate", "output"}
)
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
_DELTA = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))


def _fused() -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    plain = """
        afmoe cohere cohere2 cohere2_moe cwm ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 gemma gemma2 gemma3
        gemma3_text gemma3n gemma3n_text gemma4 gemma4_text glm glm4 glm4_moe granite granite_swa hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 hyperclovax jamba llama mimo_v2_flash ministral ministral3 mistral olmo olmo2 olmo3
        qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 vaultgemma
    """
    for name in plain.split():
        yield name, (_QKV, _GATE_UP)
    attention_alone = """
        apertus arcee flex_olmo gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared jais2 minimax_m2
        mixtral nemotron nemotron_h olmoe opt phi starcoder2
    """
    for name in attention_alone.split():
        yield name, (_QKV,)
    for name in ("bloom", "falcon", "gpt2", "gpt_neox", "phi3"):
        yield name, ()
    for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        yield name, (_LATENT, _GATE_UP)
    for name in ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"):
        yield name, (_QKV, _GATE_UP, *_DELTA)
    for name in ("lfm2", "lfm2_moe"):
        yield name, (_QKV, ("w1", "w3"))
    yield "minicpm3", (_GATE_UP,)


FUSED: dict[str, tuple[tuple[str, ...], ...]] = dict(_fused())
"""Architecture -> names of linears beside each other that vLLM merges into one matrix.

As in ``packed_modules_mapping`` of vLLM's models (commit a014e35f38c, August 2026); its transformers backend, which
serves ``olmo``, ``olmo2``, ``smollm3``, ``starcoder2`` and ``vaultgemma``, merges the same ones.
"""


PACKED_EMBEDDINGS = frozenset(
    {
        "apertus", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone4", "gemma3_text", "glm4_moe_lite",
        "granite", "llama", "minimax_m2", "mistral", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    }
)  # fmt: skip
"""Architectures whose embedding vLLM reads in packed codes: its models that hand it the config (0.32)."""

DENSE_HEADS = frozenset(
    {"afmoe", "bloom", "exaone_moe", "falcon_h1", "gpt_oss", "jamba", "opt", "qwen3_next"}
)
"""Architectures whose output layer vLLM reads unpacked alone: its models that do not hand it the config (0.32)."""


def _fused_paths(model_type: str, paths: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
    """Paths of the linears of a block that are merged, in the order of the table; None if it is not known."""
    if model_type not in FUSED:
        return None
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for kinds in FUSED[model_type]:
        for kind in kinds:
            for path in paths:
                parent, _, name = path.rpartition(".")
                if name == kind:
                    found.setdefault((parent, kinds), []).append(path)
    return tuple(tuple(members) for members in found.values() if len(members) > 1)


# ---------------------------------------------------------------------- finding

_checked: dict[str, Tail] = {}


def layout_for(model: nn.Module) -> Layout:
    """The layout of a model, found by looking at its modules and checked by a run on a few tokens.

    The run is made once for every configuration in a process.

    Raises:
        ModelError: The model is not a causal language model, or what was found does not reproduce its logits.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise ModelError(
            f"{type(model).__name__} is not a causal language model of transformers; pass one, such as the result "
            "of AutoModelForCausalLM.from_pretrained."
        )
    text = text_config(config)
    model_type = str(config.model_type)
    head_name, head = _output_layer(model)
    if not isinstance(head, nn.Linear) and not hasattr(head, "selected_weight"):
        raise ModelError(
            f"The output layer {head_name} of {type(model).__name__} is a {type(head).__name__}; only linear ones "
            "are supported."
        )
    depth = next((getattr(text, name) for name in _DEPTHS if isinstance(getattr(text, name, None), int)), 0)
    parameter = head.weight
    assert isinstance(parameter, Tensor)
    key = f"{type(model).__qualname__} {parameter.device.type} {parameter.dtype} {_as_text(config)}"
    if key not in _checked:
        _checked[key] = check_tail(model, head, _candidate_lists(model, depth), text)
    tail = _checked[key]
    blocks = cast(nn.ModuleList, _get(model, tail.blocks, model_type))
    kept = inspect_blocks(blocks)
    paths: dict[str, None] = {}
    for block in blocks:
        for path, module in block.named_modules():
            _refuse_packed(f"{tail.blocks}.N.{path}", module)
            if path not in kept and is_linear(module):
                paths[path] = None
    inside = f"{tail.stack}." if tail.stack else ""
    outer = [
        name
        for name, module in model.named_modules()
        if is_linear(module)
        and module is not head
        and name.startswith(inside)
        and name in tail.outer
        and not name.startswith(f"{tail.blocks}.")
    ]
    return Layout(
        model_type=model_type,
        backbone=tail.stack,
        block_list=tail.blocks.removeprefix(inside),
        linear_paths=tuple(paths),
        outer_paths=tuple(outer),
        fused_paths=_fused_paths(model_type, tuple(paths)),
        kept=kept,
        tail=tail,
    )


_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


def _as_text(config: Any) -> str:
    described = config.to_dict()
    described.pop("_name_or_path", None)
    return json.dumps(described, sort_keys=True, default=str)


def _candidate_lists(model: nn.Module, depth: int) -> list[str]:
    """Lists that may hold the blocks, the likeliest first: of the configured depth, with the most weights."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and any(p.ndim > 1 for p in module.parameters())
    }
    outermost = [
        name for name in lists if not any(name.startswith(f"{other}.") for other in lists if other != name)
    ]

    def rank(name: str) -> tuple[bool, int]:
        return len(lists[name]) != depth, -sum(p.numel() for p in lists[name].parameters())

    return sorted(outermost, key=rank)


def _refuse_packed(name: str, module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    packed = isinstance(weight, Tensor) and weight.ndim == 2 and not weight.is_floating_point()
    if packed or hasattr(module, "weight_packed") or hasattr(module, "qweight"):
        raise ModelError(
            f"{name} is a {type(module).__name__}, not a plain linear layer: the model is already quantized or "
            "wrapped. Load the original full-precision checkpoint."
        )
