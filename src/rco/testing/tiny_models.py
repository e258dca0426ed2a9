"""Random models of a few thousand weights: one for every architecture, and mixtures of experts.

For tests, benchmarks and trying out a new row: the structure is real, the weights are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rco.models.moe.layers import MoELayer
from rco.models.zoo import find_builtin

__all__ = [
    "TINY_MOE_NAMES",
    "random_keep",
    "save_tiny",
    "tiny_config",
    "tiny_image_model",
    "tiny_model",
    "tiny_moe",
    "tiny_tokens",
    "wide_moe",
]

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

_ORDINARY = ("llama", "qwen2", "qwen3", "mistral", "olmo", "phi3", "smollm3", "olmo2", "gemma3")
# Settings of each architecture beyond or instead of the common ones; None removes a setting.
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


# Small sizes by the field's name, for architectures without settings above; a field that a configuration lacks is
# left out.
_SIZES: dict[str, Any] = {
    **_COMMON,
    "d_model": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_ctx": 128, "n_inner": 48,
    "n_layers": 3, "n_heads": 4, "num_layers": 3, "num_heads": 4, "max_seq_len": 128, "model_max_length": 128,
    "embedding_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "ffn_hidden_size": 48, "dff": 48,
    "dim_head": 8, "dim_ff": 48, "kv_channels": 8, "rotary_dim": 4,
    "decoder_layers": 3, "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
    "encoder_layers": 1, "encoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "o_lora_rank": 8, "o_groups": 2, "hc_lowrank": 8, "laurel_rank": 4,
    "shared_intermediate_size": 16, "dense_intermediate_size": 48, "router_hidden_size": 16, "zero_expert_num": 2,
    "num_shared_experts": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "n_group": 2, "topk_group": 1, "num_expert_group": 2, "num_nextn_predict_layers": 0,
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2,
    "sliding_window": 8, "sliding_window_size": 8, "attention_window_size": 8, "query_pre_attn_scalar": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_dt_rank": 4, "mamba_chunk_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_d_ssm": 64,
    "state_size": 8, "ssm_state_size": 8, "time_step_rank": 4, "chunk_size": 8, "n_groups": 1,
    "lru_width": 32, "attention_hidden_size": 32, "block_size": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "type_vocab_size": 2,
    "dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_WIDE_KEYS = {"num_key_value_heads": 4, "head_dim": 4}
_SIZED_BY_HAND: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        _WIDE_KEYS,
    ),
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        "num_hidden_layers": 5, "num_kv_shared_layers": 1, "intermediate_size": [48] * 5,
        "activation_sparsity_pattern": [0.0] * 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "xlm": {"emb_dim": 32, "use_lang_emb": False},
    "xlstm": {"v_head_dim": None},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
# Parts beside the language part, and the model type of the language part where transformers does not fill it in.
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "emu3": ("emu3_text_model", {"vq_config": {
        "codebook_size": 8, "embed_dim": 4, "base_channels": 32, "channel_multiplier": (1,), "num_res_blocks": 1,
        "attn_resolutions": (), "hidden_size": 16,
    }}),
    "git": ("", {"vision_config": _VISION}),
    "got_ocr2": ("qwen2", {"vision_config": {
        **_VISION, "output_channels": 8, "global_attn_indexes": (0,), "mlp_dim": 16, "window_size": 2,
    }}),
    "mllama": ("mllama_text_model", {"vision_config": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 16, "vision_output_dim": 32, "image_size": 16, "patch_size": 8,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1,
    }}),
    "moss_transcribe_diarize": ("qwen3", {"audio_config": {
        "num_mel_bins": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "hidden_size": 16, "max_source_positions": 16,
    }, "audio_token_id": 90}),
    "phi4_multimodal": ("", {
        "vision_config": {**_VISION, "crop_size": 16},
        "audio_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2, "input_size": 8,
            "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16,
        },
    }),
}  # fmt: skip


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small configuration of an architecture; ``changes`` override its fields."""
    from transformers import AutoConfig

    if model_type not in _ORDINARY and model_type not in _OWN:
        return _sized_config(model_type, changes)
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


def _sized_config(model_type: str, changes: dict[str, Any]) -> Any:
    """A configuration whose known fields have small values."""
    from transformers import AutoConfig

    text = AutoConfig.for_model(model_type).get_text_config()
    # Only the sizes that the configuration has: an unknown field would become an attribute that means nothing.
    listed = {name for cls in type(text).__mro__ for name in vars(cls).get("__annotations__", {})}
    known = {name for name in _SIZES if name in listed or name in text.to_dict()}
    present = {name: value for name, value in _SIZES.items() if name in known}
    special = {name: value for name, value in _COMMON.items() if name.endswith("_token_id")}
    settings = {**special, **present, **_SIZED_BY_HAND.get(model_type, {}), **changes}
    settings = {name: value for name, value in settings.items() if value is not None}
    language, parts = _PARTS.get(model_type, ("", {}))
    if language:
        return AutoConfig.for_model(model_type, text_config={"model_type": language, **settings}, **parts)
    return AutoConfig.for_model(model_type, **settings, **parts)


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


def tiny_image_model(*, seed: int = 0) -> nn.Module:
    """A random model with a language part and a vision part (Qwen3.5), in evaluation mode."""
    import transformers

    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
    }  # fmt: skip
    text = _sized_config("qwen3_5_text", {}).to_dict()
    config = transformers.AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = transformers.Qwen3_5ForConditionalGeneration
        model: nn.Module = build(config)
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


# ---------------------------------------------------------------------- mixtures of experts

_MOE_COMMON: dict[str, Any] = {
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
_MOE_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
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
TINY_MOE_NAMES = tuple(_MOE_SETTINGS)


def tiny_moe(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A tiny random model in evaluation mode, with correction biases that matter.

    Args:
        name: One of :data:`TINY_MOE_NAMES`.
        seed: Seed of the weights.
        dtype: Type of the weights.
        changes: Configuration fields to set differently.
    """
    import transformers

    cls, settings = _MOE_SETTINGS[name]
    config = getattr(transformers, cls)(**{**_MOE_COMMON, **settings, **changes})
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
    """A random model with many experts in every layer, eight of them per token, for timing steps."""
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
    return torch.randint(0, _MOE_COMMON["vocab_size"], (batch, length), generator=generator)


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
