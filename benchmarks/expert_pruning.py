"""Expert pruning against its baselines: KL and perplexity on held-out text, at equal tokens, several seeds.

    python benchmarks/expert_pruning.py --model tiny-moe
    python benchmarks/expert_pruning.py --model DIR --data a.txt+b.txt --eval-data c.txt+d.txt --seeds 5

Every search may forward the same number of tokens (a backward pass counts as two), "@0.1" a tenth of that.
Data, scores and searches of a seed are its own. ``--gates deployed,scale`` also measures what gradients should see.
``--document`` writes the tables of all results into docs/expert_pruning.md.
The folder given by --work keeps what is done, so that a stopped benchmark goes on where it was.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs" / "expert_pruning.md"


def short_names(value):
    """Files by their names, wherever they lie."""
    if isinstance(value, dict):
        return {Path(key).name: short_names(entry) for key, entry in value.items()}
    return [short_names(entry) for entry in value] if isinstance(value, list) else value


def document():
    """Put the tables of all results into the document, between its markers."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("expert_pruning_*.json"))]
    results, modes = [], ["| model | pruned | `deployed` | `scale` | seeds |", "|---|---|---:|---:|---:|"]
    for report in found:
        texts = report["texts"].get("eval_data") or report["texts"]["data"]
        words = f"{len(texts)} text{'s' if len(texts) > 1 else ''}"
        for key, table in report["tables"].items():
            fraction, gates = key.removesuffix(" gates").split(", ")
            other = report["tables"].get(f"{fraction}, scale gates")
            if gates != "deployed":
                continue
            settings = report["settings"]
            results += [
                f"`{report['model']}`, {100 * float(fraction):g} % pruned, {settings['tokens']:,} tokens per "
                f"search, evaluated on {settings['evaluation']} sequences of {settings['length']} tokens "
                f"of {words}:",
                "",
                "| method | KL to the full model | perplexity | tokens | seeds |",
                "|---|---:|---:|---:|---:|",
            ]
            for row in table["rows"]:
                results.append(
                    f"| {row['method']} | {row['kl']:.4f} ± {row['kl_std']:.4f} | {row['perplexity']:.2f} | "
                    f"{row['tokens']:,.0f} | {row['seeds']} |"
                )
            results.append("")
            if other:
                pair = [next(r for r in rows["rows"] if r["method"] == "rco") for rows in (table, other)]
                cells = " | ".join(f"{row['kl']:.4f} ± {row['kl_std']:.4f}" for row in pair)
                seeds = min(row["seeds"] for row in pair)
                modes.append(f"| `{report['model']}` | {100 * float(fraction):g} % | {cells} | {seeds} |")
    text = DOCUMENT.read_text()
    for name, lines in (("modes", modes), ("results", results)):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n" + "\n".join(lines).strip() + f"\n{end}{after}"
    DOCUMENT.write_text(text)


def main():
    from rco.pipeline.compare_prune import compare_pruning
    from rco.pipeline.configs import ComparePruneConfig
    from rco.runs import environment, write_json_atomic

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--eval-data")
    parser.add_argument("--experts", default="0.25,0.5")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gates", default="deployed")
    parser.add_argument(
        "--methods",
        default="rco,rco@0.1,evoesap,reap,reap-global,frequency,frequency-global,random-pick",
    )
    parser.add_argument("--evaluations", type=int, default=1200, help="batches that a search may forward")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=56)
    parser.add_argument("--selection", type=int, default=14)
    parser.add_argument("--evaluation", type=int, default=42)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no new seed after this long")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-expert-pruning"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--document", action="store_true", help="only put results/*.json into the document")
    arguments = parser.parse_args()
    if arguments.document:
        return document()
    torch.set_num_threads(arguments.threads)
    name = Path(arguments.model).name
    out = arguments.out or RESULTS / f"expert_pruning_{name.replace('-', '_')}.json"
    began, tables = time.perf_counter(), {}
    for seeds in range(1, arguments.seeds + 1):
        for fraction in arguments.experts.split(","):
            for position, gates in enumerate(arguments.gates.split(",")):
                if seeds > 1 and time.perf_counter() - began > arguments.seconds:
                    continue
                config = ComparePruneConfig(
                    model=arguments.model,
                    experts=fraction,
                    out=arguments.work / f"{name}-{fraction}-{gates}",
                    data=arguments.data,
                    eval_data=arguments.eval_data,
                    length=arguments.length,
                    sequences=arguments.sequences,
                    selection=arguments.selection,
                    evaluation=arguments.evaluation,
                    tokens=arguments.evaluations * arguments.length,
                    seeds=seeds,
                    gates=gates,
                    # The other methods never see a gradient: once is enough.
                    methods=arguments.methods if position == 0 else "rco",
                    resume=True,
                )
                found = compare_pruning(config)
                key = f"{fraction}, {gates} gates"
                tables[key] = short_names({"rows": found.rows, "entries": found.entries})
                print(f"== {name} {key}, {seeds} seeds, {time.perf_counter() - began:.0f} s", flush=True)
                for row in found.rows:
                    print(f"{row['method']:18s} {row['kl']:.4f} ± {row['kl_std']:.4f}", flush=True)
                settings = {
                    key: value
                    for key, value in dataclasses.asdict(config).items()
                    if key not in ("out", "data", "eval_data", "model")
                }
                texts = {
                    key: [Path(part).name for part in value.split("+")]
                    for key, value in (("data", arguments.data), ("eval_data", arguments.eval_data))
                    if value
                }
                report = {
                    "model": name,
                    "texts": texts,
                    "environment": environment(),
                    "threads": arguments.threads,
                    "settings": {**settings, "tau": list(config.tau)},
                    "tables": tables,
                }
                out.parent.mkdir(parents=True, exist_ok=True)
                write_json_atomic(out, report)


if __name__ == "__main__":
    sys.exit(main())
