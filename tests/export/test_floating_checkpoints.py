"""Checkpoints of floating-point formats: stock transformers computes what the search evaluated, to the bit."""

import json

import numpy as np
import pytest
import torch

from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.core.problem import Allocation
from rco.data.calibration import CalibrationSet
from rco.evaluation.size import average_bits, checkpoint_size
from rco.export import CompressedTensorsExporter, ExportError, check_exportable, validate_for_engine
from rco.export.exporter import ExportRequest
from rco.export.schemes import scheme_config, scheme_of
from rco.formats import parse
from rco.formats.floating import FloatingPoint
from rco.formats.original import ORIGINAL
from rco.models.loading import wrap_model
from rco.testing.tiny_models import tiny_model

NAMES = tuple(FloatingPoint.listed())
PRESETS = {
    "fp8-dynamic": "FP8_DYNAMIC",
    "fp8-block-dynamic": "FP8_BLOCK",
    "int8-dynamic": "INT8",
    "nvfp4": "NVFP4A16",
    "nvfp4-a4": "NVFP4",
    "mxfp4": "MXFP4A16",
    "mxfp4-a4": "MXFP4",
    "mxfp8": "MXFP8A16",
    "mxfp8-a8": "MXFP8",
}
TOKENS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def compression(tmp_path_factory):
    """Every format, a grid of four bits and the original weights as options of a model in bfloat16."""
    model = tiny_model(
        "llama",
        dtype=torch.bfloat16,
        hidden_size=128,
        intermediate_size=128,
        head_dim=32,
        num_hidden_layers=2,
    )
    loaded = wrap_model(model)
    plan = make_plan(
        loaded.layout,
        loaded.layout.linears(model, include_head=True),
        widths=(4,),
        group_size=32,
        formats=[*map(parse, NAMES), ORIGINAL],
    )
    found = Compression(
        loaded,
        plan,
        tmp_path_factory.mktemp("floating") / "store",
        settings=CandidateSettings(batch_size=2, sweeps=1),
        compute_dtype=torch.bfloat16,
    )
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[:, -1] = False
    found.candidates(CalibrationSet(TOKENS, mask, ("random",) * 2, "random", 0, "calibration"))
    return found


def allocation_of(compression, names):
    """Formats in turn over the groups."""
    options = [option.name for option in compression.plan.options]
    rows = range(len(compression.plan.groups))
    return Allocation([options.index(names[row % len(names)]) for row in rows])


@pytest.mark.parametrize(
    "names",
    [
        *([name] for name in NAMES),
        ["nvfp4-a4", "fp8-dynamic", "original"],
        ["int4-g32", "mxfp4", "int8-dynamic", "fp8-block", "nvfp4"],
    ],
    ids="+".join,
)
def test_stock_transformers_computes_what_was_evaluated(compression, tmp_path, names):
    from transformers import AutoModelForCausalLM

    allocation = allocation_of(compression, names)
    source, weights = compression.deployed(allocation)
    summary = CompressedTensorsExporter().export(ExportRequest(source, weights, tmp_path / "out"))
    with compression.apply(allocation) as applied:
        wanted = applied.model(TOKENS).logits
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, wanted)

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    formats = {group["format"] for group in config["quantization_config"]["config_groups"].values()}
    assert config["quantization_config"]["format"] == (
        formats.pop() if len(formats) == 1 else "mixed-precision"
    )
    assert not validate_for_engine(config, "transformers")

    # Budgets count what is in the file: bits of weights and scales exactly, bytes as a close bound.
    counted = average_bits(tmp_path / "out", [info.name for info in compression.plan.linears])
    for kind, entry in (("bits", "weight_bits"), ("bpw", "stored_bits")):
        costs = compression.costs(kind)
        assert counted[entry] == costs.matrix[np.arange(len(costs.matrix)), np.asarray(allocation)].sum()
    size = compression.costs("size")
    promised = size.fixed + size.matrix[np.arange(len(size.matrix)), np.asarray(allocation)].sum()
    written = checkpoint_size(tmp_path / "out")["bytes"]
    assert summary.total_bytes == written
    assert written <= promised <= written + 16 * len(summary.tensors)


@pytest.mark.parametrize("name", PRESETS)
def test_config_groups_are_the_presets_of_compressed_tensors(name):
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    preset = schemes.PRESET_SCHEMES[PRESETS[name]]
    described = scheme_config(FloatingPoint(name))
    read = schemes.QuantizationScheme(
        targets=["Linear"], **{k: v for k, v in described.items() if k != "targets"}
    )
    for part in ("weights", "input_activations"):
        mine, theirs = getattr(read, part), preset.get(part)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            ignored = {"observer", "observer_kwargs"}  # of calibration alone
            assert mine.model_dump(exclude=ignored) == theirs.model_dump(exclude=ignored)


@pytest.mark.parametrize("scheme", [*map(FloatingPoint, NAMES), parse("int3-g64-sym"), parse("int4-channel")])
def test_a_config_group_is_read_back(scheme):
    assert scheme_of({**scheme_config(scheme), "targets": ["a.b"]}) == scheme


def test_unknown_config_groups_are_a_violation():
    group = {**scheme_config(FloatingPoint("fp8-dynamic")), "targets": ["a.b"]}
    group["input_activations"]["num_bits"] = 5
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": group},
    }
    assert scheme_of(group) is None
    assert "no known scheme" in " ".join(validate_for_engine(config, "transformers", []))


def test_formats_that_decode_to_bfloat16_need_a_model_in_it():
    loaded = wrap_model(tiny_model("llama", dtype=torch.float32))
    linears = loaded.layout.linears(loaded.model)
    check_exportable(linears, {linears[0].name: parse("fp8-dynamic")})
    with pytest.raises(ExportError, match="bfloat16"):
        check_exportable(linears, {linears[0].name: parse("nvfp4")})
