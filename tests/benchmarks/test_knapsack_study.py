"""The knapsack study end to end, small: records, report, figures, and the paper's numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from knapsack_methods import METHODS
from knapsack_study import PAPER_GAPS, PAPER_STEPS, paper_tables, run_study, study_markdown, write_study
from multi_budget import run_multi_budget
from retraction import run_retraction

NAMES = ["medium", "cheap optimal"]


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return run_study(NAMES, instances=2, steps=700, seed=1)


@pytest.fixture(scope="module")
def multi() -> dict[str, Any]:
    return run_multi_budget(groups=40, options=6, budgets=16, steps=60)


@pytest.fixture(scope="module")
def retraction() -> dict[str, Any]:
    return run_retraction(["medium", "adversarial"], steps=60)


def test_the_record_holds_what_was_measured(study: dict[str, Any]) -> None:
    assert json.loads(json.dumps(study)) == study
    for name in NAMES:
        methods = study["scenarios"][name]["methods"]
        assert set(methods) == set(METHODS)
        assert methods["manifold"]["violation_max"] < 1e-8
        assert 1 <= methods["manifold"]["evaluations"] <= 6
        assert methods["lagrangian"]["violation_mean"] > 1e-3
        for result in methods.values():
            assert len(result["gap"]) == 2
            assert min(result["gap"]) >= 0
    chosen = study["scenarios"]["medium"]["methods"]["lagrangian"]
    assert round(chosen["gap_mean"], 3) == round(min(s["gap_mean"] for s in chosen["sweep"]), 3)
    cheap = study["scenarios"]["cheap optimal"]["methods"]
    assert cheap["manifold_slack"]["gap_mean"] < 0.01
    assert cheap["manifold"]["gap_mean"] > 20
    assert cheap["manifold"]["steps_within_mean"] is None


def test_workers_change_nothing() -> None:
    seen: list[int] = []
    alone = run_study(["medium"], instances=2, steps=40)
    parallel = run_study(
        ["medium"], instances=2, steps=40, workers=2, on_progress=lambda done, total, label: seen.append(done)
    )
    assert seen == list(range(1, len(METHODS) + 1))

    def without_times(record: dict[str, Any]) -> dict[str, Any]:
        record = copy.deepcopy(record["scenarios"])
        for scenario in record.values():
            for result in scenario["methods"].values():
                del result["seconds"]
        return record

    assert without_times(parallel) == without_times(alone)


def test_sixteen_budgets_are_held(multi: dict[str, Any]) -> None:
    assert multi["methods"]["manifold"]["violation_max"] <= 1e-12
    assert multi["methods"]["lagrangian"]["violation_mean"] > 1e-6
    assert len(multi["methods"]["manifold"]["trace"]["relative"]) == 16
    assert (
        multi["methods"]["manifold"]["gap_percent"] > 0
    )  # sixty steps do not reach the relaxation's optimum


def test_newton_needs_few_evaluations_and_bisection_many(retraction: dict[str, Any]) -> None:
    for scenario in retraction["scenarios"].values():
        assert scenario["newton"]["mean"] <= 6
        assert 25 <= scenario["bisection"]["mean"] <= 50
        assert sum(scenario["newton"]["histogram"].values()) == 60


def test_everything_is_written(
    tmp_path: Path, study: dict[str, Any], multi: dict[str, Any], retraction: dict[str, Any]
) -> None:
    files = write_study(tmp_path, study, multi, retraction)
    assert {f.name for f in files} == {
        p.name for p in tmp_path.iterdir()
    }  # and nothing half-written beside them
    record = json.loads((tmp_path / "knapsack_study.json").read_text())
    assert record["knapsack"]["scenarios"].keys() == set(NAMES)
    text = (tmp_path / "knapsack_study.md").read_text()
    for method in METHODS.values():
        assert method in text
    assert "## Compared with the paper" in text
    assert "![knapsack convergence](knapsack_convergence.png)" in text
    for name in ("convergence", "violation", "gaps", "multi_budget", "retraction"):
        assert (tmp_path / f"knapsack_{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (tmp_path / f"knapsack_{name}.svg").read_text()[:1000]


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table with that heading."""
    lines = text[text.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_measured_numbers_stand_beside_the_papers(
    study: dict[str, Any], multi: dict[str, Any], retraction: dict[str, Any]
) -> None:
    study = copy.deepcopy(study)
    cheap = study["scenarios"]["cheap optimal"]["methods"]
    cheap["manifold_slack"].update(gap_mean=3.0, violation_mean=1e-3, steps_within_mean=88.0)
    study["scenarios"]["medium"]["methods"]["manifold"]["violation_max"] = 2e-3
    text = paper_tables(study, multi, retraction)
    gaps = {row[1]: row for row in rows(text, "| Scenario | Method | gap")}
    assert list(gaps) == [METHODS[method] for method in PAPER_GAPS["cheap optimal"]]  # `medium` is not listed
    assert gaps["Manifold, slack"] == [
        "cheap optimal",
        "Manifold, slack",
        "3.000",
        "0.01",
        "1.0e-03",
        "< 1e-08",
    ]
    steps = {row[1]: row[2:] for row in rows(text, "| Scenario | Method | steps")}
    assert list(steps) == [METHODS[method] for method in PAPER_STEPS["cheap optimal"]]
    assert steps["Manifold, slack"] == ["88", "562"]
    assert steps["Lagrangian"] == ["never", "never"]
    others = rows(text, "| | here | paper |")
    assert others[0][1:] == ["2.0e-03", "< 1e-8"]
    largest = max(s["bisection"]["max"] for s in retraction["scenarios"].values())
    assert others[1][1].endswith(f"({largest})")
    assert others[3][1] == f"{multi['methods']['manifold']['violation_max']:.1e}"
    assert text in study_markdown(study, multi, retraction)
    assert len(rows(paper_tables(study), "| | here | paper |")) == 1


def test_no_figures_where_none_are_asked_for(tmp_path: Path, study: dict[str, Any]) -> None:
    files = write_study(tmp_path, study, figures=())
    assert [f.name for f in files] == ["knapsack_study.json", "knapsack_study.md"]
    assert "## Figures" not in (tmp_path / "knapsack_study.md").read_text()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"Unknown scenarios \['vast'\]"):
        run_study(["vast"])
    with pytest.raises(ValueError, match=r"Unknown methods \['newton'\]; there are manifold,"):
        run_study(["medium"], methods=["newton"])
    with pytest.raises(ValueError, match="steps=2"):
        run_study(["medium"], steps=2)
    with pytest.raises(ValueError, match="workers=0"):
        run_study(["medium"], workers=0)


@pytest.mark.slow
def test_the_targets_of_the_full_study() -> None:
    names = ["large", "float costs", "cheap optimal", "mixed slack"]
    methods = ["manifold", "manifold_slack"]
    scenarios = run_study(names, instances=3, steps=5000, methods=methods)["scenarios"]
    for name in names:
        assert scenarios[name]["methods"]["manifold"]["violation_max"] < 1e-8
        method = "manifold" if name in ("large", "float costs") else "manifold_slack"
        assert np.mean(scenarios[name]["methods"][method]["gap"]) <= (0.02 if method == "manifold" else 0.01)
