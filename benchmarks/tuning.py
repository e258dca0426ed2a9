"""Ways of tuning a chosen allocation at the same bytes: KL on held-out text by domain, perplexity, tasks, seconds.

    python benchmarks/tuning.py run --parts parts.jsonl --model tiny-llama --bits 2.5 --workers 2
    python benchmarks/tuning.py run --parts parts.jsonl --model tiny-llama,DIR --text DIR --tasks DIR --device cuda
    python benchmarks/tuning.py auto-round --model DIR --text DIR --out DIR  (needs the package auto-round)
    python benchmarks/tuning.py merge parts.jsonl [more.jsonl ...]

A part is one (model, bits, seed, allocation, way). Allocations:

* ``rco``: found by `rco quantize`'s search;
* ``uniform``: the width below for all, the rest of the budget spent from the first layer on.

Ways, each optionally with settings of rco.compression.tuning.TuningSettings, such as
``straight-through:code_rate=0.004+batch_size=4``:

* ``none``: the candidates as they are (GPTQ, or rounding to nearest with --method rtn);
* ``straight-through``: codes by offsets with straight-through rounding, and scales, end to end on the KL;
* ``scales``: scales alone, end to end; ``blocks``: codes and scales block by block on block outputs, then scales;
* ``sign``, ``sign-blocks``: the same offsets by signs of gradients at a rate of 1 / steps, as AutoRound does;
* ``gumbel``, ``gumbel-blocks``: a Gumbel-softmax over five neighbouring codes of every weight, as GSQ does;
* ``before``: candidates of every width tuned block by block, then searched;
* ``auto-round``: a dense checkpoint that `auto-round` above has written to --peers, at a uniform width.

Candidates and allocations of a seed are made once, into the folder given by --work, and shared by its parts. Parts
are spread over processes; what the file given by --parts holds is not run again. ``merge`` writes
results/tuning_MODEL.json for every model, and prints its table.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from parts import DOMAINS, SearchSettings, merge_parts, run_parts, settings_from

RESULTS = Path(__file__).parent / "results"
OTHERS = "en_wiki,js_code"
WIKITEXT = "wikitext2.validation.txt"
PASSAGE = 5000  # characters
WAYS = "none,straight-through,scales,blocks,sign,sign-blocks,gumbel,gumbel-blocks"


@dataclass(frozen=True, kw_only=True)
class Settings(SearchSettings):
    """What every part of a run shares."""

    others: str
    tasks: str | None
    limit: int
    peers: str | None
    method: str
    tokens: int
    distinct: int
    compute: str

    def quantization(self, model, bits, seed):
        """The quantization whose result is tuned."""
        from rco.pipeline.configs import QuantizeConfig

        experts = {"count": "experts", "lock": ["attention=16"]} if "moe" in Path(model).name else {}
        config = self.config(
            model=model,
            bits=bits,
            method=self.method,
            widths="2,3,4,5,6,8",
            seed=seed,
            tune="off",
            store=Path(self.work) / f"{Path(model).name}-{self.method}-{seed}",
            compute=self.compute,
        )
        return QuantizeConfig(**config, **experts)

    def allocation_file(self, model, bits, seed):
        return Path(self.work) / f"{Path(model).name}-{self.method}-{seed}-{bits}.json"


# ------------------------------------------------------------------------ shared work


@dataclass(frozen=True)
class Texts:
    """Sequences of a model and seed: tokenizing takes longer than many a part."""

    splits: object
    tuning: object
    judged: dict


def planned_data(settings, model, bits, seed):
    """Config, plan and texts; these are made once and kept in --work."""
    import pickle

    from rco.atomic_files import atomic_path
    from rco.pipeline.planning import plan_compression

    config = settings.quantization(model, bits, seed)
    planned = plan_compression(config)
    file = Path(settings.work) / f"{Path(model).name}-{seed}-texts.pickle"
    if not file.exists():
        made = make_texts(settings, config, planned.loaded.tokenizer, seed)
        with atomic_path(file) as temporary:
            temporary.write_bytes(pickle.dumps(made))
    return config, planned, pickle.loads(file.read_bytes())  # noqa: S301 - written above


def make_texts(settings, config, tokenizer, seed):
    from rco.data.calibration import build_calibration
    from rco.pipeline.planning import build_data

    splits = build_data(config, tokenizer)
    common = {"length": settings.length, "at_most": True}
    tuning = build_calibration(
        config.data, tokenizer, samples=settings.distinct + len(splits.selection), seed=seed, **common
    )
    judged = splits.evaluation.by_domain()
    if settings.text:
        folder = Path(settings.text)
        names = [*settings.domains.split(","), *settings.others.split(",")]
        files = {name: folder / f"{name}.evaluation.txt" for name in names} | {"wikitext2": folder / WIKITEXT}
        judged = {
            name: build_calibration(str(file), tokenizer, samples=settings.evaluation, part="all", **common)
            for name, file in files.items()
            if file.exists()
        }
    return Texts(splits, tuning.without(splits.selection), judged)


def prepare_seed(settings, model, seed, budgets, packed=None, label=""):
    """Candidates of a seed, and the allocations of all budgets."""
    from safetensors.torch import load_file, save_file

    from rco.atomic_files import write_json_atomic
    from rco.pipeline.compress import _search_inputs
    from rco.pipeline.searchers import configured_searcher

    for bits in budgets:
        file = settings.allocation_file(model, bits, seed)
        file = file.with_stem(file.stem + label)
        if file.exists():
            continue
        config, planned, texts = planned_data(settings, model, bits, seed)
        data, compression = texts.splits, planned.compression
        began = time.perf_counter()
        compression.candidates(data.search)
        candidates = time.perf_counter() - began
        if packed is not None:
            compression.set_packed(packed)
        known = compression.store_folder / f"differences{label}.safetensors"
        if not known.exists():
            found = compression.differences(data.search.select(slice(0, config.sensitivity)), seed=seed)
            save_file({"differences": found}, known)
        part = data.search.select(slice(0, config.sensitivity))
        errors = compression.layer_errors(part, experts_only=False) if compression.plan.experts else None
        compression.use_differences(load_file(known)["differences"], errors)
        began = time.perf_counter()
        with compression.objective(data.search, data.selection) as objective:
            result = configured_searcher(config).search(
                planned.problem, objective, **_search_inputs(config, planned)
            )
        seconds = {"candidates": candidates, "search": time.perf_counter() - began}
        write_json_atomic(
            file, {"allocation": [int(choice) for choice in result.allocation], "seconds": seconds}
        )


def chosen_allocation(settings, planned, model, bits, seed, kind, label=""):
    import numpy as np

    from rco.core.moves import layer_order, spend, uniform_allocation

    problem = planned.problem
    if kind == "uniform":
        return problem.allocation(spend(problem, uniform_allocation(problem), layer_order(problem))), {}
    file = settings.allocation_file(model, bits, seed)
    known = json.loads(file.with_stem(file.stem + label).read_text())
    return problem.allocation(np.array(known["allocation"])), known["seconds"]


# ------------------------------------------------------------------------ measurements


class Judge:
    """KL, perplexity and tasks of models beside the full one, by domain."""

    def __init__(self, settings, loaded, sets, compute):
        from rco.evaluation.reference_states import ReferenceStates
        from rco.models.precision import computing_in

        self.settings, self.sets = settings, sets
        with computing_in(loaded.model, compute):
            self.references = {
                name: ReferenceStates.compute(loaded, each, batch_size=8) for name, each in sets.items()
            }

    def measure(self, loaded):
        """Measurements of a model that computes in its present type."""
        from rco.evaluation.divergence import measure_divergence
        from rco.evaluation.perplexity import measure_perplexity
        from rco.evaluation.reference_states import ReferenceStates
        from rco.evaluation.tasks import evaluate_task, load_task

        found = {}
        for name, data in self.sets.items():
            states = ReferenceStates.compute(loaded, data, batch_size=8)
            divergence = measure_divergence(states, self.references[name], data, batch_size=8)
            perplexity = measure_perplexity(states, data, batch_size=8)
            found[name] = {"kl": divergence["kl"], "perplexity": perplexity["perplexity"]}
        tuned_on = self.settings.domains.split(",") if self.settings.text else list(found)
        record = {
            "kl": statistics.fmean(found[name]["kl"] for name in tuned_on),
            "perplexity": math.exp(
                statistics.fmean(math.log(found[name]["perplexity"]) for name in tuned_on)
            ),
            "domains": found,
        }
        if self.settings.tasks:
            record["tasks"] = {}
            for path in sorted(Path(self.settings.tasks).glob("*.jsonl")):
                task = load_task(str(path), limit=self.settings.limit)
                measured = evaluate_task(loaded, task)
                record["tasks"][task.name] = measured["acc"]
        return record


def gumbel_maker(seed):
    """Trainable weights by a Gumbel-softmax over five neighbouring codes."""
    import torch
    from torch import nn

    from rco.formats.base import Tunable
    from rco.formats.integer import TunableGrid, pack

    class GumbelGrid(Tunable):
        """Logits over codes two below to two above the stored one; hard choices outside of training."""

        spacing = {"logits": 10.0}  # noqa: RUF012 - a rate ten times that of offsets

        def __init__(self, weight, original):
            super().__init__()
            fractions = TunableGrid(weight, original).offsets.detach()
            self._weight = weight
            self.scales = nn.Parameter(weight.scales.detach().float().clone())
            codes, top = weight.codes().to(torch.int16), (1 << weight.bits) - 1
            shifts = torch.arange(-2, 3, device=codes.device, dtype=torch.int16)
            values = codes.unsqueeze(-1) + shifts
            outside = (values < 0) | (values > top)
            zeros = (
                torch.full_like(codes, 1 << (weight.bits - 1))
                if weight.zeros is None
                else weight.zeros.to(torch.int16).repeat_interleave(weight.group_size, 1)[:, : codes.shape[1]]
            )
            self.register_buffer("values", values.clamp(0, top).to(torch.uint8), persistent=False)
            self.register_buffer("steps", (values - zeros.unsqueeze(-1)).half(), persistent=False)
            self.register_buffer("outside", outside, persistent=False)
            self.logits = nn.Parameter(-(shifts.float() - fractions.unsqueeze(-1)).square())
            self.register_buffer("noise", torch.zeros_like(self.logits), persistent=False)
            # Factors of logits and noise in the softmax.
            self.register_buffer("sharpness", torch.ones(2, device=codes.device), persistent=False)
            self.generator = torch.Generator(codes.device).manual_seed(seed)

        def _wide(self, scales):
            return scales.repeat_interleave(self._weight.group_size, 1)[:, : self._weight.shape[1]]

        def _inside(self):
            return self.logits.masked_fill(self.outside, -torch.inf)

        def _choice(self):
            return self._inside().detach().argmax(-1, keepdim=True)

        def forward(self):
            scales = self.scales + (self.scales.to(self._weight.dtype).float() - self.scales).detach()
            if self.training:
                weight, noise = self.sharpness
                shares = torch.softmax(weight * self._inside() + noise * self.noise, dim=-1)
                steps = (shares * self.steps.float()).sum(-1)
            else:
                steps = self.steps.gather(-1, self._choice()).squeeze(-1).float()
            return (steps * self._wide(scales)).to(self._weight.dtype)

        def stored(self):
            codes = self.values.gather(-1, self._choice()).squeeze(-1)
            parts = {
                "packed": pack(codes, self._weight.bits),
                "scales": self.scales.detach().to(self._weight.dtype),
            }
            zeros = self._weight.zeros
            return self._weight.over(parts if zeros is None else {**parts, "zeros": zeros})

        def anneal(self, progress):
            # As in GSQ, the temperature falls and the factor of the logits rises, until no chance is left.
            temperature = 2.0 * (0.05 / 2.0) ** progress
            self.sharpness[0] = 4.0 * 25.0**progress / temperature
            self.sharpness[1] = 1.0 / temperature
            uniform = torch.empty_like(self.noise).uniform_(1e-6, 1 - 1e-6, generator=self.generator)
            torch.log(-torch.log(uniform), out=self.noise).neg_()
            return True

    def make(stored, original, codes):
        return GumbelGrid(stored, original) if codes else stored.format.tunable(stored, codes=False)

    return make


def way_settings(way, settings, seed):
    """Settings of the training, and the maker of trainable weights."""
    from rco.compression.tunable_model import format_tunable
    from rco.compression.tuning import TuningSettings

    name, _, given = way.partition(":")
    kinds = {field.name: type(field.default) for field in dataclasses.fields(TuningSettings)}
    changes = {}
    for pair in filter(None, given.split("+")):
        key, _, value = pair.partition("=")
        changes[key] = value == "True" if kinds[key] is bool else kinds[key](value)
    base = TuningSettings(tokens=settings.tokens, seed=seed)
    if settings.device == "cpu":
        base = dataclasses.replace(base, at_once=1)
    steps = dataclasses.replace(base, **changes).steps(settings.length)
    if name == "scales":
        base = dataclasses.replace(base, mode="scales")
    if name.endswith("blocks"):
        base = dataclasses.replace(base, mode="blocks")
    if name.startswith("sign"):
        base = dataclasses.replace(base, update="sign", code_rate=1 / steps, scale_rate=1 / steps)
    make = gumbel_maker(seed) if name.startswith("gumbel") else format_tunable
    return dataclasses.replace(base, **changes), make


def work(settings, model, bits, seed, kind, way):
    """One part."""
    import torch

    from rco.compression.tuning import TuningText, moved_codes, tune
    from rco.models.loading import load_model
    from rco.models.precision import computing_in

    began = time.perf_counter()
    _, planned, texts = planned_data(settings, model, bits, seed)
    compression, loaded, data, text = planned.compression, planned.loaded, texts.splits, texts.tuning
    judge = Judge(settings, loaded, texts.judged, compression.compute_dtype)
    if way == "auto-round":
        folder = Path(settings.peers) / f"{Path(model).name}-{bits}"
        (checkpoint,) = (each.parent for each in folder.glob("*/config.json"))
        other = load_model(checkpoint, device=settings.device)
        told = json.loads((folder / "auto_round.json").read_text())
        with computing_in(other.model, compression.compute_dtype):
            return {**judge.measure(other), **told}
    compression.open_store()
    selection = TuningText(data.selection, compression.reference(data.selection))
    label = ""
    if way.startswith("before"):
        label = "-tuned-before"
        packed, tuned_tokens, tuned_seconds = tuned_widths(settings, planned, text, selection, seed)
        prepare_seed(settings, model, seed, [bits], packed, label)
        compression.set_packed(packed)
    allocation, seconds = chosen_allocation(settings, planned, model, bits, seed, kind, label)
    source, weights = compression.deployed(allocation)
    record = {"seconds": seconds, "bits": float(compression.average_width(allocation))}
    if way == "none" or way.startswith("before"):
        if label:
            record |= {"tokens": tuned_tokens, "seconds": {**seconds, "tuning": tuned_seconds}}
        with compression.apply(allocation):
            return {**record, **judge.measure(loaded), "total_seconds": time.perf_counter() - began}
    options, make = way_settings(way, settings, seed)
    training = TuningText(text, compression.reference(text))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with computing_in(loaded.model, compression.compute_dtype):
        found = tune(source, weights, compression.full_head(), training, selection, options, make=make)
    record["seconds"] = {**seconds, "tuning": found.seconds}
    if torch.cuda.is_available():
        record["peak_bytes"] = torch.cuda.max_memory_allocated()
    with compression.tuned(allocation, found.weights).apply(allocation):
        record |= judge.measure(loaded)
    return {
        **record,
        "settings": dataclasses.asdict(options),
        "sequences": len(text),
        "tokens": found.tokens,
        "selection": [found.before, found.after],
        "curve": found.curve,
        **moved_codes(weights, found.weights),
        "total_seconds": time.perf_counter() - began,
    }


def tuned_widths(settings, planned, text, selection, seed):
    """Candidates of every width, each tuned block by block as a uniform allocation; tokens and seconds of it."""
    import numpy as np

    from rco.compression.tuning import TuningText, tune
    from rco.models.precision import computing_in

    compression = planned.compression
    options, make = way_settings("blocks", settings, seed)
    training, packed = TuningText(text, compression.reference(text)), compression.packed()
    tokens, seconds = 0, 0.0
    for column, option in enumerate(compression.plan.options):
        if option not in compression.plan.packed or option.bits > 4:
            continue
        allocation = planned.problem.allocation(np.full(planned.problem.num_groups, column))
        _, weights = compression.deployed(allocation)
        with computing_in(planned.loaded.model, compression.compute_dtype):
            found = tune(
                planned.loaded, weights, compression.full_head(), training, selection, options, make=make
            )
        tokens, seconds = tokens + found.tokens, seconds + found.seconds
        mine = compression.tuned(allocation, found.weights).packed()
        label = compression.plan.label(option)
        packed = {name: {**each, label: mine[name][label]} for name, each in packed.items()}
    return packed, tokens, seconds


# ------------------------------------------------------------------------ commands


def run(arguments):
    settings = settings_from(Settings, arguments)
    Path(settings.work).mkdir(parents=True, exist_ok=True)
    parts = {}
    for model in arguments.model.split(","):
        for bits in arguments.bits.split(","):
            for seed in map(int, arguments.seeds.split(",")):
                for kind in arguments.allocations.split(","):
                    for way in arguments.ways.split(","):
                        key = (Path(model).name, bits, seed, kind, way)
                        parts[key] = (settings, model, bits, seed, kind, way)

    def prepare(missing):
        wanted = {}
        for _, model, bits, seed, kind, _ in missing.values():
            budgets = wanted.setdefault((model, seed), [])
            if bits not in budgets and kind == "rco":
                budgets.append(bits)
        return [
            (prepare_seed, (settings, model, seed, budgets or [next(iter(missing.values()))[2]]))
            for (model, seed), budgets in wanted.items()
        ]

    return run_parts(
        arguments.parts,
        settings.header(paths=("work", "threads", "tasks", "text", "peers")),
        parts,
        work,
        lambda line: f"KL {line['kl']:.4f} perplexity {line['perplexity']:.2f}",
        workers=arguments.workers,
        threads=settings.threads,
        prepare=prepare,
    )


def text_passages(folder, domains, count):
    """Passages from equally spaced places of every domain, one domain after the other, each beyond 512 tokens."""
    found = []
    for index in range(count):
        name, turns = domains[index % len(domains)], -(-count // len(domains))
        text = (Path(folder) / f"{name}.calibration.txt").read_text()
        start = (len(text) - PASSAGE) * (index // len(domains)) // turns
        found.append(text[start : start + PASSAGE])
    return found


def auto_round(arguments):
    """Dense checkpoints with the weights of AutoRound at uniform widths, trained on the text of --domains."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    passages = text_passages(arguments.text, arguments.domains.split(","), arguments.nsamples)
    # AutoRound computes in bfloat16, and where the checkpoint is float32 it saves the weights of that, not rounded.
    with tempfile.TemporaryDirectory() as source:
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype="bfloat16").save_pretrained(source)
        AutoTokenizer.from_pretrained(arguments.model).save_pretrained(source)
        for bits in arguments.bits.split(","):
            _auto_round(arguments, source, bits, passages)
    return 0


