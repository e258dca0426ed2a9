"""Fill the measured part of the README from the JSON files in benchmarks/results.

python benchmarks/readme_tables.py
"""

import json
import re
from pathlib import Path

from rco.studies.ablation_report import recommendation_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name):
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def quality():
    data = load("quantization_quality")
    if data is None:
        return []
    lines = [
        "**Mixed precision, tiny-llama, group size 64**: KL to the full model on evaluation text, mean ± standard",
        f"deviation over seeds (`{data['command']}`).",
        "",
        "| bits | seeds | uniform interpolation | proxy knapsack | RCO |",
        "|---|---|---|---|---|",
    ]
    for row in data["table"]:
        cells = [
            f"{row[k]['mean']:.4f} ± {row[k]['std']:.4f}"
            for k in ("uniform interpolation", "proxy knapsack", "rco")
        ]
        lines.append(f"| {row['bits']} | {row['seeds']} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def smollm():
    data = load("smollm2_135m")
    if data is None:
        return []
    threads = f"{data['threads']} thread{'s' if data['threads'] > 1 else ''}"
    lines = [
        f"**SmolLM2-135M at 3.0 bits on a CPU**: {data['minutes']:.0f} minutes and {data['peak_gib']:.1f} GiB with "
        f"{threads} (`{data['command']}`, measured by `python benchmarks/smollm2_135m.py`).",
        "",
        "| allocation | bits | KL | perplexity |",
        "|---|---|---|---|",
    ]
    for row in data["evaluation"]:
        lines.append(f"| {row['name']} | {row['bits']:.3f} | {row['kl']:.4f} | {row['perplexity']:.2f} |")
    return [*lines, ""]


def experts():
    found = [data for data in (load("moe_precision_tiny_moe"), load("moe_precision_lab_moe")) if data]
    if not found:
        return []
    lines = [
        "**Widths of experts**: KL to the full model on evaluation text, mean ± standard deviation over seeds, all",
        "from the same candidates (`python benchmarks/moe_precision.py`; what the methods are: "
        "[docs/expert_widths.md](docs/expert_widths.md)).",
        "",
    ]
    for data in found:
        budgets = sorted({row["bits"] for row in data["table"] if not row["method"].startswith("uniform")})
        shown = {
            (row["method"], row["bits"]): f"{row['kl']:.4f} ± {row['kl_std']:.4f}" for row in data["table"]
        }
        uniform = [
            f"{row['method'][7:]} bits {row['kl']:.4f}" for row in data["table"] if "uniform" in row["method"]
        ]
        lines += [
            f"| {data['model']}, expert bits | {' | '.join(budgets)} |",
            "|---|" + "---|" * len(budgets),
        ]
        for method in dict.fromkeys(method for method, _ in shown if not method.startswith("uniform")):
            cells = [shown.get((method, bits), "") for bits in budgets]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines += ["", f"Uniform: {', '.join(uniform)}.", ""]
    step = load("moe_step")
    if step:
        ratios = ", ".join(
            f"{row['ratio']:.2f} ({row['model']}, {row['length']} tokens)" for row in step["rows"]
        )
        lines += [
            f"A search step takes {ratios} times a plain forward and backward pass in the same process.",
            "",
        ]
    return lines


def pruning():
    found = [load(f"expert_pruning_{model}") for model in ("tiny_moe", "lab_moe")]
    methods = ("rco", "rco@0.1", "evoesap", "frequency-global", "reap", "reap-global")
    lines = [
        "**Expert pruning**: KL to the full model on seven domains, mean ± standard deviation over seeds, equal",
        "tokens per search (`@0.1`: a tenth; [docs/expert_pruning.md](docs/expert_pruning.md)).",
        "",
        "| model, pruned | " + " | ".join(methods) + " |",
        "|---|" + "---|" * len(methods),
    ]
    for data in found:
        if data is None:
            return []
        for fraction, table in data["tables"].items():
            rows = {row["method"]: row for row in table["rows"]}
            cells = [f"{rows[m]['kl']:.4f} ± {rows[m]['kl_std']:.4f}" for m in methods]
            lines.append(f"| {data['model']}, {100 * float(fraction):.0f} % | " + " | ".join(cells) + " |")
    return [*lines, ""]


def solver():
    data = load("solver")
    if data is None:
        return []
    lines = [
        "**Exact knapsack** (`rco bench solver`), one thread, fresh noise each call, HiGHS in the same run.",
        "",
    ]
    text = (RESULTS / "solver.md").read_text(encoding="utf-8")
    return [*lines, *[line for line in text.splitlines() if line.startswith("|")], ""]


def knapsack_study():
    data = load("knapsack_study")
    if data is None:
        return []
    scenarios = data["knapsack"]["scenarios"]
    methods = {
        "manifold": "manifold",
        "manifold_printed": "manifold, step as printed",
        "manifold_slack": "manifold with slack",
        "lagrangian": "Lagrangian, best schedule",
        "augmented_lagrangian": "augmented Lagrangian, best schedule",
    }
    lines = [
        "**Knapsack study** (`rco bench knapsack`): per cent below the exact optimum after repair, mean of "
        f"{data['knapsack']['settings']['instances']} instances.",
        "All thirteen scenarios, violations and the comparison with the paper: "
        "[knapsack_study.md](benchmarks/results/knapsack_study.md).",
        "",
        "| scenario | " + " | ".join(methods.values()) + " |",
        "|---|" + "---|" * len(methods),
    ]
    for name in ("large", "huge", "float costs", "cheap optimal", "mixed slack"):
        gaps = [scenarios[name]["methods"][method]["gap_mean"] for method in methods]
        lines.append(f"| {name} | " + " | ".join(f"{gap:.3f}" for gap in gaps) + " |")
    return [*lines, ""]


def memory():
    data = load("search_memory")
    if data is None:
        return []
    lines = [
        "**Memory of a search step** (`python benchmarks/search_memory.py`), MiB above model, store and reference:",
        "it grows neither with the number of options nor with tokens x vocabulary.",
        "",
        "| vocabulary | options | step | K dense copies would take | tokens x vocabulary would take |",
        "|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        cells = [row["step_peak_bytes"], row["dense_copies_bytes"], row["tokens_x_vocabulary_bytes"]]
        lines.append(
            f"| {row['vocabulary']} | {row['options']} | "
            + " | ".join(f"{c / 2**20:.0f}" for c in cells)
            + " |"
        )
    return [*lines, ""]


def ablations():
    data = load("ablations")
    if data is None:
        return []
    settings = data["settings"]
    return [
        f"**Settings of the search**, {settings['model']} at {settings['bits']} bits, {settings['seeds']} seeds "
        f"(`{data['command']}`): the best of the",
        "values tried, for Algorithm 1 as printed and for the whole search, and those whose mean KL lies within "
        "one standard",
        "error of the best. All nine sweeps with their plots: [docs/ablations](docs/ablations/ablations.md).",
        "",
        *recommendation_table(data).splitlines(),
        "",
    ]


def main():
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    body = "\n".join(
        [*quality(), *smollm(), *pruning(), *experts(), *solver(), *knapsack_study(), *memory(), *ablations()]
    )
    filled = re.sub(
        r"<!-- measured: begin -->.*?<!-- measured: end -->",
        lambda _: f"<!-- measured: begin -->\n{body}\n<!-- measured: end -->",
        text,
        flags=re.DOTALL,
    )
    path.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
