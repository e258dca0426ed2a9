"""Files of runs and stores: atomic writes, JSON and its differences, and locks of folders."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

__all__ = [
    "FolderLock",
    "LockedError",
    "WriteError",
    "as_json",
    "atomic_path",
    "differences",
    "disk_failure",
    "link_file",
    "make_folder",
    "read_json",
    "sha256_of",
    "write_json_atomic",
    "write_tensors_atomic",
    "write_text_atomic",
]

logger = logging.getLogger(__name__)

# Errors of file systems that have no locks, such as some network disks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class WriteError(OSError):
    """A file could not be written; the old one is unchanged."""

    def __str__(self) -> str:
        return str(self.strerror or self.args[0])


class LockedError(RuntimeError):
    """Another process is writing to the folder."""


def write_error(path: Path, error: OSError) -> WriteError:
    """A failed write with the path in its message."""
    reason = error.strerror or str(error)
    return WriteError(
        error.errno,
        f"Could not write {path}: {reason}. Choose a folder that you may write to, on a disk with enough space.",
    )


def disk_failure(error: Exception) -> OSError | None:
    """The operating system's error behind an exception, or None.

    Libraries written in Rust (safetensors, tokenizers) raise exceptions of their own and report the operating
    system's error as text.
    """
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def make_folder(folder: Path) -> Path:
    """Create a folder and its parents; a failure is a :class:`WriteError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    return folder


@contextmanager
def atomic_path(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; it is renamed to ``path`` once it is complete.

    The temporary name is fixed, so that leftovers of a killed process are overwritten. With ``shared``, for
    processes that write the same content at the same time, it contains the process id.
    """
    temporary = path.with_name(f".{path.name}.{f'{os.getpid()}.' if shared else ''}partial")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except WriteError:
        raise
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def link_file(source: Path, path: Path) -> None:
    """Make ``path`` another name of a file, or a copy where that is not possible; an existing file is replaced."""
    make_folder(path.parent)
    with atomic_path(path) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:  # another disk, or a file system without links
            shutil.copyfile(source, temporary)


def write_text_atomic(path: Path, text: str) -> None:
    """Write a text file, completely or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomic(path: Path, value: Any) -> None:
    """Write one JSON document, completely or not at all."""
    write_text_atomic(path, json.dumps(value, indent=2, default=_encode) + "\n")


def write_tensors_atomic(
    path: Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    shared: bool = False,
) -> None:
    """Write a safetensors file, completely or not at all; ``shared`` as for :func:`atomic_path`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_path(path, shared=shared) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(dict(tensors), temporary, metadata=dict(metadata) if metadata else None)
            # Safetensors makes its files private, regardless of the user's mask.
            temporary.chmod(mode)
        except SafetensorError as error:
            failure = disk_failure(error)
            if failure is None:
                raise WriteError(f"Could not write {path}: {error}.") from error
            raise failure from error


def read_json(path: Path) -> Any:
    """Read a JSON document; the error for an invalid one names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}). It was edited or damaged: restore it, or start in another folder."
        ) from error


def as_json(value: Any) -> Any:
    """The value after a round trip through JSON: tuples are lists, paths are strings, keys are strings."""
    return json.loads(json.dumps(value, default=_encode))


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Differences of two JSON values, outermost first: ``settings.bits: was [2, 3], now [2, 4]``."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in now:
                yield f"{inner}: was {_short(before[key])}, now absent"
            elif key not in before:
                yield f"{inner}: was absent, now {_short(now[key])}"
            else:
                yield from differences(before[key], now[key], inner)
    elif before != now:
        yield f"{path or 'value'}: was {_short(before)}, now {_short(now)}"


class FolderLock:
    """At most one writer per folder, by a lock of the operating system on the file ``.lock``.

    The system drops the lock when its process ends, even by a kill. While the lock is held, ``.lock.holder`` has
    the process and the host for the message of :class:`LockedError`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self.held = False
        self._holder = folder / ".lock.holder"
        self._lock = FileLock(self.path, timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Take the lock, unless this object holds it already.

        Raises:
            LockedError: Another writer has it; the message names the process.
            WriteError: The folder cannot be written to.
        """
        if self.held:
            return
        try:
            self._lock.acquire()
        except Timeout as error:
            raise LockedError(
                f"{self.path.parent} is in use by process {self._read_holder()}. Wait until it ends, or choose "
                "another folder."
            ) from error
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise write_error(self.path, error) from error
            logger.warning(
                "%s cannot be locked (%s): make sure that only one process writes there.", self.path, error
            )
        self.held = True
        try:
            write_text_atomic(self._holder, f"{os.getpid()} on {socket.gethostname()}")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self.held:
            self._holder.unlink(missing_ok=True)
            self._lock.release()
            self.held = False

    def _read_holder(self) -> str:
        try:
            return self._holder.read_text(encoding="utf-8")
        except OSError:  # the holder has just taken or released the lock
            return "unknown"

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _encode(value: Any) -> Any:
    if isinstance(value, Path | Fraction):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):  # numpy and torch numbers and arrays
        return value.tolist()
    raise TypeError(f"Cannot write a {type(value).__name__} to JSON: {value!r}.")


def _short(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
