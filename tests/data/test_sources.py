from __future__ import annotations

import json
import sys
import types

import pytest

from rco.data.documents import DataError, Document, document_from_record, read_jsonl, take_part
from rco.data.sources import describe_sources, resolve_source


def texts(spec, part="all", seed=0):
    return [doc.text for source in resolve_source(spec).sources for doc in source.documents(part, seed)]


def test_builtin_parts_share_no_paragraph():
    for name in ("en_prose", "de_law", "fr_novels"):
        calibration, evaluation = (
            {line for text in texts(name, part) for line in text.split("\n\n") if len(line) > 200}
            for part in ("calibration", "evaluation")
        )
        assert len(calibration) > 200
        assert len(evaluation) > 100
        assert not calibration & evaluation
        assert set(texts(name, "all")) == set(texts(name, "calibration")) | set(texts(name, "evaluation"))


def test_default_mixture_is_all_builtin_texts_in_equal_parts():
    mixture = resolve_source("builtin")
    assert [source.name for source in mixture.sources] == ["en_prose", "de_law", "fr_novels"]
    assert mixture.weights == pytest.approx([1 / 3] * 3)
    assert set(describe_sources()) >= {"builtin", "en_prose", "fineweb-edu", "tulu-math"}


def test_weights_and_repeats_add_up():
    mixture = resolve_source("en_prose*2 + de_law + en_prose*0.5")
    assert dict(zip([s.name for s in mixture.sources], mixture.weights, strict=True)) == {
        "en_prose": 2.5,
        "de_law": 1.0,
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "No data was given"),
        ("en_prose++de_law", "empty part"),
        ("en_prose*0", "must be positive"),
        ("en_pros", r"Did you mean en_prose\?"),
        ("zzz", "one of builtin"),
        ("missing.txt", "There is no file missing.txt"),
        ("some/where", "There is no file some/where"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(DataError, match=message):
        resolve_source(spec)


def test_files_with_signs_in_their_names(tmp_path):
    path = tmp_path / "a+b*2.txt"
    path.write_text("hello there")
    assert texts(path) == ["hello there"]


def test_folder_and_strange_suffix(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        resolve_source(tmp_path)
    (tmp_path / "x.parquet").write_text("x")
    with pytest.raises(DataError, match=r"neither \.txt nor \.jsonl"):
        resolve_source(tmp_path / "x.parquet")


def test_unreadable_files(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"not UTF-8 text \(byte 3\)"):
        texts(path)
    source = resolve_source(path).sources[0]
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        list(source.documents("all", 0))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "t"}, Document(text="t")),
        ("t", Document(text="t")),
        ({"prompt": "q", "response": "a"}, Document(messages=(("user", "q"), ("assistant", "a")))),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            Document(messages=(("user", "q\n\ni"), ("assistant", "a"))),
        ),
        (
            {
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                "prompt": "q",
            },
            Document(messages=(("user", "q"), ("assistant", "a"))),
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            Document(messages=(("user", "q"), ("assistant", "a"))),
        ),
    ],
)
def test_records(record, expected):
    assert document_from_record(record, "here") == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON"),
        ("[1]", "line 3: a record must be a JSON object, got list"),
        ('{"body": "x"}', r"line 3: no usable field among \['body'\]"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "line 3: a message needs a role"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 3: the conversation has no assistant"),
        ('{"messages": "x"}', "line 3: messages must be a list"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "ok"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_jsonl(path)


def test_jsonl_keeps_unicode_line_separators_and_drops_duplicates(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"text": "a\u2028b"}, {"text": "c"}, {"text": "a\u2028b"}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert [document.text for document in read_jsonl(path)] == ["a\u2028b", "c"]


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_parts_of_many_documents_are_a_partition(count):
    documents = [Document(text=str(i)) for i in range(count)]
    calibration, evaluation = (list(take_part(documents, part)) for part in ("calibration", "evaluation"))
    assert calibration
    assert evaluation
    assert {d.text for d in calibration} | {d.text for d in evaluation} == {d.text for d in documents}
    assert len(calibration) + len(evaluation) == count
    assert list(take_part(documents, "all")) == documents


def test_parts_of_one_document_are_its_two_ends():
    text = " ".join(f"word{i}" for i in range(100))
    parts = [
        next(iter(take_part([Document(text=text)], part))).text for part in ("calibration", "evaluation")
    ]
    assert "".join(parts) == text
    assert not set(parts[0].split()) & set(parts[1].split())
    assert len(parts[1]) == pytest.approx(len(text) / 5, abs=10)


def fake_datasets(monkeypatch, records, calls):
    def load_dataset(repository, config, *, split, streaming):
        calls.append((repository, config, split, streaming))
        return iter(records)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("rco.data.sources._reach", lambda repository: None)


def test_hub_parts_are_disjoint_whatever_the_seed(monkeypatch):
    records = [{"text": f"doc {i}"} for i in range(50)] + [{"text": "  "}]
    calls = []
    fake_datasets(monkeypatch, records, calls)
    calibration = texts("fineweb-edu", "calibration", seed=0)
    assert sorted(calibration) == sorted(texts("fineweb-edu", "calibration", seed=1))
    assert calibration != texts("fineweb-edu", "calibration", seed=1)
    assert not set(calibration) & set(texts("fineweb-edu", "evaluation", seed=5))
    assert set(calls) == {("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)}


def test_hub_data_with_a_split_of_its_own_use_it(monkeypatch):
    lines = [" = First = \n", "one\n", "", " = = Part = = \n", "two\n", " = Second = \n", "three\n"]
    calls = []
    fake_datasets(monkeypatch, [{"text": line} for line in lines], calls)
    assert sorted(texts("wikitext2", "evaluation")) == [
        " = First = \none\n = = Part = = \ntwo\n",
        " = Second = \nthree\n",
    ]
    assert calls == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test", True)]


def test_hub_without_datasets_or_network(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rco.requirements.version", lambda package: "2.21")
        with pytest.raises(ValueError, match=r"needs datasets 3.0 or later; installed is 2.21"):
            texts("c4", "calibration")

    def offline(*args, **kwargs):
        raise ConnectionError("no connection\nmore")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=None))
    monkeypatch.setattr("rco.data.sources._reach", offline)
    with pytest.raises(
        DataError, match=r"allenai/c4\) cannot be fetched from the Hub \(no connection\): check"
    ):
        texts("c4", "calibration")


def test_a_hub_out_of_reach_is_an_error_without_retries(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=None))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s before another try"))
    with pytest.raises(DataError, match=r"Salesforce/wikitext\) cannot be fetched from the Hub"):
        texts("wikitext2", "calibration")
