"""Models by name and by folder, and what goes wrong with them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rco.models import loading
from rco.models.capture import BlockInputs
from rco.models.checkpoint_files import check_safetensors, file_sha256, folder_fingerprint, weight_files
from rco.models.loading import (
    check_packing,
    load_model,
    locate_model,
    outline_model,
    pick_device,
    wrap_model,
)
from rco.models.zoo import ModelError, find_builtin
from rco.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A sharded checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=8192).save_pretrained(folder, max_shard_size="200KB")
    for file in find_builtin("tiny-llama").locate()[0].glob("tokenizer*"):
        shutil.copy(file, folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_builtin_model_is_ready_for_work():
    loaded = load_model("tiny-llama")
    assert loaded.name == "tiny-llama"
    assert loaded.dtype == torch.bfloat16
    assert loaded.device == torch.device("cpu")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert len(loaded.layout.linears(loaded.model)) == 56
    assert loaded.layout.head(loaded.model).tied
    ids = torch.tensor([loaded.tokenizer("The capital of France").input_ids])
    assert loaded.model(ids).logits.shape == (1, ids.shape[1], 8192)


def test_the_builtin_moe_model_knows_its_language():
    loaded = load_model("tiny-moe", dtype="float32")
    assert loaded.dtype == torch.float32
    ids = torch.tensor([loaded.tokenizer("It was the best of times, it was the worst of").input_ids])
    loss = loaded.model(ids, labels=ids).loss
    assert loss < 6  # a random model has log(8192) = 9


def test_shards_and_a_relative_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    loaded = load_model("copy", dtype=torch.float32)
    assert loaded.path == folder
    reference = tiny_model("llama", vocab_size=8192)
    for name, value in reference.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_types(folder):
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    edit_config(folder, dtype="float16")
    assert load_model(folder).dtype == torch.float32
    with pytest.raises(ModelError, match="Unknown dtype 'int8'; use auto, bfloat16"):
        load_model(folder, dtype="int8")


def test_the_fingerprint_follows_the_content_alone(folder, tmp_path):
    loaded = load_model(folder)
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    edit_config(moved, transformers_version="0")
    assert load_model(moved).fingerprint == loaded.fingerprint
    edit_config(moved, rms_norm_eps=0.1)
    assert load_model(moved).fingerprint != loaded.fingerprint
    shutil.copy(folder / "config.json", moved)
    shard = sorted(moved.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    assert folder_fingerprint(moved, weight_files(moved)) != loaded.fingerprint


def test_a_blob_of_the_hub_cache_is_known_by_its_name(tmp_path):
    blob = tmp_path / ("0" * 64)
    blob.write_bytes(b"weights")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert file_sha256(link) == "0" * 64
    assert file_sha256(blob) != "0" * 64


def test_a_wrapped_model():
    model = tiny_model("qwen3").train()
    loaded = wrap_model(model, name="mine")
    assert not model.training
    assert loaded.layout.model_type == "qwen3"
    assert loaded.path is None
    assert loaded.fingerprint == wrap_model(tiny_model("qwen3")).fingerprint
    assert loaded.fingerprint != wrap_model(tiny_model("qwen3", seed=1)).fingerprint


# ---------------------------------------------------------------------- faults


def test_names_that_are_nothing(tmp_path):
    with pytest.raises(ModelError, match=r"Did you mean tiny-llama"):
        load_model("tiny-lama")
    with pytest.raises(ModelError, match=r"There is no folder or file .*missing"):
        load_model(tmp_path / "missing")
    with pytest.raises(ModelError, match="There is no folder or file a b c"):
        load_model("a b c")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"is a file; pass a \.gguf file, or the folder"):
        load_model(tmp_path / "weights.bin")


def test_a_folder_named_like_a_builtin_needs_a_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    folder.rename(folder.parent / "tiny-llama")
    assert load_model("./tiny-llama").layout.model_type == "llama"
    assert load_model("./tiny-llama").fingerprint != load_model("tiny-llama").fingerprint


def test_the_hub_out_of_reach(monkeypatch, tmp_path):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(
        ModelError, match=r"someone/model is not on this machine and the Hub cannot be reached"
    ):
        load_model("someone/model")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", r"someone/model is gated: accept its terms .*`hf auth login` or set HF_TOKEN"),
        ("RevisionNotFoundError", r"someone/model has no revision 'v9': pass a branch, a tag or a commit"),
        (
            "RepositoryNotFoundError",
            r"no model 'someone/model', or it is private: .*`hf auth login` or",
        ),
        (
            "HfHubHTTPError",
            r"not on this machine and the Hub cannot be reached: download it where",
        ),
    ],
)
def test_what_the_hub_refuses_is_said_with_a_remedy(monkeypatch, kind, message):
    from huggingface_hub import errors

    refusal = getattr(errors, kind)

    def refuse(*args, **kwargs):
        raise refusal.__new__(refusal)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match=message):
        load_model("someone/model", revision="v9")


def test_code_of_a_hub_model_is_not_run_unless_asked_for(monkeypatch, folder):
    (folder / "own.py").write_text("raise SystemExit('the code of the model ran')")
    edit_config(
        folder, model_type="own", architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.OwnConfig"}
    )
    asked = []

    def snapshot(hub_id, *, allow_patterns, **settings):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for load in (load_model, outline_model):
        with pytest.raises(ModelError, match="needs the Python code it ships; pass `trust_remote_code=True`"):
            load("someone/model")


def test_a_revision_of_a_hub_model_is_loaded_from_its_snapshot(monkeypatch, folder):
    asked = []

    def snapshot(hub_id, *, revision=None, allow_patterns, ignore_patterns=None):
        asked.append((hub_id, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load_model("someone/model", revision="v2").name == "someone/model"
    assert asked[0] == ("someone/model", "v2", ["config.json"])
    assert {each[:2] for each in asked} == {("someone/model", "v2")}
    assert len(asked) > 1
    # The plan of a dry run needs no weights.
    asked.clear()
    outline_model("someone/model")
    assert asked == [("someone/model", None, ["config.json"])]


def test_a_gguf_file_is_a_model(monkeypatch, tmp_path):
    needed = []
    monkeypatch.setattr("rco.models.loading.require", lambda package, purpose: needed.append(package))
    monkeypatch.setattr("rco.models.loading.GGUFReader", lambda path: None)
    (tmp_path / "a.gguf").touch()
    assert locate_model(tmp_path / "a.gguf") == (tmp_path, "a.gguf")
    assert locate_model(tmp_path) == (tmp_path, "a.gguf")
    assert needed == ["gguf", "gguf"]
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF files.*pass one of them"):
        locate_model(tmp_path)


def test_an_outline_has_the_layout_of_the_model_and_no_weights(folder):
    outline, loaded = outline_model(folder), load_model(folder)
    assert all(parameter.is_meta for parameter in outline.model.parameters())
    assert outline.layout == loaded.layout
    assert (outline.device, outline.dtype) == (loaded.device, loaded.dtype)
    described = [
        [(i.name, i.in_features, i.out_features) for i in each.layout.linears(each.model, include_head=True)]
        for each in (outline, loaded)
    ]
    assert described[0] == described[1]
    with pytest.raises(ModelError, match="without weights"):
        _ = outline.fingerprint


def test_a_missing_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"lacks 1 of its \d+ shards: {shard.name}"):
        load_model(folder)


@pytest.mark.parametrize("keep", [4, 20, 0.5, -1])
def test_a_truncated_shard_is_named(folder, keep):
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[: int(keep * len(content)) if keep == 0.5 else keep])
    with pytest.raises(ModelError, match=rf"{shard.name} is truncated"):
        load_model(folder)


def test_a_file_that_is_no_safetensors(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes((8).to_bytes(8, "little") + b"nonsense" + b"\0" * 50)
    with pytest.raises(ModelError, match="header is not JSON"):
        check_safetensors(shard)
    shard.write_bytes((2).to_bytes(8, "little") + b"{}" + b"extra")
    with pytest.raises(ModelError, match="is damaged: it has 15 bytes, its header says 10"):
        check_safetensors(shard)


def test_no_weights(folder):
    for shard in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        shard.unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load_model(folder)


def test_tensors_that_are_not_in_the_checkpoint(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    shard = folder / index["weight_map"].pop(name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(shard)
    tensors.pop(name)
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lacks 1 tensors of the model, first {name}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "not a decoder-only language model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a decoder-only language model"),
        (
            {"model_type": "mamba9", "architectures": ["Mamba9ForCausalLM"]},
            "does not know the architecture 'mamba9'",
        ),
        ({"model_type": "own", "auto_map": {}, "architectures": None}, "needs the Python code it ships"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_unsupported_configs(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_broken_config_and_a_missing_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer that can be read"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_model(folder)


@pytest.mark.parametrize(
    ("cuda", "mps", "taken"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_devices(monkeypatch, cuda, mps, taken):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert pick_device("auto").type == taken
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(ModelError, match="Unknown device 'gpu'; use auto, cpu, cuda, cuda:N or mps"):
        pick_device("gpu")
    if not cuda:
        with pytest.raises(ModelError, match="no cuda device"):
            pick_device("cuda")


PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def packed_config(*widths):
    groups = {f"group_{bits}": {"weights": {"num_bits": bits}} for bits in widths}
    return {"quantization_config": {**PACKED, "config_groups": groups}}


@pytest.mark.parametrize(
    "installed", ["0.15.0.1", "0.17.0", "0.17.1", "0.18.0", "0.18.1.dev3", "0.20.0", "1.0"]
)
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_widths_need_a_reader_that_knows_their_layout(monkeypatch, installed, bits):
    monkeypatch.setattr("rco.requirements.version", {"compressed-tensors": installed}.__getitem__)
    if bits in (3, 5, 6, 7) and installed.startswith(("0.15", "0.17")):
        message = rf"of {bits} bits.* compressed-tensors 0\.18 or later; installed is {installed}: run pip"
        with pytest.raises(ModelError, match=message):
            check_packing(packed_config(4, bits), "mine")
    else:
        check_packing(packed_config(4, bits), "mine")
    check_packing({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "another's")
    check_packing({}, "plain")


def test_integers_beside_another_layout_need_that_reader_too(monkeypatch):
    monkeypatch.setattr("rco.requirements.version", {"compressed-tensors": "0.17.1"}.__getitem__)
    for layout, bits in (("pack-quantized", 3), ("pack-quantized", 4), ("nvfp4-pack-quantized", 6)):
        groups = {
            "group_0": {"weights": {"num_bits": 8}, "format": "float-quantized"},
            "group_1": {"weights": {"num_bits": bits}, "format": layout},
        }
        config = {"quantization_config": {**PACKED, "format": "mixed-precision", "config_groups": groups}}
        if bits == 3:
            with pytest.raises(ModelError, match=r"of 3 bits.* compressed-tensors 0\.18 or later"):
                check_packing(config, "mine")
        else:
            check_packing(config, "mine")


def test_a_packed_checkpoint_without_its_package(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("rco.requirements.version", missing)
    with pytest.raises(
        ModelError, match=r"needs compressed-tensors, which .* run pip install 'rco\[export\]'"
    ):
        check_packing(packed_config(4), "mine")


def test_the_package_asks_for_the_reader_that_it_needs():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    asked = re.findall(r'"compressed-tensors>=([\d.]+)"', project)
    assert asked == [loading._DENSE_PACKING]


def test_importing_these_packages_imports_no_model_library():
    code = (
        "import sys, rco.models.loading, rco.models.capture, rco.testing.tiny_models, rco.data.calibration;"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'datasets', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["cpu", None])
def test_blocks_in_turn_on_a_gpu(storage):
    loaded = load_model("tiny-llama", device="cuda")
    tokens = torch.randint(3, 8000, (5, 64))
    inputs = BlockInputs.capture(loaded.model, loaded.layout, tokens, batch_size=2, storage=storage)
    assert inputs.hidden.device.type == ("cpu" if storage else "cuda")
    for _ in loaded.layout.blocks(loaded.model):
        inputs.advance()
    with torch.no_grad():
        whole = [loaded.layout.final_hidden(loaded.model, tokens[i : i + 2].cuda()) for i in range(0, 5, 2)]
    assert torch.equal(inputs.finish().cpu(), torch.cat(whole).cpu())
