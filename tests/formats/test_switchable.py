"""Switchable linears against autograd through an explicit dense mixture."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rco.formats.integer import PackedWeight, pack
from rco.formats.products import OptionProducts
from rco.formats.switchable import Selection, SwitchableLinear, WeightBuffer, switchable_linear


def packed_weight(out, columns, bits, *, group=5, symmetric=False, dtype=torch.float64, seed=0):
    """A random quantized matrix, not one that approximates anything."""
    generator = torch.Generator().manual_seed(1000 * bits + seed)
    codes = torch.randint(2**bits, (out, columns), generator=generator, dtype=torch.uint8)
    groups = -(-columns // group)
    scales = (0.1 + torch.rand(out, groups, generator=generator, dtype=torch.float64)).to(dtype)
    zeros = None
    if not symmetric:
        zeros = torch.randint(2**bits, (out, groups), generator=generator, dtype=torch.uint8)
    return PackedWeight(pack(codes, bits), scales / 2**bits, zeros, bits, (out, columns), group)


def make_layer(columns, out, *, bias=True, transposed=False, seed=0, dtype=torch.float64, bits=(2, 3, 5, 8)):
    generator = torch.Generator().manual_seed(seed)
    original = torch.randn(out, columns, generator=generator, dtype=torch.float64).to(dtype)
    options = [
        packed_weight(out, columns, width, symmetric=width % 2 == 0, dtype=dtype, seed=seed) for width in bits
    ]
    offset = torch.randn(out, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    stored = original.t().contiguous() if transposed else original
    return SwitchableLinear([*options, None], stored, offset, transposed=transposed)


def dense_options(layer):
    return torch.stack([o if isinstance(o, torch.Tensor) else o.dequantize() for o in layer.options])


def one_hot(choice, count, dtype=torch.float64):
    gate = torch.zeros(count, dtype=dtype)
    gate[choice] = 1.0
    return gate.requires_grad_()


def explicit(layer, x, gate):
    """The definition: a dense mixture that autograd differentiates."""
    weight = torch.einsum("k,koi->oi", gate, dense_options(layer))
    y = x @ weight.T
    return y if layer.bias is None else y + layer.bias


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    out=st.integers(1, 12),
    columns=st.integers(1, 40),
    leading=st.sampled_from([(1,), (7,), (2, 3), (0,), (2, 1, 4)]),
    bias=st.booleans(),
    transposed=st.booleans(),
    choice=st.integers(0, 4),
)
def test_gradients_equal_autograd_through_the_mixture(seed, out, columns, leading, bias, transposed, choice):
    layer = make_layer(columns, out, bias=bias, transposed=transposed, seed=seed)
    x = torch.randn(*leading, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x.requires_grad_()
    if bias:
        layer.bias.requires_grad_()
    gate = one_hot(choice, 5)
    layer.select(choice, gate)
    inputs = [x, gate] + ([layer.bias] if bias else [])
    got, want = layer(x), explicit(layer, x, gate)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def network(seed=0):
    """Three layers, the last two sharing a row of gates; one transposed, one without bias."""
    layers = [
        make_layer(6, 9, seed=seed),
        make_layer(9, 8, seed=seed + 1, bias=False, transposed=True),
        make_layer(8, 4, seed=seed + 2),
    ]
    return layers, [0, 1, 1]


def run(layers, x, apply):
    for index, layer in enumerate(layers):
        x = apply(index, layer, x)
        x = torch.tanh(x) if index < len(layers) - 1 else x
    return (x**2).sum()


@pytest.mark.parametrize("choices", [(0, 4), (3, 1), (2, 2)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_composed_layers_tied_rows_and_checkpointing(choices, checkpointed):
    layers, row_of = network()
    buffer = WeightBuffer()  # shared: no layer may rely on what it left there
    for layer in layers:
        layer.buffer = buffer
    gates = torch.nn.functional.one_hot(torch.tensor(choices), 5).double().requires_grad_()
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows = gates.unbind()
    for layer, row in zip(layers, row_of, strict=True):
        layer.select(choices[row], rows[row])

    def ours(index, layer, x):
        return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

    got = run(layers, x, ours)
    want = run(layers, x, lambda index, layer, x: explicit(layer, x, gates[row_of[index]]))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (ours_gradient,) = torch.autograd.grad(got, gates)
    (theirs,) = torch.autograd.grad(want, gates)
    torch.testing.assert_close(ours_gradient, theirs, rtol=1e-11, atol=1e-10)
    assert (theirs != 0).all()


def test_checkpointing_changes_no_bit_of_the_gradient():
    results = []
    for checkpointed in (False, True):
        layers, row_of = network(seed=5)
        gates = torch.nn.functional.one_hot(torch.tensor([1, 3]), 5).double().requires_grad_()
        rows = gates.unbind()
        for layer, row in zip(layers, row_of, strict=True):
            layer.select([1, 3][row], rows[row])
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
        apply = (
            (lambda _, f, x: checkpoint(f, x, use_reentrant=False))
            if checkpointed
            else (lambda _, f, x: f(x))
        )
        run(layers, x, apply).backward()
        results.append(gates.grad)
    assert torch.equal(*results)


def test_finite_differences_of_the_mixture_confirm_the_gates_gradient():
    layer = make_layer(5, 3, seed=8, bits=(2, 4))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for choice in range(3):
        gate, step = one_hot(choice, 3), 1e-6
        layer.select(choice, gate)
        layer(x).square().sum().backward()
        for k, moved in enumerate(torch.eye(3, dtype=torch.float64) * step):
            ends = [explicit(layer, x, gate.detach() + sign * moved).square().sum() for sign in (1, -1)]
            assert gate.grad[k].item() == pytest.approx((ends[0] - ends[1]).item() / (2 * step), rel=1e-7)
        torch.autograd.gradcheck(
            lambda x, choice=choice: switchable_linear(x, layer.options, Selection(choice), layer.bias), (x,)
        )


def test_inactive_options_get_exactly_zero_and_the_rest_is_unchanged():
    layer = make_layer(13, 6, seed=4)
    x = torch.randn(4, 13, dtype=torch.float64)
    gate = one_hot(1, 5)
    layer.select(1, gate)
    layer(x).square().sum().backward()
    full = gate.grad
    for active in ([True, True, False, False, True], [False] * 5):
        gate = one_hot(1, 5)
        layer.select(1, gate, active)
        layer(x).square().sum().backward()
        assert torch.equal(gate.grad, torch.where(torch.tensor(active), full, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_accumulates_the_weight_gradient_in_float32(dtype):
    layer = make_layer(64, 32, dtype=dtype, bias=False, seed=6)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(300, 32, generator=generator).to(dtype)
    gate = one_hot(2, 5, torch.float64)
    layer.select(2, gate)
    y = layer(x)
    assert y.dtype == dtype
    y.backward(upstream)
    expected = torch.einsum("ti,to,koi->k", x.double(), upstream.double(), dense_options(layer).double())
    # Products of halves are exact in float32, so only its accumulation error remains; a weight gradient rounded
    # to bfloat16 would miss this by three orders of magnitude.
    scale = (upstream.double().t() @ x.detach().double()).norm() * dense_options(layer).double().norm(
        dim=(1, 2)
    )
    assert ((gate.grad - expected).abs() <= 1e-6 * scale).all()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(
        x.grad.double(), upstream.double() @ dense_options(layer)[2].double(), rtol=2e-2, atol=2e-2
    )


def test_plain_inference_uses_the_selected_option_and_keeps_no_graph():
    layer = make_layer(13, 6, seed=9)
    x = torch.randn(4, 13, dtype=torch.float64)
    for choice, weight in enumerate(dense_options(layer)):
        layer.select(choice)
        y = layer(x)
        assert y.grad_fn is None
        torch.testing.assert_close(y, x @ weight.T + layer.bias)
        assert torch.equal(layer.selected_weight(torch.float64), weight)
    layer.select(0, one_hot(0, 5))
    with torch.no_grad():
        assert layer(x).grad_fn is None


def test_a_layer_without_gates_still_passes_the_input_gradient():
    layer = make_layer(13, 6, seed=10)
    x = torch.randn(4, 13, dtype=torch.float64, requires_grad=True)
    layer.select(3)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, dense_options(layer)[3].sum(0).expand(4, 13))


def test_selected_weight_carries_the_gate_gradient():
    layer = make_layer(13, 6, seed=11)
    for choice in (1, 4):
        gate = one_hot(choice, 5)
        layer.select(choice, gate)
        weight = layer.selected_weight(torch.float64)
        upstream = torch.randn_like(weight)
        weight.backward(upstream)
        expected = (dense_options(layer) * upstream).sum((1, 2))
        torch.testing.assert_close(gate.grad, expected, rtol=1e-12, atol=1e-12)
    assert not layer.options[4].requires_grad  # the original was aliased, not adopted by autograd


def test_what_is_known_of_the_options_is_worked_out_once_for_the_selected_weight_too(monkeypatch):
    made = []
    monkeypatch.setattr(
        "rco.formats.switchable.OptionProducts", lambda *given: made.append(1) or OptionProducts(*given)
    )
    layer = make_layer(13, 6, seed=12)
    x = torch.randn(4, 13, dtype=torch.float64)
    gradients = []
    for _ in range(2):
        gate = one_hot(1, 5)
        layer.select(
            1, gate, active=(False, True, False, False, False)
        )  # as that of an output layer that is locked
        (layer.selected_weight(torch.float64) * 2.0).sum().backward()
        layer(x).sum().backward()
        gradients.append(gate.grad)
    assert len(made) == 1
    assert torch.equal(*gradients)
    assert gradients[0].count_nonzero() == 1


class Allocations(TorchDispatchMode):
    """Counts operations that return new memory of at least the given number of elements."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements:
            self.count += result.untyped_storage().data_ptr() not in known
        return result


