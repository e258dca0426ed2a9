"""``rco-plain``, Algorithm 1 as printed, through every verb that searches."""

import functools
import json

import numpy as np
import pytest
import torch

from rco.core.search import PRINTED, PlainRCO
from rco.pipeline.configs import ComparePruneConfig, CompareQuantizeConfig, PruneConfig, QuantizeConfig
from rco.store import CandidateStore

SMALL = ["--sequences=4", "--selection=2", "--evaluation=2", "--length=16", "--samples=2", "--quiet"]
QUANTIZE = [*SMALL, "--sensitivity=2", "--widths=2,3,8", "--group-size=8", "--sweeps=0", "--method=rtn"]


@pytest.fixture
def searched(monkeypatch):
    """(searcher, initial logits or None) of every search by the printed algorithm."""
    seen, search = [], PlainRCO.search

    @functools.wraps(search)
    def watched(self, problem, objective, *, prior=None, **rest):
        seen.append((self, prior))
        return search(self, problem, objective, prior=prior, **rest)

    monkeypatch.setattr(PlainRCO, "search", watched)
    return seen


def is_printed(searcher):
    return all(getattr(searcher, name) == value for name, value in PRINTED.items() if name != "tau")


def result_of(folder):
    return json.loads((folder / "allocation.json").read_text())


def test_quantize(run, tmp_path, random_llama, texts, searched):
    out = tmp_path / "run"
    base = ["quantize", random_llama, "--bits=2.5", "--data", texts, *QUANTIZE, "--format=none"]
    code, _, told = run(*base, "--searcher=rco-plain", "--steps=3", "--out", out)
    assert code == 0, told
    ((searcher, prior),) = searched
    assert is_printed(searcher)
    assert (searcher.steps, searcher.samples, searcher.tau, prior) == (3, 2, (1.0, 0.01), None)
    result = result_of(out)
    assert result["method"] == "rco-plain"
    assert result["candidates"].keys() == {"final"}
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    printed = [0.01 ** (t / 3) for t in (1, 2, 3)]
    assert [record["temperature"] for record in history] == pytest.approx(printed)
    metrics = json.loads((out / "metrics.json").read_text())
    assert [row["name"] for row in metrics["evaluation"] if row["chosen"]] == ["rco-plain"]
    code, _, told = run(*base, "--searcher=rco-plain", "--refine=2", "--out", tmp_path / "none")
    assert code == 1
    assert "leave out --refine (got 2)" in told
    code, _, told = run(
        *base, "--searcher=rco-plain", "--antithetic", "--samples=3", "--out", tmp_path / "none"
    )
    assert code == 1
    assert "even number of samples, got 3" in told
    assert not (tmp_path / "none").exists()


def test_the_official_initial_logits_are_minus_the_logarithm_of_the_weight_error(
    run, tmp_path, random_llama, texts, searched
):
    out = tmp_path / "run"
    arguments = ["--searcher=rco-plain", "--prior=weight-error", "--tie=q_proj,k_proj", "--steps=1"]
    arguments += ["--lock=layers.1.mlp.down_proj=8", "--tau", "1.0", "0.05", "--format=none", "--out", out]
    code, _, told = run("quantize", random_llama, "--bits=3", "--data", texts, *QUANTIZE, *arguments)
    assert code == 0, told
    ((searcher, prior),) = searched
    assert searcher.tau == (1.0, 0.05)
    store = CandidateStore.open(out / "candidates")
    groups = json.loads((out / "metrics.json").read_text())["groups"]
    assert max(len(group["members"]) for group in groups) == 2
    for row, group in zip(prior, groups, strict=True):
        if "layers.1.mlp.down_proj" in group["name"]:
            assert row.tolist() == [0.0, 0.0, row[2]]  # locked: nothing to prefer
            continue
        expected = []
        for width in ("2", "3", "8"):
            error = 0.0
            for name in group["members"]:
                rounded, widest = (store.load(name, label).dequantize().double() for label in (width, "8"))
                error += float(np.mean(np.square((rounded - widest).numpy())))
            expected.append(-np.log(error + 1e-8))
        got = row.numpy()
        np.testing.assert_allclose(got - got[0], np.array(expected) - expected[0], rtol=1e-5, atol=1e-5)


