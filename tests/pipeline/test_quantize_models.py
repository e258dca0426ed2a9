"""Every family from a folder to a checkpoint, and the same logits from stock libraries."""

import json
import os
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rco.cli import main
from rco.models.loading import load_model
from rco.models.moe.linears import model_linears
from rco.models.precision import computing_in
from rco.pipeline.configs import ExportConfig
from rco.pipeline.export import plan_export
from rco.testing.tiny_models import save_tiny

QUICK = [
    "--sequences=4", "--sensitivity=2", "--selection=2", "--evaluation=2", "--length=32", "--steps=2",
    "--samples=2", "--refine=1", "--widths=2,4,8", "--sweeps=1", "--group-size=16", "--quiet",
    "--data=en_prose",  # the whole mixture takes longer to tokenize than such a model to compress
]  # fmt: skip
SMALL = {"num_hidden_layers": 2, "dtype": torch.float32}


def check_logits(run, ids):
    """Stock transformers compute what the run's own evaluation computes."""
    planned, allocation, _ = plan_export(ExportConfig(run=run, format="dense"))
    with planned.compression.apply(allocation) as applied:
        expected = applied.model(ids).logits.float()
    stock = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    with torch.no_grad():
        stock(ids)  # decompresses, in the checkpoint's own type
        with computing_in(stock, planned.compression.compute_dtype):
            found = stock(ids).logits.float()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    linears = {info.name: info for info in planned.compression.plan.linears}
    weights = planned.compression.weights_of(allocation)
    assert weights
    for name, packed in weights.items():
        weight = stock.get_submodule(name).weight
        assert torch.equal(weight.T if linears[name].transposed else weight, packed.dequantize()), name


