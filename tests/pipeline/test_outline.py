"""Plans without weights: the same problem as with them, and about the same memory."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import weakref

import pytest
import torch

from rco.cli.garbage import uncollected
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


def test_a_dry_run_imports_what_the_model_needs_and_looks_for_no_garbage_at_the_end(tmp_path):
    folder, _ = find_builtin("tiny-llama").locate()
    code = f"""
import atexit, gc, sys
from rco.cli import main
atexit.register(lambda: print("frozen", gc.get_freeze_count()))
assert main(["quantize", {str(folder)!r}, "--bits=2.5", "--dry-run", "--device=cpu"]) == 0
print("modules", *{{name.partition('.')[0] for name in sys.modules}})
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    (modules,) = (line.split()[1:] for line in told.splitlines() if line.startswith("modules"))
    assert "transformers" in modules
    assert {"rich", "matplotlib", "datasets", "pandas", "pyarrow", "lm_eval"}.isdisjoint(modules)
    (frozen,) = (int(line.split()[1]) for line in told.splitlines() if line.startswith("frozen"))
    assert frozen > 100_000


def test_without_collection_garbage_stays_until_afterwards():
    class Loop:
        def __init__(self):
            self.me = self

    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        before = gc.get_stats()
        seen = [weakref.ref(Loop()) for _ in range(5000)]
        assert gc.get_stats() == before
    assert gc.isenabled()
    assert all(each() is not None for each in seen)
    gc.collect()
    assert all(each() is None for each in seen)
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


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
