"""Whether the loss of an allocation is the sum of what its groups do alone, so that a joint search gains nothing.

    python benchmarks/additivity.py

For each menu, every group is measured alone at every option, all others at the original. Then random allocations
within a budget are measured, and the one of least sum. If losses are near the sums, that one is the best, and no
method of choosing is better than it by more than the distance between losses and sums.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results" / "additivity.json"
MENUS = {
    "nvfp4-a4, fp8-dynamic, original": (
        {"formats": "nvfp4-a4,fp8-dynamic,original", "serve": "vllm"},
        "5.5,6.5,7.5",
    ),
    "2, 3, 4, 8 bits, original": ({"widths": "2,3,4,8,16"}, "2.75,3.5,4.5"),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--evaluation", type=int, default=16)
    parser.add_argument("--allocations", type=int, default=8, help="random ones for every budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    from rco.atomic_files import atomic_path
    from rco.runs import environment

    report = {
        "model": Path(arguments.model).name,
        "evaluation": arguments.evaluation,
        "allocations": arguments.allocations,
        "seed": arguments.seed,
        "menus": {name: study(arguments, *menu) for name, menu in MENUS.items()},
        "environment": environment(),
    }
    with atomic_path(arguments.out) as temporary:
        temporary.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")


def study(arguments, options, budgets):
    """Losses of single groups, and of allocations at every budget beside their sums."""
    from rco.compression.budget import Budget
    from rco.core.knapsack import solve_mckp
    from rco.pipeline.configs import QuantizeConfig
    from rco.pipeline.evaluate_allocations import AllocationEvaluator
    from rco.pipeline.planning import build_data, plan_compression

    with tempfile.TemporaryDirectory() as store:
        config = QuantizeConfig(
            model=arguments.model, device=arguments.device, bpw="16", store=Path(store), seed=arguments.seed,
            sequences=arguments.sequences, selection=8, evaluation=arguments.evaluation, **options,
        )  # fmt: skip
        planned = plan_compression(config)
        compression, data = planned.compression, build_data(config, planned.loaded.tokenizer)
        compression.candidates(data.search)
        evaluator = AllocationEvaluator(compression, data.evaluation)
        names = [option.name for option in compression.plan.options]
        original, generator = names.index("original"), np.random.default_rng(arguments.seed)
        whole = compression.problem(Budget.parse(bpw="16"))
        groups = whole.num_groups

        def loss(choices):
            return evaluator.divergence(whole.allocation(choices))

        alone = np.zeros((groups, len(names)))
        for group in range(groups):
            for option in range(len(names)):
                if option != original:
                    choices = np.full(groups, original)
                    choices[group] = option
                    alone[group, option] = loss(choices)
            print(f"alone: {group + 1}/{groups}", flush=True)
        found = {}
        for budget in budgets.split(","):
            problem = compression.problem(Budget.parse(bpw=budget))

            def best(values, problem=problem):
                return np.asarray(solve_mckp(values, problem).allocation)

            def measured(choices):
                return {"sum": float(alone[np.arange(groups), choices].sum()), "together": loss(choices)}

            found[budget] = {
                "random": [
                    measured(best(generator.normal(size=alone.shape))) for _ in range(arguments.allocations)
                ],
                "least sum": measured(best(-alone)),
            }
            print(budget, found[budget]["least sum"], flush=True)
    return {"options": names, "alone": [[float(f"{x:.5g}") for x in row] for row in alone], "budgets": found}


if __name__ == "__main__":
    main()
