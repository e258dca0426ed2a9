"""Run directories: whole files, one writer, and a resumed run that is the same run."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import rco
from rco.atomic_files import FolderLock, as_json, atomic_path, differences, write_tensors_atomic
from rco.core.problem import Allocation, AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.runs import LockedError, RunDirectory, RunError, WriteError, environment, write_json_atomic

CONFIG = {"model": "tiny", "search": {"steps": 5, "tau": (1.0, 0.01)}, "out": Path("x")}


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "run", CONFIG) as made:
        yield made


@pytest.mark.skipif(os.name == "nt", reason="files have no such modes there")
def test_others_may_read_what_the_mask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        write_json_atomic(tmp_path / "a.json", {})
        write_tensors_atomic(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_documents_come_back(run):
    problem = AllocationProblem([2, 3, 4], Fraction(5, 2) * 4, groups=["a", "b", "c", "d"])
    record = StepRecord(1, 2, 0.5, 0.4, expected_cost=(10.0,))
    result = SearchResult(Allocation([0, 1, 0, 1]), 0.25, 10, [record], seed=3)
    run.write_problem(problem)
    assert not run.finished
    run.write_result(result)
    assert run.finished
    assert run.update_metrics({"kl": np.float64(0.5)}) == {"kl": 0.5}
    run.update_metrics({"perplexity": 9, "kl": 0.25})

    other = RunDirectory.open(run.folder)  # reading needs no lock
    assert other.config == {"model": "tiny", "search": {"steps": 5, "tau": [1.0, 0.01]}, "out": "x"}
    assert other.problem == problem
    assert other.result.allocation == result.allocation
    assert other.result.loss == 0.25
    assert other.metrics == {"kl": 0.25, "perplexity": 9}
    assert other.environment["rco"] == rco.__version__
    assert not list(run.folder.glob("**/*.partial"))


def test_history_is_appended_and_survives_a_torn_line(run):
    records = [StepRecord(step, 3, 1.0 / step, 0.1, expected_cost=(2.0,)) for step in (1, 2, 3)]
    for record in records:
        run.append_history(record)
    path = run.folder / "history.jsonl"
    whole = path.read_text()
    assert [StepRecord(**line) for line in run.history()] == [
        StepRecord(**{**vars(record), "expected_cost": [2.0]}) for record in records
    ]
    path.write_text(whole + '{"step": 4, "lo')
    assert len(run.history()) == 3
    run.close()
    with RunDirectory.resume(run.folder, CONFIG) as again:
        again.append_history(records[0])
        assert [line["step"] for line in again.history()] == [1, 2, 3, 1]
        again.truncate_history(2)
        assert [line["step"] for line in again.history()] == [1, 2]
        path.write_text("nonsense\n")
        with pytest.raises(ValueError, match=r"history.jsonl is damaged"):
            again.history()


def test_resume_wants_the_same_configuration(tmp_path):
    folder = tmp_path / "run"
    RunDirectory.resume(folder, CONFIG).close()  # nothing there yet: started afresh
    RunDirectory.resume(folder, CONFIG).close()
    changed = {**CONFIG, "search": {"steps": 6, "tau": (1.0, 0.01)}}
    with pytest.raises(RunError, match=r"search.steps: was 5, now 6.*another folder"):
        RunDirectory.resume(folder, changed)
    RunDirectory.resume(
        folder, {**CONFIG, "quiet": True}, ignore=["quiet"]
    ).close()  # the failure left no lock
    with pytest.raises(RunError, match="already holds a run"):
        RunDirectory.create(folder, CONFIG)
    with pytest.raises(RunError, match="holds no run"):
        RunDirectory.open(tmp_path)


def test_reading_cannot_write(run):
    reader = RunDirectory.open(run.folder)
    for attempt in (
        lambda: reader.update_metrics({}),
        lambda: reader.append_history({}),
        lambda: reader.truncate_history(0),
        lambda: reader.save_checkpoint(1, {}),
        reader.clear_checkpoints,
    ):
        with pytest.raises(RunError, match="opened for reading"):
            attempt()
    with pytest.raises(RunError, match=r"no allocation.json.*Resume"):
        _ = reader.result


def test_checkpoints_keep_the_newest_and_come_back_exactly(run):
    assert run.load_checkpoint() is None
    state = {
        "x": torch.randn(3, 4, dtype=torch.float64),
        "moments": [torch.zeros(2), torch.ones(2, dtype=torch.int64)],
        "step": 7,
        "best": (0.1, None, "name", True),
        3: {"nested": 1.5},
    }
    for step in (5, 9, 10):
        run.save_checkpoint(step, {**state, "step": step}, keep=2)
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [
        "step_00000009.pt",
        "step_00000010.pt",
    ]
    step, loaded = run.load_checkpoint()
    assert step == loaded["step"] == 10
    assert torch.equal(loaded["x"], state["x"])
    assert torch.equal(loaded["moments"][1], state["moments"][1])
    assert loaded["best"] == state["best"]
    assert loaded[3] == {"nested": 1.5}
    run.save_checkpoint(11, state)
    assert len(list((run.folder / "checkpoints").iterdir())) == 1

    (run.folder / "checkpoints" / "step_00000011.pt").write_bytes(b"torn")
    with pytest.raises(RunError, match=r"step_00000011.pt cannot be read.*Delete it"):
        run.load_checkpoint()
    run.clear_checkpoints()
    assert run.load_checkpoint() is None


@pytest.mark.parametrize(
    "bad", [np.float64(1.0), {"deep": [object()]}, [torch.nn.Parameter(torch.zeros(1))], {(1, 2): 3}]
)
def test_a_checkpoint_that_could_not_be_read_back_is_refused_at_once(run, bad):
    with pytest.raises(TypeError, match="checkpoint"):
        run.save_checkpoint(1, {"value": bad})
    assert run.load_checkpoint() is None


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json_atomic(path, {"old": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rco.atomic_files.os.fsync", full)
        with pytest.raises(
            WriteError, match=r"Could not write .*a.json: No space left.*enough space"
        ) as caught:
            write_json_atomic(path, {"new": 2})
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(TypeError, match="Cannot write a object"):
        write_json_atomic(path, {"new": object()})

    def interrupted():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_processes_that_write_the_same_file_do_not_disturb_each_other(tmp_path, monkeypatch):
    """The second begins and ends before the first has ended, and the file is whole in the end."""
    path = tmp_path / "shared.txt"
    with atomic_path(path, shared=True) as first:
        first.write_text("same")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with atomic_path(path, shared=True) as second:
            second.write_text("same")
        assert path.read_text() == "same"
    assert path.read_text() == "same"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_during_a_checkpoint_loses_nothing(tmp_path):
    code = f"""
        import resource, sys, torch
        from rco.runs import RunDirectory, WriteError
        run = RunDirectory.create({str(tmp_path / "run")!r}, {{}})
        run.save_checkpoint(1, {{"x": torch.arange(4)}})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            run.save_checkpoint(2, {{"x": torch.zeros(100_000)}})
        except WriteError as error:
            print("refused:", error)
        step, state = run.load_checkpoint()
        print("transformers" in sys.modules, "datasets" in sys.modules)
        print(step, state["x"].tolist())
    """
    lines = run_python(code).stdout.splitlines()
    assert lines[-2] == "False False"  # runs know no model library
    assert lines[0].startswith("refused: Could not write")
    assert lines[-1] == "1 [0, 1, 2, 3]"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001.pt"]


def test_one_writer_at_a_time(run):
    with pytest.raises(LockedError, match=f"in use by process {os.getpid()} on .*another folder"):
        RunDirectory.open(run.folder, write=True)
    with pytest.raises(LockedError):
        RunDirectory.resume(run.folder, CONFIG)
    run.close()
    with RunDirectory.open(run.folder, write=True) as other:
        other.update_metrics({"a": 1})


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = f"""
        import time
        from pathlib import Path
        from rco.atomic_files import FolderLock
        lock = FolderLock(Path({str(tmp_path / "run")!r}))
        lock.acquire()
        print("locked", flush=True)
        time.sleep(60)
    """
    RunDirectory.create(tmp_path / "run", {}).close()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(LockedError, match=f"in use by process {process.pid} "):
            RunDirectory.resume(tmp_path / "run", {})
        process.send_signal(signal.SIGKILL)
        process.wait()
    RunDirectory.resume(tmp_path / "run", {}).close()


def descriptors_of(path):
    """Numbers under which this process has a file open."""
    wanted, found = os.stat(path), []
    for number in range(3, 1024):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), wanted):
                found.append(number)
    assert found
    return found


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.acquire()  # again by the same holder: nothing to do
    child = subprocess.Popen(
        ["sleep", "30"], pass_fds=descriptors_of(lock.path), stdout=subprocess.DEVNULL
    )  # has the open file, as a fork would
    try:
        time.sleep(0.05)
        lock.release()
        assert not lock.held
        with FolderLock(tmp_path) as other:
            assert other.held
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, number):
    def unsupported(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", unsupported)
    with FolderLock(tmp_path) as lock:
        assert lock.held
        assert f"cannot be locked ([Errno {number}]" in caplog.text
        assert "only one process writes there" in caplog.text
    assert not lock.held
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


def test_a_folder_that_cannot_be_locked_for_another_reason_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"Could not write .*file/.lock: .*Choose a folder"):
        FolderLock(tmp_path / "file").acquire()


def test_a_lock_whose_holder_cannot_be_noted_is_given_back(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rco.atomic_files.os.fsync", full)
        with pytest.raises(WriteError, match=r"lock.holder: No space left"):
            FolderLock(tmp_path).acquire()
    with FolderLock(tmp_path) as lock:
        assert lock.held


def test_environment_names_what_a_measurement_depends_on():
    described = environment()
    assert json.loads(json.dumps(described)) == described
    for key in (
        "rco",
        "python",
        "torch",
        "transformers",
        "platform",
        "cpu",
        "cpu_count",
        "gpu",
        "git",
        "time",
    ):
        assert key in described
    assert described["torch"] == torch.__version__
    assert described["cpu"]


def test_differences_are_named_outermost_first():
    before = {"a": 1, "b": {"c": [1, 2], "d": 3}, "gone": 0}
    now = {"a": 1, "b": {"c": [1, 3], "d": 4}, "fresh": None}
    assert list(differences(before, now)) == [
        "b.c: was [1, 2], now [1, 3]",
        "b.d: was 3, now 4",
        "gone: was 0, now absent",
        "fresh: was absent, now null",
    ]
    assert not list(differences(before, before))
    assert as_json({1: (Path("a"), Fraction(1, 3), torch.tensor([1, 2]))}) == {"1": ["a", "1/3", [1, 2]]}


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done
