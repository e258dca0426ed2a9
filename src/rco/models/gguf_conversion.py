"""Conversion of a Hugging Face model to a GGUF file, for families that were verified in llama.cpp.

Weights keep their type and value; llama.cpp's order of the rows of queries and keys is applied where it has one.
Tokenizers are byte-level BPE whose splitting rule llama.cpp knows by name.
"""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rco.atomic_files import atomic_path
from rco.models.gguf_file import (
    TYPE_NUMBERS,
    Metadata,
    TensorEntry,
    encoded_numbers,
    encoded_value,
    write_gguf,
)
from rco.models.loading import LoadedModel
from rco.models.zoo import ModelError

__all__ = ["CONVERTED", "convert_to_gguf", "ensure_gguf", "interleaved"]

CONVERTED = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""Architectures that can be converted: transformers' names, and llama.cpp's."""

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# Stacks of experts -> their equal parts in the file.
_STACKS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
_ROUTER = "ffn_gate_inp"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# Regular expressions of tokenizers -> llama.cpp's name of the rule.
_LETTERS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPLITTERS = {
    rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_LETTERS}|\p{{N}}{{1,3}}|{_SPACES}": "llama-bpe",
    rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_SPACES}": "llama-bpe",
    rf"{_CONTRACTIONS}|\p{{N}}|{_SPACES}": "qwen2",
    rf"{_LETTERS}|\p{{N}}|{_SPACES}": "qwen2",
}


def interleaved(rows: int, heads: int) -> Tensor:
    """Rows of a query or key weight in the order in which llama.cpp rotates neighbours instead of halves."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).reshape(-1)


def ensure_gguf(loaded: LoadedModel) -> None:
    """Give a model that was not read from a GGUF file one, in a temporary folder that lives as long as the model.

    Raises:
        ModelError: As for :func:`convert_to_gguf`.
    """
    if loaded.gguf is not None:
        return
    folder = tempfile.TemporaryDirectory(prefix="rco-gguf-")
    weakref.finalize(loaded, folder.cleanup)
    path = Path(folder.name) / "model.gguf"
    convert_to_gguf(loaded, path)
    loaded.gguf = path


def convert_to_gguf(loaded: LoadedModel, path: Path) -> None:
    """Write a model to a GGUF file, in the types of its weights.

    Raises:
        ModelError: The architecture or the tokenizer is not one of those that were verified.
    """
    config: Any = loaded.model.config
    kind = str(config.model_type)
    if kind not in CONVERTED:
        raise ModelError(
            f"{loaded.name} ({kind}) is not converted to GGUF here, only {', '.join(CONVERTED)}: convert it with "
            "llama.cpp (`convert_hf_to_gguf.py MODEL --outtype bf16 --outfile model-bf16.gguf`) and pass that file."
        )
    metadata = Metadata({**_architecture(loaded, config, kind), **_tokenizer(loaded)})
    tensors: list[tuple[TensorEntry, Callable[[], Any]]] = []
    for name, value in loaded.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for stored, part in _stored_parts(name, value):
            wide = part.ndim == 1 or _ROUTER in stored  # norms, biases and routers are always float32
            number = TYPE_NUMBERS["f32" if wide else _TYPES[part.dtype]]
            order = None
            if kind == "llama" and stored.endswith(("attn_q.weight", "attn_k.weight")):
                heads = config.num_attention_heads if "attn_q" in stored else config.num_key_value_heads
                order = interleaved(len(part), heads)
            tensors.append(
                (TensorEntry(stored, tuple(part.shape), number), partial(_data, part, wide, order))
            )
    with atomic_path(path) as temporary:
        temporary.unlink(missing_ok=True)
        write_gguf(temporary, metadata, tensors)


