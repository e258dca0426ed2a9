"""``rco prune`` and ``rco compare prune`` from the command line, on a tiny random model."""

import json

import pytest
import torch
import transformers

import rco
from rco.models.loading import load_model
from rco.models.moe.layers import moe_layers
from rco.runs import RunDirectory

SMALL = ["--sequences=6", "--selection=2", "--evaluation=4", "--length=16", "--steps=4", "--samples=2"]
SMALL += ["--refine=2", "--quiet"]


def logits(loaded):
    ids = torch.arange(40)[None]
    with torch.no_grad():
        return loaded.model.float()(ids).logits


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_from_a_model_to_a_checkpoint_that_loads(run, tmp_path, random_moe, texts):
    out = tmp_path / "run"
    code, printed, _ = run(
        "prune",
        random_moe,
        "--experts=5",
        "--data",
        texts,
        "--out",
        out,
        "--by-domain",
        "--json",
        *SMALL,
    )
    assert code == 0
    told = json.loads(printed)
    layers = told["moe"]["layers"]
    assert sum(len(layer["kept"]) for layer in layers) == 11
    assert min(len(layer["kept"]) for layer in layers) >= 2
    assert told["budget"]["pruned"] == 5
    names = [row["name"] for row in told["evaluation"]]
    assert names[0] == "full model"
    assert names[-1] == "RCO"
    assert [row["chosen"] for row in told["evaluation"]] == [False] * (len(names) - 1) + [True]
    assert all(row["experts"] == 11 and row["within_budget"] for row in told["evaluation"][1:])
    matrix = told["moe"]["by_domain"]
    assert set(matrix) == set(texts.split("+")) == set(next(iter(matrix.values())))
    assert told["certificate"]["used"] == 11
    assert (out / "report.html").stat().st_size > 10_000

    again = tmp_path / "again"
    assert run("export", out, "--format", "pruned", "--out", again)[0] == 0
    for path in (out / "model").iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    code, _, told_why = run("export", out, "--format", "dense", "--out", tmp_path / "dense")
    assert code == 1
    assert "pruned or pruned-padded" in told_why

    pruned = rco.load(out)
    assert sum(layer.num_experts for layer in moe_layers(pruned.model)) == 11
    assert sum(p.numel() for p in pruned.model.parameters()) == told["certificate"]["parameters"]
    # The checkpoint computes what the mask computes on the full model.
    from rco.models.moe.gates import expert_gates

    full = load_model(random_moe)
    keep = torch.zeros(16)
    for layer in layers:
        keep[[8 * layer["layer"] + expert for expert in layer["kept"]]] = 1
    with expert_gates(full.model) as gates:
        gates.set_gates(keep)
        expected = logits(full)
    torch.testing.assert_close(logits(pruned), expected, rtol=1e-4, atol=1e-4)


def test_the_same_number_everywhere_is_a_stock_checkpoint(run, tmp_path, random_moe, texts):
    out = tmp_path / "run"
    code, printed, _ = run(
        "prune", random_moe, "--experts=0.25", "--uniform", "--data", texts, "--out", out, *SMALL
    )
    assert code == 0
    assert "4 of 16 experts pruned" in printed
    assert "(stock)" in printed
    stock = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    assert type(stock) is transformers.Qwen3MoeForCausalLM
    assert [layer.num_experts for layer in moe_layers(stock)] == [6, 6]


def test_a_stopped_run_continues_to_the_same_result(run, tmp_path, random_moe, texts, monkeypatch):
    arguments = ["prune", random_moe, "--experts=5", "--data", texts, "--format=none", *SMALL]
    assert run(*arguments, "--out", tmp_path / "whole")[0] == 0
    save, saved = RunDirectory.save_checkpoint, []

    def interrupt(self, step, state, **rest):
        save(self, step, state, **rest)
        saved.append(step)
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "save_checkpoint", interrupt)
    code, _, told = run(*arguments, "--out", tmp_path / "parts")
    assert code == 130
    assert "--resume" in told
    monkeypatch.setattr(RunDirectory, "save_checkpoint", save)
    assert run(*arguments, "--out", tmp_path / "parts")[0] == 1  # not without --resume
    assert run(*arguments, "--out", tmp_path / "parts", "--resume")[0] == 0
    whole, parts = RunDirectory.open(tmp_path / "whole"), RunDirectory.open(tmp_path / "parts")
    assert parts.result.allocation == whole.result.allocation
    assert [r["loss"] for r in parts.history()] == [r["loss"] for r in whole.history()]
    # Finished, it is read, not searched again; other settings are refused.
    assert run(*arguments, "--out", tmp_path / "parts", "--resume")[0] == 0
    code, _, told = run(*arguments, "--lr=0.5", "--out", tmp_path / "parts", "--resume")
    assert code == 1
    assert "another configuration" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--experts=1.5"], "fraction between 0 and 1"),
        (["--experts=1.0"], "fraction between 0 and 1"),
        (["--experts=-1"], "must be positive"),
        (["--experts=0.9"], "prune at most 12"),
        ([], "exactly one budget"),
        (["--experts=2", "--size=1MB"], "exactly one budget"),
        (["--experts=2", "--padded"], "--padded is not possible"),
        (["--experts=2", "--searcher=rcoo"], "Did you mean rco"),
    ],
)
def test_bad_input_says_what_is_wrong_and_leaves_nothing(run, tmp_path, random_moe, arguments, words):
    code, printed, told = run("prune", random_moe, *arguments, "--out", tmp_path / "run")
    assert code == 1
    assert words in told
    assert not printed
    assert not (tmp_path / "run").exists()


