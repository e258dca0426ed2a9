"""``rco compare quantize`` from the command line, on a tiny random model."""

import csv
import dataclasses
import json
import os

import pytest

from rco import registry
from rco.pipeline import compare
from rco.pipeline.compare import fitting_workers
from rco.pipeline.configs import CompareQuantizeConfig
from rco.pipeline.entrants import Allowance, Entrant
from rco.pipeline.estimate import Estimate

LENGTH, BATCHES = 16, 150
SMALL = [
    "--sequences=6",
    "--selection=2",
    "--evaluation=4",
    f"--length={LENGTH}",
    "--samples=2",
    "--sensitivity=2",
]
SMALL += [
    "--widths=2,3,4,8",
    "--group-size=8",
    "--sweeps=0",
    f"--allowance=tokens={LENGTH * BATCHES}",
    "--workers=1",
    "--quiet",
]


def entries_of(folder):
    return json.loads((folder / "comparison.json").read_text())["entries"]


def test_all_default_methods_at_equal_tokens_in_one_table(run, tmp_path, random_llama, texts):
    out = tmp_path / "compared"
    arguments = ["compare", "quantize", random_llama, "--bits=2.5", "--data", texts, "--out", out, *SMALL]
    code, printed, told = run(*arguments, "--seeds=1", "--json")
    assert code == 0, told
    outcome = json.loads(printed)
    methods = CompareQuantizeConfig(model="any").methods.split(",")
    assert outcome["failed"] == {}
    assert {row["method"] for row in outcome["rows"]} == set(methods)
    assert [row["kl"] for row in outcome["rows"]] == sorted(row["kl"] for row in outcome["rows"])
    entries = {entry["label"]: entry for entry in entries_of(out)}
    for label, entry in entries.items():
        assert entry["within_budget"]
        assert entry["bits"] <= 2.5
        share = 0.1 if label.endswith("@0.1") else 1.0
        assert entry["tokens"] <= share * LENGTH * BATCHES
        assert entry["tokens"] == entry["forward_tokens"] + 2 * entry["backward_tokens"]
        assert len(entry["by_domain"]) == 2
    # The gradients behind the prior are part of what RCO spends; the printed algorithm has none.
    assert entries["rco"]["backward_tokens"] > 0
    assert entries["rco-plain"]["candidates"].keys() == {"final"}
    assert entries["impq"]["settings"]["pair"] == [0, 2]
    for label, entry in entries.items():
        tokens = [point[0] for point in entry["curve"]]
        assert tokens == sorted(set(tokens))
        assert entry["curve"][-1] == [entry["tokens"], entry["kl"]]
        # Rules that are nothing but a table or an order have no way to their answer.
        rules = ("fisher", "fisher-pooled", "output-error", "uniform", "uniform-fill", "uniform-random-fill")
        # Within so few tokens the first step of these is the whole search.
        assert len(tokens) > 1 or label in (*rules, "one-at-a-time", "higgs", "rco@0.1"), label
    table = (out / "comparison.md").read_text()
    assert table.count("\n| ") == len(methods) + 1
    rows = list(csv.DictReader((out / "comparison.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == [row["method"] for row in outcome["rows"]]
    assert {path.rsplit("/", 1)[-1] for path in outcome["plots"]} == {"tokens.svg", "recovery.svg"}


def test_experts_have_sensitivities_of_their_layers_and_pay_for_them(run, tmp_path, random_moe, texts):
    out = tmp_path / "compared"
    arguments = ["compare", "quantize", random_moe, "--bits=2.5", "--data", texts, "--out", out, *SMALL]
    arguments += ["--lock=attention=16", "--count=experts", "--per-projection", "--methods=rco,mxmoe"]
    code, _, told = run(*arguments, "--seeds=1", "--no-curves", f"--allowance=tokens={LENGTH * 300}")
    assert code == 0, told
    entries = {entry["label"]: entry for entry in entries_of(out)}
    assert entries["mxmoe"]["settings"]["sensitivities"] == "layer_errors"
    # Two sequences, forwarded once by the full model and once at each of the four widths, and the choice.
    assert entries["mxmoe"]["forward_tokens"] >= LENGTH * 2 * (1 + 4)
    assert entries["mxmoe"]["backward_tokens"] == 0
    assert all(entry["within_budget"] and entry["tokens"] <= LENGTH * 300 for entry in entries.values())
    assert {path.name for path in (out / "sensitivities").iterdir()} == {
        "0-2.safetensors", "layers-2-all.safetensors", "layers-2-experts.safetensors",
    }  # fmt: skip


def test_more_budgets_and_seeds_are_added_in_parallel_processes(run, tmp_path, random_llama, texts):
    out = tmp_path / "compared"
    base = ["compare", "quantize", random_llama, "--data", texts, "--out", out, *SMALL]
    tasks = tmp_path / "sense.jsonl"
    lines = [{"context": "a b", "choices": [" c", " hh"], "label": k % 2} for k in range(4)]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base += ["--methods=rco,uniform,evopress+prior", "--no-curves", "--tasks", tasks]
    base += [f"--allowance=tokens={LENGTH * 60}", "--method=rtn"]
    sweep = ["--sweep", "--sweep-budgets=3"]
    assert run(*base, "--bits=2.5", "--seeds=1")[0] == 0
    before = entries_of(out)
    code, printed, told = run(
        *base, *sweep, "--bits=2.5,3.0", "--seeds=2", "--workers=2", "--resume", "--json"
    )
    assert code == 0, told
    outcome = json.loads(printed)
    rows = {(row["budget"], row["method"]): row["seeds"] for row in outcome["rows"]}
    front = {budget: rows.pop((budget, "sweep")) for budget in ("2.5", "2.75", "3.0")}
    assert set(front.values()) == {2}
    assert "quality.svg" in {path.rsplit("/", 1)[-1] for path in outcome["plots"]}
    assert rows == {
        (budget, method): 1 if method == "uniform" else 2
        for budget in ("2.5", "3.0")
        for method in ("rco", "uniform", "evopress+prior")
    }
    assert all(row["acc sense"] == 0.5 for row in outcome["rows"])  # the same question, either answer
    assert all(row["recovery"] == 100.0 for row in outcome["rows"])
    assert "| acc sense |" in (out / "comparison.md").read_text()
    after = entries_of(out)
    assert all(entry in after for entry in before)
    # A process of its own gives what this one gives.
    again = tmp_path / "again"
    base[base.index(out)] = again
    assert run(*base, "--bits=3.0", "--seeds=1")[0] == 0
    alone = next(entry for entry in entries_of(again) if entry["label"] == "rco")
    beside = next(e for e in after if (e["label"], e["seed"], e["budget"]) == ("rco", 0, "3.0"))
    assert alone["choices"] == beside["choices"]
    assert alone["kl"] == pytest.approx(beside["kl"], rel=1e-6)


def test_bad_requests_are_refused_before_any_work(run, tmp_path, random_llama, texts):
    base = ["compare", "quantize", random_llama, "--data", texts, "--out", tmp_path / "none", *SMALL]
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}\n')
    for arguments, words in (
        (["--bits=2.5", "--tasks", tmp_path / "bad.jsonl"], "line 1: expected an object with context"),
        (["--bits=2.5", "--methods=rcoo"], "Did you mean rco"),
        (["--bits=2.5", "--methods=rco@2"], "share of the tokens"),
        (["--bits=2.5", "--prior=weight-error"], "rco-plain+weight-error"),
        (["--bits=2.5", "--allowance=hours=3"], "tokens=NUMBER"),
        (["--methods=rco"], "one kind of budget"),
        (["--bits=2.5", "--sweep"], "two different budgets"),
        (["--bits=2.5,many", "--sweep"], "many"),
        (["--size=1GB", "--sweep"], "--sweep needs two different budgets in --size"),
        (["--bits=2.5,3.0", "--sweep", "--sweep-budgets=1"], "--sweep-budgets must be at least 2"),
        (["--bits=2.5,1.5", "--methods=rco"], "must lie between"),
    ):
        code, _, told = run(*base, *arguments)
        assert code == 1
        assert words in told
    code, printed, _ = run(*base, "--bits=2.5,3.0", "--methods=rco,uniform", "--seeds=2", "--dry-run")
    assert code == 0
    assert "would run 6 searches" in printed
    asked = [
        "--methods",
        "rco,evopress,impq,higgs,uniform",
        "--seeds",
        "5",
        "--allowance",
        "tokens=5e5",
        "--sweep",
    ]
    code, printed, _ = run(*base, "--bits", "2.25,2.5,3.0,3.5,4.0", *asked, "--dry-run")
    assert code == 0
    # Four methods at five seeds and a fixed rule at five budgets, and one sweep per seed.
    assert f"would run {5 * (4 * 5 + 1) + 5} searches, at most 500,000 tokens each" in printed
    assert not (tmp_path / "none").exists()


def test_the_budgets_of_a_sweep_are_exact_and_named_as_listed():
    config = CompareQuantizeConfig(model="any", bits="4.00,2.25,5/2", sweep=True, sweep_budgets=8)
    assert config.front() == ["2.25", "5/2", "2.75", "3", "3.25", "3.5", "3.75", "4.00"]
    thirds = CompareQuantizeConfig(model="any", bits="2,3", sweep=True, sweep_budgets=4)
    assert thirds.front() == ["2", "2.3333", "2.6667", "3"]
    sizes = CompareQuantizeConfig(model="x", size="1MB,llama-q2_k,1000009", sweep_budgets=4)
    assert sizes.front() == ["1MB", "1000003", "1000006", "1000009"]
    with pytest.raises(ValueError, match="two different budgets in `size`"):
        CompareQuantizeConfig(model="x", size="1MB,llama-q2_k").front()


def test_processes_follow_cores_and_memory(monkeypatch):
    def workers(memory=2**20, threads=1, **arguments):
        return fitting_workers(Estimate(memory, 0, 0, 0, 1.0, **arguments), threads)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(compare, "free_memory", lambda: 10 * 2**30)
    assert (workers(), workers(threads=3), workers(threads=16)) == (8, 2, 1)
    assert (workers(4 * 2**30), workers(40 * 2**30)) == (2, 1)
    assert workers(on_gpu=True) == 1
    monkeypatch.setattr(compare, "free_memory", lambda: None)
    assert workers(40 * 2**30) == 8


def test_allowances():
    assert Allowance.parse(None, 7) == Allowance(7)
    assert Allowance.parse("tokens=5e5", 7) == Allowance(500_000)
    assert Allowance.parse("seconds=2.5,tokens=9", 7) == Allowance(9, 2.5)
    assert Allowance.parse("seconds=3", 7) == Allowance(None, 3.0)


def test_labels_say_who_has_the_prior():
    has_prior = {
        label: Entrant.parse(label).prior for label in ("rco@0.1", "rco-plain", "penalty", "penalty+prior")
    }
    assert has_prior == {"rco@0.1": True, "rco-plain": False, "penalty": False, "penalty+prior": True}
    config = CompareQuantizeConfig(model="any", samples=3, lr=0.2)
    searcher = Entrant.parse("penalty+prior").make(500, None, 4, config)
    assert (searcher.samples, searcher.choose, searcher.refine, searcher.max_evaluations) == (
        3,
        True,
        None,
        500,
    )
    assert searcher.tau == (1.0, 0.1)
    printed = Entrant.parse("penalty").make(500, None, 4, config)
    assert (printed.samples, printed.choose, printed.refine, printed.curvature) == (3, False, 0, False)
    plain = Entrant.parse("rco-plain+weight-error").make(500, None, 4, config)
    for name in ("samples", "lr", "tau", "refine", "curvature", "choose", "monotone", "antithetic"):
        assert getattr(plain, name) == getattr(printed, name), name
    assert plain.tau == (1.0, 0.01)
    colder = dataclasses.replace(config, tau=(1.0, 0.05), antithetic=True, samples=4)
    for label in ("rco", "rco-plain", "penalty"):
        made = Entrant.parse(label).make(500, None, 4, colder)
        assert (made.tau, made.antithetic, made.samples) == ((1.0, 0.05), True, 4)
    free = Entrant.parse("evopress").make(None, None, 1, config)
    assert free == registry.load(registry.METHODS, "evopress", "method")(seed=1)
    few = Entrant.parse("evoesap").make(500, None, 1, dataclasses.replace(config, generations=10))
    assert few.generations == 10
    with pytest.raises(ValueError, match="weight-error or prior, got 'reap'"):
        Entrant.parse("rco-plain+reap")


def test_a_comparison_without_any_result_names_the_searches_and_why(run, tmp_path, random_llama, texts):
    few = [a for a in SMALL if not a.startswith("--allowance")] + [f"--allowance=tokens={LENGTH}"]
    arguments = [
        "compare",
        "quantize",
        random_llama,
        "--bits=2.5",
        "--data",
        texts,
        "--out",
        tmp_path / "run",
        *few,
    ]
    code, _, told = run(*arguments, "--seeds=1", "--methods=rco,evopress", "--method=rtn", "--clip=minmax")
    assert code == 1
    assert "No search succeeded" in told
    assert "rco" in told
    assert "evopress" in told
    assert "raise it to at least" in told
