"""Tiny random models of every mixture-of-experts architecture: for tests, examples and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rco.models.moe import MoELayer

__all__ = ["TINY_MOE_NAMES", "random_keep", "tiny_moe", "tiny_tokens", "wide_moe"]

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}

# name -> (configuration class, settings); a name may be a variant of an architecture.
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("OlmoeConfig", {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe-normed": (
        "OlmoeConfig",
        {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", {"intermediate_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_MLA, "n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v2-grouped": (
        "DeepseekV2Config",
        {
            **_MLA,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_MLA, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3-ungrouped": (
        "DeepseekV3Config",
        {
            **_MLA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 4,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
TINY_MOE_NAMES = tuple(_SETTINGS)


def tiny_moe(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A tiny random model in evaluation mode, with correction biases that matter.

    Args:
        name: One of :data:`TINY_MOE_NAMES`.
        seed: Seed of the weights.
        dtype: Of the weights.
        changes: Configuration fields to set differently.
    """
    import transformers

    cls, settings = _SETTINGS[name]
    config = getattr(transformers, cls)(**{**_COMMON, **settings, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = transformers.AutoModelForCausalLM.from_config
        model: nn.Module = build(config).to(dtype).eval()
        with torch.no_grad():
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.2)
    return model


def wide_moe(experts: int, hidden: int, *, layers: int = 2, vocabulary: int = 1024) -> nn.Module:
    """A random model with many experts in every layer, of which a token sees eight: what steps are timed on."""
    return tiny_moe(
        "qwen3_moe",
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        moe_intermediate_size=hidden // 2,
        num_experts=experts,
        num_experts_per_tok=8,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        initializer_range=0.05,
    )


def tiny_tokens(seed: int = 0, batch: int = 2, length: int = 12) -> Tensor:
    """Random token ids for the tiny models."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, _COMMON["vocab_size"], (batch, length), generator=generator)


def random_keep(layers: Sequence[MoELayer], seed: int = 0, spare: int = 1) -> list[Tensor]:
    """A random mask per layer, with a random count at least ``spare`` above the router's floor."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for layer in layers:
        low = min(layer.top_k + spare, layer.num_experts - 1)
        count = int(torch.randint(low, layer.num_experts, (), generator=generator))
        order = torch.randperm(layer.num_experts, generator=generator)
        masks.append(torch.zeros(layer.num_experts, dtype=torch.bool).index_fill_(0, order[:count], True))
    return masks
