"""What a search step over widths of experts costs beside a plain forward and backward pass of the same model.

    python benchmarks/moe_step.py
    python benchmarks/moe_step.py --model tiny-moe,DIR --length 512,2048 --threads 2

A sample of the search and a plain pass with all weight gradients, on the same tokens, in one process, in turns, so
that neither has the quieter machine. Medians and all repeats go to results/moe_step.json.
"""

import argparse
import statistics
import sys
import tempfile
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from rco.bench.timing import measure
from rco.compression.language_model_objective import Reference
from rco.losses import Head, chunked_kl
from rco.models.precision import computing_in
from rco.pipeline.configs import QuantizeConfig
from rco.pipeline.planning import build_data, plan_compression
from rco.runs import environment, write_json_atomic

RESULTS = Path(__file__).parent / "results"


def plain_pass(loaded, data, reference):
    """Forward and backward with the gradients of all parameters, as a function of the sequence."""
    network, device = loaded.model, loaded.device

    def run(index):
        spec = loaded.layout.head(network)
        head = Head(spec.weight, spec.bias, spec.softcap, spec.scale)
        hidden = loaded.layout.final_hidden(network, data.tokens[index : index + 1].to(device))[:, :-1]
        loss = chunked_kl(
            hidden,
            head,
            reference.hidden[index : index + 1, :-1].to(device),
            Head(head.weight.detach(), head.bias, head.softcap, head.scale),
            data.mask[index : index + 1, :-1].to(device),
        )
        torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)

    return run


def seconds_of(task, device, sequences, repeats):
    """Seconds of every repeat but a first one, each on another sequence."""
    turns = cycle(range(sequences))
    return measure(lambda: task(next(turns)), device, repeats, warmup=1).seconds


def row_of(model, length, arguments, folder):
    """A row of the results."""
    experts_alone = arguments.attention == "16"
    config = QuantizeConfig(
        model=model,
        bits="3",
        method="rtn",
        clip="minmax",
        sequences=8,
        selection=2,
        evaluation=2,
        length=length,
        device=arguments.device,
        store=Path(folder) / "store",
        lock=["attention=16"] if experts_alone else [],
        count="experts" if experts_alone else "all",
        format="none",
    )
    planned = plan_compression(config)
    backend, loaded = planned.compression, planned.loaded
    data = build_data(config, loaded.tokenizer).search
    backend.candidates(data)
    network, device, widths = loaded.model, loaded.device, backend.plan.widths
    with computing_in(network, backend.compute_dtype):
        reference = Reference.compute(loaded, data, 4)
    rng = np.random.default_rng(0)
    choices = [widths.index(int(rng.choice(group.widths))) for group in backend.plan.groups]
    gates = torch.nn.functional.one_hot(torch.tensor(choices), len(widths)).double()
    plain = plain_pass(loaded, data, reference)
    found = {"plain": [], "search": []}
    for _ in range(arguments.rounds):
        with computing_in(network, backend.compute_dtype):
            network.requires_grad_(True)
            found["plain"] += seconds_of(plain, device, len(data), arguments.repeats)
            network.requires_grad_(False)
        with backend.objective(data) as objective:

            def search(index, objective=objective):
                objective.enqueue(gates, index)()

            found["search"] += seconds_of(search, device, len(data), arguments.repeats)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "model": Path(model).name,
        "length": length,
        "attention": arguments.attention,
        "device": str(device),
        "threads": arguments.threads,
        "options": len(widths),
        "plain_seconds": medians["plain"],
        "search_seconds": medians["search"],
        "ratio": medians["search"] / medians["plain"],
        "all": found,
    }


def main():
    """Parse and go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-moe", help="names or folders, comma-separated")
    parser.add_argument("--length", default="512", help="tokens per sample, comma-separated")
    parser.add_argument("--attention", choices=("16", "searched"), default="searched")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "moe_step.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for model in arguments.model.split(","):
        for length in map(int, arguments.length.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                row = row_of(model, length, arguments, folder)
            rows.append(row)
            print(
                f"{row['model']} {length} tokens: plain {row['plain_seconds']:.3f} s, search step "
                f"{row['search_seconds']:.3f} s, ratio {row['ratio']:.3f}",
                flush=True,
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(arguments.out, {"environment": environment(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
