"""Peak memory of one search step, at two vocabulary sizes and two numbers of options.

    python benchmarks/search_memory.py

Each case runs in a process of its own. Reported is the peak of the step above what the process held before it (the
model, the packed store, the reference), beside what K dense copies or one tokens x vocabulary tensor would take.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
TOKENS, HIDDEN, LAYERS = 2048, 512, 4


def resident():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


class Peak:
    """Largest resident size inside the block, sampled every two milliseconds."""

    def __enter__(self):
        self.highest, self._stop = resident(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop:
            self.highest = max(self.highest, resident())
            time.sleep(0.002)

    def __exit__(self, *_):
        self._stop = True
        self._thread.join()


def case(vocabulary, widths):
    import torch

    from rco.compression.budget import Budget
    from rco.compression.candidates import CandidateSettings
    from rco.compression.compression import Compression
    from rco.compression.plan import make_plan
    from rco.core.moves import uniform_allocation
    from rco.data.calibration import CalibrationSet
    from rco.models.loading import wrap_model
    from rco.testing.tiny_models import tiny_model

    model = tiny_model(
        "llama", vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8, head_dim=HIDDEN // 8, max_position_embeddings=TOKENS,
    )  # fmt: skip
    loaded = wrap_model(model)
    linears = loaded.layout.linears(model, include_head=True)
    plan = make_plan(loaded.layout, linears, widths=widths, group_size=64)
    tokens = torch.randint(vocabulary, (1, TOKENS))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    data = CalibrationSet(tokens, mask, ("random",), "random", 0, "calibration")
    with tempfile.TemporaryDirectory() as folder:
        backend = Compression(
            loaded, plan, Path(folder) / "store",
            settings=CandidateSettings(method="rtn", clip="minmax"), checkpointing=True,
        )  # fmt: skip
        backend.candidates(data)
        packed = {k: {w: p.to("cpu") for w, p in v.items()} for k, v in backend.packed().items()}
        store = sum(p.nbytes for options in packed.values() for p in options.values())
        problem = backend.problem(Budget("bits", Fraction(3)))
        gates = problem.allocation(uniform_allocation(problem)).one_hot(len(widths)).requires_grad_()
        with backend.objective(data) as objective:
            torch.autograd.grad(objective.loss(gates, 0), gates)  # buffers and compiled kernels
            before = resident()
            with Peak() as peak:
                torch.autograd.grad(objective.loss(gates, 0), gates)
    weights = sum(info.parameters for info in plan.linears)
    return {
        "vocabulary": vocabulary,
        "options": len(widths),
        "tokens": TOKENS,
        "packed_store_bytes": store,
        "step_peak_bytes": max(peak.highest - before, 0),
        "dense_copies_bytes": 4 * weights * len(widths),
        "tokens_x_vocabulary_bytes": 4 * TOKENS * vocabulary,
        "resident_before_bytes": before,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", help="JSON, used by the parent process")
    parser.add_argument("--out", type=Path, default=RESULTS / "search_memory.json")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(case(**json.loads(arguments.case))))
        return
    from rco.runs import environment, write_json_atomic

    rows = []
    for vocabulary in (8192, 65536):
        for widths in ([2, 4], [2, 3, 4, 5, 6, 7, 8]):
            described = json.dumps({"vocabulary": vocabulary, "widths": widths})
            done = subprocess.run(
                [sys.executable, __file__, "--case", described], capture_output=True, text=True, check=True
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            row = rows[-1]
            print(
                f"V={vocabulary} K={row['options']}: step peak {row['step_peak_bytes'] / 2**20:.0f} MiB, store "
                f"{row['packed_store_bytes'] / 2**20:.0f} MiB; K dense copies "
                f"{row['dense_copies_bytes'] / 2**20:.0f} MiB, tokens x vocabulary "
                f"{row['tokens_x_vocabulary_bytes'] / 2**20:.0f} MiB",
                flush=True,
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(arguments.out, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
