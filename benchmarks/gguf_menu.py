"""Which of ggml's types a search needs: the default menu of `--format gguf`.

    python benchmarks/gguf_menu.py --model tiny-llama --model smollm2-135m

For every tensor and type, the KL that the type alone would cost is predicted from Fisher sensitivities. The best
allocation under these losses is solved exactly at sizes from near the smallest file to one in q6_k, with all types
and without some. Types are left out one by one, the one with the least effect first, as long as the loss of no
model rises by more than 1 % at any size. A type without which a size cannot be reached stays.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.01
SIZES = 16


def main():
    from rco.formats.ggml.block_types import BLOCK_TYPES
    from rco.runs import environment, write_json_atomic

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help="repeatable; default tiny-llama")
    parser.add_argument("--sequences", type=int, default=16, help="for importances and sensitivities")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS / "gguf_menu.json")
    arguments = parser.parse_args()
    types = list(BLOCK_TYPES)
    models = {name: Losses.measure(name, types, arguments) for name in arguments.model or ["tiny-llama"]}
    dropped, rises = eliminate(types, list(models.values()))
    kept = [name for name in types if name not in dropped]
    print("menu:", ", ".join(kept))
    write_json_atomic(
        arguments.out,
        {
            "models": {name: {"searched_bytes": losses.sizes} for name, losses in models.items()},
            "sequences": arguments.sequences,
            "length": arguments.length,
            "tolerance": TOLERANCE,
            "menu": kept,
            "left_out": [{"type": name, "largest_rise": rises[name]} for name in dropped],
            "rise_without_one_more": {  # None: some size cannot be reached
                name: finite(max(losses.rise({*dropped, name}) for losses in models.values()))
                for name in kept
            },
            "million_weights_per_second": {name: speed(name) for name in types},
            "environment": environment(),
        },
    )


class Losses:
    """Predicted losses of every type for every tensor of a model, and the best total at several sizes."""

    def __init__(self, problems, labels, losses):
        self.problems, self.labels, self.losses = problems, labels, losses
        self.sizes = [sum(problem.unit_budgets) for problem in problems]
        self.best = [self.solve(problem, set()) for problem in problems]

    @classmethod
    def measure(cls, model, types, arguments):
        from rco.compression.budget import Budget
        from rco.pipeline.configs import QuantizeConfig
        from rco.pipeline.planning import build_data, plan_compression

        with tempfile.TemporaryDirectory() as store:
            config = QuantizeConfig(
                model=model, size="pure-q8_0", format="gguf", types=",".join(types), store=Path(store),
                sequences=arguments.sequences, sensitivity=arguments.sequences, selection=1, evaluation=1,
                length=arguments.length, device=arguments.device,
            )  # fmt: skip
            planned = plan_compression(config)
            compression, data = planned.compression, build_data(config, planned.loaded.tokenizer)
            compression.candidates(data.search)
            compression.use_differences(compression.differences(data.search))
            losses = compression.losses.double().cpu().numpy()
        costs = compression.costs("size")
        low = costs.fixed + int(np.where(planned.problem.allowed, costs.matrix, 2**60).min(axis=1).sum())
        high = int(compression.settled(Budget.parse(size="pure-q6_k")).amount)
        sizes = np.geomspace(1.04 * low, high, SIZES).astype(int)
        problems = [compression.problem(Budget.parse(size=int(size))) for size in sizes]
        return cls(problems, compression.plan.labels, losses)

    def solve(self, problem, left_out):
        """The least total loss without some types; infinite if no allocation fits."""
        from rco.core.knapsack import solve_mckp

        allowed = problem.allowed & np.array([label not in left_out for label in self.labels])
        cheapest = np.where(allowed, problem.unit_costs[0], np.iinfo(np.int64).max // 2**20).min(axis=1).sum()
        if not allowed.any(axis=1).all() or cheapest > problem.unit_budgets[0]:
            return float("inf")
        values = np.where(allowed, -self.losses, -np.inf)
        choices = np.asarray(solve_mckp(values, problem).allocation)
        return float(self.losses[np.arange(len(choices)), choices].sum())

    def rise(self, left_out):
        """Largest relative rise of the loss over the sizes."""
        found = [self.solve(problem, left_out) for problem in self.problems]
        return max(new / old - 1.0 for new, old in zip(found, self.best, strict=True))


def finite(number):
    return None if np.isinf(number) else number


def eliminate(types, models):
    """Types that are left out, in order, with the largest rise after each."""
    dropped, rises = [], {}
    while True:
        options = {
            name: max(losses.rise({*dropped, name}) for losses in models)
            for name in types
            if name not in dropped
        }
        name = min(options, key=options.get)
        if options[name] > TOLERANCE:
            return dropped, rises
        dropped.append(name)
        rises[name] = options[name]
        print(f"without {name}: {100 * options[name]:.2f} %")


def speed(name):
    """Weights that one core encodes in a second, in millions."""
    from rco.formats.ggml.block_types import BLOCK_TYPES
    from rco.formats.ggml.libggml import quantize

    torch.manual_seed(0)
    weight, importance = torch.randn(16, 4096), torch.rand(4096) + 0.01
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quantize(BLOCK_TYPES[name].number, weight[:1], importance)  # tables are made once
        began = time.process_time()
        quantize(BLOCK_TYPES[name].number, weight, importance)
        return weight.numel() / (time.process_time() - began) / 1e6
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
