import json
import sys
import types

import numpy as np
import pytest
import torch

from rco.evaluation import EvaluationError, evaluate_task, load_task, run_harness
from rco.evaluation.tasks import Item, Task, log_likelihoods
from rco.models.loading import load_model, wrap_model
from rco.testing.tiny_models import tiny_model

TEXTS = [
    ("The cat sat on the", " mat"),
    ("The cat sat on the", " refrigerator of its owner"),
    ("Once upon a time there was a king who", " ruled"),
    ("Question: what is blue?\nAnswer:", " the sky"),
    ("spaces at the end   ", "word"),
    ("A much longer context, so that this one does not share its length with the others. " * 4, " End"),
    ("", "Beginning of a text"),
]


@pytest.fixture(scope="module")
def llama():
    return load_model("tiny-llama", dtype="float32")


def one_by_one(loaded, context, continuation):
    """The plain definition: one text, whole logits, float64."""
    tokenizer = loaded.tokenizer
    kept = context.rstrip(" ")
    whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    start = len(tokenizer(kept, add_special_tokens=False)["input_ids"])
    if start == 0:
        whole, start = [tokenizer.bos_token_id, *whole], 1
    with torch.no_grad():
        logs = loaded.model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    targets = torch.tensor(whole[start:])
    rows = logs[start - 1 : len(whole) - 1]
    return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(1) == targets).all())


@pytest.mark.parametrize("batch_tokens", [1, 64, 8192])
def test_scores_do_not_depend_on_batches(llama, batch_tokens):
    scores, greedy = log_likelihoods(llama, TEXTS, batch_tokens=batch_tokens)
    expected = [one_by_one(llama, *pair) for pair in TEXTS]
    np.testing.assert_allclose(scores, [score for score, _ in expected], rtol=2e-4)
    assert greedy.tolist() == [flag for _, flag in expected]


def test_greedy_continuation_is_recognised(llama):
    prompt = "Once upon a time"
    ids = llama.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    made = llama.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    text = llama.tokenizer.decode(made[0, ids.shape[1] :])
    _, greedy = log_likelihoods(llama, [(prompt, text), (prompt, " zebra")])
    assert greedy.tolist() == [True, False]


def test_multiple_choice(llama):
    items = (
        Item("The cat sat on the", (" mat", " refrigerator of its owner", " xqzv"), 0),
        Item("Question: what is blue?\nAnswer:", (" the sky", " no"), 1),
        Item("Once upon a time there was a", (" king", " carburettor"), 0),
    )
    result = evaluate_task(llama, Task("t", items, True))
    plain, norm = [], []
    for item in items:
        scores = np.array([one_by_one(llama, item.context, choice)[0] for choice in item.choices])
        lengths = np.array([len(choice) - 1 for choice in item.choices])
        plain.append(scores.argmax() == item.label)
        norm.append((scores / lengths).argmax() == item.label)
    assert result["acc"] == pytest.approx(np.mean(plain))
    assert result["acc_norm"] == pytest.approx(np.mean(norm))
    assert result["acc_stderr"] == pytest.approx(np.std(plain, ddof=1) / 3**0.5)
    assert result["items"] == 3


def test_lambada(llama):
    items = tuple(Item(context, (continuation,), 0) for context, continuation in TEXTS[:4])
    result = evaluate_task(llama, Task("l", items, False))
    expected = [one_by_one(llama, *pair) for pair in TEXTS[:4]]
    assert result["acc"] == np.mean([flag for _, flag in expected])
    assert result["perplexity"] == pytest.approx(np.exp(-np.mean([score for score, _ in expected])), rel=1e-3)
    assert "acc_norm" not in result


def test_long_contexts_lose_their_beginning():
    loaded = load_model("tiny-llama", dtype="float32")
    loaded.model.config.max_position_embeddings = 16
    long = "one two three four five six seven eight nine ten " * 5
    score, _ = log_likelihoods(loaded, [(long, "eleven")])
    tokens = loaded.tokenizer(long + "eleven", add_special_tokens=False)["input_ids"][-16:]
    count = len(loaded.tokenizer(long + "eleven", add_special_tokens=False)["input_ids"]) - len(
        loaded.tokenizer(long.rstrip(" "), add_special_tokens=False)["input_ids"]
    )
    with torch.no_grad():
        logs = loaded.model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    targets = torch.tensor(tokens[-count:])
    assert score[0] == pytest.approx(float(logs[-count - 1 : -1].gather(1, targets[:, None]).sum()), rel=1e-4)
    with pytest.raises(EvaluationError, match="does not fit"):
        log_likelihoods(loaded, [("a", long)])


def test_no_tensor_of_tokens_times_vocabulary(llama, monkeypatch):
    """Logits are formed for scored tokens alone, a chunk at a time."""
    import rco.evaluation.tasks as module

    monkeypatch.setattr(module, "chunk_length", lambda vocabulary: 2)
    rows = []
    original = type(llama.layout.head(llama.model)).__call__
    monkeypatch.setattr(
        type(llama.layout.head(llama.model)),
        "__call__",
        lambda self, hidden: rows.append(len(hidden)) or original(self, hidden),
    )
    scores, _ = log_likelihoods(llama, TEXTS)
    assert max(rows) == 2
    np.testing.assert_allclose(scores, [one_by_one(llama, *pair)[0] for pair in TEXTS], rtol=2e-4)


