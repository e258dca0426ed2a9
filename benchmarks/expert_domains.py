"""Calibration text and layers' shares decide what survives: the paper's table of Qwen3-Coder-Next in small.

    python benchmarks/expert_domains.py run --parts parts.jsonl --text DIR --workers 2
    python benchmarks/expert_domains.py run --parts parts.jsonl --text DIR --model tiny-moe,DIR --device cuda \\
        --workers 15 --tasks DIR/arc_easy.test.jsonl,DIR/sciq.validation.jsonl
    python benchmarks/expert_domains.py merge parts.jsonl

Experts are pruned as ``rco prune`` does it, on code or on all other text (calibration), the same number in every
layer or wherever they matter least (allocation). Every result is evaluated on held-out code and on held-out text of
the other kinds. A part is (model, fraction, calibration, allocation, seed); a seed has its own data, scores and
noise. Parts are kept as in parts.py; ``merge`` writes results/expert_domains.json, which
benchmarks/readme_tables.py puts into docs/expert_pruning.md.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from parts import merge_parts, run_parts, settings_from, text_files

RESULTS = Path(__file__).parent / "results" / "expert_domains.json"
CODING = "python_code"
GENERAL = "en_prose,tech_docs,math_latex,de_law,fr_novels,dialogue"
CALIBRATIONS = {"coding": CODING, "general": GENERAL}
ALLOCATIONS = ("uniform", "nonuniform")
NUMBERS = ("kl_coding", "kl_general", "perplexity_coding", "perplexity_general")


@dataclass(frozen=True)
class Settings:
    """What every part of a run shares."""

    text: str
    tasks: str | None
    limit: int | None
    steps: int
    samples: int
    refine: int
    length: int
    sequences: int
    sensitivity: int
    selection: int
    evaluation: int
    device: str

    def config(self, model, experts, calibration, allocation, seed):
        """The pruning that a part is."""
        from rco.pipeline.configs import PruneConfig

        return PruneConfig(
            model=model,
            experts=experts,
            uniform=allocation == "uniform",
            data=text_files(self.text, CALIBRATIONS[calibration], "calibration"),
            eval_data=text_files(self.text, f"{CODING},{GENERAL}", "evaluation"),
            steps=self.steps,
            samples=self.samples,
            refine=self.refine,
            length=self.length,
            sequences=self.sequences,
            sensitivity=self.sensitivity,
            selection=self.selection,
            evaluation=self.evaluation,
            format="none",
            seed=seed,
            device=self.device,
            compute="float32",  # on every device, so that their numbers compare
        )

    def header(self):
        """The first line of a file of parts; paths are left out."""
        described = {**dataclasses.asdict(self), **CALIBRATIONS}
        described["tasks"] = [Path(path).name for path in (self.tasks or "").split(",") if path]
        del described["text"]
        return described


# ----------------------------------------------------------------------- running


def run_part(settings, model, experts, calibration, allocation, seed):
    """Search and judge; one line of the file of parts. The full model is a part without a budget."""
    from rco.pipeline.evaluate_allocations import AllocationEvaluator
    from rco.pipeline.planning import build_data, plan_compression
    from rco.pipeline.searchers import configured_searcher

    began = time.perf_counter()
    full = allocation == "full"
    config = settings.config(model, "0.25" if full else experts, calibration, allocation, seed)
    planned = plan_compression(config)
    backend, problem = planned.compression, planned.problem
    data = build_data(config, planned.loaded.tokenizer)
    chosen, entry = None, {}
    if not full:
        backend.score_experts(data.search, sensitivity=config.sensitivity)
        searcher = configured_searcher(config)
        with backend.objective(data.search, data.selection) as objective:
            result = searcher.search(
                problem, objective, **backend.search_inputs(problem, config.start, config.strength)
            )
        chosen = result.allocation
        assert problem.is_feasible(chosen)
        entry = {
            "kept": [len(layer) for layer in backend.kept(chosen)],
            "chosen_from": result.chosen_from,
            "tokens": (result.forwards + 2 * result.backwards) * settings.length,
            "seconds": time.perf_counter() - began,
        }
    measured = AllocationEvaluator(backend, data.evaluation).row("", chosen, problem)["by_domain"]
    entry |= by_kind({Path(name).name.split(".")[0]: values for name, values in measured.items()})
    if settings.tasks:
        entry["tasks"] = accuracies(settings, planned, chosen, seed)
    return {"entry": entry, "wall_seconds": time.perf_counter() - began}


def by_kind(domains):
    """KL and perplexity on code, and their means over the other kinds of text."""
    general = [domains[name] for name in GENERAL.split(",")]
    return {
        "by_domain": domains,
        "kl_coding": domains[CODING]["kl"],
        "kl_general": statistics.fmean(values["kl"] for values in general),
        "perplexity_coding": domains[CODING]["perplexity"],
        # Of all tokens together, domains having as many: a geometric mean.
        "perplexity_general": math.exp(statistics.fmean(math.log(v["perplexity"]) for v in general)),
    }


def accuracies(settings, planned, chosen, seed):
    """Accuracy on every task; of the full model for None."""
    from rco.pipeline.evaluate import headline, measure_tasks

    everything = [1] * planned.problem.num_groups
    with planned.compression.apply(everything if chosen is None else chosen) as loaded:
        return {
            name: headline(found)
            for name, found in measure_tasks(loaded, settings.tasks, settings.limit, seed).items()
        }


def run(arguments):
    """Do what the file of parts does not hold yet."""
    settings = settings_from(Settings, arguments)
    parts = {}
    for seed, model in itertools.product(range(arguments.seeds), arguments.model.split(",")):
        name = Path(model).name
        for experts, calibration, allocation in itertools.product(
            arguments.experts.split(","), CALIBRATIONS, ALLOCATIONS
        ):
            key = name, experts, calibration, allocation, seed
            parts[key] = (settings, model, *key[1:])
        parts[name, "0", "coding", "full", seed] = (settings, model, "0", "coding", "full", seed)
    return run_parts(
        arguments.parts, settings.header(), parts, run_part,
        lambda line: "  ".join(f"{number} {line['entry'][number]:.4f}" for number in NUMBERS),
        workers=arguments.workers, threads=arguments.threads,
    )  # fmt: skip


# ----------------------------------------------------------------------- results


def table_of(lines):
    """Means and standard deviations over seeds, one row for each part apart from its seed."""
    rows = []
    for model, experts, calibration, allocation in dict.fromkeys(key[:4] for key in sorted(lines, key=str)):
        mine = [
            line["entry"]
            for key, line in lines.items()
            if key[:4] == (model, experts, calibration, allocation)
        ]
        row = {
            "model": model, "experts": experts, "calibration": calibration, "allocation": allocation,
            "seeds": len(mine),
        }  # fmt: skip
        columns = {name: [entry[name] for entry in mine] for name in NUMBERS}
        for task in mine[0].get("tasks", {}):
            columns[f"task {task}"] = [entry["tasks"][task] for entry in mine]
        for name, values in columns.items():
            row[name] = statistics.fmean(values)
            row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append(row)
    return rows


def merge(arguments):
    """The results file."""
    from rco.runs import write_json_atomic

    settings, environments, lines = merge_parts(arguments.files)
    table = table_of(lines)
    report = {
        "command": "python benchmarks/expert_domains.py",
        "settings": settings,
        "environments": environments,
        "seeds": sorted({key[4] for key in lines}),
        "core_minutes": sum(line["wall_seconds"] for line in lines.values()) / 60,
        "table": table,
        "runs": [{"key": list(key), **lines[key]["entry"]} for key in sorted(lines, key=str)],
    }
    write_json_atomic(arguments.out, report)
    for row in table:
        numbers = "  ".join(f"{name} {row[name]:.4f}" for name in row if f"{name}_std" in row)
        print(
            f"{row['model']:9s} {row['experts']:4s} {row['calibration']:8s} {row['allocation']:10s} {numbers}"
        )
    return 0


def main():
    """Parse and go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run")
    runs.add_argument("--parts", type=Path, required=True)
    runs.add_argument("--model", default="tiny-moe", help="names or folders, comma-separated")
    runs.add_argument("--text", required=True, help="folder of NAME.calibration.txt and NAME.evaluation.txt")
    runs.add_argument("--experts", default="0.25,0.5")
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--tasks", help="JSONL files of tasks, comma-separated")
    runs.add_argument("--limit", type=int, help="first questions of each task")
    runs.add_argument("--steps", type=int, default=50)
    runs.add_argument("--samples", type=int, default=4)
    runs.add_argument("--refine", type=int, default=20)
    runs.add_argument("--length", type=int, default=128)
    runs.add_argument("--sequences", type=int, default=112)
    runs.add_argument("--sensitivity", type=int, default=28)
    runs.add_argument("--selection", type=int, default=28)
    runs.add_argument("--evaluation", type=int, default=280, help="sequences, the same number of every kind")
    runs.add_argument("--device", default="cpu")
    runs.add_argument("--threads", type=int, default=1)
    runs.add_argument("--workers", type=int, default=1)
    merges = verbs.add_parser("merge")
    merges.add_argument("files", type=Path, nargs="+")
    merges.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    return {"run": run, "merge": merge}[arguments.verb](arguments)


if __name__ == "__main__":
    sys.exit(main())
