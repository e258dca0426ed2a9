"""Sources of data: built-in names, files, and mixtures of them."""

from __future__ import annotations

import difflib
import importlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rco.data.documents import (
    Data,
    DataError,
    Document,
    Part,
    Texts,
    document_from_record,
    read_documents,
    read_text,
    take_part,
)
from rco.requirements import require

__all__ = ["DEFAULT_SOURCE", "Mixture", "Source", "describe_sources", "resolve_source"]

_ASSETS = Path(__file__).parent / "assets"
_BREAK = "\f"  # between the documents of a built-in text
_SHUFFLE_BUFFER = 2000
_HUB_TIMEOUT = 10.0  # seconds
_WEIGHTED = re.compile(r"(?P<name>.+?)\*(?P<weight>\d+(\.\d+)?)")

DEFAULT_SOURCE = "builtin"

_BUILTIN = {
    "en_prose": "English prose, public domain: 0.5 MB for calibration, 0.3 MB of other works for evaluation",
    "de_law": "German statutes, public domain: 0.5 MB for calibration, 0.3 MB of other statutes for evaluation",
    "fr_novels": "French novels, public domain: 0.5 MB for calibration, 0.3 MB of other works for evaluation",
}
_GROUPS = {"builtin": tuple(_BUILTIN)}


@dataclass(frozen=True)
class _HubDataset:
    """A data set of the Hub; if it has no evaluation split, one record in five is held back.

    ``title`` matches the record that begins a document, for data sets whose records are the lines of documents.
    """

    summary: str
    repository: str
    config: str | None
    split: str
    evaluation_split: str | None = None
    title: str | None = None