# ---------------------------------------------------------------------- files


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def test_reading_tasks(tmp_path):
    choice = {"id": 1, "context": "c", "choices": [" a", " b"], "label": 1}
    path = write(tmp_path / "arc_easy.test.jsonl", choice, "", choice)
    task = load_task(path)
    assert task == Task("arc_easy", (Item("c", (" a", " b"), 1),) * 2, True)
    assert len(load_task(path, limit=1).items) == 1
    lambada = write(tmp_path / "l.jsonl", {"context": "c", "continuation": " d"})
    assert load_task(lambada, name="x") == Task("x", (Item("c", (" d",), 0),), False)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "holds no questions"),
        (["{"], "line 1: not valid JSON"),
        ([{"context": "c", "choices": ["a", "b"], "label": 2}], "line 1: expected an object"),
        ([{"context": "c", "choices": ["a"], "label": 0}], "line 1: expected"),
        ([{"context": "c", "continuation": ""}], "line 1: expected"),
        ([["list"]], "line 1: expected"),
        (
            [{"context": "c", "continuation": "d"}, {"context": "c", "choices": ["a", "b"], "label": 0}],
            "split it",
        ),
    ],
)
def test_bad_tasks_name_the_line(tmp_path, records, message):
    with pytest.raises(EvaluationError, match=message):
        load_task(write(tmp_path / "t.jsonl", *records))


def test_other_refusals(tmp_path):
    with pytest.raises(EvaluationError, match="cannot be read"):
        load_task(tmp_path / "missing.jsonl")
    with pytest.raises(EvaluationError, match="limit"):
        load_task(tmp_path / "missing.jsonl", limit=0)
    with pytest.raises(EvaluationError, match="tokenizer"):
        log_likelihoods(wrap_model(tiny_model("llama")), [("a", "b")])


# ---------------------------------------------------------------------- lm-eval


def test_harness_says_how_to_install_it(llama, monkeypatch):
    missing = "lm-eval: run pip install 'rco[eval]'."
    monkeypatch.setattr("rco.evaluation.harness.find_problem", lambda package: missing)
    with pytest.raises(EvaluationError, match=r"pip install 'rco\[eval\]'"):
        run_harness(llama, ["arc_easy"])


def test_harness_results_get_plain_names(llama, monkeypatch):
    asked = {}

    def simple_evaluate(**keywords):
        asked.update(keywords)
        if "nonsense" in keywords["tasks"]:
            raise KeyError("nonsense")
        return {
            "results": {
                "arc_easy": {
                    "alias": "arc_easy",
                    "acc,none": 0.25,
                    "acc_stderr,none": 0.1,
                    "acc_norm,none": 0.5,
                },
                "humaneval": {"alias": "humaneval", "pass@1,create_test": 0.75},
                "arc_easy_part": {"acc,none": 0.0},
            }
        }

    fake = types.ModuleType("lm_eval")
    fake.simple_evaluate = simple_evaluate
    models = types.ModuleType("lm_eval.models")
    wrapper = types.ModuleType("lm_eval.models.huggingface")
    wrapper.HFLM = lambda pretrained, tokenizer, batch_size: (pretrained, tokenizer, batch_size)
    for name, module in {
        "lm_eval": fake,
        "lm_eval.models": models,
        "lm_eval.models.huggingface": wrapper,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rco.evaluation.harness.find_problem", lambda package: None)
    result = run_harness(llama, ["arc_easy"], limit=5, batch_size=2)
    assert result == {"arc_easy": {"acc": 0.25, "acc_stderr": 0.1, "acc_norm": 0.5}}
    assert asked["model"] == (llama.model, llama.tokenizer, 2)
    assert asked["limit"] == 5
    assert not asked["confirm_run_unsafe_code"]
    with pytest.raises(EvaluationError, match="HF_ALLOW_CODE_EVAL=1"):
        run_harness(llama, ["humaneval"])
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert run_harness(llama, ["humaneval"]) == {"humaneval": {"pass@1": 0.75}}
    assert asked["confirm_run_unsafe_code"]
    with pytest.raises(EvaluationError, match="lm-eval ls tasks"):
        run_harness(llama, ["nonsense"])
    with pytest.raises(EvaluationError, match="at least one"):
        run_harness(llama, [])


@pytest.mark.filterwarnings("ignore")
def test_the_real_harness_runs_a_task_of_ones_own(tmp_path, monkeypatch):
    """lm-eval and the package's own scoring agree on items that both can read."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    items = [
        {"context": "The cat sat on the", "choices": [" mat", " xqzv", " of and"], "label": index % 2}
        for index in range(8)
    ]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path}/items.jsonl\n"
        "output_type: multiple_choice\ntest_split: test\ntarget_delimiter: ''\n"
        'doc_to_text: "{{context}}"\ndoc_to_target: "{{label}}"\ndoc_to_choice: "{{choices}}"\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    loaded = load_model("tiny-llama")
    theirs = run_harness(loaded, [str(tmp_path / "own.yaml")], batch_size=4)["own"]
    ours = evaluate_task(loaded, load_task(tmp_path / "items.jsonl"))
    assert theirs["acc"] == ours["acc"]
    assert theirs["acc_stderr"] > 0
