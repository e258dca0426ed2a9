"""Time and memory of a tuning step at the shape of a large model, beside a plain forward and backward pass.

    python benchmarks/tuning_step.py --shape qwen3-8b --modes full,blocks --out benchmarks/results/tuning_step.json

Weights are random codes of 3 bits; the hidden states of the full model are computed once before the steps. A step
of ``full`` is a forward and backward pass on one sequence, a decoding of every weight and an update; it is compared
with plain passes that compute all weight gradients, in the same process.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from rco.atomic_files import write_json_atomic
from rco.bench.timing import floor, measure
from rco.compression.language_model_objective import Reference
from rco.compression.tuning import TuningSettings, TuningText, tune
from rco.models.shapes import random_model
from rco.runs import environment
from rco.testing.search_cases import random_packed, random_tokens

WARMUP = 3  # steps before a step is recorded as a CUDA graph, and the recording itself


def measured(shape, mode, arguments):
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = random_model(shape, device=device, dtype=dtype, layers=arguments.layers)
    torch.manual_seed(0)
    weights = {
        info.name: random_packed(info.out_features, info.in_features, 3, 128, device)
        for info in loaded.layout.linears(loaded.model)
    }
    text, selection = (
        random_tokens(loaded, count, arguments.length, seed) for count, seed in ((4, 0), (1, 1))
    )
    texts = [TuningText(each, Reference.compute(loaded, each, 1)) for each in (text, selection)]
    with floor(loaded, random_tokens(loaded, 1, arguments.length), arguments.checkpointing) as work:
        plain = measure(work, device, arguments.repeats)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    settings = TuningSettings(
        mode=mode,
        tokens=(WARMUP + arguments.repeats) * arguments.length,
        batch_size=1,
        at_once=1,
        half=device.type == "cuda",
        evaluations=1,
        checkpointing=arguments.checkpointing,
    )
    times = []

    def note(done, total):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    with torch.no_grad():
        head = loaded.layout.head(loaded.model)
    began = time.perf_counter()
    tune(loaded, weights, head, *texts, settings, on_progress=note)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    steady = sorted(seconds[WARMUP:])[: arguments.repeats]  # later entries of blocks include their set-up
    found = {
        "shape": shape,
        "mode": mode,
        "layers": len(loaded.layout.blocks(loaded.model)),
        "tokens": arguments.length,
        "checkpointing": arguments.checkpointing,
        "plain": plain.to_dict(),
        "step_seconds": statistics.median(steady),
        "steps": seconds[:40],
        "total_seconds": time.perf_counter() - began,
    }
    found["ratio"] = found["step_seconds"] / plain.median if mode == "full" else None
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--modes", default="full,blocks")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tuning_step.json")
    arguments = parser.parse_args()
    rows = []
    for mode in arguments.modes.split(","):
        rows.append(measured(arguments.shape, mode, arguments))
        gc.collect()
        shown = {key: rows[-1][key] for key in ("mode", "ratio", "step_seconds", "total_seconds")}
        print(json.dumps(shown | {"GiB": rows[-1].get("peak_bytes", 0) / 2**30}), flush=True)
        write_json_atomic(arguments.out, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
