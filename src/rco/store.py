"""CandidateStore: the packed options of every linear, one file per block, with a manifest of their hashes.

A store is made for one identity (model, data, settings) and never mixes two. Blocks are written one by one and
count only once the manifest names them, so that an interrupted store continues at the block where it stopped. One
store is enough for all budgets.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rco import formats
from rco.atomic_files import (
    FolderLock,
    as_json,
    differences,
    make_folder,
    read_json,
    sha256_of,
    write_error,
    write_json_atomic,
    write_tensors_atomic,
)
from rco.formats.base import Stored

__all__ = ["CandidateStore", "StoreCorruptError", "StoreError", "StoreMismatchError"]

FORMAT, VERSION = "rco-candidates", 1
_MANIFEST = "manifest.json"
logger = logging.getLogger(__name__)

Statistics = Mapping[str, Mapping[str, Mapping[str, Any]]]


class StoreError(ValueError):
    """The folder is not a usable candidate store; the message has a remedy."""


class StoreMismatchError(StoreError):
    """The store was made from another model, other data or other settings."""


class StoreCorruptError(StoreError):
    """A file of the store is missing, truncated or altered."""


class CandidateStore:
    """Packed candidates on disk. Make it with :meth:`create_or_resume` or :meth:`open`, not directly.

    Attributes:
        folder: Folder of the files.
        manifest: The content of ``manifest.json``.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._lock = FolderLock(folder)
        self._owns_manifest = True
        self._files: dict[int, Any] = {}
        self._linears = self._index()

    @classmethod
    def create_or_resume(
        cls, folder: Path | str, identity: Mapping[str, Any], blocks: int, *, overwrite: bool = False
    ) -> CandidateStore:
        """A store for this identity: new, half done or complete.

        While blocks are missing the store is locked against other writers, until the last is written or
        :meth:`close` is called.

        Args:
            folder: Folder of the existing or new store.
            identity: JSON-ready; everything the candidates depend on: model and data fingerprints, settings.
            blocks: Number of files a complete store has.
            overwrite: Replace a store of another identity instead of refusing.

        Raises:
            StoreMismatchError: The folder holds candidates of another identity.
            StoreCorruptError: A file that the manifest names is not as it was written.
        """
        if blocks < 1:
            raise ValueError(f"A store has at least one block, got {blocks}.")
        folder = make_folder(Path(folder))
        wanted = {
            "format": FORMAT, "version": VERSION, "identity": as_json(identity), "blocks_total": blocks,
        }  # fmt: skip
        if (folder / _MANIFEST).is_file():
            manifest = _read_manifest(folder, warn=False)
            same = not any(differences({key: manifest.get(key) for key in wanted}, wanted))
            if same and len(manifest["blocks"]) == blocks:
                return cls.open(folder)  # complete, so any number of runs may read it at once
        lock = FolderLock(folder)
        lock.acquire()
        try:
            if not (folder / _MANIFEST).exists():
                manifest = {**wanted, "blocks": {}}
                write_json_atomic(folder / _MANIFEST, manifest)
            else:
                manifest = _read_manifest(folder)
                found = list(differences({key: manifest.get(key) for key in wanted}, wanted))
                if found and not overwrite:
                    raise _mismatch(folder, found)
                if found:
                    manifest = {**wanted, "blocks": {}}
                    # The manifest first: a file that it does not name is not part of the store.
                    write_json_atomic(folder / _MANIFEST, manifest)
                    for path in folder.glob("block_*.safetensors"):
                        path.unlink()
            store = cls(folder, manifest)
            store._lock = lock
            store._check_sizes()
        except BaseException:
            lock.release()
            raise
        if store.complete:
            lock.release()
        return store

    @staticmethod
    def check(folder: Path | str, identity: Mapping[str, Any]) -> None:
        """Raise an error if a folder holds candidates of another identity; one without candidates is fine.

        Raises:
            StoreMismatchError: The message names the entries that differ, and a remedy.
        """
        folder = Path(folder)
        if (folder / _MANIFEST).is_file():
            manifest = _read_manifest(folder, warn=False)
            found = list(differences(manifest["identity"], as_json(identity), "identity"))
            if found:
                raise _mismatch(folder, found)

    @classmethod
    def join(cls, folder: Path | str, manifest: Mapping[str, Any]) -> CandidateStore:
        """The store that another process is filling, to write blocks for it; see :meth:`write_file`."""
        store = cls(Path(folder), dict(manifest))
        store._owns_manifest = False
        return store

    @classmethod
    def open(cls, folder: Path | str, identity: Mapping[str, Any] | None = None) -> CandidateStore:
        """A complete store, for reading; with ``identity``, only if it was made for that.

        Raises:
            StoreError: There is no store, or it is not complete.
        """
        folder = Path(folder)
        if not (folder / _MANIFEST).is_file():
            raise StoreError(f"{folder} holds no candidates: there is no {_MANIFEST} in it.")
        store = cls(folder, _read_manifest(folder))
        if identity is not None:
            found = list(differences(store.manifest["identity"], as_json(identity), "identity"))
            if found:
                raise _mismatch(folder, found)
        store._check_sizes()
        if not store.complete:
            raise StoreError(
                f"{folder} lacks {len(store.missing_blocks)} of {store.manifest['blocks_total']} blocks "
                f"(the first is {store.missing_blocks[0]}). Make it again with `resume=True`."
            )
        return store

    def close(self) -> None:
        """Release the lock and close the files; tensors that were loaded stay valid."""
        self._lock.release()
        self._files.clear()

    def __enter__(self) -> CandidateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- content ---

    @property
    def identity(self) -> dict[str, Any]:
        """Identity (model, data, settings) of the candidates."""
        identity: dict[str, Any] = self.manifest["identity"]
        return identity

    @property
    def fingerprint(self) -> str:
        """A hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def missing_blocks(self) -> list[int]:
        """Blocks still to be written, in order."""
        return [
            index
            for index in range(self.manifest["blocks_total"])
            if str(index) not in self.manifest["blocks"]
        ]

    @property
    def complete(self) -> bool:
        """Whether every block has been written."""
        return not self.missing_blocks

    @property
    def linears(self) -> dict[str, list[str]]:
        """Linear -> its options' labels, in the order they were written, block by block."""
        return {name: list(options) for name, (_, options) in self._linears.items()}

    def statistics(self, linear: str, option: str) -> dict[str, Any]:
        """Format, bits, shape, bytes and the errors that were recorded for one option."""
        return dict(self._entry(linear, option)[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all block files."""
        return sum(entry["bytes"] for entry in self.manifest["blocks"].values())

    # --- writing ---

    def write_block(
        self,
        index: int,
        candidates: Mapping[str, Mapping[str, Stored]],
        statistics: Statistics | None = None,
    ) -> None:
        """Write one block's candidates and enter them in the manifest: :meth:`write_file`, then :meth:`enter`."""
        self._lock.acquire()
        try:
            self.enter(index, self.write_file(index, candidates, statistics))
        finally:
            if self.complete:
                self._lock.release()

    def write_file(
        self,
        index: int,
        candidates: Mapping[str, Mapping[str, Stored]],
        statistics: Statistics | None = None,
    ) -> dict[str, Any]:
        """Write one block's file without entering it; several processes may do so for different blocks.

        Args:
            index: Index of the block, from 0.
            candidates: Linear -> option label -> packed weight.
            statistics: Linear -> option label -> numbers to keep, such as ``hessian_error`` and ``relative_error``.

        Returns:
            The block's entry in the manifest, for :meth:`enter`; JSON-ready.

        Raises:
            WriteError: The disk is full or the folder cannot be written to; the store is as it was before.
        """
        if not 0 <= index < self.manifest["blocks_total"]:
            raise ValueError(f"Block {index} is outside 0..{self.manifest['blocks_total'] - 1}.")
        tensors: dict[str, Tensor] = {}
        linears: dict[str, dict[str, Any]] = {}
        for linear, options in candidates.items():
            linears[linear] = {}
            for option, weight in options.items():
                if "|" in linear + option:
                    raise ValueError(
                        f"Names must not contain '|', got linear {linear!r} and option {option!r}."
                    )
                for part, tensor in weight.tensors.items():
                    tensors[f"{linear}|{option}|{part}"] = tensor.detach().cpu().contiguous()
                recorded = (statistics or {}).get(linear, {}).get(option, {})
                linears[linear][option] = {
                    "format": weight.format.name,
                    "bits": weight.format.bits,
                    "shape": list(weight.shape),
                    "packed_bytes": weight.nbytes,
                    **as_json(dict(recorded)),
                }
        path = self.folder / f"block_{index:04d}.safetensors"
        self._write_file(path, index, tensors)
        return {
            "file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path), "linears": linears,
        }  # fmt: skip

    def enter(self, index: int, entry: dict[str, Any]) -> None:
        """Make a written block part of the store; in a joined store only the owner writes the manifest file.

        Raises:
            StoreError: The file is missing: another machine has written it to its own disk.
        """
        path = self.folder / entry["file"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise StoreError(
                f"{path} was written by another process but is not here: put the candidates on a disk that all "
                "machines of the job share (`store` or `out`)."
            )
        blocks = {**self.manifest["blocks"], str(index): entry}
        manifest = {**self.manifest, "blocks": dict(sorted(blocks.items(), key=lambda item: int(item[0])))}
        if self._owns_manifest:
            write_json_atomic(self.folder / _MANIFEST, manifest)
        self.manifest = manifest
        self._linears = self._index()
        self._files.pop(index, None)

    def _write_file(self, path: Path, index: int, tensors: dict[str, Tensor]) -> None:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:  # fail early, before minutes of writing
            reason = f"{os.strerror(errno.ENOSPC)} ({needed:,} bytes are needed, {free:,} are free)"
            raise write_error(path, OSError(errno.ENOSPC, reason))
        write_tensors_atomic(path, tensors, {"rco": self._stamp(index)})

    # --- reading ---

    def load(self, linear: str, option: str) -> Stored:
        """One candidate, memory-mapped from the file."""
        index, entry = self._entry(linear, option)
        file = self._file(index)
        prefix = f"{linear}|{option}|"
        rows, columns = entry["shape"]
        try:
            parts = {
                name.removeprefix(prefix): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 - not a mapping
                if name.startswith(prefix)
            }
            return formats.parse(entry.get("format") or _older_format(entry, parts)).restore(
                (rows, columns), parts
            )
        except (SafetensorError, ValueError, KeyError) as error:
            raise self._corrupt(index, f"{linear} at {option}: {error}") from error

    def load_all(
        self, device: torch.device | str | Mapping[str, torch.device] = "cpu"
    ) -> dict[str, dict[str, Stored]]:
        """Every candidate on a device, or on that of its linear: linear -> option label -> packed weight."""
        place = device if isinstance(device, Mapping) else dict.fromkeys(self.linears, device)
        return {
            linear: {option: self.load(linear, option).to(place[linear]) for option in options}
            for linear, options in self.linears.items()
        }

    def verify(self) -> None:
        """Read every file and compare it with its hash.

        Raises:
            StoreCorruptError: A file has changed; the message names the first one.
        """
        self._check_sizes()
        for index, entry in self.manifest["blocks"].items():
            if sha256_of(self.folder / entry["file"]) != entry["sha256"]:
                raise self._corrupt(int(index), "its content is not what was written (SHA-256 differs)")

    # --- internals ---

    def _index(self) -> dict[str, tuple[int, dict[str, Any]]]:
        return {
            linear: (int(index), options)
            for index, entry in self.manifest["blocks"].items()
            for linear, options in entry["linears"].items()
        }

    def _entry(self, linear: str, option: str) -> tuple[int, dict[str, Any]]:
        linears = self._linears
        if linear not in linears:
            known = ", ".join(list(linears)[:3])
            raise KeyError(f"The store has no linear {linear!r}; it has {len(linears)}, such as {known}.")
        index, options = linears[linear]
        if option not in options:
            raise KeyError(f"{linear} has no option {option!r} in the store; it has {', '.join(options)}.")
        return index, options[option]

    def _file(self, index: int) -> Any:
        if index not in self._files:
            path = self.folder / self.manifest["blocks"][str(index)]["file"]
            try:
                file: Any = safe_open(path, framework="pt")
                metadata = file.metadata() or {}
            except (SafetensorError, OSError) as error:
                raise self._corrupt(index, str(error)) from error
            if metadata.get("rco") != self._stamp(index):
                raise self._corrupt(index, "it belongs to another store or another block")
            self._files[index] = file
        return self._files[index]

    def _stamp(self, index: int) -> str:
        """Metadata of a block's file; one entry, because the order of several is not reproducible."""
        return f"{self.fingerprint} block {index}"

    def _check_sizes(self) -> None:
        for index, entry in self.manifest["blocks"].items():
            size = (self.folder / entry["file"]).stat().st_size
            if size != entry["bytes"]:
                raise self._corrupt(int(index), f"it has {size:,} bytes instead of {entry['bytes']:,}")

    def _corrupt(self, index: int, reason: str) -> StoreCorruptError:
        path = self.folder / self.manifest["blocks"][str(index)]["file"]
        return StoreCorruptError(
            f"{path} is damaged: {reason}. Restore it from a copy, or delete this one file and make it "
            "again with `resume=True`: only the missing block is made again."
        )


def _older_format(entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> str:
    """The format of a candidate from before version 0.2, whose entry has the fields of an integer grid instead."""
    return f"int{entry['bits']}-g{entry['group_size']}" + ("" if "zeros" in parts else "-sym")


def _read_manifest(folder: Path, *, warn: bool = True) -> dict[str, Any]:
    path = folder / _MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{path} is not the manifest of a candidate store. Choose another folder.")
    if manifest.get("version") != VERSION:
        raise StoreError(
            f"{path} has version {manifest.get('version')}, this release reads version {VERSION}. "
            "Make the candidates again in another folder, or use the release that wrote them."
        )
    gone = [index for index, entry in manifest["blocks"].items() if not (folder / entry["file"]).is_file()]
    for index in gone:
        if warn:
            logger.warning(
                "%s is missing; its block has to be made again.", folder / manifest["blocks"][index]["file"]
            )
        del manifest["blocks"][index]
    return manifest


def _mismatch(folder: Path, found: list[str]) -> StoreMismatchError:
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    return StoreMismatchError(
        f"{folder} holds candidates that were made differently ({shown}). "
        "Choose another folder with `store`, or replace them with `overwrite_store=True`."
    )
