"""Calibration text decides what survives: experts pruned on one domain alone, evaluated on every domain.

    python benchmarks/expert_domains.py --data en_prose+fr_novels
    python benchmarks/expert_domains.py --data DIR/python_code.calibration.txt+DIR/en_prose.calibration.txt

What ``rco prune --by-domain`` reports, as a file: the KL of a model that was pruned on each domain (and on the
mixture) on each domain's held-back text. Writes results/expert_domains.json.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results" / "expert_domains.json"


def matrix(arguments, experts, seed):
    """KL to the full model: pruned on -> evaluated on -> value."""
    from rco.pipeline.configs import PruneConfig
    from rco.pipeline.prune import prune

    with tempfile.TemporaryDirectory() as folder:
        config = PruneConfig(
            model=arguments.model,
            experts=experts,
            data=arguments.data,
            by_domain=True,
            format="none",
            seed=seed,
            length=arguments.length,
            out=Path(folder) / "run",
        )
        metrics = prune(config).metrics
    mixed = next(row for row in metrics["evaluation"] if row["chosen"])["by_domain"]
    found = {"mixture": mixed, **metrics["moe"]["by_domain"]}
    return {
        short(pruned_on): {short(on): values["kl"] for on, values in measured.items()}
        for pruned_on, measured in found.items()
    }


def short(domain):
    """A file's first name."""
    return Path(domain).name.split(".")[0]


def main():
    from rco.runs import environment, write_json_atomic

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--data", default="en_prose+fr_novels")
    parser.add_argument("--experts", default="0.25,0.5")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for experts in arguments.experts.split(","):
        for seed in range(arguments.seeds):
            found = matrix(arguments, experts, seed)
            rows.append({"experts": experts, "seed": seed, "kl": found})
            for pruned_on, measured in found.items():
                cells = "  ".join(f"{on} {kl:.4f}" for on, kl in measured.items())
                print(f"{experts} pruned on {pruned_on:12s}: {cells}", flush=True)
            settings = {"model": Path(arguments.model).name, "length": arguments.length}
            settings |= {"data": [short(part) for part in arguments.data.split("+")]}
            write_json_atomic(
                arguments.out, {"environment": environment(), "settings": settings, "rows": rows}
            )


if __name__ == "__main__":
    sys.exit(main())
