"""Accuracy on tasks from local JSONL files: multiple choice, and the last word of a passage (LAMBADA).

A line is ``{"context", "choices", "label"}``, or ``{"context", "continuation"}``. Answers are scored by the model's
log-likelihood of each choice after the context; nothing is generated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.data.tokenization import first_tokens
from rco.evaluation.statistics import EvaluationError, OnBatch, hidden_states, sequence_sums
from rco.losses import chunk_length, token_cross_entropy
from rco.models.loading import LoadedModel

__all__ = ["Item", "Task", "evaluate_task", "load_task", "log_likelihoods"]


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        context: Text before the answer.
        choices: Possible answers; a single one is scored by whether greedy decoding produces it.
        label: Index of the right one.
    """

    context: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Task:
    """Questions of one kind.

    Attributes:
        name: Name of the task in results.
        items: The questions.
        multiple_choice: Whether there are choices, or one continuation to be predicted.
    """

    name: str
    items: tuple[Item, ...]
    multiple_choice: bool


def load_task(path: str | Path, *, name: str | None = None, limit: int | None = None) -> Task:
    """Read a task.

    Args:
        path: A JSONL file.
        name: Name of the task; None: the file's, up to the first dot.
        limit: Number of questions, from the start.

    Raises:
        EvaluationError: The file is missing or empty, or a line is not a question; the message names the line.
    """
    path = Path(path).expanduser()
    if limit is not None and limit < 1:
        raise EvaluationError(f"limit must be at least 1, got {limit}.")
    items: list[Item] = []
    kinds: set[bool] = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(items) == limit:
                    break
                if line.strip():
                    item = _read_item(line, f"{path}, line {number}")
                    items.append(item)
                    kinds.add(len(item.choices) > 1)
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path} cannot be read as a task: {error}.") from None
    if not items:
        raise EvaluationError(f"{path} holds no questions.")
    if len(kinds) > 1:
        raise EvaluationError(f"{path} mixes choices and continuations; split it into two files.")
    return Task(name or path.name.partition(".")[0], tuple(items), kinds.pop())


def _read_item(line: str, place: str) -> Item:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise EvaluationError(f"{place}: not valid JSON ({error}).") from None
    if isinstance(record, dict) and isinstance(record.get("context"), str):
        choices, label = record.get("choices"), record.get("label")
        if choices is None and isinstance(record.get("continuation"), str) and record["continuation"]:
            return Item(record["context"], (record["continuation"],), 0)
        if (
            isinstance(choices, list)
            and len(choices) > 1
            and all(isinstance(choice, str) and choice for choice in choices)
            and isinstance(label, int)
            and 0 <= label < len(choices)
        ):
            return Item(record["context"], tuple(choices), label)
    raise EvaluationError(
        f"{place}: expected an object with context, choices (two or more texts) and label (an index), or with "
        "context and continuation."
    )


def evaluate_task(
    loaded: LoadedModel, task: Task, *, batch_tokens: int = 8192, on_batch: OnBatch | None = None
) -> dict[str, Any]:
    """Accuracy of a model on a task.

    Args:
        loaded: The model, with its tokenizer.
        task: The questions.
        batch_tokens: Tokens in one forward pass, padding included.
        on_batch: Called with (batches done, total batches).

    Returns:
        ``acc`` and ``acc_stderr``; for choices also ``acc_norm`` and ``acc_norm_stderr``, the accuracy when a
        choice's log-likelihood is divided by its length in characters; for continuations ``perplexity`` of the
        continuation; ``items``.
    """
    pairs = [(item.context, choice) for item in task.items for choice in item.choices]
    scores, greedy = log_likelihoods(loaded, pairs, batch_tokens=batch_tokens, on_batch=on_batch)
    if not task.multiple_choice:
        mean, error = _mean(scores)
        right, right_error = _mean(greedy.astype(np.float64))
        perplexity = math.exp(-mean) if mean > -700 else math.inf
        return {
            "acc": right,
            "acc_stderr": right_error,
            "perplexity": perplexity,
            "perplexity_stderr": None if error is None else perplexity * error,
            "items": len(task.items),
        }
    plain, normalised, start = [], [], 0
    for item in task.items:
        own = scores[start : start + len(item.choices)]
        start += len(item.choices)
        lengths = np.array([max(1, len(choice.removeprefix(" "))) for choice in item.choices])
        plain.append(float(np.argmax(own) == item.label))
        normalised.append(float(np.argmax(own / lengths) == item.label))
    right, right_error = _mean(np.array(plain))
    norm, norm_error = _mean(np.array(normalised))
    return {
        "acc": right,
        "acc_stderr": right_error,
        "acc_norm": norm,
        "acc_norm_stderr": norm_error,
        "items": len(task.items),
    }


