"""The GPU kernels on packed weights against the CPU's, on fresh random numbers at every width."""

import pytest
import torch

from rco.formats import parse
from rco.formats.base import EncodeSettings
from rco.formats.integer import PackedWeight, pack
from rco.formats.products import inner_products
from rco.formats.streaming import OptionStream
from rco.formats.switchable import Selection, SwitchableLinear, switchable_linear
from rco.formats.switchable_embedding import SwitchableEmbedding

gpu = pytest.importorskip(
    "rco.formats.integer_kernels_gpu", reason="the kernels are Triton's", exc_type=ImportError
)

pytestmark = pytest.mark.gpu

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32

# Each combination is compiled by itself, so shapes, types and kinds of grid are paired rather than multiplied.
# (rows, columns, group, symmetric, type): regular bfloat16 matrices have kernels of their own; then odd ones.
CASES = [
    (64, 512, 128, False, BF16), (40, 1024, 256, True, BF16), (24, 640, None, False, BF16),
    (1, 128, 128, True, BF16), (130, 384, None, True, BF16),
    (64, 256, 64, False, BF16), (48, 320, 32, True, FLOAT), (33, 96, 96, False, HALF),
    (7, 77, None, True, FLOAT), (19, 1000, 64, False, FLOAT), (5, 130, 24, True, HALF),
]  # fmt: skip


def packed(rows, cols, bits, group, symmetric, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    size = cols if group is None else min(group, cols)
    groups = -(-cols // size)
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, groups, generator=generator) * 0.1 + 0.01
    scales *= torch.where(torch.rand(rows, groups, generator=generator) < 0.3, -1.0, 1.0)
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=generator, dtype=torch.uint8)
    return PackedWeight(
        pack(codes, bits), scales.to(dtype), None if symmetric else zeros, bits, (rows, cols), size
    )


@pytest.mark.parametrize(("rows", "cols", "group", "symmetric", "dtype"), CASES)
def test_decoding_is_that_of_the_cpu_bit_for_bit(rows, cols, group, symmetric, dtype):
    for bits in range(1, 9):
        weight = packed(rows, cols, bits, group, symmetric, dtype, seed=bits)
        for target in (dtype, FLOAT) if rows == 64 else (dtype,):
            found = torch.full((rows, cols), torch.nan, dtype=target, device="cuda")
            weight.to("cuda").dequantize(out=found)
            assert torch.equal(found.cpu(), weight.dequantize(target)), (bits, target)


@pytest.mark.parametrize(("rows", "cols", "group", "symmetric", "dtype"), CASES)
def test_decoding_by_a_choice_on_the_device(rows, cols, group, symmetric, dtype):
    options = [packed(rows, cols, bits, group, symmetric, dtype, seed=bits) for bits in range(1, 9)]
    dense = torch.randn(rows, cols).to(dtype)
    listed = [*(option.to("cuda") for option in options), dense.cuda()]
    decode = gpu.chosen_decoder(listed, dtype, (rows, cols))
    choices = torch.randperm(len(listed), device="cuda")
    found = torch.full((rows, cols), torch.nan, dtype=dtype, device="cuda")
    for place, choice in zip(choices.unbind(), choices.tolist(), strict=True):
        decode(place, found)
        wanted = dense if choice == 8 else options[choice].dequantize(dtype)
        assert torch.equal(found.cpu(), wanted), choice


@pytest.mark.parametrize("tokens", [3, 160])
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=str)
@pytest.mark.parametrize(
    "names",
    [("int2-g128", "int4-g128", "int8-g128"), ("int3-g32", "int8", "q4_k", "iq4_xs", "bf16")],
    ids=len,
)
def test_an_embedding_whose_choice_is_on_the_device_is_the_one_chosen_by_the_host(names, dtype, tokens):
    torch.manual_seed(0)
    weight = torch.randn(300, 512).to("cuda", dtype)
    settings = EncodeSettings(storage_dtype=dtype)
    options = [parse(name).encode(weight.float(), settings=settings) for name in names]
    options += [None, options[1]]
    layer, count = SwitchableEmbedding(options, weight), len(options)
    ids = torch.randint(0, 300, (2, tokens), device="cuda")
    slope, places = torch.randn(2, tokens, 512, device="cuda").to(dtype), torch.arange(count, device="cuda")
    assert layer.supports_device_choice(dtype)
    for choice in range(count):
        found = []
        for place in (None, places[choice]):
            gate = torch.eye(count, dtype=torch.float64, device="cuda")[choice].requires_grad_()
            layer.select(choice if place is None else (choice + 2) % count, gate, place=place)
            rows = layer(ids)
            found.append([rows.detach(), *torch.autograd.grad(rows, gate, slope)])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
        option = options[choice]
        dense = weight if option is None else option.dequantize(dtype)
        assert torch.equal(found[0][0], dense[ids])


