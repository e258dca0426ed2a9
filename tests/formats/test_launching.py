"""Triton's kernels are launched where their arguments are, seen with a stand-in for Triton and for several GPUs."""

import sys
import types
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch

import rco.formats
from rco.formats.base import AdamState, AdamStep
from rco.formats.input_rounding import InputRounding
from rco.formats.integer import PackedWeight

KERNELS = (
    "integer_kernels_triton", "integer_kernels_bfloat16", "gptq_kernels_triton", "tuning_kernels_triton",
    "input_kernels_triton", "floating_kernels_triton",
)  # fmt: skip


class Language(types.ModuleType):
    """Stands in for ``triton.language``, of which nothing is used."""

    constexpr = staticmethod(lambda value: value)

    def __getattr__(self, name):
        return None


@pytest.fixture
def fresh():
    """Imports modules of the compressors anew; those that were loaded before are back afterwards."""
    package = rco.formats
    kept = {name: module for name, module in sys.modules.items() if name.startswith(f"{package.__name__}.")}
    attributes = dict(vars(package))

    def load(*names):
        for name in names:
            sys.modules.pop(f"{package.__name__}.{name}", None)
            vars(package).pop(name, None)
        return [import_module(f"{package.__name__}.{name}") for name in names]

    yield load
    for name in [name for name in sys.modules if name.startswith(f"{package.__name__}.")]:
        del sys.modules[name]
    sys.modules.update(kept)
    vars(package).clear()
    vars(package).update(attributes)


@pytest.fixture
def launches(monkeypatch, fresh):
    """The GPU that was the current one at every launch."""
    found, current = [], [None]

    class Kernel:
        def __init__(self, function):
            pass

        def __getitem__(self, grid):
            return lambda *arguments, **settings: found.append(current[-1])

    @contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    triton = types.ModuleType("triton")
    triton.jit = lambda function=None, **settings: Kernel if function is None else Kernel(function)
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    triton.language = Language("triton.language")
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _, *kernels = fresh("launching", *KERNELS)
    modules = dict(zip(KERNELS, kernels, strict=True))
    for name in KERNELS[:2]:
        monkeypatch.setattr(modules[name], "multiprocessors", lambda device: 1)
    return types.SimpleNamespace(found=found, **modules)


def test_every_kernel_is_launched_where_its_matrix_is(launches):
    rows, cols, here = 4, 128, torch.device("cpu")
    general, regular, candidates, tuning, inputs, floating = (getattr(launches, name) for name in KERNELS)
    codes, scales = torch.zeros(rows, 16, dtype=torch.int32), torch.ones(rows, 1, dtype=torch.bfloat16)
    operand, out = general.Operand(codes, scales, None, 4), torch.zeros(rows, cols, dtype=torch.bfloat16)
    for module in (general, regular):
        module.decoder(operand, 128, (rows, cols))(out)
        module.multiplier([operand], 128, (rows, cols), 1, here)(out)
    regular.chosen_decoder([operand], 128, (rows, cols))(torch.tensor(0), out)
    general.chosen_decoder([(operand, 128)], (rows, cols))(torch.tensor(0), out)

    weight, square = torch.zeros(rows, cols), torch.zeros(cols, cols)
    scales, zeros = torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.uint8)
    written, losses = torch.zeros(rows, cols, dtype=torch.uint8), torch.zeros(rows, dtype=torch.float64)
    candidates.fit(
        weight, torch.ones(cols), scales, zeros, span=(0, cols), group=cols, first_group=0, bits=4,
        symmetric=False, storage=torch.bfloat16, limits=(0.0, 1.0), search=(1, 1.0, 0, 0),
    )  # fmt: skip
    groups = torch.zeros(cols, dtype=torch.int64)
    candidates.columns(weight, square, 0, groups, 4, torch.bfloat16, scales, zeros, written, losses)
    candidates.descend(weight, square, 0, cols, 4, torch.bfloat16, scales, zeros, written, losses)

    weight = PackedWeight(codes, scales.float(), None, 4, (rows, cols), cols)
    offsets, moments = torch.zeros(rows, cols), (torch.zeros(1), torch.zeros(1))
    kernels = tuning.GridKernels(weight, scales, written, offsets)
    kernels.gradients(out)
    kernels.decode(out)
    state = dict.fromkeys(("offsets", "scales"), AdamState(moments, 0.1))
    kernels.adam(out, out, state, AdamStep(torch.ones(3), torch.tensor(0), (0.9, 0.999), 1e-8))

    inputs.rounded(InputRounding("int8"), out)
    inputs.change_along(InputRounding("int8"), out, out)

    levels, places = torch.arange(3.0), torch.zeros(rows, cols, dtype=torch.int16)
    values, errors, moved = torch.zeros(rows, cols), torch.zeros(rows, cols), torch.tensor(0)
    table = (scales, cols, 0, levels, levels[:2], places)
    floating.gptq_levels(values, square, *table, errors)
    floating.descend_levels(errors, square, *table, values, moved)
    assert launches.found == [here] * 16


def test_every_file_of_kernels_is_seen_here():
    folder = Path(rco.formats.__file__).parent
    launching = {
        file.stem for file in folder.rglob("*.py") if "triton.jit" in file.read_text(encoding="utf-8")
    }
    assert launching == set(KERNELS)


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_one_gpu_is_always_the_current_one(gpus, monkeypatch, fresh):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device", asked.append)
    (launching,) = fresh("launching")
    launching.launching_at(torch.zeros(1))
    assert len(asked) == (gpus > 1)
