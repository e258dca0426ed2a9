"""Interface of exporters, the summary that they return, and atomic writing of a folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rco.atomic_files import disk_failure
from rco.formats.base import Stored
from rco.models.loading import LoadedModel

__all__ = [
    "ExportError",
    "ExportRequest",
    "ExportSummary",
    "Exporter",
    "atomic_folder",
    "write_companions",
]

logger = logging.getLogger(__name__)

# Files beside config and tokenizer that a model with images or sound needs, and templates of chats.
_COMPANIONS = ("*processor_config.json", "processor*.json", "*.jinja", "chat_template.json")


class ExportError(ValueError):
    """A checkpoint cannot be written; the message says why and what to do."""


@dataclass(frozen=True)
class ExportSummary:
    """Summary of a written export.

    Attributes:
        format: Name of the format.
        path: The folder.
        files: Size in bytes of every file in it.
        tensors: Data bytes of every tensor; for a recipe, of those that the tool will write, if known.
        total_bytes: Size of all safetensors files, headers included; for a recipe, of the tensors alone.
        usage: Instructions for a recipe.
        shape: For a pruned mixture of experts: ``stock``, ``per_layer`` or ``padded``.
        reason: Reason why it is not a stock checkpoint; None if it is.
    """

    format: str
    path: Path
    files: dict[str, int]
    tensors: dict[str, int]
    total_bytes: int
    usage: str = ""
    shape: str | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The summary as plain data, without unknown values."""
        described: dict[str, Any] = {"format": self.format, "path": str(self.path), "files": self.files}
        if self.tensors:
            described |= {"tensors": self.tensors, "total_bytes": self.total_bytes}
        if self.shape is not None:
            described |= {"shape": self.shape, "reason": self.reason}
        return described | ({"usage": self.usage} if self.usage else {})


@dataclass(frozen=True)
class ExportRequest:
    """A compressed model to write, and where.

    Attributes:
        source: The model without its pruned experts, with its original weights.
        weights: Stored weights of some linears by name, which replace the original ones.
        out: The folder to make, written atomically.
        overwrite: Replace a folder that is not empty.
        max_shard_size: Largest safetensors file.
        engine: Engine that must load a checkpoint.
        expert_numbers: For each sparse layer, the numbers that its experts had in the full model; None if there are
            none, or all are kept.
    """

    source: LoadedModel
    weights: Mapping[str, Stored]
    out: Path
    overwrite: bool = False
    max_shard_size: int | str = "5GB"
    engine: str = "any"
    expert_numbers: Sequence[Sequence[int]] | None = None


class Exporter(Protocol):
    """Writes a compressed model; :func:`rco.testing.check_exporter` checks one.

    Attributes:
        name: Name on the command line.
        kind: Kind of compression: ``quantization`` or ``expert-pruning``.
    """

    name: ClassVar[str]
    kind: ClassVar[str]

    def export(self, request: ExportRequest) -> ExportSummary:
        """Write a checkpoint or a recipe.

        Raises:
            ExportError: The format cannot hold the model, the engine would not load it, or the folder cannot be
                written.
        """
        ...


@contextmanager
def atomic_folder(out: str | Path, *, overwrite: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """Temporary folder to write into, renamed to ``out`` when the block ends without an error.

    ``out`` is never half-written: an error removes the temporary folder, and one left by a killed process is
    removed by the next export to the same place.

    Args:
        out: The final folder.
        overwrite: Replace a folder that is not empty.
        needed_bytes: Free disk space that is required at the start.

    Raises:
        ExportError: The folder is not empty, the disk is full, or the folder cannot be written.
    """
    out = Path(out).expanduser().absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out)
        _check_target(out, overwrite)
        free = shutil.disk_usage(out.parent).free
        if free < needed_bytes:
            raise ExportError(
                f"{out.parent} has {free:,} bytes free, but the checkpoint takes {needed_bytes:,}; free some space "
                "or choose another folder."
            )
        work = out.parent / f"{_partial_prefix(out)}{os.getpid()}"
        work.mkdir()
    except OSError as error:
        raise ExportError(
            f"{out} cannot be created: {error.strerror or error}. Choose a writable folder."
        ) from error
    try:
        yield work
        _sync(work)
        _put_in_place(work, out)
    except Exception as error:
        failure = disk_failure(error)
        if failure is None:
            raise
        raise ExportError(
            f"Writing {out} failed: {failure.strerror or failure}. Nothing was left there: free some space, or "
            "choose another folder."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_target(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is a file; choose a folder.")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise ExportError(f"{out} is not empty; choose another folder, or pass overwrite=True to replace it.")


def _partial_prefix(out: Path) -> str:
    return f".{out.name}.partial-{socket.gethostname()}-"


def _clear_leftovers(out: Path) -> None:
    """Clean up after killed exports on this machine."""
    prefix = _partial_prefix(out)
    for folder in sorted(out.parent.glob(f"{prefix}*")):
        owner, _, kind = folder.name.removeprefix(prefix).partition(".")
        if not owner.isdigit() or (int(owner) != os.getpid() and _alive(int(owner))):
            continue
        if kind == "old" and not out.exists():
            logger.info("Restoring %s, whose replacement was interrupted.", out)
            os.replace(folder, out)
        else:
            logger.info("Removing %s, left by a killed export.", folder)
            shutil.rmtree(folder)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    """Flush every file to disk, before the folder is renamed."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _put_in_place(work: Path, out: Path) -> None:
    if not (out.is_dir() and any(out.iterdir())):
        os.replace(work, out)  # an empty folder may be replaced
        return
    # A folder with content cannot be replaced in one step: the old one is renamed until the new one is in place.
    old = work.with_name(f"{work.name}.old")
    os.replace(out, old)
    try:
        os.replace(work, out)
    except OSError:
        os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def stock_name(cls: type) -> str:
    """Name of a model's class in transformers, of which classes made here are subclasses."""
    return next(
        (base.__name__ for base in cls.__mro__ if base.__module__.startswith("transformers.")), cls.__name__
    )


def write_companions(loaded: LoadedModel, folder: Path, changes: Mapping[str, Any]) -> None:
    """Write all files except weights: config, generation config, tokenizer, processors, the model's own code.

    Args:
        loaded: The model.
        folder: The folder to write to.
        changes: Fields of ``config.json`` to set; None removes one.
    """
    model: Any = loaded.model
    config = deepcopy(model.config)
    config.architectures = [stock_name(type(model))]
    config.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    content = {key: value for key, value in content.items() if value is not None or key not in changes}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if getattr(model, "generation_config", None) is not None:
        # save_pretrained rejects some settings that from_pretrained accepts.
        model.generation_config.to_json_file(folder / "generation_config.json")
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(folder)
    if loaded.path is None:
        return
    patterns = [*_COMPANIONS, *(["*.py"] if "auto_map" in content else [])]
    for original in (path for pattern in patterns for path in sorted(loaded.path.glob(pattern))):
        if not (folder / original.name).exists():
            shutil.copyfile(original, folder / original.name)
