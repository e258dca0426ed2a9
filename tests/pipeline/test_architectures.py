"""Causal architectures of transformers: quantized, exported, loaded by stock transformers in another process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from round_trips import load_elsewhere, quantize, write
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rco.models.architectures import TESTED, TESTED_WITH, UNTESTED
from rco.models.loading import wrap_model
from rco.testing.tiny_models import tiny_image_model

# Linear attention with experts, a state-space model whose weights are read at load, blocks that return tuples, and
# experts that stay in one stack.
SHARE = ("qwen3_5_moe_text", "mamba", "bloom", "jetmoe")


def check(name, folder, written, found):
    assert found["error"] is None, found["error"]
    assert not found["lost"]
    assert written["packed"] > 0
    assert written["loss"] > 0
    assert torch.isfinite(written["gradient"]).all()
    assert written["gradient"].abs().sum() > 0
    assert written["embedding"] == (name != "inkling_text")  # a table of its own kind
    assert bool(written["packed_experts"]) == TESTED[name].packed_experts
    assert bool(written["unread"]) == TESTED[name].unread_experts
    assert (written["experts"] > 0 and not written["packed_experts"]) == TESTED[name].stacked_experts
    # Bit for bit on a quiet machine; other kernels may be picked where other tests ran before in the process.
    tolerance = 1e-5 * float(written["logits"].abs().max())
    assert float((found["logits"] - written["logits"]).abs().max()) <= tolerance


@pytest.mark.filterwarnings("ignore")
def test_a_share_of_the_architectures(tmp_path):
    written = {name: write(name, tmp_path / name, dense=TESTED[name].dense) for name in SHARE}
    found = load_elsewhere([tmp_path / name / "model" for name in SHARE])
    for (name, each), there in zip(written.items(), found, strict=True):
        check(name, tmp_path / name, each, there)


def check_widths(names, folder):
    written = {name: write(name, folder / name, serve="any") for name in names}
    found = load_elsewhere([folder / name / "model" for name in names], own_code=True)
    for (name, each), there in zip(written.items(), found, strict=True):
        assert there["error"] is None, f"{name}: {there['error']}"
        assert not there["lost"], name
        widths = {group.widths for group in each["plan"].groups}
        assert (4, 8) in widths
        assert each["packed_experts"]
        torch.testing.assert_close(there["logits"], each["logits"], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore")
def test_experts_with_a_width_each_load_with_the_code_in_the_checkpoint(tmp_path):
    # Found in the model: names w1, w2 and w3, stacked and transposed tensors, experts without a gate.
    check_widths(["minimax", "aria_text", "nemotron_h"], tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_experts_of_every_architecture_can_have_a_width_each(tmp_path):
    check_widths([n for n, e in TESTED.items() if e.packed_experts or e.stacked_experts], tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("architectures")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(0, len(TESTED), 10))
def test_every_architecture(part, folder):
    names = list(TESTED)[part : part + 10]
    written = {name: write(name, folder / name, dense=TESTED[name].dense) for name in names}
    found = load_elsewhere([folder / name / "model" for name in names])
    for (name, each), there in zip(written.items(), found, strict=True):
        check(name, folder / name, each, there)


@pytest.mark.filterwarnings("ignore")
def test_only_the_language_part_of_a_model_with_images_is_quantized(tmp_path):
    model = tiny_image_model()
    model.save_pretrained(tmp_path / "original")
    (tmp_path / "original" / "preprocessor_config.json").write_text("{}")
    loaded = replace(wrap_model(model, name="images"), path=tmp_path / "original")
    written = quantize(loaded, tmp_path)
    names = [info.name for info in written["plan"].linears]
    assert names
    assert all(name.startswith(("model.language_model.", "lm_head")) for name in names)
    assert written["embedding"]
    (found,) = load_elsewhere([tmp_path / "model"], "AutoModelForImageTextToText")
    assert found["error"] is None, found["error"]
    assert found["class"] == type(model).__name__
    assert not found["lost"]
    torch.testing.assert_close(found["logits"], written["logits"], rtol=1e-5, atol=1e-5)
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()
    state = load_file(tmp_path / "model" / "model.safetensors")
    vision = {name: value for name, value in model.state_dict().items() if ".visual." in name}
    assert vision
    for name, value in vision.items():
        assert torch.equal(state[name], value), name


def test_the_list_is_complete_for_the_version_that_it_names():
    assert len(TESTED) >= 60
    assert sum(entry.packed_experts for entry in TESTED.values()) >= 15
    assert not TESTED.keys() & UNTESTED.keys()
    if transformers.__version__ == TESTED_WITH:
        assert TESTED.keys() | UNTESTED.keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
