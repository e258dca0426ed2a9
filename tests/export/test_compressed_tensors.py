import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from named_architectures import NAMED
from safetensors import safe_open

from rco.compression.file_size import (
    FileLayout,
    checkpoint_bytes,
    fixed_bytes,
    option_bytes,
)
from rco.export import CompressedTensorsExporter, ExportError, check_exportable, validate_for_engine
from rco.export.compressed_tensors import quantization_config
from rco.export.exporter import ExportRequest, atomic_folder
from rco.export.writer import verify_checkpoint, write_checkpoint
from rco.formats.integer import IntegerGrid, packed_words
from rco.formats.original import ORIGINAL
from rco.models.layout import LinearInfo
from rco.models.loading import load_model, wrap_model
from rco.models.precision import computing_in
from rco.models.zoo import ModelError
from rco.testing.tiny_models import tiny_model

EXPORTER = CompressedTensorsExporter()
SCHEMES = [
    IntegerGrid(bits, size, symmetric)
    for bits in range(2, 9)
    for size in (None, 8, 16)
    for symmetric in (True, False)
]


def packed_model(rtn, loaded, schemes):
    linears = {info.name: info for info in loaded.layout.linears(loaded.model, include_head=True)}
    return {
        name: rtn(linears[name].weight, scheme.bits, scheme.group_size, scheme.symmetric)
        for name, scheme in schemes.items()
        if scheme != ORIGINAL
    }


def random_schemes(loaded, seed, *, head=False, choices=SCHEMES):
    generator = random.Random(seed)
    linears = loaded.layout.linears(loaded.model, include_head=head)
    return {info.name: generator.choice([*choices, ORIGINAL]) for info in linears}


def reload(path):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def logits(model, vocabulary=90):
    tokens = torch.randint(3, vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits


def check_round_trip(rtn, loaded, schemes, out):
    """Stock transformers decodes the store's values, and computes what the search's model computes."""
    weights = packed_model(rtn, loaded, schemes)
    summary = EXPORTER.export(ExportRequest(loaded, weights, out))
    model = reload(out)
    got = logits(model)
    for name, packed in weights.items():
        decoded = model.get_submodule(name).weight
        assert decoded.dtype == loaded.dtype
        assert torch.equal(decoded, packed.dequantize()), name
    expected = _with_weights(loaded, weights)
    assert torch.equal(got, expected)
    return summary


def _with_weights(loaded, weights):
    """Logits of the original model with decoded weights in place of its own; then the originals again."""
    linears = {info.name: info for info in loaded.layout.linears(loaded.model, include_head=True)}
    saved = {}
    for name, packed in weights.items():
        parameter = linears[name].module.weight
        saved[name] = parameter
        linears[name].module.weight = torch.nn.Parameter(packed.dequantize(), requires_grad=False)
    try:
        return logits(loaded.model)
    finally:
        for name, parameter in saved.items():
            linears[name].module.weight = parameter


BF16_MODELS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "gpt_neox", "qwen3_moe"]


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [(name, torch.bfloat16) for name in BF16_MODELS]
    + [("llama", torch.float32), ("qwen3_moe", torch.float32)],
)
def test_stock_transformers_loads_it_bit_for_bit(rtn, tmp_path, model_type, dtype):
    loaded = wrap_model(tiny_model(model_type, dtype=dtype))
    check_round_trip(rtn, loaded, random_schemes(loaded, model_type), tmp_path / "out")