def _stored_parts(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors of the file that hold one of the model: itself, or both halves of a stack of experts."""
    if name in _OUTER:
        return [(_OUTER[name], value)]
    parts = name.split(".")
    inner = parts[3:] if parts[:2] == ["model", "layers"] else []
    stack = _STACKS.get(".".join(inner))
    if stack is not None:
        halves = value.chunk(len(stack), dim=1)
        return [(f"blk.{parts[2]}.{stem}.weight", half) for stem, half in zip(stack, halves, strict=True)]
    stem = _INNER.get(".".join(inner[:-1]))
    if stem is None:
        raise ModelError(f"{name} has no known name in a GGUF file; convert the model with llama.cpp.")
    return [(f"blk.{parts[2]}.{stem}.{parts[-1]}", value)]


def _data(value: Tensor, wide: bool, order: Tensor | None) -> Any:
    value = value.detach().cpu()
    value = value.float() if wide else value
    value = value if order is None else value[order]
    return memoryview(value.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _architecture(loaded: LoadedModel, config: Any, kind: str) -> dict[str, bytes]:
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(
            f"{loaded.name} scales its rotary embedding ({rope['rope_type']}), which is not converted here; "
            "convert it with llama.cpp."
        )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dense = _TYPES[loaded.dtype]
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": width,
        "vocab_size": config.vocab_size,
    }
    if kind == "qwen3_moe":
        own |= _experts(loaded, config)
    stored = CONVERTED[kind]
    return {
        "general.architecture": encoded_value(stored),
        "general.type": encoded_value("model"),
        "general.name": encoded_value(Path(loaded.name).name),
        "general.file_type": encoded_value({"f32": 0, "f16": 1, "bf16": 32}[dense]),
        **{f"{stored}.{key}": encoded_value(value) for key, value in own.items()},
    }


def _experts(loaded: LoadedModel, config: Any) -> dict[str, Any]:
    """Metadata of a mixture of experts; llama.cpp scales their weights to sum to one."""
    if config.mlp_only_layers or config.decoder_sparse_step != 1 or not config.norm_topk_prob:
        raise ModelError(
            f"{loaded.name} has layers without experts, or weights of experts that do not sum to one, which is not "
            "converted here; convert it with llama.cpp."
        )
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def _tokenizer(loaded: LoadedModel) -> dict[str, bytes]:
    tokenizer, config = loaded.tokenizer, loaded.model.config
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{loaded.name} has no tokenizer that can be converted; convert it with llama.cpp.")
    content = json.loads(backend.to_str())
    rule = _splitter(content.get("pre_tokenizer") or {})
    if content["model"]["type"] != "BPE" or rule is None:
        raise ModelError(
            f"The tokenizer of {loaded.name} splits text by a rule that is not known here, so it is not converted; "
            "convert the model with llama.cpp."
        )
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    by_id = {number: text for text, number in content["model"]["vocab"].items()}
    by_id |= {number: entry["content"] for number, entry in added.items()}
    size: int = config.vocab_size  # type: ignore[assignment,union-attr]
    texts = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [
        (_CONTROL if added[number]["special"] else _USER_DEFINED) if number in added else _NORMAL
        for number in range(size)
    ]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]]
    found = {
        "tokenizer.ggml.model": encoded_value("gpt2"),
        "tokenizer.ggml.pre": encoded_value(rule),
        "tokenizer.ggml.tokens": encoded_value(texts),
        "tokenizer.ggml.token_type": encoded_numbers(kinds),
        "tokenizer.ggml.merges": encoded_value(merges),
        "tokenizer.ggml.add_bos_token": encoded_value(_adds_bos(tokenizer)),
    }
    for name, number in (
        ("bos", tokenizer.bos_token_id),
        ("eos", tokenizer.eos_token_id),
        ("padding", tokenizer.pad_token_id),
    ):
        if number is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = encoded_value(int(number))
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        found["tokenizer.chat_template"] = encoded_value(template)
    return found


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def _splitter(rule: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of a splitting rule; None if it is not known."""
    steps = rule.get("pretokenizers", [rule])
    splits = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    level = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(splits) == 1 and len(level) == 1 and len(steps) == 2:
        return _SPLITTERS.get(splits[0])
    if len(steps) == 1 and level and level[0].get("use_regex", True) and not level[0].get("add_prefix_space"):
        return "gpt-2"
    return None
