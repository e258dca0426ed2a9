import pytest
import torch
import transformers

from rco.models.moe.expert_removal import keep_plan, prune_experts, split_keep
from rco.models.moe.gates import expert_gates
from rco.models.moe.layers import MOE_ARCHITECTURES, UnsupportedMoEError, moe_layers, set_num_experts
from rco.models.moe.routing import route
from rco.testing.tiny_models import TINY_MOE_NAMES, random_keep, tiny_moe, tiny_tokens


def test_every_architecture_of_the_table_has_a_tiny_model():
    assert {name.partition("-")[0] for name in TINY_MOE_NAMES} == set(MOE_ARCHITECTURES)


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_layers_are_found_in_order_and_dense_layers_skipped(name):
    model = tiny_moe(name)
    layers = moe_layers(model)
    dense = {"qwen3_moe": [1], "glm4_moe": [0], "deepseek": [0]}
    skipped = next((v for k, v in dense.items() if name.startswith(k)), [])
    assert [layer.decoder_index for layer in layers] == [i for i in range(3) if i not in skipped]
    assert [layer.index for layer in layers] == list(range(len(layers)))
    for layer in layers:
        assert model.get_submodule(layer.name) is layer.block
        assert layer.top_k == model.config.num_experts_per_tok
        assert layer.fused
    assert (layers[0].shared is not None) == name.startswith(("qwen2_moe", "qwen3_next", "deepseek", "glm4"))


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_route_reproduces_the_router(name):
    for layer in moe_layers(tiny_moe(name)):
        hidden = torch.randn(64, 32)
        logits, weights, indices = layer.router(hidden)
        mine = route(layer.rule, layer.logits(hidden), layer.correction)
        torch.testing.assert_close(layer.logits(hidden), logits, rtol=0, atol=0)

        def spread(w, i, count=layer.num_experts):
            return torch.zeros(64, count).scatter_add(-1, i, w.float())

        torch.testing.assert_close(
            spread(mine.weights, mine.indices), spread(weights, indices), rtol=1e-6, atol=1e-7
        )


def test_dense_model_and_unknown_type_say_so():
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, num_attention_heads=4, intermediate_size=32, num_hidden_layers=1
        )
    )
    with pytest.raises(UnsupportedMoEError, match=r"This llama model has no experts.*qwen3_moe"):
        moe_layers(dense)
    all_dense = tiny_moe("qwen3_moe", mlp_only_layers=[0, 1, 2])
    with pytest.raises(UnsupportedMoEError, match="every layer is dense"):
        moe_layers(all_dense)


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_count_field_is_the_one_the_architecture_reads(name):
    model = tiny_moe(name)
    set_num_experts(model.config, 12, moe_layers(model)[0].architecture)
    again = transformers.AutoModelForCausalLM.from_config(model.config)
    assert {layer.num_experts for layer in moe_layers(again)} == {12}


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_pruned_model_equals_masked_model(name, seed):
    model, tokens = tiny_moe(name, seed), tiny_tokens(seed)
    masks = random_keep(moe_layers(model), seed, spare=0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        with expert_gates(model) as gates:
            gates.set_gates(masks)
            masked = model(tokens).logits
        pruned = prune_experts(model, masks)
        torch.testing.assert_close(
            pruned(tokens).logits, masked, rtol=0, atol=2e-5 * float(masked.abs().max())
        )
        full = model(tokens).logits
    assert not torch.allclose(full, masked, atol=1e-3)
    for layer, mask in zip(moe_layers(pruned), masks, strict=True):
        assert layer.num_experts == int(mask.sum())
        assert all(
            tensor.shape[0] == layer.num_experts
            for tensor in (*layer.experts.parameters(), *layer.router.parameters())
        )
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert len({layer.num_experts for layer in moe_layers(model)}) == 1


def test_pruning_shares_what_it_leaves_alone():
    model = tiny_moe("qwen3_moe")
    pruned = prune_experts(model, random_keep(moe_layers(model)))
    theirs = dict(pruned.named_parameters())
    for key, value in model.named_parameters():
        if ".experts." not in key and ".gate." not in key:
            assert theirs[key] is value
    assert pruned.lm_head.weight is pruned.model.embed_tokens.weight
    assert pruned.config is not model.config


def test_masks_of_another_model_and_broken_floors_are_refused():
    layers = moe_layers(tiny_moe("qwen3_moe"))
    with pytest.raises(ValueError, match=r"must be \(16,\).*another model"):
        split_keep(layers, torch.ones(24))
    with pytest.raises(ValueError, match="expected lengths"):
        split_keep(layers, [torch.ones(8), torch.ones(9)])
    with pytest.raises(ValueError, match=r"keep 2 of 8 experts.*picks 3"):
        split_keep(layers, [torch.ones(8), torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])])


def test_plan_knows_what_a_stock_checkpoint_can_say():
    model = tiny_moe("deepseek_v3")  # 16 experts in 4 groups, 4 of 2 groups chosen
    even = torch.tensor([1, 1, 0, 0] * 4).bool()
    assert keep_plan(model, [even, even]).stock_obstacle is None
    ragged = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0] + [1, 1, 0, 0] * 2).bool()
    assert "different numbers" in keep_plan(model, [ragged, ragged]).stock_obstacle
    lone = torch.tensor([1, 0, 0, 0] * 4).bool()
    assert "one expert each" in keep_plan(model, [lone, lone]).stock_obstacle
    assert (
        "different numbers"
        in keep_plan(tiny_moe("mixtral"), [torch.arange(6) < c for c in (3, 4, 5)]).stock_obstacle
    )
