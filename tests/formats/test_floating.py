"""Floating-point formats: bytes, elements and roundings of inputs are compressed-tensors' own, bit for bit."""

import pytest
import torch
from floating_weights import representable

from rco import formats
from rco.formats import elements, floating, input_rounding, parse
from rco.formats.base import EncodeSettings
from rco.formats.floating import FloatingPoint
from rco.testing import check_format

compressors = pytest.importorskip("compressed_tensors.compressors")
forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
helpers = pytest.importorskip("compressed_tensors.quantization.utils")

# Name -> compressor and preset scheme of compressed-tensors.
THEIRS = {
    "fp8": ("naive-quantized", "FP8_DYNAMIC"),
    "fp8-dynamic": ("float-quantized", "FP8_DYNAMIC"),
    "fp8-block": ("naive-quantized", "FP8_BLOCK"),
    "fp8-block-dynamic": ("float-quantized", "FP8_BLOCK"),
    "int8": ("naive-quantized", "INT8"),
    "int8-dynamic": ("int-quantized", "INT8"),
    "nvfp4": ("nvfp4-pack-quantized", "NVFP4A16"),
    "nvfp4-a4": ("nvfp4-pack-quantized", "NVFP4"),
    "mxfp4": ("mxfp4-pack-quantized", "MXFP4A16"),
    "mxfp4-a4": ("mxfp4-pack-quantized", "MXFP4"),
    "mxfp8": ("mxfp8-quantized", "MXFP8A16"),
    "mxfp8-a8": ("mxfp8-quantized", "MXFP8"),
}
ROUNDED = [name for name in THEIRS if FloatingPoint(name).kind.inputs]


def theirs(name):
    compressor, preset = THEIRS[name]
    scheme = schemes.QuantizationScheme(targets=["Linear"], **schemes.PRESET_SCHEMES[preset])
    found = compressors.BaseCompressor.get_value_from_registry(compressor)
    return lambda tensors, shape: found.decompress(dict(tensors), scheme)["weight"]


@pytest.mark.parametrize("name", THEIRS)
def test_the_contract(name):
    columns = 128 if name == "fp8-block-dynamic" else 96
    check_format(
        formats.parse(name), shapes=[(5, columns)], engine=theirs(name), representable=representable(name)
    )


@pytest.mark.parametrize(("name", "columns"), [("fp8-block", 200), ("fp8-block-dynamic", 256)])
def test_blocks_that_end_within_a_matrix(name, columns):
    shape = (150, columns)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = FloatingPoint(name).encode(weight, settings=EncodeSettings(storage_dtype=torch.bfloat16))
    files = FloatingPoint(name).file_tensors(stored)
    assert files["weight_scale"].shape == (2, 2)
    assert torch.equal(stored.dequantize(), theirs(name)(files, shape))


@pytest.mark.parametrize("name", THEIRS)
def test_many_matrices_are_decoded_as_compressed_tensors_decodes_them(name):
    """Random matrices with zeros, subnormal numbers and outliers of 1e4."""
    generator, format, decode = torch.Generator().manual_seed(7), FloatingPoint(name), theirs(name)
    for case in range(200):
        rows = int(torch.randint(1, 9, (), generator=generator))
        columns = (128 if name == "fp8-block-dynamic" else 32) * int(
            torch.randint(1, 5, (), generator=generator)
        )
        weight = torch.randn(rows, columns, generator=generator) * 10.0 ** (case % 7 - 4)
        weight[torch.rand(weight.shape, generator=generator) < 0.2] = 0
        weight[torch.rand(weight.shape, generator=generator) < 0.05] *= 1e-38
        weight[torch.rand(weight.shape, generator=generator) < 0.02] = 1e4
        if case % 10 == 0:
            weight.zero_()
        settings = EncodeSettings(
            storage_dtype=(torch.bfloat16, torch.float32)[case % 2], clip=("minmax", "search")[case % 3 == 0]
        )
        stored = format.encode(weight, settings=settings)
        found = stored.dequantize()
        assert torch.isfinite(found).all()
        assert torch.equal(found, decode(format.file_tensors(stored), weight.shape).to(found.dtype)), case


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_are_refused(name, bad):
    weight = torch.ones(4, 128)
    weight[1, 2] = bad
    with pytest.raises(ValueError, match=r"NaN|infinite|finite"):
        FloatingPoint(name).encode(weight)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8-block-dynamic"])
