"""KL over bytes and milliseconds: searches under two budgets, with costs measured on a GPU.

    python benchmarks/bytes_and_time.py --model FOLDER_OF_SMOLLM2 --dtype bfloat16 --tokens 16384 --steps 24 \\
        --sizes 0.3,0.6
    python benchmarks/bytes_and_time.py --merge small.json large.json    # of runs with other --sizes
    python benchmarks/bytes_and_time.py --draw

First the milliseconds of every linear in every format are measured, merged as vLLM merges them (q/k/v, gate/up),
and written to a table that `rco quantize --cost-table` reads. Then there is a search for each of some sizes of the
checkpoint and some limits on the sum of the milliseconds: between the least that the size allows, and what a search
without the second budget takes.

These kernels are timed. `original`: a bfloat16 product. `fp8-dynamic`: rounding of the inputs by Triton, then
torch._scaled_mm with a scale per row and token. `nvfp4-a4`: rounding of the inputs and decoding of the weight by
Triton, then a bfloat16 product, since GPUs before Blackwell have no 4-bit products. Engines fuse what is separate
here.
"""

import argparse
import csv
import json
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "bytes_and_time.json"
FIGURES = Path(__file__).parents[1] / "docs" / "floating_point"
FORMATS = ("nvfp4-a4", "fp8-dynamic", "original")
KERNELS = {
    "original": "bfloat16 product",
    "fp8-dynamic": "rounding of inputs (Triton), E4M3 product with scales per row and token (torch._scaled_mm)",
    "nvfp4-a4": "rounding of inputs (Triton), decoding to bfloat16 (Triton), bfloat16 product",
}
DECIMALS = 7  # of a cost in milliseconds
SETTINGS = ("dtype", "times", "steps", "sequences", "selection", "evaluation", "length", "seed")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=2048, help="of the timed products")
    parser.add_argument(
        "--sizes", default="0.25,0.5,0.75", help="shares of the way from nvfp4-a4 to fp8-dynamic"
    )
    parser.add_argument(
        "--times", default="0.1,0.4,0.7", help="shares of the way from the least milliseconds to free ones"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--selection", type=int, default=16)
    parser.add_argument("--evaluation", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, help="a table of costs, instead of measuring them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--merge", type=Path, nargs="+", help="write the searches of these files to --out")
    parser.add_argument("--draw", action="store_true", help="draw the figure of --out and stop")
    arguments = parser.parse_args()
    if arguments.merge:
        merge(arguments.merge, arguments.out)
    elif not arguments.draw:
        run(arguments)
    draw(json.loads(arguments.out.read_text(encoding="utf-8")))


def run(arguments):
    from rco.pipeline.configs import QuantizeConfig
    from rco.pipeline.planning import build_data, plan_compression
    from rco.runs import environment, write_json_atomic

    with tempfile.TemporaryDirectory() as store:
        config = QuantizeConfig(
            model=arguments.model, dtype=arguments.dtype, device=arguments.device, serve="vllm", bpw="16",
            formats=",".join(FORMATS), store=Path(store), steps=arguments.steps, seed=arguments.seed,
            sequences=arguments.sequences, sensitivity=min(32, arguments.sequences),
            selection=arguments.selection, evaluation=arguments.evaluation, length=arguments.length,
        )  # fmt: skip
        planned = plan_compression(config)
        if arguments.costs is None:
            costs = measure_costs(planned.compression.plan, arguments.tokens, planned.loaded.device)
            table = arguments.out.with_name("bytes_and_time_costs.csv")
            write_table(table, costs)
        else:
            costs, table = read_table(arguments.costs), arguments.costs
        data = build_data(config, planned.loaded.tokenizer)
        found = searches(arguments, config, planned.compression, data, costs)
    write_json_atomic(
        arguments.out,
        {
            "model": Path(arguments.model).name,
            "tokens_of_products": arguments.tokens,
            "kernels": KERNELS,
            "costs": {f"{kind} {name}": str(cost) for (kind, name), cost in costs.items()},
            "table": table.name,
            "settings": {name: getattr(arguments, name) for name in SETTINGS},
            **found,
            "environment": environment(),
        },
    )


def merge(paths, out):
    """One report of runs that differ in nothing but their sizes."""
    from rco.runs import write_json_atomic

    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, each in zip(paths, reports, strict=True):
        apart = [
            key for key in each if key not in ("searches", "environment") and each[key] != reports[0][key]
        ]
        if apart:
            raise SystemExit(
                f"{path} differs from {paths[0]} in {', '.join(apart)}: merge runs of other sizes alone."
            )
    write_json_atomic(out, {**reports[0], "searches": [row for each in reports for row in each["searches"]]})


# ------------------------------------------------------------------------- milliseconds


def measure_costs(plan, tokens, device):
    """Milliseconds by kind of linear and format; those of merged linears are divided by their rows."""
    if device.type != "cuda":
        raise SystemExit("The products are timed on a GPU; give --costs on other machines.")
    costs, layers = {}, len({group.block for group in plan.groups})
    merged = {tuple((m.kind, tuple(m.weight.shape)) for m in group.members) for group in plan.groups}
    for members in sorted(merged):
        rows, columns = sum(shape[0] for _, shape in members), members[0][1][1]
        for name in FORMATS:
            whole = milliseconds(name, (rows, columns), tokens, layers, device)
            print(f"{'+'.join(kind for kind, _ in members)} ({rows} x {columns}) {name}: {whole:.5f} ms")
            for kind, shape in members:
                costs[kind, name] = Fraction(round(whole * shape[0] / rows * 10**DECIMALS), 10**DECIMALS)
    return costs


def milliseconds(name, shape, tokens, layers, device):
    """Median milliseconds of one product, over matrices of as many layers as the model has, replayed as a graph."""
    from rco.bench.timing import as_graph, measure

    generator = torch.Generator(device).manual_seed(0)
    draw_one = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, shape[1], **draw_one)
    products = [product(name, torch.randn(shape, **draw_one) * 0.02, x) for _ in range(layers)]

    def work():
        for each in products:
            each(x)

    with torch.no_grad():
        return 1e3 * measure(as_graph(work, device), device, 20).median / layers


