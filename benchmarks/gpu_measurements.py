"""Everything that is measured on one GPU in one go: tests, kernels, steps, memory, candidates.

    PYTHONPATH=src python benchmarks/gpu_measurements.py OUT [part ...]

Writes one JSON file into OUT, anew as soon as a part is done, so that a run that is cut short keeps what it has.
Parts: tests, kernels, gptq, jobs, step, olmoe, widths, memory, widths_memory, 30b, whole, short, steps50; all but
the last three by default.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from transformers import AutoTokenizer

from rco.bench.step_bench import run, run_memory, to_markdown
from rco.formats.gptq import gptq
from rco.formats.integer import IntegerGrid
from rco.models.shapes import SHAPES, random_model
from rco.models.zoo import find_builtin
from rco.runs import environment

WIDTHS = range(2, 9)


def tests(out):
    """The GPU tests, some files beside each other: most of their time is compilation."""
    kernels_file = "tests/gpu/test_packed_kernels.py"
    groups = [
        [kernels_file, "-k", "decoding"], [kernels_file, "-k", "inner"],
        [kernels_file, "-k", "not decoding and not inner"],
        ["tests/gpu/test_candidates.py", "tests/gpu/test_experts.py"],
        ["tests/gpu/test_step.py", "tests/gpu/test_losses.py"],
        ["tests/gpu/test_pipeline.py", "-k", "not ranks"], ["tests/gpu/test_pipeline.py", "-k", "ranks"],
    ]  # fmt: skip
    base = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "--durations=4",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    running = [
        subprocess.Popen([*base, *group], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for group in groups
    ]
    rows, log = [], ""
    for group, process in zip(groups, running, strict=True):
        try:
            text, _ = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        log += f"#### {group}\n{text}\n"
        rows.append(
            {"group": group, "returncode": process.returncode, "last": text.strip().splitlines()[-1:]}
        )
        print(group, process.returncode, rows[-1]["last"], flush=True)
        if process.returncode:
            print(text[-1500:], flush=True)
    (out / "tests.log").write_text(log)
    return {"groups": rows}


def kernels(out):
    from rco.bench.step_bench import breakdown
    from rco.testing.search_cases import make_case

    case = make_case("qwen3-8b", torch.device("cuda"), length=2048, layers=8)
    found = breakdown(case, 16, 0.0)
    found["environment"] = environment()
    return found


def block_linears(shape):
    settings = SHAPES[shape][1]
    hidden, inner, head = settings["hidden_size"], settings["intermediate_size"], 128
    q, kv = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    return {
        "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip


def gptq_block(out, shape="qwen3-8b"):
    """Time GPTQ with all widths at once on the linears of one block."""
    rows = []
    torch.manual_seed(0)
    for name, (outs, ins) in block_linears(shape).items():
        weight = torch.randn(outs, ins, device="cuda") * 0.02
        x = torch.randn(4096, ins, device="cuda")
        hessian = 2 * x.T @ x / len(x) + 0.01 * torch.eye(ins, device="cuda")
        for sweeps in (0, 4):
            if name in ("v_proj", "up_proj"):
                continue
            times = []
            for _ in range(2 if name == "q_proj" else 1):
                torch.cuda.synchronize()
                began = time.perf_counter()
                result = gptq(
                    weight,
                    hessian,
                    [IntegerGrid(b, 128) for b in WIDTHS],
                    sweeps=sweeps,
                    storage_dtype=torch.bfloat16,
                )
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            rows.append({
                "linear": name, "shape": [outs, ins], "sweeps": sweeps, "seconds": times[-1],
                "relative_errors": result.relative_errors.tolist(), "peak_bytes": torch.cuda.max_memory_allocated(),
            })  # fmt: skip
            print(rows[-1]["linear"], sweeps, f"{times[-1]:.3f} s", flush=True)
    twice = {"k_proj": 2, "gate_proj": 2}  # v_proj and up_proj have their shapes
    totals = {
        str(sweeps): sum(r["seconds"] * twice.get(r["linear"], 1) for r in rows if r["sweeps"] == sweeps)
        for sweeps in (0, 4)
    }
    return {"shape": shape, "widths": list(WIDTHS), "group_size": 128, "linears": rows,
            "block_seconds_by_sweeps": totals, "environment": environment()}  # fmt: skip


def step(out):
    return run("qwen3-8b", steps=12)


def short(out):
    """The step without checkpointing, few repeats; the tests of its kernel beside it while the model is made."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short"]
    command += ["tests/gpu/test_packed_kernels.py", "-k", "inner or streamed or layer"]
    with (out / "short_tests.log").open("w") as log:
        checks = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        found = {"kernels": kernels(out)}
        print(json.dumps(found["kernels"]["kernels"]), flush=True)
        checks.wait(timeout=60)
    print((out / "short_tests.log").read_text()[-600:], flush=True)
    return found | run("qwen3-8b", steps=0, repeats=5, modes=(False,))


