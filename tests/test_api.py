"""``rco.quantize``, ``rco.prune`` and ``rco.evaluate`` from Python, on small random models in memory."""

import dataclasses
import inspect
import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

import rco
from rco import api
from rco.cli import main
from rco.data.calibration import build_calibration
from rco.data.documents import Texts
from rco.models.layout import layout_for
from rco.models.loading import pick_device
from rco.models.moe.linears import model_linears, unread_experts
from rco.pipeline.configs import EvaluateConfig, PruneConfig, QuantizeConfig
from rco.testing.tiny_models import save_tiny

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "intermediate_size": 16, "tie_word_embeddings": True, "dtype": torch.float32,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 8, "mlp_only_layers": [], "norm_topk_prob": True}
WORDS = random.Random(0)
TEXTS = [" ".join(WORDS.choices("abcdefgh", k=40)) for _ in range(60)]
SMALL = {
    "data": TEXTS, "sequences": 3, "sensitivity": 2, "selection": 2, "evaluation": 2, "length": 16, "steps": 2,
    "samples": 2, "refine": 2, "progress": False,
}  # fmt: skip
QUICK = {**SMALL, "widths": [2, 3, 8], "group_size": 8, "sweeps": 0, "method": "rtn"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model and one with experts, as checkpoints."""
    parent = tmp_path_factory.mktemp("models")
    return {
        "llama": save_tiny("llama", parent / "random-llama", **SIZES),
        "moe": save_tiny("qwen3_moe", parent / "random-moe", **SIZES, **EXPERTS),
    }


def in_memory(folder):
    """What a user has: a stock model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def llama(folders):
    return in_memory(folders["llama"])


@pytest.fixture
def moe(folders):
    return in_memory(folders["moe"])


def everything(model):
    """All of a model that a caller could miss: every bit, every module, flags, hooks, configuration."""
    return (
        {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()},
        [(name, id(module), module.training, type(module)) for name, module in model.named_modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        model.config.to_dict(),
    )


def assert_untouched(model, before):
    after = everything(model)
    assert after[0].keys() == before[0].keys()
    for name, (identity, value) in before[0].items():
        assert after[0][name][0] == identity, name
        assert torch.equal(after[0][name][1], value), name
    assert after[1:] == before[1:]


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24)[None] * 7 % 8192).logits


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """A working directory and a directory for temporary files, both empty."""
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return tmp_path


# ------------------------------------------------------------------ one definition


@pytest.mark.parametrize(
    ("function", "config", "own"),
    [
        (rco.quantize, QuantizeConfig, {"tokenizer", "progress", "inplace"}),
        (rco.prune, PruneConfig, {"tokenizer", "progress", "inplace"}),
        (rco.evaluate, EvaluateConfig, {"models", "tokenizer", "progress"}),
    ],
)
def test_arguments_are_the_settings_of_the_command_line(function, config, own):
    """Every setting is an argument of the same name, default and description, and nothing else is one."""
    parameters = inspect.signature(function).parameters
    fields = {field.name: field for field in dataclasses.fields(config) if field.name != "paths"}
    assert parameters.keys() - own == fields.keys()
    for name, field in fields.items():
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = tuple(field.default_factory())
        if default is not dataclasses.MISSING:
            assert parameters[name].default == default, name
        described = " ".join(inspect.getdoc(function).split())
        assert " ".join(field.metadata["help"].split()) in described, name


# ---------------------------------------------------------------------- quantize


def test_a_loaded_model_is_quantized_and_stays_as_it_is(llama, clean):
    model, tokenizer = llama
    before, expected = everything(model), logits(model)
    result = rco.quantize(model, tokenizer, bits=3, **QUICK)
    assert_untouched(model, before)
    assert torch.equal(logits(model), expected)
    assert files_in(clean) == ["temporary", "work"]  # nothing is written, and nothing left behind
    assert result.model is not model
    assert result.tokenizer is tokenizer
    assert not torch.equal(logits(result.model), expected)
    assert result.model.generate(torch.arange(4)[None], max_new_tokens=3, do_sample=False).shape == (1, 7)
    assert set(result.allocation) == {info for info, _ in model.named_modules() if info.endswith("_proj")}
    assert set(result.allocation.values()) <= {2, 3, 8}
    sizes = {name: model.get_submodule(name).weight.numel() for name in result.allocation}
    used = sum(result.allocation[name] * size for name, size in sizes.items())
    assert used == result.metrics["budget"]["used_units"] <= 3 * sum(sizes.values())
    # A model that shares nothing with the one it came from.
    own = {value.data_ptr() for value in model.state_dict().values()}
    assert own.isdisjoint(value.data_ptr() for value in result.model.state_dict().values())


