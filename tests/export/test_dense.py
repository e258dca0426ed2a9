import json

import pytest
import torch

from rco.export import DenseExporter, ExportError
from rco.export.exporter import ExportRequest
from rco.models.loading import load_model, wrap_model
from rco.testing.tiny_models import tiny_model

EXPORTER = DenseExporter()


def reload(path):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3", "cohere2"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_the_decoded_ones_and_the_rest_is_untouched(rtn, tmp_path, model_type, tied):
    loaded = wrap_model(tiny_model(model_type, dtype=torch.bfloat16, tie_word_embeddings=tied))
    linears = loaded.layout.linears(loaded.model)
    weights = {
        info.name: rtn(info.weight, 2 + i % 7, [None, 5, 16][i % 3], i % 2 == 0)
        for i, info in enumerate(linears)
        if i % 5
    }
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    summary = EXPORTER.export(ExportRequest(loaded, weights, tmp_path / "out", max_shard_size=20_000))
    assert summary.total_bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    model = reload(tmp_path / "out")
    transposed = {info.name for info in linears if info.transposed}
    for name, value in model.state_dict().items():
        linear = name.removesuffix(".weight")
        expected = before[name]
        if linear in weights:
            expected = weights[linear].dequantize()
            expected = expected.T if linear in transposed else expected
        # transformers keeps some buffers wider than the model on loading; those hold the same values.
        assert value.dtype in (expected.dtype, torch.float32)
        assert torch.equal(value.to(expected.dtype), expected), name
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_names_are_those_of_the_original_checkpoint(rtn, tmp_path):
    """What other programs read must not depend on how transformers arranges a model in memory."""
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path / "original")
    EXPORTER.export(ExportRequest(wrap_model(model), {}, tmp_path / "ours"))

    def names(folder):
        from safetensors import safe_open

        with safe_open(tmp_path / folder / "model.safetensors", framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118

    assert names("ours") == names("original")


def test_tied_output_layer_and_other_type(rtn, tmp_path):
    loaded = load_model("tiny-llama")
    head = loaded.layout.linears(loaded.model, include_head=True)[-1]
    packed = rtn(head.weight, 8, 64, True)
    DenseExporter(torch.float32).export(ExportRequest(loaded, {head.name: packed}, tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] is False
    again = load_model(tmp_path / "out")
    assert again.dtype == torch.float32
    assert torch.equal(again.model.lm_head.weight, packed.dequantize().float())
    assert torch.equal(again.model.model.embed_tokens.weight, loaded.model.model.embed_tokens.weight.float())
    assert again.tokenizer("Once upon a time").input_ids == loaded.tokenizer("Once upon a time").input_ids


def test_refusals(rtn, tmp_path):
    loaded = wrap_model(tiny_model("llama"))
    with pytest.raises(ExportError, match="no linear 'nowhere'"):
        EXPORTER.export(
            ExportRequest(loaded, {"nowhere": rtn(torch.randn(4, 8), 4, 8, True)}, tmp_path / "out")
        )
    name = "model.layers.0.mlp.up_proj"
    with pytest.raises(ExportError, match="made for another model"):
        EXPORTER.export(ExportRequest(loaded, {name: rtn(torch.randn(4, 8), 4, 8, True)}, tmp_path / "out"))
    assert not list(tmp_path.iterdir())
