"""Plans without weights: the same problem as with them, and about the same memory."""

from __future__ import annotations

import shutil

import pytest
import torch

from rco.models.zoo import find_builtin
from rco.pipeline.configs import PruneConfig, QuantizeConfig
from rco.pipeline.planning import plan_compression

CONFIGS = [
    QuantizeConfig(model="tiny-llama", bits="2.5", device="cpu"),
    QuantizeConfig(model="tiny-moe", size="8MB", device="cpu", serve="vllm"),
    PruneConfig(model="tiny-moe", experts="0.25", device="cpu"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.model}-{config.requested}")
def test_an_outline_gives_the_plan_of_the_model(config):
    outlined, loaded = plan_compression(config, outline=True), plan_compression(config)
    assert all(parameter.is_meta for parameter in outlined.loaded.model.parameters())
    mine, full = outlined.problem, loaded.problem
    assert mine.groups == full.groups
    assert mine.options == full.options
    assert mine.unit_budgets == full.unit_budgets
    assert all((a == b).all() for a, b in zip(mine.unit_costs, full.unit_costs, strict=True))
    # Without values, another kernel of attention is run, and experts are counted by their shapes.
    assert outlined.estimate.memory == pytest.approx(loaded.estimate.memory, rel=0.5)
    assert outlined.estimate.seconds > 0


def test_a_dry_run_reads_no_weights(tmp_path, capsys):
    from rco.cli import main

    folder, _ = find_builtin("tiny-llama").locate()
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    assert main(["quantize", str(tmp_path), "--bits=2.5", "--dry-run", "--device=cpu"]) == 0
    told = capsys.readouterr().out
    assert "56 linears" in told
    assert "bits from 2 to 8" in told


def test_a_model_of_eight_billion_parameters_is_planned_on_the_meta_device(tmp_path):
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    planned = plan_compression(QuantizeConfig(model=str(tmp_path), size="4GB", device="cpu"), outline=True)
    model = planned.loaded.model
    assert sum(parameter.numel() for parameter in model.parameters()) > 8e9
    assert {tensor.device for tensor in model.parameters()} == {torch.device("meta")}
    assert planned.problem.num_groups == 36 * 7 + 2  # both ends, too: the budget is a size
    assert planned.estimate.memory > 16e9
