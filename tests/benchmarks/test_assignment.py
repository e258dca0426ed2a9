"""The assignment benchmark: losses batch, a small run resumes, the report is made, the API page is current."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("assignment")
import api_page
import assignment
from assignment_families import FAMILIES, make
from assignment_report import gaps, optima_found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_losses_of_a_batch_are_those_of_its_members(family):
    instance = make(family, 11, 3, 0)
    choices = torch.from_numpy(np.random.default_rng(0).integers(3, size=(4, 11)))
    gates = torch.nn.functional.one_hot(choices, 3).double()
    together = instance.loss(gates)
    assert together.shape == (4,)
    assert torch.allclose(together, torch.stack([instance.loss(each) for each in gates]), rtol=1e-4)


def test_a_run_is_continued_and_reported(tmp_path):
    out = tmp_path / "assignment.json"
    arguments = [
        "run",
        "--out",
        str(out),
        "--families",
        "correlated,quadratic",
        "--sizes",
        "5x3",
        "--seeds",
        "0",
    ]
    assignment.main([*arguments, "--methods", "rco", "--evaluations", "90"])
    assignment.main([*arguments, "--methods", "rco,greedy", "--evaluations", "90", "--optima"])
    results = json.loads(out.read_text())
    assert len(results["records"]) == 4
    assert all(record["feasible"] and record["used"] <= 90 for record in results["records"])
    solvers = {o["solver"]: o["loss"] for o in results["optima"] if o["family"] == "quadratic"}
    assert solvers["HiGHS"] == pytest.approx(solvers["enumeration"])
    assert min(min(values) for values in gaps(results).values()) >= -1e-9
    merged = tmp_path / "merged.json"
    assignment.main(["merge", str(out), str(out), "--out", str(merged)])
    joined = json.loads(merged.read_text())
    for kind in ("records", "optima"):
        assert sorted(map(str, joined[kind])) == sorted(map(str, results[kind]))
    assert all(found <= of == 1 for found, of in optima_found(joined).values())
    assignment.main(["report", "--results", str(merged), "--small", str(merged), "--docs", str(tmp_path)])
    page = (tmp_path / "assignment.md").read_text()
    assert "| rco |" in page
    assert "`rco` on correlated: 1 of 1" in page
    assert (tmp_path / "assignment" / "quadratic.svg").exists()


def test_the_api_page_is_current():
    written = Path(__file__).parents[2] / "docs" / "api.md"
    assert written.read_text() == api_page.page(), "run python benchmarks/api_page.py docs/api.md"
