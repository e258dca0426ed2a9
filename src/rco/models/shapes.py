"""Models of known shapes with random weights, made directly on a device: for measurements of time and memory."""

from __future__ import annotations

from typing import Any

import torch

from rco.models.loading import LoadedModel, wrap_model

__all__ = ["SHAPES", "random_model", "shape_settings"]

_GATED = {"tie_word_embeddings": False, "use_cache": False}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": (
        "Qwen3",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        },
    ),
    "llama3-8b": (
        "Llama",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "vocab_size": 50304,
        },
    ),
    "quick": (
        "Llama",
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256,
        },
    ),
    "quick-moe": (
        "Olmoe",
        {
            "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8,
            "num_experts_per_tok": 2, "vocab_size": 256, "eos_token_id": 2,
        },
    ),
}  # fmt: skip


def shape_settings(shape: str) -> tuple[str, dict[str, Any]]:
    """Family and settings of a named shape.

    Raises:
        ValueError: There is no such shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"There is no shape {shape!r}; there are {', '.join(SHAPES)}.")
    return SHAPES[shape]


def random_model(
    shape: str, *, device: torch.device | str, dtype: torch.dtype, layers: int | None = None, seed: int = 0
) -> LoadedModel:
    """A model of a named shape, initialised as transformers does, without a tokenizer.

    Args:
        shape: One of :data:`SHAPES`.
        device: Device of its weights.
        dtype: Their type.
        layers: Fewer blocks than the shape has; None for all.
        seed: Seed of the weights.
    """
    family, settings = shape_settings(shape)
    import transformers

    if layers is not None:
        settings = {**settings, "num_hidden_layers": layers}
    config = getattr(transformers, f"{family}Config")(**settings, **_GATED)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=dtype)
    return wrap_model(model, name=shape)
