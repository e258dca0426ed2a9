"""benchmarks/ablations.py on a random model of a few thousand weights."""

import dataclasses
import json

import pytest
import torch
from ablations import AblationConfig, _Bench, main, plan_ablations, run_ablations

from rco.core.search import PlainRCO
from rco.testing.tiny_models import save_tiny


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny("llama", folder, num_hidden_layers=2)
    return AblationConfig(
        model=str(folder), quick=True, sweep=["antithetic"], widths="2,3,4", group_size=16,
        data="en_prose", out=folder / "study",
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(small):
    return small, *run_ablations(small)


def test_every_run_is_there_and_within_budget(finished):
    config, record, written = finished
    assert {path.name for path in written} >= {"ablations.json", "ablations.md"}
    assert json.loads((config.out / "ablations.json").read_text())["sweeps"] == record["sweeps"]
    assert len(record["runs"]) == 2 * 2  # two loops, as printed and whole
    for run in record["runs"]:
        for measured in run["measured"].values():
            assert measured["bits"] <= 2.5
            assert measured["kl"] > 0
    rows = record["sweeps"][0]["rows"]
    assert [row["label"] for row in rows] == ["no", "yes"]
    for row in rows:
        # The loop's tokens: every sample a forward and a backward, which counts as two.
        assert row["printed"]["tokens"] == 3 * 8 * 4 * 64
        assert row["search"]["tokens"] > row["printed"]["tokens"]
        assert row["spent"]["bits"]["mean"] >= row["printed"]["bits"]["mean"]


def test_a_stopped_study_goes_on_with_what_is_missing(finished):
    config, record, _ = finished
    parts = sorted((config.out / "parts").glob("*.json"))
    stamps = {path: path.stat().st_mtime_ns for path in parts}
    gone = parts[0]
    before = json.loads(gone.read_text())
    gone.unlink()
    again, _ = run_ablations(dataclasses.replace(config, resume=True))
    after = json.loads(gone.read_text())
    assert after["measured"] == before["measured"]
    assert {p: p.stat().st_mtime_ns for p in parts if p != gone} == {p: stamps[p] for p in parts if p != gone}
    assert [s["rows"][0]["search"]["kl"] for s in again["sweeps"]] == [
        s["rows"][0]["search"]["kl"] for s in record["sweeps"]
    ]


def test_a_group_is_as_sensitive_as_its_members_together(finished):
    """The file of single linears serves grouped runs, and runs that see fewer sequences."""

    config = plan_ablations(finished[0]).config
    config = dataclasses.replace(config, store=config.out / "candidates")
    bench = _Bench(config, config.out, progress=_silent())
    bench.measure_sensitivities([0], _silent())
    loop = plan_ablations(config).runs[0].loop
    few = dataclasses.replace(loop, grouped=True, sequences=2)
    derived = bench._differences(bench._grouped, few, 0)
    measured = bench._grouped.differences(bench.data.search.select(slice(0, 2)), seed=0)
    assert len(bench._grouped.plan.groups) < len(bench.backend.plan.groups)
    torch.testing.assert_close(derived, measured, rtol=1e-4, atol=1e-7)


def test_the_printed_part_is_the_searcher_rco_plain(finished, monkeypatch):
    config, record, _ = finished
    config = dataclasses.replace(config, store=config.out / "candidates")
    search, seen = PlainRCO.search, []

    def watched(self, problem, objective, *, prior=None, **rest):
        seen.append((self, prior))
        return search(self, problem, objective, prior=prior, **rest)

    monkeypatch.setattr(PlainRCO, "search", watched)
    plan = plan_ablations(config)
    run = next(run for run in plan.runs if run.kind == "printed")
    bench = _Bench(plan.config, config.out, progress=_silent())
    before = next(r for r in record["runs"] if r["key"] == run.loop.key and "printed" in r["measured"])
    assert bench.do(run)["measured"]["printed"] == before["measured"]["printed"]
    bench.config = dataclasses.replace(plan.config, printed_prior="weight-error")
    bench.do(run)
    (zeros, nothing), (official, prior) = seen
    assert (
        zeros
        == official
        == PlainRCO(
            steps=8, samples=4, lr=0.1, tau=(1.0, run.loop.tau), antithetic=run.loop.antithetic, seed=run.seed
        )
    )
    assert nothing is None
    errors = bench.backend.weight_distances()
    assert torch.equal(errors[:, -1], torch.zeros(len(errors), dtype=torch.float64))  # the widest itself
    torch.testing.assert_close(
        prior - prior[:, -1:], -(errors + 1e-8).log() + torch.tensor(1e-8).double().log()
    )


def _silent():
    from rco.pipeline.progress import Silent

    return Silent()


def test_dry_run_counts_runs(small, capsys):
    code = main(["--model", small.model, "--group-size", "16", "--widths", "2,3", "--dry-run"])
    out = capsys.readouterr().out
    assert code == 0
    assert "118 runs for 9 sweeps" in out


def test_another_study_in_the_same_folder_is_refused(finished):
    config = finished[0]
    with pytest.raises(ValueError, match="resume=True"):
        run_ablations(config)
    with pytest.raises(ValueError, match="another configuration"):
        run_ablations(dataclasses.replace(config, bits="3.0", resume=True))


@pytest.mark.slow
def test_workers_do_not_change_the_numbers(finished, tmp_path):
    config, record, _ = finished
    other, _ = run_ablations(dataclasses.replace(config, out=tmp_path / "study", workers=2))
    assert [r["measured"] for r in other["runs"]] == [r["measured"] for r in record["runs"]]