def test_prune(run, tmp_path, random_moe, texts, searched):
    base = ["prune", random_moe, "--experts=5", "--data", texts, *SMALL, "--format=none", "--steps=3"]
    code, _, told = run(*base, "--searcher=rco-plain", "--out", tmp_path / "zeros")
    assert code == 0, told
    official = ["--antithetic", "--tau", "1.0", "0.05", "--gates=scale", "--top-k=20", "--batch-size=2"]
    code, _, told = run(*base, "--searcher=rco-plain", "--prior=reap", *official, "--out", tmp_path / "reap")
    assert code == 0, told
    (zeros, nothing), (scored, prior) = searched
    assert is_printed(zeros)
    assert is_printed(scored)
    assert (zeros.tau, zeros.antithetic, nothing) == ((1.0, 0.01), False, None)
    assert (scored.tau, scored.antithetic) == ((1.0, 0.05), True)
    layers = json.loads((tmp_path / "reap" / "metrics.json").read_text())["scores"]["reap"]
    keep = torch.cat([torch.tensor(layer).log() - torch.tensor(layer).mean().log() for layer in layers])
    torch.testing.assert_close(prior[:, 1], keep.double().clamp(-4.0, 4.0), rtol=1e-5, atol=1e-5)
    for name in ("zeros", "reap"):
        assert result_of(tmp_path / name)["candidates"].keys() == {"final"}


def test_comparisons(run, tmp_path, random_llama, random_moe, texts, searched):
    out = tmp_path / "widths"
    labels = "rco-plain,rco-plain+weight-error"
    arguments = ["compare", "quantize", random_llama, "--bits=2.5", "--data", texts, *QUANTIZE, "--out", out]
    arguments += [
        f"--methods={labels}",
        f"--allowance=tokens={16 * 60}",
        "--seeds=1",
        "--no-curves",
        "--workers=1",
    ]
    code, _, told = run(*arguments)
    assert code == 0, told
    out = tmp_path / "experts"
    arguments = [
        "compare",
        "prune",
        random_moe,
        "--experts=5",
        "--data",
        texts,
        *SMALL,
        "--out",
        out,
        "--tokens=960",
    ]
    code, _, told = run(*arguments, "--methods=rco-plain,rco-plain-reap", "--seeds=1", "--workers=1")
    assert code == 0, told
    assert all(is_printed(searcher) and searcher.tau == (1.0, 0.01) for searcher, _ in searched)
    assert [prior is None for _, prior in searched] == [True, False, True, False]
    for name in ("widths", "experts"):
        entries = json.loads((tmp_path / name / "comparison.json").read_text())["entries"]
        assert {entry["method"] for entry in entries} == {"rco-plain"}
        assert all(entry["chosen_from"] == "final" and entry["within_budget"] for entry in entries)
        # No sensitivities: every backward is one of the loop's samples.
        assert all(0 < entry["tokens"] <= 960 for entry in entries)


def test_defaults_follow_the_searcher():
    for config, zero in ((QuantizeConfig, "uniform"), (PruneConfig, "none")):
        assert (config(model="m").start, config(model="m").refine_passes) == ("fisher", 20)
        plain = config(model="m", searcher="rco-plain")
        assert (plain.start, plain.refine_passes) == (zero, 0)
    assert QuantizeConfig(model="m").strength == 3.0
    assert QuantizeConfig(model="m", prior="weight-error").strength == 1.0
    for comparison in (CompareQuantizeConfig, ComparePruneConfig):
        assert "rco-plain" in comparison(model="m").methods.split(",")