@pytest.mark.parametrize(("rows", "cols", "group", "symmetric", "dtype"), CASES)
def test_inner_products_are_those_of_float64(rows, cols, group, symmetric, dtype):
    options = [packed(rows, cols, bits, group, symmetric, dtype, seed=10 + bits) for bits in range(1, 9)]
    dense = torch.randn(rows, cols).to(dtype)
    for gradient_dtype in (dtype, FLOAT) if rows == 64 else (dtype,):
        gradient = torch.randn(rows, cols).to(gradient_dtype)
        exact = [option.dequantize(torch.float64) for option in options] + [dense.double()]
        wanted = torch.stack([(gradient.double() * value).sum() for value in exact])
        sizes = torch.stack([(gradient.double() * value).abs().sum() for value in exact])
        on_gpu = [*(option.to("cuda") for option in options), dense.cuda()]
        found = inner_products(gradient.cuda(), on_gpu)
        assert found.dtype == torch.float64
        assert ((found.cpu() - wanted).abs() <= 1e-6 * sizes).all(), (found.cpu() - wanted) / sizes
        some = inner_products(gradient.cuda(), [on_gpu[0], None, on_gpu[3], None])
        assert torch.equal(some[[0, 2]], found[[0, 3]])
        assert not some[[1, 3]].any()
        if rows % 2 == 0:  # two matrices, one below the other
            halves = inner_products(gradient.cuda(), on_gpu, 2)
            torch.testing.assert_close(halves.sum(1), found, rtol=0, atol=float(1e-6 * sizes.max()))
            top = torch.stack([(gradient.double() * value)[: rows // 2].sum() for value in exact])
            assert ((halves[:, 0].cpu() - top).abs() <= 1e-6 * sizes).all()


def test_same_result_every_time_and_float64_by_torch():
    options = [packed(512, 1024, bits, 128, False, torch.bfloat16, bits).to("cuda") for bits in (2, 5, 8)]
    gradient = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    first = inner_products(gradient, options)
    assert all(torch.equal(first, inner_products(gradient, options)) for _ in range(5))
    torch.testing.assert_close(inner_products(gradient.double(), options), first, rtol=1e-5, atol=1e-5)


def test_layer_and_its_gradients_are_those_of_float64():
    torch.manual_seed(0)
    options = [packed(96, 256, bits, 128, False, torch.bfloat16, bits) for bits in (2, 3, 8)]
    x, bias = torch.randn(300, 256).bfloat16(), torch.randn(96).bfloat16()
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        gate = torch.tensor([0.0, 1.0, 0.0], device=device, dtype=torch.float64).requires_grad_()
        here = [option.to(device) for option in options]
        leaf = x.to(device, dtype).requires_grad_()
        y = switchable_linear(leaf, here, Selection(1, gate), bias.to(device, dtype))
        (y.double() * torch.linspace(-1, 1, 96, device=device)).mean().backward()
        results.append((y.detach(), leaf.grad, gate.grad))
    for mine, wanted in zip(results[1], results[0], strict=True):
        error = (mine.cpu().double() - wanted).norm() / wanted.norm()
        assert error < 5e-3


@pytest.mark.parametrize("with_original", [False, True])
def test_streamed_options_give_what_resident_ones_give(with_original):
    torch.manual_seed(1)
    shapes = [(128, 256), (256, 128), (64, 256), (256, 64), (128, 256)]
    stream = OptionStream(torch.device("cuda"))
    originals = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    layers = []
    for index, (rows, cols) in enumerate(shapes):
        options = [
            packed(rows, cols, bits, 64, index % 2 == 0, torch.bfloat16, index + bits) for bits in (2, 3, 4)
        ]
        extra = [None] if with_original else []
        resident = SwitchableLinear([*(o.to("cuda") for o in options), *extra], originals[index])
        streamed = SwitchableLinear([*options, *extra], originals[index], stream=stream)
        assert resident.packed_bytes == streamed.packed_bytes
        layers.append((resident, streamed))
    count = 3 + with_original
    for sample in range(4):  # the first pass learns the order, the others are fetched ahead
        x = torch.randn(50, 256, device="cuda").bfloat16()
        found = []
        for which in range(2):
            gates = torch.zeros(len(layers), count, dtype=torch.float64, device="cuda")
            for index in range(len(layers)):
                gates[index, (sample + index) % count] = 1.0
            gates.requires_grad_()
            for index, pair in enumerate(layers):
                pair[which].select((sample + index) % count, gates[index])
            if which:
                stream.restart()
            leaf = x.clone().requires_grad_()
            a = layers[1][which](layers[0][which](leaf))
            b = layers[3][which](torch.relu(layers[2][which](a)))
            layers[4][which](b).float().square().mean().backward()
            found.append((leaf.grad, gates.grad))
        for resident, streamed in zip(*found, strict=True):
            assert torch.equal(resident, streamed)
