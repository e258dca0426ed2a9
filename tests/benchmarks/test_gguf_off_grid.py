"""References off the grid of a quantized file: the type of the file has its usual error on them."""

import pytest
import torch
from gguf_models import tiny_gguf
from gguf_off_grid import write_off_grid

from rco.formats.ggml.block_types import GGMLFormat
from rco.models.gguf_file import TYPE_NUMBERS, GGUFReader, TensorEntry, write_gguf

pytest.importorskip("libggml", reason="ggml's encoders are in the extra gguf")
NAME = "blk.0.attn_q.weight"


def error(kind, weight):
    found = GGMLFormat(kind).encode(weight).dequantize(torch.float32)
    return float((found - weight).square().sum() / weight.square().sum())


def test_the_type_of_the_file_is_no_longer_exact(tmp_path):
    source = GGUFReader(tiny_gguf(tmp_path / "source.gguf", num_hidden_layers=1))
    original = source.decode(NAME)
    kind = GGMLFormat("q4_k")
    (blocks,) = kind.file_tensors(kind.encode(original)).values()
    entry = TensorEntry(NAME, source.tensors[NAME].shape, TYPE_NUMBERS["q4_k"])
    write_gguf(
        tmp_path / "q4_k.gguf", source.metadata, [(entry, lambda: memoryview(blocks.contiguous().numpy()))]
    )
    on_grid = GGUFReader(tmp_path / "q4_k.gguf").decode(NAME)
    assert error("q4_k", on_grid) < 0.01 * error("q4_k", original)
    assert (
        write_off_grid(tmp_path / "q4_k.gguf", tmp_path / "out.gguf")
        == (tmp_path / "out.gguf").stat().st_size
    )
    written = GGUFReader(tmp_path / "out.gguf")
    assert written.tensors[NAME].type_name == "bf16"
    for name in ("q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k"):
        assert error(name, written.decode(NAME)) == pytest.approx(error(name, original), rel=0.05)
