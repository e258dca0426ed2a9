"""Benchmarks that are made of parts: what is done is kept, what is missing is run, what differs is refused."""

import json
from pathlib import Path

import pytest

SETTINGS = {"length": 3}


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
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
