from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.formats import coded, products
from rco.formats.integer import PackedWeight, pack, packed_words, unpack
from rco.formats.products import inner_products

WIDTHS = range(1, 9)
RAGGED = [1, 2, 7, 31, 32, 33, 64, 65, 100]
STORAGE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@contextmanager
def on_torch() -> Iterator[None]:
    """Inside, operations of torch do what compiled loops do on a CPU, as on devices that have neither."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (coded, products):
            patch.setattr(module, "on_compiled_path", lambda tensor: False)
        yield


def make(
    bits: int, rows: int, cols: int, group: int, symmetric: bool, dtype: torch.dtype, seed: int = 0
) -> PackedWeight:
    rng = torch.Generator().manual_seed(seed)
    groups = -(-cols // group)
    codes = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8, generator=rng)
    # From ordinary to subnormal in float16, and of both signs.
    spread = torch.randint(-18, 2, (rows, groups), generator=rng).double()
    scales = (torch.randn(rows, groups, generator=rng, dtype=torch.float64) * 2.0**spread).to(dtype)
    zeros = (
        None if symmetric else torch.randint(0, 1 << bits, (rows, groups), dtype=torch.uint8, generator=rng)
    )
    return PackedWeight(pack(codes, bits), scales, zeros, bits, (rows, cols), group)


def decode_slowly(weight: PackedWeight) -> torch.Tensor:
    """One scalar at a time from the bits, sharing no code with the package."""
    rows, cols = weight.shape
    result = torch.zeros(rows, cols, dtype=weight.scales.dtype)
    for r in range(rows):
        stream = sum((int(w) & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(weight.packed[r]))
        for c in range(cols):
            code = (stream >> (c * weight.bits)) & ((1 << weight.bits) - 1)
            g = c // weight.group_size
            zero = 1 << (weight.bits - 1) if weight.zeros is None else int(weight.zeros[r, g])
            exact = float(code - zero) * float(weight.scales[r, g])
            result[r, c] = torch.tensor(exact, dtype=torch.float64).to(weight.scales.dtype)
    return result


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("cols", RAGGED)
def test_pack_is_the_layout_of_compressed_tensors_and_unpack_inverts_it(bits: int, cols: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    rng = torch.Generator().manual_seed(bits * 1000 + cols)
    codes = torch.randint(0, 1 << bits, (5, cols), dtype=torch.uint8, generator=rng)
    packed = pack(codes, bits)
    signed = (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    assert packed.dtype == torch.int32
    assert packed.shape == (5, packed_words(cols, bits))
    assert torch.equal(packed, helpers.pack_to_int32(signed, bits))
    assert torch.equal(unpack(packed, bits, cols), codes)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("cols", RAGGED)
def test_portable_packing_agrees_with_compiled(bits: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(cols)
    packed = torch.randint(-(2**31), 2**31, (3, packed_words(cols, bits)), dtype=torch.int32, generator=rng)
    compiled = unpack(packed, bits, cols)
    again = pack(compiled, bits)
    monkeypatch.setattr(coded, "on_compiled_path", lambda tensor: False)
    assert torch.equal(unpack(packed, bits, cols), compiled)
    assert torch.equal(pack(compiled, bits), again)


@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 4),
    cols=st.integers(1, 70),
    group=st.integers(1, 80),
    symmetric=st.booleans(),
    dtype=st.sampled_from(STORAGE),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_dequantize_is_one_rounding_of_the_exact_product(
    bits: int, rows: int, cols: int, group: int, symmetric: bool, dtype: torch.dtype, seed: int
) -> None:
    weight = make(bits, rows, cols, group, symmetric, dtype, seed)
    expected = decode_slowly(weight)
    assert torch.equal(weight.dequantize(), expected)
    with on_torch():
        assert torch.equal(weight.dequantize(), expected)
    for target in STORAGE:
        assert torch.equal(weight.dequantize(target), expected.to(target))
        buffer = torch.full((rows, cols), 7.0, dtype=target)
        assert weight.dequantize(out=buffer) is buffer
        assert torch.equal(buffer, expected.to(target))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("dtype", STORAGE)
def test_dequantize_equals_the_decoder_of_compressed_tensors(
    bits: int, symmetric: bool, group: int, dtype: torch.dtype
) -> None:
    ct = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    rows, cols = 64, 96
    weight = make(bits, rows, cols, group, symmetric, dtype)
    grouped = {"strategy": "group", "group_size": group} if group < cols else {"strategy": "channel"}
    arguments = quantization.QuantizationArgs(num_bits=bits, symmetric=symmetric, **grouped)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {
        "weight_packed": weight.packed,
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        state["weight_zero_point"] = pack(weight.zeros.T.contiguous(), bits).T.contiguous()
    decoded = ct.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert decoded.dtype == dtype
    assert torch.equal(weight.dequantize(), decoded)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("rows", "cols", "group"), [(3, 5, 8), (17, 100, 32), (300, 321, 64), (4, 700, 700)])
def test_inner_products_match_autograd_through_the_mixture(
    dtype: torch.dtype, rows: int, cols: int, group: int
) -> None:
    rng = torch.Generator().manual_seed(rows)
    options: list[PackedWeight | torch.Tensor | None] = [
        make(bits, rows, cols, group, bits % 2 == 0, dtype, seed=bits) for bits in WIDTHS
    ]
    options += [torch.randn(rows, cols, generator=rng).to(dtype), None]
    dense = [
        torch.zeros(rows, cols) if o is None else (o.dequantize() if isinstance(o, PackedWeight) else o)
        for o in options
    ]
    stack = torch.stack([d.double() for d in dense])
    gates = torch.zeros(len(options), dtype=torch.float64)
    gates[2] = 1.0
    gates.requires_grad_()
    inputs = torch.randn(6, cols, generator=rng, dtype=torch.float64)
    weight = torch.einsum("k,koi->oi", gates, stack)
    weight.retain_grad()
    (inputs @ weight.T).square().sum().backward()
    gradient = weight.grad
    scale = (gradient.abs() * stack.abs()).sum(dim=(1, 2)).clamp_min(1e-300)

    exact = inner_products(gradient, options)
    assert exact.dtype == torch.float64
    assert ((exact - gates.grad).abs() / scale).max() < 1e-14
    assert torch.equal(inner_products(gradient, options[2:3])[0], exact[2])
    assert torch.equal(options[2].format.inner_products(options[2], gradient)[0], exact[2])

    for low, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)):
        coarse = (gradient / gradient.abs().max()).to(low)
        expected = (coarse.double() * stack).sum(dim=(1, 2))
        size = (coarse.double().abs() * stack.abs()).sum(dim=(1, 2)).clamp_min(1e-300)
        assert ((inner_products(coarse, options) - expected).abs() / size).max() < tolerance
        with on_torch():
            assert ((inner_products(coarse, options) - expected).abs() / size).max() < tolerance


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    weight = make(3, 500, 300, 64, False, torch.bfloat16)
    gradient = torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((inner_products(gradient, [weight]), weight.dequantize(), weight.codes()))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_bytes_and_device_copies() -> None:
    weight = make(3, 8, 100, 32, False, torch.bfloat16)
    assert weight.nbytes == 8 * packed_words(100, 3) * 4 + 8 * 4 * 2 + 8 * 4
    assert weight.to("cpu").device == torch.device("cpu")
    with torch.inference_mode():
        assert torch.equal(weight.dequantize(), decode_slowly(weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 9}, "1 to 8 bits"),
        ({"bits": 4}, "packs into int32"),
        ({"group_size": 0}, "at least 1"),
        ({"group_size": 16}, "Scales must be"),
        ({"scales": torch.zeros(8, 4, dtype=torch.int32)}, "floating point"),
        ({"zeros": torch.zeros(8, 4)}, "uint8"),
    ],
)
def test_inconsistent_parts_are_refused(change: dict[str, object], message: str) -> None:
    weight = make(3, 8, 100, 32, False, torch.bfloat16)
    parts = {
        name: getattr(weight, name) for name in ("packed", "scales", "zeros", "bits", "shape", "group_size")
    }
    with pytest.raises(ValueError, match=message):
        PackedWeight(**{**parts, **change})


def test_bad_arguments_are_refused() -> None:
    weight = make(3, 8, 100, 32, False, torch.bfloat16)
    with pytest.raises(ValueError, match="does not fit into 2 bits"):
        pack(torch.full((1, 1), 4, dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match="uint8 codes"):
        pack(torch.zeros(1, 1), 2)
    with pytest.raises(ValueError, match="rows of 10 words"):
        unpack(weight.packed[:, 1:], 3, 100)
    with pytest.raises(ValueError, match="Option 0"):
        inner_products(torch.zeros(8, 99), [weight])
    with pytest.raises(ValueError, match="out must be"):
        weight.dequantize(out=torch.zeros(8, 99))