@pytest.mark.parametrize("count", [2, 7])
def test_no_dense_copy_per_option_or_per_layer(count, monkeypatch):
    size, depth = 64, 6
    options = [packed_weight(size, size, bits, dtype=torch.float32) for bits in range(2, 9)][:count]
    gradients = []
    original = OptionProducts.__call__

    def watched(self, gradient):
        assert all(earlier() is None for earlier in gradients)  # none outlives its layer
        gradients.append(weakref.ref(gradient))
        return original(self, gradient)

    monkeypatch.setattr(OptionProducts, "__call__", watched)
    buffer = WeightBuffer()
    layers = [SwitchableLinear(options, torch.zeros(size, size), buffer=buffer) for _ in range(depth)]
    gates = torch.nn.functional.one_hot(torch.ones(depth, dtype=torch.int64), count).float()
    gates.requires_grad_()
    h = torch.randn(5, size, requires_grad=True)
    with Allocations(size * size) as forward:
        for layer, row in zip(layers, gates.unbind(), strict=True):
            layer.select(1, row)
            h = layer(h)
        loss = h.sum()
    with Allocations(size * size) as backward:
        loss.backward()
    assert forward.count == 1  # the shared buffer
    assert backward.count == depth  # one weight gradient per layer, whatever the number of options
    assert buffer.nbytes == size * size * 4
    assert len(gradients) == depth
    assert all(earlier() is None for earlier in gradients)
    assert (gates.grad != 0).all()


