import json

import pytest
import torch
import transformers
from safetensors import safe_open

from rco.export.exporter import ExportError
from rco.export.pruned_experts import EXPERT_MAP_FILE, export_pruned, load_pruned
from rco.models.moe.gates import expert_gates
from rco.models.moe.layers import moe_layers
from rco.testing.tiny_models import TINY_MOE_NAMES, random_keep, tiny_moe, tiny_tokens

CONSTANT = [name for name in TINY_MOE_NAMES if name.startswith(("deepseek_v3", "glm4_moe", "gpt_oss"))]


@pytest.fixture(autouse=True)
def module_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def masked_logits(model, masks, tokens):
    with torch.no_grad(), expert_gates(model) as gates:
        gates.set_gates(masks)
        return model(tokens).logits


def assert_same_logits(model, tokens, expected):
    with torch.no_grad():
        got = model.eval()(tokens).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def same_count(layers, count_per_group):
    """The same number in every layer and every group."""
    masks = []
    for number, layer in enumerate(layers):
        sizes = layer.rule.group_sizes if layer.rule.grouped else (layer.num_experts,)
        generator = torch.Generator().manual_seed(number)
        masks.append(
            torch.cat([torch.randperm(size, generator=generator) < count_per_group for size in sizes])
        )
    return masks


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_same_count_everywhere_is_a_stock_checkpoint(name, tmp_path):
    model, tokens = tiny_moe(name), tiny_tokens()
    layers = moe_layers(model)
    count = 2 if layers[0].rule.grouped else layers[0].top_k + 2
    masks = same_count(layers, count)
    expected = masked_logits(model, masks, tokens)
    report = export_pruned(model, masks, tmp_path / "out", max_shard_size="60KB")
    assert report.shape == "stock"
    assert report.reason is None
    assert not list((tmp_path / "out").glob("*.py"))
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(stock) is type(model)
    assert {layer.num_experts for layer in moe_layers(stock)} == {int(masks[0].sum())}
    assert_same_logits(stock, tokens, expected)
    assert_same_logits(load_pruned(tmp_path / "out"), tokens, expected)


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_different_counts_load_by_us_and_by_the_code_in_the_checkpoint(name, tmp_path):
    model, tokens = tiny_moe(name), tiny_tokens()
    masks = random_keep(moe_layers(model), 7)
    masks[-1][:] = True  # certainly different from the others
    expected = masked_logits(model, masks, tokens)
    out = tmp_path / "out"
    report = export_pruned(model, masks, out, max_shard_size="60KB")
    assert report.shape == "per_layer"
    assert report.counts == tuple(int(mask.sum()) for mask in masks)
    ours = load_pruned(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(theirs).__module__.startswith("transformers_modules")
    for loaded in (ours, theirs):
        assert tuple(layer.num_experts for layer in moe_layers(loaded)) == report.counts
        assert loaded.config._experts_implementation == model.config._experts_implementation
        assert_same_logits(loaded, tokens, expected)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [f"Pruned{type(model).__name__}"]
    assert [n for n in config["num_experts_per_layer"] if n] == list(report.counts)
    kept = json.loads((out / EXPERT_MAP_FILE).read_text())["kept"]
    assert list(kept.values()) == [mask.nonzero().squeeze(-1).tolist() for mask in masks]
    assert "rco" not in (out / "modeling_pruned_experts.py").read_text()
    # Experts lie on disk as the original checkpoints have them, which is what other engines read.
    names = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.0." in key for key in names) or name == "gpt_oss"


def test_a_pruned_checkpoint_can_be_saved_loaded_and_pruned_again(tmp_path):
    model, tokens = tiny_moe("deepseek_v3"), tiny_tokens()
    masks = random_keep(moe_layers(model), 7, spare=5)
    export_pruned(model, masks, tmp_path / "one")
    once = load_pruned(tmp_path / "one")
    again = random_keep(moe_layers(once), 8)
    expected = masked_logits(once, again, tokens)
    export_pruned(once, again, tmp_path / "two")
    assert_same_logits(load_pruned(tmp_path / "two"), tokens, expected)


@pytest.mark.parametrize("name", CONSTANT)
def test_padded_slots_never_win(name, tmp_path):
    model, tokens = tiny_moe(name), tiny_tokens()
    layers = moe_layers(model)
    masks = random_keep(layers, 7)
    if layers[0].rule.grouped:
        masks[0] = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1]).bool()
    masks[-1][:] = True
    expected = masked_logits(model, masks, tokens)
    report = export_pruned(model, masks, tmp_path / "out", padded=True)
    assert report.shape == "padded"
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(stock) is type(model)
    assert len({layer.num_experts for layer in moe_layers(stock)}) == 1
    assert_same_logits(stock, tokens, expected)
    for layer, mask in zip(moe_layers(stock), masks, strict=True):
        empty = layer.router.weight.abs().sum(-1) == 0
        assert int((~empty).sum()) == int(mask.sum())
        hidden = 100 * torch.randn(4096, 32)  # far beyond anything a norm lets through
        _, _, chosen = layer.router(hidden)
        assert not bool(empty[chosen].any())


@pytest.mark.parametrize("name", [name for name in TINY_MOE_NAMES if name not in CONSTANT])
def test_padding_is_refused_where_no_slot_could_be_kept_from_winning(name, tmp_path):
    model = tiny_moe(name)
    masks = random_keep(moe_layers(model), 7)
    masks[-1][:] = True
    with pytest.raises(ValueError, match=r"no bias.*per-layer counts"):
        export_pruned(model, masks, tmp_path / "out", padded=True)
    assert not list(tmp_path.glob("*out*"))


def test_padding_is_refused_where_groups_get_too_small(tmp_path):
    model = tiny_moe("deepseek_v3")
    lone = torch.tensor([1, 0, 0, 0] + [1] * 12).bool()
    with pytest.raises(ValueError, match="single expert in a group"):
        export_pruned(model, [lone, lone], tmp_path / "out", padded=True)
    emptied = torch.tensor([1, 1, 0, 0] + [0] * 8 + [1, 1, 1, 1]).bool()
    report = export_pruned(model, [emptied, torch.ones(16).bool()], tmp_path / "out", padded=True)
    assert report.shape == "padded"
    short = torch.tensor([1] * 4 + [0] * 12).bool()
    with pytest.raises(ValueError, match="fewer survivors"):
        export_pruned(model, [short, torch.ones(16).bool()], tmp_path / "other", padded=True)


def test_tied_weights_are_written_once(tmp_path):
    model = tiny_moe("qwen3_moe")
    export_pruned(model, random_keep(moe_layers(model)), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    loaded = load_pruned(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_nothing_half_written_and_nothing_overwritten(tmp_path, monkeypatch):
    model = tiny_moe("mixtral")
    masks = random_keep(moe_layers(model))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ExportError, match="not empty"):
        export_pruned(model, masks, tmp_path / "out")
    monkeypatch.setattr(
        type(model), "save_pretrained", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(ExportError, match="disk full"):
        export_pruned(model, [mask | True for mask in masks], tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bfloat16_stays_bfloat16(tmp_path):
    model, tokens = tiny_moe("glm4_moe", dtype=torch.bfloat16), tiny_tokens()
    masks = random_keep(moe_layers(model), 3)
    export_pruned(model, masks, tmp_path / "out")
    loaded = load_pruned(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    with torch.no_grad():
        difference = loaded(tokens).logits.float() - masked_logits(model, masks, tokens).float()
    assert float(difference.abs().max()) < 0.2
