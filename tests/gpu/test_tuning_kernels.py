"""The GPU kernels of tuning compute what torch operations do, and train as well."""

import pytest
import torch

from rco.compression.language_model_objective import Reference
from rco.compression.tunable_model import TunableWeight, tunable_model
from rco.compression.tuning import TuningSettings, TuningText, _Optimizer, tune
from rco.formats.coded import pack
from rco.formats.integer import PackedWeight, TunableGrid
from rco.models.shapes import random_model
from rco.testing.search_cases import random_packed, random_tokens

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def packed(rows, cols, bits, group, dtype, symmetric):
    """A random packed weight with some negative scales."""
    torch.manual_seed(bits)
    size = min(group, cols)
    shape = (rows, -(-cols // size))
    codes = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8)
    scales = ((torch.rand(shape) - 0.1) * 0.1).to(dtype)
    zeros = None if symmetric else torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    weight = PackedWeight(pack(codes, bits), scales, zeros, bits, (rows, cols), size)
    return weight.to(CUDA)


CASES = [
    (2, 64, torch.bfloat16, False, 192),
    (3, 128, torch.float16, True, 300),
    (4, 128, torch.bfloat16, True, 512),
    (5, 32, torch.float32, False, 96),
    (8, 5000, torch.bfloat16, False, 3000),
    (3, 100, torch.bfloat16, False, 250),
]


@pytest.mark.parametrize(("bits", "group", "dtype", "symmetric", "cols"), CASES)
def test_scales_are_decoded_and_differentiated_as_by_torch(bits, group, dtype, symmetric, cols):
    weight = packed(37, cols, bits, group, dtype, symmetric)
    tunable = TunableGrid(weight, None, codes=False)
    tunable.scales.data += torch.randn_like(tunable.scales) * 0.02
    kernels = tunable.kernels()
    for kind in (torch.float32, torch.bfloat16):
        out = torch.empty(weight.shape, dtype=kind, device=CUDA)
        kernels.decode(out)
        assert torch.equal(out, tunable().detach().to(kind))
    assert torch.equal(tunable.stored().dequantize(), tunable().detach())
    slope = torch.randn(weight.shape, device=CUDA)
    decoded = tunable()
    (wanted,) = torch.autograd.grad(decoded, [tunable.scales], slope.to(decoded.dtype))
    found = kernels.gradients(slope.to(decoded.dtype))["scales"]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class _OneWeight:
    """What the optimizer wants of a model, for one trainable weight."""

    def __init__(self, weight):
        self.weights = [weight]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("bits", "group", "dtype", "symmetric", "cols"), CASES)
def test_a_step_of_adam_is_that_of_torch(bits, group, dtype, symmetric, cols, half, monkeypatch):
    stored = packed(64, cols, bits, group, dtype, symmetric)
    found = {}
    for kernels in (True, False):
        module = torch.nn.Linear(cols, 64, bias=False, device=CUDA)
        torch.manual_seed(1)
        original = torch.randn(64, cols, device=CUDA) * 0.1
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(TunableGrid, "kernels", lambda self: None)
            tunable = TunableGrid(stored, original, codes=True)
            tunable.offsets.data += torch.randn(64, cols, device=CUDA) * 0.6
            weight = TunableWeight(
                ("weight",), module.weight, tunable, stored, lambda t: t.unsqueeze(0),
                lambda t, v: t.copy_(v[0]), 0,
            )  # fmt: skip
            settings = TuningSettings(half=half, code_rate=0.3, scale_rate=0.1)
            optimizer = _Optimizer(_OneWeight(weight), settings)
            weight.decode()
            for step in range(3):
                torch.manual_seed(2 + step)
                module.weight.grad = torch.randn(64, cols, device=CUDA).to(dtype).float()
                optimizer.prepare(step, 0.5)
                optimizer.update()
            assert torch.equal(module.weight.data, tunable.stored().dequantize(torch.float32))
            found[kernels] = (tunable.offsets.detach().float(), tunable.scales.detach(), module.weight.data)
    offsets, scales, decoded = (torch.stack(pair) for pair in zip(found[True], found[False], strict=True))
    torch.testing.assert_close(scales[0], scales[1], rtol=1e-4, atol=1e-6)
    far = (offsets[0] - offsets[1]).abs() > (4e-3 if half else 1e-4)
    assert far.float().mean() < 2e-3  # a sum in another order may round a second moment near zero otherwise
    close = torch.isclose(decoded[0], decoded[1], rtol=1e-2)
    assert (~close).float().mean() < 5e-3  # so may a code


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["scales", "full", "blocks"])
def test_training_by_kernels_is_as_good_as_by_torch(mode, checkpointing, monkeypatch, caplog):
    loaded = random_model("quick", device=CUDA, dtype=torch.float32)
    torch.manual_seed(0)
    weights = {
        info.name: random_packed(info.out_features, info.in_features, 3, 64, CUDA)
        for info in loaded.layout.linears(loaded.model)
    }
    texts = [
        TuningText(each, Reference.compute(loaded, each, 1))
        for each in (random_tokens(loaded, 4, 64, 0), random_tokens(loaded, 2, 64, 1))
    ]
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    settings = TuningSettings(
        mode=mode, tokens=12 * 2 * 64, batch_size=2, at_once=2, evaluations=2, half=True, scale_rate=0.05,
        checkpointing=checkpointing,
    )  # fmt: skip
    head = loaded.layout.head(loaded.model)
    fast = tune(loaded, weights, head, *texts, settings)
    assert not any("recorded" in message for message in caplog.messages)
    with monkeypatch.context() as patch:
        patch.setattr(TunableGrid, "kernels", lambda self: None)
        slow = tune(loaded, weights, head, *texts, settings)
    assert fast.before == pytest.approx(slow.before, rel=1e-4)
    assert fast.after < fast.before
    assert fast.before - fast.after == pytest.approx(slow.before - slow.after, rel=0.1)
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_scales_alone_keep_no_gradient_of_a_weight():
    loaded = random_model("quick", device=CUDA, dtype=torch.float32)
    weights = {
        info.name: random_packed(info.out_features, info.in_features, 3, 64, CUDA)
        for info in loaded.layout.linears(loaded.model)
    }
    tokens = random_tokens(loaded, 1, 64).tokens.to(CUDA)
    with tunable_model(loaded, weights, codes=lambda _: False) as model:
        loaded.layout.final_hidden(loaded.model, tokens).square().mean().backward()
        assert all(weight.parameter.grad is None for weight in model.weights)
        assert all(set(weight.gradients()) == {"scales"} for weight in model.weights)