def steps50(out):
    return run("qwen3-8b", steps=50, repeats=5)


def memory(out):
    return run_memory("qwen3-8b")


def widths_memory(out):
    return run_memory("olmoe", job="quantize")


def olmoe(out):
    return run("olmoe", steps=12)


def olmoe_widths(out):
    return run("olmoe", steps=6, job="quantize")


def thirty_billion(out):
    found = run("qwen3-30b-a3b", steps=2, repeats=3)
    # Of the whole process, so of this part where it is the only one.
    found["host_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def jobs(out):
    """The command line on built-in models, timed."""
    gpu, folder = ["--device", "cuda", "--json"], tempfile.mkdtemp()
    return commands({
        "quantize": ["quantize", "tiny-llama", "--bits", "2.5", "--format", "dense", *gpu, "--tune", "off",
                     "--out", f"{folder}/q"],
        "prune": ["prune", "tiny-moe", "--experts", "0.25", *gpu, "--out", f"{folder}/p"],
        "evaluate": ["evaluate", f"{folder}/q", "--reference", "tiny-llama", *gpu],
    })  # fmt: skip


def whole(out, shape="qwen3-8b", layers=12, device="cuda", length=2048):
    """`rco quantize` from a checkpoint to a checkpoint on a third of a large model, a few steps of the search."""
    folder = Path(tempfile.mkdtemp())
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_model(shape, device=device, dtype=dtype, layers=layers).model
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(find_builtin("tiny-llama").locate()[0]).save_pretrained(folder / "model")
    parameters = sum(p.numel() for p in model.parameters())
    del model
    gc.collect()
    torch.cuda.empty_cache()
    found = commands({
        "quantize": [
            "quantize", str(folder / "model"), "--bits", "4", "--device", device, "--length", str(length),
            "--sequences", "32", "--sensitivity", "8", "--selection", "4", "--evaluation", "4", "--steps", "4",
            "--refine", "8", "--tune", "off", "--json", "--out", str(folder / "run"),
        ],
    })  # fmt: skip
    stored = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file())
    return found | {
        "shape": shape, "layers": layers, "parameters": parameters, "stored_bytes": stored,
        "environment": environment(),
    }  # fmt: skip


def commands(named):
    """Run commands of rco one after the other, each in a process of its own."""
    rows = {}
    for name, arguments in named.items():
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "rco", *arguments], capture_output=True, text=True, check=False
        )
        rows[name] = {
            "seconds": time.perf_counter() - began,
            "returncode": done.returncode,
            "stderr": done.stderr[-1500:],
        }
        if done.returncode == 0 and name != "evaluate":
            found = json.loads(done.stdout)
            rows[name] |= {key: found.get(key) for key in ("timings", "memory", "evaluation")}
        print(name, json.dumps(rows[name]), flush=True)
    return rows


PARTS = {
    "tests": tests, "kernels": kernels, "gptq": gptq_block, "jobs": jobs, "step": step,
    "olmoe": olmoe, "widths": olmoe_widths, "memory": memory, "widths_memory": widths_memory, "30b": thirty_billion,
    "whole": whole, "short": short, "steps50": steps50,
}  # fmt: skip


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    chosen = sys.argv[2:] or [name for name in PARTS if name not in ("whole", "short", "steps50")]
    everything = {}
    for name in chosen:
        began = time.perf_counter()
        try:
            everything[name] = PARTS[name](out)
        except Exception:  # noqa: BLE001  the next part may work, and a run is expensive
            everything[name] = {"error": traceback.format_exc()}
            print(name, everything[name]["error"], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        everything[name]["part_seconds"] = time.perf_counter() - began
        (out / "measurements.json").write_text(json.dumps(everything, indent=1))
        shown = everything[name]
        print(f"== {name}: {shown['part_seconds']:.1f} s", flush=True)
        if "plain" in shown or "modes" in shown:
            print(to_markdown(shown), flush=True)
        elif name in ("kernels", "gptq"):
            print(
                json.dumps({k: v for k, v in shown.items() if k not in ("environment", "linears")}),
                flush=True,
            )


if __name__ == "__main__":
    main()
