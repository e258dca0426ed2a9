"""``rco quantize`` from the command line: one small run end to end, resume, budgets, errors."""

import json
import re

import pytest
import torch

from rco.cli import main

QUICK = [
    "--sequences", "4", "--sensitivity", "2", "--selection", "2", "--evaluation", "2", "--length", "64",
    "--steps", "3", "--samples", "2", "--refine", "2", "--widths", "2,3,8", "--sweeps", "0", "--tune", "off",
    "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize") / "run"
    assert main(["quantize", "tiny-llama", "--bits", "2.5", "--out", str(folder), *QUICK]) == 0
    return folder


def test_everything_is_there_and_within_budget(finished):
    for name in ("config", "problem", "allocation", "metrics", "environment"):
        assert (finished / f"{name}.json").is_file(), name
    assert (finished / "report.html").is_file()
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["budget"]["used_units"] <= metrics["budget"]["budget_units"]
    assert metrics["certificate"]["average_bits"] <= 2.5
    names = [row["name"] for row in metrics["evaluation"]]
    assert names == ["full model", "uniform 2", "uniform 3", "uniform interpolation", "proxy knapsack", "RCO"]
    assert not list(finished.glob("checkpoints/*.pt"))


def test_the_checkpoint_gives_the_evaluated_logits(finished):
    """Stock transformers decode the checkpoint to the weights that the search evaluated."""
    from transformers import AutoModelForCausalLM

    from rco.models.loading import load_model
    from rco.models.precision import computing_in
    from rco.store import CandidateStore

    packed = AutoModelForCausalLM.from_pretrained(finished / "model").eval()
    full = load_model("tiny-llama")
    store = CandidateStore.open(finished / "candidates")
    metrics = json.loads((finished / "metrics.json").read_text())
    widths = {member: group["width"] for group in metrics["groups"] for member in group["members"]}
    with torch.no_grad():
        for info in full.layout.linears(full.model):
            info.module.weight.copy_(store.load(info.name, str(widths[info.name])).dequantize())
        ids = torch.arange(40)[None] * 7 % 8192
        packed(ids[:, :1])  # decodes the weights; one token, as CPUs without bfloat16 take long for it
        for info in full.layout.linears(full.model):
            decoded = packed.get_submodule(info.name).weight
            assert decoded.dtype == info.module.weight.dtype == torch.bfloat16
            assert torch.equal(decoded, info.module.weight), info.name
        with computing_in(full.model, torch.float32), computing_in(packed, torch.float32):
            assert torch.equal(packed(ids).logits, full.model(ids).logits)


def test_a_second_run_in_the_same_folder_needs_resume(finished, run):
    code, _, err = run("quantize", "tiny-llama", "--bits", "2.5", "--out", str(finished), *QUICK)
    assert code == 1
    assert "--resume" in err
    before = (finished / "allocation.json").read_bytes()
    code, _, _ = run("quantize", "tiny-llama", "--bits", "2.5", "--out", str(finished), *QUICK, "--resume")
    assert code == 0
    assert (finished / "allocation.json").read_bytes() == before
    code, _, err = run("quantize", "tiny-llama", "--bits", "2.6", "--out", str(finished), *QUICK, "--resume")
    assert code == 1
    assert "another configuration" in err