def _auto_round(arguments, source, bits, passages):
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    began = time.perf_counter()
    rounded = AutoRound(
        model,
        AutoTokenizer.from_pretrained(source),
        bits=int(bits),
        group_size=arguments.group_size,
        sym=False,
        iters=arguments.iters,
        nsamples=arguments.nsamples,
        seqlen=arguments.length,
        dataset=passages,
        device_map=arguments.device,
    )
    out = Path(arguments.out) / f"{Path(arguments.model).name}-{bits}"
    rounded.quantize_and_save(str(out), format="fake")
    told = {
        "seconds": {"tuning": time.perf_counter() - began},
        "tokens": arguments.iters * 8 * arguments.length,
        "iters": arguments.iters,
        "nsamples": arguments.nsamples,
    }
    (out / "auto_round.json").write_text(json.dumps(told))


def merge(arguments):
    from rco.atomic_files import write_json_atomic

    settings, environments, lines = merge_parts(arguments.parts)
    for model in dict.fromkeys(key[0] for key in lines):
        own = {key: line for key, line in lines.items() if key[0] == model}
        record = {
            "settings": settings,
            "environments": environments,
            "parts": [own[key] for key in sorted(own, key=str)],
        }
        write_json_atomic(RESULTS / f"tuning_{model.replace('-', '_')}.json", record)
        print(f"\n{model}\n\n{table(record)}")
    return 0