def test_what_is_measured_is_what_is_returned_and_saved(llama, tmp_path):
    """The evaluated KL, the returned model and the checkpoint, read by stock transformers, agree."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = llama
    result = rco.quantize(model, tokenizer, bits=3, **QUICK)
    measured = rco.evaluate(
        result, tokenizer, reference=model, data=TEXTS, sequences=2, length=16, progress=False
    )
    (row,) = [row for row in result.metrics["evaluation"] if row["chosen"]]
    assert measured["kl"]["kl"] == pytest.approx(row["kl"], rel=1e-4)
    assert measured["perplexity"]["perplexity"] == pytest.approx(row["perplexity"], rel=1e-5)
    folder = result.save(tmp_path / "checkpoint")
    assert result.metrics["certificate"]["used"] <= result.metrics["budget"]["budget_units"]
    packed = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(packed), logits(result.model))
    assert torch.equal(logits(rco.load(folder).model), logits(result.model))
    for name in result.allocation:
        decoded = packed.get_submodule(name).weight
        assert torch.equal(decoded, result.model.get_submodule(name).weight), name
    dense = result.save(tmp_path / "dense", format="dense")
    assert torch.equal(logits(rco.load(dense).model), logits(result.model))
    with pytest.raises(ValueError, match="not empty"):
        result.save(tmp_path / "dense", format="dense")
    result.save(tmp_path / "dense", overwrite=True)
    with pytest.raises(ValueError, match=r"compressed-tensors or dense"):
        result.save(tmp_path / "other", format="pruned")
    assert not (tmp_path / "other").exists()


def test_formats_with_rounded_inputs_are_measured_tuned_returned_and_saved(llama, tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokenizer = llama
    settings = {**QUICK, "widths": None, "tune": "scales", "tune_tokens": 64}
    menu = ["fp8-dynamic", "int8-dynamic", "original"]
    result = rco.quantize(model, tokenizer, bits=10, formats=menu, flops_share=0.7, **settings)
    assert set(result.allocation.formats.values()) <= set(menu)
    second = result.metrics["budget"]["second"]
    assert second["used"] <= second["allowed"] == 0.7
    measured = rco.evaluate(
        result, tokenizer, reference=model, data=TEXTS, sequences=2, length=16, progress=False
    )
    (row,) = [row for row in result.metrics["evaluation"] if row["chosen"]]
    assert measured["kl"]["kl"] == pytest.approx(row["kl"], rel=1e-3)
    folder = result.save(tmp_path / "checkpoint")
    assert result.metrics["certificate"]["used"] <= result.metrics["budget"]["budget_units"]
    packed = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(packed), logits(result.model))


def test_a_name_gives_the_same_result_as_the_loaded_model(llama, folders):
    model, tokenizer = llama
    by_name = rco.quantize(str(folders["llama"]), bits="3", **QUICK)
    loaded = rco.quantize(model, tokenizer, bits=3.0, **QUICK)
    assert dict(by_name.allocation) == dict(loaded.allocation)
    assert torch.equal(logits(by_name.model), logits(loaded.model))


def test_in_place_the_model_becomes_the_compressed_one(llama):
    model, tokenizer = llama
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim > 1)
    copy = rco.quantize(model, tokenizer, bits=3, **QUICK)
    result = rco.quantize(model, tokenizer, bits=3, inplace=True, **QUICK)
    assert result.model is model
    assert torch.equal(logits(model), logits(copy.model))
    assert all(parameter.requires_grad == (parameter.ndim > 1) for parameter in model.parameters())


def test_transposed_weights_and_tied_embeddings(tmp_path):
    """GPT-2 keeps its weights transposed and its output layer tied; what is returned is what is saved."""
    model, tokenizer = in_memory(
        save_tiny("gpt2", tmp_path / "gpt2", dtype=torch.float32, n_embd=16, n_head=2)
    )
    before = everything(model)
    result = rco.quantize(model, tokenizer, bits=3, **{**QUICK, "format": "dense"})
    assert_untouched(model, before)
    assert result.model.get_output_embeddings().weight is result.model.get_input_embeddings().weight
    assert torch.equal(logits(rco.load(result.save(tmp_path / "out")).model), logits(result.model))


def test_unverified_experts_are_named(tmp_path):
    model, tokenizer = in_memory(save_tiny("jetmoe", tmp_path / "jetmoe", dtype=torch.float32))
    left = {each.name: each.reason for each in unread_experts(model)}
    stacked = sum(model.get_parameter(name).numel() for name in left)
    linears = model_linears(layout_for(model), model)
    packed = sum(info.parameters for info in linears)
    bits = (32 * stacked + 3 * packed) / (stacked + packed)
    result = rco.quantize(model, tokenizer, bits=f"{bits:.4f}", **QUICK)
    assert left
    assert result.metrics["unverified"] == left
    assert result.allocation.keys() == {info.name for info in linears}


def test_pruned_and_quantized_experts(moe, tmp_path):
    model, tokenizer = moe
    before = everything(model)
    settings = {**QUICK, "allow_prune": True, "widths": [2, 8]}
    result = rco.quantize(model, tokenizer, bits=2.5, **settings)
    assert_untouched(model, before)
    assert 0 in result.allocation.values()
    saved = rco.load(result.save(tmp_path / "out")).model
    torch.testing.assert_close(logits(saved), logits(result.model), rtol=1e-5, atol=1e-5)
    other = rco.quantize(model, tokenizer, bits=2.5, inplace=True, **settings)
    assert other.model is model
    assert torch.equal(logits(model), logits(result.model))


# ------------------------------------------------------------------------- prune


def test_experts_are_pruned_and_the_model_generates(moe, clean):
    model, tokenizer = moe
    before = everything(model)
    result = rco.prune(model, tokenizer, experts=0.25, **SMALL)
    assert_untouched(model, before)
    assert files_in(clean) == ["temporary", "work"]
    assert len(result.allocation) == 16
    assert sum(result.allocation.values()) == 12
    assert result.model.generate(torch.arange(4)[None], max_new_tokens=3, do_sample=False).shape == (1, 7)
    weights = sum(parameter.numel() for parameter in result.model.parameters())
    assert weights < sum(parameter.numel() for parameter in model.parameters())
    own = {value.data_ptr() for value in model.state_dict().values()}
    assert own.isdisjoint(value.data_ptr() for value in result.model.state_dict().values())
    measured = rco.evaluate(result, reference=model, tokenizer=tokenizer, data=TEXTS, sequences=2, length=16,
                            progress=False)  # fmt: skip
    (row,) = [row for row in result.metrics["evaluation"] if row["chosen"]]
    assert measured["kl"]["kl"] == pytest.approx(row["kl"], rel=1e-3)
    folder = result.save(clean / "checkpoint")
    torch.testing.assert_close(logits(rco.load(folder).model), logits(result.model), rtol=1e-5, atol=1e-5)
    kept = json.loads((folder / "kept_experts.json").read_text())["kept"]
    listed = [
        [name for name, stays in result.allocation.items() if stays and layer in name] for layer in kept
    ]
    assert [len(names) for names in listed] == [len(experts) for experts in kept.values()]
    numbers = [[int(name.rpartition(".")[2]) for name in names] for names in listed]
    assert numbers == list(kept.values())  # as the full model counts them


def test_pruning_in_place(moe):
    model, tokenizer = moe
    copy = rco.prune(model, tokenizer, experts=4, **SMALL)
    result = rco.prune(model, tokenizer, experts=4, inplace=True, **SMALL)
    assert result.model is model
    assert torch.equal(logits(model), logits(copy.model))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in copy.model.parameters())


# ------------------------------------------------------------------- runs, failure


def test_a_run_folder_is_the_command_lines_own(folders, tmp_path):
    """The same settings give the same allocation and checkpoint from Python and from a shell; both resume."""
    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    settings = {**QUICK, "data": data, "out": tmp_path / "python"}
    result = rco.quantize(folders["llama"], bits=3, **settings)
    flags = ["--data", data, "--sequences", 3, "--sensitivity", 2, "--selection", 2, "--evaluation", 2,
             "--length", 16, "--steps", 2, "--samples", 2, "--refine", 2, "--widths", "2,3,8", "--group-size", 8,
             "--sweeps", 0, "--method", "rtn", "--bits", 3, "--quiet"]  # fmt: skip
    shell = tmp_path / "shell"
    assert main(["quantize", *map(str, [folders["llama"], *flags, "--out", shell])]) == 0
    assert result.folder == tmp_path / "python"
    for name in ("problem.json", "model/model.safetensors", "model/config.json"):
        assert (tmp_path / "python" / name).read_bytes() == (shell / name).read_bytes(), name
    found = [json.loads((f / "allocation.json").read_text()) for f in (result.folder, shell)]
    assert found[0]["allocation"] == found[1]["allocation"]
    with pytest.raises(ValueError, match="`resume=True`"):
        rco.quantize(folders["llama"], bits=3, **settings)
    again = rco.quantize(folders["llama"], bits=3, resume=True, **settings)
    assert dict(again.allocation) == dict(result.allocation)
    with pytest.raises(ValueError, match="another configuration"):
        rco.quantize(folders["llama"], bits=4, resume=True, **settings)


def test_a_run_of_another_model_in_memory_is_not_continued(moe, tmp_path):
    model, tokenizer = moe
    rco.prune(model, tokenizer, experts=4, out=tmp_path / "run", **SMALL)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(ValueError, match="weights: was"):
        rco.prune(model, tokenizer, experts=4, out=tmp_path / "run", resume=True, **SMALL)


class Enough(Exception):
    pass


@pytest.mark.parametrize("stage", ["candidates", "sensitivities", "search", "evaluation"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_call_that_fails_leaves_nothing(llama, clean, stage, inplace):
    model, tokenizer = llama
    before = everything(model)

    def stop(event):
        if event.stage == stage:
            raise Enough

    with pytest.raises(Enough):
        rco.quantize(model, tokenizer, bits=3, inplace=inplace, **{**QUICK, "progress": stop})
    assert_untouched(model, before)
    assert files_in(clean) == ["temporary", "work"]


def test_a_failure_while_weights_are_put_in_place(llama, monkeypatch):
    """All or nothing: the last weight cannot be decoded, so none has been replaced."""
    from rco.formats.integer import PackedWeight

    model, tokenizer = llama
    before = everything(model)
    real, decoded = PackedWeight.dequantize, []

    def failing(self, *arguments, **settings):
        decoded.append(self)
        if len(decoded) == 14:
            raise MemoryError
        return real(self, *arguments, **settings)

    import rco.compressed

    original = rco.compressed.decode_into

    def decode_into(*arguments):
        monkeypatch.setattr(PackedWeight, "dequantize", failing)
        original(*arguments)

    monkeypatch.setattr(rco.compressed, "decode_into", decode_into)
    with pytest.raises(MemoryError):
        rco.quantize(model, tokenizer, bits=3, inplace=True, **QUICK)
    assert len(decoded) == 14
    assert_untouched(model, before)


def test_progress_calls_a_function(llama):
    model, tokenizer = llama
    events = []
    rco.quantize(model, tokenizer, bits=3, **{**QUICK, "progress": events.append})
    stages = list(dict.fromkeys(event.stage for event in events if event.stage))
    assert stages[:3] == ["candidates", "sensitivities", "search"]
    assert stages[-1] == "evaluation"
    searched = [event for event in events if event.stage == "search"]
    assert [event.done for event in searched] == [1, 2]
    assert all(event.total == 2 and event.record.loss >= 0 for event in searched)
    assert any("bits from 2 to 8 are feasible" in event.text for event in events)


def test_the_device_that_auto_took_is_reported_first(tmp_path):
    events = []
    with pytest.raises(ValueError, match=r"config\.json"):
        rco.quantize(tmp_path, bits=3, progress=events.append)
    assert events[0].text == f"device: {pick_device('auto').type}"


# ------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "exactly one budget"),
        ({"bits": 3, "size": "1MB"}, ValueError, "exactly one budget"),
        ({"bits": 1.5}, ValueError, "between 2 and 8"),
        ({"bits": Fraction(19, 2)}, ValueError, "between 2 and 8"),
        ({"bits": -1}, ValueError, "positive"),
        ({"bits": float("nan")}, ValueError, "finite"),
        ({"bits": [3]}, TypeError, "`bits` must be a number or a string"),
        ({"bits": True}, TypeError, "`bits` must be a number or a string"),
        ({"size": 1000}, ValueError, "bytes"),
        ({"bits": 3, "data": []}, ValueError, "holds no text"),
        ({"bits": 3, "data": ["", "  "]}, ValueError, "holds no text"),
        ({"bits": "two"}, ValueError, "`bits` must hold finite numbers, such as 2.5 or '7/3', got 'two'.$"),
        ({"bits": 3, "data": ["short"]}, ValueError, "^the given text .*fewer than one sequence.*`length`"),
        ({"bits": 3, "data": 7}, TypeError, "`data` must be"),
        ({"bits": 3, "data": ["text", 7]}, ValueError, r"data\[1\] is a int"),
        ({"bits": 3, "data": [{"role": "user", "content": "x"}]}, ValueError, "a list of conversations"),
        ({"bits": 3, "data": "no-such-text"}, ValueError, "no-such-text"),
        ({"bits": 3, "steps": "40"}, TypeError, "`steps` must be an integer, got '40'"),
        ({"bits": 3, "steps": 2.5}, TypeError, "`steps` must be an integer"),
        ({"bits": 3, "samples": 0}, ValueError, "`samples` must be at least 1"),
        ({"bits": 3, "loss": "mse"}, ValueError, "`loss` must be one of kl, cross-entropy"),
        ({"bits": 3, "lr": None}, TypeError, "`lr` must be a number"),
        ({"bits": 3, "tau": 0.1}, TypeError, "`tau` must be 2 numbers"),
        ({"bits": 3, "searcher": "rcoo"}, ValueError, "Did you mean rco"),
        ({"bits": 3, "resume": True}, ValueError, "`out`"),
        ({"bits": 3, "progress": "yes"}, TypeError, "`progress` must be"),
        ({"bits": 3, "dtype": "bfloat16"}, ValueError, "model is in float32"),
        ({"bits": 3, "lock": "no_such_linear=8"}, ValueError, "`lock"),
    ],
)  # fmt: skip
def test_mistakes_are_errors_at_once(llama, clean, settings, error, message):
    """What was got and what is allowed, in words of arguments; nothing has been touched or written."""
    model, tokenizer = llama
    before = everything(model)
    with pytest.raises(error, match=message) as caught:
        rco.quantize(model, tokenizer, **{**QUICK, **settings})
    assert "--" not in str(caught.value)
    assert_untouched(model, before)
    assert files_in(clean) == ["temporary", "work"]


def test_a_loaded_model_prints_as_one_line(folders):
    loaded = rco.load(folders["llama"])
    assert "LlamaForCausalLM" in repr(loaded)
    assert "\n" not in repr(loaded)


def test_models_that_cannot_be_compressed(llama, folders, tmp_path):
    model, tokenizer = llama
    with pytest.raises(TypeError, match="needs its tokenizer"):
        rco.quantize(model, bits=3, **QUICK)
    with pytest.raises(TypeError, match="must be a Hugging Face tokenizer"):
        rco.quantize(model, "tokenizer", bits=3, **QUICK)
    with pytest.raises(TypeError, match="leave it out for a model given by name"):
        rco.quantize(folders["llama"], tokenizer, bits=3, **QUICK)
    with pytest.raises(TypeError, match="`model` must be"):
        rco.quantize(17, bits=3, **QUICK)
    with pytest.raises(ValueError, match="no config"):
        rco.quantize(nn.Linear(2, 2), tokenizer, bits=3, **QUICK)
    with pytest.raises(ValueError, match="needs a loaded model"):
        rco.quantize(folders["llama"], bits=3, inplace=True, **QUICK)
    with pytest.raises(ValueError, match="experts"):
        rco.prune(model, tokenizer, experts=0.5, **SMALL)
    model.model.layers[1].train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        rco.quantize(model, tokenizer, bits=3, **QUICK)
    model.eval()
    packed = rco.quantize(model, tokenizer, bits=3, **QUICK).save(tmp_path / "packed")
    with pytest.raises(ValueError, match="quantized already"):
        rco.quantize(packed, bits=3, **QUICK)
    quantized = rco.load(packed)
    with pytest.raises(ValueError, match="quantized already"):
        rco.quantize(quantized.model, quantized.tokenizer, bits=3, **QUICK)


# --------------------------------------------------------------------- data, evaluate


def test_conversations_count_their_answers_alone(folders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    chat = [
        [{"role": "user", "content": f"a b c {n}"}, {"role": "assistant", "content": "d e f " * 4}]
        for n in range(40)
    ]
    plain = build_calibration(Texts(TEXTS), tokenizer, samples=4, length=16)
    talk = build_calibration(Texts(chat), tokenizer, samples=4, length=16)
    assert plain.mask[:, :-1].all()
    assert 0 < talk.num_predictions < plain.num_predictions
    records = build_calibration(
        Texts([{"messages": entry} for entry in chat]), tokenizer, samples=4, length=16
    )
    assert records.fingerprint == talk.fingerprint


def test_the_same_text_is_the_same_data(folders, tmp_path):
    """The name of texts depends on their content alone, and copies of a document count once."""
    file = tmp_path / "text.txt"
    file.write_text(TEXTS[0])
    assert Texts(TEXTS[:1]).name == Texts([TEXTS[0], TEXTS[0]]).name == Texts([file]).name
    assert Texts(TEXTS[:2]).name != Texts(TEXTS[1:3]).name
    with pytest.raises(ValueError, match="neither"):
        Texts([Path("table.csv")])


def test_evaluate_takes_one_model_or_several(llama, folders):
    model, tokenizer = llama
    before = everything(model)
    settings = {"data": TEXTS, "sequences": 2, "length": 16, "progress": False}
    one = rco.evaluate(model, tokenizer, **settings)
    named = rco.evaluate(folders["llama"], **settings)
    assert one["perplexity"] == named["perplexity"]
    assert named["bytes"] > 0
    rows = rco.evaluate([folders["llama"], model], tokenizer, reference=model, **settings)
    assert [row["perplexity"] for row in rows] == [one["perplexity"]] * 2
    assert rows[0]["kl"]["kl"] == pytest.approx(0, abs=1e-9)
    assert_untouched(model, before)
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        rco.evaluate(model, tokenizer, **settings)
    with pytest.raises(ValueError, match="`models` is empty"):
        rco.evaluate([], **settings)


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.3, "2.3"), (3, "3"), ("2.5", "2.5"), (Fraction(5, 2), "5/2"), (torch.tensor(2.5).item(), "2.5")],
)
def test_budgets_mean_what_is_written(value, text):
    assert api._amount("bits", value) == text
    assert api._amount("size", 3.1e9) == "3100000000"


# ---------------------------------------------------------------------- the result


@pytest.fixture(scope="module")
def quantized(folders):
    """A result to look at; by name, so that nothing but the result holds the model."""
    return rco.quantize(folders["llama"], bits=3, **QUICK)


@pytest.fixture(scope="module")
def pruned(folders):
    """The same of pruning; an odd number, so that layers keep different ones."""
    return rco.prune(folders["moe"], experts=3, **SMALL)


def test_an_allocation_prints_as_a_heat_map(quantized, pruned):
    """Every cell is the width of its linear, every mark says whether an expert stays; HTML has the same cells."""
    lines = str(quantized.allocation).splitlines()
    assert lines[0].split() == ["block", "01"]
    shown = {line.split()[0]: line.split()[1] for line in lines[1:]}
    for name, width in quantized.allocation.items():
        block, kind = int(name.split(".")[2]), name.rpartition(".")[2]
        assert shown[kind][block] == str(width)
    marks = [line.split()[1] for line in str(pruned.allocation).splitlines()[1:]]
    assert "".join("■" if stays else "·" for stays in pruned.allocation.values()) == "".join(marks)
    html = quantized.allocation._repr_html_()
    assert html.count("<td") == len(quantized.allocation)
    assert pruned.allocation._repr_html_().count("<td") == len(pruned.allocation)
    assert "\x1b" not in str(quantized.allocation)


def test_a_heat_map_has_colours_on_a_terminal(quantized, monkeypatch):
    monkeypatch.setattr("rco.compressed.coloured", lambda: True)
    painted = str(quantized.allocation)
    assert "\x1b[48;2;" in painted
    plain = re.sub(r"\x1b\[[0-9;]*m", "", painted)
    monkeypatch.setattr("rco.compressed.coloured", lambda: False)
    assert plain == str(quantized.allocation)


def test_heat_maps_of_large_and_odd_models():
    """More than ten blocks, linears outside the blocks, experts of several widths, pruned ones, 16 bits."""
    from rco.report.data import GroupWidth
    from rco.report.heatmap import widths_html, widths_text

    def group(name, block, width):
        return GroupWidth(name, (name,), name.rpartition(".")[2], block, 10, width, f"{width:g}", {}, {})

    groups = [group(f"model.layers.{b}.self_attn.q_proj", b, 2 + b % 3) for b in range(12)]
    groups += [group(f"model.layers.3.mlp.experts.{e}.up_proj", 3, 2 * e) for e in range(2)]
    groups += [group("model.layers.4.mlp.experts.0.up_proj", 4, 0), group("lm_head", None, 16)]
    lines = widths_text(groups).splitlines()
    assert lines[0].split() == ["1"]
    assert lines[1].split() == ["block", "012345678901"]
    assert lines[2].split()[:2] == ["q_proj", "234" * 4]
    assert lines[3].split()[:2] == ["experts.up_proj", "1-"]  # the mean of 0 and 2 bits, and a pruned expert
    assert lines[4].split() == ["lm_head", "+"]
    assert "lm_head" in widths_html(groups)
    assert widths_text([group("lm_head", None, 8)]).split() == ["lm_head", "8"]


def test_a_result_says_what_it_is(quantized, pruned):
    text = repr(quantized)
    assert text.startswith("random-llama at 3 bits: ")
    assert text.count("* RCO") == 1
    assert "13 experts" in repr(pruned)


def test_a_report_is_written_from_memory(quantized, pruned, tmp_path):
    for name, result in (("quantized", quantized), ("pruned", pruned)):
        page = result.report(tmp_path / f"{name}.html")
        text = page.read_text()
        assert text.startswith("<!DOCTYPE html>")
        assert "from_pretrained" not in text  # nothing is saved yet, so that there is nothing to load
        result.save(tmp_path / name)
        assert str(tmp_path / name) in result.report(page).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "quantized", "pruned", "quantized.html", "pruned.html",
    }  # fmt: skip


def test_padded_experts_can_be_saved_where_routers_allow_it(tmp_path, pruned):
    """Routers with a bias take slots that never win; others are refused in words, and nothing is written."""
    with pytest.raises(ValueError, match="no bias"):
        pruned.save(tmp_path / "padded", format="pruned-padded")
    assert not (tmp_path / "padded").exists()
    folder = save_tiny("glm4_moe", tmp_path / "glm", dtype=torch.float32)
    result = rco.prune(folder, experts=1, **SMALL)
    saved = rco.load(result.save(tmp_path / "padded", format="pruned-padded"))
    torch.testing.assert_close(logits(saved.model), logits(result.model), rtol=1e-5, atol=1e-5)


def test_push_to_hub_uploads_the_checkpoint(quantized, monkeypatch):
    """The same calls of huggingface_hub, in the same order, as those of transformers, with a whole checkpoint."""
    import huggingface_hub

    calls = []

    class Hub:
        def __init__(self, token=None):
            calls.append(("token", token))

        def create_repo(self, repo_id, private, exist_ok):
            calls.append(("create_repo", repo_id, private, exist_ok))
            return type("Repository", (), {"repo_id": f"me/{repo_id}"})

        def create_branch(self, repo_id, branch, exist_ok):
            calls.append(("create_branch", repo_id, branch, exist_ok))

        def upload_folder(self, repo_id, folder_path, commit_message, revision, create_pr):
            names = {path.name for path in folder_path.iterdir()}
            assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
            calls.append(("upload_folder", repo_id, commit_message, revision, create_pr, folder_path))
            return "the commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    commit = quantized.push_to_hub(
        "small", private=True, token="secret", revision="v1", commit_message="Smaller"
    )
    assert commit == "the commit"
    assert calls[:3] == [
        ("token", "secret"),
        ("create_repo", "small", True, True),
        ("create_branch", "me/small", "v1", True),
    ]
    assert calls[3][:5] == ("upload_folder", "me/small", "Smaller", "v1", False)
    assert not calls[3][5].exists()  # nothing of it stays on this machine
