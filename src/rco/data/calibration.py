"""Token sequences for calibration and evaluation: number, length, source, and which predictions count.

A source's tokens are cut into sequences that never overlap, and a seed picks among them. Search and selection take
different sequences of the calibration part; evaluation takes its own part of the source, which holds other
documents (or another region of a single text). So the three never share a token's position.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.data.documents import Data, DataError, Document, Part
from rco.data.sources import Mixture, Source, resolve_source
from rco.data.tokenization import first_tokens, text_pieces, token_stream

__all__ = ["CalibrationSet", "DataSplits", "build_calibration", "build_splits", "splits", "whole_shares"]

_CHARACTERS = 16_000_000  # of a source that is read whole; a larger one is thinned at random
_CHARACTERS_PER_TOKEN = 16  # generous, so that thinning leaves enough for any request


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Sequences of tokens without padding, and which of their predictions count.

    Attributes:
        tokens: (S, L) int64.
        mask: (S, L) bool: whether the prediction made *at* a position, of the token after it, counts. The last
            position predicts nothing within its sequence, so it never does.
        domains: The source of each sequence.
        source: The description the set was built from.
        seed: The seed that picked the sequences.
        part: The part of the sources they were taken from.
    """

    tokens: Tensor
    mask: Tensor
    domains: tuple[str, ...]
    source: str
    seed: int
    part: str

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens must be (S, L) int64, got {tuple(self.tokens.shape)} {self.tokens.dtype}."
            )
        if self.mask.shape != self.tokens.shape or self.mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be bool like tokens, got {tuple(self.mask.shape)} {self.mask.dtype}."
            )
        if len(self.domains) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} sequences need as many domains, got {len(self.domains)}.")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.tokens.shape[1]

    @property
    def num_predictions(self) -> int:
        """Number of predictions that count."""
        return int(self.mask.sum())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens and the mask, independent of how the set was described."""
        digest = hashlib.sha256(repr(tuple(self.tokens.shape)).encode())
        digest.update(self.tokens.cpu().contiguous().numpy().tobytes())
        digest.update(self.mask.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def select(self, indices: Sequence[int] | slice) -> CalibrationSet:
        """The set of some of the sequences."""
        picked = range(len(self))[indices] if isinstance(indices, slice) else list(indices)
        rows = torch.as_tensor(list(picked), dtype=torch.int64)
        domains = tuple(self.domains[i] for i in picked)
        return CalibrationSet(self.tokens[rows], self.mask[rows], domains, self.source, self.seed, self.part)

    def by_domain(self) -> dict[str, CalibrationSet]:
        """One set per domain, in the order of first appearance."""
        return {
            name: self.select([i for i, domain in enumerate(self.domains) if domain == name])
            for name in dict.fromkeys(self.domains)
        }

    def without(self, other: CalibrationSet) -> CalibrationSet:
        """The set of the sequences that another set does not hold."""
        held = {row.tobytes() for row in other.tokens.numpy()}
        return self.select([i for i, row in enumerate(self.tokens.numpy()) if row.tobytes() not in held])

    def batches(self, size: int) -> Iterator[CalibrationSet]:
        """The set in pieces of at most ``size`` sequences."""
        if size < 1:
            raise ValueError(f"A batch needs at least one sequence, got {size}.")
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))


@dataclass(frozen=True)
class DataSplits:
    """Disjoint sets for the search, for the selection among candidates, and for the evaluation."""

    search: CalibrationSet
    selection: CalibrationSet
    evaluation: CalibrationSet


def build_calibration(
    spec: Data,
    tokenizer: Any,
    *,
    samples: int | None,
    length: int,
    seed: int = 0,
    part: Part = "calibration",
    at_most: bool = False,
) -> CalibrationSet:
    """Make a set of token sequences.

    Args:
        spec: Names, files, mixtures or documents, see :func:`rco.data.sources.resolve_source`.
        tokenizer: A Hugging Face tokenizer.
        samples: Number of sequences; None for all.
        length: Tokens per sequence, a begin-of-text token included where the tokenizer sets one.
        seed: Picks the sequences and their order.
        part: ``"calibration"``, ``"evaluation"``, or ``"all"`` of each source.
        at_most: Take all sequences of a source that has fewer than its share, instead of refusing.

    Raises:
        DataError: The data cannot be read, or holds too little.
    """
    if part not in ("calibration", "evaluation", "all"):
        raise DataError(f"part must be calibration, evaluation or all, got {part!r}.")
    return _build(resolve_source(spec), tokenizer, samples, length, seed, part, lambda source: part, at_most)


def splits(data: CalibrationSet, *, search: int, selection: int) -> tuple[CalibrationSet, CalibrationSet]:
    """Cut a set in two: ``search`` sequences for gradients, ``selection`` others for the choice among candidates.

    Sequences are ordered such that both have the mixture's shares of every domain.
    """
    if search < 1 or selection < 0 or search + selection > len(data):
        raise DataError(
            f"Cannot take {search} sequences for search and {selection} for selection out of {len(data)}; request "
            f"at least one for search and at most {len(data)} together."
        )
    return data.select(slice(0, search)), data.select(slice(search, search + selection))


def build_splits(
    spec: Data,
    tokenizer: Any,
    *,
    search: int,
    selection: int,
    evaluation: int | None,
    length: int,
    seed: int = 0,
    evaluation_spec: Data | None = None,
    evaluation_length: int | None = None,
) -> DataSplits:
    """Build three disjoint sets.

    Args:
        spec: Data of search and selection.
        tokenizer: A Hugging Face tokenizer.
        search: Sequences that gradients use.
        selection: Sequences that choose among candidates.
        evaluation: Sequences for evaluating the result; None for all.
        length: Tokens per sequence.
        seed: Picks the sequences.
        evaluation_spec: Data of the evaluation; None for the held-back part of ``spec``. A local file that
            ``spec`` does not use is taken whole.
        evaluation_length: Tokens per sequence of the evaluation; None for ``length``.
    """
    mixture = resolve_source(spec)
    judged = mixture if evaluation_spec is None else resolve_source(evaluation_spec)
    used = {_identity(source) for source in mixture.sources}

    def held_back(source: Source) -> Part:
        return "all" if source.local and _identity(source) not in used else "evaluation"

    data = _build(
        mixture, tokenizer, search + selection, length, seed, "calibration", lambda source: "calibration"
    )
    first, second = splits(data, search=search, selection=selection)
    third = _build(judged, tokenizer, evaluation, evaluation_length or length, seed, "evaluation", held_back)
    return DataSplits(first, second, third)


def _identity(source: Source) -> str:
    return str(Path(source.name).expanduser().resolve()) if source.local else source.name


# ---------------------------------------------------------------------- building


@dataclass(frozen=True)
class _Windows:
    tokens: np.ndarray  # (n, L)
    mask: np.ndarray  # (n, L)
    seen: int  # tokens of the source that were read


def _build(
    mixture: Mixture,
    tokenizer: Any,
    samples: int | None,
    length: int,
    seed: int,
    part: Part,
    part_of: Callable[[Source], Part],
    at_most: bool = False,
) -> CalibrationSet:
    if tokenizer is None:
        raise DataError(
            "Building data needs the model's tokenizer, and the model has none; add one to its folder."
        )
    if samples is not None and samples < 1:
        raise DataError(f"samples must be at least 1, got {samples}.")
    if length < 2:
        raise DataError(
            f"A sequence needs at least 2 tokens, a context and a prediction; got length {length}."
        )
    prefix = np.asarray(first_tokens(tokenizer), dtype=np.int64)
    shares = None if samples is None else whole_shares(mixture.weights, samples)
    tokens, mask, domains, places = [], [], [], []
    for index, source in enumerate(mixture.sources):
        wanted = None if shares is None else shares[index]
        if wanted == 0:
            continue
        found = _windows(source, part_of(source), tokenizer, prefix, length, wanted, seed)
        if at_most and wanted is not None:
            wanted = min(wanted, max(1, len(found.tokens)))
        _check_enough(source, part_of(source), found, wanted, length)
        rows = _pick(found, wanted, source, seed)
        tokens.append(found.tokens[rows])
        mask.append(found.mask[rows])
        domains += [source.name] * len(rows)
        places += [(rank + 0.5) / len(rows) for rank in range(len(rows))]
    order = np.argsort(np.asarray(places), kind="stable")  # any prefix then has every domain's share
    return CalibrationSet(
        torch.from_numpy(np.concatenate(tokens)[order]),
        torch.from_numpy(np.concatenate(mask)[order]),
        tuple(domains[i] for i in order),
        mixture.spec,
        seed,
        part,
    )


def whole_shares(weights: Sequence[float], samples: int) -> list[int]:
    """Whole numbers in proportion to the weights that sum to ``samples`` (largest remainders)."""
    exact = [weight * samples / math.fsum(weights) for weight in weights]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: samples - sum(counts)]:
        counts[i] += 1
    return counts


def _windows(
    source: Source, part: Part, tokenizer: Any, prefix: np.ndarray, length: int, wanted: int | None, seed: int
) -> _Windows:
    """All sequences of a source, in its order; of a streamed source, as many as requested."""
    if source.streamed and wanted is None:
        raise DataError(f"{source.name} is too large to be read whole; give a number of samples.")
    body = length - len(prefix)
    documents: Iterable[Document] = source.documents(part, seed)
    if not source.streamed:
        limit = max(_CHARACTERS, (wanted or 0) * length * _CHARACTERS_PER_TOKEN)
        documents = _thinned(documents, limit, _generator(source, seed))
    tokens: list[np.ndarray] = []
    mask: list[np.ndarray] = []
    rest_ids, rest_counts, seen, enough = np.empty(0, np.int64), np.empty(0, bool), 0, 0
    for ids, counts in token_stream(documents, tokenizer):
        seen += len(ids)
        rest_ids, rest_counts = np.concatenate([rest_ids, ids]), np.concatenate([rest_counts, counts])
        whole = len(rest_ids) // body
        if not whole:
            continue
        used = whole * body
        cut, flags = rest_ids[:used].reshape(whole, body), rest_counts[:used].reshape(whole, body)
        rest_ids, rest_counts = rest_ids[used:], rest_counts[used:]
        block = np.concatenate([np.broadcast_to(prefix, (whole, len(prefix))), cut], axis=1)
        counted = np.zeros(block.shape, dtype=bool)
        counted[:, : length - 1] = np.concatenate([np.zeros((whole, len(prefix)), bool), flags], axis=1)[
            :, 1:
        ]
        useful = counted.any(axis=1)  # a sequence without any answer would have no weight
        tokens.append(block[useful])
        mask.append(counted[useful])
        enough += int(useful.sum())
        if source.streamed and wanted is not None and enough >= wanted:
            break
    empty = np.empty((0, length))
    return _Windows(
        np.concatenate([empty.astype(np.int64), *tokens]), np.concatenate([empty.astype(bool), *mask]), seen
    )


def _thinned(documents: Iterable[Document], limit: int, generator: np.random.Generator) -> Iterable[Document]:
    """The documents, or a random part of them of about ``limit`` characters when they are more than that."""
    held = list(documents)
    if sum(_size(document) for document in held) <= limit:
        return held
    pieces = list(
        chain.from_iterable(
            [document]
            if document.messages
            else (Document(text=piece) for piece in text_pieces(document.text))
            for document in held
        )
    )
    order = generator.permutation(len(pieces))
    total = np.cumsum([_size(pieces[i]) for i in order])
    return [pieces[i] for i in sorted(order[: int(np.searchsorted(total, limit)) + 1])]


def _size(document: Document) -> int:
    return len(document.text) + sum(len(content) for _, content in document.messages)


def _pick(found: _Windows, wanted: int | None, source: Source, seed: int) -> np.ndarray:
    count = len(found.tokens)
    if wanted is None:
        return np.arange(count)
    if source.streamed:  # already in random order
        return np.arange(wanted)
    return _generator(source, seed).permutation(count)[:wanted]


def _generator(source: Source, seed: int) -> np.random.Generator:
    # The file's own name, not its path, so that moving a folder changes nothing.
    label = Path(source.name).name if source.local else source.name
    return np.random.default_rng([seed & 0xFFFFFFFF, zlib.crc32(label.encode())])


def _check_enough(source: Source, part: Part, found: _Windows, wanted: int | None, length: int) -> None:
    name = source.title or source.name
    which = name if part == "all" else f"{name} ({part} part)"
    if found.seen == 0:
        raise DataError(f"{which} holds no text; pass other data.")
    count = len(found.tokens)
    if count == 0:
        if found.seen >= length:
            raise DataError(
                f"{which} has {found.seen} tokens, but no whole sequence of {length} among them holds an answer; "
                "pass a smaller `length` or other data."
            )
        raise DataError(
            f"{which} has {found.seen} tokens, fewer than one sequence of {length}: set `length` to at most "
            f"{found.seen}, or pass more text."
        )
    if wanted is not None and count < wanted:
        raise DataError(
            f"{which} has {found.seen} tokens, enough for {count} sequences of {length}, and {wanted} were "
            f"requested: request at most {count}, shorter sequences, or pass more text."
        )
