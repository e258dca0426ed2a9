"""Switchable experts against the same model with weights put in by hand, and autograd through a mixture."""

import numpy as np
import pytest
import torch
from torch.func import functional_call

from rco.formats.integer import IntegerGrid
from rco.formats.products import inner_products
from rco.formats.rounding import round_to_nearest
from rco.formats.stacks import decode_segments, stack_rows
from rco.models.moe.layers import moe_layers
from rco.models.moe.linears import original_stacks
from rco.models.moe.switchable_experts import ExpertOptions, PlacedChoices, switchable_experts
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_moe, tiny_tokens

WIDTHS = (2, 3, 5)
K = len(WIDTHS) + 1  # the last is the original


def double(name):
    model = tiny_moe(name, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the grouped kernels know no float64
    return model


def make_options(model, pruned=None):
    """Every layer's experts rounded to nearest, and the row of the gates of every projection."""
    options, rows, count = {}, {}, 0
    for layer in moe_layers(model):
        stacks = []
        for stack in original_stacks(layer):
            flat = stack.reshape(-1, stack.shape[3])
            packed = round_to_nearest(flat, [IntegerGrid(w, 8) for w in WIDTHS], storage_dtype=torch.float64)
            stacks.append([*packed, None])
        if pruned is not None:
            stacks = [[None, *stack] for stack in stacks]
        options[layer.index] = ExpertOptions(layer, *stacks, pruned=pruned)
        size = 1 if pruned is not None else 3  # an expert is pruned as a whole
        numbers = count + np.arange(layer.num_experts * size).reshape(-1, size)
        rows[layer.index] = np.broadcast_to(numbers, (layer.num_experts, 3))
        count += layer.num_experts * size
    return options, rows, count


def parameter_values(layer, up, down):
    """Stacks in canonical order (experts, parts, out, in) as the layer's own parameters hold them."""
    up = up.transpose(1, 2).flatten(1, 2) if layer.architecture.interleaved else up.flatten(1, 2)
    down = down.squeeze(1)
    if getattr(layer.experts, "is_transposed", False):
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return {f"{layer.name}.experts.gate_up_proj": up, f"{layer.name}.experts.down_proj": down}


def mixture(model, options, rows, gates):
    """Parameters of the model whose experts are the sums over options that the gates weigh."""
    values = {}
    for layer in moe_layers(model):
        parts = []
        for stack, packed, cells in zip(
            original_stacks(layer),
            (options[layer.index].up, options[layer.index].down),
            (rows[layer.index][:, :2], rows[layer.index][:, 2:]),
            strict=True,
        ):
            dense = [
                (stack if option is None else option.dequantize()).reshape(stack.shape) for option in packed
            ]
            weight = gates[torch.from_numpy(cells.copy())]  # (experts, parts, K)
            parts.append(sum(weight[..., k, None, None] * dense[k] for k in range(len(dense))))
        values.update(parameter_values(layer, *parts))
    return values


def loss_of(logits):
    target = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return ((logits - target) ** 2).mean() + logits.logsumexp(-1).mean()


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_gradients_are_those_of_the_explicit_mixture(name):
    model = double(name)
    tokens = tiny_tokens(batch=2, length=9)
    options, rows, count = make_options(model)
    generator = torch.Generator().manual_seed(1)
    choices = torch.randint(0, K, (count,), generator=generator)
    gates = torch.nn.functional.one_hot(choices, K).double()

    leaf = gates.clone().requires_grad_()
    expected = functional_call(model, mixture(model, options, rows, leaf), (tokens,)).logits
    (wanted,) = torch.autograd.grad(loss_of(expected), leaf)

    before = {key: value.clone() for key, value in model.state_dict().items()}
    with switchable_experts(model, options, rows) as experts:
        mine = gates.clone().requires_grad_()
        experts.set_gates(mine, choices.tolist())
        logits = model(tokens, use_cache=False).logits
        (found,) = torch.autograd.grad(loss_of(logits), mine)
        with torch.no_grad():
            quiet = model(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(quiet, expected, rtol=1e-10, atol=1e-10)
    assert float(wanted.abs().max()) > 0
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10 + 1e-8 * float(wanted.abs().max()))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    torch.testing.assert_close(model(tokens).logits, functional_call(model, {}, (tokens,)).logits)


def test_unwanted_options_get_no_gradient_and_no_work():
    model = double("qwen3_moe")
    tokens = tiny_tokens(batch=1, length=7)
    options, rows, count = make_options(model)
    gates = torch.nn.functional.one_hot(torch.zeros(count, dtype=torch.long), K).double()
    wanted = np.ones((count, K), dtype=bool)
    wanted[:, 1] = False
    found = []
    for mask in (None, wanted):
        with switchable_experts(model, options, rows, wanted=mask) as experts:
            leaf = gates.clone().requires_grad_()
            experts.set_gates(leaf, [0] * count)
            (gradient,) = torch.autograd.grad(loss_of(model(tokens, use_cache=False).logits), leaf)
            found.append(gradient)
    assert float(found[1][:, 1].abs().max()) == 0
    torch.testing.assert_close(found[0][:, [0, 2, 3]], found[1][:, [0, 2, 3]])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_pruned_experts_are_routed_around(name):
    """The forward pass is that of the model without them, and keep gradients are those of plain pruning."""
    from rco.models.moe.gates import expert_gates

    model = double(name)
    tokens = tiny_tokens(batch=2, length=9)
    options, rows, count = make_options(model, pruned=0)
    original = K  # after the inserted option
    generator = torch.Generator().manual_seed(3)
    out = torch.rand(count, generator=generator) < 0.2
    choices = torch.where(out, 0, original)
    gates = torch.nn.functional.one_hot(choices, K + 1).double()
    with switchable_experts(model, options, rows, removed=0) as experts:
        leaf = gates.clone().requires_grad_()
        experts.set_gates(leaf, choices.tolist())
        logits = model(tokens, use_cache=False).logits
        (found,) = torch.autograd.grad(loss_of(logits), leaf)
    with expert_gates(model) as handle:
        keep = (~out).double().requires_grad_()
        handle.set_gates(keep)
        expected = model(tokens, use_cache=False).logits
        (wanted,) = torch.autograd.grad(loss_of(expected), keep)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    # Against being pruned, the present weights are worth exactly what keeping is worth.
    torch.testing.assert_close(found[:, original] - found[:, 0], wanted, rtol=1e-8, atol=1e-10)
    # Of an expert that is out, every width looks alike; of one that stays, they differ.
    assert float((found[out, 1:] - found[out, 1:2]).abs().max()) == 0
    assert float((found[~out, 1] - found[~out, original]).abs().max()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_stacks_decode_and_multiply_like_their_matrices(dtype, symmetric):
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(6, 20, generator=generator) for _ in range(5)]
    grids = [IntegerGrid(w, 8, symmetric) for w in (2, 3, 8)]
    each = [round_to_nearest(m, grids, storage_dtype=dtype) for m in matrices]
    stacks = [stack_rows([options[k] for options in each]) for k in range(3)]
    dense = torch.cat(matrices)
    choices = np.array([0, 3, 1, 1, 2])
    for kind in (torch.float32, torch.bfloat16):
        out = decode_segments([*stacks, dense], choices, torch.empty(30, 20, dtype=kind))
        for e, k in enumerate(choices.tolist()):
            alone = matrices[e] if k == 3 else each[e][k].dequantize(torch.float32)
            assert torch.equal(out[6 * e : 6 * e + 6], alone.to(kind))
    gradient = torch.randn(30, 20, generator=generator)
    found = inner_products(gradient, [*stacks, dense, None], segments=5)
    assert found.shape == (5, 5)
    for e in range(5):
        part = gradient[6 * e : 6 * e + 6]
        expected = inner_products(part, [*each[e], matrices[e], None])
        torch.testing.assert_close(found[:, e], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(stacks[1].rows(6 * e, 6 * e + 6).codes(), each[e][1].codes())
    with pytest.raises(ValueError, match="equal height"):
        inner_products(gradient, stacks, segments=4)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_own_weights_are_copied_only_where_somebody_reads_them_in_another_order(name, monkeypatch):
    """Those of gpt-oss lie in another order than its options."""
    model = double(name)
    options, _, _ = make_options(model)
    layer = next(iter(options.values()))
    experts, own = layer.layer.num_experts, layer.num_options - 1
    copied = []
    reshape = torch.Tensor.reshape

    def watched(tensor, *shape):
        found = reshape(tensor, *shape)
        if tensor.ndim == 4 and found.data_ptr() != tensor.data_ptr():
            copied.append(tensor.shape)
        return found

    packed_alone = ExpertOptions(layer.layer, layer.up[:own], layer.down[:own])
    monkeypatch.setattr(torch.Tensor, "reshape", watched)
    mixed = np.zeros((experts, 3), dtype=np.int64)
    packed_alone.decode(PlacedChoices.of(mixed, torch.device("cpu")))
    assert copied == []
    decoded = layer.decode(PlacedChoices.of(mixed, torch.device("cpu")))
    up, down = (torch.zeros_like(part.transpose(1, 2)) for part in (decoded.up, decoded.down))
    layer.products(up, down, (True,) * own + (False,))
    assert copied == []
    mixed[0] = own
    decoded = layer.decode(PlacedChoices.of(mixed, torch.device("cpu")))
    assert len(copied) == (2 if name == "gpt_oss" else 0)
    full = layer.own()
    assert torch.equal(decoded.up[0], full.up[0])
    assert torch.equal(decoded.down[0], full.down[0])
    assert not torch.equal(decoded.up[1], full.up[1])


def test_experts_that_all_keep_their_own_weights_are_not_decoded():
    model = double("qwen3_moe")
    options, rows, count = make_options(model)
    with switchable_experts(model, options, rows) as switched:
        for layer in options.values():
            layer.supports_device_choice = lambda dtype: True  # as on a GPU
        own = next(iter(options.values())).num_options - 1
        gates = torch.nn.functional.one_hot(torch.full((count,), own), own + 1).double()
        switched.set_gates(gates, [own] * count)
        with torch.no_grad():
            found = model(torch.arange(12).view(1, -1)).logits
        assert all(layer.buffer.nbytes == 0 for layer in options.values())
    with torch.no_grad():
        torch.testing.assert_close(found, model(torch.arange(12).view(1, -1)).logits)