def product(name, weight, x):
    """The product of inputs with a weight in a format, as a function of the inputs."""
    from rco.formats import parse
    from rco.formats.base import EncodeSettings

    if name == "original":
        return lambda x: torch.nn.functional.linear(x, weight)
    format = parse(name)
    settings = EncodeSettings(input_peak=float(x.abs().max()), clip="minmax")
    stored = format.encode(weight, settings=settings)
    rule = format.input_rule(stored)
    if name == "nvfp4-a4":
        dense = torch.empty_like(weight)

        def decoded(x):
            stored.decode(dense)
            return torch.nn.functional.linear(rule(x), dense)

        return decoded
    matrix = format.file_tensors(stored)["weight"].t()
    by_row = stored.scales.float().view(1, -1)
    by_token = torch.ones(len(x), 1, device=x.device)
    inputs = x.to(torch.float8_e4m3fn)

    def scaled(x):
        rule(x)
        return torch._scaled_mm(inputs, matrix, scale_a=by_token, scale_b=by_row, out_dtype=torch.bfloat16)

    return scaled


def write_table(path, costs):
    """The table that `--cost-table` reads."""
    from rco.atomic_files import atomic_path

    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["linear", "format", "cost"])
        writer.writerows([kind, name, f"{float(cost):.{DECIMALS}f}"] for (kind, name), cost in costs.items())


def read_table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["linear"], row["format"]): Fraction(row["cost"]) for row in csv.DictReader(file)}


# ------------------------------------------------------------------------- searches


