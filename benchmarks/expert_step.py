"""What a step of expert pruning costs beside a plain forward and backward pass of the same model.

    python benchmarks/expert_step.py

A random mixture of experts with 64 and with 512 experts per layer. The search step is the whole one: noise, exact
knapsack, gated forward, KL to the full model, straight-through backward, Riemannian Adam. The plain pass computes
the same loss on the same tokens with the gradients of all weights. The two take turns, so that a busy machine slows
both. Writes results/expert_step.json.
"""

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results" / "expert_step.json"


def measure(experts, hidden, mode, arguments):
    """Seconds of plain passes and of search steps, taken in turns."""
    from rco.compression.budget import Budget
    from rco.compression.compression import Compression
    from rco.compression.plan import make_removal_plan
    from rco.core.search import RCO
    from rco.data.calibration import CalibrationSet
    from rco.losses import Head, chunked_kl
    from rco.models.loading import wrap_model
    from rco.models.moe.linears import model_linears
    from rco.testing.tiny_models import wide_moe

    model = wide_moe(experts, hidden, layers=arguments.layers, vocabulary=arguments.vocabulary)
    plain_model = wrap_model(copy.deepcopy(model))
    ids = torch.randint(arguments.vocabulary, (arguments.batch, arguments.length))
    counts = torch.ones_like(ids, dtype=torch.bool)
    counts[:, -1] = False
    data = CalibrationSet(ids, counts, ("random",) * len(ids), "random", 0, "calibration")
    loaded = wrap_model(model)
    plan = make_removal_plan(model_linears(loaded.layout, model))
    backend = Compression(loaded, plan, gates=mode, batch_size=arguments.batch)
    plain_model.model.requires_grad_(True)
    full = backend.full_head()
    own = plain_model.layout.head(plain_model.model)
    with torch.no_grad():
        reference = plain_model.layout.final_hidden(plain_model.model, ids)[:, :-1]

    def plain():
        plain_model.model.zero_grad(set_to_none=True)
        hidden_states = plain_model.layout.final_hidden(plain_model.model, ids)[:, :-1]
        head = Head(own.weight, own.bias, own.softcap, own.scale)
        chunked_kl(hidden_states, head, reference, full, counts[:, :-1]).backward()

    times = {"plain": [], "step": []}
    clock = time.perf_counter

    def between(record):
        """Called after each step: the step ends here, a plain pass follows, the next step begins."""
        nonlocal began
        times["step"].append(clock() - began)
        start = clock()
        plain()
        times["plain"].append(clock() - start)
        began = clock()

    problem = backend.problem(Budget.parse(experts="0.25"))
    searcher = RCO(steps=arguments.repeats + arguments.warm, samples=1, refine=0)
    with backend.objective(data, data) as objective:
        plain()
        began = clock()
        searcher.search(problem, objective, on_step=between)
    return {name: values[arguments.warm :] for name, values in times.items()}


def main():
    from rco.runs import environment, write_json_atomic

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for experts, hidden in ((64, 256), (512, 128)):
        for mode in ("deployed", "scale"):
            times = measure(experts, hidden, mode, arguments)
            ratios = [a / b for a, b in zip(times["step"], times["plain"], strict=True)]
            row = {
                "experts_per_layer": experts,
                "hidden": hidden,
                "gates": mode,
                "plain_seconds": statistics.median(times["plain"]),
                "step_seconds": statistics.median(times["step"]),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": statistics.quantiles(ratios, n=4),
            }
            rows.append(row)
            print(
                f"{experts:4d} experts, {mode:8s}: plain {row['plain_seconds']:.3f} s, step "
                f"{row['step_seconds']:.3f} s, ratio {row['ratio']:.2f}",
                flush=True,
            )
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    write_json_atomic(arguments.out, {"environment": environment(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
