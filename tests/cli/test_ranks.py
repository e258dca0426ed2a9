"""``rco quantize`` and ``rco prune`` under several ranks: one result, one writer, and a way back after a death."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_jobs
import torch
from ranks import results, start_ranks

from rco.store import CandidateStore

SMALL = ["--sequences=4", "--selection=2", "--evaluation=2", "--length=16", "--steps=3", "--samples=3"]
SMALL += ["--refine=2", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the runs of this file go."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def job(random_llama, random_moe, texts):
    """The arguments of a command that quantizes or prunes."""

    def arguments(kind):
        own = {
            "quantize": [random_llama, "--bits=3", "--widths=2,3,4", "--group-size=0", "--sensitivity=3"],
            "prune": [random_moe, "--experts=0.25"],
        }[kind]
        return [kind, *map(str, own), "--data", texts, *SMALL]

    return arguments


def outcome(run):
    """What must not depend on the ranks: the allocation, its losses, and what was measured."""
    found = json.loads((run / "allocation.json").read_text())
    metrics = json.loads((run / "metrics.json").read_text())
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in history]
    tuned = metrics.get("tuning")
    if tuned is not None:
        weights = CandidateStore.open(run / "tuned").manifest if tuned["improved"] else None
        tuned = tuned["before"], tuned["after"], tuned["curve"], weights
    return (
        found["allocation"],
        found["candidates"],
        losses,
        metrics["evaluation"],
        metrics["certificate"],
        tuned,
    )


@pytest.fixture(scope="module")
def alone(folder, job):
    """The same jobs by one process."""
    runs = {}
    for kind in ("quantize", "prune"):
        code, _, err = rank_jobs.command([*job(kind), "--out", str(folder / f"{kind}-alone")])
        assert code == 0, err
        runs[kind] = outcome(folder / f"{kind}-alone")
    assert runs["quantize"][-1][-1] is not None, "nothing was tuned"
    return runs


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["quantize", "prune"])
def test_any_number_of_ranks_gives_the_same_run(folder, job, alone, kind, count):
    run = folder / f"{kind}-{count}"
    (code, out, _), *helpers = results(start_ranks(count, rank_jobs.command, [*job(kind), "--out", str(run)]))
    assert code == 0
    assert json.loads(out)["folder"] == str(run)
    assert helpers == [(0, "", "")] * (count - 1)  # they write and print nothing
    assert outcome(run) == alone[kind]
    if kind == "quantize":
        stores = [CandidateStore.open(at / "candidates") for at in (folder / f"{kind}-alone", run)]
        assert stores[0].manifest == stores[1].manifest


@pytest.mark.parametrize("kind", ["quantize", "prune"])
def test_a_death_leaves_a_run_that_one_process_can_finish(folder, job, alone, kind):
    run = folder / f"{kind}-killed"
    arguments = [*job(kind), "--out", str(run)]
    found = start_ranks(2, rank_jobs.command, arguments, 1)
    code, out, err = found[0][0]
    assert 1 not in found
    assert (code, out) == (1, "")
    assert "rank has ended" in err
    assert "--nproc-per-node 2 -m rco" in err
    assert "--resume" in err
    assert not (run / "allocation.json").exists()
    assert list(run.glob("checkpoints/*.pt"))
    code, _, err = rank_jobs.command([*arguments, "--resume"])
    assert code == 0, err
    assert outcome(run) == alone[kind]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-map", "auto"], "add --device cuda, got cpu"),
        (["--rank-timeout", "0"], "must be positive"),
        pytest.param(
            ["--device-map", "auto", "--device", "cuda"],
            "this machine has 0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_mistakes_are_said_in_a_line(job, tmp_path, arguments, message):
    code, _, err = rank_jobs.command([*job("prune"), *arguments, "--out", str(tmp_path / "run")])
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1


def torchrun(count, arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.Popen(
        [*command, "-m", "rco", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quantize", "prune"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_torchrun(folder, job, alone, kind, count):
    run = folder / f"{kind}-torchrun-{count}"
    process = torchrun(count, [*job(kind), "--out", str(run)])
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert json.loads(out)["folder"] == str(run)
    assert outcome(run) == alone[kind]


def process_of_rank(parent, rank):
    """Process id of a rank that torchrun has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"rank {rank} is not among {children}")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_ends_when_a_rank_is_killed(folder, job, rank):
    run = folder / f"torchrun-killed-{rank}"
    arguments = [*job("quantize"), "--steps=60", "--out", str(run)]
    process = torchrun(2, arguments)
    deadline = time.monotonic() + 300
    while not list(run.glob("checkpoints/*.pt")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process_of_rank(process.pid, rank), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"Error on rank {1 - rank}: " in err
    assert "-m rco quantize" in err
    assert "--resume" in err
    process = torchrun(2, [*arguments, "--resume"])
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    whole = folder / "sixty"
    if not whole.exists():
        code, _, err = rank_jobs.command([*job("quantize"), "--steps=60", "--out", str(whole)])
        assert code == 0, err
    assert outcome(run) == outcome(whole)