def _mean(values: np.ndarray) -> tuple[float, float | None]:
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


# ---------------------------------------------------------------------- log-likelihoods


@dataclass(frozen=True)
class _Request:
    tokens: tuple[int, ...]  # context and continuation
    scored: int  # number of tokens of the continuation, at the end


@torch.no_grad()
def log_likelihoods(
    loaded: LoadedModel,
    pairs: Sequence[tuple[str, str]],
    *,
    batch_tokens: int = 8192,
    on_batch: OnBatch | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each continuation after its context, and whether greedy decoding would produce it.

    Texts of similar length share a forward pass; logits exist for a chunk of scored tokens at a time.
    """
    if loaded.tokenizer is None:
        raise EvaluationError("Tasks need the model's tokenizer, but the model has none; load it with one.")
    if not pairs:
        raise EvaluationError("There is nothing to score: no questions were given.")
    requests = _tokenize(loaded, pairs)
    scores, greedy = np.zeros(len(requests)), np.zeros(len(requests), dtype=bool)
    planned = list(_batches(requests, batch_tokens))
    for done, rows in enumerate(planned, 1):
        values, chosen = _score(loaded, [requests[row] for row in rows])
        scores[rows], greedy[rows] = values, chosen
        if on_batch is not None:
            on_batch(done, len(planned))
    return scores, greedy


def _tokenize(loaded: LoadedModel, pairs: Sequence[tuple[str, str]]) -> list[_Request]:
    tokenizer = loaded.tokenizer
    prefix = first_tokens(tokenizer)
    if not prefix:  # a scored token needs one before it
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        lead = [] if start is None else [int(start)]
    else:
        lead = prefix
    model: Any = loaded.model
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    # Spaces belong to the word after them, as inside a text.
    moved = [(c.rstrip(" "), c[len(c.rstrip(" ")) :] + continuation) for c, continuation in pairs]
    whole = tokenizer([c + continuation for c, continuation in moved], add_special_tokens=False)["input_ids"]
    before = tokenizer([c for c, _ in moved], add_special_tokens=False)["input_ids"]
    requests = []
    for (context, continuation), ids, head in zip(moved, whole, before, strict=True):
        # The context's last token may merge with the continuation, which gets at least one token.
        shared = min(len(head), len(ids) - 1)
        opening = prefix if shared else lead
        tokens = [*opening, *ids]
        scored = len(ids) - shared
        if len(tokens) == scored or scored < 1:
            raise EvaluationError(
                f"The continuation {continuation!r} of {context[-40:]!r} has no token before it; give a context."
            )
        if len(tokens) > limit:
            if scored >= limit:
                raise EvaluationError(
                    f"A continuation of {scored} tokens does not fit into the model's {limit} positions."
                )
            tokens = tokens[-int(limit) :]  # keep the end of the context
        requests.append(_Request(tuple(tokens), scored))
    return requests


def _batches(requests: Sequence[_Request], batch_tokens: int) -> Iterator[list[int]]:
    """Rows that share a pass, longest first, so that padding is short and the first pass has the peak memory."""
    order = sorted(range(len(requests)), key=lambda row: -len(requests[row].tokens))
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // len(requests[order[start]].tokens))
        yield order[start : start + size]
        start += size


def _score(loaded: LoadedModel, requests: Iterable[_Request]) -> tuple[np.ndarray, np.ndarray]:
    rows = list(requests)
    width = max(len(row.tokens) for row in rows)
    # Attention is causal, so padding on the right has no effect.
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width - 1, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[index, len(row.tokens) - 1 - row.scored : len(row.tokens) - 1] = True
    hidden = hidden_states(loaded, tokens)[:, :-1]
    head = loaded.layout.head(loaded.model)
    targets = tokens[:, 1:].to(hidden.device)
    scored = mask.to(hidden.device)
    losses = token_cross_entropy(hidden, head, targets, scored)
    wrong = _not_greedy(hidden[scored], targets[scored], head)
    missed = sequence_sums(wrong, mask)
    return -sequence_sums(losses, mask).numpy(), (missed == 0).numpy()


def _not_greedy(hidden: Tensor, targets: Tensor, head: Any) -> Tensor:
    """1.0 for each token that is not the likeliest, by the model's own logits."""
    step = chunk_length(head.vocabulary)
    chunks = zip(torch.split(hidden, step), torch.split(targets, step), strict=True)
    return torch.cat([(head(rows).argmax(-1) != wanted).float() for rows, wanted in chunks])
