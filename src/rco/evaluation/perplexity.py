"""Perplexity of a model on text."""

from __future__ import annotations

import math
from typing import Any

import torch

from rco.data.calibration import CalibrationSet
from rco.evaluation.reference_states import ReferenceStates, head_of, hidden_of
from rco.evaluation.statistics import OnBatch, batches, describe_sequences, sequence_sums
from rco.losses import token_cross_entropy
from rco.models.loading import LoadedModel

__all__ = ["described_perplexity", "measure_perplexity"]


@torch.no_grad()
def measure_perplexity(
    loaded: LoadedModel | ReferenceStates,
    data: CalibrationSet,
    *,
    batch_size: int = 8,
    on_batch: OnBatch | None = None,
) -> dict[str, Any]:
    """Perplexity over all counted predictions, and for each domain.

    Args:
        loaded: The model, or its hidden states on this data.
        data: Sequences of tokens.
        batch_size: Sequences at a time.
        on_batch: Called with (batches done, total batches).

    Returns:
        ``perplexity``, its standard error ``stderr`` (None for one sequence), the mean negative log-likelihood
        ``nll`` in nats per token and ``nll_stderr``, ``tokens``, ``sequences``; the same under ``domains`` by name.
    """
    head = head_of(loaded, data)
    parts = []
    for rows in batches(data, batch_size, on_batch):
        tokens, mask = data.tokens[rows], data.mask[rows][:, :-1]
        if not mask.any():
            parts.append(torch.zeros(len(tokens), dtype=torch.float64))
            continue
        hidden = hidden_of(loaded, data, rows)[:, :-1]
        values = token_cross_entropy(hidden, head, tokens[:, 1:].to(hidden.device), mask.to(hidden.device))
        parts.append(sequence_sums(values, mask))
    counts = data.mask[:, :-1].sum(1)
    return describe_sequences(torch.cat(parts), counts, data.domains, described_perplexity)


def described_perplexity(mean: float, error: float | None) -> dict[str, Any]:
    """Perplexity and its standard error, from those of the mean negative log-likelihood."""
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return {
        "perplexity": perplexity,
        "stderr": None if error is None else perplexity * error,
        "nll": mean,
        "nll_stderr": error,
    }
