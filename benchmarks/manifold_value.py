"""What the budget manifold is worth on a model: RCO, a penalty and an augmented Lagrangian that differ in it alone.

    python benchmarks/manifold_value.py tune --parts tune.jsonl --device cuda --workers 15
    python benchmarks/manifold_value.py run --parts run.jsonl --tuning tune.jsonl --device cuda --workers 15
    python benchmarks/manifold_value.py merge run.jsonl --tuning tune.jsonl

All methods have the same candidates, text, steps, samples, noise, learning rate, temperatures and initial logits
(zeros, or RCO's prior), no curvature, and knapsacks that make their samples feasible. They differ in what keeps the
logits near the budget. Every search is ended in four ways, from the same last logits:

* ``printed``: the exact knapsack of the logits, as Algorithm 1 ends; budget may stay unspent;
* ``spent``: the same with the rest of the budget spent, best logit first;
* ``chosen``: the best of all candidates on held-back text, then exchanges; nothing is spent beyond that;
* ``chosen-spent``: the same, every candidate with the rest of the budget spent.

``tune`` tries settings of the penalty and of the augmented Lagrangian with seeds that ``run`` does not use; the one
with the lowest loss on the selection text, ended as ``spent`` and averaged over budgets and seeds, is the one that
``run`` takes. RCO has no such setting. Parts are kept as in parts.py; ``merge`` writes results/manifold_value.json.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from parts import merge_parts, run_parts, settings_from

RESULTS = Path(__file__).parent / "results" / "manifold_value.json"
ENDS = ("printed", "spent", "chosen", "chosen-spent")
UNTUNED = "augmented-lagrangian (untuned)"
TUNING_SEED = 1000  # the first of the seeds that settings are chosen with
GRIDS = {
    "penalty": [{"rho": rho} for rho in (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)],
    "augmented-lagrangian": [
        {"rho": rho, "growth": growth, "patience": patience}
        for rho, growth, patience in itertools.product((0.1, 1.0, 10.0, 100.0), (1.1, 2.0), (10, 40))
    ],
}


@dataclass(frozen=True)
class Settings:
    """What every part of a run shares."""

    model: str
    work: str
    steps: int
    samples: int
    refine: int
    sequences: int
    selection: int
    evaluation: int
    sensitivity: int
    length: int
    device: str

    def config(self):
        """Model, candidates and text."""
        from rco.pipeline.configs import QuantizeConfig

        return QuantizeConfig(
            model=self.model,
            bits="3",  # every part has its own
            sequences=self.sequences,
            selection=self.selection,
            evaluation=self.evaluation,
            sensitivity=self.sensitivity,
            length=self.length,
            format="none",
            store=Path(self.work) / "candidates",
            device=self.device,
            compute="float32",  # on every device, so that their numbers compare
        )

    def header(self):
        """The first line of a file of parts; paths are left out."""
        return {**dataclasses.asdict(self), "model": Path(self.model).name, "work": None}


# ----------------------------------------------------------------------- running


@functools.lru_cache(maxsize=1)
def bench_of(settings):
    """Backend, text and judge of a process."""
    from rco.pipeline.evaluate_allocations import AllocationEvaluator
    from rco.pipeline.planning import build_data, plan_compression

    config = settings.config()
    planned = plan_compression(config)
    planned.compression.keep_references()
    data = build_data(config, planned.loaded.tokenizer)
    planned.compression.candidates(data.search)
    return planned.compression, data, AllocationEvaluator(planned.compression, data.evaluation)


def prepare(settings):
    """Candidates, which all parts share."""
    bench_of(settings)


def prior_of(settings, backend, data, problem, seed):
    """RCO's initial logits; the sensitivities behind them are measured once per seed."""
    from safetensors.torch import load_file

    from rco.atomic_files import write_tensors_atomic

    path = Path(settings.work) / f"sensitivities-{seed}-{settings.sensitivity}-{settings.length}.safetensors"
    if not path.exists():
        part = data.select(slice(0, settings.sensitivity))
        write_tensors_atomic(path, {"d": backend.differences(part, seed=seed)}, shared=True)
    backend.use_differences(load_file(path)["d"])
    return backend.search_inputs(problem, "fisher", settings.config().strength)["prior"]


