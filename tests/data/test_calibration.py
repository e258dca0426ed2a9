from __future__ import annotations

import json
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.data.calibration import CalibrationSet, build_calibration, build_splits, splits, whole_shares
from rco.data.documents import DataError, Document
from rco.data.tokenization import first_tokens, text_pieces, token_stream


def rows(data):
    return {tuple(row) for row in data.tokens.tolist()}


def numbered(path, count=6000):
    """Text in which every stretch of tokens is unlike every other."""
    path.write_text(" ".join(f"{i:05d}" for i in range(count)))
    return path


def test_shape_mask_and_determinism(tokenizer, tmp_path):
    path = numbered(tmp_path / "x.txt")
    first = build_calibration(path, tokenizer, samples=6, length=64, seed=3)
    again = build_calibration(path, tokenizer, samples=6, length=64, seed=3)
    other = build_calibration(path, tokenizer, samples=6, length=64, seed=4)
    assert first.tokens.shape == first.mask.shape == (6, 64)
    assert first.tokens.dtype == torch.int64
    assert first.mask[:, :-1].all()
    assert not first.mask[:, -1].any()
    assert first.num_predictions == 6 * 63
    assert torch.equal(first.tokens, again.tokens)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert rows(first) != rows(other)


def test_the_mixture_is_kept_in_every_prefix(tokenizer, tmp_path):
    a, b, c = (str(numbered(tmp_path / f"{name}.txt")) for name in "abc")
    data = build_calibration(f"{a}*2+{b}+{c}", tokenizer, samples=40, length=32)
    for size in (8, 20, 40):
        counts = {name: data.domains[:size].count(name) for name in (a, b, c)}
        assert counts[a] == pytest.approx(size / 2, abs=1)
        assert counts[b] == pytest.approx(size / 4, abs=1)
    parts = data.by_domain()
    assert {name: len(part) for name, part in parts.items()} == {a: 20, b: 10, c: 10}
    assert rows(parts[b]) <= rows(build_calibration(b, tokenizer, samples=None, length=32))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_three_splits_of_a_file_never_overlap(tokenizer, tmp_path, kind):
    path = numbered(tmp_path / "x.txt")
    if kind == "jsonl":
        words = path.read_text().split(" ")
        path = tmp_path / "x.jsonl"
        path.write_text(
            "".join(json.dumps({"text": " ".join(words[i : i + 60])}) + "\n" for i in range(0, 6000, 60))
        )
    made = build_splits(path, tokenizer, search=40, selection=10, evaluation=20, length=32, seed=1)
    numbers = []
    for part in (made.search, made.selection, made.evaluation):
        found = [
            word for row in part.tokens for word in tokenizer.decode(row, skip_special_tokens=True).split()
        ]
        numbers.append([word for word in found if len(word) == 5])
        assert len(numbers[-1]) > 50
    flat = list(chain.from_iterable(numbers))
    # A word may be cut in two by the end of a sequence, but no whole word is in two sequences.
    assert len(flat) == len(set(flat))


def test_builtin_evaluation_comes_from_the_evaluation_part(tokenizer):
    made = build_splits("en_prose+de_law", tokenizer, search=12, selection=6, evaluation=8, length=48)
    assert len(made.search) == 12
    assert len(made.selection) == 6
    assert rows(made.evaluation) <= rows(
        build_calibration("en_prose+de_law", tokenizer, samples=None, length=48, part="evaluation")
    )
    assert rows(made.search).isdisjoint(rows(made.selection))
    assert made.search.domains.count("de_law") == 6
    assert made.selection.domains.count("de_law") == 3
    assert made.evaluation.part == "evaluation"


def test_another_file_for_evaluation_is_taken_whole(tokenizer, tmp_path):
    mine, theirs = numbered(tmp_path / "a.txt"), numbered(tmp_path / "b.txt", 600)
    kwargs = {"search": 2, "selection": 1, "evaluation": None, "length": 32}
    other = build_splits(mine, tokenizer, evaluation_spec=theirs, **kwargs).evaluation
    whole = build_calibration(theirs, tokenizer, samples=None, length=32, part="all")
    assert torch.equal(other.tokens, whole.tokens)
    # The same file under another spelling is still the same file: only its held-back part is used.
    again = build_splits(mine, tokenizer, evaluation_spec=f"{tmp_path}/./a.txt", **kwargs).evaluation
    held = build_calibration(mine, tokenizer, samples=None, length=32, part="evaluation")
    assert torch.equal(again.tokens, held.tokens)


