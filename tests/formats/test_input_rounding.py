"""Rounded inputs in a switchable layer: the gradient of the gates without a second gradient of the weight."""

import torch

from rco.formats import parse
from rco.formats.base import EncodeSettings
from rco.formats.input_rounding import InputRounding, change_along
from rco.formats.switchable import SwitchableLinear

NAMES = ("nvfp4-a4", "fp8-dynamic", "mxfp8-a8", "int8-dynamic")


def make_layer(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(48, 64, generator=generator) / 8
    x = torch.randn(96, 64, generator=generator)
    settings = EncodeSettings(storage_dtype=torch.bfloat16, input_peak=float(x.abs().max()))
    stored = [parse(name).encode(weight.bfloat16(), settings=settings) for name in NAMES]
    return SwitchableLinear([*stored, None], weight), x, torch.randn(96, 48, generator=generator)


def gates_gradient(layer, choice, x, slope):
    gate = torch.zeros(len(NAMES) + 1, dtype=torch.float64)
    gate[choice] = 1.0
    layer.select(choice, gate.requires_grad_())
    return torch.autograd.grad(layer(x), gate, slope)[0]


def test_the_gradient_of_gates_is_nearly_that_of_the_outputs_under_every_option():
    """Exact for the chosen option; the rest is off by a small part of what rounding the inputs changes."""
    off, size = [], []
    for seed in range(8):
        layer, x, slope = make_layer(seed)
        outputs = torch.stack([layer.output_of(x, k) for k in range(len(NAMES) + 1)]).double()
        plain = torch.stack(
            [x.double() @ layer._known.listed[k].dequantize(torch.float64).T for k in range(len(NAMES))]
        )
        wanted = torch.einsum("kto,to->k", outputs, slope.double())
        for choice in range(len(NAMES) + 1):
            found = gates_gradient(layer, choice, x, slope)
            torch.testing.assert_close(found[choice], wanted[choice], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(found[-1], wanted[-1], rtol=1e-4, atol=1e-3)
            off.append((found - wanted)[:-1])
            size.append(wanted[:-1] - torch.einsum("kto,to->k", plain, slope.double()))
    share = torch.stack(off).square().mean(dim=0) / torch.stack(size).square().mean(dim=0)
    assert (share.sqrt() < 0.2).all()


def test_inputs_without_gradient_count_as_well():
    layer, x, slope = make_layer(0)
    with_x = gates_gradient(layer, 1, x.clone().requires_grad_(), slope)
    torch.testing.assert_close(gates_gradient(layer, 1, x, slope), with_x)


def test_options_that_are_not_active_get_zero():
    layer, x, slope = make_layer(0)
    gate = torch.eye(len(NAMES) + 1, dtype=torch.float64)[0].requires_grad_()
    layer.select(0, gate, active=[True, False, False, True, False])
    (found,) = torch.autograd.grad(layer(x), gate, slope)
    assert (found[[1, 2, 4]] == 0).all()
    assert (found[[0, 3]] == gates_gradient(layer, 0, x, slope)[[0, 3]]).all()


def test_the_change_along_a_gradient_is_that_of_the_rounded_inputs():
    rule = InputRounding("e2m1", group=16, global_scale=300.0)
    x, gradient = torch.randn(2, 3, 48), torch.randn(6, 48)
    wanted = ((rule(x) - x).double().reshape(6, 48) * gradient.double()).sum()
    torch.testing.assert_close(change_along(rule, x, gradient), wanted, rtol=1e-5, atol=1e-6)
