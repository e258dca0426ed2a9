"""Embedding and output layer as groups: what readers compute from the checkpoint, and its bytes."""

import json

import pytest
import torch
from round_trips import load_elsewhere, quantize
from safetensors.torch import load_file

from rco.compression.compression import Compression
from rco.compression.file_size import checkpoint_bytes
from rco.compression.plan import make_plan
from rco.core.problem import Allocation
from rco.export import CompressedTensorsExporter
from rco.export.dense import DenseExporter
from rco.export.exporter import ExportRequest
from rco.export.gptqmodel import GPTQModelExporter
from rco.formats import parse
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.testing.tiny_models import tiny_model

# The second one multiplies its rows by a factor.
CASES = [("llama", True), ("gemma3_text", True), ("llama", False)]


def loaded_tiny(name, tied):
    return wrap_model(tiny_model(name, tie_word_embeddings=tied, num_hidden_layers=2), name=name)


@pytest.mark.filterwarnings("ignore")
def test_stock_transformers_computes_what_was_evaluated(tmp_path):
    folders = [tmp_path / f"{name}{tied}" for name, tied in CASES]
    written = [quantize(loaded_tiny(*case), folder) for case, folder in zip(CASES, folders, strict=True)]
    found = load_elsewhere([folder / "model" for folder in folders])
    for (_, tied), folder, ours, theirs in zip(CASES, folders, written, found, strict=True):
        assert theirs["error"] is None, theirs["error"]
        assert not theirs["lost"]
        assert ours["embedding"]
        assert torch.equal(theirs["logits"], ours["logits"])
        state = load_file(folder / "model" / "model.safetensors")
        assert state["model.embed_tokens.weight"].dtype == torch.int8
        assert ("lm_head.weight_packed" in state) != tied
        if tied:  # the codes once, the scales for either use
            assert torch.equal(state["lm_head.weight_scale"], state["model.embed_tokens.weight_scale"])
            assert not any(name in state for name in ("lm_head.weight", "lm_head.weight_packed"))
        config = json.loads((folder / "model" / "config.json").read_text())
        assert config["tie_word_embeddings"] == tied


@pytest.mark.parametrize("serve", ["transformers", "vllm"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_promised_bytes_are_those_of_the_files(tmp_path, serve, tied):
    loaded = loaded_tiny("llama", tied)
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    plan = make_plan(
        loaded.layout, linears, widths=(2, 4, 8), group_size=16, symmetric=True, serve=serve, embeddings=True
    )
    costs = Compression(loaded, plan, tmp_path / "store").costs("size")
    (embedding,) = (row for row, group in enumerate(plan.groups) if group.name == "model.embed_tokens")
    for number, option in enumerate(plan.groups[embedding].options):
        choice = Allocation(
            [
                plan.options.index(option if row == embedding else group.options[row % 3])
                for row, group in enumerate(plan.groups)
            ]
        )
        formats = {
            info.name: plan.options[choice[row]]
            for row, group in enumerate(plan.groups)
            for info in group.members
        }
        weights = {
            info.name: formats[info.name].encode(info.weight.float().contiguous())
            for info in plan.linears
            if formats[info.name].name != "original"
        }
        out = tmp_path / f"{number}"
        CompressedTensorsExporter().export(ExportRequest(loaded, weights, out, engine=serve))
        size = (out / "model.safetensors").stat().st_size
        assert size == checkpoint_bytes(loaded.model, linears, formats)
        promised = costs.fixed + sum(int(costs.matrix[row, k]) for row, k in enumerate(choice))
        assert size <= promised < size + 1024  # headers are bounded from above


def test_vllm_gets_two_copies_of_a_tied_weight(tmp_path):
    loaded = loaded_tiny("llama", True)
    (info,) = (
        info
        for info in model_linears(loaded.layout, loaded.model, include_embedding=True)
        if info.role == "embedding"
    )
    weights = {info.name: parse("int4-g16-sym").encode(info.weight.float())}
    CompressedTensorsExporter().export(ExportRequest(loaded, weights, tmp_path / "out", engine="vllm"))
    state = load_file(tmp_path / "out" / "model.safetensors")
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        assert torch.equal(state[f"lm_head.{part}"], state[f"model.embed_tokens.{part}"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (group,) = config["quantization_config"]["config_groups"].values()
    assert {"model.embed_tokens", "lm_head", "VocabParallelEmbedding"} == set(group["targets"])


def test_dense_checkpoints_and_recipes(tmp_path):
    loaded = loaded_tiny("llama", True)
    linears = model_linears(loaded.layout, loaded.model, include_embedding=True)
    weights = {info.name: parse("int4-g16-sym").encode(info.weight.float()) for info in linears}
    DenseExporter().export(ExportRequest(loaded, weights, tmp_path / "dense"))
    state = load_file(tmp_path / "dense" / "model.safetensors")
    decoded = weights["model.embed_tokens"].dequantize().to(loaded.dtype)
    assert torch.equal(state["model.embed_tokens.weight"], decoded)
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["tie_word_embeddings"]
    with pytest.raises(ValueError, match=r"gives no width to an embedding.*embeddings=False"):
        GPTQModelExporter().export(ExportRequest(loaded, weights, tmp_path / "recipe"))
