"""A random model of a few thousand weights for every row of the architecture table.

For tests, examples and trying out a new row: the structure is the real one, the numbers mean nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rco.models.layout import layout_for
from rco.models.zoo import find_builtin

__all__ = ["save_tiny", "tiny_config", "tiny_model"]

_VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA: dict[str, Any] = {"sliding_window": 8, "query_pre_attn_scalar": 8}
_LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "head_dim": 4,
}  # fmt: skip

# What each architecture needs beyond or instead of the common settings; None removes a setting.
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {**_GEMMA, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_GEMMA, "num_hidden_layers": 7, "final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 4},
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 4},
    "gpt2": {"n_inner": 48},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [1]},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_next": {
        **_EXPERTS, "shared_expert_intermediate_size": 24, "num_hidden_layers": 4, "mlp_only_layers": [1],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
}  # fmt: skip


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small configuration of a supported architecture; ``changes`` override its fields."""
    from transformers import AutoConfig

    layout_for(model_type)  # an unknown name fails with the list of known ones
    settings = {**_COMMON, **_OWN.get(model_type, {}), **changes}
    settings = {key: value for key, value in settings.items() if value is not None}
    if model_type == "gpt2":
        renamed = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        unused = {"intermediate_size", "num_key_value_heads", "head_dim"}
        settings = {renamed.get(key, key): value for key, value in settings.items() if key not in unused}
    if model_type == "gemma3":
        settings.pop("tie_word_embeddings", None)
        vision = {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 8,
        }  # fmt: skip
        text = {**settings, **_GEMMA, "num_hidden_layers": 7}
        return AutoConfig.for_model(
            "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90,
            boi_token_index=91, eoi_token_index=92, tie_word_embeddings=changes.get("tie_word_embeddings", True),
        )  # fmt: skip
    return AutoConfig.for_model(model_type, **settings)


def tiny_model(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """A random model of that architecture in evaluation mode, on the CPU, the same for the same seed."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = cast(Any, transformers.AutoModelForCausalLM).from_config(
            tiny_config(model_type, **changes), dtype=dtype
        )
        with torch.no_grad():
            for parameter in model.parameters():
                # Wide enough that norms, biases, routers and softcaps all matter to the output.
                scale = 0.3 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1
                parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval().requires_grad_(False)


def save_tiny(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write such a model as a checkpoint with a tokenizer (tiny-llama's), so that whole commands run on it."""
    from transformers import AutoTokenizer

    builtin = find_builtin("tiny-llama")
    assert builtin is not None
    tokenizer = AutoTokenizer.from_pretrained(builtin.locate()[0])
    special = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = tiny_model(model_type, seed=seed, dtype=dtype, **{**special, **changes})
    cast(Any, model).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder
