"""What every hand-written kernel buys over the same operation in torch: seconds, ratios, shapes of real layers.

On a CPU the compiled loops (numba) are compared with torch, on a GPU the Triton kernels. A kernel under 1.3 times
is not worth its lines. Writes one JSON with the environment; figures hold for a quiet machine.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json
    python benchmarks/kernels.py --device cuda --out benchmarks/results/kernels_gpu.json
"""

import argparse
import os
import statistics
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from rco.atomic_files import write_json_atomic
from rco.formats import coded, floating, input_rounding, integer, parse, products, rounding, stacks
from rco.formats import gptq as gptq_module
from rco.formats.base import AdamState, AdamStep, EncodeSettings
from rco.formats.gptq import descend, gptq
from rco.formats.input_rounding import change_along
from rco.formats.integer import IntegerGrid, unpack
from rco.formats.products import inner_products
from rco.formats.rounding import FitSettings, fit_groups, round_to_nearest
from rco.runs import environment

LAYERS = {
    "smollm2-135m attention": (576, 576),
    "smollm2-135m down": (576, 1536),
    "qwen3-0.6b gate": (3072, 1024),
    "qwen3-8b attention": (4096, 4096),
}
WIDTHS = (2, 3, 4, 8)
GROUP, STORAGE = 64, torch.bfloat16
WORTH = 1.3
ASKED = ("on_compiled_path", "on_triton_path", "on_fitting_kernels")  # whether a module takes a kernel


@contextmanager
def without(modules):
    """Inside, torch operations do the work of these modules' kernels; the list names those that were left out."""
    left_out = []

    def refuse(asked):
        def answer(*arguments):
            left_out.extend([asked.__name__] if asked(*arguments) else [])
            return False

        return answer

    with ExitStack() as stack:
        for module in modules:
            for name in ASKED:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, refuse(getattr(module, name))))
        yield left_out


def seconds(run, device):
    """Duration of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(run, modules, device, repeats):
    """Durations with and without the kernels, in turn, after one call of each that warms up.

    None if there is no kernel for this on the device: both would be the same.
    """
    fast, plain = [], []
    for _ in range(repeats + 1):
        fast.append(seconds(run, device))
        with without(modules) as left_out:
            plain.append(seconds(run, device))
        if not left_out:
            return None
    return fast[1:], plain[1:]


def cases(rows, columns, device):
    """Name -> (modules whose kernels do it, the call), for one layer."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(device)
    gradient = torch.randn(rows, columns, generator=generator).to(device)
    inputs = torch.randn(2 * columns, columns, generator=generator).to(device)
    hessian = inputs.T @ inputs / columns
    grids = [IntegerGrid(bits, GROUP) for bits in WIDTHS]
    options = round_to_nearest(weight, grids, storage_dtype=STORAGE)
    codes, words = options[1].codes(), options[1].packed
    grid, settings = grids[1], FitSettings("search", STORAGE)
    importance = torch.ones(columns, device=device)
    scales, zeros = fit_groups(weight, grid, settings, importance)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns, device=device)
    found = {
        "unpack": ([coded], lambda: unpack(words, 3, columns)),
        "decode to float32": ([coded], lambda: options[1].dequantize(torch.float32)),
        "decode to bfloat16": ([coded], lambda: options[1].dequantize(torch.bfloat16)),
        "inner products, float32": ([coded, products], lambda: inner_products(gradient, options)),
        "fit ranges": ([rounding], lambda: fit_groups(weight, grid, settings, importance)),
        "round to nearest": ([rounding], lambda: round_to_nearest(weight, [grid])),
        "GPTQ, loop over columns": (
            [gptq_module],
            lambda: gptq(weight, hessian, grids, storage_dtype=STORAGE),
        ),
        "GPTQ, all kernels": (
            [gptq_module, rounding],
            lambda: gptq(weight, hessian, grids, storage_dtype=STORAGE),
        ),
        "coordinate descent": (
            [gptq_module],
            lambda: descend(weight, damped, grid, settings, codes.clone(), scales, zeros, sweeps=2),
        ),
    }
    found |= floating_cases(weight, gradient, hessian)
    found |= {"training step of codes and scales": ([integer], training_step(weight, gradient, options[1]))}
    if columns > 2048:  # minutes in torch
        found = {name: case for name, case in found.items() if "GPTQ" not in name and "descent" not in name}
    if rows % 8 == 0:
        choices = np.arange(8) % len(options)
        out = torch.empty(rows, columns, device=device)
        found["decode a stack of 8 experts"] = (
            [stacks, coded],
            lambda: stacks.decode_segments(options, choices, out),
        )
    return found


