"""No command multiplies matrices in bfloat16 or float16 on a CPU: many have no unit for it, and torch warns."""

import json

import pytest
import torch
from half_products import HALF, NoHalfProducts

from rco.models.loading import load_model
from rco.models.precision import computing_in
from rco.testing.tiny_models import save_tiny

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "intermediate_size": 16, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [], "norm_topk_prob": True}
QUICK = [
    "--length=16", "--sequences=4", "--selection=2", "--evaluation=2", "--steps=1", "--samples=2", "--refine=1",
    "--sensitivity=2", "--device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense model and a mixture of experts, both stored in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    dense = save_tiny("llama", folder / "llama", dtype=torch.bfloat16, **SIZES)
    return dense, save_tiny("qwen3_moe", folder / "moe", dtype=torch.bfloat16, **SIZES, **EXPERTS)


@pytest.fixture
def guarded(run):
    """Runs a command that must succeed, with products, none of them in half precision."""

    def command(*arguments):
        with NoHalfProducts() as products:
            code, out, err = run(*arguments)
        assert code == 0, err
        assert products.passed
        return out

    return command


@pytest.mark.parametrize("dtype", HALF)
def test_the_guard_refuses(dtype):
    a, model = torch.ones(4, 4, dtype=dtype), torch.nn.Conv1d(4, 4, 1, dtype=dtype)
    q = torch.ones(1, 1, 4, 4, dtype=dtype)
    products = [
        lambda: a @ a, lambda: a @ a[0], lambda: a[None] @ a[None], lambda: torch.addmm(a, a, a), lambda: model(a),
        lambda: torch.einsum("ij,kj->ik", a, a), lambda: torch.nn.functional.linear(a, a),
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
    ]  # fmt: skip
    for product in products:
        with pytest.raises(AssertionError, match="on a CPU"), NoHalfProducts():
            product()
    with NoHalfProducts():
        a.float() @ a.float()
        a + a


def test_quantize_export_and_evaluate(guarded, models, texts, tmp_path):
    dense, _ = models
    job = [dense, "--bits=3", "--data", texts, "--group-size=8", *QUICK, "--out", tmp_path / "run"]
    told = json.loads(guarded("quantize", *job, "--tune=full", "--tune-tokens=64", "--json"))
    assert told["tuning"]["tokens"] >= 64
    guarded(
        "export", tmp_path / "run", "--format=dense", "--device=cpu", "--out", tmp_path / "dense", "--json"
    )
    measured = json.loads(
        guarded(
            "evaluate", tmp_path / "run", tmp_path / "dense", "--reference", dense, "--data", texts, "--json",
            "--sequences=2", "--length=16", "--device=cpu",
        )
    )  # fmt: skip
    # The packed checkpoint decodes to the very weights of the dense one, whatever type they are multiplied in.
    assert len(measured) == 3
    assert measured[1]["perplexity"] == measured[2]["perplexity"]
    assert measured[1]["kl"] == measured[2]["kl"]


def test_quantize_experts(guarded, models, texts, tmp_path):
    _, sparse = models
    job = [sparse, "--bits=3", "--data", texts, "--group-size=8", *QUICK, "--out", tmp_path / "run"]
    guarded("quantize", *job, "--allow-prune", "--json")


def test_prune(guarded, models, texts, tmp_path):
    _, sparse = models
    job = [sparse, "--experts=0.25", "--data", texts, *QUICK, "--out", tmp_path / "run"]
    guarded("prune", *job, "--json")
    guarded(
        "evaluate",
        tmp_path / "run",
        "--data",
        texts,
        "--sequences=2",
        "--length=16",
        "--json",
        "--device=cpu",
    )


@pytest.mark.parametrize("kind", ["quantize", "prune"])
def test_compare(guarded, models, texts, tmp_path, kind):
    dense, sparse = models
    budget = {"quantize": [dense, "--bits=3", "--group-size=8"], "prune": [sparse, "--experts=0.25"]}[kind]
    methods = {"quantize": "rco,higgs,uniform", "prune": "rco,reap"}[kind]
    guarded(
        "compare", kind, *budget, "--data", texts, *QUICK, "--seeds=1", "--workers=1",
        "--methods", methods, "--json", "--out", tmp_path / "run",
    )  # fmt: skip


def test_a_packed_checkpoint_is_decoded_in_its_own_type(models, run, texts, tmp_path):
    dense, _ = models
    job = [dense, "--bits=3", "--data", texts, "--group-size=8", *QUICK, "--out", tmp_path / "run"]
    code, _, err = run("quantize", *job, "--quiet")
    assert code == 0, err
    loaded = load_model(tmp_path / "run" / "model")
    names = [info.name for info in loaded.layout.linears(loaded.model)]
    before = {name: loaded.model.get_submodule(name).weight.clone() for name in names}
    with computing_in(loaded.model, torch.float32), torch.no_grad():
        loaded.layout.final_hidden(loaded.model, torch.arange(8)[None])
        for name, weight in before.items():
            assert torch.equal(loaded.model.get_submodule(name).weight, weight.float()), name
