"""RunDirectory: the files of one run, readable without this package.

``config.json`` holds the settings, ``environment.json`` versions and hardware, ``problem.json`` and
``allocation.json`` the assignment problem and its solution, ``history.jsonl`` one line per step, ``metrics.json``
the measurements, ``checkpoints/`` the state of an unfinished search.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import subprocess
import time
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import rco
from rco.atomic_files import (
    FolderLock,
    LockedError,
    WriteError,
    as_json,
    atomic_path,
    differences,
    make_folder,
    read_json,
    write_error,
    write_json_atomic,
)
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord

__all__ = [
    "LockedError",
    "RunDirectory",
    "RunError",
    "WriteError",
    "available_cores",
    "environment",
    "free_memory",
    "write_json_atomic",
]

_PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "transformers",
    "safetensors",
    "compressed-tensors",
    "datasets",
    "triton",
)


class RunError(ValueError):
    """The folder does not hold the requested run; the message has a remedy."""


class RunDirectory:
    """One run's folder. Make it with :meth:`create`, :meth:`resume` or :meth:`open`, not directly.

    A run that may be written to holds the folder's lock until :meth:`close`, or until its ``with`` block ends.
    """

    def __init__(self, folder: Path, lock: FolderLock | None) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def create(cls, folder: Path | str, config: Mapping[str, Any]) -> RunDirectory:
        """Start a run in a new folder (or one that holds no run yet)."""
        run = cls._locked(Path(folder))
        try:
            if run._path("config.json").exists():
                raise RunError(
                    f"{run.folder} already holds a run. Continue it with `resume=True`, or choose another folder."
                )
            run._write("environment.json", environment())
            # Written last, since its presence makes the folder a run.
            run._write("config.json", as_json(config))
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def resume(
        cls, folder: Path | str, config: Mapping[str, Any], ignore: Collection[str] = ()
    ) -> RunDirectory:
        """Continue a run, which must have been started with the same configuration.

        A folder without a run starts a new one: a process may end before it has written anything.

        Args:
            folder: The run's folder.
            config: The configuration now.
            ignore: Top-level entries that may differ, such as the display of progress.
        """
        folder = Path(folder)
        if not (folder / "config.json").exists():
            return cls.create(folder, config)
        run = cls.open(folder, write=True)
        try:
            before = {key: value for key, value in run.config.items() if key not in ignore}
            now = {key: value for key, value in as_json(config).items() if key not in ignore}
            first = next(differences(before, now), None)
            if first is not None:
                raise RunError(
                    f"{folder} was started with another configuration ({first}). "
                    "Resume with the settings it was started with, or choose another folder."
                )
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, folder: Path | str, *, write: bool = False) -> RunDirectory:
        """An existing run, for reading unless ``write``."""
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise RunError(f"{folder} holds no run: there is no config.json in it.")
        return cls._locked(folder) if write else cls(folder, None)

    @classmethod
    def _locked(cls, folder: Path) -> RunDirectory:
        lock = FolderLock(make_folder(folder))
        lock.acquire()
        run = cls(folder, lock)
        run._mend_history()
        return run

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- documents ---

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the run."""
        return self._read("config.json")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and hardware of the run."""
        return self._read("environment.json")

    @property
    def metrics(self) -> dict[str, Any]:
        """Measurements so far; may be empty."""
        return self._read("metrics.json") if self._path("metrics.json").exists() else {}

    @property
    def problem(self) -> AllocationProblem:
        """The assignment problem."""
        return AllocationProblem.from_dict(self._read("problem.json"))

    @property
    def result(self) -> SearchResult:
        """Result of the search."""
        return SearchResult.from_dict({**self._read("allocation.json"), "history": []})

    @property
    def finished(self) -> bool:
        """Whether the search has written its result."""
        return self._path("allocation.json").exists()

    def write_problem(self, problem: AllocationProblem) -> None:
        """Write the assignment problem."""
        self._write("problem.json", problem.to_dict())

    def write_result(self, result: SearchResult) -> None:
        """Write the search's result; its history is in ``history.jsonl`` already."""
        self._write(
            "allocation.json", {key: value for key, value in result.to_dict().items() if key != "history"}
        )

    def update_metrics(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Add measurements to ``metrics.json``, replacing those of the same name; returns all of them."""
        metrics = {**self.metrics, **as_json(measured)}
        self._write("metrics.json", metrics)
        return metrics

    def drop_metrics(self, *names: str) -> None:
        """Remove measurements that no longer hold."""
        self._write(
            "metrics.json", {name: value for name, value in self.metrics.items() if name not in names}
        )

    # --- history ---

    def append_history(self, record: StepRecord | Mapping[str, Any]) -> None:
        """Add one line to the history."""
        self._require_lock("history.jsonl")
        described = asdict(record) if isinstance(record, StepRecord) else as_json(record)
        try:
            with open(self._path("history.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(described) + "\n")
        except OSError as error:
            raise write_error(self._path("history.jsonl"), error) from error

    def history(self) -> list[dict[str, Any]]:
        """All complete lines; an unfinished last line of a killed process is skipped."""
        path = self._path("history.jsonl")
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # text after the last newline is unfinished
        try:
            return [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged: {error}. Restore it or delete it.") from error

    def _mend_history(self) -> None:
        """Drop the unfinished last line of a killed process, so that the next record starts on a new line."""
        path = self._path("history.jsonl")
        if path.exists():
            complete = path.read_bytes().rpartition(b"\n")
            if complete[2]:
                os.truncate(path, len(complete[0]) + len(complete[1]))

    def truncate_history(self, records: int) -> None:
        """Keep the first ``records`` lines: those before the state that a search resumes from."""
        self._require_lock("history.jsonl")
        kept = self.history()[:records]
        with atomic_path(self._path("history.jsonl")) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")

    # --- checkpoints ---

    def save_checkpoint(self, step: int, state: Mapping[str, Any], *, keep: int = 1) -> Path:
        """Write the search's state after ``step``, then drop all but the ``keep`` newest.

        The state consists of tensors, numbers, strings, and dicts, lists and tuples of them, so that reading it
        executes no code.
        """
        self._require_lock("checkpoints")
        _check_plain(state, "state")
        folder = make_folder(self._path("checkpoints"))
        path = folder / f"step_{step:08d}.pt"
        with atomic_path(path) as temporary:
            try:
                torch.save(dict(state), temporary)
            except RuntimeError as error:  # torch's error for a full disk
                raise WriteError(
                    f"Could not write {path}: {error}. Free some space there, or choose another folder."
                ) from error
        for old in self._checkpoints()[: -max(1, keep)]:
            old.unlink(missing_ok=True)
        return path

    def load_checkpoint(self) -> tuple[int, dict[str, Any]] | None:
        """The newest checkpoint and its step, or None if there is none."""
        paths = self._checkpoints()
        if not paths:
            return None
        path = paths[-1]
        try:
            if not zipfile.is_zipfile(path):  # torch's own error would be misleading
                raise ValueError("it is not complete")
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
            raise RunError(
                f"{path} cannot be read ({error}). Delete it to go on from the one before, or from the start."
            ) from error
        return int(path.stem.removeprefix("step_")), state

    def clear_checkpoints(self) -> None:
        """Remove the state of a search that has ended."""
        self._require_lock("checkpoints")
        for path in self._checkpoints():
            path.unlink(missing_ok=True)

    def _checkpoints(self) -> list[Path]:
        return sorted(self._path("checkpoints").glob("step_*.pt"))

    # --- files ---

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _read(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        if not path.exists():
            raise RunError(
                f"{self.folder} has no {name}: the run ended before it was written. Resume it first."
            )
        document: dict[str, Any] = read_json(path)
        return document

    def _write(self, name: str, value: Any) -> None:
        self._require_lock(name)
        write_json_atomic(self._path(name), value)

    def _require_lock(self, name: str) -> None:
        if self._lock is None:
            raise RunError(f"{self.folder} was opened for reading; open it with write=True to change {name}.")


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes of host memory that a new process may use; None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    told = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(told[0]) if told else None


def environment() -> dict[str, Any]:
    """Versions and hardware, as recorded with every measurement."""
    described: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rco": rco.__version__,
        "git": _git_revision(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": available_cores(),
        "threads": torch.get_num_threads(),
        "gpu": [],
    }
    for package in _PACKAGES:
        try:
            described[package] = version(package)
        except PackageNotFoundError:
            described[package] = None
    if torch.cuda.is_available():
        described["gpu"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        described["cuda"] = torch.version.cuda
    elif torch.backends.mps.is_available():
        described["gpu"] = ["Apple MPS"]
    return described


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """Commit of the checkout that this package runs from, with ``+changes`` if edited; None if installed."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    # A virtual environment may lie inside another repository.
    if top is None or Path(top).resolve() != root:
        return None
    revision = git("rev-parse", "HEAD")
    return (
        f"{revision}+changes"
        if revision and git("status", "--porcelain", "--untracked-files=no")
        else revision
    )


def _check_plain(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str | int):
                raise TypeError(f"Keys of a checkpoint are strings or integers, got {key!r} in {path}.")
            _check_plain(entry, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _check_plain(entry, f"{path}[{index}]")
    elif type(value) not in (torch.Tensor, int, float, bool, str, bytes, type(None)):
        raise TypeError(
            f"A checkpoint holds tensors, numbers, strings and collections of them; "
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}."
        )