def searcher_of(settings, method, own, seed):
    """A search with the printed algorithm's estimator, whichever way it keeps the budget."""
    from rco.baselines.lagrangian import AugmentedLagrangian, Penalty
    from rco.core.search import RCO

    kinds = {"rco-plain": RCO, "penalty": Penalty, "augmented-lagrangian": AugmentedLagrangian, UNTUNED: None}
    cls = kinds[method] or AugmentedLagrangian
    return cls(
        steps=settings.steps, samples=settings.samples, refine=settings.refine, curvature=False, monotone=True,
        tau=(1.0, 0.01), seed=seed, **own,
    )  # fmt: skip


def run_part(settings, bits, method, own, start, seed, tuning=False):
    """Search once, end it in every way, and judge each; tuning, one way is judged on the selection text."""
    import torch

    from rco.compression.budget import Budget
    from rco.core.expected_cost import expected_cost
    from rco.core.knapsack import solve_mckp
    from rco.core.moves import spend

    began = time.perf_counter()
    backend, data, judge = bench_of(settings)
    problem = backend.problem(Budget.parse(bits=bits))
    prior = prior_of(settings, backend, data.search, problem, seed) if start == "prior" else None
    backend.use_differences(None)
    searcher = searcher_of(settings, method, own, seed)
    if tuning:
        searcher = dataclasses.replace(searcher, choose=False, refine=0)
    last = {}
    with backend.objective(data.search, data.selection) as objective:
        result = searcher.search(problem, objective, prior=prior, on_checkpoint=last.update)
        logits = last["process"]["optimizer"]["logits"]
        if not tuning:
            # The loop does not look at ``monotone``: the same state ends as it would have without.
            without = {**last, "settings": {**last["settings"], "monotone": False}}
            chosen = dataclasses.replace(searcher, monotone=False).search(
                problem, objective, prior=prior, resume=without
            )
    low, high = (float(end) for end in backend.costs("bits").range)
    entry = {
        "bits": bits, "method": method, "settings": own, "start": start, "seed": seed,
        # Of the logits themselves, as part of the reachable range; samples and results never exceed the budget.
        "violation": float(
            (expected_cost(problem, logits)[0] - problem.float_budgets[0]) / problem_width(problem)
        ),
        "reachable_bits": [low, high],
    }  # fmt: skip
    if tuning:
        entry["selection_loss"] = result.loss
    else:
        values = torch.log_softmax(logits + problem.log_allowed, dim=-1).numpy()
        printed = solve_mckp(values, problem).allocation
        found = {
            "printed": printed,
            "spent": problem.allocation(spend(problem, printed, values)),
            "chosen": chosen.allocation,
            "chosen-spent": result.allocation,
        }
        entry["ends"] = {end: judged(judge, found[end], problem) for end in ENDS}
        entry["chosen_from"] = {"chosen": chosen.chosen_from, "chosen-spent": result.chosen_from}
        entry["evaluations"] = result.forwards + 2 * result.backwards
    return {"entry": entry, "wall_seconds": time.perf_counter() - began}


def problem_width(problem):
    """The reachable range of the budget, in its own units."""
    (low,), (high,) = problem.unit_range
    return float(high - low) / float(problem.denominator)


def judged(judge, allocation, problem):
    """KL, perplexity and bits of an allocation on the evaluation text."""
    row = judge.row("", problem.allocation(allocation), problem)
    assert row["within_budget"]
    return {name: row[name] for name in ("kl", "perplexity", "bits")}


