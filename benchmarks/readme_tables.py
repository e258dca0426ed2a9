"""Fill the measured parts of the documents from the JSON files in benchmarks/results.

python benchmarks/readme_tables.py            # tables
python benchmarks/readme_tables.py --plots    # and the plots of the comparison
"""

import json
import math
import re
import statistics
import sys
from pathlib import Path

from ablation_report import present_command, recommendation_table

from rco.pipeline.compare_tables import markdown, summarise

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name):
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def budgets_of(data):
    return list(dict.fromkeys(row["budget"] for row in data["rows"]))


def compare_command(data):
    """The command as it was run; where that was not noted, the shortest that measures the same."""
    if "command" in data:
        return data["command"]
    seeds = max(row["seeds"] for row in data["rows"])
    return f"rco compare quantize tiny-llama --bits {','.join(budgets_of(data))} --seeds {seeds}"


def comparison():
    """Methods at equal tokens: a row each, a column per budget, best first at 2.5 bits."""
    data = load("compare_quantize")
    if data is None:
        return []
    budgets = budgets_of(data)
    rows = {(row["method"], row["budget"]): row for row in data["rows"]}
    methods = list(dict.fromkeys(method for method, _ in rows))
    # Those that were not measured at 2.5 bits come last.
    methods.sort(key=lambda method: rows[method, "2.5"]["kl"] if (method, "2.5") in rows else float("inf"))
    lines = [
        "## Bits per layer: every method",
        "",
        "KL to the original model on evaluation text, tiny-llama with groups of 64 weights: mean ± standard "
        "deviation "
        f"over up to {max(row['seeds'] for row in data['rows'])} seeds.",
        f"All methods choose from the same candidates and may use {allowance(data)} each. Perplexity, exact bits, "
        "seconds and a description of each method: [comparison.md](comparison.md).",
        "",
        f"`{compare_command(data)}`",
        "",
        f"| method | {' | '.join(f'{budget} bits' for budget in budgets)} | tokens |",
        "|---|" + "---:|" * (len(budgets) + 1),
    ]
    for method in methods:
        found = [rows.get((method, budget)) for budget in budgets]
        cells = [mean_and_spread(row) if row else "" for row in found]
        most = max(row["tokens"] for row in found if row)
        lines.append(f"| {method} | {' | '.join(cells)} | {most:,.0f} |")
    return [*lines, "", *against_the_starts(rows, budgets), ""]


HEADLINE_METHODS = {
    "rco": "RCO",
    "higgs": "HIGGS: each layer measured alone, then an exact knapsack",
    "fisher": "Fisher information of each layer, then an exact knapsack",
    "evopress": "EvoPress: evolutionary search",
    "uniform-fill": "the same width everywhere, the rest spent from the first layer on",
    "uniform": "the same width everywhere",
}
HEADLINE_PLOT = "docs/comparison/smollm2_135m.svg"


def headline_data():
    """The comparison on a real model if it was measured, else on the built-in one, and how to describe it."""
    data = load("compare_smollm2_135m")
    if data is not None:
        return data, "SmolLM2-135M"
    return load("compare_quantize"), "tiny-llama, a built-in model of 8 million parameters"


def headline():
    """The comparison in at most six rows and plain words; its plot stands at the top of the README."""
    data, model = headline_data()
    if data is None:
        return []
    budgets = budgets_of(data)
    rows = {(row["method"], row["budget"]): row for row in data["rows"]}
    seeds = max(row["seeds"] for row in data["rows"])
    mean = "one seed" if seeds == 1 else f"mean of up to {seeds} seeds"
    lines = [
        f"KL divergence to the original model on held-out text (lower is better), {mean}, for {model}.",
        "All methods choose from the same quantized layers, untuned; searches process the same number of tokens.",
        "",
        f"| method | {' | '.join(f'{budget} bits' for budget in budgets)} |",
        "|---|" + "---:|" * len(budgets),
    ]
    for method, described in HEADLINE_METHODS.items():
        found = [rows.get((method, budget)) for budget in budgets]
        if any(found):
            cells = [f"{row['kl']:.4f}" if row else "" for row in found]
            lines.append(f"| {described} | {' | '.join(cells)} |")
    return [*lines, ""]


