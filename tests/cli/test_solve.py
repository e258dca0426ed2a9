"""``rco solve``: what it prints, and how it fails."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from rco.cli.solve_command import solve

_PROBLEM = {
    "option_costs": [2, 3, 4],
    "weights": [1, 1],
    "budget": 6,
    "values": [[1, 2, 4], [1, 3, 4]],
    "groups": ["first", "second"],
    "options": ["2 bits", "3 bits", "4 bits"],
}


@pytest.fixture
def run(tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(solve)

    def invoke(described, *flags, stdin=False):
        text = described if isinstance(described, str) else json.dumps(described)
        path = tmp_path / "problem.json"
        path.write_text(text)
        arguments = ["-" if stdin else str(path), *flags]
        return CliRunner().invoke(app, arguments, input=text if stdin else None)

    return invoke


def test_table_names_groups_options_and_the_exact_cost(run):
    result = run(_PROBLEM)
    assert result.exit_code == 0
    for text in ("first", "second", "3 bits", "optimal"):
        assert text in result.stdout
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[-5:])
    assert lines == {"status": "optimal", "value": "5", "cost": "6", "budget": "6", "gap": "0"}


@pytest.mark.parametrize("stdin", [False, True])
def test_json_is_one_object(run, stdin):
    result = run(_PROBLEM, "--json", stdin=stdin)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["status"] == "optimal"
    assert found["value"] == 5.0
    assert found["cost"] == found["budget"] == 6
    assert found["gap"] == 0
    assert sum((2, 3, 4)[k] for k in found["allocation"]) == 6
    assert list(found["labels"]) == ["first", "second"]


def test_fractions_and_batches(run):
    described = {
        "option_costs": ["1/3", "2.5"],
        "weights": [1, 1],
        "budget": "17/6",
        "values": [[[0, 1], [0, 2]]] * 2,
    }
    found = json.loads(run(described, "--json").stdout)
    assert [s["cost"] for s in found["solutions"]] == ["17/6", "17/6"]
    assert [s["allocation"] for s in found["solutions"]] == [[0, 1], [0, 1]]
    shown = run(described)
    assert shown.exit_code == 0
    assert shown.stdout.count("optimal") == 2


def test_null_forbids_and_nothing_affordable_is_a_failure(run):
    described = {**_PROBLEM, "values": [[None, None, 4], [None, 3, 4]]}
    result = run(described, "--json")
    assert result.exit_code == 1
    assert "no choice of allowed options is within the budget" in result.stderr
    found = json.loads(result.stdout)
    assert found["status"] == "infeasible"
    assert found["allocation"] is found["value"] is found["cost"] is None


def test_budget_out_of_reach_is_a_failure(run):
    result = run({**_PROBLEM, "budget": 3})
    assert result.exit_code == 1
    assert "reachable totals lie between 4 and 8" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ('{"option_costs": ', "is not JSON"),
        ("[1, 2]", "one JSON object, got list"),
        ({"option_costs": [1, 2], "budget": 3}, "values"),
        ({**_PROBLEM, "colour": 1}, "colour"),
        ({**_PROBLEM, "values": [[1, 2], [1]]}, "rectangular"),
        ({**_PROBLEM, "values": [[1, 2], [1, 2]]}, "shape"),
        ({**_PROBLEM, "values": [["x", 2, 3], [1, 2, 3]]}, "numbers or null"),
        ({**_PROBLEM, "blocks": 7}, "value of the wrong type"),
    ],
)
def test_wrong_input_is_a_usage_error(run, described, message):
    result = run(described)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_missing_file_is_a_usage_error(tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(solve)
    result = CliRunner().invoke(app, [str(tmp_path / "none.json")])
    assert result.exit_code == 2
    assert "cannot read" in result.stderr


def test_bytes_that_are_no_text_are_a_usage_error(tmp_path):
    path = tmp_path / "problem.json"
    path.write_bytes(b"\xff\xfe\x00")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(solve)
    assert CliRunner().invoke(app, [str(path)]).exit_code == 2
