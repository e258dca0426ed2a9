"""The solver benchmark measures what it says, on both solvers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rco.bench import solver_bench
from rco.bench.solver_bench import FAMILIES, run, to_markdown


def test_report_is_json_with_the_ratio_of_the_medians():
    seen = []
    report = run(
        ["qwen3-8b"], repeats=2, quick=True, on_progress=lambda done, total: seen.append((done, total))
    )
    assert json.loads(json.dumps(report)) == report
    (row,) = report["families"]
    assert (row["groups"], row["options"], row["capacity"]) == (252, 7, 828)
    assert row["unsolved"] == 0
    assert row["ms"] > 0
    assert seen == [(1, 2), (2, 2)]
    pytest.importorskip("highspy")
    assert row["highs_proven"] == row["highs_instances"] == 2
    assert row["ratio"] == pytest.approx(row["highs_ms"] / row["ms"])
    assert row["largest_difference"] < 1e-9
    table = to_markdown(report)
    assert "252 x 7" in table
    assert f"{row['ms']:.3f}" in table


def test_without_highs_the_table_says_so(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(solver_bench, "import_module", missing)
    report = run(["qwen3-8b"], repeats=1, quick=True)
    assert report["families"][0]["ratio"] is None
    assert "not installed" in to_markdown(report)


def test_families_have_the_stated_shapes_and_fresh_noise():
    rng = np.random.default_rng(0)
    for family in FAMILIES.values():
        problem = family.problem(rng)
        assert family.title.startswith(f"{problem.num_groups} x {problem.num_options}")
        if problem.num_groups < 2000:
            first, second = (family.values(rng, problem, 1) for _ in range(2))
            assert first.shape == (1, problem.num_groups, problem.num_options)
            assert (first != second).mean() > 0.99
    assert FAMILIES["odd-sizes"].problem(rng).budget > 0.99e9


def test_bad_arguments():
    with pytest.raises(ValueError, match="Unknown families"):
        run(["nothing"])
    with pytest.raises(ValueError, match="repeats"):
        run(["qwen3-8b"], repeats=0)
