"""Benchmarks fit the package; parts that are done are kept, missing ones are run, other settings are refused."""

import ast
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rco.compression.compression import Compression
from rco.compression.priors import logits_from_losses
from rco.compression.second_order import predicted_losses
from rco.core.problem import AllocationProblem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SETTINGS = {"length": 3}


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import parts

    return parts


def run(parts, path, work, settings=SETTINGS, **options):
    """The work of a part is ``dict``: its argument is its line."""
    return parts.run_parts(path, settings, work, dict, lambda line: line["entry"], **options)


def test_what_is_missing_is_run_and_a_torn_line_is_missing(parts, tmp_path, capfd):
    path = tmp_path / "deep" / "parts.jsonl"
    first = {("a", 0): ({"entry": "one"},), ("b", 0): ({"entry": "two"},)}
    assert run(parts, path, first) == 0
    header, lines = parts.read_parts(path)
    assert header["settings"] == SETTINGS
    assert header["environment"]["python"]
    assert lines == [{"key": ["a", 0], "entry": "one"}, {"key": ["b", 0], "entry": "two"}]
    path.write_text(path.read_text()[:-3])  # as a kill leaves it
    more = {key: ({"entry": "again"},) for key in first} | {("c", 1): (5,)}  # dict(5) fails
    prepared = []

    def prepare(missing):
        prepared.extend(missing)
        return [(dict, ())]

    assert run(parts, path, more, prepare=prepare) == 1
    assert prepared == [("b", 0), ("c", 1)]
    _, lines = parts.read_parts(path)
    assert lines == [{"key": ["a", 0], "entry": "one"}, {"key": ["b", 0], "entry": "again"}]
    assert "c 1  FAILED: TypeError" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="other settings"):
        run(parts, path, first, {"length": 4})


def test_files_of_the_same_settings_are_put_together(parts, tmp_path):
    def write(name, settings, *entries):
        lines = [
            {"settings": settings, "environment": name},
            *({"key": list(k), "entry": e} for k, e in entries),
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    one, two = write("one", SETTINGS, ("a", 1), ("b", 2)), write("two", SETTINGS, ("b", 3))
    settings, environments, lines = parts.merge_parts([one, two])
    assert (settings, environments) == (SETTINGS, ["one", "two"])
    assert {key: line["entry"] for key, line in lines.items()} == {("a",): 1, ("b",): 3}
    with pytest.raises(SystemExit, match="three was made with other settings than"):
        parts.merge_parts([one, write("three", {"length": 9})])
    with pytest.raises(SystemExit, match="no parts"):
        parts.merge_parts([tmp_path / "none"])


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rco":
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), name.name


def test_the_prior_of_the_manifold_study_is_the_one_that_quantizing_starts_from(parts, tmp_path, monkeypatch):
    study = importlib.import_module("manifold_value")
    numbers = dict.fromkeys(("steps", "samples", "refine", "sequences", "selection", "evaluation"), 1)
    settings = study.Settings(
        model="tiny-llama", work=str(tmp_path), sensitivity=4, length=8, device="cpu", **numbers
    )
    differences = torch.randn(4, 3, 2, dtype=torch.float64)
    save_file({"d": differences}, tmp_path / "sensitivities-5-4-8.safetensors")
    errors = torch.rand(3, 2, dtype=torch.float64) + 0.1
    problem = AllocationProblem(np.array([[1, 2]] * 3), 4)

    class Known(Compression):
        """Without a model: only what sensitivities are made of."""

        def __init__(self):
            self.plan = SimpleNamespace(removes_only=False)

        def relative_errors(self):
            return errors

    found = study.prior_of(settings, Known(), None, problem, 5)
    wanted = logits_from_losses(predicted_losses(differences, errors), problem, settings.config().strength)
    assert torch.equal(found, wanted)
    assert float(found.abs().max()) > 0
