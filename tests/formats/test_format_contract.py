"""Every family of formats, and the one that the documentation adds, satisfies the contract."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from rco import formats, registry
from rco.cli import main
from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.core.search import RCO
from rco.data.calibration import CalibrationSet
from rco.export.dense import DenseExporter
from rco.export.exporter import ExportRequest
from rco.formats.base import EncodeSettings, Stored
from rco.formats.integer import IntegerGrid, PackedWeight
from rco.formats.stacks import decode_segments
from rco.formats.switchable import SwitchableLinear
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.testing import check_format
from rco.testing.format_checks import random_weight
from rco.testing.tiny_models import save_tiny, tiny_model

NAMES = {
    "integer": [
        *(f"int{bits}-g64" for bits in range(1, 9)),
        "int2-channel-sym",
        "int3-g32-sym",
        "int4-g7",
        "int5-g5-sym",
        "int8-channel",
    ],
    "removed": ["removed"],
}
ELSEWHERE = ("ggml", "ggml-float", "floating")  # with their engines, in test_ggml.py and test_floating.py
# Families that need no more than the contract: a line in the table is enough.
NAMES |= {
    family: list(registry.load(registry.FORMATS, family, "format family").listed())
    for family in registry.FORMATS
    if family not in (*NAMES, *ELSEWHERE)
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "add_a_format.md"


def test_every_family_is_checked():
    assert {*NAMES, *ELSEWHERE} == registry.FORMATS.keys()
    for family, names in NAMES.items():
        assert {type(formats.parse(name)).family for name in names} == {family}


def compressed_tensors_decoder(grid):
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")

    def decode(tensors, shape):
        written = grid.on(shape[1])
        arguments = quantization.QuantizationArgs(
            num_bits=grid.bits,
            symmetric=grid.symmetric,
            strategy="channel" if written.group_size is None else "group",
            group_size=written.group_size,
        )
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
        return base.PackedQuantizationCompressor.decompress(dict(tensors), scheme)["weight"]

    return decode


def on_grid(grid):
    """Weights on a grid of power-of-two scales, with its outermost codes in every group."""

    def make(shape):
        generator = torch.Generator().manual_seed(9)
        rows, columns = shape
        size, top = grid.columns_per_group(columns), (1 << grid.bits) - 1
        codes = torch.randint(0, top + 1, shape, generator=generator)
        codes[:, ::size] = 0
        codes[:, [min(start + 1, columns - 1) for start in range(0, columns, size)]] = top
        zeros = torch.randint(0, top + 1, (rows, grid.groups(columns)), generator=generator)
        zeros = torch.full_like(zeros, 1 << (grid.bits - 1)) if grid.symmetric else zeros
        scales = 2.0 ** torch.randint(-6, -2, zeros.shape, generator=generator)
        steps = codes - zeros.repeat_interleave(size, dim=1)[:, :columns]
        return steps * scales.repeat_interleave(size, dim=1)[:, :columns]

    return make


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_the_contract(name):
    format = formats.parse(name)
    if not isinstance(format, IntegerGrid):
        check_format(format)
        return
    shapes = [(12, 128), (10, 70)] if 70 % (format.group_size or 1) == 0 else [(12, 128)]
    check_format(format, shapes=[(10, 70), (12, 128)], representable=on_grid(format))
    # compressed-tensors has whole groups alone.
    check_format(
        format, shapes=shapes[-1:], engine=compressed_tensors_decoder(format), representable=on_grid(format)
    )


def test_names_that_no_family_has_are_refused_with_what_there_is():
    for name in ("int9-g64", "int4", "int4-g0", "q4", "Original", ""):
        with pytest.raises(ValueError, match="integer, ggml, ggml-float, floating, original, removed"):
            formats.parse(name)


def test_several_families_are_encoded_in_the_order_asked_for():
    names = ["original", "int3-g16", "removed", "int4-g32-sym", "int2-g16"]
    weight = random_weight((8, 64))
    moments = torch.eye(64) + 0.1
    settings = EncodeSettings(storage_dtype=torch.bfloat16, sweeps=1)
    found = formats.encode_all([formats.parse(name) for name in names], weight, moments, settings=settings)
    assert [each.stored.format.name for each in found] == names
    errors = [each.relative_error for each in found]
    assert errors[0] < errors[3] < errors[1] < errors[4] < errors[2] == 1
    for each in found:
        lost = each.stored.dequantize(torch.float64) - weight.double()
        assert each.error == pytest.approx(float(((lost @ moments.double()) * lost).sum()), rel=1e-3)


# ---------------------------------------------------------------------- the documentation's format


@pytest.fixture
def ternary(tmp_path, monkeypatch):
    """The module of the document's first code block, in the table."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "ternary_of_the_document.py").write_text(blocks[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.FORMATS, "ternary", "ternary_of_the_document:Ternary")
    yield importlib.import_module("ternary_of_the_document"), blocks[1]
    del sys.modules["ternary_of_the_document"]