def test_moving_a_file_changes_nothing(tokenizer, tmp_path):
    (tmp_path / "sub").mkdir()
    first = build_calibration(numbered(tmp_path / "x.txt"), tokenizer, samples=5, length=32)
    second = build_calibration(numbered(tmp_path / "sub" / "x.txt"), tokenizer, samples=5, length=32)
    assert first.fingerprint == second.fingerprint


def test_too_little_text_says_how_much_there_is(tokenizer, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("   \n")
    with pytest.raises(DataError, match="holds no text"):
        build_calibration(path, tokenizer, samples=1, length=8)
    path.write_text("a few words only, and a few more of them after that")
    tokens = len(tokenizer(path.read_text()).input_ids) + 1
    with pytest.raises(
        DataError, match=rf"has {tokens} tokens, fewer than one sequence of 512.*at most {tokens}"
    ):
        build_calibration(path, tokenizer, samples=1, length=512, part="all")
    build_calibration(path, tokenizer, samples=1, length=tokens, part="all")
    with pytest.raises(
        DataError, match=r"enough for 3 sequences of 5, and 9 were requested: request at most 3"
    ):
        build_calibration(numbered(path, 5), tokenizer, samples=9, length=5, part="all")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples must be at least 1"),
        ({"length": 1}, "at least 2 tokens"),
        ({"part": "test"}, "part must be"),
        ({"tokenizer": None}, "the model has none"),
    ],
)
def test_bad_requests(tokenizer, changes, message):
    arguments = {"tokenizer": tokenizer, "samples": 1, "length": 8, **changes}
    with pytest.raises(DataError, match=message):
        build_calibration("en_prose", **arguments)


def test_splitting_more_than_there_is(tokenizer, tmp_path):
    data = build_calibration(numbered(tmp_path / "x.txt"), tokenizer, samples=4, length=16)
    with pytest.raises(DataError, match="out of 4"):
        splits(data, search=3, selection=2)


# ---------------------------------------------------------------------- conversations


class WordTokenizer:
    """One token per character, a begin-of-text token, and a chat template if asked for."""

    bos_token_id = 1
    eos_token_id = 2

    def __init__(self, template=None):
        self.chat_template = template

    def __call__(self, texts, add_special_tokens=True, **_):
        if isinstance(texts, str):
            return {"input_ids": ([1] if add_special_tokens else []) + [ord(c) for c in texts]}
        return {"input_ids": [self(text, add_special_tokens)["input_ids"] for text in texts]}

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        body = "".join(f"<{turn['role'][0]}>{turn['content']}<end>" for turn in turns)
        return body + ("<a>" if add_generation_prompt else "")

    @staticmethod
    def decode(ids):
        return "".join(chr(i) for i in ids if i > 2)


CHAT = Document(messages=(("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2")))


@pytest.mark.parametrize(
    ("template", "whole", "answers"),
    [
        ("yes", "<u>Q1<end><a>A1<end><u>Q2<end><a>A2<end>", "A1<end>A2<end>"),
        (None, "Q1\n\nA1\n\nQ2\n\nA2", "A1A2"),
    ],
)
def test_only_answers_count(template, whole, answers):
    tok = WordTokenizer(template)
    ((ids, counts),) = token_stream([CHAT], tok)
    assert tok.decode(ids) == whole
    assert tok.decode(ids[counts]) == answers
    assert ids[-1] == 2


def test_a_template_that_ends_the_text_itself_is_not_ended_twice():
    class Closing(WordTokenizer):
        def apply_chat_template(self, turns, tokenize, add_generation_prompt):
            body = "".join(f"{turn['content']}\x02\n" for turn in turns)
            return body + (">" if add_generation_prompt else "")

    ((ids, counts),) = token_stream([CHAT], Closing("yes"))
    assert ids.tolist()[-4:] == [ord("A"), ord("2"), 2, ord("\n")]
    assert counts[-2]