def floating_cases(weight, gradient, hessian):
    """Cases of the formats whose inputs are rounded."""
    peak = EncodeSettings(input_peak=5.0, sweeps=4)
    x = torch.randn_like(weight).bfloat16()
    along, by_output = torch.randn_like(x), [floating, gptq_module]
    formats = {name: parse(name) for name in ("nvfp4-a4", "fp8-dynamic")}
    stored = {name: each.encode(weight, settings=peak) for name, each in formats.items()}
    found = {
        "inner products, nvfp4 and fp8": (
            [coded, products],
            lambda: inner_products(gradient, list(stored.values())),
        ),
        "GPTQ and descent, nvfp4": (
            by_output,
            lambda: formats["nvfp4-a4"].encode(weight, hessian, settings=peak),
        ),
    }
    for name, each in stored.items():
        rule = formats[name].input_rule(each)
        found |= {
            f"decode {name} to bfloat16": ([coded], partial(each.dequantize, torch.bfloat16)),
            f"round inputs, {name}": ([input_rounding], partial(rule, x)),
            f"weigh rounded inputs, {name}": ([input_rounding], partial(change_along, rule, x, along)),
        }
    return found


def training_step(weight, gradient, stored):
    """One step of Adam on codes and scales, and the decoded weight after it: by kernels if they may be used."""
    tunable = stored.format.tunable(stored, weight)
    parameters = dict(tunable.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-4)
    state = {
        name: AdamState((torch.zeros_like(each), torch.zeros_like(each)), 1e-4)
        for name, each in parameters.items()
    }
    step = AdamStep(
        torch.ones(3, device=weight.device),
        torch.zeros((), dtype=torch.int64, device=weight.device),
        (0.9, 0.999),
        1e-8,
    )
    out = torch.empty_like(weight)

    @torch.no_grad()
    def run():
        kernels = tunable.kernels()
        if kernels is not None:
            kernels.adam(gradient, out, state, step)
            return
        with torch.enable_grad():
            decoded = tunable()
        found = torch.autograd.grad(decoded, list(parameters.values()), gradient.to(decoded.dtype))
        for each, own in zip(parameters.values(), found, strict=True):
            each.grad = own
        optimizer.step()
        out.copy_(tunable())

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", default=",".join(LAYERS), help="Names, separated by commas.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels.json"))
    arguments = parser.parse_args()
    device, results, load = torch.device(arguments.device), [], os.getloadavg()[0]
    for layer in arguments.layers.split(","):
        for name, (modules, run) in cases(*LAYERS[layer], device).items():
            measured = compare(run, modules, device, arguments.repeats)
            if measured is None:
                print(f"{layer:24} {name:28} no kernel here", flush=True)
                continue
            fast, plain = measured
            ratio = statistics.median(plain) / statistics.median(fast)
            results.append(
                {
                    "layer": layer,
                    "shape": list(LAYERS[layer]),
                    "operation": name,
                    "kernel_s": statistics.median(fast),
                    "torch_s": statistics.median(plain),
                    "ratio": ratio,
                    "ratio_of_fastest": min(plain) / min(fast),
                    "worth_it": ratio >= WORTH,
                }
            )
            print(f"{layer:24} {name:28} {ratio:8.2f}x", flush=True)
    content = {
        "environment": environment(),
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "repeats": arguments.repeats,
        "load_before": load,
        "widths": list(WIDTHS),
        "group_size": GROUP,
        "worth": WORTH,
        "results": results,
    }
    write_json_atomic(arguments.out, content)


if __name__ == "__main__":
    main()