def test_the_documents_format_satisfies_the_contract(ternary):
    module, check = ternary
    exec(check, {"Ternary": module.Ternary})
    check_format(module.Ternary(), shapes=[(5, 37)])
    assert formats.parse("ternary") == module.Ternary()
    assert module.Ternary().nbytes((6, 256), torch.bfloat16) == 6 * 64 + 6 * 2


def test_a_linear_switches_between_the_documents_format_integers_and_the_original(ternary):
    weight = random_weight((12, 64)).double()
    settings = EncodeSettings(storage_dtype=torch.float64)
    names = ["ternary", "int3-g16", "original", "int4-g64-sym", "removed"]
    options = [formats.parse(name).encode(weight, settings=settings) for name in names]
    dense = torch.stack([option.dequantize(torch.float64) for option in options])
    layer = SwitchableLinear(options, weight)
    x = torch.randn(7, 64, dtype=torch.float64, requires_grad=True)
    for choice in range(len(names)):
        gate = torch.nn.functional.one_hot(torch.tensor(choice), len(names)).double().requires_grad_()
        layer.select(choice, gate)
        ours = torch.autograd.grad(layer(x).square().sum(), [gate, x])
        expected = torch.einsum("k,koi->oi", gate, dense)
        theirs = torch.autograd.grad((x @ expected.T).square().sum(), [gate, x])
        for found, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
        assert torch.equal(layer.selected_weight(torch.float64), dense[choice])


