"""Conversion of documents to one stream of tokens per source, with a flag for the tokens that count.

Plain text counts everywhere. Of a conversation only the assistant's answers count, with their end tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rco.data.documents import DataError, Document

__all__ = ["first_tokens", "text_pieces", "token_stream"]

_PIECE = 65536  # characters tokenised at a time: long texts would otherwise run on one core
_BATCH = 64


def first_tokens(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts before every sequence (a begin-of-text token, or none)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    probe = tokenizer("a", add_special_tokens=True)["input_ids"]
    return [int(bos)] if bos is not None and len(probe) > 0 and probe[0] == bos else []


def token_stream(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids (int64) and whether each counts (bool), document after document.

    Documents end with the end-of-text token, if the tokenizer has one, which marks the boundary between two.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    tail = [] if end is None else [int(end)]
    batch: list[str] = []
    for document in documents:
        if document.messages:
            yield from _flush(batch, tokenizer, tail)
            batch = []
            ids, counts = _conversation(document.messages, tokenizer)
            # Many templates close a turn with this very token, perhaps with a newline after it.
            if end is not None and end not in ids[-2:]:
                ids, counts = np.append(ids, end), np.append(counts, False)
            yield ids, counts
            continue
        if not document.text.strip():
            continue
        batch.append(document.text)
        if len(batch) == _BATCH:
            yield from _flush(batch, tokenizer, tail)
            batch = []
    yield from _flush(batch, tokenizer, tail)


def _flush(texts: list[str], tokenizer: Any, tail: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if not texts:
        return
    pieces = [list(text_pieces(text)) for text in texts]
    encoded = iter(_encode([piece for group in pieces for piece in group], tokenizer))
    for group in pieces:
        ids = [token for _ in group for token in next(encoded)] + tail
        array = np.asarray(ids, dtype=np.int64)
        yield array, np.ones(len(array), dtype=bool)


def text_pieces(text: str) -> Iterator[str]:
    """Cut a long text at line ends, across which hardly any tokenizer merges."""
    start = 0
    while len(text) - start > _PIECE:
        cut = text.find("\n", start + _PIECE)
        # A run of line ends stays whole, with the text before it.
        while 0 <= cut < len(text) and text[cut] == "\n":
            cut += 1
        if cut < 0 or cut >= len(text):
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    # verbose=False: a text longer than the model's context is fine here: it is cut into sequences later.
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _conversation(messages: Sequence[tuple[str, str]], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a conversation and which of them belong to the assistant's answers.

    The conversation is rendered message by message: an answer begins where the rendered prefix, with the cue for an
    answer, ends. The text is split there before it is tokenised, so that no token crosses the border.
    """
    render = _template(tokenizer) if getattr(tokenizer, "chat_template", None) else _plain
    spans: list[tuple[str, bool]] = []
    done = ""
    for index, (role, _) in enumerate(messages):
        if role != "assistant":
            continue
        before = render(messages[:index], True)
        after = render(messages[: index + 1], False)
        if not before.startswith(done) or not after.startswith(before):
            # Templates that rewrite earlier turns (dropping old reasoning, say): the cue is not part of the result.
            before = _common_prefix(before, after)
            if not before.startswith(done):
                raise DataError(
                    "The tokenizer's chat template changes earlier turns as a conversation grows, so answers "
                    "cannot be told apart; use conversations with one answer each."
                )
        spans += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    encoded = _encode([text for text, _ in spans], tokenizer)
    ids = np.asarray([token for tokens in encoded for token in tokens], dtype=np.int64)
    counts = np.repeat([flag for _, flag in spans], [len(tokens) for tokens in encoded])
    return ids, counts.astype(bool)


def _template(tokenizer: Any) -> Any:
    def render(messages: Sequence[tuple[str, str]], cue: bool) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=cue))

    return render


def _plain(messages: Sequence[tuple[str, str]], cue: bool) -> str:
    """Blank lines between turns: the format for tokenizers without a chat template."""
    text = "\n\n".join(content for _, content in messages)
    return f"{text}\n\n" if cue and text else text


def _common_prefix(first: str, second: str) -> str:
    length = min(len(first), len(second))
    same = next((i for i in range(length) if first[i] != second[i]), length)
    return first[:same]