def headline_plot():
    """KL against bits on the real model: RCO, the best other method, and uniform widths."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    data = load("compare_smollm2_135m")
    if data is None:
        return
    budgets = budgets_of(data)
    kl = {(row["method"], row["budget"]): row["kl"] for row in data["rows"]}
    others = [m for m in HEADLINE_METHODS if m != "rco" and not m.startswith("uniform")]
    best = min(others, key=lambda m: statistics.fmean(math.log(kl[m, b]) for b in budgets))
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    styles = {"uniform-fill": ("#999999", "^"), best: ("#d55e00", "s"), "rco": ("#0072b2", "o")}
    for method, (colour, marker) in styles.items():
        label = HEADLINE_METHODS[method].partition(":")[0]
        axes.plot(
            [float(b) for b in budgets], [kl[method, b] for b in budgets], color=colour, marker=marker,
            label="uniform" if method == "uniform-fill" else label,
        )  # fmt: skip
    axes.set_yscale("log")
    ticks = [0.2, 0.3, 0.5, 1.0, 2.0]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([float(b) for b in budgets])
    axes.set_xlabel("average bits per weight")
    axes.set_ylabel("KL to the original model")
    axes.set_title("SmolLM2-135M, held-out text", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, frameon=False, loc="upper right", fontsize=9, bbox_to_anchor=(1.0, 0.99))
    axes.set_ylim(top=3.6)
    axes.grid(alpha=0.3)
    figure.savefig(ROOT / HEADLINE_PLOT, metadata={"Date": None})


def mean_and_spread(row):
    return f"{row['kl']:.4f} ± {row['kl_std']:.4f}" if row["seeds"] > 1 else f"{row['kl']:.4f}"


def allowance(data):
    parts = [
        f"at most {data['tokens']:,} tokens" if data["tokens"] else "",
        f"{data['seconds']:g} seconds" if data["seconds"] else "",
    ]
    return " and ".join(filter(None, parts))


def against_the_starts(rows, budgets):
    """How far RCO is below (or above) what it has to beat, at every budget, in one sentence each."""
    names = {
        "uniform-fill": "uniform interpolation (`uniform-fill`)",
        "fisher": "the proxy knapsack (`fisher`)",
        "fisher-pooled": "the best that it is started from (`fisher-pooled`)",
    }
    lines = []
    for method, name in names.items():
        both = [b for b in budgets if ("rco", b) in rows and (method, b) in rows]
        if both:
            changes = [100 * (rows["rco", b]["kl"] / rows[method, b]["kl"] - 1) for b in both]
            shown = ", ".join(f"{change:+.1f} % at {b}" for change, b in zip(changes, both, strict=True))
            lines.append(f"* KL of RCO against that of {name}: {shown}.")
    return lines


def long_comparison():
    """The tables that the command itself writes."""
    data = load("compare_quantize")
    if data is None:
        return []
    rows = summarise(data["entries"], data["full_model"])
    text = markdown(rows, data).split("\n", 2)[
        2
    ]  # the document has its own title and one more level of headings
    text = re.sub(r"^## (.*)$", r"### \1 bits", text, flags=re.MULTILINE)
    machine = data["environment"]
    gpus = f", {', '.join(machine['gpu'])}" if machine.get("gpu") else ""
    return [
        f"`{compare_command(data)}`, {machine['time'][:10]}, {machine['cpu']}, {machine['cpu_count']} cores{gpus}, "
        f"torch {machine['torch']}.{' ' + data['note'] if 'note' in data else ''}",
        "",
        *verdict(rows),
        *text.strip().splitlines(),
        "",
    ]


def verdict(rows):
    """Where RCO stands among methods that are not RCO themselves, in one table."""
    found = {(row["budget"], row["method"]): row for row in rows}
    budgets = [budget for budget in dict.fromkeys(row["budget"] for row in rows) if (budget, "rco") in found]
    lines = []
    for budget in budgets:
        mine = found[budget, "rco"]
        others = [row for row in rows if row["budget"] == budget and not row["method"].startswith("rco")]
        if not others:
            continue
        best = min(others, key=lambda row: row["kl"])
        error = math.hypot(*(row["kl_std"] / math.sqrt(row["seeds"]) for row in (mine, best)))
        cells = [budget, f"`{best['method']}`", f"{best['kl'] - mine['kl']:+.5f} ± {error:.5f}"]
        for numerator, denominator, key in (("rco@0.1", "evopress", "kl"), ("rco", "rco-plain", "kl_std")):
            pair = [found.get((budget, name)) for name in (numerator, denominator)]
            known = all(pair) and pair[1][key] > 0
            cells.append(f"{pair[0][key] / pair[1][key]:.3f}" if known else "")
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "| bits | best method other than RCO | its mean KL minus RCO's ± standard error "
        "| KL of `rco@0.1` / KL of `evopress` | standard deviation of `rco` / that of `rco-plain` |",
        "|---|---|---:|---:|---:|",
        *lines,
        "",
    ]


def plots():
    """The plots that the command itself draws."""
    from rco.pipeline.compare_figures import draw_comparison

    headline_plot()
    data = load("compare_quantize")
    folder = ROOT / "docs" / "comparison"
    folder.mkdir(exist_ok=True)
    draw_comparison(folder, summarise(data["entries"], data["full_model"]), data["entries"], data)


def what_searches_end_with():
    """How RCO's candidates compare before any exchange, over all searches of the comparison."""
    data = load("compare_quantize")
    if data is None:
        return []
    lines = []
    for label in ("rco", "rco@0.1"):
        found = [entry["candidates"] for entry in data["entries"] if entry["label"] == label]
        found = [{k: v for k, v in each.items() if k != "refined"} for each in found if "prior" in each]
        best = [min(each, key=each.get) for each in found]
        for name in dict.fromkeys(name for each in found for name in each):
            changes = [100 * (each[name] / each["prior"] - 1) for each in found if name in each]
            spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
            cells = [f"`{label}`", name, f"{statistics.fmean(changes):+.2f} ± {spread:.2f}"]
            lines.append(f"| {' | '.join([*cells, f'{best.count(name)} of {len(found)}'])} |")
    if not lines:
        return []
    heading = (
        "| search | candidate | loss relative to the prior's knapsack, % ± standard deviation | best in |"
    )
    return [heading, "|---|---|---:|---:|", *lines, ""]


