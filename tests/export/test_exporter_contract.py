"""Every exporter of the table keeps its contract."""

import pytest
import torch
from gguf_models import load_tiny

from rco import registry
from rco.compression.llama_quantize import GGUFFile
from rco.formats.ggml.block_types import GGMLFormat
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.formats.rounding import round_to_nearest
from rco.models.loading import load_model, wrap_model
from rco.models.moe.expert_removal import prune_experts
from rco.models.moe.layers import moe_layers
from rco.models.moe.linears import model_linears
from rco.testing import check_exporter
from rco.testing.tiny_models import random_keep, tiny_model, tiny_moe


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("tiny-llama").tokenizer


def rounded(loaded, format_of):
    """Packed weights of every other linear."""
    linears = model_linears(loaded.layout, loaded.model)[::2]
    formats = {info.name: format_of(info).on(info.in_features) for info in linears}
    return {
        info.name: round_to_nearest(info.weight, [formats[info.name]])[0]
        for info in linears
        if formats[info.name] != ORIGINAL
    }


def pruned(name, tokenizer):
    model = tiny_moe(name)
    return wrap_model(prune_experts(model, random_keep(moe_layers(model), 3)), tokenizer)


def from_gguf(folder):
    pytest.importorskip("gguf", reason="GGUF files need the extra gguf")
    pytest.importorskip("libggml", reason="ggml's encoders are in the extra gguf")
    loaded = load_tiny(folder / "tiny.gguf")
    linears = model_linears(loaded.layout, loaded.model)[::2]
    return loaded, {info.name: GGMLFormat("q4_0").encode(info.weight.float()) for info in linears}


def case(name, tokenizer, folder=None):
    """A model, and weights for it, that an exporter can write."""
    if name == "gguf":
        return from_gguf(folder)
    if name == "pruned":
        return pruned("qwen3_moe", tokenizer), {}
    if name == "pruned-padded":
        return pruned("deepseek_v3-ungrouped", tokenizer), {}
    loaded = wrap_model(tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=32), tokenizer)
    if name == "llama.cpp":
        file = GGUFFile.of(loaded.layout, loaded.model)
        return loaded, rounded(loaded, lambda info: file.type_of(info, 8).scheme)
    return loaded, rounded(loaded, lambda info: IntegerGrid(4, 64, symmetric=True))


@pytest.mark.parametrize("name", registry.EXPORTERS)
def test_every_exporter_keeps_its_contract(name, tokenizer, tmp_path, tmp_path_factory):
    torch.manual_seed(0)
    exporter = registry.load(registry.EXPORTERS, name, "format")()
    assert exporter.name == name
    check_exporter(exporter, *case(name, tokenizer, tmp_path_factory.mktemp("model")), tmp_path)


def test_the_check_notices_a_wrong_size_and_a_changed_model(tokenizer, tmp_path):
    from rco.export.dense import DenseExporter

    class Wrong(DenseExporter):
        def export(self, request):
            summary = super().export(request)
            (request.out / "extra.txt").write_text("more")
            return summary

    class Spoiling(DenseExporter):
        def export(self, request):
            summary = super().export(request)
            request.source.model.lm_head.weight.data += 1
            return summary

    for exporter, words in ((Wrong(), "not those that were written"), (Spoiling(), "logits|changed|differ")):
        with pytest.raises(AssertionError, match=words):
            check_exporter(exporter, *case("dense", tokenizer), tmp_path / type(exporter).__name__)
