import json
import os
import random
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file, save_file

from rco.compression.file_size import stored_bits, weight_bits
from rco.data.calibration import CalibrationSet
from rco.evaluation import (
    EvaluationError,
    average_bits,
    checkpoint_size,
    measure_divergence,
    measure_perplexity,
)
from rco.export import CompressedTensorsExporter, DenseExporter
from rco.export.exporter import ExportRequest
from rco.formats.integer import IntegerGrid, PackedWeight, pack
from rco.formats.original import ORIGINAL
from rco.models.loading import load_model, wrap_model
from rco.testing.tiny_models import tiny_model


def random_weight(info, scheme, generator):
    rows, columns = info.out_features, info.in_features
    size = scheme.group_size or columns
    groups = -(-columns // size)
    codes = torch.randint(0, 2**scheme.bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) * 0.1 / 2**scheme.bits).to(info.weight.dtype)
    zeros = torch.randint(0, 2**scheme.bits, (rows, groups), generator=generator, dtype=torch.uint8)
    return PackedWeight(
        pack(codes, scheme.bits),
        scales,
        None if scheme.symmetric else zeros,
        scheme.bits,
        (rows, columns),
        size,
    )


def export(loaded, schemes, out, exporter=None, **options):
    generator = torch.Generator().manual_seed(0)
    linears = loaded.layout.linears(loaded.model, include_head=True)
    weights = {
        info.name: random_weight(info, schemes[info.name], generator)
        for info in linears
        if info.name in schemes and schemes[info.name] != ORIGINAL
    }
    return (exporter or CompressedTensorsExporter()).export(ExportRequest(loaded, weights, out, **options))


@pytest.mark.parametrize("seed", range(8))
def test_the_certificate_agrees_with_the_plan(tmp_path, seed):
    """Two independent ways to the same integers: planned from shapes, and read back from the written headers."""
    generator = random.Random(seed)
    loaded = wrap_model(tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=False))
    linears = loaded.layout.linears(loaded.model, include_head=True)
    options = [
        ORIGINAL,
        *(IntegerGrid(b, s, y) for b in range(1, 9) for s in (None, 8, 16) for y in (True, False)),
    ]
    schemes = {info.name: generator.choice(options) for info in linears}
    summary = export(loaded, schemes, tmp_path / "out", max_shard_size=generator.choice(["5GB", 9000]))
    found = average_bits(tmp_path / "out", list(schemes))
    planned = sum(weight_bits(info, schemes[info.name]) for info in linears)
    parameters = sum(info.parameters for info in linears)
    assert Fraction(found["weight_bits"], found["parameters"]) == Fraction(planned, parameters)
    assert found["stored_bits"] == sum(stored_bits(info, schemes[info.name]) for info in linears)
    assert {name: entry["bits"] for name, entry in found["tensors"].items()} == {
        name: scheme.bits for name, scheme in schemes.items()
    }
    quantized = {name for name, scheme in schemes.items() if scheme != ORIGINAL}
    assert average_bits(tmp_path / "out")["tensors"].keys() == quantized
    size = checkpoint_size(tmp_path / "out")
    assert size["bytes"] == summary.total_bytes
    assert size["data_bytes"] == sum(summary.tensors.values())
    assert size["folder_bytes"] == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())


def test_short_rows_need_the_config(tmp_path):
    loaded = wrap_model(tiny_model("llama", hidden_size=16, head_dim=4, dtype=torch.bfloat16))
    name = "model.layers.0.self_attn.q_proj"
    export(loaded, {name: IntegerGrid(3, 8, symmetric=True)}, tmp_path / "out")
    assert average_bits(tmp_path / "out")["tensors"][name]["bits"] == 3
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(EvaluationError, match="do not determine one width"):
        average_bits(tmp_path / "out")


def test_a_lie_in_the_config_is_noticed(tmp_path):
    loaded = wrap_model(tiny_model("llama", dtype=torch.bfloat16))
    export(loaded, {"model.layers.0.self_attn.q_proj": IntegerGrid(5, symmetric=True)}, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(EvaluationError, match="says 2 bits"):
        average_bits(tmp_path / "out")


def test_damage_and_absence(tmp_path):
    with pytest.raises(EvaluationError, match="no safetensors"):
        checkpoint_size(tmp_path)
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    assert average_bits(tmp_path, ["a"])["average_bits"] == 32
    assert average_bits(tmp_path)["average_bits"] is None
    with pytest.raises(EvaluationError, match="no weight of b"):
        average_bits(tmp_path, ["b"])
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "again.safetensors")
    with pytest.raises(EvaluationError, match="both in"):
        checkpoint_size(tmp_path)
    (tmp_path / "again.safetensors").unlink()
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(EvaluationError, match=r"is damaged: .* bytes instead of the"):
        checkpoint_size(tmp_path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(EvaluationError, match="damaged"):
        checkpoint_size(tmp_path)


def test_packed_and_dense_checkpoints_measure_alike(tmp_path, monkeypatch):
    """A packed checkpoint unpacks on a call of the whole model; measurements run only part of it."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    loaded = load_model("tiny-llama", dtype="float32")
    schemes = {
        info.name: IntegerGrid(3 + i % 4, 64, i % 2 == 0)
        for i, info in enumerate(loaded.layout.linears(loaded.model))
    }
    export(loaded, schemes, tmp_path / "packed")
    export(loaded, schemes, tmp_path / "dense", DenseExporter())
    tokens = torch.randint(3, 8000, (3, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    data = CalibrationSet(tokens, mask, ("a", "a", "b"), "test", 0, "all")
    packed, dense = load_model(tmp_path / "packed"), load_model(tmp_path / "dense")
    assert measure_perplexity(packed, data) == measure_perplexity(dense, data)
    assert measure_divergence(load_model(tmp_path / "packed"), dense, data)["kl"] == pytest.approx(
        0, abs=1e-9
    )
    assert checkpoint_size(tmp_path / "packed")["bytes"] < 0.5 * checkpoint_size(tmp_path / "dense")["bytes"]
    state = load_file(tmp_path / "packed" / "model.safetensors")
    assert sum(value.nbytes for value in state.values()) == checkpoint_size(tmp_path / "packed")["data_bytes"]
