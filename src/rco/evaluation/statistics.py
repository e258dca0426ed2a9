"""Means with standard errors, and the forward pass of every measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rco.data.calibration import CalibrationSet
from rco.models.loading import LoadedModel

__all__ = [
    "EvaluationError",
    "OnBatch",
    "batches",
    "describe_sequences",
    "hidden_states",
    "mean_of_sequences",
    "recovery",
    "sequence_sums",
]

OnBatch = Callable[[int, int], None]  # (done, total)


class EvaluationError(ValueError):
    """A measurement is impossible; the message says why and what to do."""


def hidden_states(loaded: LoadedModel, tokens: Tensor) -> Tensor:
    """Last hidden states (B, T, H) of token ids, on the model's device."""
    model: Any = loaded.model
    if hasattr(model, "ct_decompress_hook"):
        # A packed checkpoint unpacks itself on the first call of the whole model, which is not called here.
        model.hf_quantizer.compressor.decompress_model(model)
    return loaded.layout.final_hidden(model, tokens.to(loaded.device))


def batches(data: CalibrationSet, size: int, on_batch: OnBatch | None) -> Iterator[slice]:
    """Rows of a data set, one batch at a time, with progress."""
    if len(data) == 0 or data.num_predictions == 0:
        raise EvaluationError(f"{data.source or 'The data'} has no prediction to measure; pass more text.")
    if size < 1:
        raise EvaluationError(f"batch_size must be at least 1, got {size}.")
    count = -(-len(data) // size)
    for index in range(count):
        yield slice(index * size, (index + 1) * size)
        if on_batch is not None:
            on_batch(index + 1, count)


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sum per sequence, float64 on the CPU, of one value for each counted position in order."""
    rows = mask.nonzero()[:, 0].cpu()
    return torch.zeros(len(mask), dtype=torch.float64).index_add_(0, rows, values.cpu().double())


def mean_of_sequences(sums: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """Mean per token and its standard error, with whole sequences as the independent observations.

    Tokens of one text are correlated, so the error is that of a ratio of sums over sequences. It is None for a
    single sequence.
    """
    total = counts.double().sum()
    mean = sums.sum() / total
    if len(sums) < 2:
        return float(mean), None
    residuals = sums - mean * counts
    spread = residuals.square().sum() * len(sums) / (len(sums) - 1)
    return float(mean), float(spread.sqrt() / total)


def describe_sequences(
    sums: Tensor,
    counts: Tensor,
    domains: Sequence[str],
    describe: Callable[[float, float | None], dict[str, Any]],
) -> dict[str, Any]:
    """The measurement over all sequences and for each domain."""

    def block(rows: list[int]) -> dict[str, Any]:
        values = describe(*mean_of_sequences(sums[rows], counts[rows]))
        return {**values, "tokens": int(counts[rows].sum()), "sequences": len(rows)}

    rows_of: dict[str, list[int]] = {}
    for row, domain in enumerate(domains):
        if counts[row] > 0:
            rows_of.setdefault(domain, []).append(row)
    every = sorted(row for rows in rows_of.values() for row in rows)
    return {**block(every), "domains": {domain: block(rows) for domain, rows in rows_of.items()}}


def recovery(
    results: Mapping[str, Mapping[str, Any]],
    reference: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[str] = ("acc_norm", "acc"),
) -> dict[str, Any]:
    """Accuracy in per cent of the full model's, for every task that both have.

    Args:
        results: Measurements by task.
        reference: Measurements of the full model.
        metrics: Metrics in order of preference; the first that a task has is compared.

    Returns:
        ``tasks`` (per cent; None where the full model scores 0), ``average`` of the accuracies' ratio.
    """
    shares: dict[str, float | None] = {}
    pairs: list[tuple[float, float]] = []
    for task in results:
        metric = next((m for m in metrics if m in results[task] and m in reference.get(task, {})), None)
        if metric is None:
            continue
        ours, full = float(results[task][metric]), float(reference[task][metric])
        shares[task] = 100.0 * ours / full if full > 0 else None
        pairs.append((ours, full))
    total = math.fsum(full for _, full in pairs)
    average = 100.0 * math.fsum(ours for ours, _ in pairs) / total if total > 0 else None
    return {"tasks": shares, "average": average}
