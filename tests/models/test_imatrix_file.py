"""Importance matrices in llama.cpp's files, and as measured."""

import struct

import numpy as np
import pytest
import torch
from gguf_models import load_tiny

from rco.compression.candidates import CandidateSettings, measure_importances, read_importances
from rco.compression.gguf_target import GGUFTarget, parse_types
from rco.compression.plan import make_gguf_plan
from rco.data.calibration import CalibrationSet
from rco.models.gguf_file import GGUFReader
from rco.models.imatrix_file import ImportanceMatrix
from rco.models.moe.linears import model_linears
from rco.models.zoo import ModelError

pytest.importorskip("gguf", reason="GGUF files need the extra gguf")

MEANS = {"blk.0.attn_q.weight": torch.rand(1, 8) + 0.1, "blk.0.ffn_up_exps.weight": torch.rand(3, 4) + 0.1}
COUNTS = {
    "blk.0.attn_q.weight": torch.tensor([50.0]),
    "blk.0.ffn_up_exps.weight": torch.tensor([7.0, 0.0, 9.0]),
}


def dat(entries, tail=b""):
    """The old form: names, calls, and means times calls."""
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, values) in entries.items():
        text = name.encode()
        parts.append(struct.pack("<i", len(text)) + text + struct.pack("<ii", calls, len(values)))
        parts.append(np.asarray(values, dtype="<f4").tobytes())
    return b"".join(parts) + tail


def test_the_new_form_is_written_and_read(tmp_path):
    written = ImportanceMatrix(MEANS, COUNTS, 5, 10, "some text")
    written.write(tmp_path / "a.gguf")
    found = ImportanceMatrix.read(tmp_path / "a.gguf")
    assert (found.chunks, found.chunk_size, found.source) == (5, 10, "some text")
    assert found.means.keys() == MEANS.keys()
    torch.testing.assert_close(found.of("blk.0.attn_q.weight", 1, 8), MEANS["blk.0.attn_q.weight"])
    experts = found.of("blk.0.ffn_up_exps.weight", 3, 4)
    torch.testing.assert_close(experts[[0, 2]], MEANS["blk.0.ffn_up_exps.weight"][[0, 2]])
    assert torch.equal(experts[1], torch.ones(4))  # as llama.cpp treats an expert that no token reached
    reader = GGUFReader(tmp_path / "a.gguf")
    assert reader.metadata.get("general.type") == "imatrix"
    assert reader.tensors["blk.0.ffn_up_exps.weight.in_sum2"].shape == (3, 4)
    assert reader.tensors["blk.0.ffn_up_exps.weight.counts"].shape == (3, 1)


def test_the_old_form_is_read(tmp_path):
    path = tmp_path / "a.dat"
    entries = {"blk.0.attn_q.weight": (4, [4.0, 8.0]), "blk.0.ffn_up_exps.weight": (2, [2.0] * 3 + [6.0] * 3)}
    path.write_bytes(dat(entries, struct.pack("<i", 12)))
    found = ImportanceMatrix.read(path).shaped({"blk.0.ffn_up_exps.weight": 2})
    assert found.chunks == 12
    assert found.of("blk.0.attn_q.weight", 1, 2).tolist() == [[1.0, 2.0]]
    assert found.of("blk.0.ffn_up_exps.weight", 2, 3).tolist() == [[1.0] * 3, [3.0] * 3]
    for broken in (b"", b"\1\0", dat(entries)[:-4], dat(entries)[:20], b"a text file, not a matrix", dat({})):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match=r"a\.dat.*make it again"):
            ImportanceMatrix.read(path)
    with pytest.raises(ModelError, match="cannot be read"):
        ImportanceMatrix.read(tmp_path / "missing.dat")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    loaded = load_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tie_word_embeddings=True)
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    types = parse_types("q4_0,q8_0", importance=True)
    return loaded, make_gguf_plan(loaded.layout, linears, GGUFTarget.of(loaded, linears), types)


def test_measured_importances_are_the_mean_squared_inputs(planned, tmp_path):
    loaded, plan = planned
    tokens = torch.randint(0, 250, (3, 16), generator=torch.Generator().manual_seed(0))
    text = CalibrationSet(tokens, torch.ones_like(tokens, dtype=torch.bool), ("a",) * 3, "test", 0, "all")
    found = measure_importances(loaded, plan, text, CandidateSettings(method="imatrix", batch_size=2))
    seen = {}

    def watch(name):
        return lambda module, inputs: seen.setdefault(name, []).append(inputs[0].detach())

    hooks = []
    for info in plan.linears:
        module = loaded.model.lm_head if info.role == "embedding" else info.module
        hooks.append(module.register_forward_pre_hook(watch(info.name)))
    with torch.no_grad():
        loaded.model(tokens)
    for hook in hooks:
        hook.remove()
    assert set(found.means) == {plan.target.names[info.name] for info in plan.linears}
    for info in plan.linears:
        inputs = torch.cat(seen[info.name]).flatten(0, 1).double()
        mean = found.of(plan.target.names[info.name], 1, info.in_features)[0].double()
        torch.testing.assert_close(mean, inputs.square().mean(dim=0), rtol=1e-3, atol=1e-9)
    found.write(tmp_path / "imatrix.gguf")
    again = read_importances(tmp_path / "imatrix.gguf", plan)
    for name in found.means:
        torch.testing.assert_close(again.means[name], found.means[name], rtol=1e-6, atol=0)


def test_a_matrix_of_another_model_is_refused(planned, tmp_path):
    _, plan = planned
    ImportanceMatrix(MEANS, COUNTS).write(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"8 numbers for blk\.0\.attn_q\.weight, the model 1 x 256"):
        read_importances(tmp_path / "a.gguf", plan)
    ImportanceMatrix(
        {"blk.9.attn_q.weight": torch.ones(1, 256)}, {"blk.9.attn_q.weight": torch.ones(1)}
    ).write(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"no entry for blk\.0\.attn_q\.weight"):
        read_importances(tmp_path / "b.gguf", plan)
    with pytest.raises(ModelError, match="without an importance matrix"):
        read_importances(plan.target.reader.path, plan)
