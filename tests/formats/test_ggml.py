"""ggml's block types: bits, bytes and values as in ggml and the gguf package, and the contract of formats."""

import numpy as np
import pytest
import torch

from rco import formats
from rco.formats import coded
from rco.formats.ggml.bit_layout import LAYOUTS, join, split
from rco.formats.ggml.block_types import BLOCK_TYPES, GGMLFormat
from rco.formats.ggml.float_types import FLOAT_TYPES
from rco.formats.products import inner_products
from rco.formats.stacks import decode_segments
from rco.testing import check_format

gguf = pytest.importorskip("gguf", reason="the reference decoder is in the extra gguf")
pytest.importorskip("libggml", reason="ggml's encoders are in the extra gguf")

COLUMNS = 512


def random_blocks(name, rows=5, seed=0):
    """Random bytes, with finite float16 numbers."""
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(seed)
    blocks = COLUMNS // kind.block
    data = torch.randint(0, 256, (rows, blocks, kind.block_bytes), dtype=torch.uint8, generator=generator)
    for field in ("scale", "minimum"):
        if field in LAYOUTS[name].fields:
            at = int(LAYOUTS[name].fields[field][0, 0]) // 8
            halves = torch.randn(rows, blocks, generator=generator).half()
            data[:, :, at : at + 2] = halves.view(torch.uint8).view(rows, blocks, 2)
    return data.view(rows, -1)


def reference(name, data):
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name.upper()]))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_bit_of_a_block_belongs_to_one_number(name):
    kind, layout = BLOCK_TYPES[name], LAYOUTS[name]
    places = np.concatenate([field.reshape(-1) for field in layout.fields.values()])
    assert sorted(places.tolist()) == list(range(8 * layout.block_bytes))
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.number)] == (kind.block, kind.block_bytes)
    assert gguf.GGMLQuantizationType(kind.number).name.lower() == name


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_any_blocks_decode_as_the_gguf_package_does_and_are_rebuilt(name, monkeypatch):
    data = random_blocks(name)
    weight = GGMLFormat(name).from_blocks(data, (len(data), COLUMNS))
    expected = reference(name, data)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(GGMLFormat(name).blocks(weight), data)
    assert torch.equal(weight.dequantize(torch.bfloat16), expected.bfloat16())
    with monkeypatch.context() as patch:  # torch operations alone
        patch.setattr(coded, "on_compiled_path", lambda tensor: False)
        assert torch.equal(weight.clone().dequantize(), expected)


def test_blocks_are_read_and_written_in_parts(monkeypatch):
    data = random_blocks("q4_k", rows=7)
    whole = split("q4_k", data)
    monkeypatch.setattr("rco.formats.ggml.bit_layout._CHUNK_BITS", 2 * 8 * 144 * (COLUMNS // 256))
    parts = split("q4_k", data)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert torch.equal(join("q4_k", parts), data)


def engine(name):
    return lambda tensors, shape: reference(name, tensors["weight"])


# Before its first use of an IQ2 type ggml computes tables for seconds.
SLOW = {name: pytest.mark.slow if name.startswith("iq2") else () for name in BLOCK_TYPES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in SLOW.items()])
def test_the_contract(name):
    # Weights that ggml is sure to give back are those of a single magnitude, at the end of a plain type's range.
    exact = torch.zeros if BLOCK_TYPES[name].block == 256 or name == "iq4_nl" else constant
    check_format(GGMLFormat(name), shapes=[(4, 256)], engine=engine(name), representable=exact)


def constant(shape):
    return torch.full(shape, -127 / 128)


@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_the_contract_of_floating_point_types(name):
    check_format(formats.parse(name), shapes=[(4, 72)])


@pytest.mark.parametrize("name", ["q4_k", "iq3_s", "q8_0"])
def test_importances_and_threads(name):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 512, generator=generator)
    importance = torch.rand(512, generator=generator) ** 4 + 1e-3
    format, error = GGMLFormat(name), {}
    for label, statistics in (("none", None), ("vector", importance), ("matrix", importance.diag())):
        stored = format.encode(weight, statistics)
        error[label] = float(((stored.dequantize() - weight).square() * importance).sum())
    assert error["vector"] == error["matrix"]
    assert error["vector"] <= error["none"]  # Q8_0 has no freedom to use them
    if name != "q8_0":
        assert error["vector"] < 0.95 * error["none"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        threaded = format.encode(weight, importance)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(format.blocks(threaded), format.blocks(format.encode(weight, importance)))
    (found,) = formats.encode_all([format], weight, importance)
    assert found.error == pytest.approx(error["vector"], rel=1e-4)


def test_options_of_several_types_share_a_layer():
    """Fused products and segments of types with and without minima or tables, beside a dense and an integer one."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(6, 512, generator=generator)
    names = ["q2_k", "iq3_xxs", "bf16", "q6_k", "int3-g64", "iq4_xs", "q5_1"]
    options = [formats.parse(name).encode(weight) for name in names]
    dense = torch.stack([option.dequantize(torch.float64) for option in options])
    gradient = torch.randn(6, 512, generator=generator)
    for segments in (1, 3):
        expected = (dense * gradient).view(len(names), segments, -1).sum(dim=2)
        found = inner_products(gradient, options, segments).view(len(names), segments)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    choices = np.array([5, 0, 3])
    out = decode_segments(options, choices, torch.empty(6, 512))
    for segment, choice in enumerate(choices):
        rows = slice(2 * segment, 2 * segment + 2)
        assert torch.equal(out[rows], options[choice].dequantize(torch.float32)[rows])


def test_what_cannot_be_encoded_is_refused():
    with pytest.raises(ValueError, match="blocks of 256 weights, which do not divide a row of 576"):
        GGMLFormat("q4_k").encode(torch.zeros(2, 576))
    with pytest.raises(ValueError, match="NaN or infinite"):
        GGMLFormat("q4_0").encode(torch.full((2, 64), torch.nan))
    with pytest.raises(ValueError, match="64 finite numbers"):
        GGMLFormat("q4_0").encode(torch.zeros(2, 64), torch.ones(32))
    with pytest.raises(ValueError, match="none of the block types"):
        GGMLFormat("q7_k")
    with pytest.raises(ValueError, match="largest magnitude is 1e\\+06"):
        formats.parse("f16").encode(torch.full((2, 32), 1e6))


def test_codes_that_are_on_no_grid_cannot_be_written():
    format = GGMLFormat("iq2_xxs")
    stored = format.from_blocks(random_blocks("iq2_xxs"), (5, COLUMNS))
    codes = torch.full((5, COLUMNS), 2, dtype=torch.uint8)
    broken = stored.over({**stored.tensors, "packed": coded.pack(codes, 3)})
    with pytest.raises(ValueError, match="not on the grid of iq2_xxs"):
        format.blocks(broken)
