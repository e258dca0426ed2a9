"""GGUF files: read, written and measured to the byte; what is damaged is named."""

import gc
import struct

import numpy as np
import pytest
import torch
from gguf_models import byte_tokenizer, tiny_gguf

from rco.models import gguf_file
from rco.models.gguf_conversion import convert_to_gguf, ensure_gguf
from rco.models.gguf_file import (
    TYPE_NUMBERS,
    GGUFFileError,
    GGUFReader,
    Metadata,
    TensorEntry,
    encoded_numbers,
    encoded_value,
    file_bytes,
    write_gguf,
)
from rco.models.loading import load_model, locate_model, wrap_model
from rco.models.zoo import ModelError
from rco.testing.tiny_models import tiny_model

gguf = pytest.importorskip("gguf", reason="the reference reader is in the extra gguf")

VALUES = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.count": 7,
    "a.number": 0.5,
    "a.text": "größer",
    "a.list": ["one", "", "drei"],
}
TENSORS = {"x": (3, 32), "a longer name": (5,), "y": (2, 3, 64)}


def write(path, alignment=32):
    metadata = Metadata(
        {
            **{key: encoded_value(value) for key, value in VALUES.items()},
            "a.numbers": encoded_numbers([3, -4]),
            "general.alignment": encoded_value(alignment),
        }
    )
    rng = np.random.default_rng(0)
    tensors = []
    for name, shape in TENSORS.items():
        entry = TensorEntry(name, shape, TYPE_NUMBERS["f32"])
        data = rng.standard_normal(shape).astype(np.float32)
        tensors.append((entry, data))
    size = write_gguf(
        path, metadata, [(entry, lambda data=data: data.data) for entry, data in tensors], alignment
    )
    assert size == path.stat().st_size == file_bytes(metadata, [entry for entry, _ in tensors], alignment)
    return {entry.name: data for entry, data in tensors}


@pytest.mark.parametrize("alignment", [32, 64])
def test_a_written_file_is_read_here_and_by_the_gguf_package(tmp_path, alignment):
    expected = write(tmp_path / "a.gguf", alignment)
    ours, theirs = GGUFReader(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    assert ours.alignment == alignment
    for key, value in {**VALUES, "a.numbers": [3, -4]}.items():
        assert ours.metadata.get(key) == value
        assert theirs.fields[key].contents() == value
    assert ours.metadata.get("no.such.key", 5) == 5
    assert [tensor.name for tensor in theirs.tensors] == list(TENSORS)
    for tensor in theirs.tensors:
        assert np.array_equal(tensor.data, expected[tensor.name])
        assert np.array_equal(ours.decode(tensor.name).numpy(), expected[tensor.name])
        assert ours.tensors[tensor.name].nbytes == tensor.n_bytes


def test_a_file_copied_tensor_by_tensor_is_the_same(tmp_path):
    path = tiny_gguf(tmp_path / "a.gguf")
    reader = GGUFReader(path)
    tensors = [(entry, lambda name=entry.name: reader.data(name)) for entry in reader.tensors.values()]
    write_gguf(tmp_path / "b.gguf", reader.metadata, tensors)
    assert (tmp_path / "b.gguf").read_bytes() == path.read_bytes()
    with pytest.raises(FileExistsError):
        write_gguf(tmp_path / "b.gguf", reader.metadata, tensors)
    short = [(tensors[0][0], lambda: b"too short")]
    with pytest.raises(ValueError, match="9 bytes of data instead of"):
        write_gguf(tmp_path / "c.gguf", reader.metadata, short)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_loads_as_itself(tmp_path, architecture):
    # transformers reads no width of heads from the file; 128 is its default for qwen3.
    width = 128 if architecture == "qwen3" else 8
    model = tiny_model(architecture, vocab_size=288, head_dim=width)
    loaded = wrap_model(model, byte_tokenizer(), name="tiny")
    convert_to_gguf(loaded, tmp_path / "a.gguf")
    found = load_model(tmp_path / "a.gguf")
    assert found.gguf == tmp_path / "a.gguf"
    text = "the cat's 1234 ways, then\n\n  the the"
    ids = loaded.tokenizer(text)["input_ids"]
    assert found.tokenizer(text)["input_ids"] == ids
    with torch.no_grad():
        expected, logits = (each.model(torch.tensor([ids])).logits for each in (loaded, found))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_converted_is_refused(tmp_path):
    for model, tokenizer, reason in (
        (tiny_model("gemma2"), byte_tokenizer(), "convert_hf_to_gguf.py"),
        (tiny_model("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
         byte_tokenizer(), "scales its rotary embedding"),
        (tiny_model("llama"), None, "no tokenizer"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=reason):
            convert_to_gguf(wrap_model(model, tokenizer), tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_damaged_files_are_named_at_once(tmp_path):
    path = tmp_path / "a.gguf"
    write(path)
    whole = path.read_bytes()
    header = GGUFReader(path)._starts["x"]
    for cut in [0, 3, 23, 40, 200, header - 40, header + 5, len(whole) - 64]:
        path.write_bytes(whole[:cut])
        with pytest.raises(GGUFFileError, match=r"cut off|too few"):
            GGUFReader(path)
        with pytest.raises(ModelError, match=r"a\.gguf.*get it again"):
            locate_model(path)
    path.write_bytes(b"PK\3\4" + whole[4:])
    with pytest.raises(GGUFFileError, match="is not a GGUF file"):
        GGUFReader(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(GGUFFileError, match="version 1"):
        GGUFReader(path)
    unknown = whole.replace(TensorEntry("x", (3, 32), 0).entry(0), TensorEntry("x", (3, 32), 99).entry(0))
    path.write_bytes(unknown)
    with pytest.raises(GGUFFileError, match="number 99"):
        GGUFReader(path)
    with pytest.raises(GGUFFileError, match="cannot be read"):
        GGUFReader(tmp_path / "missing.gguf")


def test_a_model_in_memory_gets_a_file_for_as_long_as_it_lives():
    loaded = wrap_model(tiny_model("llama", vocab_size=288), byte_tokenizer(), name="tiny")
    ensure_gguf(loaded)
    path = loaded.gguf
    assert GGUFReader(path).architecture == "llama"
    ensure_gguf(loaded)
    assert loaded.gguf == path
    del loaded
    gc.collect()
    assert not path.exists()


def test_every_type_that_transformers_reader_decodes_has_a_size_here():
    quants = pytest.importorskip("gguf.quants")
    from gguf.constants import GGML_QUANT_SIZES

    for kind in quants._type_traits:
        assert gguf_file._SIZES[int(kind)] == tuple(GGML_QUANT_SIZES[kind]), kind.name
