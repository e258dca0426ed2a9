"""Tiny models as GGUF files, with a tokenizer of single bytes."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rco.models.gguf_conversion import convert_to_gguf
from rco.models.loading import load_model, wrap_model
from rco.testing.tiny_models import tiny_model

VOCABULARY = 288
_WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
_PATTERN = _WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def byte_tokenizer():
    """A token for every byte, two merges, and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<|endoftext|>", *letters, "th", "the"])}
    made = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def tiny_gguf(path: Path, architecture="llama", *, dtype=torch.bfloat16, seed=0, **changes):
    """Write a random model with rows of 256 and 288 to a GGUF file."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    if architecture == "qwen3_moe":
        settings |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
            "mlp_only_layers": [], "decoder_sparse_step": 1,
        }  # fmt: skip
    model = tiny_model(architecture, seed=seed, dtype=dtype, **{**settings, **changes})
    convert_to_gguf(wrap_model(model, byte_tokenizer(), name=f"tiny-{architecture}"), path)
    return path


def load_tiny(path: Path, architecture="llama", **changes):
    """The model of a file that :func:`tiny_gguf` writes."""
    return load_model(tiny_gguf(path, architecture, **changes))
