import sys
import types
from types import SimpleNamespace

import pytest

from rco.models.moe.layers import MOE_ARCHITECTURES
from rco.serving import vllm_plugin
from rco.serving.vllm_plugin import SERVED, expert_counts, layer_config, register, wrap_block


def make_config(**extra):
    return SimpleNamespace(num_hidden_layers=3, num_experts=8, **extra)


def test_counts_are_read_from_objects_and_mappings():
    assert expert_counts(make_config()) is None
    assert expert_counts(make_config(num_experts_per_layer=[0, 8, 5])) == (0, 8, 5)
    assert expert_counts({"num_hidden_layers": 2, "num_experts_per_layer": [4, 3]}) == (4, 3)


@pytest.mark.parametrize("counts", [[8, 5], [8, 5, -1], [8, 5, 2.5], "8,5,4", [8, 5, True]])
def test_malformed_counts_are_named(counts):
    with pytest.raises(ValueError, match="one count for each of 3 layers"):
        expert_counts(make_config(num_experts_per_layer=counts))


def test_ragged_groups_are_refused():
    even = make_config(num_experts_per_layer=[0, 4, 4], expert_group_sizes=[None, [2, 2], [2, 2]])
    assert expert_counts(even) == (0, 4, 4)
    ragged = make_config(num_experts_per_layer=[0, 4, 4], expert_group_sizes=[None, [2, 2], [3, 1]])
    with pytest.raises(ValueError, match="export it padded"):
        expert_counts(ragged)


def test_config_says_the_layers_count_inside_only():
    config = make_config(num_experts_per_layer=[0, 6, 5])
    with layer_config(config, "num_experts", "model.layers.2.mlp"):
        assert config.num_experts == 5
    assert config.num_experts == 8
    for prefix in ("model.layers.0.mlp", "model.layers.7.mlp", "head"):
        with layer_config(config, "num_experts", prefix):
            assert config.num_experts == 8


def make_block():
    class Block:
        def __init__(self, vllm_config, prefix=""):
            self.count = vllm_config.model_config.hf_config.num_experts

    return Block


def engine(config, parallel=False):
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config),
        parallel_config=SimpleNamespace(enable_expert_parallel=parallel),
    )


def test_blocks_are_built_with_their_own_count():
    block = make_block()
    wrap_block(block, "num_experts")
    once = block.__init__
    wrap_block(block, "num_experts")
    assert block.__init__ is once
    config = make_config(num_experts_per_layer=[7, 6, 5])
    assert [block(engine(config), prefix=f"model.layers.{i}.mlp").count for i in range(3)] == [7, 6, 5]
    assert block(vllm_config=engine(make_config()), prefix="model.layers.1.mlp").count == 8
    with pytest.raises(ValueError, match="without --enable-expert-parallel"):
        block(engine(config, parallel=True), prefix="model.layers.1.mlp")
    assert block(engine(make_config(), parallel=True), prefix="model.layers.1.mlp").count == 8


def test_blocks_that_take_the_configuration_itself():
    class Block:
        def __init__(self, config, quant_config=None, prefix=""):
            self.count = config.num_experts
            if prefix.endswith("bad"):
                raise RuntimeError("boom")

    wrap_block(Block, "num_experts")
    config = make_config(num_experts_per_layer=[7, 6, 5])
    assert Block(config, prefix="model.layers.1.mlp").count == 6
    with pytest.raises(RuntimeError, match="boom"):
        Block(config, prefix="model.layers.1.bad")
    assert config.num_experts == 8


def test_register_maps_what_this_engine_has(monkeypatch, caplog):
    seen = {}
    vllm = types.ModuleType("vllm")
    vllm.ModelRegistry = SimpleNamespace(register_model=lambda name, path: seen.__setitem__(name, path))
    qwen = types.ModuleType("vllm.model_executor.models.qwen3_moe")
    qwen.Qwen3MoeForCausalLM, qwen.Qwen3MoeSparseMoeBlock = object, make_block()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, qwen.__name__, qwen)
    for name in ("vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    register()
    assert seen == {"PrunedQwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM"}
    assert hasattr(qwen.Qwen3MoeSparseMoeBlock.__init__, "_rco_count_field")
    assert "pruned OlmoeForCausalLM cannot be served" in caplog.text


def test_every_architecture_of_the_table_is_served():
    assert {row.class_name for row in MOE_ARCHITECTURES.values()} == {served.causal_lm for served in SERVED}
    assert vllm_plugin.SERVED is SERVED
