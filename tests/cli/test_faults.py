"""What may happen to ``rco quantize``: kills, Ctrl-C, full disks, damaged and foreign files, bad text."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import faulty
import pytest
from safetensors.torch import load_file

from rco.testing.tiny_models import save_tiny

QUICK = [
    "--bits=3", "--sequences=3", "--sensitivity=2", "--selection=2", "--evaluation=2", "--length=16",
    "--steps=3", "--samples=2", "--refine=2", "--widths=2,3,8", "--group-size=8", "--sweeps=0", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def command(random_llama, texts):
    """The arguments of one small job, but for its folder."""
    return ["quantize", str(random_llama), "--data", texts, *QUICK]


OWN_DISKS = ["unshare", "--map-root-user", "--mount"]


def can_mount():
    trial = [*OWN_DISKS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(trial, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def happen():
    """Runs a case of :mod:`faulty`."""
    start = OWN_DISKS if can_mount() else []
    with subprocess.Popen(
        [*start, sys.executable, faulty.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def case(**described):
            process.stdin.write(json.dumps(described) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield case
        process.stdin.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, command, happen):
    """The run of that job that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = happen(argv=[*command, "--out", str(folder)], here=True)
    assert done["code"] == 0, done["err"]
    return folder


def outcome(run):
    """All that must not depend on what happened on the way: choices, packed weights, figures."""
    found = json.loads((run / "allocation.json").read_text())
    metrics = json.loads((run / "metrics.json").read_text())
    history = [json.loads(line)["loss"] for line in (run / "history.jsonl").read_text().splitlines()]
    files = [*sorted((run / "candidates").glob("*.safetensors")), *sorted((run / "model").iterdir())]
    content = {path.name: path.read_bytes() for path in files}
    return found["allocation"], found["candidates"], history, metrics["evaluation"], content


def leftovers(folder):
    return [path for path in folder.rglob("*") if "partial" in path.name]


def check_files(run):
    """Nothing is half-written, whatever has happened: every file under its final name can be read."""
    for path in run.rglob("*"):
        if "partial" in str(path.relative_to(run)):
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)


# Before which call of what the process is killed.
PLACES = {
    "candidates, file before manifest": ("rco.store:CandidateStore.enter", 2),
    "search, history before checkpoint": ("rco.runs:RunDirectory.save_checkpoint", 2),
    "export, amid the weights": ("rco.export.writer:_raw", 9),
}
MORE_PLACES = {
    "sensitivities": ("rco.pipeline.compress:write_tensors_atomic", 1),
    "search, before its result": ("rco.runs:RunDirectory.write_result", 1),
    "evaluation": ("rco.pipeline.evaluate_allocations:AllocationEvaluator.row", 3),
    "export, before its name": ("rco.export.exporter:_put_in_place", 1),
    "report": ("rco.pipeline.compress:build_report", 1),
}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        *(pytest.param(*place, id=name) for name, place in PLACES.items()),
        *(pytest.param(*place, id=name, marks=pytest.mark.slow) for name, place in MORE_PLACES.items()),
    ],
)
def test_killed_and_resumed_gives_the_same_run(tmp_path, command, whole, happen, call, number):
    run = tmp_path / "run"
    argv = [*command, "--out", str(run)]
    killed = happen(argv=argv, signal=signal.SIGKILL, at=(call, number))
    assert killed["code"] == -signal.SIGKILL, killed["err"]
    check_files(run)
    resumed = happen(argv=[*argv, "--resume"])
    assert resumed["code"] == 0, resumed["err"]
    assert outcome(run) == outcome(whole)
    assert not leftovers(run)


def test_interrupted_it_says_how_to_go_on_and_does(tmp_path, command, whole, happen):
    argv = [*command, "--out", str(tmp_path / "run")]
    on = [*argv, "--resume"]
    for given, stage in (
        (argv, "candidates, file before manifest"),
        (on, "search, history before checkpoint"),
    ):
        stopped = happen(argv=given, signal=signal.SIGINT, at=PLACES[stage])
        assert stopped["code"] == 130
        assert stopped["out"] == ""
        assert stopped["err"].splitlines()[-1].split() == ["rco", *on]
    assert happen(argv=on)["code"] == 0
    assert outcome(tmp_path / "run") == outcome(whole)


def test_files_that_may_not_grow(tmp_path, command, whole, happen):
    """As a disk that fills up while a file is written; what was done before is kept."""
    run = tmp_path / "run"
    argv = [*command, "--out", str(run), "--resume"]
    block, weights, tokenizer = (
        (whole / name).stat().st_size
        for name in ("candidates/block_0000.safetensors", "model/model.safetensors", "model/tokenizer.json")
    )
    assert block < weights < tokenizer
    failed_export = f"Writing {run / 'model'} failed: File too large. Nothing was left there"
    for limit, words in (
        (block - 1, "block_0000.safetensors: File too large"),
        (weights - 1, failed_export),
        (tokenizer - 1, failed_export),
    ):
        failed = happen(argv=argv, file_bytes=limit)
        assert failed["code"] == 1
        assert words in failed["err"]
        assert len(failed["err"].splitlines()) == 1
    done = happen(argv=argv, file_bytes=tokenizer)
    assert done["code"] == 0, done["err"]
    assert outcome(run) == outcome(whole)
    assert not leftovers(run)


