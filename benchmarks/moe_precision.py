"""Mixed precision of experts against MxMoE, uniform widths and pruning: KL and perplexity on held-out text.

    python benchmarks/moe_precision.py run --parts parts.jsonl --workers 2
    python benchmarks/moe_precision.py run --parts parts.jsonl --model tiny-moe,DIR --text DIR --workers 16
    python benchmarks/moe_precision.py merge parts.jsonl [more.jsonl ...]

Methods, all from the same GPTQ candidates of a seed (widths 2 to 8):

* ``rco*``: a width per expert, attention at 16 bits, bits counted over experts alone (the paper's accounting);
* ``rco``: attention searched too, every group at 2 to 8 or 16 bits, at the same bytes of the checkpoint;
* ``rco*-projection``: as ``rco*`` with gate and up tied and down free, which is MxMoE's search space;
* ``mxmoe``: layer-output sensitivities and one integer program per layer, in that space;
* ``mxmoe-expert``: the same with a width per expert, which is the space of ``rco*``;
* ``uniform2``, ``uniform3``, ``uniform4``: the same width for every expert, attention at 16 bits;
* ``prune16``, ``prune4``, ``bits+prune``: at the bytes of the checkpoint that ``rco*`` has at the bits given,
  experts may be pruned or kept at 16 bits, at 4 bits, or at any width; bits alone are ``rco*`` itself.

A run is made of independent parts (model, bits, seed, method), spread over processes; each is one line of the file
given by --parts as soon as it is done, and what that file holds is not run again. Candidates of a seed are made
first, into the folder given by --work. ``merge`` makes one results/moe_precision_MODEL.json per model.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from parts import SearchSettings, merge_parts, run_parts, settings_from

RESULTS = Path(__file__).parent / "results"
METHODS = "rco*,rco,rco*-projection,mxmoe,mxmoe-expert,uniform2,uniform3,uniform4,prune16,prune4,bits+prune"
WIDTHS = "2,3,4,5,6,7,8"
ATTENTION = ["attention=16"]
# Settings of the plan that differ from the defaults, by method.
PLANS = {
    "rco*": {"lock": ATTENTION, "count": "experts"},
    "rco": {"widths": f"{WIDTHS},16"},
    "rco*-projection": {"lock": ATTENTION, "count": "experts", "per_projection": True},
    "mxmoe": {"lock": ATTENTION, "count": "experts", "per_projection": True, "searcher": "mxmoe"},
    "mxmoe-expert": {"lock": ATTENTION, "count": "experts", "searcher": "mxmoe"},
    "uniform2": {"lock": ATTENTION, "count": "experts"},
    "uniform3": {"lock": ATTENTION, "count": "experts"},
    "uniform4": {"lock": ATTENTION, "count": "experts"},
    "prune16": {"lock": ATTENTION, "widths": f"{WIDTHS},16", "allow_prune": True},
    "prune4": {"lock": ATTENTION, "allow_prune": True},
    "bits+prune": {"lock": ATTENTION, "allow_prune": True},
}
EQUAL_BYTES = ("rco", "prune16", "prune4", "bits+prune")
ONLY = {"prune16": 16, "prune4": 4}  # the one width beside none


@dataclass(frozen=True, kw_only=True)
class Settings(SearchSettings):
    """What every part of a run shares."""

    def quantization(self, model, bits, seed, method):
        """The quantization that a part is."""
        from rco.pipeline.configs import QuantizeConfig

        described = {"bits": bits, "widths": WIDTHS, **PLANS[method]}
        if method in EQUAL_BYTES:
            described["size"] = str(self.bytes_of(model, bits, seed))
            del described["bits"]
        config = self.config(
            model=model,
            eval_data=self.evaluation_text,
            seed=seed,
            store=Path(self.work) / f"{Path(model).name}-{seed}",
            compute="float32",  # on every device, so that their numbers compare
        )
        return QuantizeConfig(**config, **described)

    def base(self, model, bits, seed):
        """The plan and costs of ``rco*``, which the other budgets are derived from."""
        from rco.pipeline.planning import plan_compression

        return plan_compression(self.quantization(model, bits, seed, "rco*"))

    def bytes_of(self, model, bits, seed):
        """Bytes of a checkpoint whose experts take exactly that many bits on average, attention at 16."""
        backend = self.base(model, bits, seed).compression
        size, count = backend.costs("size"), backend.costs("bits")
        low, high = (float(end) for end in count.range)
        ends = []
        for pick in (min, max):
            ends.append(
                sum(
                    pick(row[w] for w in allowed)
                    for row, allowed in zip(size.matrix, _allowed(backend), strict=True)
                )
            )
        # Bytes are linear in the width: scales and headers do not depend on it.
        share = (Fraction(bits) - Fraction(low)) / (Fraction(high) - Fraction(low))
        return int(size.fixed + ends[0] + share * (ends[1] - ends[0]))


def _allowed(backend):
    return [[backend.plan.widths.index(w) for w in group.widths] for group in backend.plan.groups]


# ----------------------------------------------------------------------- running


def prepare(settings, model, seed):
    """Candidates that the parts of a seed share."""
    _candidates(settings.quantization(model, "3", seed, "rco*"))


def _candidates(config):
    from rco.pipeline.planning import build_data, plan_compression

    planned = plan_compression(config)
    data = build_data(config, planned.loaded.tokenizer)
    planned.compression.count_visits(data.search)
    planned.compression.candidates(data.search)
    return planned, data


def run_part(settings, model, bits, seed, method):
    """Search and judge; one line of the file of parts."""
    import numpy as np

    from rco.pipeline.evaluate_allocations import AllocationEvaluator
    from rco.pipeline.searchers import configured_searcher

    began = time.perf_counter()
    config = settings.quantization(model, bits, seed, method)
    planned, data = _candidates(config)
    backend, problem = planned.compression, planned.problem
    if method in ONLY:
        problem = _restrict(backend, planned.budget, ONLY[method])
    forwards = backwards = 0
    chosen_from, candidates = method, {}
    if method.startswith("uniform"):
        widths, width = backend.plan.widths, int(method.removeprefix("uniform"))
        allocation = problem.allocation(
            np.array([widths.index(width if width in g.widths else g.widths[0]) for g in backend.plan.groups])
        )
    else:
        inputs, table = {}, None
        if method.startswith("mxmoe"):
            table = backend.layer_errors(data.search.select(slice(0, settings.sensitivity)))
        else:
            backend.use_differences(*_sensitivities(settings, model, seed, backend, data.search))
            inputs = backend.search_inputs(problem, "fisher", config.strength)
        searcher = configured_searcher(config)
        with backend.objective(data.search, data.selection) as objective:
            tables = {} if table is None else {"layer_errors": table}
            result = searcher.search(problem, objective.with_tables(**tables), **inputs)
        allocation, chosen_from, candidates = result.allocation, result.chosen_from, result.candidates
        forwards, backwards = result.forwards, result.backwards
    searched = time.perf_counter() - began
    row = AllocationEvaluator(backend, data.evaluation).row(method, allocation, problem)
    size = backend.costs("size")
    choices = np.asarray(allocation)
    widths = np.array(backend.plan.widths)[choices]
    experts = [i for i, group in enumerate(backend.plan.groups) if group.members[0].role == "experts"]
    counts = {int(w): int((widths[experts] == w).sum()) for w in sorted(set(widths[experts].tolist()))}
    entry = {
        "kl": row["kl"],
        "kl_error": row["kl_error"],
        "perplexity": row["perplexity"],
        "by_domain": {Path(name).name: values for name, values in row["by_domain"].items()},
        "bits": row["bits"],
        "bytes": int(size.fixed + size.matrix[np.arange(len(choices)), choices].sum()),
        "within_budget": bool(problem.is_feasible(allocation)),
        "expert_groups": counts,
        "widths": "".join(np.base_repr(w, 36) for w in widths),  # a letter per group, G for 16
        "chosen_from": chosen_from,
        "selection_losses": candidates,
        "forwards": forwards,
        "backwards": backwards,
        "seconds": searched,
    }
    return {"entry": entry, "wall_seconds": time.perf_counter() - began}


def _sensitivities(settings, model, seed, backend, calibration):
    """Differences and layer errors, which depend on the groups but not on the budget: measured once."""
    from safetensors.torch import load_file

    from rco.atomic_files import write_tensors_atomic

    groups = [[[member.name for member in group.members], group.widths] for group in backend.plan.groups]
    name = hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:16]
    path = Path(settings.work) / f"{Path(model).name}-{seed}-{name}-{settings.sensitivity}.safetensors"
    if not path.exists():
        part = calibration.select(slice(0, settings.sensitivity))
        found = {
            "differences": backend.differences(part, seed=seed),
            "layer_errors": backend.layer_errors(part, experts_only=False),
        }
        write_tensors_atomic(path, found, shared=True)  # parts of other budgets may measure the same now
    found = load_file(path)
    return found["differences"], found["layer_errors"]


def _restrict(backend, budget, width):
    """Let experts be either pruned or at one width; the problem that this leaves."""
    from rco.formats.removed import REMOVED

    groups = tuple(
        dataclasses.replace(group, options=tuple(o for o in group.options if o == REMOVED or o.bits == width))
        if group.members[0].role == "experts"
        else group
        for group in backend.plan.groups
    )
    backend.plan = dataclasses.replace(backend.plan, groups=groups)
    backend._costs.clear()
    return backend.problem(budget)


def run(arguments):
    """Do what the file of parts does not hold yet."""
    settings = settings_from(Settings, arguments)
    budgets = arguments.bits.split(",")
    parts = [
        (model, bits, seed, method)
        for model in arguments.model.split(",")
        for seed in range(arguments.seeds)
        for method in arguments.methods.split(",")
        for bits in budgets
        # A uniform width has no budget: once per seed.
        if not method.startswith("uniform") or bits == budgets[0]
    ]
    parts.sort(key=lambda part: part[3].startswith(("uniform", "mxmoe")))  # the long ones first

    def show(line):
        entry = line["entry"]
        return (
            f"KL {entry['kl']:.4f} perplexity {entry['perplexity']:.3f} bits {entry['bits']:.3f} "
            f"({entry['seconds']:.0f} s, {entry['chosen_from']})"
        )

    def first(missing):
        seeds = sorted({(model, seed) for _, model, _, seed, _ in missing.values()})
        return [(prepare, (settings, *pair)) for pair in seeds]

    return run_parts(
        arguments.parts,
        settings.header(paths=("text", "work")),
        {(Path(model).name, *rest): (settings, model, *rest) for model, *rest in parts},
        run_part,
        show,
        workers=arguments.workers,
        threads=arguments.threads,
        prepare=first,
    )


# ----------------------------------------------------------------------- results


def merge(arguments):
    """One results file per model, with means over seeds and the comparisons that matter."""
    from rco.runs import write_json_atomic

    settings, environments, lines = merge_parts(arguments.files)
    for model in dict.fromkeys(key[0] for key in lines):
        mine = {key[1:]: line["entry"] for key, line in lines.items() if key[0] == model}
        table = []
        for bits, method in dict.fromkeys((bits, method) for bits, _, method in sorted(mine, key=str)):
            entries = [
                entry for (b, _, m), entry in sorted(mine.items(), key=str) if (b, m) == (bits, method)
            ]
            row = {"bits": bits, "method": method, "seeds": len(entries)}
            for name in ("kl", "perplexity", "bytes"):
                values = [entry[name] for entry in entries]
                row[name] = statistics.fmean(values)
                row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
            table.append(row)
        table.sort(key=lambda row: (row["bits"], row["kl"]))
        write_json_atomic(
            RESULTS / f"moe_precision_{model.replace('-', '_')}{arguments.suffix}.json",
            {
                "model": model,
                "settings": settings,
                "environments": environments,
                "table": table,
                "runs": [{"key": list(key), **entry} for key, entry in sorted(mine.items(), key=str)],
            },
        )
        print(
            f"## {model}\n\n| bits | method | KL | perplexity | bytes | seeds |\n|---|---|---:|---:|---:|---:|"
        )
        for row in table:
            print(
                f"| {row['bits']} | {row['method']} | {row['kl']:.4f} ± {row['kl_std']:.4f} | "
                f"{row['perplexity']:.3f} ± {row['perplexity_std']:.3f} | {row['bytes']:,.0f} | {row['seeds']} |"
            )
    return 0


def main():
    """Parse and go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run")
    Settings.add_arguments(runs, work="runs/moe-precision", sensitivity=56)
    runs.add_argument("--model", default="tiny-moe", help="names or folders, comma-separated")
    runs.add_argument("--bits", default="2.5,3.0,3.5")
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--methods", default=METHODS)
    merges = verbs.add_parser("merge")
    merges.add_argument("files", type=Path, nargs="+")
    merges.add_argument(
        "--suffix", default="", help="of the name of the results, for runs with other settings"
    )
    arguments = parser.parse_args()
    return {"run": run, "merge": merge}[arguments.verb](arguments)


if __name__ == "__main__":
    sys.exit(main())