def run(arguments):
    """Do what the file of parts does not hold yet."""
    settings = settings_from(Settings, arguments)
    known = tuned(arguments.tuning)
    parts = {}
    for seed, bits, start, method in itertools.product(
        range(arguments.seeds),
        arguments.bits.split(","),
        arguments.starts.split(","),
        ("rco-plain", *GRIDS, UNTUNED),
    ):
        if method != UNTUNED or start == "zeros":
            own = known.get(method, {})
            parts[bits, method, start, seed] = (settings, bits, method, own, start, seed)
    return run_parts(
        arguments.parts, {**settings.header(), "tuned": known}, parts, run_part,
        lambda line: "  ".join(f"{end} {line['entry']['ends'][end]['kl']:.4f}" for end in ENDS),
        workers=arguments.workers, threads=arguments.threads, prepare=lambda _: [(prepare, (settings,))],
    )  # fmt: skip


def tune(arguments):
    """Try every setting of the grids."""
    settings = settings_from(Settings, arguments)
    parts = {}
    for method, grid in GRIDS.items():
        for number, bits, seed in itertools.product(
            range(len(grid)), arguments.bits.split(","), range(arguments.seeds)
        ):
            own, drawn = grid[number], TUNING_SEED + seed
            parts[bits, method, number, drawn] = (settings, bits, method, own, "zeros", drawn, True)
    return run_parts(
        arguments.parts, settings.header(), parts, run_part,
        lambda line: f"{line['entry']['settings']} {line['entry']['selection_loss']:.4f}",
        workers=arguments.workers, threads=arguments.threads, prepare=lambda _: [(prepare, (settings,))],
    )  # fmt: skip


# ----------------------------------------------------------------------- results


def trials(path):
    """Every setting that was tried, with its geometric mean loss over budgets and seeds, best first."""
    _, _, lines = merge_parts([path])
    found = {}
    for line in lines.values():
        entry = line["entry"]
        key = entry["method"], tuple(sorted(entry["settings"].items()))
        found.setdefault(key, {})[entry["bits"], entry["seed"]] = entry["selection_loss"]
    most = max(len(losses) for losses in found.values())
    if any(len(losses) < most for losses in found.values()):
        raise SystemExit(f"{path} is not complete: run tune again.")
    rows = [
        {
            "method": method,
            "settings": dict(own),
            "loss": statistics.geometric_mean(losses.values()),
            "runs": len(losses),
        }
        for (method, own), losses in found.items()
    ]
    return sorted(rows, key=lambda row: row["loss"])


def tuned(path):
    """Method -> its best settings; nothing where nothing was tuned."""
    if path is None:
        return {}
    rows = trials(path)
    return {method: next(row["settings"] for row in rows if row["method"] == method) for method in GRIDS}


def table_of(entries):
    """Means over seeds, and what a method's KL is above RCO's with the same seed, start and end."""
    rows = []
    known = {(e["bits"], e["method"], e["start"], e["seed"]): e for e in entries}
    order = ["rco-plain", *GRIDS, UNTUNED]
    cases = sorted({key[:3] for key in known}, key=lambda key: (key[2], float(key[0]), order.index(key[1])))
    for end in ENDS:
        for bits, method, start in cases:
            mine = {key[3]: entry for key, entry in known.items() if key[:3] == (bits, method, start)}
            values = {seed: entry["ends"][end] for seed, entry in mine.items()}
            row = {"bits": bits, "method": method, "start": start, "end": end, "seeds": len(values)}
            for name in ("kl", "perplexity", "bits"):
                column = "mean_bits" if name == "bits" else name
                row[column], row[f"{column}_error"] = mean([value[name] for value in values.values()])
            row["violation"] = statistics.fmean(entry["violation"] for entry in mine.values())
            pairs = [
                value["kl"] - known[bits, "rco-plain", start, seed]["ends"][end]["kl"]
                for seed, value in values.items()
                if (bits, "rco-plain", start, seed) in known
            ]
            if method != "rco-plain" and pairs:
                row["above_rco"], row["above_rco_error"] = mean(pairs)
            rows.append(row)
    return rows


