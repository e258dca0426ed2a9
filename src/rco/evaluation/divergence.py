"""KL divergence of a model's predictions from those of the full model, alone or with their perplexity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rco.data.calibration import CalibrationSet
from rco.evaluation.perplexity import described_perplexity
from rco.evaluation.reference_states import ReferenceStates, head_of, hidden_of
from rco.evaluation.statistics import (
    EvaluationError,
    OnBatch,
    batches,
    describe_sequences,
    sequence_sums,
)
from rco.losses import Head, token_kl, token_kl_and_cross_entropy
from rco.models.loading import LoadedModel

__all__ = ["ReferenceStates", "measure_divergence", "measure_divergence_and_perplexity"]


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

    def values(
        hidden: Tensor, target: Tensor, heads: tuple[Head, Head], _: Tensor, mask: Tensor
    ) -> list[Tensor]:
        return [token_kl(hidden, heads[0], target, heads[1], mask, top_k=top_k)]

    (parts,) = _sequence_sums(loaded, reference, data, batch_size, on_batch, values, 1)
    return describe_sequences(parts, data.mask[:, :-1].sum(1), data.domains, _described)


def measure_divergence_and_perplexity(
    loaded: LoadedModel | ReferenceStates,
    reference: LoadedModel | ReferenceStates,
    data: CalibrationSet,
    *,
    batch_size: int = 8,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """:func:`measure_divergence` and :func:`measure_perplexity`, with the model's logits computed once."""

    def values(
        hidden: Tensor, target: Tensor, heads: tuple[Head, Head], tokens: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        return token_kl_and_cross_entropy(hidden, heads[0], target, heads[1], tokens, mask)

    divergence, likelihood = _sequence_sums(loaded, reference, data, batch_size, None, values, 2)
    counts = data.mask[:, :-1].sum(1)
    return (
        describe_sequences(divergence, counts, data.domains, _described),
        describe_sequences(likelihood, counts, data.domains, described_perplexity),
    )


@torch.no_grad()
def _sequence_sums(
    loaded: LoadedModel | ReferenceStates,
    reference: LoadedModel | ReferenceStates,
    data: CalibrationSet,
    batch_size: int,
    on_batch: OnBatch | None,
    values: Callable[[Tensor, Tensor, tuple[Head, Head], Tensor, Tensor], Sequence[Tensor]],
    count: int,
) -> list[Tensor]:
    """Sums per sequence of ``count`` kinds of values of its tokens."""
    head, reference_head = head_of(loaded, data), head_of(reference, data)
    if reference_head.vocabulary != head.vocabulary:
        raise EvaluationError(
            f"The reference has {reference_head.vocabulary} tokens and the model {head.vocabulary}: a KL needs "
            "one vocabulary. Pass the model that this one was made from."
        )
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    for rows in batches(data, batch_size, on_batch):
        tokens, mask = data.tokens[rows], data.mask[rows][:, :-1]
        if not mask.any():
            for part in parts:
                part.append(torch.zeros(len(tokens), dtype=torch.float64))
            continue
        hidden = hidden_of(loaded, data, rows)[:, :-1]
        target = hidden_of(reference, data, rows)[:, :-1]
        heads = (head, _on(reference_head, hidden.device))
        next_tokens, counted = tokens[:, 1:].to(hidden.device), mask.to(hidden.device)
        for part, found in zip(parts, values(hidden, target, heads, next_tokens, counted), strict=True):
            part.append(sequence_sums(found, mask))
    return [torch.cat(part) for part in parts]


def _described(mean: float, error: float | None) -> dict[str, Any]:
    return {"kl": mean, "stderr": error}


def _on(head: Head, device: torch.device) -> Head:
    if head.weight.device == device:
        return head
    return replace(
        head, weight=head.weight.to(device), bias=None if head.bias is None else head.bias.to(device)
    )
