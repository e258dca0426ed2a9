import json
import struct
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rco.compression.file_size import (
    FileLayout,
    TensorSpec,
    checkpoint_bytes,
    fixed_bytes,
    fixed_tensors,
    option_bytes,
    option_tensors,
    parse_size,
    plan_shards,
    safetensors_header,
    stored_bits,
    stored_tensors,
    weight_bits,
)
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.models.layout import layout_for
from rco.testing.tiny_models import tiny_model

SCHEMES = st.one_of(
    st.just(ORIGINAL),
    st.builds(IntegerGrid, st.integers(1, 8), st.sampled_from([None, 2, 5, 16, 64, 1000]), st.booleans()),
)


class FakeLinear:
    def __init__(self, name, rows, columns, dtype=torch.bfloat16):
        self.name, self.out_features, self.in_features = name, rows, columns
        self.stored_name, self.stored_in = name, f"{name}.weight"
        self.twin, self.buffers = None, {}
        self.weight = torch.empty(rows, columns, dtype=dtype, device="meta")


def library_tensors(rows, columns, scheme, dtype):
    """What compressed-tensors itself stores for such a linear."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"strategy": "channel"} if scheme.group_size is None else {"group_size": scheme.group_size}
    arguments = QuantizationArgs(num_bits=scheme.bits, symmetric=scheme.symmetric, **strategy)
    groups = 1 if scheme.group_size is None else columns // scheme.group_size
    state = {
        "weight": torch.randn(rows, columns, dtype=dtype),
        "weight_scale": torch.ones(rows, groups, dtype=dtype),
        "weight_zero_point": torch.zeros(rows, groups, dtype=torch.int8),
    }
    packer = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    return packer.compress(state, QuantizationScheme(targets=["Linear"], weights=arguments))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("rows", [3, 64])
def test_option_tensors_are_those_of_the_library(bits, symmetric, group_size, rows):
    scheme = IntegerGrid(bits, group_size, symmetric)
    linear = FakeLinear("a.b", rows, 40)
    ours = {
        spec.name.removeprefix("a.b."): (spec.dtype, spec.shape) for spec in option_tensors(linear, scheme)
    }
    theirs = library_tensors(rows, 40, scheme, torch.bfloat16)
    assert ours == {name: (value.dtype, tuple(value.shape)) for name, value in theirs.items()}


def test_header_is_what_safetensors_reads(tmp_path):
    from safetensors import safe_open

    shard = [
        TensorSpec("ä.weight", torch.int64, (2,)),
        TensorSpec("b", torch.float32, (3, 1)),
        TensorSpec("scalar", torch.bfloat16, ()),
        TensorSpec("empty", torch.bfloat16, (0, 4)),
        TensorSpec("c", torch.bool, (3,)),
    ]
    header = safetensors_header(shard)
    assert len(header) % 8 == 0
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(sum(spec.nbytes for spec in shard)))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        for spec in shard:
            value = file.get_tensor(spec.name)
            assert (value.dtype, tuple(value.shape)) == (spec.dtype, spec.shape)


@given(
    names=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=20, unique=True),
    shapes=st.lists(st.lists(st.integers(0, 300), max_size=3), min_size=20, max_size=20),
    limit=st.integers(1, 10**6),
)
@settings(max_examples=50, deadline=None)
def test_shards_and_header_bound(names, shapes, limit):
    dtypes = [torch.bfloat16, torch.int64, torch.int32, torch.bool]
    specs = [TensorSpec(n, dtypes[i % 4], tuple(shapes[i])) for i, n in enumerate(names)]
    shards = plan_shards(specs, limit)
    assert sorted(s.name for shard in shards for s in shard) == sorted(names)
    largest = 0
    for shard in shards:
        sizes = [spec.nbytes for spec in shard]
        assert len(shard) == 1 or sum(sizes) <= limit
        offset = 0
        for spec in shard:  # aligned without gaps
            assert offset % spec.dtype.itemsize == 0
            offset += spec.nbytes
        largest = max(largest, offset)
        json.loads(safetensors_header(shard)[8:])
    for one, two in pairwise(shards):
        assert sum(s.nbytes for s in one) + sum(s.nbytes for s in two) > limit
    digits = len(str(largest))
    bound = sum(spec.header_bytes(digits) for spec in specs) + len(shards) * (8 + 30 + 3 + 7)
    actual = sum(len(safetensors_header(shard)) for shard in shards)
    assert actual <= bound <= actual + len(specs) * 2 * digits + len(shards) * 16


@lru_cache
def _model(model_type, tied):
    return tiny_model(model_type, tie_word_embeddings=tied, dtype=torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_neox"])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_sum_of_parts_bounds_the_whole(model_type, tied, data):
    model = _model(model_type, tied)
    linears = layout_for(model).linears(model, include_head=data.draw(st.booleans()))
    options = {info.name: data.draw(SCHEMES) for info in linears}
    limit = data.draw(st.sampled_from(["5GB", 4096, 20_000, 1]))
    # A tied head that stays as it is costs nothing, one that is quantized is a tensor more.
    counted = [i for i in linears if not (i.tied and options[i.name] == ORIGINAL)]
    layout = FileLayout.of(model, limit)
    predicted = fixed_bytes(model, [i.name for i in counted], layout)
    predicted += sum(option_bytes(info, options[info.name], layout) for info in counted)
    exact = checkpoint_bytes(model, linears, options, limit)
    assert exact <= predicted
    if limit == "5GB":
        count = len(fixed_tensors(model, ())) + 4 * len(linears)
        assert predicted - exact <= 2 * layout.digits * count + 64


def test_slack_is_small_on_a_realistic_size():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(40)))
    linears = [FakeLinear(str(i), 2048, 2048) for i in range(40)]
    options = {linear.name: IntegerGrid(2 + i % 7, 128, i % 2 == 0) for i, linear in enumerate(linears)}
    layout = FileLayout.of(model)
    predicted = fixed_bytes(model, list(options), layout)
    predicted += sum(option_bytes(linear, options[linear.name], layout) for linear in linears)
    exact = checkpoint_bytes(model, linears, options)
    assert exact <= predicted <= exact * 1.00002


def test_bits():
    linear = FakeLinear("x", 64, 256)
    assert weight_bits(linear, IntegerGrid(3, 64, symmetric=True)) == 64 * 256 * 3
    assert weight_bits(linear, ORIGINAL) == 64 * 256 * 16
    assert stored_bits(linear, ORIGINAL) == 64 * 256 * 16
    assert stored_bits(linear, IntegerGrid(3, 64, symmetric=True)) == 64 * 256 * 3 + 64 * 4 * 16
    assert stored_bits(linear, IntegerGrid(3, 64, symmetric=False)) == 64 * 256 * 3 + 64 * 4 * (16 + 3)
    # Rows are padded to whole words, and that is stored too.
    assert stored_bits(FakeLinear("x", 1, 11), IntegerGrid(3, symmetric=True)) == 64 + 16


def test_tied_weights_are_counted_once():
    model = tiny_model("llama", tie_word_embeddings=True)
    names = [spec.name for spec in stored_tensors(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in [
        spec.name for spec in stored_tensors(tiny_model("llama", tie_word_embeddings=False))
    ]
    # Quantizing the tied head leaves the embedding in the checkpoint.
    assert fixed_tensors(model, ["lm_head"]) == stored_tensors(model)
    with pytest.raises(ValueError, match="no linears nowhere"):
        fixed_tensors(model, ["nowhere"])


def test_sizes_and_schemes_are_checked():
    assert parse_size("3.1GB") == 3_100_000_000
    assert parse_size("5 GiB") == 5 * 2**30
    assert parse_size("800mb") == 800_000_000
    assert parse_size("17") == parse_size(17) == 17
    for bad in ("", "GB", "-1GB", "3 parsecs", 0, "nan", "inf GB"):
        with pytest.raises(ValueError, match="positive number of bytes"):
            parse_size(bad)
    for arguments in ({"bits": 9}, {"bits": 0}, {"bits": 4, "group_size": 0}):
        with pytest.raises(ValueError, match="got"):
            IntegerGrid(**arguments)
    assert IntegerGrid(4, 256, symmetric=True).on(256) == IntegerGrid(4, symmetric=True)
    assert IntegerGrid(4, 128, symmetric=True).on(256) == IntegerGrid(4, 128, symmetric=True)
