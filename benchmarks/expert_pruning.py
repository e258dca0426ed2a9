"""Expert pruning against its baselines: KL and perplexity on held-out text, at equal tokens, several seeds.

    python benchmarks/expert_pruning.py run --parts parts.jsonl --workers 2
    python benchmarks/expert_pruning.py run --parts parts.jsonl --model tiny-moe,DIR --text DIR --workers 16
    python benchmarks/expert_pruning.py merge parts.jsonl
    python benchmarks/expert_pruning.py document

Every search may forward the same number of tokens (a backward pass counts as two), "@0.1" a tenth of that;
"rco:gates=scale" changes a setting. Data, scores and noise of a seed are its own. A run is made of
independent parts (model, fraction, seed, method), spread over processes; each is one line of the file given by
--parts as soon as it is done, and what that file holds is not run again. ``merge`` makes one
results/expert_pruning_MODEL.json per model, ``document`` writes the tables into docs/expert_pruning.md.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from parts import RunSettings, merge_parts, run_parts, settings_from

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs" / "expert_pruning.md"
METHODS = (
    "rco,rco:gates=scale,evoesap,evoesap-acceptance,greedy,rco@0.1,"
    "reap,reap-global,frequency,frequency-global,mass-global,random-pick"
)
# What a part costs in units of a whole search, so that long ones begin first.
SHORT = 0.05


@dataclass(frozen=True)
class Part:
    """One search, or one rule, that is measured."""

    model: str
    experts: str
    seed: int
    label: str

    @property
    def key(self):
        """What tells parts apart, wherever the model lies."""
        return (Path(self.model).name, self.experts, self.seed, self.label)

    @property
    def method(self):
        """(method, share of the tokens, settings) of a label such as ``rco:gates=scale:lr=0.03@0.1``."""
        from rco.pipeline.configs import ComparePruneConfig
        from rco.pipeline.entrants import parse_methods

        named, _, share = self.label.partition("@")
        name, *options = named.split(":")
        ((_, name, share),) = parse_methods(f"{name}@{share}" if share else name)
        hints = get_type_hints(ComparePruneConfig)

        def read(key, value):
            allowed = (hints[key], *get_args(hints[key]))
            return next((kind for kind in (int, float) if kind in allowed), str)(value)

        pairs = (option.split("=") for option in options)
        return name, share, tuple((key, read(key, value)) for key, value in pairs)

    @property
    def cost(self):
        """Shares of a whole search."""
        from rco.pipeline.entrants import ExpertEntrant

        name, share, _ = self.method
        rule = ExpertEntrant.parse(name).method in ("top-global", "top-per-block", "random-pick")
        return SHORT if rule else share


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """What every part of a run shares."""

    evaluations: int

    def comparison(self, model, experts):
        """The comparison that a part belongs to."""
        from rco.pipeline.configs import ComparePruneConfig

        config = self.config(
            model=model,
            experts=experts,
            eval_data=self.evaluation_text,
            tokens=self.evaluations * self.length,
            # One arithmetic type on every device, so that their numbers compare.
            dtype="float32" if self.device != "cpu" else "auto",
        )
        return ComparePruneConfig(**config)


# ----------------------------------------------------------------------- running


@functools.lru_cache(maxsize=1)
def contest_of(settings, model, experts, changed):
    """The problem of a part, kept for the parts that follow."""
    from rco.pipeline.compare import ExpertContest

    config = dataclasses.replace(settings.comparison(model, experts), **dict(changed))
    return ExpertContest(config)


def run_part(settings, part):
    """Search and judge; one line of the file of parts."""
    from rco.pipeline.compare import SearchJob

    began = time.perf_counter()
    name, share, changed = part.method
    contest = contest_of(settings, part.model, part.experts, changed)
    measured = contest.measure(SearchJob(part.experts, name, share, part.seed))
    entry = short_names({**measured, "label": part.label})
    return {"entry": entry, "wall_seconds": time.perf_counter() - began}


def short_names(value):
    """Domains by the names of their files, wherever they lie."""
    if isinstance(value, dict):
        return {Path(key).name: short_names(entry) for key, entry in value.items()}
    return [short_names(entry) for entry in value] if isinstance(value, list) else value


def run(arguments):
    """Do what the file of parts does not hold yet."""
    settings = settings_from(Settings, arguments)
    parts = [
        Part(model, experts, seed, label)
        for model in arguments.model.split(",")
        for experts in arguments.experts.split(",")
        for seed in range(arguments.seeds)
        for label in arguments.methods.split(",")
    ]
    parts.sort(key=lambda part: -part.cost)
    return run_parts(
        arguments.parts,
        settings.header(),
        {part.key: (settings, part) for part in parts},
        run_part,
        lambda line: f"KL {line['entry']['kl']:.4f}  {line['wall_seconds']:.0f} s",
        workers=arguments.workers,
        threads=arguments.threads,
    )


# ----------------------------------------------------------------------- results


def merge(arguments):
    """Files of parts to one file of results per model."""
    from rco.pipeline.compare_tables import summarise
    from rco.runs import write_json_atomic

    settings, environments, lines = merge_parts(arguments.parts)
    for model in sorted({key[0] for key in lines}):
        tables = {}
        for experts in sorted({key[1] for key in lines if key[0] == model}):
            entries = [lines[key]["entry"] for key in sorted(lines) if key[:2] == (model, experts)]
            tables[experts] = {"rows": summarise(entries), "entries": entries}
        report = {
            "model": model,
            "settings": {**settings, "tokens": settings["evaluations"] * settings["length"]},
            "environments": environments,
            "tables": tables,
        }
        write_json_atomic(RESULTS / f"expert_pruning_{model.replace('-', '_')}.json", report)
        for experts, table in tables.items():
            print(f"== {model}, {experts} pruned")
            for row in table["rows"]:
                print(f"{row['method']:20s} {row['kl']:.4f} ± {row['kl_std']:.4f}  {row['seeds']} seeds")


def document(_):
    """Put the tables of all results into the document, between its markers."""
    results, told = [], None
    modes = ["| model | pruned | `deployed` | `scale` | seeds |", "|---|---|---:|---:|---:|"]
    for path in sorted(RESULTS.glob("expert_pruning_*_moe.json")):
        report = json.loads(path.read_text())
        settings = report["settings"]
        for fraction, table in report["tables"].items():
            share = f"{100 * float(fraction):g} %"
            by_label = {row["method"]: row for row in table["rows"]}
            about = (
                f"{settings['tokens']:,} tokens per search, evaluated on {settings['evaluation']} sequences of "
                f"{settings['length']} tokens ({settings['domains'].replace(',', ', ')})."
            )
            if about != told:  # reports that share their settings state them once
                results += [about, ""]
                told = about
            results += [
                f"`{report['model']}`, {share} pruned:",
                "",
                "| method | KL to the full model | perplexity | tokens | seeds |",
                "|---|---:|---:|---:|---:|",
            ]
            results += [
                f"| {row['method']} | {row['kl']:.4f} ± {row['kl_std']:.4f} | {row['perplexity']:.2f} | "
                f"{row['tokens']:,.0f} | {row['seeds']} |"
                for row in table["rows"]
            ]
            results.append("")
            for first, other in (("rco", "rco:gates=scale"), ("rco:gates=deployed", "rco")):
                if first in by_label and other in by_label:
                    pair = [by_label[first], by_label[other]]
                    cells = " | ".join(f"{row['kl']:.4f} ± {row['kl_std']:.4f}" for row in pair)
                    modes.append(
                        f"| `{report['model']}` | {share} | {cells} | {min(row['seeds'] for row in pair)} |"
                    )
    text = DOCUMENT.read_text()
    for name, lines in (("modes", modes), ("results", results)):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n" + "\n".join(lines).strip() + f"\n{end}{after}"
    DOCUMENT.write_text(text)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    runs = verbs.add_parser("run", help="measure what is missing")
    runs.set_defaults(verb=run)
    Settings.add_arguments(runs)
    runs.add_argument("--model", default="tiny-moe", help="built-in names or folders, comma-separated")
    runs.add_argument("--experts", default="0.25,0.5")
    runs.add_argument("--methods", default=METHODS)
    runs.add_argument("--seeds", type=int, default=5)
    runs.add_argument("--evaluations", type=int, default=800, help="sequences that a search may forward")
    merges = verbs.add_parser("merge", help="write results/*.json from files of parts")
    merges.set_defaults(verb=merge)
    merges.add_argument("parts", type=Path, nargs="+")
    verbs.add_parser("document", help="put results/*.json into the document").set_defaults(verb=document)
    arguments = parser.parse_args()
    return arguments.verb(arguments)


if __name__ == "__main__":
    sys.exit(main())