def searches(arguments, config, compression, data, costs):
    """Uniform formats, and a search for every size and limit of milliseconds."""
    from rco.compression.budget import Budget
    from rco.compression.second_budget import SecondBudget
    from rco.compression.second_order import diagonal_sequences
    from rco.core.knapsack import solve_mckp
    from rco.pipeline.evaluate_allocations import AllocationEvaluator
    from rco.pipeline.searchers import make_searcher, search_settings

    compression.candidates(data.search)
    some = data.search.select(slice(0, config.sensitivity))
    diagonal = compression.diagonal_losses(some.select(slice(0, diagonal_sequences(len(some)))))
    compression.use_differences(compression.differences(some, seed=arguments.seed), diagonal=diagonal)
    evaluator, sizes = AllocationEvaluator(compression, data.evaluation), compression.costs("size")
    times, _, unit = SecondBudget(Fraction(1), costs).costs(compression.plan)
    rows = np.arange(len(times))

    def described(allocation):
        choices = np.asarray(allocation)
        names = [compression.plan.options[choice].name for choice in choices]
        return {
            "bytes": sizes.fixed + int(sizes.matrix[rows, choices].sum()),
            "milliseconds": int(times[rows, choices].sum()) / unit,
            "kl": evaluator.divergence(allocation),
            "groups": {name: names.count(name) for name in FORMATS},
        }

    def search(size, limit):
        compression.second = None if limit is None else SecondBudget(limit, costs)
        problem = compression.problem(Budget.parse(size=size))
        with compression.objective(data.search, data.selection) as objective:
            settings = {**search_settings(config), "margin": compression.refinement_margin}
            result = make_searcher("rco", settings).search(
                problem, objective, **compression.search_inputs(problem, "fisher", config.strength)
            )
        row = {"size": size, "limit": None if limit is None else float(limit), **described(result.allocation)}
        assert row["bytes"] <= size
        assert limit is None or Fraction(int(times[rows, np.asarray(result.allocation)].sum()), unit) <= limit
        print(row, flush=True)
        return row, problem

    plain = compression.problem(Budget.parse(size=sizes.fixed + int(sizes.matrix.max(axis=1).sum())))
    columns = {option.name: column for column, option in enumerate(compression.plan.options)}
    uniform = {name: described(plain.allocation(np.full(len(times), columns[name]))) for name in FORMATS}
    low, high = uniform["nvfp4-a4"]["bytes"], uniform["fp8-dynamic"]["bytes"]
    found = []
    for share in map(float, arguments.sizes.split(",")):
        size = int(low + share * (high - low))
        free, problem = search(size, None)
        found.append(free)
        least = solve_mckp(-times.astype(np.float64), problem).allocation
        fastest = Fraction(int(times[rows, np.asarray(least)].sum()), unit)
        for part in map(Fraction, arguments.times.split(",")):
            limit = fastest + part * (Fraction(round(free["milliseconds"] * unit), unit) - fastest)
            found.append(search(size, limit)[0])
    return {"uniform": uniform, "searches": found}


# ------------------------------------------------------------------------- figure


def draw(report):
    """KL over milliseconds, a line for every size; uniform formats beside them."""
    from rco.plotting import figure_class, polish, save_figures

    figure = figure_class()(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.add_subplot()
    for size in sorted({row["size"] for row in report["searches"]}):
        line = sorted((row["milliseconds"], row["kl"]) for row in report["searches"] if row["size"] == size)
        axis.plot(*zip(*line, strict=True), marker="o", markersize=4, label=f"searched, {size / 1e6:.1f} MB")
    for name, row in report["uniform"].items():
        if row["kl"] > 0:
            axis.plot(row["milliseconds"], row["kl"], "k^", markersize=5)
            label = f"{name}, {row['bytes'] / 1e6:.1f} MB"
            axis.annotate(label, (row["milliseconds"], row["kl"]), fontsize=7, xytext=(4, 4),
                          textcoords="offset points")  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel(f"milliseconds of all linears, {report['tokens_of_products']} tokens", fontsize=8)
    axis.set_ylabel("KL to the full model", fontsize=8)
    axis.legend(fontsize=7)
    polish(axis, f"{Path(report['model']).name}: KL over bytes and milliseconds")
    print(*save_figures(FIGURES, {"bytes_and_time": figure}, formats=("svg",)))


if __name__ == "__main__":
    main()