def test_rows_that_do_not_divide_into_groups_are_refused(name):
    format = FloatingPoint(name)
    assert not format.fits(40)
    assert format.fits(128)
    with pytest.raises(ValueError, match="rows of 40 do not divide"):
        format.encode(torch.ones(4, 40))


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(name, dtype):
    format = FloatingPoint(name)
    arguments = schemes.PRESET_SCHEMES[THEIRS[name][1]]["input_activations"]
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = (
            torch.randn(2, 5, 256, generator=generator)
            * torch.randn(2, 5, 1, generator=generator).mul(3).exp()
        )
        x[0, 0], x[1, 1, :40], x[0, 1, 3] = 0, 0, 1e4
        x = x.to(dtype)
        # Also with a peak that is too low, so that the largest inputs are clipped.
        settings = EncodeSettings(storage_dtype=dtype, input_peak=float(x.abs().max()) / (1 + seed % 3))
        stored = format.encode(torch.randn(4, 256, generator=generator), settings=settings)
        fixed = format.file_tensors(stored).get("input_global_scale")
        scale, zero = helpers.compute_dynamic_scales_and_zp(x, arguments, None, global_scale=fixed)
        wanted = forward.fake_quantize(x, scale, zero, arguments, global_scale=fixed)
        found = format.input_rule(stored)(x)
        assert found.dtype == dtype
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("name", ["nvfp4-a4", "mxfp4-a4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_rounding_of_inputs_gives_the_bits_of_torch(name, dtype, monkeypatch):
    """Also of zeros, ties, outliers, the smallest and the largest numbers, NaN, and a shorter last group."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 200, generator=generator) * torch.randn(64, 1, generator=generator).mul(6).exp()
    x[0], x[1, :20], x[2, 3] = 0, 0, 1e4
    x[3] = torch.randint(-12, 13, (200,), generator=generator) / 2
    x[4], x[5], x[6, 7] = x[4] * 1e-38, x[5] * 1e20, torch.nan
    x = x.to(dtype)
    weight = torch.randn(4, 192, generator=generator)
    for peak in (1e3, 1e-3):
        stored = FloatingPoint(name).encode(weight, settings=EncodeSettings(input_peak=peak))
        rule = FloatingPoint(name).input_rule(stored)
        found = rule(x)
        with monkeypatch.context() as patch:
            patch.setattr(input_rounding, "on_compiled_path", lambda _: False)
            wanted = rule(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        assert found.dtype == dtype


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "int8-dynamic", "nvfp4", "mxfp4"])
def test_compiled_loops_do_what_the_loops_over_columns_do(name):
    """Against GPTQ and coordinate descent written out with the nearest element of each column."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(400, 160, generator=generator, dtype=torch.float64) @ torch.randn(
        160, 160, generator=generator, dtype=torch.float64
    )
    hessian = inputs.T @ inputs / len(inputs) + torch.eye(160)
    root = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    weight = torch.randn(7, 160, generator=generator, dtype=torch.float64)
    settings = EncodeSettings(storage_dtype=torch.float32)
    start = FloatingPoint(name)._rounded(weight, None, settings, torch.float32)
    found = floating._compensated(start, weight, root, hessian, sweeps=1)

    levels, scales = (
        elements.levels_of(start.format.kind.element, weight.device).double(),
        start.wide_scales(torch.float64),
    )
    current, decoded = weight.clone(), torch.empty_like(weight)

    def nearest(target, column):
        codes = elements.nearest_codes(target / scales[:, column], start.format.kind.element)
        return levels[codes.int()] * scales[:, column]

    for column in range(160):
        decoded[:, column] = nearest(current[:, column], column)
        error = (current[:, column] - decoded[:, column]) / root[column, column]
        current[:, column + 1 :] -= error[:, None] * root[column, column + 1 :]
    for column in range(160):
        slope = (weight - decoded) @ hessian[:, column]
        decoded[:, column] = nearest(decoded[:, column] + slope / hessian[column, column], column)
    torch.testing.assert_close(levels[found.codes().int()] * scales, decoded, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4"])
def test_a_column_without_inputs_is_encoded_without_dampening(name):
    """The descent has no slope to follow there: such a column is rounded to nearest."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(512, 64, generator=generator)
    inputs[:, 9] = 0
    weight = torch.randn(16, 64, generator=generator)
    moments = inputs.T @ inputs / len(inputs)
    found = FloatingPoint(name).encode(weight, moments, settings=EncodeSettings(damp=0.0, sweeps=2))
    nearest = elements.nearest_codes(weight / found.wide_scales(torch.float32), found.element)
    assert torch.equal(found.codes()[:, 9], nearest[:, 9])
    assert not torch.equal(found.codes(), nearest)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4"])
def test_compensation_lowers_the_error_of_the_outputs(name):
    """With correlated inputs, against the nearest elements and against fitted ranges alone."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(64, 64, generator=generator)
    inputs = torch.randn(512, 64, generator=generator) @ mixing
    moments = inputs.T @ inputs / len(inputs)
    weight = torch.randn(16, 64, generator=generator)
    format = FloatingPoint(name)

    def error(stored):
        difference = stored.dequantize(torch.float64) - weight.double()
        return float(((difference @ moments.double()) * difference).sum())

    nearest, fitted, compensated, swept = (
        error(format.encode(weight, statistics, settings=EncodeSettings(clip=clip, sweeps=sweeps)))
        for statistics, clip, sweeps in (
            (None, "minmax", 0), (None, "search", 0), (moments, "search", 0), (moments, "search", 3),
        )
    )  # fmt: skip
    assert compensated < 0.8 * min(nearest, fitted)
    assert swept <= compensated


def test_a_shared_peak_gives_the_shards_of_a_fused_matrix_one_scale():
    format = FloatingPoint("nvfp4")
    small, large = torch.full((4, 32), 0.5), torch.full((4, 32), 3.0)
    files = [
        format.file_tensors(format.encode(weight, settings=EncodeSettings(weight_peak=3.0)))
        for weight in (small, large)
    ]
    assert torch.equal(files[0]["weight_global_scale"], files[1]["weight_global_scale"])


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "fp8-block", "mxfp4", "mxfp8"])
def test_a_training_step_packs_nothing(name, monkeypatch):
    """Packing waits for the device, and there would be 32 passes over the codes in every step."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    format = parse(name)
    stored = format.encode(weight.bfloat16())
    tunable = format.tunable(stored, weight)
    monkeypatch.setattr("rco.formats.floating.pack", None)
    decoded = tunable()
    assert torch.equal(decoded, format.decode(stored, decoded.dtype))
    decoded.sum().backward()
    assert all(each.grad is not None for each in tunable.parameters())
