"""``rco evaluate``: the reference is first wherever it is named, and tasks are checked before a model is loaded."""

import json

import pytest

import rco.pipeline.evaluate as module
from rco.testing.tiny_models import save_tiny

QUICK = ["--sequences=2", "--length=16"]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def items(tmp_path):
    """A task on which any model is right or wrong, and which nobody gets wrong at all."""
    path = tmp_path / "items.jsonl"
    questions = [{"context": "a b c", "choices": [" d", " d"], "label": 0} for _ in range(4)]
    path.write_text("\n".join(map(json.dumps, questions)))
    return path


def test_every_model_is_compared_with_the_reference(run, random_llama, other, texts, items):
    arguments = ["evaluate", "--data", texts, *QUICK, "--tasks", items, "--json"]
    rows = {}
    for order in ([other, random_llama], [random_llama, other], [other]):
        code, out, err = run(*arguments, *order, "--reference", random_llama)
        assert code == 0, err
        rows[tuple(order)] = json.loads(out)
    first = rows[other, random_llama]
    assert [row["model"] for row in first] == [str(random_llama), str(other)]
    assert first[1]["kl"]["kl"] > 0
    assert first[1]["recovery"] == 100.0
    assert "recovery" not in first[0]
    assert first == rows[random_llama, other] == rows[other,]
    code, out, _ = run(*arguments, other, random_llama)
    assert code == 0
    assert all("recovery" not in row and "kl" not in row for row in json.loads(out))


def test_tasks_are_refused_before_a_model_is_loaded(run, random_llama, items, tmp_path, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(module, "load_model", load)
    missing = "lm-eval: run pip install 'rco[eval]'."
    monkeypatch.setattr("rco.evaluation.harness.find_problem", lambda package: missing)
    twin = tmp_path / "twin" / items.name
    twin.parent.mkdir()
    twin.write_text(items.read_text())
    for tasks, words in (
        (f"{tmp_path}/none.jsonl", "none.jsonl"),
        (f"{items},{twin}", "Two task files are named items"),
        (f"{items},arc_easy", "pip install 'rco[eval]'"),
    ):
        code, _, err = run("evaluate", random_llama, "--tasks", tasks)
        assert code == 1
        assert words in err
