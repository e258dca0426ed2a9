"""What the host does for a sample beside the floor: tiny dimensions, GPU kernels that do nothing.

    PYTHONPATH=src python benchmarks/host_overhead.py OUT.json

The path of a GPU is taken on the CPU: Triton is replaced by a module whose kernels return at once, or after as many
microseconds as a launch may take. Results mean nothing then; times are those of Python and of torch's bookkeeping.
"""

from __future__ import annotations

import gc
import importlib.machinery
import json
import statistics
import sys
import time
import types
from pathlib import Path

import torch

from rco.bench.timing import floor
from rco.models.moe.probes import ProbeBuffer
from rco.models.shapes import SHAPES, random_model
from rco.runs import environment
from rco.testing.search_cases import make_case, random_tokens, sample_of

CPU = torch.device("cpu")
TOKENS, REPEATS = 16, 15
SHAPES["linears"] = (
    "Qwen3",
    {
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 36, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256,
    },
)  # fmt: skip
SHAPES["experts"] = (
    "Olmoe",
    {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 256, "eos_token_id": 2,
    },
)  # fmt: skip


class Kernel:
    """Stands in for a Triton kernel."""

    seconds = 0.0

    def __init__(self, function):
        pass

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **settings):
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass


class Language(types.ModuleType):
    """Stands in for ``triton.language``, of which nothing is used."""

    constexpr = staticmethod(lambda value: value)

    def __getattr__(self, name):
        return None


def pretend():
    """Take the GPU's path on the CPU; after the models are made, because transformers looks for Triton, too."""
    triton = types.ModuleType("triton")
    triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    triton.jit = lambda function=None, **settings: Kernel if function is None else Kernel(function)
    triton.cdiv = lambda a, b: -(-a // b)
    triton.language = Language("triton.language")
    sys.modules |= {"triton": triton, "triton.language": triton.language}
    from rco.formats import integer, integer_kernels_bfloat16, integer_kernels_triton, products, switchable

    integer.on_triton_path = products.on_triton_path = lambda tensor: True
    integer.on_compiled_path = products.on_compiled_path = lambda tensor: False
    integer_kernels_triton.multiprocessors = integer_kernels_bfloat16.multiprocessors = lambda device: 132
    integer_kernels_bfloat16._regular = lambda *arguments: True
    switchable._outer = lambda gradient, x: gradient.t() @ x
    made = ProbeBuffer.__init__
    ProbeBuffer.__init__ = lambda self, layers, *, always_counted: made(self, layers, always_counted=False)


def seconds(work):
    began = time.process_time()
    work()
    return time.process_time() - began


def compared(case, other, checkpointing):
    """Floor and sample in turns, so that both meet the same machine."""
    case.backend.checkpointing = checkpointing
    with floor(other, random_tokens(other, 1, TOKENS), checkpointing) as least, sample_of(case) as sample:
        for _ in range(2):
            least(), sample()
        gc.collect()
        gc.disable()
        rows = [(seconds(least), seconds(sample)) for _ in range(REPEATS)]
        gc.enable()
    return {
        "floor": statistics.median(row[0] for row in rows),
        "sample": statistics.median(row[1] for row in rows),
        "ratio": statistics.median(row[1] / row[0] for row in rows),
        "repeats": rows,
    }


def main():
    torch.set_num_threads(1)
    models = {
        name: [random_model(name, device=CPU, dtype=torch.float32) for _ in "ab"]
        for name in ("linears", "experts")
    }
    for pair in models.values():
        for each in pair:  # transformers imports the rest
            each.model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    pretend()
    found = []
    for name, microseconds in (("linears", 0), ("linears", 20), ("experts", 0)):
        Kernel.seconds = microseconds / 1e6
        case = make_case(name, CPU, length=TOKENS, loaded=models[name][0])
        for checkpointing in (False, True):
            row = {"model": name, "microseconds_per_launch": microseconds, "checkpointing": checkpointing}
            found.append(row | compared(case, models[name][1], checkpointing))
            print({key: value for key, value in found[-1].items() if key != "repeats"}, flush=True)
    Path(sys.argv[1]).write_text(json.dumps({"rows": found, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