def ratios_of(entries):
    """KL relative to RCO's with the same budget, seed, start and end: geometric means over budgets and seeds."""
    rows = []
    known = {(e["bits"], e["method"], e["start"], e["seed"]): e["ends"] for e in entries}
    cases = dict.fromkeys((start, method) for _, method, start, _ in known if method != "rco-plain")
    for (start, method), end in itertools.product(cases, ENDS):
        by_seed = {}
        for (bits, other, begun, seed), ends in known.items():
            rco = known.get((bits, "rco-plain", start, seed))
            if (other, begun) == (method, start) and rco is not None:
                by_seed.setdefault(seed, []).append(ends[end]["kl"] / rco[end]["kl"])
        ratios = [ratio for found in by_seed.values() for ratio in found]
        if not ratios:
            continue
        # Budgets of a seed share their noise: the error is that of the seeds' means.
        center, error = mean([statistics.fmean(map(math.log, found)) for found in by_seed.values()])
        rows.append(
            {
                "start": start,
                "end": end,
                "method": method,
                "ratio": math.exp(center),
                "ratio_error": error * math.exp(center),
                "above": sum(ratio > 1 for ratio in ratios),
                "pairs": len(ratios),
            }
        )
    return rows


def mean(values):
    """Mean and standard error."""
    values = list(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def merge(arguments):
    """The results file."""
    from rco.runs import write_json_atomic

    settings, environments, lines = merge_parts(arguments.files)
    entries = [lines[key]["entry"] for key in sorted(lines, key=str)]
    report = {
        "command": "python benchmarks/manifold_value.py",
        "settings": settings,
        "environments": environments,
        "seeds": sorted({entry["seed"] for entry in entries}),
        "core_minutes": sum(line["wall_seconds"] for line in lines.values()) / 60,
        "tuning": trials(arguments.tuning) if arguments.tuning else [],
        "rows": table_of(entries),
        "ratios": ratios_of(entries),
        "runs": entries,
    }
    write_json_atomic(arguments.out, report)
    for row in report["rows"]:
        above = f"  {row['above_rco']:+.5f} ± {row['above_rco_error']:.5f}" if "above_rco" in row else ""
        print(
            f"{row['bits']:5s} {row['start']:6s} {row['end']:13s} {row['method']:32s} KL {row['kl']:.4f} "
            f"bits {row['mean_bits']:.4f}{above}"
        )
    return 0


def main():
    """Parse and go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("tune", "run"):
        runs = verbs.add_parser(verb)
        runs.add_argument("--parts", type=Path, required=True)
        runs.add_argument("--model", default="tiny-llama")
        runs.add_argument("--bits", default="2.5,3.0" if verb == "tune" else "2.25,2.5,3.0,3.5")
        runs.add_argument("--seeds", type=int, default=2 if verb == "tune" else 5)
        runs.add_argument("--work", default="runs/manifold-value", help="folder of the candidates")
        # As many steps as rco-plain takes in `rco compare quantize` with its defaults.
        runs.add_argument("--steps", type=int, default=81)
        runs.add_argument("--samples", type=int, default=4)
        runs.add_argument("--refine", type=int, default=20)
        runs.add_argument("--sequences", type=int, default=96)
        runs.add_argument("--selection", type=int, default=16)
        runs.add_argument("--evaluation", type=int, default=32)
        runs.add_argument("--sensitivity", type=int, default=32)
        runs.add_argument("--length", type=int, default=512)
        runs.add_argument("--device", default="cpu")
        runs.add_argument("--threads", type=int, default=1)
        runs.add_argument("--workers", type=int, default=1)
        if verb == "run":
            runs.add_argument("--starts", default="zeros,prior")
            runs.add_argument("--tuning", type=Path, help="parts of tune; without, settings are the defaults")
    merges = verbs.add_parser("merge")
    merges.add_argument("files", type=Path, nargs="+")
    merges.add_argument("--tuning", type=Path, help="parts of tune")
    merges.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    return {"tune": tune, "run": run, "merge": merge}[arguments.verb](arguments)


if __name__ == "__main__":
    sys.exit(main())
