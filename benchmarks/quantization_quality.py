"""Search quality on a small model: evaluation KL of RCO beside what it starts from, over budgets and seeds.

    python benchmarks/quantization_quality.py --bits 2.25,2.5,3.0,3.5 --seeds 5 --workers 2 --threads 1

One candidate store serves all runs. Each run measures, on evaluation text that nothing else has seen: uniform
interpolation (neighbouring widths filled in layer order), the proxy knapsack (second-order Fisher losses, exact),
the better of the two on the selection split (what the search is started from), and the search's own result.

The runs may be spread over processes or machines, each with a part of its own, and put together afterwards:

    python benchmarks/quantization_quality.py --store DIR --seeds 0                          # the candidates alone
    python benchmarks/quantization_quality.py --store DIR --bits 2.5 --first-seed 3 --seeds 1 --out part.json
    python benchmarks/quantization_quality.py --merge part.json other_part.json
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
_STATE = {}


def prepare(config, threads):
    """Model, data and a backend with its candidates, once per process."""
    from rco.pipeline.common import build_data
    from rco.pipeline.judge import Judge
    from rco.pipeline.quantize import plan_quantization

    torch.set_num_threads(threads)
    planned = plan_quantization(config)
    data = build_data(config, planned.loaded.tokenizer)
    planned.backend.prepare(data.search)
    _STATE.update(config=config, planned=planned, data=data, judge=Judge(planned.backend, data.evaluation))


def differences_of(seed):
    """First-order differences of a seed, as the command makes them."""
    from rco.backends.sensitivity import fisher_differences

    if ("fisher", seed) not in _STATE:
        sequences = _STATE["data"].search.select(slice(0, _STATE["config"].sensitivity))
        _STATE["fisher", seed] = fisher_differences(_STATE["planned"].backend, sequences, seed=seed)
    return _STATE["fisher", seed]


def run(task):
    """One budget, one seed, one variant of the search."""
    from rco.backends.base import Budget
    from rco.backends.sensitivity import curvature, logits_from_losses, predicted_losses
    from rco.core.evaluation import Evaluator
    from rco.core.knapsack import solve_mckp
    from rco.core.refine import layer_order, spend, uniform_allocation
    from rco.core.search import RCO

    bits, seed, name, variant = task
    backend, data, judge = _STATE["planned"].backend, _STATE["data"], _STATE["judge"]
    problem = backend.problem(Budget.parse(bits=bits))
    differences = differences_of(seed)
    losses = predicted_losses(differences)
    backend.curvature = curvature(differences) if variant.pop("use_curvature", True) else None
    strength = variant.pop("strength")
    prior = logits_from_losses(losses, problem, strength) if strength else None
    began = time.perf_counter()
    with backend.objective(data.search, data.selection) as objective:
        result = RCO(**{**variant, "seed": seed}).search(problem, objective, prior=prior)
        seconds = time.perf_counter() - began
        proxy = solve_mckp(-losses.numpy(), problem)
        starts = {
            "uniform interpolation": spend(problem, uniform_allocation(problem), layer_order(problem)),
            "proxy knapsack": spend(problem, proxy.allocation, -losses.numpy()),
        }
        evaluator = Evaluator(objective)
        batches = range(objective.selection.num_batches)
        held_back = {k: float(evaluator.selection_losses(v, 7, batches).mean()) for k, v in starts.items()}
    starts["best start"] = starts[min(held_back, key=held_back.get)]
    rows = {}
    for label, choices in {**starts, "rco": np.asarray(result.allocation)}.items():
        row = judge.row(label, problem.allocation(choices), problem)
        rows[label] = {measure: row[measure] for measure in ("kl", "perplexity", "bits")}
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
    """One row per budget and variant: mean and standard deviation over seeds."""
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
            for count in ("forwards", "backwards", "seconds"):
                row[count] = statistics.mean(r[count] for r in these)
            table.append(row)
    return table


def say(last):
    shown = {k: round(v["kl"], 4) for k, v in last["rows"].items()}
    print(last["bits"], last["seed"], last["variant"], shown, last["chosen_from"], flush=True)


def run_all(tasks, config, arguments, began):
    """Run the tasks in this process, or in workers; those that the time does not allow are left out."""
    done = []

    def late():
        return time.perf_counter() - began > arguments.seconds

    if arguments.workers == 1:
        prepare(config, arguments.threads)
        for task in tasks:
            if not late():
                done.append(run(task))
                say(done[-1])
        return done
    spawn = get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, spawn, prepare, (config, arguments.threads)) as pool:
        futures = [pool.submit(run, task) for task in tasks]
        for future in as_completed(futures):
            if not future.cancelled():
                done.append(future.result())
                say(done[-1])
            if late():
                for waiting in futures:
                    waiting.cancel()
    return done


def write(out, report):
    """The report with its table, for people and programs."""
    from rco.runs import write_json_atomic

    runs = sorted(report["runs"], key=lambda r: (r["variant"], float(r["bits"]), r["seed"]))
    table = summarize(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out, {**report, "table": table, "runs": runs})
    for row in table:
        print(
            row["bits"], row["variant"], f"{row['seeds']} seeds",
            " ".join(f"{k}={v['mean']:.4f}±{v['std']:.4f}" for k, v in row.items() if isinstance(v, dict)),
            f"{row['forwards']:.0f}f {row['backwards']:.0f}b {row['seconds']:.0f}s",
        )  # fmt: skip


def merge(paths, out):
    """Parts that were made with the same settings, as one report."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if part["settings"] != parts[0]["settings"]:
            raise SystemExit(f"{path} was made with other settings than {paths[0]}.")
    runs = {(r["bits"], r["seed"], r["variant"]): r for part in parts for r in part["runs"]}
    environments = []
    for part in parts:
        environments += [e for e in part["environments"] if e not in environments]
    write(out, {**parts[0], "environments": environments, "runs": list(runs.values())})


