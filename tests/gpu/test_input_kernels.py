"""The GPU kernel that rounds inputs: bit for bit what torch operations do on a CPU."""

import pytest
import torch

from rco.formats import parse
from rco.formats.base import EncodeSettings
from rco.formats.input_rounding import InputRounding, change_along
from rco.formats.switchable import SwitchableLinear

input_kernels_triton = pytest.importorskip(
    "rco.formats.input_kernels_triton", reason="the kernels are Triton's", exc_type=ImportError
)

pytestmark = pytest.mark.gpu

RULES = [
    InputRounding("e4m3"),
    InputRounding("int8"),
    InputRounding("e4m3", group=128),
    InputRounding("e2m1", group=32, powers=True),
    InputRounding("e4m3", group=32, powers=True),
    InputRounding("e2m1", group=16, global_scale=896.0),
    InputRounding("e2m1", group=16, global_scale=37.3),
]


def inputs(shape, size, dtype):
    """Inputs of very different sizes, with a token of zeros, ties between elements, and an outlier."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp() * size
    x[0] = 0.0
    flat = x.view(-1)
    flat[-130:-100] = torch.arange(30) * 0.25 * size
    flat[-1] = 1e4 if size > 1 else 5.0
    return x.clamp(-6e4, 6e4).to(dtype)  # finite in float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_inputs_are_rounded_as_by_torch(rule, dtype):
    for shape in ((3, 5, 256), (7, 128), (2, 384), (64, 12288)):
        for size in (1.0, 1e-3, 300.0):
            x = inputs(shape, size, dtype)
            if not input_kernels_triton.takes(rule, x):
                assert dtype == torch.float16
                assert rule.powers
                continue
            wanted = rule.by_torch(x)
            assert torch.equal(rule(x.cuda()).cpu(), wanted)
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            products = (wanted.double() - x.double()) * gradient.double()
            found = float(change_along(rule, x.cuda(), gradient.cuda()))
            assert found == pytest.approx(float(products.sum()), abs=2e-6 * float(products.abs().sum()))


def test_odd_shapes_take_torch_operations():
    x = torch.randn(4, 100, device="cuda", dtype=torch.bfloat16)
    rule = InputRounding("e4m3", group=128)
    assert not input_kernels_triton.takes(rule, x)
    assert rule(x).shape == x.shape


def test_a_layer_has_the_gradient_of_its_gates_on_a_cpu():
    torch.manual_seed(0)
    names = ("nvfp4-a4", "fp8-dynamic", "int8-dynamic")
    weight, x, slope = torch.randn(96, 256) / 16, torch.randn(200, 256), torch.randn(200, 96)
    settings = EncodeSettings(storage_dtype=torch.bfloat16, input_peak=float(x.abs().max()))
    stored = [parse(name).encode(weight.bfloat16(), settings=settings) for name in names]
    for choice in range(4):
        found = []
        for device in ("cpu", "cuda"):
            layer = SwitchableLinear([*(each.to(device) for each in stored), None], weight.to(device))
            gate = torch.eye(4, dtype=torch.float64, device=device)[choice].requires_grad_()
            layer.select(choice, gate)
            leaf = x.to(device).requires_grad_()
            gradients = torch.autograd.grad(layer(leaf), [gate, leaf], slope.to(device))
            found.append([each.cpu() for each in gradients])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("columns", [256, 576])
def test_a_choice_on_the_device_gives_what_one_on_the_host_does(columns):
    torch.manual_seed(0)
    names = ("nvfp4-a4", "fp8-dynamic", "mxfp8-a8", "nvfp4")
    weight = (torch.randn(96, columns) / 16).bfloat16().cuda()
    x, slope = torch.randn(2, 50, columns).bfloat16().cuda(), torch.randn(2, 50, 96).bfloat16().cuda()
    settings = EncodeSettings(storage_dtype=torch.bfloat16, input_peak=4.0)
    stored = [parse(name).encode(weight, settings=settings) for name in names]
    layer = SwitchableLinear([*stored, None], weight)
    assert layer.supports_device_choice(torch.bfloat16)
    choices = torch.arange(5, device="cuda")
    for choice in range(5):
        found = []
        for place in (None, choices[choice]):
            gate = torch.eye(5, dtype=torch.float64, device="cuda")[choice].requires_grad_()
            # Where the choice is read from the device, the one of the host is another.
            layer.select(choice if place is None else 0, gate, place=place)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            found.append([y.detach(), *torch.autograd.grad(y, [gate, leaf], slope)])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
