"""The interface of exporters, the summary that they return, and a folder that appears whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from rco.atomic_files import disk_failure
from rco.formats.integer import PackedWeight
from rco.models.loading import LoadedModel, load_model

__all__ = [
    "ExportError",
    "ExportSummary",
    "Exporter",
    "atomic_folder",
    "resolve_source",
    "write_companions",
]

logger = logging.getLogger(__name__)


class ExportError(ValueError):
    """A checkpoint cannot be written; the message says why and what to do."""


@dataclass(frozen=True)
class ExportSummary:
    """What was written.

    Attributes:
        format: Name of the format.
        path: The folder.
        files: Size in bytes of every file in it.
        tensors: Data bytes of every tensor; of a recipe, those that the tool will write, where that is known.
        total_bytes: Size of all safetensors files, headers included; of a recipe, of the tensors alone.
        usage: How to go on from a recipe.
        shape: Of a pruned mixture of experts: ``stock``, ``per_layer`` or ``padded``.
        reason: Why that is not a stock checkpoint; None where it is.
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
        """The summary as plain data, without what is not known."""
        described: dict[str, Any] = {"format": self.format, "path": str(self.path), "files": self.files}
        if self.tensors:
            described |= {"tensors": self.tensors, "total_bytes": self.total_bytes}
        if self.shape is not None:
            described |= {"shape": self.shape, "reason": self.reason}
        return described | ({"usage": self.usage} if self.usage else {})


class Exporter(Protocol):
    """Writes a compressed model; :func:`rco.testing.check_exporter` checks one.

    Attributes:
        name: What the user types.
        kind: Kind of compression that it can write: ``quantization`` or ``expert-pruning``.
    """

    name: ClassVar[str]
    kind: ClassVar[str]

    def export(
        self,
        source: LoadedModel | str | Path,
        weights: Mapping[str, PackedWeight],
        out: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> ExportSummary:
        """Write a checkpoint or a recipe.

        Args:
            source: The model to write: without its pruned experts, with its original weights.
            weights: Packed weights of some linears, which take the place of the original ones.
            out: The folder, which appears whole or not at all.
            dtype: Type of the unquantized tensors; None: their own.
            max_shard_size: Largest safetensors file.
            overwrite: Replace a folder that is not empty.

        Raises:
            ExportError: The format cannot hold the model, or the folder cannot be written.
        """
        ...


def resolve_source(source: LoadedModel | str | Path) -> LoadedModel:
    """A model to take unquantized tensors from; a name or folder is loaded on the CPU."""
    return source if isinstance(source, LoadedModel) else load_model(source)


@contextmanager
def atomic_folder(out: str | Path, *, overwrite: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """A new folder to write into, which takes the name ``out`` when the block ends without an error.

    Whatever happens, ``out`` is never half-written: an error removes the new folder, and one that a killed process
    left behind is removed by the next export to the same place.

    Args:
        out: The final folder.
        overwrite: Replace a folder that is there and not empty.
        needed_bytes: Refuse at once where the disk has less than that.

    Raises:
        ExportError: The place is taken, full, or cannot be written to.
    """
    out = Path(out).expanduser().absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out)
        _check_target(out, overwrite)
        free = shutil.disk_usage(out.parent).free
        if free < needed_bytes:
            raise ExportError(
                f"{out.parent} has {free:,} bytes free and the checkpoint takes {needed_bytes:,}; make room or "
                "choose another folder."
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
            f"Writing {out} failed: {failure.strerror or failure}. Nothing was left there: make room, or choose "
            "another folder."
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
    """Undo what killed processes of this machine have left half done."""
    prefix = _partial_prefix(out)
    for folder in sorted(out.parent.glob(f"{prefix}*")):
        owner, _, kind = folder.name.removeprefix(prefix).partition(".")
        if not owner.isdigit() or (int(owner) != os.getpid() and _alive(int(owner))):
            continue
        if kind == "old" and not out.exists():
            logger.info("Putting %s back, whose replacement was killed.", out)
            os.replace(folder, out)
        else:
            logger.info("Removing %s, left by an export that was killed.", folder)
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
    """Have every file on the disk before the folder gets its name."""
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
    # A full folder cannot be replaced in one step: the old one keeps a name until the new one has its own.
    old = work.with_name(f"{work.name}.old")
    os.replace(out, old)
    try:
        os.replace(work, out)
    except OSError:
        os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def stock_name(cls: type) -> str:
    """The name of a model's class in transformers; classes made here are subclasses of it."""
    return next(
        (base.__name__ for base in cls.__mro__ if base.__module__.startswith("transformers.")), cls.__name__
    )


def write_companions(loaded: LoadedModel, folder: Path, changes: Mapping[str, Any]) -> None:
    """Write all that is not weights: config, generation config, tokenizer, the model's own code.

    Args:
        loaded: The model.
        folder: Where to.
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
        # Its own save_pretrained refuses settings that it accepted on loading.
        model.generation_config.to_json_file(folder / "generation_config.json")
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(folder)
    if loaded.path is not None and "auto_map" in content:
        for code in loaded.path.glob("*.py"):
            shutil.copyfile(code, folder / code.name)
