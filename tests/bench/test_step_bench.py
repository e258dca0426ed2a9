"""The step and memory benchmarks on tiny shapes, where everything but the speed can be checked."""

import json

import pytest
import torch

from rco.bench.step_bench import run, run_memory, to_markdown
from rco.cli import main
from rco.formats import parse
from rco.models.shapes import SHAPES, random_model


@pytest.mark.parametrize(("shape", "job"), [("quick", None), ("quick-moe", None), ("quick-moe", "quantize")])
def test_parts_add_up_to_the_sample(shape, job):
    report = run(shape, device="cpu", length=16, samples=2, steps=1, repeats=1, job=job)
    assert sum(report["breakdown"]["seconds"].values()) == pytest.approx(report["plain"]["sample"]["seconds"])
    assert report["plain"]["ratio"] == pytest.approx(
        report["plain"]["sample"]["seconds"] / report["plain"]["floor"]["seconds"]
    )
    assert report["options"] == (2 if shape == "quick-moe" and job is None else 7)
    steps = report["steps"]
    assert steps["ratio"] == pytest.approx(steps["seconds"] / report["plain"]["floor"]["seconds"] / 2)
    assert steps["samples_redone"] == [0]  # a CPU counts
    table = to_markdown(report)
    assert "| checkpointing |" in table
    assert "done twice" not in table
    steps["samples_redone"] = [2]
    assert "2 samples were done twice" in to_markdown(report)
    json.dumps(report)


def test_memory_report_and_its_reference():
    report = run_memory("quick", device="cpu", length=16, repeats=1)
    assert [row["checkpointing"] for row in report["modes"]] == [False, True]
    assert report["reference"]["relative_error"] < 1e-5
    assert report["reference"]["bytes"] == 256 * 2048 * 64 * 4
    pruning = run_memory("quick-moe", device="cpu", length=16, repeats=1)
    assert [(row["memory"], row["checkpointing"]) for row in pruning["modes"]] == [
        ("none", False),
        ("none", True),
    ]
    plain, less = (row["expected_bytes"] for row in pruning["modes"])
    assert less < plain
    assert "| none | yes |" in to_markdown(pruning)


@pytest.mark.parametrize(("what", "word"), [("step", "floor"), ("memory", "expected")])
def test_command_writes_table_json_and_plot(what, word, tmp_path, capsys):
    assert main(["bench", what, "--quick", "--out", str(tmp_path)]) == 0
    assert word in capsys.readouterr().out
    assert json.loads((tmp_path / f"{what}_quick.json").read_text())["shape"] == "quick"
    assert (tmp_path / f"{what}_quick.md").is_file()
    assert "<svg" in (tmp_path / f"{what}_quick.svg").read_text()


@pytest.mark.parametrize("what", ["step", "memory"])
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--shape", "gpt-5", "--device", "cpu"], 1, "There is no shape 'gpt-5'; there are qwen3-8b, llama3-8b"),
        (["--device", "tpu"], 1, "Unknown device 'tpu'"),
        ([], 1, "qwen3-8b has weights of 30.5 GiB in float32, and 4.0 GiB are free"),
        (["--shape", "quick", "--job", "prune", "--device", "cpu"], 1, "quick has no experts to prune"),
        (["--layers", "0", "--device", "cpu"], 2, "--layers"),
        (["--repeats", "0", "--device", "cpu"], 2, "--repeats"),
    ],
)  # fmt: skip
def test_mistakes_are_said_before_anything_is_made(what, arguments, code, message, capsys, monkeypatch):
    monkeypatch.setattr("rco.bench.step_bench.free_memory", lambda: 4 * 2**30)
    assert main(["bench", what, *arguments]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("qwen3-8b", 8.19), ("llama3-8b", 8.03), ("qwen3-30b-a3b", 30.53), ("olmoe", 6.92)],
)
def test_shapes_have_as_many_parameters_as_the_models_they_are_named_after(shape, billions):
    model = random_model(shape, device="meta", dtype=torch.bfloat16).model
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.slow
def test_a_block_of_llama3_8b_on_a_cpu(monkeypatch):
    family, settings = SHAPES["llama3-8b"]
    # A block is what takes its own path; the vocabulary would take most of the time.
    monkeypatch.setitem(SHAPES, "llama3-8b", (family, {**settings, "vocab_size": 512}))
    report = run("llama3-8b", device="cpu", layers=1, length=8, samples=1, steps=0, repeats=1, modes=(False,))
    assert (report["shape"], report["layers"], report["groups"]) == ("llama3-8b", 1, 7)
    assert report["plain"]["ratio"] > 0


def test_formats_stand_in_place_of_widths():
    menu = [parse("nvfp4-a4"), parse("fp8-dynamic"), parse("original")]
    report = run(
        "quick", device="cpu", length=16, samples=1, steps=0, repeats=1, modes=(False,), formats=menu
    )
    assert report["formats"] == ["nvfp4-a4", "fp8-dynamic", "original"]
    assert report["options"] == 3
    assert report["plain"]["ratio"] > 0
