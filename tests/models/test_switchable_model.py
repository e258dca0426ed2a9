"""Switching layers of real models in place: exact gradients inside, an untouched model afterwards."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rco.formats.integer import PackedWeight, pack
from rco.formats.switchable import SwitchableLinear
from rco.losses import Head, chunked_kl
from rco.models.switchable_model import checkpointed_blocks, frozen, make_switchable, switchable_model

BITS = (2, 3, 4)
OPTIONS = len(BITS) + 1  # and the original


def quantize(weight, bits, group=8):
    """Round to the nearest point of a symmetric grid."""
    rows, columns = weight.shape
    parts = weight.reshape(rows, -1, group)
    scales = parts.abs().amax(-1) / (2 ** (bits - 1) - 0.5)
    codes = (parts / scales.unsqueeze(-1)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    codes = (codes + 2 ** (bits - 1)).to(torch.uint8).reshape(rows, columns)
    return PackedWeight(pack(codes, bits), scales, None, bits, (rows, columns), group)


def llama():
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config), "model.layers", LlamaForCausalLM


def gpt2():
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    return GPT2LMHeadModel(config), "transformer.h", GPT2LMHeadModel


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def setting(request):
    torch.manual_seed(0)
    model, blocks, _ = request.param()
    model = model.double().train()
    modules = {}
    for name, module in model.named_modules():
        if name.startswith(blocks) and hasattr(module, "weight") and module.weight.ndim == 2:
            weight = module.weight.detach()
            weight = weight.t() if type(module).__name__ == "Conv1D" else weight
            modules[name] = make_switchable(module, [*(quantize(weight, bits) for bits in BITS), None])
    assert len(modules) in (8, 14)
    tokens = torch.randint(50, (2, 11))
    return model, modules, tokens, model.get_submodule(blocks)


def rows_for(modules):
    """Every layer has its own row, but the second and third share one."""
    rows = {name: max(0, index - (index > 1)) for index, name in enumerate(modules)}
    return rows, len(modules) - 1


def draw_gates(count, seed=0):
    choices = torch.randint(OPTIONS, (count,), generator=torch.Generator().manual_seed(seed))
    return nn.functional.one_hot(choices, OPTIONS).double().requires_grad_()


def loss_of(model, tokens, reference):
    base = model.base_model
    hidden = base(tokens, use_cache=False).last_hidden_state
    head = Head(model.get_output_embeddings().weight.detach())
    return chunked_kl(hidden, head, reference, head, chunk_tokens=5)


def explicit_gradient(model, modules, rows, gates, tokens, reference):
    """Autograd through dense mixtures put in place of the parameters."""
    parameters = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    prefix = "model." if hasattr(model, "model") else "transformer."
    for name, module in modules.items():
        dense = torch.stack([o if isinstance(o, torch.Tensor) else o.dequantize() for o in module.options])
        weight = torch.einsum("k,koi->oi", gates[rows[name]], dense)
        parameters[name + ".weight"] = weight.t() if module.transposed else weight
    base = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
    hidden = functional_call(model.base_model, base, (tokens,), {"use_cache": False}).last_hidden_state
    logits = hidden @ model.get_output_embeddings().weight.detach().T
    reference_logits = reference @ model.get_output_embeddings().weight.detach().T
    divergence = nn.functional.kl_div(
        logits.log_softmax(-1), reference_logits.log_softmax(-1), reduction="none", log_target=True
    )
    loss = divergence.sum(-1).mean()
    return loss.detach(), torch.autograd.grad(loss, gates)[0]


def snapshot(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_whole_model_gradient_equals_autograd(setting, checkpointed):
    model, modules, tokens, blocks = setting
    rows, count = rows_for(modules)
    gates = draw_gates(count)
    with frozen(model), torch.no_grad():
        reference = model.base_model(tokens, use_cache=False).last_hidden_state
    with frozen(model):
        expected_loss, expected = explicit_gradient(model, modules, rows, gates, tokens, reference)
    with switchable_model(model, modules) as gated, checkpointed_blocks(blocks if checkpointed else []):
        choices = gated.set_gates(gates, rows)
        assert choices == gates.argmax(1).tolist()
        loss = loss_of(model, tokens, reference)
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(gates.grad, expected, rtol=1e-8, atol=1e-13)
    assert (expected != 0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_leaving_restores_everything(setting):
    model, modules, tokens, blocks = setting
    rows, count = rows_for(modules)
    frozen_before = next(iter(model.parameters()))
    frozen_before.requires_grad_(False)
    model.get_submodule(next(iter(modules))).eval()
    before, order = snapshot(model), [name for name, _ in model.named_modules()]
    identity = {name: id(module) for name, module in model.named_modules()}
    flags = [(p.requires_grad, id(p)) for p in model.parameters()]
    training = [module.training for module in model.modules()]
    forwards = [dict(block.__dict__).keys() for block in blocks]

    def check():
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert [name for name, _ in model.named_modules()] == order
        assert {name: id(module) for name, module in model.named_modules()} == identity
        assert [(p.requires_grad, id(p)) for p in model.parameters()] == flags
        assert [module.training for module in model.modules()] == training
        assert [dict(block.__dict__).keys() for block in blocks] == forwards

    with switchable_model(model, modules) as gated, checkpointed_blocks(blocks):
        assert all(model.get_submodule(name) is module for name, module in modules.items())
        assert not model.training
        gated.set_gates(draw_gates(count), rows)
        loss_of(model, tokens, torch.zeros(2, 11, 16, dtype=torch.float64)).backward()
    check()
    assert all(module.selection.gate is None for module in modules.values())  # no graph is kept alive

    with (
        pytest.raises(RuntimeError, match="halfway"),
        switchable_model(model, modules),
        checkpointed_blocks(blocks),
    ):
        raise RuntimeError("halfway")
    check()

    with (
        pytest.raises(KeyError, match="no layer 'nowhere'"),
        switchable_model(model, {**modules, "nowhere": next(iter(modules.values()))}),
    ):
        pass
    check()


def test_forward_equals_the_model_with_weights_written_in(setting):
    model, modules, tokens, _ = setting
    rows, count = rows_for(modules)
    model.eval()
    gates = draw_gates(count, seed=3).detach()
    with torch.no_grad():
        with switchable_model(model, modules) as gated:
            choices = gated.set_gates(gates, rows)
            got = model(tokens, use_cache=False).logits
        for name, module in modules.items():
            option = module.options[choices[rows[name]]]
            dense = option if isinstance(option, torch.Tensor) else option.dequantize()
            weight = model.get_submodule(name).weight
            weight.copy_((dense.t() if module.transposed else dense).clone())
        want = model(tokens, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_checkpointed_gradients_belong_to_the_gates_of_their_forward_pass(setting):
    model, modules, tokens, blocks = setting
    rows, count = rows_for(modules)
    reference = torch.randn(2, 11, 16, dtype=torch.float64)

    def gradients(checkpointed):
        gates = [draw_gates(count, seed) for seed in (1, 2)]
        with switchable_model(model, modules) as gated, checkpointed_blocks(blocks if checkpointed else []):
            losses = []
            for one in gates:
                gated.set_gates(one, rows)
                losses.append(loss_of(model, tokens, reference))
            sum(
                losses
            ).backward()  # the first assignment's blocks are computed again under the second's gates
            assert all(module.selection.choice == gated.set_gates(gates[1], rows)[rows[name]]
                       for name, module in modules.items())  # fmt: skip
        return [one.grad for one in gates]

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, again)


def test_checkpointing_keeps_less_for_the_backward_pass(setting):
    model, modules, tokens, blocks = setting
    rows, count = rows_for(modules)
    kept = []
    for chosen in ([], blocks):
        sizes = {}

        def pack_hook(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with switchable_model(model, modules) as gated, checkpointed_blocks(chosen):
            gated.set_gates(draw_gates(count), rows)
            with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
                loss_of(model, tokens, torch.zeros(2, 11, 16, dtype=torch.float64))
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0] / 2


def test_inactive_options_get_no_gradient_and_mixtures_are_refused(setting):
    model, modules, tokens, _ = setting
    rows, count = rows_for(modules)
    reference = torch.zeros(2, 11, 16, dtype=torch.float64)
    gates = torch.rand(count, OPTIONS, dtype=torch.float64).softmax(1)
    with switchable_model(model, modules) as gated:
        with pytest.raises(ValueError, match="Row 0 of the gates is not one-hot"):
            gated.set_gates(gates, rows)
        hard = draw_gates(count)
        gated.set_gates(hard, rows)
        loss_of(model, tokens, reference).backward()
        active = torch.rand(count, OPTIONS) < 0.5
        partly = draw_gates(count)
        gated.set_gates(partly, rows, active=active)
        loss_of(model, tokens, reference).backward()
        assert (partly.grad[~active] == 0).all()
        torch.testing.assert_close(partly.grad[active], hard.grad[active], rtol=1e-12, atol=1e-18)


def test_straight_through_rounding_still_counts_as_one_hot(setting):
    model, modules, _, _ = setting
    rows, count = rows_for(modules)
    hard, soft = draw_gates(count).detach(), torch.rand(count, OPTIONS).double().softmax(1)
    gates = (hard - soft) + soft
    with switchable_model(model, modules) as gated:
        assert gated.set_gates(gates, rows) == hard.argmax(1).tolist()


def test_a_cache_is_refused_under_checkpointing(setting):
    model, modules, tokens, blocks = setting
    rows, count = rows_for(modules)
    with switchable_model(model, modules) as gated, checkpointed_blocks(blocks):
        gated.set_gates(draw_gates(count), rows)
        with pytest.raises(ValueError, match="use_cache=False"):
            model(tokens, use_cache=True)
        with torch.no_grad():
            model(tokens, use_cache=True)


def test_an_instance_forward_set_by_others_survives():
    block = nn.Linear(3, 3)
    mine = block.forward
    block.forward = lambda x: mine(x) + 1
    theirs = block.forward
    x = torch.randn(2, 3, requires_grad=True)
    expected = block(x)
    with checkpointed_blocks([block]):
        assert torch.equal(block(x), expected)
    assert block.forward is theirs


def test_errors_say_what_is_wrong(setting):
    model, modules, _, _ = setting
    rows, count = rows_for(modules)
    first = next(iter(modules))
    with switchable_model(model, modules) as gated:
        with pytest.raises(ValueError, match=f"first is '{first}'"):
            gated.set_gates(draw_gates(count), {name: row for name, row in rows.items() if name != first})
        with pytest.raises(ValueError, match="has row"):
            gated.set_gates(draw_gates(count - 1), rows)
        with pytest.raises(ValueError, match="has 4 options, the gates have 3"):
            gated.set_gates(torch.eye(3)[[0] * count], rows)
        with pytest.raises(ValueError, match="groups, options"):
            gated.set_gates(torch.zeros(4), rows)
        with pytest.raises(ValueError, match="shape of the gates"):
            gated.set_gates(draw_gates(count), rows, active=torch.ones(OPTIONS, dtype=torch.bool))
    with pytest.raises(TypeError, match="got Embedding"):
        make_switchable(nn.Embedding(3, 4), [None])
    with pytest.raises(TypeError, match="got LayerNorm"):
        make_switchable(nn.LayerNorm(3), [None])
    assert isinstance(make_switchable(nn.Linear(3, 4), [None]), SwitchableLinear)