CASES = [
    pytest.param("gpt2", {}, ["--format=dense", "--bits=3"], id="gpt2"),
    pytest.param(
        "gemma2",
        {"dtype": torch.bfloat16, "max_shard_size": "300KB"},
        ["--serve=vllm", "--bits=3.5"],
        id="gemma2-bf16-shards-vllm",
    ),
    *(
        pytest.param(name, changes, ["--bpw=4.6"], id=name, marks=pytest.mark.slow)
        for name, changes in {
            "llama": {"tie_word_embeddings": True},
            "qwen2": {"dtype": torch.bfloat16},
            "qwen3": {"tie_word_embeddings": True, "dtype": torch.bfloat16},
            "mistral": {},
            "gemma3_text": {"dtype": torch.bfloat16},
            "phi3": {},
            "olmo": {},
            "olmo2": {"dtype": torch.bfloat16},
            "gpt_neox": {},
            "granite": {"max_shard_size": "200KB"},
        }.items()
    ),
    pytest.param(
        "llama",
        {},
        ["--bits=7.9", "--lock=lm_head=8", "--skip=down_proj", "--tie=q_proj,k_proj"],
        id="llama-locks",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "llama",
        {"hidden_size": 64, "intermediate_size": 64},
        ["--bits=5", "--serve=vllm-marlin", "--widths=4,8", "--group-size=32"],
        id="llama-marlin",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "mistral",
        {"dtype": torch.bfloat16},
        ["--serve=transformers", "--bits=3", "--no-symmetric", "--act-order", "--widths=2,3,16"],
        id="mistral-transformers",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("model_type", "changes", "arguments"), CASES)
def test_from_a_folder_to_the_same_logits(tmp_path, model_type, changes, arguments):
    folder = save_tiny(model_type, tmp_path / "model", **{**SMALL, **changes})
    out = tmp_path / "run"
    assert main(["quantize", str(folder), "--out", str(out), *QUICK, *arguments]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["budget"]["used_units"] <= metrics["budget"]["budget_units"]
    if "--format=dense" not in arguments:
        assert metrics["certificate"]["used"] <= Fraction(metrics["certificate"]["allowed"])
        assert not metrics.get("engine", {}).get("violations")
    check_logits(out, torch.arange(24)[None] * 31 % 8192)


SPARSE = (
    "olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss",
)  # fmt: skip
PRESETS = {
    "any": ["--bits=3", "--group-size=4", "--symmetric"],
    "pruned": ["--bits=2.6", "--allow-prune", "--group-size=4", "--symmetric"],
    "transformers": ["--bits=3.5", "--serve=transformers", "--group-size=4"],
    "vllm": ["--bits=3.5", "--serve=vllm", "--group-size=4"],
    "vllm-marlin": ["--bits=5", "--serve=vllm-marlin", "--widths=4,8", "--group-size=0"],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("model_type", "preset"),
    [
        pytest.param(
            name, preset, marks=() if (name, preset) == ("qwen2_moe", "pruned") else pytest.mark.slow
        )
        for name in SPARSE
        for preset in PRESETS
    ],
)
def test_mixtures_of_experts_from_a_folder_to_the_same_logits(tmp_path, capsys, model_type, preset):
    """Every architecture, every preset: the budget holds on disk, and the logits are those that were judged."""
    folder, out = save_tiny(model_type, tmp_path / "model", dtype=torch.float32), tmp_path / "run"
    arguments = [*QUICK, *PRESETS[preset], "--method=rtn", "--clip=minmax", "--out", str(out)]
    if model_type == "gpt_oss" and preset in ("transformers", "vllm", "vllm-marlin"):
        arguments.append("--skip=experts")  # they read them stacked only
    assert main(["quantize", str(folder), *arguments]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["certificate"]["used"] <= Fraction(metrics["certificate"]["allowed"])
    assert not metrics.get("engine", {}).get("violations")
    tokens = torch.arange(24)[None] * 31 % 8192
    planned, allocation, _ = plan_export(ExportConfig(run=out, format="dense"))
    with planned.compression.apply(allocation) as applied:
        expected = applied.model(tokens).logits
    own_code = bool(list((out / "model").glob("*.py")))
    assert ("trust_remote_code=True" in capsys.readouterr().out) == own_code
    assert not (own_code and preset == "transformers")
    stock = AutoModelForCausalLM.from_pretrained(out / "model", trust_remote_code=own_code)
    for model in (stock.eval(), load_model(out / "model").model):
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_that_are_left_alone_stay_stacked_and_are_counted(tmp_path, model_type):
    """They are outside of no budget: a float32 model's count 32 bits each, as its checkpoint has them."""
    folder, out = save_tiny(model_type, tmp_path / "model", dtype=torch.float32), tmp_path / "run"
    loaded = load_model(folder)
    linears = model_linears(loaded.layout, loaded.model)
    total = sum((32 if info.role == "experts" else 3) * info.parameters for info in linears)
    bits = f"{total / sum(info.parameters for info in linears):.4f}"
    shared = ["--lock=experts=16", "--serve=vllm", "--group-size=4", "--method=rtn", "--clip=minmax"]
    assert main(["quantize", str(folder), "--bits", bits, "--out", str(out), *QUICK, *shared]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    certificate = metrics["certificate"]
    assert certificate["used"] == metrics["budget"]["used_units"] <= Fraction(certificate["allowed"])
    assert certificate["average_bits"] == pytest.approx(metrics["budget"]["average_bits"], rel=1e-12)
    check_logits(out, torch.arange(24)[None] * 31 % 8192)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_size_is_the_size_of_the_files(tmp_path):
    """What is written never takes more bytes than asked, and most of what was asked is used."""
    folder = save_tiny("llama", tmp_path / "model", num_hidden_layers=2)
    lowest, highest = (int(end.split()[0].replace(",", "")) for end in _range(folder))
    for share in (0.1, 0.45, 0.9):
        asked = round(lowest + share * (highest - lowest))
        out = tmp_path / f"run{share}"
        command = ["quantize", str(folder), "--size", str(asked), "--out", str(out), *QUICK, "--method=rtn"]
        command += ["--no-embeddings"]  # an output layer of this size leaves gaps between totals
        assert main(command) == 0
        written = sum(os.path.getsize(path) for path in (out / "model").glob("*.safetensors"))
        assert asked * 0.97 < written <= asked
        budget = json.loads((out / "metrics.json").read_text())["budget"]
        assert written <= budget["used_units"] <= budget["budget_units"] == asked
        assert budget["effective"] == f"{asked:,} bytes"
        assert "bytes that no choice changes" in (out / "report.html").read_text()
    assert load_model(out / "model").dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "budget", ["--size=400KB", pytest.param("--bpw=11.5", marks=pytest.mark.slow)], ids=["size", "bpw"]
)
def test_a_tied_embedding_is_a_group(tmp_path, budget):
    """In a small model it is most of the file: with 16 bits the size could not be reached."""
    folder = save_tiny("llama", tmp_path / "model", tie_word_embeddings=True, **SMALL)
    out = tmp_path / "run"
    asked = [budget] if "size" in budget else [budget, "--embeddings"]
    assert main(["quantize", str(folder), *asked, "--out", str(out), *QUICK, "--method=rtn"]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    written = sum(os.path.getsize(path) for path in (out / "model").glob("*.safetensors"))
    certificate = metrics["certificate"]
    if "size" in budget:
        assert written == certificate["used"] <= metrics["budget"]["used_units"] <= 400_000
    else:
        assert certificate["used"] == metrics["budget"]["used_units"] <= Fraction(certificate["allowed"])
    state = load_file(out / "model" / "model.safetensors")
    assert state["model.embed_tokens.weight"].dtype == torch.int8
    check_logits(out, torch.arange(24)[None] * 31 % 8192)
    reloaded = load_model(out / "model").model
    assert torch.equal(reloaded.lm_head.weight, reloaded.model.embed_tokens.weight)


def _range(folder):
    from rco.pipeline.configs import QuantizeConfig
    from rco.pipeline.planning import plan_compression

    config = QuantizeConfig(model=str(folder), bits="3", widths="2,4,8", group_size=16)
    return plan_compression(config).compression.budget_range("size")
