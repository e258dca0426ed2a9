"""Whole jobs on a GPU, with the built-in models and few steps."""

import json

import pytest
import rank_jobs
from ranks import results, start_ranks

import rco
from rco.cli import main
from rco.models.moe.layers import moe_layers

pytestmark = pytest.mark.gpu

SMALL = [
    "--device",
    "cuda",
    "--sequences",
    "8",
    "--selection",
    "4",
    "--evaluation",
    "4",
    "--length",
    "64",
    "--steps",
    "2",
    "--samples",
    "2",
    "--refine",
    "2",
    "--json",
]
QUANTIZE = [*SMALL, "--tune-tokens", "512"]  # fmt: skip


@pytest.mark.parametrize("memory", ["resident", "offload"])
def test_quantize_and_evaluate(tmp_path, capsys, memory):
    run = tmp_path / "run"
    arguments = ["--bits", "2.5", "--widths", "2,3,4", "--sensitivity", "4", "--memory", memory]
    arguments += ["--format", "dense", "--out", str(run)]
    assert main(["quantize", "tiny-llama", *arguments, *QUANTIZE]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["memory"]["search_bytes"] > 0
    rows = {row["name"]: row for row in outcome["evaluation"]}
    assert 0 < rows["uniform 3"]["kl"] < rows["uniform 2"]["kl"]
    assert 0 < rows["RCO"]["kl"] < rows["uniform 2"]["kl"]
    assert rows["full model"]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows["RCO"]["within_budget"]
    # What was written is what was evaluated.
    assert main(["evaluate", str(run), "--reference", "tiny-llama", "--device", "cuda", "--sequences", "4",
                 "--length", "64", "--json"]) == 0  # fmt: skip
    full, written = json.loads(capsys.readouterr().out)
    assert 0 < written["kl"]["kl"] < rows["uniform 2"]["kl"]
    assert written["bytes"] <= full["bytes"]


@pytest.mark.parametrize(
    "choice",
    [
        ["--bits", "3", "--widths", "2,3,4", "--format", "dense"],
        # Locked attention counts: three bits on the whole are out of reach.
        [
            "--bits",
            "4",
            "--per-projection",
            "--lock",
            "attention=16",
            "--searcher",
            "mxmoe",
            "--method",
            "rtn",
        ],
        ["--active-bits", "3", "--allow-prune", "--widths", "2,4,16", "--method", "rtn"],
    ],
    ids=["widths", "mxmoe", "widths-and-pruning"],
)
def test_quantize_experts(tmp_path, capsys, choice):
    run = tmp_path / "run"
    assert main(["quantize", "tiny-moe", "--sensitivity", "4", "--out", str(run), *choice, *QUANTIZE]) == 0
    outcome = json.loads(capsys.readouterr().out)
    chosen = next(row for row in outcome["evaluation"] if row["chosen"])
    assert chosen["within_budget"]
    assert 0 < chosen["kl"] < 2
    assert outcome["expert_widths"]["experts"] == 6 * 32
    if "dense" in choice:  # the one format that loads without another package
        assert main(["evaluate", str(run), "--reference", "tiny-moe", "--device", "cuda", "--sequences", "4",
                     "--length", "64", "--json"]) == 0  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        ["quantize", "tiny-llama", "--bits", "3", "--sensitivity", "4", "--tune-tokens", "512"],
        ["prune", "tiny-moe", "--experts", "0.25"],
    ],
)
def test_ranks_that_share_a_gpu_search_as_one_process_does(tmp_path, job):
    """All that many GPUs do but being many: each rank asks for this one by its number."""
    arguments = [*job, *SMALL, "--format", "none", "--device", "cuda:0"]
    losses = []
    for count in (1, 2):
        run = tmp_path / str(count)
        found = results(start_ranks(count, rank_jobs.command, [*arguments, "--out", str(run)], timeout=200))
        assert [code for code, _, _ in found] == [0] * count, found
        losses.append([json.loads(line)["loss"] for line in (run / "history.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_prune(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["prune", "tiny-moe", "--experts", "0.25", "--out", str(run), *SMALL]) == 0
    outcome = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in outcome["evaluation"]}
    keep = 6 * 32 * 3 // 4
    assert rows["full model"]["kl"] == pytest.approx(0, abs=1e-6)
    assert all(row["experts"] == keep for name, row in rows.items() if name != "full model")
    assert 0 < rows["RCO"]["kl"] < 2
    kept = [len(layer["kept"]) for layer in outcome["moe"]["layers"]]
    assert sum(kept) == keep
    # The checkpoint has the experts that the evaluation kept, and no others.
    assert [layer.num_experts for layer in moe_layers(rco.load(run).model)] == kept