def test_an_older_reader_is_refused_before_it_fails(rtn, tmp_path, monkeypatch):
    from rco import requirements

    loaded = load_model("tiny-llama")
    EXPORTER.export(
        ExportRequest(
            loaded,
            packed_model(rtn, loaded, {"model.layers.0.mlp.up_proj": IntegerGrid(3, 8, symmetric=True)}),
            tmp_path / "out",
        )
    )
    reported = requirements.version
    monkeypatch.setattr(
        requirements,
        "version",
        lambda name: "0.17.1" if name == "compressed-tensors" else reported(name),
    )
    with pytest.raises(ModelError, match=r"weights of 3 bits, .* installed is 0\.17\.1"):
        load_model(tmp_path / "out")


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_output_layer(rtn, tmp_path, tied):
    loaded = wrap_model(tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=tied))
    schemes = {
        "lm_head": IntegerGrid(8, 16, symmetric=True),
        "model.layers.0.mlp.up_proj": IntegerGrid(3, 8, False),
    }
    check_round_trip(rtn, loaded, schemes, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head" not in config["quantization_config"]["ignore"]


def test_every_scheme_decodes(rtn, tmp_path):
    loaded = wrap_model(tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=6))
    names = [info.name for info in loaded.layout.linears(loaded.model)]
    assert len(names) == len(SCHEMES)
    check_round_trip(rtn, loaded, dict(zip(names, SCHEMES, strict=True)), tmp_path / "out")


def test_built_in_model_with_tokenizer_and_shards(rtn, tmp_path):
    from transformers import AutoTokenizer

    loaded = load_model("tiny-llama")
    schemes = random_schemes(
        loaded,
        1,
        choices=[
            IntegerGrid(2, 64, False),
            IntegerGrid(3, 64, symmetric=True),
            IntegerGrid(4, symmetric=True),
            IntegerGrid(8, 32, symmetric=True),
        ],
    )
    weights = packed_model(rtn, loaded, schemes)
    summary = EXPORTER.export(ExportRequest(loaded, weights, tmp_path / "out", max_shard_size="1MB"))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    assert summary.total_bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    model = reload(tmp_path / "out")
    with torch.no_grad():
        model(
            torch.tensor([[3]])
        )  # decodes the weights; one token, as CPUs without bfloat16 take long for it
    for name, packed in weights.items():
        decoded = model.get_submodule(name).weight
        assert decoded.dtype == torch.bfloat16
        assert torch.equal(decoded, packed.dequantize()), name
    loaded.model.load_state_dict(
        {f"{name}.weight": w.dequantize() for name, w in weights.items()}, strict=False
    )
    with computing_in(model, torch.float32), computing_in(loaded.model, torch.float32):
        assert torch.equal(logits(model, 8000), logits(loaded.model, 8000))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hello there").input_ids == loaded.tokenizer("hello there").input_ids


@pytest.mark.parametrize("seed", range(12))
def test_size_is_predicted_exactly(rtn, tmp_path, seed):
    tied = seed % 2 == 0
    loaded = wrap_model(tiny_model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=tied))
    limit = ["5GB", 10_000, 3_000][seed % 3]
    schemes = random_schemes(loaded, seed, head=seed % 4 < 2)
    linears = loaded.layout.linears(loaded.model, include_head=True)
    weights = packed_model(rtn, loaded, schemes)
    summary = EXPORTER.export(ExportRequest(loaded, weights, tmp_path / "out", max_shard_size=limit))
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written == summary.total_bytes == checkpoint_bytes(loaded.model, linears, schemes, limit)
    assert summary.tensors == {
        name: tensor.nbytes
        for path in (tmp_path / "out").glob("*.safetensors")
        for name, tensor in _tensors(path)
    }
    layout = FileLayout.of(loaded.model, limit)
    chosen = [info for info in linears if info.name in weights]
    bound = fixed_bytes(loaded.model, list(weights), layout)
    bound += sum(option_bytes(info, schemes[info.name], layout) for info in chosen)
    assert written <= bound