def table(record):
    """Means over seeds, beside the same allocation before tuning."""
    grouped = {}
    for line in record["parts"]:
        _, bits, seed, kind, way = line["key"]
        grouped.setdefault((float(bits), kind, way), {})[seed] = line
    rows = [
        "| bits | allocation | way | KL | below untuned | perplexity | other domains, worst | tokens | seconds |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    outside = set(record["settings"]["others"].split(",")) | {"wikitext2"}
    for (bits, kind, way), lines in sorted(grouped.items()):
        untuned = grouped.get((bits, kind, "none"), {})
        mean = statistics.fmean(line["kl"] for line in lines.values())
        gains = [1 - line["kl"] / untuned[seed]["kl"] for seed, line in lines.items() if seed in untuned]
        worst = [
            line["domains"][name]["kl"] / untuned[seed]["domains"][name]["kl"]
            for seed, line in lines.items()
            if seed in untuned
            for name in outside & set(line["domains"])
        ]
        seconds = statistics.fmean(line["seconds"].get("tuning", 0.0) for line in lines.values())
        tokens = statistics.fmean(line.get("tokens", 0) for line in lines.values())
        perplexity = statistics.fmean(line["perplexity"] for line in lines.values())
        rows.append(
            f"| {bits:g} | {kind} | {way} | {mean:.4f} | "
            + (f"{100 * statistics.fmean(gains):.1f} % (least {100 * min(gains):.1f} %)" if gains else "")
            + f" | {perplexity:.2f} | {f'{max(worst):.3f} x' if worst else ''} | {tokens:,.0f} | {seconds:.0f} |"
        )
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    Settings.add_arguments(
        one, length=512, sequences=96, selection=16, evaluation=16, sensitivity=32, work="runs/tuning"
    )
    one.add_argument("--model", default="tiny-llama", help="names or folders, comma-separated")
    one.add_argument("--bits", default="2.5")
    one.add_argument("--seeds", default="0")
    one.add_argument("--allocations", default="rco")
    one.add_argument("--ways", default=WAYS)
    one.add_argument("--others", default=OTHERS, help="of --text, only measured")
    one.add_argument("--tasks", help="folder of JSONL tasks")
    one.add_argument("--limit", type=int, default=200, help="items per task")
    one.add_argument("--peers", help="folder of checkpoints of `auto-round`")
    one.add_argument("--method", default="gptq")
    one.add_argument("--tokens", type=int, default=1 << 21)
    one.add_argument("--distinct", type=int, default=4000, help="most different sequences")
    one.add_argument("--compute", default="auto")
    peer = commands.add_parser("auto-round")
    peer.add_argument("--model", required=True, help="a folder")
    peer.add_argument("--bits", default="2,3,4")
    peer.add_argument("--out", required=True)
    peer.add_argument("--group-size", type=int, default=64)
    peer.add_argument("--iters", type=int, default=200)
    peer.add_argument("--nsamples", type=int, default=128)
    peer.add_argument("--length", type=int, default=512)
    peer.add_argument("--text", required=True, help="folder of NAME.calibration.txt")
    peer.add_argument("--domains", default=DOMAINS)
    peer.add_argument("--device", default="cpu")
    end = commands.add_parser("merge")
    end.add_argument("parts", type=Path, nargs="+")
    arguments = parser.parse_args()
    return {"run": run, "auto-round": auto_round, "merge": merge}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
