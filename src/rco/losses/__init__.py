"""Losses over a large vocabulary from hidden states: KL to a reference and cross-entropy, masked and chunked."""

from rco.losses.chunked import (
    chunked_cross_entropy,
    chunked_kl,
    token_cross_entropy,
    token_kl,
    token_kl_and_cross_entropy,
)
from rco.losses.head import LOGITS_BYTES, Head, chunk_length, sample_tokens

__all__ = [
    "LOGITS_BYTES",
    "Head",
    "chunk_length",
    "chunked_cross_entropy",
    "chunked_kl",
    "sample_tokens",
    "token_cross_entropy",
    "token_kl",
    "token_kl_and_cross_entropy",
]