def test_evaluate_and_report_read_a_run(finished, tmp_path, run):
    quick = ["--sequences", "2", "--length", "64", "--json"]
    code, out, _ = run("evaluate", str(finished), "--reference", "tiny-llama", *quick)
    assert code == 0
    rows = json.loads(out)
    assert rows[1]["kl"]["kl"] > 0
    assert rows[0]["bytes"] > rows[1]["bytes"]
    code, out, _ = run("report", str(finished), "--out", str(tmp_path / "page.html"))
    assert code == 0
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_export_writes_the_same_weights_in_another_format(finished, tmp_path, run):
    """The dense export holds, tensor by tensor, what the packed checkpoint decodes to."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    dense = tmp_path / "dense"
    code, out, _ = run("export", str(finished), "--format", "dense", "--out", str(dense), "--json")
    assert code == 0
    assert json.loads(out)["path"] == str(dense)
    packed = AutoModelForCausalLM.from_pretrained(finished / "model")
    packed(torch.arange(4)[None])  # decompresses
    decoded = packed.state_dict()
    plain = load_file(dense / "model.safetensors")
    assert len(plain) > 56
    for name, tensor in plain.items():
        assert torch.equal(tensor, decoded[name]), name
    recipe = tmp_path / "recipe"
    code, out, _ = run("export", str(finished), "--format", "gptqmodel", "--out", str(recipe))
    assert code == 0
    assert str(recipe) in out
    assert (recipe / "README.md").is_file()
    again = tmp_path / "again"
    assert run("export", finished, "--out", again)[0] == 0
    files = {path.name for path in again.iterdir()}
    assert files == {path.name for path in (finished / "model").iterdir()}
    for name in files:
        assert (again / name).read_bytes() == (finished / "model" / name).read_bytes(), name
    code, _, err = run("export", str(finished), "--out", str(again))
    assert code == 1
    assert "not empty" in err


def test_export_refuses_what_it_cannot_stand_for(finished, tmp_path, run):
    import shutil

    code, _, err = run("export", str(finished), "--format", "pruned", "--out", str(tmp_path / "x"))
    assert code == 1
    assert "compressed-tensors or dense" in err
    code, _, err = run("export", str(tmp_path))
    assert code == 1
    assert "holds no run" in err
    other = tmp_path / "copy"
    shutil.copytree(finished, other)
    metrics = json.loads((other / "metrics.json").read_text())
    for changed, message in (
        ({"candidates": "0" * 64}, "no longer holds the candidates"),
        ({"model": {**metrics["model"], "fingerprint": "0" * 64}}, "weights have changed"),
    ):
        (other / "metrics.json").write_text(json.dumps({**metrics, **changed}))
        code, _, err = run("export", str(other), "--out", str(tmp_path / "x"))
        assert code == 1
        assert message in err
    (other / "allocation.json").unlink()
    code, _, err = run("export", str(other), "--out", str(tmp_path / "x"))
    assert code == 1
    assert "--resume" in err
    assert not (tmp_path / "x").exists()


def test_dry_run_says_range_and_estimates(run, tmp_path):
    code, out, _ = run(
        "quantize", "tiny-llama", "--size", "6MB", "--dry-run", "--json", "--out", str(tmp_path / "x")
    )  # fmt: skip
    assert code == 0
    described = json.loads(out)
    assert described["groups"] == 57
    assert described["embedding"] == ["int8", "original"]
    assert described["estimate"]["memory_bytes"] > 0
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "1.5"], "between 2 and 8"),
        (["--bits", "9"], "between 2 and 8"),
        (["--size", "1MB"], "bytes"),
        ([], "exactly one budget"),
        (["--bits", "3", "--bpw", "3"], "exactly one budget"),
        (["--bits", "3", "--searcher", "rcoo"], "Did you mean rco"),
        (["--bits", "3", "--data", "no-such-text"], "no-such-text"),
        (["--bits", "3", "--group-size", "48"], "48"),
    ],
)
def test_mistakes_are_said_in_a_line(run, tmp_path, arguments, message):
    code, _, err = run("quantize", "tiny-llama", *arguments, "--out", str(tmp_path / "run"), *QUICK)
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_text_that_is_too_short(run, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("Not much to see.")
    code, _, err = run(
        "quantize", "tiny-llama", "--bits", "3", "--data", str(file), "--out", str(tmp_path / "run"), *QUICK
    )  # fmt: skip
    assert code == 1
    assert "token" in err
    assert not (tmp_path / "run").exists()


def test_candidates_of_another_setting_are_refused_before_there_is_a_run(finished, tmp_path, run):
    arguments = ["quantize", "tiny-llama", "--bits", "3", "--out", str(tmp_path / "run"), *QUICK]
    code, _, err = run(*arguments, "--damp", "0.1", "--store", str(finished / "candidates"))
    assert code == 1
    assert "identity.damp: was 0.01, now 0.1" in err
    assert "--overwrite-store" in err
    assert not (tmp_path / "run").exists()


def test_progress_shows_where_the_search_stands(run, tmp_path, random_llama, texts):
    """Loss, expected cost as the user counts it, entropy, decided groups, time left."""
    base = ["quantize", random_llama, "--data", texts, "--out", tmp_path / "run", *QUICK, "--method=rtn"]
    code, _, err = run(
        *[argument for argument in base if argument != "--quiet"], "--bits=3", "--group-size=8"
    )
    assert code == 0
    # The device and the range come first, before any work.
    assert err.splitlines()[0] == "device: cpu (--device auto)"
    assert err.splitlines()[1].startswith("requested 3 bits; bits from 2 to 8 are feasible; memory about ")
    lines = [line for line in err.splitlines() if line.startswith("search: ")]
    step = r"search: \d/3, loss [\d.e-]+, 3\.0000 bits, entropy [\d.]+, \d+ decided, tau [\d.]+"
    assert len(lines) == 3
    assert re.fullmatch(rf"{step}, about \d+ s left", lines[0])
    assert re.fullmatch(step, lines[-1])


@pytest.mark.parametrize(
    "options",
    [
        ["--prior=uniform"],
        ["--prior=output-error"],
        ["--loss=cross-entropy"],
        ["--top-k=5"],
        ["--batch-size=2", "--checkpointing"],
        ["--skip=down_proj", "--lock=layers.0.self_attn=8", "--tie=gate_proj,up_proj"],
        ["--bpw=6.5", "--symmetric"],
    ],
    ids=" ".join,
)
def test_options_of_the_search(run, tmp_path, random_llama, texts, options):
    """Each takes part in a whole run, which keeps its budget and is no worse than where it began."""
    budget = [] if any(option.startswith("--bpw") for option in options) else ["--bits=4"]
    small = [*budget, "--group-size=8", "--method=rtn", "--format=none", "--out", tmp_path / "run"]
    code, _, err = run("quantize", random_llama, "--data", texts, *QUICK, *small, *options)
    assert code == 0, err
    result = json.loads((tmp_path / "run" / "allocation.json").read_text())
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["budget"]["used_units"] <= metrics["budget"]["budget_units"]
    assert result["loss"] <= min(result["candidates"].values())
    assert ("prior" in result["candidates"]) == (options != ["--prior=uniform"])


def test_impq_chooses_between_the_widths_of_its_paper(run, tmp_path, random_llama, texts):
    small = [
        "--bits=3",
        "--widths=2,3,4,8",
        "--group-size=8",
        "--method=rtn",
        "--format=none",
        "--prior=uniform",
    ]
    code, _, err = run(
        "quantize",
        random_llama,
        "--data",
        texts,
        *QUICK,
        *small,
        "--searcher=impq",
        "--out",
        tmp_path / "run",
    )
    assert code == 0, err
    result = json.loads((tmp_path / "run" / "allocation.json").read_text())
    assert result["settings"]["pair"] == [0, 2]
    assert result["candidates"].keys() == {"impq", "uniform"}
