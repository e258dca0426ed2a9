"""Triton's kernels are launched where their arguments are, seen without Triton."""

import sys
import types
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from rco.compressors import launching

pytestmark = pytest.mark.skipif(find_spec("triton") is not None, reason="its place is taken by a stand-in")

KERNELS = ("triton_kernels", "triton_bfloat16", "triton_gptq")


class Language(types.ModuleType):
    """Stands in for ``triton.language``, of which nothing is used."""

    constexpr = staticmethod(lambda value: value)

    def __getattr__(self, name):
        return None


@pytest.fixture
def launches(monkeypatch):
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
    monkeypatch.setattr(launching, "_several_gpus", lambda: True)
    package = sys.modules["rco.compressors"]
    modules = {name: import_module(f"rco.compressors.{name}") for name in KERNELS}
    for name in KERNELS[:2]:
        monkeypatch.setattr(modules[name], "multiprocessors", lambda device: 1)
    yield types.SimpleNamespace(found=found, **modules)
    for name in KERNELS:  # made of stand-ins: nobody may find them
        del sys.modules[f"rco.compressors.{name}"]
        delattr(package, name)


def test_every_kernel_is_launched_where_its_matrix_is(launches):
    rows, cols, here = 4, 128, torch.device("cpu")
    general, regular, candidates = (getattr(launches, name) for name in KERNELS)
    codes, scales = torch.zeros(rows, 16, dtype=torch.int32), torch.ones(rows, 1, dtype=torch.bfloat16)
    operand, out = general.Operand(codes, scales, None, 4), torch.zeros(rows, cols, dtype=torch.bfloat16)
    for module in (general, regular):
        module.decoder(operand, 128, (rows, cols))(out)
        module.multiplier([operand], 128, (rows, cols), 1, here)(out)
    regular.chosen_decoder([operand], 128, (rows, cols))(torch.tensor(0), out)

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
    assert launches.found == [here] * 8


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_one_gpu_is_always_the_current_one(gpus, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device", asked.append)
    launching._several_gpus.cache_clear()
    launching.launching_at(torch.zeros(1))
    launching._several_gpus.cache_clear()
    assert len(asked) == (gpus > 1)