def test_a_dense_model_is_an_error(run, tmp_path):
    code, _, told = run("prune", "tiny-llama", "--experts=0.25", "--out", tmp_path / "run")
    assert code == 1
    assert "This llama model has no experts" in told


def test_a_mask_of_another_model_is_an_error(run, tmp_path, random_moe, texts):
    out = tmp_path / "run"
    arguments = ["prune", random_moe, "--experts=5", "--data", texts, "--format=none", "--out", out, *SMALL]
    assert run(*arguments)[0] == 0
    told = json.loads((out / "allocation.json").read_text())
    told["allocation"]["choices"] = told["allocation"]["choices"][:-1]
    told["allocation"]["groups"] = told["allocation"]["groups"][:-1]
    (out / "allocation.json").write_text(json.dumps(told))
    code, _, error = run(*arguments, "--resume")
    assert code == 1
    assert "belongs to another model" in error


def test_dry_run_prints_the_plan_and_writes_nothing(run, tmp_path, random_moe):
    arguments = ["prune", random_moe, "--experts=0.3", "--out", tmp_path / "run", "--dry-run"]
    code, printed, _ = run(*arguments, "--json")
    plan = json.loads(printed)
    assert code == 0
    assert (plan["experts"], plan["prunes"], plan["keeps"]) == (16, 4, 12)
    code, printed, _ = run(*arguments)
    assert "4 pruned, 12 kept" in printed
    assert not (tmp_path / "run").exists()


def test_comparison_writes_its_tables_and_goes_on(run, tmp_path, random_moe, texts):
    out = tmp_path / "compared"
    arguments = ["compare", "prune", random_moe, "--experts=5", "--data", texts, "--out", out, *SMALL]
    arguments += ["--tokens=2000", "--workers=1"]
    methods = "rco,rco@0.5,evoesap,greedy,reap,frequency-global,random-pick"
    code, printed, _ = run(*arguments, "--seeds=1", "--methods", methods, "--json")
    assert code == 0
    outcome = json.loads(printed)
    rows = outcome["rows"]
    assert outcome["failed"] == {}
    assert [path.rsplit("/", 1)[-1] for path in outcome["plots"]] == ["comparison.svg"]
    assert {row["method"] for row in rows} == set(methods.split(","))
    assert [row["kl"] for row in rows] == sorted(row["kl"] for row in rows)
    written = json.loads((out / "comparison.json").read_text())
    entries = written["entries"]
    assert written["rows"] == rows
    assert written["environment"]["python"]
    assert {row["budget"] for row in rows} == {"5 of 16 experts pruned"}
    for row in rows:
        assert row["recovery"] == pytest.approx(100 * written["full_model"]["perplexity"] / row["perplexity"])
    assert all(entry["experts"] == 11 for entry in entries)
    assert all(e["tokens"] == e["forward_tokens"] + 2 * e["backward_tokens"] for e in entries)
    assert all(entry["tokens"] <= 2000 for entry in entries)
    assert next(e for e in entries if e["label"] == "rco@0.5")["tokens"] <= 1000
    assert (out / "comparison.md").read_text().count("\n| ") == len(rows) + 1
    assert (out / "comparison.csv").read_text().count("\n") == len(rows) + 1
    # A second seed adds to what is there, in processes of its own.
    more = [*arguments, "--seeds=2", "--methods", methods, "--workers=2", "--resume"]
    code, printed, told = run(*more, "--json")
    assert code == 0, told
    assert {row["seeds"] for row in json.loads(printed)["rows"]} == {2}
    again = json.loads((out / "comparison.json").read_text())["entries"]
    assert again[: len(entries)] == entries
    for bad, words in (("rcoo", "Did you mean"), ("rco@2", "share of the tokens"), ("rco,rco", "twice")):
        code, _, told = run(*arguments, "--methods", bad, "--resume")
        assert code == 1
        assert words in told


def test_generations_of_an_evolution_can_be_set(run, tmp_path, random_moe, texts):
    out = tmp_path / "run"
    arguments = ["prune", random_moe, "--experts=5", "--data", texts, "--format=none", "--out", out, *SMALL]
    code, _, told = run(*arguments, "--searcher=evoesap", "--prior=reap", "--generations=2")
    assert code == 0, told
    settings = json.loads((out / "allocation.json").read_text())["settings"]
    assert (settings["generations"], settings["steps_taken"]) == (2, 3)  # the first step chooses a parent