def main():
    from rco.pipeline.common import search_settings
    from rco.pipeline.configs import QuantizeConfig
    from rco.runs import environment

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--bits", default="2.25,2.5,3.0,3.5")
    parser.add_argument("--seeds", type=int, default=5, help="how many; 0 makes the candidates alone")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=2, help="threads of each process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--store", type=Path, help="folder of the candidates; a temporary one otherwise")
    parser.add_argument("--variants", default="{}", help='JSON: {"name": {RCO settings}}')
    parser.add_argument("--out", type=Path, default=RESULTS / "quantization_quality.json")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new runs after this long")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out already holds")
    parser.add_argument("--merge", type=Path, nargs="+", help="reports to put together into --out")
    arguments = parser.parse_args()
    if arguments.merge:
        merge(arguments.merge, arguments.out)
        return
    began = time.perf_counter()
    earlier = json.loads(arguments.out.read_text()) if arguments.resume and arguments.out.exists() else {}
    variants = json.loads(arguments.variants) or {"default": {}}
    with tempfile.TemporaryDirectory() as folder:
        config = QuantizeConfig(
            model=arguments.model, bits="2.5", store=arguments.store or Path(folder) / "store",
            device=arguments.device, format="none",
        )  # fmt: skip
        defaults = {**search_settings(config), "strength": config.prior_strength}
        runs = list(earlier.get("runs", []))
        finished = {(r["bits"], r["seed"], r["variant"]) for r in runs}
        tasks = [
            (bits, seed, name, {**defaults, **variant})
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            for bits in arguments.bits.split(",")
            for name, variant in variants.items()
            if (bits, seed, name) not in finished
        ]
        if arguments.workers > 1 or not tasks:
            prepare(config, arguments.threads * arguments.workers)  # the workers then find the candidates
            _STATE.clear()
        runs += run_all(tasks, config, arguments, began) if tasks else []
    if runs:
        settings = {
            k: v for k, v in config.identity().items() if k not in ("store", "device", "bits", "seed")
        }
        environments = [*earlier.get("environments", []), {**environment(), "device": arguments.device}]
        report = {
            "command": "python benchmarks/quantization_quality.py",
            "environments": environments,
            "settings": {**settings, "variants": variants},
            "runs": runs,
        }
        write(arguments.out, report)


if __name__ == "__main__":
    main()