@pytest.mark.skipif(
    not can_mount(), reason="no small disk can be mounted here; the limit on files stands for it"
)
def test_a_disk_that_is_full(tmp_path, command, whole, happen):
    """From a disk without room for a line to one that holds it all, each time going on from what was there."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    argv = [*command, "--out", str(disk / "run"), "--resume"]
    weights = sum(path.stat().st_size for path in (whole / "candidates").iterdir())
    checkpoint = (whole / "model" / "model.safetensors").stat().st_size
    page = 4096
    for size, words in (
        (2 * page, "config.json: No space left"),
        (weights // 2 + 8 * page, "candidates/"),
        (weights + checkpoint // 2 + 40 * page, "bytes free, but the checkpoint takes"),
        # The weights fit; the tokenizer, which another library writes, does not.
        (weights + checkpoint + 60 * page, "model failed: No space left on device. Nothing was left there"),
    ):
        failed = happen(argv=argv, disk=str(disk), disk_bytes=size)
        assert failed["code"] == 1
        assert words in failed["err"]
        assert len(failed["err"].splitlines()) == 1
    done = happen(argv=argv, disk=str(disk), disk_bytes=1 << 26, keep=(str(disk), str(kept)))
    assert done["code"] == 0, done["err"]
    assert outcome(kept / "run") == outcome(whole)
    assert not leftovers(kept)


@pytest.fixture
def damaged(tmp_path, whole):
    """A copy of a finished run's candidates, to do something to."""
    shutil.copytree(whole / "candidates", tmp_path / "store")
    return tmp_path / "store"


def shortened(path):
    path.write_bytes(path.read_bytes()[:-100])


def altered(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"), [(shortened, "bytes instead of"), (altered, "SHA-256"), (Path.unlink, None)]
)
def test_damaged_candidates(run, tmp_path, command, whole, damaged, damage, words):
    """Damage is an error that names the file; a block that is gone is made again."""
    argv = [*command, "--store", damaged, "--out", tmp_path / "run"]
    block = damaged / "block_0001.safetensors"
    damage(block)
    if words is not None:
        code, _, err = run(*argv)
        assert code == 1
        assert f"{block} is damaged" in err
        assert words in err
        block.unlink()  # as the message says
        argv.append("--resume")
    code, _, err = run(*argv)
    assert code == 0, err
    assert block.read_bytes() == (whole / "candidates" / block.name).read_bytes()
    first, second = (json.loads((r / "allocation.json").read_text()) for r in (tmp_path / "run", whole))
    assert first["allocation"] == second["allocation"]


def test_one_store_serves_every_budget(run, tmp_path, command, whole):
    before = {path: path.stat().st_mtime_ns for path in (whole / "candidates").iterdir()}
    for budget in (["--bits=2.2"], ["--bits=5"], ["--bpw=9"]):
        argv = [argument for argument in command if not argument.startswith("--bits")]
        out = tmp_path / budget[0].strip("-")
        code, _, err = run(*argv, *budget, "--store", whole / "candidates", "--out", out)
        assert code == 0, err
        assert not (out / "candidates").exists()
    assert {path: path.stat().st_mtime_ns for path in (whole / "candidates").iterdir()} == before


def test_candidates_of_another_model(run, tmp_path, command, whole):
    other = save_tiny("llama", tmp_path / "other", seed=1)
    argv = [*command, "--store", whole / "candidates", "--out", tmp_path / "run"]
    argv[1] = other
    code, _, err = run(*argv)
    assert code == 1
    assert "identity.model: was" in err
    assert "--overwrite-store" in err
    assert not (tmp_path / "run").exists()


def test_a_model_that_lacks_a_shard(run, tmp_path, command):
    model = save_tiny("llama", tmp_path / "model", max_shard_size="200KB")
    (model / "model-00002-of-00003.safetensors").unlink()
    argv = [*command, "--out", tmp_path / "run"]
    argv[1] = model
    code, _, err = run(*argv)
    assert code == 1
    assert "lacks 1 of its 3 shards: model-00002-of-00003.safetensors" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--out", "--store"])
def test_folders_that_cannot_be_written(run, tmp_path, command, option):
    """A folder inside a file cannot be made by anybody, not even by root."""
    (tmp_path / "file").write_text("in the way")
    others = {"--out": ["--store", tmp_path / "store"], "--store": ["--out", tmp_path / "run"]}
    code, _, err = run(*command, option, tmp_path / "file" / "folder", *others[option])
    assert code == 1
    assert "Could not write" in err
    assert "Not a directory. Choose a folder that you may write to" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "holds no text"), (" \n \n", "holds no text"), ("Too short.", "fewer than one sequence")],
)
def test_text_that_is_not_enough(run, tmp_path, random_llama, text, words):
    (tmp_path / "text.txt").write_text(text)
    argv = ["quantize", random_llama, "--data", tmp_path / "text.txt", *QUICK, "--out", tmp_path / "run"]
    code, _, err = run(*argv)
    assert code == 1
    assert words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        ("--samples=0", 1), ("--batch-size=0", 1), ("--sensitivity=0", 1), ("--selection=0", 1),
        ("--evaluation=0", 1), ("--length=1", 2), ("--top-k=-1", 0), ("--damp=-1", 0), ("--sweeps=-1", 0),
        ("--group-size=-8", 0), ("--prior-strength=-1", 0), ("--prior-strength=nan", 0), ("--refine=-1", 0),
    ],
)  # fmt: skip
def test_numbers_without_sense_are_refused_before_any_work(run, tmp_path, command, setting, least):
    flag, _, given = setting.partition("=")
    code, _, err = run(*command, setting, "--out", tmp_path / "run")
    assert code == 1
    assert f"{flag} must be at least {least}, got {given}" in err
    assert not (tmp_path / "run").exists()