_HUB = {
    "fineweb-edu": _HubDataset("educational web pages", "HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
    "c4": _HubDataset("web pages, English", "allenai/c4", "en", "train", "validation"),
    "wikitext2": _HubDataset(
        "Wikipedia articles, raw",
        "Salesforce/wikitext",
        "wikitext-2-raw-v1",
        "train",
        "test",
        r" = [^=].* = \s*",
    ),
    "evol-codealpaca": _HubDataset(
        "coding questions with answers", "theblackcat102/evol-codealpaca-v1", None, "train"
    ),
    "tulu-math": _HubDataset("mathematical conversations", "allenai/tulu-3-sft-personas-math", None, "train"),
}


@dataclass(frozen=True)
class Source:
    """One source of documents.

    Attributes:
        name: Its label; the domain of the sequences made from it.
        documents: ``documents(part, seed)`` streams the documents of a part. The seed matters only to sources too
            large to be read whole.
        streamed: Whether it is too large to be read whole; then only as much is read as is requested.
        local: Whether it is the user's file, whose evaluation part is held back from calibration.
        title: Its name in messages, where that differs from the label.
    """

    name: str
    documents: Callable[[Part, int], Iterator[Document]]
    streamed: bool = False
    local: bool = False
    title: str = ""


@dataclass(frozen=True)
class Mixture:
    """Sources and their shares of the sequences."""

    spec: str
    sources: tuple[Source, ...]
    weights: tuple[float, ...]


def describe_sources() -> dict[str, str]:
    """One-line description of each known name."""
    return {
        **{name: " + ".join(members) for name, members in _GROUPS.items()},
        **_BUILTIN,
        **{name: f"{row.summary} (Hub: {row.repository})" for name, row in _HUB.items()},
    }


def resolve_source(spec: Data) -> Mixture:
    """Read a description of data.

    Args:
        spec: A name, a local ``.txt`` or ``.jsonl`` file, or several joined by ``+``, each with an optional
            weight: ``en_prose+my.jsonl``, ``c4*3+tulu-math``. A file whose own name holds ``+`` or ``*`` works.
            Or the documents themselves.

    Raises:
        DataError: A name is unknown, a file is missing or of an unknown kind, or a weight is not positive.
    """
    if isinstance(spec, Texts):
        given = Source(
            spec.name, lambda part, seed: take_part(spec.documents, part), local=True, title="the given text"
        )
        return Mixture(spec.name, (given,), (1.0,))
    text = str(spec).strip()
    if not text:
        raise DataError(f"No data was given; pass a file or one of {', '.join(describe_sources())}.")
    weights: dict[str, float] = {}
    sources: dict[str, Source] = {}
    for item in [text] if Path(text).expanduser().exists() else text.split("+"):
        name, weight = _split_weight(item.strip(), text)
        members = _GROUPS.get(name, (name,))
        for member in members:
            source = _resolve_one(member)
            sources[source.name] = source
            weights[source.name] = weights.get(source.name, 0.0) + weight / len(members)
    return Mixture(text, tuple(sources.values()), tuple(weights[name] for name in sources))


def _split_weight(item: str, spec: str) -> tuple[str, float]:
    if not item:
        raise DataError(f"{spec!r} has an empty part; write names joined by single + signs.")
    match = None if Path(item).expanduser().exists() else _WEIGHTED.fullmatch(item)
    if match is None:
        return item, 1.0
    weight = float(match["weight"])
    if weight <= 0:
        raise DataError(f"The weight in {item!r} must be positive.")
    return match["name"].strip(), weight


def _resolve_one(name: str) -> Source:
    if name in _BUILTIN:
        return Source(name, lambda part, seed: _builtin_documents(name, part))
    if name in _HUB:
        return Source(name, lambda part, seed: _hub_documents(name, part, seed), streamed=True)
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(f"{name} is a folder; pass a .txt or .jsonl file in it.")
    if path.is_file():
        return _file_source(path)
    if path.suffix in (".txt", ".jsonl", ".json", ".md") or "/" in name:
        raise DataError(f"There is no file {name}; check the path.")
    close = difflib.get_close_matches(name, describe_sources(), n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise DataError(
        f"Unknown data {name!r}.{hint} Pass a .txt or .jsonl file or one of {', '.join(describe_sources())}."
    )


def _file_source(path: Path) -> Source:
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".txt", ".md", ".text", ""):
        raise DataError(f"{path} is neither .txt nor .jsonl; convert it to one of them.")
    return Source(str(path), lambda part, seed: take_part(read_documents(path), part), local=True)


def _builtin_documents(name: str, part: Part) -> Iterator[Document]:
    for one in ("calibration", "evaluation") if part == "all" else (part,):
        for text in read_text(_ASSETS / f"{name}.{one}.txt").split(_BREAK):
            yield Document(text=text.strip())


def _hub_documents(name: str, part: Part, seed: int) -> Iterator[Document]:
    row = _HUB[name]
    own_split = row.evaluation_split is not None
    split = row.evaluation_split if own_split and part == "evaluation" else row.split
    records = _open_hub(name, row, str(split))
    documents: Iterator[Document] = (
        document_from_record(record, f"{name}, record {index}")
        for index, record in enumerate(records, start=1)
    )
    if row.title is not None:
        documents = _joined(documents, re.compile(row.title))
    filled = (document for document in documents if document.messages or document.text.strip())
    chosen = filled if own_split else take_part(filled, part)
    yield from _shuffled(chosen, seed)


def _joined(lines: Iterator[Document], title: re.Pattern[str]) -> Iterator[Document]:
    """Documents from a stream of their lines."""
    held: list[str] = []
    for line in lines:
        if title.fullmatch(line.text) and held:
            yield Document(text="".join(held))
            held = []
        held.append(line.text)
    yield Document(text="".join(held))


def _open_hub(name: str, row: _HubDataset, split: str) -> Iterator[Any]:
    require("datasets", f"The data {name!r} is on the Hub and")
    datasets = importlib.import_module("datasets")
    try:
        _reach(row.repository)
        stream = datasets.load_dataset(row.repository, row.config, split=split, streaming=True)
        yield from stream
    except (OSError, ValueError, RuntimeError) as error:
        # ConnectionError, the Hub's own errors and those of HTTP clients are all among these.
        raise DataError(
            f"The data {name!r} ({row.repository}) cannot be fetched from the Hub ({_first_line(error)}): check "
            f"the network, or pass a local file or a built-in text ({', '.join(_BUILTIN)})."
        ) from error


def _reach(repository: str) -> None:
    """Fail at once if the Hub cannot be reached; downloads would retry for half a minute first."""
    hub = importlib.import_module("huggingface_hub")
    try:
        hub.HfApi().dataset_info(repository, timeout=_HUB_TIMEOUT)
    except OSError:
        raise
    except Exception as error:  # of the HTTP client, whose classes are not those of the standard library
        raise ConnectionError(_first_line(error)) from error


def _shuffled(documents: Iterator[Document], seed: int) -> Iterator[Document]:
    """Shuffle a stream through a buffer, after the parts are fixed, so that no seed moves records between them."""
    generator = random.Random(seed)
    buffer: list[Document] = []
    for document in documents:
        buffer.append(document)
        if len(buffer) >= _SHUFFLE_BUFFER:
            index = generator.randrange(len(buffer))
            buffer[index], buffer[-1] = buffer[-1], buffer[index]
            yield buffer.pop()
    generator.shuffle(buffer)
    yield from buffer


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
