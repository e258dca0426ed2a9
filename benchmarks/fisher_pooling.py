"""What pooling over options does to the Fisher estimate of each option's loss, and to its knapsack.

    python benchmarks/fisher_pooling.py --bits 2.25,2.5

Sequences are split at random into those that estimate and those that judge: the error is the root mean square of
the log of their ratio over the lowest three widths. The judges' own noise, sqrt(2 / judges), is in it.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


def errors_by_sequences(differences, relative, repeats, rng):
    """Error of the plain and the pooled estimate for several numbers of sequences."""
    from rco.compression.second_order import predicted_losses

    rows = []
    for count in (1, 2, 4, 8, 16, 32, 48):
        found = {"plain": [], "pooled": []}
        for _ in range(repeats):
            order = torch.from_numpy(rng.permutation(len(differences)))
            estimate, judge = differences[order[:count]], predicted_losses(differences[order[count:]])
            for name, errors in (("plain", None), ("pooled", relative)):
                ratio = (predicted_losses(estimate, errors) / judge).log()[:, :3]
                found[name].append(float(ratio.square().mean().sqrt()))
        floor = (2.0 / (len(differences) - count)) ** 0.5
        rows.append({"sequences": count, "floor": floor, **{k: float(np.mean(v)) for k, v in found.items()}})
    return rows


def main():
    from rco.compression.budget import Budget
    from rco.compression.second_order import predicted_losses
    from rco.core.knapsack import solve_mckp
    from rco.core.moves import spend
    from rco.pipeline.configs import QuantizeConfig
    from rco.pipeline.evaluate_allocations import AllocationEvaluator
    from rco.pipeline.planning import build_data, plan_compression
    from rco.runs import environment, write_json_atomic

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--bits", default="2.25,2.5")
    parser.add_argument("--store", type=Path, default=None, help="candidates to reuse")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    bits = arguments.bits.split(",")
    store = arguments.store or Path(tempfile.mkdtemp())
    config = QuantizeConfig(model=arguments.model, bits=bits[0], store=store)
    planned = plan_compression(config)
    backend, data = planned.compression, build_data(config, planned.loaded.tokenizer)
    backend.candidates(data.search)
    differences = backend.differences(data.search, seed=arguments.seed)
    relative = backend.relative_errors()
    judge = AllocationEvaluator(backend, data.evaluation)
    knapsacks = []
    for amount in bits:
        problem = backend.problem(Budget.parse(bits=amount))
        for count in (4, 32, len(differences)):
            row = {"bits": amount, "sequences": count}
            for name, errors in (("plain", None), ("pooled", relative)):
                values = -predicted_losses(differences[:count], errors).numpy()
                choices = spend(problem, solve_mckp(values, problem).allocation, values)
                row[name] = judge.row(name, problem.allocation(choices), problem)["kl"]
            knapsacks.append(row)
            print(row, flush=True)
    table = errors_by_sequences(
        differences, relative, arguments.repeats, np.random.default_rng(arguments.seed)
    )
    write_json_atomic(
        RESULTS / "fisher_pooling.json",
        {
            "command": f"python benchmarks/fisher_pooling.py --model {arguments.model} --bits {arguments.bits}",
            "environment": environment(),
            "seed": arguments.seed,
            "errors": table,
            "knapsacks": knapsacks,
        },
    )
    for row in table:
        print(row)


if __name__ == "__main__":
    main()