def _tensors(path):
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def test_nothing_quantized_is_a_plain_checkpoint(rtn, tmp_path):
    loaded = wrap_model(tiny_model("llama"))
    check_round_trip(rtn, loaded, {}, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_the_library_validates_the_config(rtn):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    loaded = wrap_model(tiny_model("llama"))
    schemes = random_schemes(loaded, 3)
    config = quantization_config(loaded, schemes)
    parsed = quantization.QuantizationConfig.model_validate(config)
    found = {}
    for group in parsed.config_groups.values():
        for target in group.targets:
            assert target not in found
            size = group.weights.group_size
            found[target] = IntegerGrid(group.weights.num_bits, size, group.weights.symmetric)
    expected = {
        info.name: schemes[info.name].on(info.in_features)
        for info in loaded.layout.linears(loaded.model)
        if schemes[info.name] != ORIGINAL
    }
    assert found == expected
    dense = {name for name, scheme in schemes.items() if scheme == ORIGINAL}
    assert set(parsed.ignore) == dense | {"lm_head"}


# ---------------------------------------------------------------------- refusals


def test_conv1d_names_the_dense_format(rtn, tmp_path):
    loaded = wrap_model(tiny_model("gpt2"))
    linears = loaded.layout.linears(loaded.model)
    with pytest.raises(ExportError, match=r"Conv1D.*format 'dense'"):
        check_exportable(linears, {linears[0].name: [ORIGINAL, IntegerGrid(4, symmetric=True)]})
    check_exportable(linears, {linears[0].name: ORIGINAL})
    weights = packed_model(rtn, loaded, {linears[0].name: IntegerGrid(4, symmetric=True)})
    with pytest.raises(ExportError, match="format 'dense'"):
        EXPORTER.export(ExportRequest(loaded, weights, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_ragged_rows_are_refused_in_advance_as_the_library_would_later(rtn, tmp_path):
    loaded = wrap_model(tiny_model("llama"))
    linears = loaded.layout.linears(loaded.model)
    with pytest.raises(ExportError, match="rows of 48, which groups of 20"):
        check_exportable(linears, {"model.layers.0.mlp.down_proj": IntegerGrid(4, 20, symmetric=True)})
    check_exportable(
        linears,
        {
            "model.layers.0.mlp.down_proj": [
                IntegerGrid(4, 24, symmetric=True),
                IntegerGrid(4, 64, symmetric=True),
                IntegerGrid(2, symmetric=True),
            ]
        },
    )
    with pytest.raises(ExportError, match="no linear 'elsewhere'"):
        check_exportable(linears, {"elsewhere": IntegerGrid(4, symmetric=True)})


def test_foreign_weights_are_refused(rtn, tmp_path):
    loaded = wrap_model(tiny_model("llama", dtype=torch.bfloat16))
    name = "model.layers.0.mlp.down_proj"
    with pytest.raises(ExportError, match="another model"):
        EXPORTER.export(ExportRequest(loaded, {name: rtn(torch.randn(8, 16), 4, 8, True)}, tmp_path / "out"))
    with pytest.raises(ExportError, match="other values than in the search"):
        EXPORTER.export(ExportRequest(loaded, {name: rtn(torch.randn(32, 48), 4, 8, True)}, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- the folder


def test_a_full_folder_is_kept_unless_told_otherwise(rtn, tmp_path):
    loaded = wrap_model(tiny_model("llama"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(ExportError, match="overwrite=True"):
        EXPORTER.export(ExportRequest(loaded, {}, out))
    assert (out / "precious.txt").read_text() == "mine"
    EXPORTER.export(ExportRequest(loaded, {}, out, overwrite=True))
    assert not (out / "precious.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    with pytest.raises(ExportError, match="is a file"):
        EXPORTER.export(ExportRequest(loaded, {}, out / "config.json"))


def _fail_midway(out):
    with atomic_folder(out) as folder:
        (folder / "half").write_text("x")
        raise KeyError


def test_an_error_leaves_nothing_and_keeps_the_old(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyError):
        _fail_midway(out)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ExportError, match="free"), atomic_folder(out, needed_bytes=2**80):
        pass
    with pytest.raises(ExportError, match="Choose a writable folder"), atomic_folder("/proc/nowhere/out"):
        pass
    with pytest.raises(ExportError, match="No space left"), atomic_folder(out):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_exports_are_cleared(tmp_path):
    out = tmp_path / "out"
    script = (
        "import sys, time\n"
        "from rco.export.exporter import atomic_folder\n"
        "with atomic_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'half').write_text('x')\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(out)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    assert not out.exists()
    with atomic_folder(tmp_path / "other"):
        pass
    assert len(list(tmp_path.iterdir())) == 2  # a living export's folder is left alone
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not out.exists()
    with atomic_folder(out) as folder:
        (folder / "whole").write_text("y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_replacement_that_was_killed_midway_is_undone(tmp_path):
    import socket

    out = tmp_path / "out"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old = tmp_path / f".out.partial-{socket.gethostname()}-{dead.pid}.old"
    old.mkdir()
    (old / "precious").write_text("mine")
    with pytest.raises(ExportError, match="not empty"), atomic_folder(out):
        pass
    assert (out / "precious").read_text() == "mine"


def test_damage_is_noticed(tmp_path):
    from rco.compression.file_size import TensorSpec

    specs = [TensorSpec("a", torch.int32, (4,)), TensorSpec("b", torch.int64, (2,))]
    values = {"a": torch.arange(4, dtype=torch.int32), "b": torch.arange(2)}
    write_checkpoint(tmp_path, specs, values.__getitem__)
    path = tmp_path / "model.safetensors"
    assert verify_checkpoint(tmp_path, specs) == path.stat().st_size
    assert all(torch.equal(value, values[name]) for name, value in _tensors(path))
    with pytest.raises(ExportError, match="lacks 1 tensors, first c"):
        verify_checkpoint(tmp_path, [*specs, TensorSpec("c", torch.int8, ())])
    with pytest.raises(ExportError, match="holds a as"):
        verify_checkpoint(tmp_path, specs[1:])
    with pytest.raises(ExportError, match=r"b should be torch\.int64"):
        write_checkpoint(tmp_path, specs, lambda name: torch.zeros(3))
    write_checkpoint(tmp_path, specs, values.__getitem__)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ExportError, match=r"bytes instead of .* as in its header"):
        verify_checkpoint(tmp_path, specs)


# ---------------------------------------------------------------------- engines


def _config(schemes, model_type="llama"):
    loaded = wrap_model(tiny_model(model_type))
    return {"model_type": model_type, "quantization_config": quantization_config(loaded, schemes)}


def _all(scheme, model_type="llama"):
    loaded = wrap_model(tiny_model(model_type))
    return {info.name: scheme for info in loaded.layout.linears(loaded.model)}


@pytest.mark.parametrize(
    ("scheme", "vllm", "marlin"),
    [
        (IntegerGrid(4, 16, symmetric=True), True, False),
        (IntegerGrid(4, symmetric=True), True, True),
        (IntegerGrid(8, symmetric=True), True, True),
        (IntegerGrid(3, symmetric=True), True, False),
        (IntegerGrid(1, symmetric=True), False, False),
        (IntegerGrid(4, None, False), True, True),
        (IntegerGrid(8, None, False), True, False),
        (IntegerGrid(3, None, False), False, False),
    ],
)
def test_engines_take_their_widths(scheme, vllm, marlin):
    config = _config(_all(scheme))
    assert validate_for_engine(config, "transformers") == []
    assert (validate_for_engine(config, "vllm") == []) is vllm
    assert (validate_for_engine(config, "vllm-marlin") == []) is marlin
    assert validate_for_engine(config, "any") == []


def test_merged_modules_need_one_scheme():
    mixed = _all(IntegerGrid(4, symmetric=True))
    mixed["model.layers.1.self_attn.k_proj"] = IntegerGrid(8, symmetric=True)
    (violation,) = validate_for_engine(_config(mixed), "vllm")
    assert "model.layers.1.self_attn.q_proj" in violation
    assert "4 bits" in violation
    assert "8 bits" in violation
    left = _all(IntegerGrid(4, symmetric=True))
    left["model.layers.2.mlp.up_proj"] = ORIGINAL  # on the ignore list, its partner is not
    (violation,) = validate_for_engine(_config(left), "vllm-marlin")
    assert "unquantized" in violation
    assert validate_for_engine(_config(left), "transformers") == []
    free = _all(IntegerGrid(4, symmetric=True))
    free["model.layers.1.self_attn.o_proj"] = IntegerGrid(8, symmetric=True)
    free["model.layers.1.mlp.down_proj"] = ORIGINAL
    assert validate_for_engine(_config(free), "vllm") == []


def test_nothing_is_written_that_the_engine_refuses(rtn, tmp_path):
    loaded = wrap_model(tiny_model("llama"))
    weights = packed_model(rtn, loaded, {"model.layers.0.self_attn.q_proj": IntegerGrid(4, symmetric=True)})
    with pytest.raises(ExportError, match=r"vllm would not load this checkpoint: .*q_proj"):
        EXPORTER.export(ExportRequest(loaded, weights, tmp_path / "out", engine="vllm"))
    assert not list(tmp_path.iterdir())
    EXPORTER.export(ExportRequest(loaded, weights, tmp_path / "out", engine="transformers"))


def test_configs_of_other_hands():
    config = _config(_all(IntegerGrid(4, symmetric=True)))
    groups = config["quantization_config"]["config_groups"]
    groups["late"] = {
        **groups["group_0"],
        "targets": ["re:.*q_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
    }
    found = validate_for_engine(config, "vllm")
    assert any("model.layers.0.self_attn.q_proj: matched by group_0 and late" in line for line in found)
    del groups["late"]
    names = [*_all(IntegerGrid(4, symmetric=True)), "model.layers.9.mlp.up_proj"]
    found = validate_for_engine(config, "vllm", names)
    assert found == ["model.layers.9.mlp.up_proj: neither a target nor on the ignore list."]
    config["quantization_config"]["format"] = "int-quantized"
    found = validate_for_engine(config, "transformers")
    assert found == ["format is 'int-quantized', its groups need 'pack-quantized'."]
    assert validate_for_engine({"model_type": "llama"}, "vllm") == []
    with pytest.raises(ValueError, match="Unknown engine 'vlm'"):
        validate_for_engine(config, "vlm")


@pytest.mark.parametrize("model_type", NAMED)
def test_every_layer_is_a_target_or_ignored(model_type):
    """vLLM stops at a linear that the config does not mention."""
    import re

    loaded = wrap_model(tiny_model(model_type))
    linears = [info for info in loaded.layout.linears(loaded.model) if not info.transposed]
    config = quantization_config(loaded, {info.name: IntegerGrid(4, symmetric=True) for info in linears})
    if config is None:
        return
    targets = {target for group in config["config_groups"].values() for target in group["targets"]}
    patterns = [entry[3:] for entry in config["ignore"] if entry.startswith("re:")]
    for name, module in loaded.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert (name in targets) != (name in config["ignore"]), name
        if type(module).__name__.endswith("Experts") and any(p.ndim == 3 for p in module.parameters()):
            assert any(re.match(pattern, f"{name}.0.gate_proj") for pattern in patterns), name


@pytest.mark.parametrize("rows", [4, 8, 9, 16])
def test_zero_points_of_a_single_word_are_refused_as_the_library_cannot_read_them(rows):
    """Against compressed-tensors itself: 4-bit zero points of 8 rows or fewer are one word per group."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    packed = torch.zeros(packed_words(rows, 4), 2, dtype=torch.int32)
    try:
        helpers.unpack_from_int32(packed, 4, torch.Size((rows, 2)), packed_dim=0)
        readable = True
    except RuntimeError:
        readable = False
    layer = torch.nn.Linear(16, rows)
    info = LinearInfo("small", layer, "small", "attention", 0, "small", 16, rows, False, True)
    check_exportable(
        [info],
        {"small": [IntegerGrid(4, 8, symmetric=True), IntegerGrid(4, None, False), IntegerGrid(2, 8, False)]},
    )
    if readable:
        check_exportable([info], {"small": IntegerGrid(4, 8, False)})
    else:
        with pytest.raises(ExportError, match="8 rows or fewer"):
            check_exportable([info], {"small": IntegerGrid(4, 8, False)})
    assert readable == (rows > 8)
