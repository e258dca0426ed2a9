"""KL divergence of a model's predictions from those of the full model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rco.data.calibration import CalibrationSet
from rco.evaluation.reference_states import ReferenceStates, head_of, hidden_of
from rco.evaluation.statistics import (
    EvaluationError,
    OnBatch,
    batches,
    describe_sequences,
    sequence_sums,
)
from rco.losses import Head, token_kl
from rco.models.loading import LoadedModel

__all__ = ["ReferenceStates", "measure_divergence"]


@torch.no_grad()
def measure_divergence(
    loaded: LoadedModel | ReferenceStates,
    reference: LoadedModel | ReferenceStates,
    data: CalibrationSet,
    *,
    batch_size: int = 8,
    top_k: int | None = None,
    on_batch: OnBatch | None = None,
) -> dict[str, Any]:
    """Mean KL(reference || model) per counted prediction, and for each domain.

    Args:
        loaded: The model, or its hidden states on the same data.
        reference: The full model, or its hidden states on the same data.
        data: Sequences of tokens.
        batch_size: Sequences at a time.
        top_k: Coarsen to the reference's k likeliest tokens and one bucket for the rest.
        on_batch: Called with (batches done, total batches).

    Returns:
        ``kl`` in nats per token, its standard error ``stderr`` (None for one sequence), ``tokens``,
        ``sequences``; the same under ``domains`` by name.
    """
    head, reference_head = head_of(loaded, data), head_of(reference, data)
    if reference_head.vocabulary != head.vocabulary:
        raise EvaluationError(
            f"The reference has {reference_head.vocabulary} tokens and the model {head.vocabulary}: a KL needs "
            "one vocabulary. Pass the model that this one was made from."
        )
    parts = []
    for rows in batches(data, batch_size, on_batch):
        tokens, mask = data.tokens[rows], data.mask[rows][:, :-1]
        if not mask.any():
            parts.append(torch.zeros(len(tokens), dtype=torch.float64))
            continue
        hidden = hidden_of(loaded, data, rows)[:, :-1]
        target = hidden_of(reference, data, rows)[:, :-1]
        values = token_kl(
            hidden, head, target, _on(reference_head, hidden.device), mask.to(hidden.device), top_k=top_k
        )
        parts.append(sequence_sums(values, mask))
    counts = data.mask[:, :-1].sum(1)
    return describe_sequences(
        torch.cat(parts), counts, data.domains, lambda mean, error: {"kl": mean, "stderr": error}
    )


def _on(head: Head, device: torch.device) -> Head:
    if head.weight.device == device:
        return head
    return replace(
        head, weight=head.weight.to(device), bias=None if head.bias is None else head.bias.to(device)
    )
