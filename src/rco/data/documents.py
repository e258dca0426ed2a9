"""Documents: plain text or conversations, read from records and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Data",
    "DataError",
    "Document",
    "Part",
    "Texts",
    "document_from_record",
    "read_documents",
    "read_jsonl",
    "read_text",
    "take_part",
]

Part = Literal["calibration", "evaluation", "all"]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
          "system": "system", "tool": "tool"}  # fmt: skip
# Pairs of fields that hold a question and its answer; the first pair that a record has is taken.
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"),
          ("problem", "solution"))  # fmt: skip
_CHATS = ("messages", "chat", "conversations")
# One document in this many is held back for evaluation.
_EVALUATION_STRIDE = 5


class DataError(ValueError):
    """Data cannot be found, read or used; the message names the data and a remedy."""


@dataclass(frozen=True)
class Document:
    """Plain ``text``, or ``messages`` as (role, content) pairs of which the assistant's answers count."""

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> bytes:
        """A hash of the content, by which duplicates are found."""
        return hashlib.sha256(json.dumps([self.text, self.messages]).encode()).digest()


class Texts:
    """Documents passed from Python instead of being named: strings, conversations, records, files.

    Equal content is equal data; the printed name is a hash of the content.

    Args:
        entries: Each is a string (one text), a list of ``{"role", "content"}`` messages (one conversation), a
            record as in a JSONL file (see :func:`document_from_record`), or a :class:`~pathlib.Path` of a file.

    Raises:
        DataError: There are no documents, or an entry is none of these; the message names it.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        documents: dict[bytes, Document] = {}
        for index, entry in enumerate(entries):
            for document in _entry_documents(entry, f"data[{index}]"):
                documents.setdefault(document.key, document)
        self.documents = tuple(d for d in documents.values() if d.messages or d.text.strip())
        if not self.documents:
            raise DataError("`data` holds no text: pass strings, conversations, or files that are not empty.")
        digest = hashlib.sha256(b"".join(document.key for document in self.documents)).hexdigest()
        self.name = f"given-text-{digest[:16]}"

    def __repr__(self) -> str:
        return f"Texts({len(self.documents)} documents, {self.name})"

    def __str__(self) -> str:
        return self.name


Data = str | Path | Texts  # a name, a file or a mixture of both; or the documents themselves


def _entry_documents(entry: Any, where: str) -> list[Document]:
    if isinstance(entry, str):
        return [Document(text=entry)]
    if isinstance(entry, Path):
        return read_documents(entry)
    if isinstance(entry, Mapping):
        if "role" in entry and "content" in entry:
            raise DataError(
                f"{where} is a single message. A conversation is a list of messages, and data is a list of "
                "conversations: pass [[{...}, {...}], ...]."
            )
        return [document_from_record(entry, where)]
    if isinstance(entry, Sequence) and not isinstance(entry, bytes):
        return [Document(messages=_messages(list(entry), where))]
    raise DataError(
        f"{where} is a {type(entry).__name__}; an entry is a string, a list of messages, a record, or a Path."
    )


def document_from_record(record: Any, where: str) -> Document:
    """The document in one record of a data set.

    Args:
        record: A mapping with ``text``; or ``messages`` (``chat``, ``conversations``); or a question and its
            answer (``prompt`` and ``response``, ``instruction`` and ``output``, ...).
        where: File and line, for the message of an error.
    """
    if isinstance(record, str):
        return Document(text=record)
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a record must be a JSON object, got {type(record).__name__}.")
    for field in _CHATS:
        if record.get(field):
            return Document(messages=_messages(record[field], where))
    for asked, answered in _PAIRS:
        if isinstance(record.get(asked), str) and isinstance(record.get(answered), str):
            question = record[asked]
            if asked == "instruction" and record.get("input"):
                question = f"{question}\n\n{record['input']}"
            system = (("system", str(record["system"])),) if record.get("system") else ()
            return Document(messages=(*system, ("user", question), ("assistant", record[answered])))
    if isinstance(record.get("text"), str):
        return Document(text=record["text"])
    raise DataError(
        f"{where}: no usable field among {sorted(map(str, record))}; a record needs text, or messages, or prompt "
        "and response, or instruction and output, as strings."
    )


def _messages(entries: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(entries, list):
        raise DataError(f"{where}: messages must be a list, got {type(entries).__name__}.")
    pairs = []
    for entry in entries:
        role = entry.get("role", entry.get("from")) if isinstance(entry, Mapping) else None
        content = entry.get("content", entry.get("value")) if isinstance(entry, Mapping) else None
        if role not in _ROLES or not isinstance(content, str):
            raise DataError(
                f"{where}: a message needs a role ({', '.join(sorted(set(_ROLES.values())))}) and a content "
                f"string, got {str(entry)[:80]}."
            )
        pairs.append((_ROLES[role], content))
    if not any(role == "assistant" for role, _ in pairs):
        raise DataError(f"{where}: the conversation has no assistant message, so no prediction of it counts.")
    return tuple(pairs)


def read_text(path: Path) -> str:
    """The whole of a UTF-8 text file, with line ends as newlines."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def read_documents(path: Path) -> list[Document]:
    """The documents of a ``.txt`` or ``.jsonl`` file."""
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return read_jsonl(path)
    if suffix in (".txt", ".md", ".text", ""):
        return [Document(text=read_text(path))]
    raise DataError(f"{path} is neither .txt nor .jsonl; convert it to one of them.")


def read_jsonl(path: Path) -> list[Document]:
    """Every document of a JSONL file, in order and without exact duplicates.

    Raises:
        DataError: A line is not JSON or has no usable field; the message names the line.
    """
    documents: dict[bytes, Document] = {}
    # Only a newline ends a record: str.splitlines would also break at separators that JSON strings may hold.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}."
            ) from None
        document = document_from_record(record, f"{path}, line {number}")
        documents.setdefault(document.key, document)
    return list(documents.values())


def take_part(documents: Iterable[Document], part: Part) -> Iterator[Document]:
    """The documents of one part: every fifth is for evaluation, the others for calibration.

    Text that is a single document is cut instead: its last fifth is for evaluation.
    """
    stream = iter(documents)
    if part == "all":
        yield from stream
        return
    first, second = next(stream, None), next(stream, None)
    if first is None:
        return
    if second is None:
        yield from _cut(first, part)
        return
    # The second of the first five is held back, so that with two documents neither part is empty.
    for index, document in enumerate(_chain(first, second, stream)):
        if (index % _EVALUATION_STRIDE == 1) == (part == "evaluation"):
            yield document


def _chain(first: Document, second: Document, rest: Iterator[Document]) -> Iterator[Document]:
    yield first
    yield second
    yield from rest


def _cut(document: Document, part: Part) -> Iterator[Document]:
    if document.messages:
        if part == "calibration":
            yield document
        return
    text = document.text
    place = len(text) * (_EVALUATION_STRIDE - 1) // _EVALUATION_STRIDE
    # Cut at nearby white space, if any, so that no word is in both parts.
    while place < len(text) and not text[place].isspace():
        place += 1
    kept = text[:place] if part == "calibration" else text[place:]
    if kept.strip():
        yield Document(text=kept)