def smollm():
    data = load("smollm2_135m")
    if data is None:
        return []
    threads = f"{data['threads']} thread{'s' if data['threads'] > 1 else ''}"
    lines = [
        "## SmolLM2-135M on a CPU",
        "",
        f"3.0 bits, {data['minutes']:.0f} minutes and {data['peak_gib']:.1f} GiB with {threads}; measured by "
        "`python benchmarks/smollm2_135m.py`, which runs",
        f"`{data['command']}`.",
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
        "## Bits per expert",
        "",
        "KL to the original model on evaluation text, mean ± standard deviation over seeds, all methods with "
        "the same "
        "candidates (`python benchmarks/moe_precision.py`). The methods are described in "
        "[expert_widths.md](expert_widths.md).",
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
        lines += ["", f"Uniform: {', '.join(uniform)}.", "", *against_mxmoe(data, budgets), ""]
    step = load("moe_step")
    if step:
        ratios = ", ".join(
            f"{row['ratio']:.2f} ({row['model']}, {row['length']} tokens)" for row in step["rows"]
        )
        lines += [
            "Time of a search step, in units of a plain forward and backward pass of the same process "
            f"(`python benchmarks/moe_step.py`): {ratios}.",
            "",
        ]
    return lines


def against_mxmoe(data, budgets):
    """RCO* beside MxMoE in the same search space: KL and perplexity at every budget."""
    rows = {(row["method"], row["bits"]): row for row in data["table"]}
    spaces = {
        "gate and up tied, down free": ("rco*-projection", "mxmoe"),
        "one width per expert": ("rco*", "mxmoe-expert"),
    }
    lines = []
    for space, (ours, theirs) in spaces.items():
        if all((method, bits) in rows for method in (ours, theirs) for bits in budgets):
            change = {
                name: ", ".join(
                    f"{100 * (rows[ours, bits][name] / rows[theirs, bits][name] - 1):+.{digits}f} %"
                    for bits in budgets
                )
                for name, digits in (("kl", 1), ("perplexity", 3))
            }
            lines.append(
                f"* `{ours}` against `{theirs}` ({space}): KL {change['kl']}; perplexity {change['perplexity']}."
            )
    longer = load(f"moe_precision_{data['model'].replace('-', '_')}_long_evaluation")
    if longer is not None:
        rows = {(row["method"], row["bits"]): row["perplexity"] for row in longer["table"]}
        lines += [
            f"* Perplexity of `rco*-projection` against `mxmoe` at {bits} bits on "
            f"{longer['settings']['evaluation']} sequences instead of {data['settings']['evaluation']}: "
            f"{100 * (rows['rco*-projection', bits] / rows['mxmoe', bits] - 1):+.3f} %."
            for bits in sorted({bits for _, bits in rows})
        ]
    return lines


def pruning():
    found = [load(f"expert_pruning_{model}") for model in ("tiny_moe", "lab_moe")]
    methods = ("rco", "rco@0.1", "evoesap", "frequency-global", "reap", "reap-global")
    lines = [
        "## Expert pruning",
        "",
        "KL to the original model on seven domains, mean ± standard deviation over seeds. Every search may use the "
        "same number of tokens; `rco@0.1` uses a tenth of it ([expert_pruning.md](expert_pruning.md)).",
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
        "## Exact knapsack",
        "",
        "`rco bench solver`: one thread, new random values in each call, HiGHS measured in the same run. The "
        "column "
        "*target* is the limit that was set before the solver was written.",
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
        "## The paper's knapsack study",
        "",
        "`python benchmarks/knapsack_study.py`: per cent below the exact optimum after repair, mean of "
        f"{data['knapsack']['settings']['instances']} instances.",
        "All thirteen scenarios, budget violations and the comparison with the paper: "
        "[knapsack_study.md](../benchmarks/results/knapsack_study.md).",
        "",
        "| scenario | " + " | ".join(methods.values()) + " |",
        "|---|" + "---|" * len(methods),
    ]
    for name in ("large", "huge", "float costs", "cheap optimal", "mixed slack"):
        gaps = [scenarios[name]["methods"][method]["gap_mean"] for method in methods]
        lines.append(f"| {name} | " + " | ".join(f"{gap:.3f}" for gap in gaps) + " |")
    return [*lines, ""]


def candidates():
    data = load("gptq_widths")
    if data is None:
        return []
    lines = [
        "## GPTQ at seven widths",
        "",
        "Time to quantize one layer to 2, 3, ..., 8 bits, in units of the time for a single width "
        f"(`python benchmarks/gptq_widths.py`, {data['environment']['threads']} threads, "
        f"{data['layers'][0]['tokens']:,} calibration tokens).",
        f"The limit of {data['limit']} applies to plain GPTQ from a layer's inputs to its packed weights "
        "(sweeps 0). "
        "The solve alone exceeds it, because widths share nothing there but the factor of the Hessian; so does the "
        "whole where coordinate descent follows (`--sweeps`).",
        "",
        "| layer | sweeps | from inputs to candidates | solve alone | seconds, seven widths | seconds, Hessian |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in data["layers"]:
        shape = " x ".join(map(str, row["shape"]))
        lines.append(
            f"| {shape} | {row['sweeps']} | {row['ratio_from_inputs']:.2f} | {row['ratio_solve_alone']:.2f} | "
            f"{row['seven_widths_s']:.3f} | {row['hessian_s']:.3f} |"
        )
    return [*lines, ""]


def memory():
    data = load("search_memory")
    if data is None:
        return []
    lines = [
        "## Memory of a search step",
        "",
        "MiB above the model, its candidates and the reference (`python benchmarks/search_memory.py`). It grows "
        "neither with the number of options nor with tokens x vocabulary.",
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


def gpu_runs():
    """The newest measurement of every part on a GPU."""
    data = load("gpu_h200")
    return {**data["eighth_run"], **data["ninth_run"], **data["tenth_run"]} if data is not None else None


def gpu_samples():
    run = gpu_runs()
    if run is None:
        return []
    lines = [
        "## Speed and memory on a GPU",
        "",
        "Seconds of one sample of the search (a sequence of 2048 tokens), beside a plain forward and backward pass "
        "with weight gradients in the same run, and GiB on one H200 (`rco bench step --shape qwen3-8b "
        "--device cuda`).",
        "Shapes of real models with random weights. The host limits the plain passes of experts and those with "
        "checkpointing, and was slow in the rows of widths of experts and of qwen3-30b-a3b; times on a fast host, "
        "and cases that are slower: [gpu.md](gpu.md).",
        "",
        *gpu_table(),
        "",
    ]
    step = run["step_qwen3_8b"]["steps"]
    olmoe = run["step_olmoe"]["steps"]
    lines.append(
        f"A step of 16 samples takes {step['ratio']:.2f} times 16 plain passes for qwen3-8b (50 steps: "
        f"{step['fifty_steps_seconds'] / 60:.1f} minutes) and {olmoe['ratio']:.2f} for olmoe."
    )
    return [*lines, ""]


def gpu_table():
    run = gpu_runs()
    if run is None:
        return []
    lines = [
        "| | checkpointing | plain pass | sample | ratio | GiB | GiB expected |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for part in ("step_qwen3_8b", "step_olmoe", "step_olmoe_widths", "step_qwen3_30b_a3b"):
        report = run[part]
        searched = "widths" if report["kind"] == "quantization" else "pruning"
        for mode in ("plain", "checkpointing"):
            row = report[mode]
            lines.append(
                f"| {report['shape']}, {searched} | {'yes' if mode == 'checkpointing' else 'no'} | "
                f"{row['floor']['seconds']:.3f} | {row['sample']['seconds']:.3f} | {row['ratio']:.2f} | "
                f"{row['sample']['peak_bytes'] / 2**30:.1f} | {row['expected_bytes'] / 2**30:.1f} |"
            )
    return lines


def ablations():
    data = load("ablations")
    if data is None:
        return []
    settings = data["settings"]
    return [
        "## Settings of the search",
        "",
        f"{settings['model']} at {settings['bits']} bits, {settings['seeds']} seeds (`{present_command(data)}`). "
        "For Algorithm 1 as printed and for the whole search: the best of the values tried, and those whose mean "
        "KL lies "
        "within two standard errors of it. All nine sweeps with plots: [ablations](ablations/ablations.md).",
        "",
        *recommendation_table(data).splitlines(),
        "",
        *flatness(data),
        "",
    ]


def flatness(data):
    """What the sweeps say about the defaults, in a few sentences with their figures."""
    means = {
        column: [
            row[column]["kl"]["mean"]
            for sweep in data["sweeps"]
            if sweep["setting"] is not None
            for row in sweep["rows"]
            if not row["loop"]["grouped"]
        ]
        for column in ("printed", "search")
    }
    seeds = next(sweep for sweep in data["sweeps"] if sweep["name"] == "seeds")
    spread = statistics.stdev(row["search"]["kl"]["mean"] for row in seeds["rows"])
    grouped = max(
        row["search"]["kl"]["mean"]
        for sweep in data["sweeps"]
        for row in sweep["rows"]
        if row["loop"]["grouped"]
    )
    found = {name: f"{min(values):.4f} to {max(values):.4f}" for name, values in means.items()}
    steps = next(sweep for sweep in data["sweeps"] if sweep["name"] == "steps")["rows"]
    tokens = {row["loop"]["steps"]: row["search"]["tokens"] for row in steps}
    default = data["centre"]["steps"]
    saved = 1 - tokens[default // 2] / tokens[default]
    return [
        f"Without grouping, the mean KL of Algorithm 1 ranges from {found['printed']}: it benefits from more "
        "steps, "
        "more samples and a higher final temperature.",
        f"That of the whole search ranges from {found['search']}, while its seeds alone vary by {spread:.4f} (one "
        "standard deviation): it hardly depends on these settings, so the defaults stay.",
        f"`--steps {default // 2}` saves {100 * saved:.0f} % of the tokens for about the same result. Grouped "
        "layers "
        f"are worse (up to {grouped:.4f}).",
    ]


def manifold_value():
    """KL of methods without the manifold relative to RCO's, with the same start and ending."""
    data = load("manifold_value")
    if data is None:
        return []
    loop, machine = data["settings"], data["environments"][0]
    gpus = f", {', '.join(machine['gpu'])}" if machine.get("gpu") else ""
    lines = [
        f"`python benchmarks/manifold_value.py`, {loop['model']}, {len(data['seeds'])} seeds, {loop['steps']} "
        f"steps of {loop['samples']} samples, {machine['time'][:10]}, {machine['cpu']}{gpus}, torch "
        f"{machine['torch']}.",
        "",
        *tuned_settings(data["tuning"]),
    ]
    for start, title in (("zeros", "Zero initial logits"), ("prior", "Initial logits from RCO's prior")):
        rows, ratios = ([row for row in data[name] if row["start"] == start] for name in ("rows", "ratios"))
        if rows:
            lines += [f"### {title}", "", *above_rco(rows, ratios), "", *manifold_table(rows), ""]
    return lines


def above_rco(rows, ratios):
    """How far every method is above ``rco-plain`` that ends alike, a column per budget, and over all of them."""
    budgets = sorted({row["bits"] for row in rows}, key=float)
    known = {(row["end"], row["method"], row["bits"]): row for row in rows if "above_rco" in row}
    lines = [
        "KL minus that of `rco-plain` with the same ending and seed, mean ± standard error. *All budgets*: KL "
        "relative to that of `rco-plain`, geometric mean over budgets and seeds. *Higher in*: pairs of runs, one "
        "per budget and seed, in which the KL is higher than that of `rco-plain`.",
        "",
        f"| ending | method | {' | '.join(f'{bits} bits' for bits in budgets)} | all budgets | higher in |",
        "|---|---|" + "---:|" * (len(budgets) + 2),
    ]
    overall = {(row["end"], row["method"]): row for row in ratios}
    for end, method in dict.fromkeys(key[:2] for key in known):
        found = [known.get((end, method, bits)) for bits in budgets]
        cells = [f"{row['above_rco']:+.5f} ± {row['above_rco_error']:.5f}" if row else "" for row in found]
        total = overall[end, method]
        cells += [f"{100 * (total['ratio'] - 1):+.1f} ± {100 * total['ratio_error']:.1f} %"]
        cells += [f"{total['above']} of {total['pairs']}"]
        lines.append(f"| {end} | `{method}` | {' | '.join(cells)} |")
    return lines


def expert_domains():
    """Calibration x allocation x fraction of pruned experts, evaluated on code and on other text."""
    data = load("expert_domains")
    if data is None or "table" not in data:
        return []
    settings, machine = data["settings"], data["environments"][0]
    gpus = f", {', '.join(machine['gpu'])}" if machine.get("gpu") else ""
    tasks = [name for name in data["table"][0] if name.startswith("task ") and not name.endswith("_std")]
    lines = [
        f"`{data['command']}`, {machine['time'][:10]}, {machine['cpu']}{gpus}, torch {machine['torch']}. Mean ± "
        f"standard deviation over {len(data['seeds'])} seeds on {settings['evaluation']} sequences of "
        f"{settings['length']} tokens in all. Coding: {settings['coding']}. General: the mean of "
        f"{settings['general'].replace(',', ', ')}. The best of each fraction is bold.",
        "",
    ]
    for model in dict.fromkeys(row["model"] for row in data["table"]):
        rows = [row for row in data["table"] if row["model"] == model]
        lines += [f"`{model}`:", "", *domain_table(rows, tasks), "", *nonuniform_gain(rows)]
    return lines


def domain_table(rows, tasks):
    """The full model, then the fractions; the best of each fraction in bold."""
    named = [name.removeprefix("task ") for name in tasks]
    columns = ["kl_coding", "kl_general", "perplexity_coding", "perplexity_general", *tasks]
    heads = ["KL coding", "KL general", "perplexity coding", "perplexity general", *named]
    lines = [
        f"| pruned | calibration | allocation | {' | '.join(heads)} |",
        "|---|---|---|" + "---:|" * len(heads),
    ]
    for row in sorted(rows, key=lambda row: float(row["experts"])):
        full, cells = row["allocation"] == "full", []
        others = [other for other in rows if other["experts"] == row["experts"]]
        for column in columns:
            digits = 4 if column.startswith("kl") else 3
            shown = f"{row[column]:.{digits}f} ± {row[f'{column}_std']:.{digits}f}"
            best = (max if column in tasks else min)(other[column] for other in others)
            cells.append(f"**{shown}**" if row[column] == best and not full else shown)
        kind = ["none", "", "full model"] if full else [f"{100 * float(row['experts']):g} %"]
        kind += [] if full else [row["calibration"], row["allocation"]]
        lines.append(f"| {' | '.join([*kind, *cells])} |")
    return lines


def nonuniform_gain(rows):
    """What letting layers differ saves, one line for each fraction and calibration."""
    known = {(row["experts"], row["calibration"], row["allocation"]): row for row in rows}
    lines = []
    for experts, calibration in dict.fromkeys(key[:2] for key in known):
        pair = [known.get((experts, calibration, kind)) for kind in ("nonuniform", "uniform")]
        if all(pair):
            ratios = [f"{pair[0][f'kl_{on}'] / pair[1][f'kl_{on}']:.2f}" for on in ("coding", "general")]
            lines.append(
                f"* {100 * float(experts):g} % pruned on {calibration} text: nonuniform has {ratios[0]} times the "
                f"KL of uniform on coding, {ratios[1]} times on general text."
            )
    return [*lines, ""] if lines else []


def tuned_settings(tuning):
    lines = []
    for method in dict.fromkeys(row["method"] for row in sorted(tuning, key=lambda row: row["method"])):
        tried = [row for row in tuning if row["method"] == method]
        best, worst = (pick(tried, key=lambda row: row["loss"]) for pick in (min, max))
        own = ", ".join(f"{name} {value:g}" for name, value in best["settings"].items())
        lines.append(
            f"* `{method}`: {own}; best of {len(tried)} settings, {best['runs']} runs each (mean loss "
            f"{best['loss']:.4f}; worst setting {worst['loss']:.4f})."
        )
    return ["Settings chosen by the tuning:", "", *lines, ""] if lines else []


def manifold_table(rows):
    """KL, perplexity and bits used: a row per ending and method, a column per budget."""
    budgets = sorted({row["bits"] for row in rows}, key=float)
    known = {(row["end"], row["method"], row["bits"]): row for row in rows}
    lines = [
        "Each cell: KL, mean ± standard error / perplexity / bits used.",
        "",
        f"| ending | method | {' | '.join(f'{bits} bits' for bits in budgets)} |",
        "|---|---|" + "---:|" * len(budgets),
    ]
    for end, method in dict.fromkeys(key[:2] for key in known):
        found = [known.get((end, method, bits)) for bits in budgets]
        cells = [
            f"{row['kl']:.4f} ± {row['kl_error']:.4f} / {row['perplexity']:.3f} / {row['mean_bits']:.4f}"
            if row
            else ""
            for row in found
        ]
        lines.append(f"| {end} | `{method}` | {' | '.join(cells)} |")
    return lines


def tuning():
    """KL before and after tuning, at the same bytes."""
    found = [load(f"tuning_{model}") for model in ("tiny_llama", "smollm2_135m", "tiny_moe", "lab_moe")]
    rows = [row for data in filter(None, found) for row in tuning_rows(data)]
    if not rows:
        return []
    reached, others, uniform = [], [], []
    for row in rows:
        usual = row["way"] == "straight-through" and set(row["given"]) <= {"tokens"} and row["kind"] == "rco"
        (uniform if row["kind"] == "uniform" else reached if usual else others).append(row)
    return [
        "KL to the full model on text that was used for nothing else (seven domains that were tuned on, two others "
        "and wikitext), before and after tuning at the same bytes; one H200, shared by up to 14 processes, so that "
        "seconds are longer than alone (`python benchmarks/tuning.py`). *Worst other*: the largest ratio of KL "
        "after to before among domains that were not tuned on. Bits of tiny-moe and lab-moe are those of experts. "
        "The text has 1.6 million distinct tokens; further ones are repeats. Rows with a star were measured with "
        "an earlier rate of scales, 0.01 of their mean at every width.",
        "",
        *tuning_table(reached),
        "",
        "Other ways of training, and other rates:",
        "",
        *tuning_table(others),
        *(["", "Uniform widths, and AutoRound:", "", *tuning_table(uniform)] if uniform else []),
        *task_table([data for data in found if data]),
        "",
    ]


def task_table(found):
    """Accuracy on tasks before and after tuning, of what was measured at today's settings."""
    lines = []
    for data in found:
        parts = {tuple(part["key"]): part for part in data["parts"] if part.get("tasks")}
        names = sorted(next(iter(parts.values()))["tasks"]) if parts else []
        for (model, bits, seed, kind, way), part in sorted(parts.items()):
            before = parts.get((model, bits, seed, kind, "none"))
            if not way.startswith("straight-through") or before is None or kind == "rco-earlier":
                continue
            cells = [f"{100 * before['tasks'][name]:.1f} → {100 * part['tasks'][name]:.1f}" for name in names]
            allocation = "uniform" if kind == "uniform" else "RCO"
            lines.append(
                f"| {model} | {float(bits):g} | {allocation} | {part['tokens']:,} | "
                + " | ".join(cells)
                + " |"
            )
    if not lines:
        return []
    return [
        "",
        "Accuracy on tasks in % before and after tuning (200 items each: a standard error of about 3.5 points; the "
        "tiny models are near chance):",
        "",
        f"| model | bits | allocation | tokens | {' | '.join(names)} |",
        "|---|---:|---|---:|" + "---:|" * len(names),
        *lines,
    ]


def tuning_rows(data):
    """One row per allocation and way with the same one untuned beside it: means over the seeds that have both."""
    outside = {*data["settings"]["others"].split(","), "wikitext2"}
    grouped, rows = {}, []
    for part in data["parts"]:
        model, bits, seed, kind, way = part["key"]
        grouped.setdefault((model, float(bits), kind, way), {})[seed] = part
    for (model, bits, kind, way), parts in sorted(grouped.items()):
        before = grouped.get((model, bits, kind, "none"), {})
        pairs = [(before[seed], part) for seed, part in parts.items() if seed in before]
        if way == "none" or not pairs:
            continue
        name, _, given = way.partition(":")
        given = dict(pair.split("=") for pair in filter(None, given.split("+")))
        earlier = pairs[0][1].get("settings", {}).get("scale_rate") == 0.01 and "scale_rate" not in given
        start, end = (statistics.fmean(pair[side]["kl"] for pair in pairs) for side in (0, 1))
        rows.append(
            {
                "model": model,
                "bits": bits,
                "kind": kind,
                "way": name,
                "given": given,
                "label": ", ".join(
                    [name + "\\*" * earlier, *(f"{k} {v}" for k, v in given.items() if k != "tokens")]
                ),
                "seeds": len(pairs),
                "start": start,
                "end": end,
                "worst": max(
                    new["domains"][other]["kl"] / old["domains"][other]["kl"]
                    for old, new in pairs
                    for other in outside & set(new["domains"])
                ),
                "tokens": statistics.fmean(new["tokens"] for _, new in pairs),
                "seconds": statistics.fmean(new["seconds"]["tuning"] for _, new in pairs),
            }
        )
    return rows


def tuning_table(rows):
    """Rows of :func:`tuning_rows` as a table."""
    order = {name: position for position, name in enumerate(dict.fromkeys(row["model"] for row in rows))}
    rows = sorted(
        rows, key=lambda row: (order[row["model"]], row["bits"], row["way"], row["tokens"], row["label"])
    )
    return [
        "| model | bits | trained | seeds | KL before | after | change | worst other | tokens | seconds |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row['model']} | {row['bits']:g} | {row['label']} | {row['seeds']} | {row['start']:.4f} "
            f"| {row['end']:.4f} | {100 * (row['end'] / row['start'] - 1):.1f} % | {row['worst']:.2f} "
            f"| {row['tokens']:,.0f} | {row['seconds']:.0f} |"
            for row in rows
        ),
    ]


def by_budget(data, name_of_budget):
    """KL of every entrant of a comparison: a row each, a column per budget, empty where it does not fit."""
    rows = {(row["method"], row["budget"]): row for row in data["rows"]}
    largest = {
        b: max(row.get("bytes") or 0 for row in data["rows"] if row["budget"] == b) for b in budgets_of(data)
    }
    budgets = sorted(largest, key=largest.__getitem__)
    methods = sorted(
        dict.fromkeys(method for method, _ in rows),
        key=lambda method: [
            rows[method, b]["kl"] if (method, b) in rows else math.inf for b in budgets[::-1]
        ],
    )
    lines = [
        f"| | {' | '.join(map(name_of_budget, budgets))} |",
        "|---|" + "---:|" * len(budgets),
    ]
    for method in methods:
        cells = [f"{rows[method, b]['kl']:.4f}" if (method, b) in rows else "" for b in budgets]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return lines


def gguf_comparisons():
    """RCO beside llama.cpp's mixtures at the sizes of these, on two models."""
    lines = []
    for name, title in (
        ("gguf_qwen2.5_coder_1.5b", "Qwen2.5-Coder-1.5B-Instruct"),
        ("gguf_smollm2_135m", "SmolLM2-135M-Instruct"),
    ):
        data = load(name)
        if data is None:
            continue
        sizes = {row["budget"]: row["bytes"] for row in data["rows"] if row["method"] == row["budget"]}
        below = [
            1 - row["kl"] / mixture["kl"]
            for row in data["rows"]
            for mixture in data["rows"]
            if row["method"] == "rco" and mixture["method"] == mixture["budget"] == row["budget"]
        ]
        lines += [
            f"**{title}**, H200, one seed. {data['note']}",
            "",
            *by_budget(data, lambda budget, sizes=sizes: f"{budget.removeprefix('llama-').upper()}, "
                       f"{sizes[budget] / 1e6:,.1f} MB"),
            "",
            f"RCO is {100 * min(below):.0f} to {100 * max(below):.0f} % below the mixture of each size.",
            "",
        ]  # fmt: skip
    return lines


FLOATING_MODELS = {"tiny_llama": "tiny-llama", "smollm2_135m": "SmolLM2-135M"}


def floating_comparison():
    """NVFP4, FP8 and the original: whole runs, and ways of choosing among the same candidates."""
    lines = []
    for name, title in FLOATING_MODELS.items():
        choices, runs = load(f"floating_point_{name}"), load(f"floating_point_runs_{name}")
        if choices is None or runs is None:
            continue
        budgets = budgets_of(choices)

        kls = {
            (run["kind"], run["bpw"], run["seed"], label): row["kl"]
            for run in runs["runs"]
            for label, row in run["evaluation"].items()
        }
        seeds = {
            kind: sorted({seed for each, _, seed, _ in kls if each == kind}) for kind in ("rco", "modelopt")
        }

        def mean(kind, label, budget, of, kls=kls):
            """KL over some seeds; each of them must have its run."""
            return statistics.fmean(kls[kind, budget, seed, label] for seed in of)

        chosen = {
            method: [row["kl"] for row in choices["rows"] if row["method"] == method]
            for method in ("rco", "autoquantize", "autoscheme")
        }
        repeats = min(row["seeds"] for row in choices["rows"] if row["method"] in chosen)
        shown = {
            f"`rco quantize`, seeds: {len(seeds['rco'])}": ("rco", "RCO"),
            "the same without tuning": ("rco", "RCO, not tuned"),
            f"ModelOpt's way, seeds: {len(seeds['modelopt'])}": ("modelopt", "autoquantize"),
        }
        rows = {
            name: [mean(kind, label, budget, seeds[kind]) for budget in budgets]
            for name, (kind, label) in shown.items()
        } | {f"choice alone: `{method}`, seeds: {repeats}": found for method, found in chosen.items()}
        both = sorted(set(seeds["rco"]) & set(seeds["modelopt"]))
        ours, theirs = (
            [mean(kind, label, budget, both) for budget in budgets]
            for kind, label in (("rco", "RCO"), ("modelopt", "autoquantize"))
        )
        same_text = [mean("rco", "RCO", budget, [0]) for budget in budgets]
        uniform = {
            name: mean("rco", f"uniform {name}", budgets[0], seeds["rco"])
            for name in ("nvfp4-a4", "fp8-dynamic")
        }
        model = runs["model"] if name == "tiny_llama" else "SMOLLM2_135M"
        lines += [
            f"**{title}**, H200. KL to the full model:",
            "",
            f"| | {' | '.join(f'{budget} bits per weight' for budget in budgets)} |",
            f"|---|{'---:|' * len(budgets)}",
            *(f"| {label} | {' | '.join(f'{kl:.4f}' for kl in found)} |" for label, found in rows.items()),
            "",
            f"`rco quantize` is {span(below(ours, theirs))} % below ModelOpt's way (the seeds of both) and "
            f"{span(below(same_text, chosen['autoquantize']))} % below `autoquantize` with the same candidates "
            "(on the text of the first seed). The choice alone is "
            f"{span(below(chosen['rco'], chosen['autoquantize']))} % below `autoquantize` and "
            f"{span(below(chosen['rco'], chosen['autoscheme']))} % below `autoscheme`. Uniform `nvfp4-a4` (4.5 "
            f"bits) has {uniform['nvfp4-a4']:.4f}, uniform `fp8-dynamic` (8 bits) {uniform['fp8-dynamic']:.4f}.",
            "",
            "```",
            f"python benchmarks/floating_point.py --model {model} --runs FOLDER -- {' '.join(runs['options'])}",
            choices["command"],
            "```",
            "",
        ]  # fmt: skip
    return lines


def below(ours, theirs):
    """Shares by which ours are lower."""
    return [1 - a / b for a, b in zip(ours, theirs, strict=True)]


def span(shares):
    """Least and greatest share in percent."""
    low, high = (f"{100 * end:.0f}" for end in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def additivity():
    """How near losses of allocations are to the sums of what their groups do alone."""
    data = load("additivity")
    if data is None:
        return []
    lines = [
        f"**{data['model']}**: KL of allocations beside the sum of what their groups cost alone. First the "
        f"allocation of least sum, then {data['allocations']} random ones within the budget:",
        "",
        "| options | bits per weight | KL of least sum | KL / sum | KL / sum of random ones |",
        "|---|---:|---:|---:|---:|",
    ]
    for menu, study in data["menus"].items():
        for budget, found in study["budgets"].items():
            best = found["least sum"]
            ratios = [each["together"] / each["sum"] for each in found["random"]]
            lines.append(
                f"| {menu} | {budget} | {best['together']:.4f} | {best['together'] / best['sum']:.2f} | "
                f"{min(ratios):.2f} to {max(ratios):.2f} |"
            )
    return [*lines, "", "`python benchmarks/additivity.py`", ""]


DOCUMENTS = {
    "docs/gguf.md": (gguf_comparisons,),
    "docs/floating_point.md": (floating_comparison, additivity),
    "README.md": (headline,),
    "docs/results.md": (
        comparison,
        smollm,
        pruning,
        experts,
        solver,
        knapsack_study,
        candidates,
        memory,
        gpu_samples,
        ablations,
    ),
    "docs/gpu.md": (gpu_table,),
    "docs/tuning.md": (tuning,),
    "docs/comparison.md": (long_comparison,),
    "docs/what_helped.md": (what_searches_end_with,),
    "docs/manifold_value.md": (manifold_value,),
    "docs/expert_pruning.md": (expert_domains,),
}


def fill(path, sections):
    """Replace what stands between the markers of a document."""
    body = "\n".join(line for section in sections for line in section())
    filled, found = re.subn(
        r"<!-- measured: begin -->.*?<!-- measured: end -->",
        lambda _: f"<!-- measured: begin -->\n{body}\n<!-- measured: end -->",
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if found != 1:
        raise SystemExit(f"{path} must have one pair of markers, has {found}.")
    path.write_text(filled, encoding="utf-8")


def main():
    for name, sections in DOCUMENTS.items():
        fill(ROOT / name, sections)


if __name__ == "__main__":
    main()
    if "--plots" in sys.argv[1:]:
        plots()
