"""Tuning in a run and of a finished one: the checkpoint has the tuned weights; a stopped run ends the same."""

import json
import shutil

import pytest
import torch

from rco.cli import main
from rco.compression import tuning
from rco.store import CandidateStore

QUICK = [
    "--sequences", "4", "--sensitivity", "2", "--selection", "2", "--evaluation", "2", "--length", "32",
    "--steps", "2", "--samples", "2", "--refine", "2", "--widths", "2,3,8", "--sweeps", "0", "--group-size", "16",
    "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def command(random_llama, texts):
    def arguments(folder, *more):
        return [
            "quantize", str(random_llama), "--bits", "2.5", "--data", texts, "--out", str(folder), *QUICK, *more,
        ]  # fmt: skip

    return arguments


TUNED = ("--tune", "full", "--tune-tokens", "1280")


@pytest.fixture(scope="module")
def tuned(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "run"
    assert main(command(folder, *TUNED)) == 0
    return folder


@pytest.fixture(scope="module")
def untuned(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untuned") / "run"
    assert main(command(folder, "--tune", "off")) == 0
    return folder


def read(folder):
    return json.loads((folder / "metrics.json").read_text())


def stored(folder):
    store = CandidateStore.open(folder / "tuned")
    return {name: store.load(name, "tuned") for name in store.linears}


def same(first, second):
    return all(
        torch.equal(stored_part, second[name].tensors[part])
        for name, weight in first.items()
        for part, stored_part in weight.tensors.items()
    )


def test_the_checkpoint_holds_the_tuned_weights_that_were_measured(tuned, untuned):
    from transformers import AutoModelForCausalLM

    metrics = read(tuned)
    found = metrics["tuning"]
    assert found["mode"] == "full"
    assert found["after"] < found["before"]
    assert 640 <= found["tokens"] <= 1280  # it may stop early in the second half
    assert 0 < found["moved"] < found["codes"]
    rows = {row["name"]: row for row in metrics["evaluation"]}
    assert [name for name, row in rows.items() if row["chosen"]] == ["RCO"]
    assert list(rows)[-2:] == ["RCO, not tuned", "RCO"]
    before = {row["name"]: row for row in read(untuned)["evaluation"]}
    assert "tuning" not in read(untuned)
    assert rows["RCO, not tuned"]["kl"] == before["RCO"]["kl"]
    assert rows["uniform 3"]["kl"] == before["uniform 3"]["kl"]  # measured with its own candidates
    assert metrics["certificate"]["checkpoint_bytes"] == read(untuned)["certificate"]["checkpoint_bytes"]
    packed = AutoModelForCausalLM.from_pretrained(tuned / "model").eval()
    packed(torch.zeros((1, 1), dtype=torch.int64))  # decodes the weights
    for name, weight in stored(tuned).items():
        assert torch.equal(packed.get_submodule(name).weight, weight.dequantize()), name
    page = (tuned / "report.html").read_text()
    assert "codes moved" in page
    assert "Loss on the selection text during tuning" in page


def test_a_run_that_is_stopped_while_tuning_ends_with_the_same_weights(command, tuned, tmp_path, monkeypatch):
    folder, steps = tmp_path / "run", []
    step = tuning._EndToEnd._step

    def stopping(self, *arguments):
        steps.append(1)
        if len(steps) == 25:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(tuning._EndToEnd, "_step", stopping)
    assert main(command(folder, *TUNED)) == 130
    assert list(folder.glob("checkpoints/*.pt"))
    assert main([*command(folder, *TUNED), "--resume"]) == 0
    assert len(steps) < 25 + 40  # not from the start
    assert same(stored(tuned), stored(folder))
    assert read(folder)["tuning"]["curve"] == read(tuned)["tuning"]["curve"]
    assert not list(folder.glob("checkpoints/*.pt"))


def test_a_finished_run_is_tuned_to_the_same_weights_and_the_better_tuning_stays(
    run, tuned, untuned, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(untuned, folder)
    code, out, _ = run("tune", folder, *TUNED, "--quiet")
    assert code == 0
    assert "less" in out
    assert same(stored(tuned), stored(folder))
    assert read(folder)["evaluation"] == read(tuned)["evaluation"]
    for file in (tuned / "model").glob("*.safetensors"):
        assert file.read_bytes() == (folder / "model" / file.name).read_bytes()
    code, _, _ = run("tune", folder, "--tune", "scales", "--tune-tokens", "64", "--quiet")
    assert code == 0
    assert same(stored(tuned), stored(folder))
    assert read(folder)["tuning"]["mode"] == "full"
    code, out, _ = run("tune", folder, "--tune", "blocks", "--dry-run")
    assert code == 0
    assert "tuning (blocks)" in out


def test_exports_of_a_tuned_run_hold_the_tuned_weights(run, tuned, tmp_path):
    code, _, _ = run("export", tuned, "--format", "dense", "--out", tmp_path / "dense", "--quiet")
    assert code == 0
    from safetensors.torch import load_file

    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for name, weight in stored(tuned).items():
        assert torch.equal(dense[f"{name}.weight"], weight.dequantize())


def test_python_has_the_same_result(random_llama, texts, tuned):
    import rco

    result = rco.quantize(
        random_llama, bits=2.5, data=texts, sequences=4, sensitivity=2, selection=2, evaluation=2, length=32,
        steps=2, samples=2, refine=2, widths="2,3,8", sweeps=0, group_size=16, tune="full", tune_tokens=1280,
        progress=False,
    )  # fmt: skip
    assert result.metrics["tuning"]["after"] == read(tuned)["tuning"]["after"]
    for name, weight in stored(tuned).items():
        assert torch.equal(result.model.get_submodule(name).weight, weight.dequantize())


def test_experts_are_tuned_in_a_run_by_default(run, random_moe, texts, tmp_path):
    folder = tmp_path / "run"
    code, _, _ = run(
        "quantize",
        random_moe,
        "--bits",
        "3",
        "--data",
        texts,
        "--out",
        folder,
        *QUICK,
        "--method",
        "rtn",
        "--tune-tokens",
        "640",
    )
    assert code == 0
    assert read(folder)["tuning"]["mode"] == "scales"  # little text
    assert any(".experts." in name for name in stored(folder))


def test_wrong_requests_are_refused_with_a_remedy(run, untuned):
    code, _, err = run("tune", untuned, "--tune", "off")
    assert code == 1
    assert "auto, scales, blocks or full" in err
    code, _, err = run("compare", "quantize", "tiny-llama", "--bits", "2.5", "--tune", "full")
    assert code == 1
    assert "before tuning" in err