def test_a_search_runs_over_the_documents_format(ternary, tmp_path):
    """From the plan to the written checkpoint: costs, candidates, search, evaluation, export."""
    module, _ = ternary
    loaded = wrap_model(tiny_model("llama"))
    linears = model_linears(loaded.layout, loaded.model)
    plan = make_plan(
        loaded.layout, linears, widths=[3, 4], formats=[module.Ternary()], group_size=16, locks=["o_proj=4"]
    )
    assert [option.name for option in plan.options] == ["ternary", "int3-g16", "int4-g16"]
    compression = Compression(loaded, plan, tmp_path / "store")
    tokens = torch.randint(96, (4, 24))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    data = CalibrationSet(tokens, mask, ("random",) * 4, "random", 0, "calibration")
    compression.candidates(data)
    problem = compression.problem(Budget.parse(bits="2.8"))
    compression.use_differences(compression.differences(data))
    with compression.objective(data, data) as objective:
        result = RCO(steps=4, samples=2, refine=2).search(
            problem, objective, **compression.search_inputs(problem, "fisher", 3.0)
        )
    taken = {plan.options[choice].family for choice in result.allocation}
    assert taken == {"ternary", "integer"}
    assert result.cost <= problem.budget
    with compression.apply(result.allocation) as applied:
        expected = applied.model(tokens).logits
    source, weights = compression.deployed(result.allocation)
    bits = sum(weights[info.name].format.bits * info.parameters for info in plan.linears)
    assert bits == sum(problem.units(result.allocation))
    DenseExporter().export(ExportRequest(source, weights, tmp_path / "dense"))
    from transformers import AutoModelForCausalLM

    written = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(written(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"vllm takes the formats .*, not ternary"):
        make_plan(loaded.layout, linears, serve="vllm", widths=[3, 4], formats=[module.Ternary()])


def test_a_command_lists_and_takes_the_documents_format(ternary, tmp_path, capsys):
    """One file and one line: the listing, the flag, the search and the checkpoint come with them."""
    assert main(["ls", "storage", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ternary"] == "-scale, 0 or scale, one scale per row"
    source = save_tiny("llama", tmp_path / "source")
    job = [
        "quantize", source, "--bits=2.8", "--formats=ternary", "--widths=3,4", "--group-size=16", "--data=en_prose",
        "--sequences=4", "--selection=2", "--evaluation=2", "--length=16", "--sensitivity=2", "--steps=2",
        "--samples=2", "--refine=1", "--tune=off", "--device=cpu", "--quiet",
    ]  # fmt: skip
    job = [str(part) for part in job]
    assert main([*job, "--format=dense", "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "run" / "allocation.json").read_text())["allocation"]
    assert found["options"] == ["ternary", "3", "4"]
    assert 0 in found["choices"]
    assert main([*job, "--out", str(tmp_path / "none")]) == 1
    assert "ternary, which compressed-tensors does not have" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_at_most_one_option_of_another_family_is_dense_at_a_time(ternary, monkeypatch):
    module, _ = ternary
    alive, most = set(), 0
    decode = module.Ternary.decode

    def counted(self, stored, dtype):
        nonlocal most
        dense = decode(self, stored, dtype)
        alive.add(id(dense))
        import weakref

        weakref.finalize(dense, alive.discard, id(dense))
        most = max(most, len(alive))
        return dense

    monkeypatch.setattr(module.Ternary, "decode", counted)
    weight = random_weight((6, 32))
    options = [module.Ternary().encode(weight * factor) for factor in (1, 2, 3)]
    layer = SwitchableLinear(options, weight)
    gate = torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
    layer.select(1, gate)
    layer(torch.randn(3, 32)).sum().backward()
    assert gate.grad.count_nonzero() == 3
    assert most == 1


def test_experts_of_a_layer_take_options_of_any_family(ternary):
    names = ["ternary", "int4-g16", "original", "removed"]
    weights = [random_weight((4, 32), seed) for seed in range(6)]
    each = [[formats.parse(name).encode(weight) for weight in weights] for name in names]
    stacks = [parts[0].format.stack(parts) for parts in each]
    choices = torch.tensor([0, 3, 1, 2, 0, 1]).numpy()
    out = torch.full((24, 32), torch.nan)
    decode_segments(stacks, choices, out)
    wanted = torch.cat([each[k][expert].dequantize() for expert, k in enumerate(choices)])
    assert torch.equal(out, wanted)


def test_inputs_are_rounded_where_the_format_says_so(ternary, monkeypatch):
    module, _ = ternary

    def rounded(x):
        return (x * 4).round() / 4

    monkeypatch.setattr(module.Ternary, "input_rule", lambda self, stored: rounded)
    check_format(module.Ternary(), shapes=[(6, 32)])
    weight = random_weight((6, 32)).double()
    options = [module.Ternary().encode(weight), None]
    layer = SwitchableLinear(options, weight)
    x = torch.randn(5, 32, dtype=torch.float64, requires_grad=True)
    dense = options[0].dequantize()
    layer.select(0)
    y = layer(x)
    assert torch.equal(y, ((x * 4).round() / 4) @ dense.T)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], (torch.ones(5, 6).double() @ dense))
    layer.select(1)
    assert torch.equal(layer(x), x @ weight.T)


def test_a_format_cut_otherwise_than_by_rows_must_say_how(ternary):
    module, _ = ternary
    whole = Stored(module.Ternary(), (4, 8), {"weight_scale": torch.ones(1, 1)})
    with pytest.raises(ValueError, match="must define `rows` and `stack`"):
        whole.rows(0, 2)


def test_a_packed_weight_knows_its_grid():
    weight = random_weight((4, 32))
    for name, found in (("int3-g32", "int3-channel"), ("int3-g64", "int3-channel"), ("int3-g16", "int3-g16")):
        packed = formats.parse(name).encode(weight)
        assert isinstance(packed, PackedWeight)
        assert packed.format.name == found