def test_the_mask_marks_the_position_before_an_answer_token(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"ask{i}", "response": f"say{i}"}) + "\n" for i in range(40))
    )
    tok = WordTokenizer("yes")
    data = build_calibration(path, tok, samples=None, length=30, part="all")
    assert (data.tokens[:, 0] == 1).all()
    predicted = data.tokens[:, 1:][data.mask[:, :-1]]
    assert set(tok.decode(predicted.tolist())) <= set("say<end>0123456789")
    # Every counted target belongs to an answer; every answer token that has a context in its sequence is counted.
    text = tok.decode(predicted.tolist())
    assert text.count("say") >= 25
    assert "ask" not in text.replace("say", "")


def test_stretches_without_an_answer_are_dropped(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": "q" * 190, "response": "yes"}))
    data = build_calibration(path, WordTokenizer(), samples=None, length=50, part="all")
    assert len(data) == 1
    assert data.num_predictions == 3
    path.write_text(json.dumps({"prompt": "q" * 190, "response": ""}))
    with pytest.raises(DataError, match="193 tokens, but no whole sequence of 50 among them holds an answer"):
        build_calibration(path, WordTokenizer(), samples=None, length=50, part="all")


def test_a_template_that_rewrites_the_past_is_refused():
    class Forgetful(WordTokenizer):
        def apply_chat_template(self, turns, tokenize, add_generation_prompt):
            return super().apply_chat_template(turns[-2:], tokenize, add_generation_prompt)

    with pytest.raises(DataError, match="one answer each"):
        list(token_stream([CHAT], Forgetful("yes")))
    list(token_stream([Document(messages=CHAT.messages[:2])], Forgetful("yes")))


# ---------------------------------------------------------------------- pieces


def test_begin_of_text_only_where_the_tokenizer_sets_one(tokenizer):
    assert first_tokens(WordTokenizer()) == [1]
    assert first_tokens(tokenizer) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["word", "\n", "\n\n", " "]), max_size=60))
def test_pieces_join_to_the_text(parts):
    text = "".join(parts) * 700
    pieces = list(text_pieces(text))
    assert "".join(pieces) == text
    for left, right in pairwise(pieces):
        assert left.endswith("\n")
        assert not right.startswith("\n")


def test_cutting_a_long_text_does_not_change_its_tokens(tokenizer):
    text = "".join(f"Line {i} of a long text.\n" + "\n" * (i % 3) for i in range(9000))
    assert len(list(text_pieces(text))) > 2
    ((ids, _),) = token_stream([Document(text=text)], tokenizer)
    assert ids[:-1].tolist() == tokenizer(text, verbose=False).input_ids


def test_a_huge_source_is_thinned(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("rco.data.calibration._CHARACTERS", 1000)
    path = tmp_path / "big.txt"
    path.write_text("".join(f"line {i}\n" for i in range(40000)))
    small = build_calibration(path, tokenizer, samples=4, length=64, part="all")
    assert len(small) == 4
    everything = build_calibration(path, tokenizer, samples=None, length=64, part="all")
    assert 0 < len(everything) * 64 < 40000


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 500))
def test_shares_are_whole_and_near_their_exact_values(weights, samples):
    counts = whole_shares(weights, samples)
    assert sum(counts) == samples
    exact = np.asarray(weights) / sum(weights) * samples
    assert np.abs(np.asarray(counts) - exact).max() < 1 + 1e-9


def test_a_set_checks_its_tensors():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="int64"):
        CalibrationSet(tokens.int(), mask, ("a", "a"), "x", 0, "all")
    with pytest.raises(ValueError, match="mask"):
        CalibrationSet(tokens, mask[:, 1:], ("a", "a"), "x", 0, "all")
    with pytest.raises(ValueError, match="domains"):
        CalibrationSet(tokens, mask, ("a",), "x", 0, "all")
    data = CalibrationSet(tokens, mask, ("a", "b"), "x", 0, "all")
    assert [len(batch) for batch in data.batches(1)] == [1, 1]
    assert data.select([1]).domains == ("b",)
    with pytest.raises(ValueError, match="at least one"):
        next(data.batches(0))
