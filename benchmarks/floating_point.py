"""What `rco quantize` makes of NVFP4, FP8 and the original, and ModelOpt's way beside it, at the same bytes.

    python benchmarks/floating_point.py --model tiny-llama --runs runs/floating_point

For every budget and seed there are two runs. `rco`: as `rco quantize` does by default, with tuning. `modelopt`:
the scores of AutoQuantize, the exact knapsack, weights rounded to nearest with scales that fit the largest weight
of each group, no tuning. A seed picks the text for calibration and evaluation, too, which both runs share. Finished
runs are kept.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rco.atomic_files import atomic_path

RESULTS = Path(__file__).parent / "results"
KINDS = {
    "rco": [],
    "modelopt": ["--searcher", "autoquantize", "--method", "rtn", "--clip", "minmax", "--tune", "off"],
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--budgets", default="5.5,6.5,7.5", help="bits per weight")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--collect", action="store_true", help="take the runs that are finished, make none")
    parser.add_argument("--out", type=Path, help="default: floating_point_runs_MODEL.json among the results")
    parser.add_argument("options", nargs="*", help="further options of rco quantize, after --")
    arguments = parser.parse_args()
    check_options(arguments)
    wanted = [
        (kind, budget, seed)
        for seed in range(arguments.seeds)
        for budget in arguments.budgets.split(",")
        for kind in KINDS
    ]
    for each in wanted:
        if not arguments.collect and not finished(arguments, *each):
            run(arguments, *each)
    found = [each for each in wanted if finished(arguments, *each)]
    if not found:
        raise SystemExit(f"No finished run in {arguments.runs}; leave out --collect to make them.")
    model = Path(arguments.model).name
    content = {
        "model": model,
        "options": arguments.options,
        "environment": read(folder(arguments, *found[0]) / "environment.json"),
        "runs": [record(arguments, *each) for each in found],
    }
    out = arguments.out or RESULTS / f"floating_point_runs_{model.replace('-', '_')}.json"
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def check_options(arguments):
    """Take the options of the runs that are there, or note those of the first: a folder has one set of options."""
    noted = arguments.runs / "options.json"
    if noted.exists():
        before = read(noted)
        if arguments.options and arguments.options != before:
            raise SystemExit(
                f"Runs in {arguments.runs} have the options {' '.join(before)!r}, got "
                f"{' '.join(arguments.options)!r}: give the same ones or another --runs."
            )
        arguments.options = before
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    noted.write_text(json.dumps(arguments.options), encoding="utf-8")


def folder(arguments, kind, budget, seed):
    return arguments.runs / f"{kind}_{budget}_{seed}"


def finished(arguments, *key):
    path = folder(arguments, *key) / "metrics.json"
    return path.exists() and "evaluation" in read(path)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def run(arguments, kind, budget, seed):
    """One run; those of a seed share their candidates."""
    store = arguments.runs / f"candidates_{kind}_{seed}"
    command = [
        sys.executable, "-m", "rco", "quantize", arguments.model, "--serve", "vllm", "--format", "none",
        "--formats", "nvfp4-a4,fp8-dynamic,original", "--bpw", budget, "--seed", str(seed),
        "--store", str(store), "--out", str(folder(arguments, kind, budget, seed)),
        *KINDS[kind], *arguments.options,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def record(arguments, kind, budget, seed):
    """Figures of a finished run."""
    metrics = read(folder(arguments, kind, budget, seed) / "metrics.json")
    tuning = metrics.get("tuning") or {}
    return {
        "kind": kind,
        "bpw": budget,
        "seed": seed,
        "bits": {key: metrics["budget"][f"{key}_units"] for key in ("budget", "used")},
        "evaluation": {
            row["name"]: {key: float(f"{row[key]:.6g}") for key in ("kl", "kl_error", "perplexity")}
            for row in metrics["evaluation"]
        },
        "tuned": {key: tuning[key] for key in ("mode", "tokens") if key in tuning},
        "seconds": {name: round(value, 1) for name, value in metrics["timings"].items()},
    }


if __name__ == "__main__":
    main()