def test_the_weight_gradient_is_formed_once(monkeypatch):
    calls = []
    original = OptionProducts.__call__
    monkeypatch.setattr(
        OptionProducts, "__call__", lambda self, g: calls.append(g.shape) or original(self, g)
    )
    layer = make_layer(13, 6)
    layer.select(0, one_hot(0, 5))
    layer(torch.randn(4, 13, dtype=torch.float64)).sum().backward()
    assert calls == [(6, 13)]


def test_the_module_registers_nothing():
    parent = nn.Linear(13, 6)
    layer = SwitchableLinear([packed_weight(6, 13, 2)], parent.weight, parent.bias)
    assert not layer.state_dict()
    assert not list(layer.parameters())
    assert layer.packed_bytes == packed_weight(6, 13, 2).nbytes
    assert "choice=0" in repr(layer)


def test_buffer_grows_and_clears():
    buffer = WeightBuffer()
    small = buffer.take((2, 3), torch.float32, torch.device("cpu"))
    assert small.data_ptr() == buffer.take((3, 2), torch.float32, torch.device("cpu")).data_ptr()
    buffer.take((10, 10), torch.float32, torch.device("cpu"))
    assert buffer.nbytes == 400
    buffer.clear()
    assert buffer.nbytes == 0


def test_errors_say_what_is_wrong():
    layer = make_layer(13, 6)
    with pytest.raises(ValueError, match=r"0\.\.4, got 5"):
        layer.select(5)
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        layer.select(0, torch.zeros(4))
    with pytest.raises(ValueError, match="active must have 5"):
        layer.select(0, None, [True])
    with pytest.raises(ValueError, match=r"needs \(13, 6\), one row per output"):
        SwitchableLinear([packed_weight(6, 13, 2)], torch.zeros(6, 13), transposed=True)
    with pytest.raises(ValueError, match="at least one"):
        SwitchableLinear([], torch.zeros(6, 13))
