"""Search quality on a small model: evaluation KL of RCO beside what it starts from, over budgets and seeds.

    python benchmarks/quantization_quality.py --bits 2.25,2.5,3.0,3.5 --seeds 5 --workers 1

One candidate store serves all runs. Each run measures, on evaluation text that nothing else has seen: uniform
interpolation (neighbouring widths filled in layer order), the proxy knapsack (second-order Fisher losses, exact),
the better of the two on the selection split (what the search is started from), and the search's own result.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


def prepare(config):
    """Model, data and a backend with its candidates, for one process."""
    from rco.backends.sensitivity import curvature
    from rco.data.calibration import build_splits
    from rco.pipeline.quantize import plan_quantization

    planned = plan_quantization(config)
    data = build_splits(
        config.data,
        planned.loaded.tokenizer,
        search=config.sequences,
        selection=config.selection,
        evaluation=config.evaluation,
        length=config.length,
        seed=0,
    )
    planned.backend.prepare(data.search)
    return planned, data, curvature


_STATE = {}


def start(config, threads):
    torch.set_num_threads(threads)
    _STATE["ready"] = prepare(config)


def run(task):
    """One budget, one seed, one variant of the search."""
    from rco.backends.base import Budget
    from rco.backends.sensitivity import fisher_differences, logits_from_losses, predicted_losses
    from rco.core.knapsack import solve_mckp
    from rco.core.refine import Counter, layer_order, spend, uniform_allocation
    from rco.core.search import RCO
    from rco.pipeline.judge import Judge

    bits, seed, name, variant = task
    planned, data, curvature = _STATE["ready"]
    backend = planned.backend
    problem = backend.problem(Budget.parse(bits=bits))
    if ("fisher", seed) not in _STATE:
        _STATE["fisher", seed] = fisher_differences(backend, data.search, seed=seed)
    differences = _STATE["fisher", seed]
    losses = predicted_losses(differences)
    backend.curvature = curvature(differences) if variant.pop("use_curvature", True) else None
    strength = variant.pop("strength", 2.0)
    prior = logits_from_losses(losses, problem, strength) if strength else None
    began = time.perf_counter()
    with backend.objective(data.search, data.selection) as objective:
        result = RCO(seed=seed, **variant).search(problem, objective, prior=prior)
        seconds = time.perf_counter() - began
        counter = Counter(objective)
        interpolation = spend(problem, uniform_allocation(problem), layer_order(problem))
        proxy = solve_mckp(-losses.numpy(), problem)
        proxy = spend(problem, proxy.allocation, -losses.numpy())
        batches = range(objective.selection.num_batches)
        starts = {
            "uniform interpolation": interpolation,
            "proxy knapsack": proxy,
        }
        held_back = {k: float(counter.selection_losses(v, 7, batches).mean()) for k, v in starts.items()}
    starts["best start"] = starts[min(held_back, key=held_back.get)]
    if "judge" not in _STATE:
        _STATE["judge"] = Judge(backend, data.evaluation)
    judge = _STATE["judge"]
    known = {}
    rows = {}
    for label, choices in {**starts, "rco": np.asarray(result.allocation)}.items():
        key = choices.tobytes()
        if key not in known:
            known[key] = judge.row(label, problem.allocation(choices), problem)
        rows[label] = {
            "kl": known[key]["kl"],
            "perplexity": known[key]["perplexity"],
            "bits": known[key]["bits"],
        }
    return {
        "bits": bits,
        "seed": seed,
        "variant": name,
        "rows": rows,
        "selection_loss": result.loss,
        "chosen_from": result.chosen_from,
        "candidates": result.candidates,
        "forwards": result.forwards,
        "backwards": result.backwards,
        "seconds": seconds,
    }


def summarize(runs):
    table = []
    for bits in dict.fromkeys(r["bits"] for r in runs):
        for variant in dict.fromkeys(r["variant"] for r in runs):
            these = [r for r in runs if r["bits"] == bits and r["variant"] == variant]
            if not these:
                continue
            row = {"bits": bits, "variant": variant, "seeds": len(these)}
            for label in these[0]["rows"]:
                kls = [r["rows"][label]["kl"] for r in these]
                row[label] = {
                    "mean": statistics.mean(kls),
                    "std": statistics.stdev(kls) if len(kls) > 1 else 0.0,
                }
            row["forwards"] = statistics.mean(r["forwards"] for r in these)
            row["backwards"] = statistics.mean(r["backwards"] for r in these)
            row["seconds"] = statistics.mean(r["seconds"] for r in these)
            table.append(row)
    return table


def main():
    from rco.pipeline.configs import QuantizeConfig
    from rco.runs import environment, write_json_atomic

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--bits", default="2.25,2.5,3.0,3.5")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variants", default="{}", help='JSON: {"name": {RCO settings}}')
    parser.add_argument("--out", type=Path, default=RESULTS / "quantization_quality.json")
    parser.add_argument("--seconds", type=float, default=1e9, help="hand out no new runs after this long")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out already holds")
    arguments = parser.parse_args()
    earlier = json.loads(arguments.out.read_text()) if arguments.resume and arguments.out.exists() else None
    variants = json.loads(arguments.variants) or {"default": {}}
    with tempfile.TemporaryDirectory() as folder:
        config = QuantizeConfig(model=arguments.model, bits="2.5", store=Path(folder) / "store")
        defaults = {
            "steps": config.steps,
            "samples": config.samples,
            "lr": config.lr,
            "tau": tuple(config.tau),
            "refine": config.refine,
            "strength": config.prior_strength,
        }
        began = time.perf_counter()
        torch.set_num_threads(arguments.threads * arguments.workers)
        prepare(config)
        print(f"candidates: {time.perf_counter() - began:.0f} s", flush=True)
        tasks = [
            (bits, seed, name, {**defaults, **variant})
            for seed in range(arguments.seeds)
            for bits in arguments.bits.split(",")
            for name, variant in variants.items()
        ]
        runs = list(earlier["runs"]) if earlier else []
        finished = {(r["bits"], r["seed"], r["variant"]) for r in runs}
        tasks = [task for task in tasks if task[:3] not in finished]
        wanted = len(runs) + len(tasks)
        with ProcessPoolExecutor(
            arguments.workers, get_context("spawn"), start, (replace(config), arguments.threads)
        ) as pool:
            futures = [pool.submit(run, task) for task in tasks]
            for future in futures:
                left = arguments.seconds - (time.perf_counter() - began)
                if left < 0:
                    future.cancel()
                    continue
                try:
                    runs.append(future.result(timeout=left))
                except TimeoutError:
                    future.cancel()
                    continue
                last = runs[-1]
                shown = {k: round(v["kl"], 4) for k, v in last["rows"].items()}
                print(
                    last["bits"], last["seed"], last["variant"], shown, last["chosen_from"],
                    round(last["seconds"]), flush=True,
                )  # fmt: skip
            if len(runs) < wanted:
                for process in pool._processes.values():
                    process.kill()
    report = {
        "command": f"python benchmarks/quantization_quality.py --model {arguments.model} --bits {arguments.bits} "
        f"--seeds {arguments.seeds} --workers {arguments.workers} --threads {arguments.threads} "
        f"--seconds {arguments.seconds:g}",
        "environment": environment(),
        "earlier_environments": [*earlier.get("earlier_environments", []), earlier["environment"]]
        if earlier
        else [],
        "settings": {**config.identity(), "store": None, "variants": variants},
        "table": summarize(runs),
        "runs": sorted(runs, key=lambda r: (r["variant"], float(r["bits"]), r["seed"])),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(arguments.out, report)
    for row in report["table"]:
        print(
            row["bits"], row["variant"],
            " ".join(f"{k}={v['mean']:.4f}±{v['std']:.4f}" for k, v in row.items() if isinstance(v, dict)),
            f"{row['forwards']:.0f}f {row['backwards']:.0f}b {row['seconds']:.0f}s",
        )  # fmt: skip


if __name__ == "__main__":
    main()
