"""Random budgets, presets and locks: what the written checkpoint takes, counted from its own headers.

python benchmarks/budget_exactness.py --cases 60
"""

import argparse
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from rco import InfeasibleBudgetError, solve_mckp
from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.data.calibration import CalibrationSet
from rco.evaluation.size import average_bits, checkpoint_size
from rco.export.compressed_tensors import CompressedTensorsExporter
from rco.export.exporter import ExportRequest
from rco.models.loading import wrap_model
from rco.runs import environment, write_json_atomic
from rco.testing.tiny_models import tiny_model

RESULTS = Path(__file__).parent / "results"
PRESETS = {
    "any": ((2, 3, 4, 5, 6, 7, 8), (32, None)),
    "transformers": ((2, 3, 4, 8, 16), (32, None)),
    "vllm": ((2, 3, 4, 5, 6, 8), (32, None)),
    "vllm-marlin": ((4, 8, 16), (32, None)),
}
LOCKS = [[], ["layers.0.=8"], ["q_proj=4"], ["down_proj=8", "layers.1.*up_proj=4"]]
TIES = [[], ["q_proj,k_proj"], ["gate_proj,up_proj"]]


def one(rng, folder):
    preset = str(rng.choice(list(PRESETS)))
    widths, sizes = PRESETS[preset]
    locks = LOCKS[rng.integers(len(LOCKS))]
    ties = TIES[rng.integers(len(TIES))]
    group_size = sizes[rng.integers(len(sizes))]
    dtype = (torch.bfloat16, torch.float32)[rng.integers(2)]
    model = tiny_model("llama", dtype=dtype, hidden_size=64, intermediate_size=128, head_dim=16)
    loaded = wrap_model(model)
    linears = loaded.layout.linears(model, include_head=True)
    plan = make_plan(
        loaded.layout, linears, widths=widths, group_size=group_size, serve=preset, locks=locks, ties=ties
    )
    backend = Compression(
        loaded, plan, folder / "store", settings=CandidateSettings(method="rtn", clip="minmax")
    )
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    backend.candidates(CalibrationSet(tokens, tokens.bool(), ("none",), "none", 0, "calibration"))
    kind = str(rng.choice(["bits", "bpw", "size"]))
    low, high = (float(end.replace(",", "").split()[0]) for end in backend.budget_range(kind))
    asked = low + (high - low) * float(rng.random())
    amount = Fraction(int(asked)) if kind == "size" else Fraction(round(asked, 3)).limit_denominator(1000)
    described = {
        "preset": preset, "locks": locks, "ties": ties, "group_size": group_size, "dtype": str(dtype),
        "kind": kind, "asked": float(amount), "range": [low, high],
    }  # fmt: skip
    try:
        problem = backend.problem(Budget(kind, amount))
    except InfeasibleBudgetError:  # rounded to below the lowest
        return {
            **described,
            "refused": True,
            "within": amount < low * (1 + 1e-5) or amount > high * (1 - 1e-5),
        }
    found = solve_mckp(rng.normal(size=(problem.num_groups, problem.num_options)), problem)
    out = folder / "model"
    weights = backend.weights_of(problem.allocation(found.allocation))
    CompressedTensorsExporter().export(ExportRequest(loaded, weights, out, engine=preset))
    parameters = sum(info.parameters for info in plan.linears)
    bits = average_bits(out, [info.name for info in plan.linears])
    used = {
        "bits": Fraction(bits["weight_bits"], parameters),
        "bpw": Fraction(bits["stored_bits"], parameters),
        "size": Fraction(checkpoint_size(out)["bytes"]),
    }[kind]
    return {**described, "refused": False, "used": float(used), "within": bool(used <= amount)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "budget_exactness.json")
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    rows = []
    for _ in range(arguments.cases):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(one(rng, Path(folder)))
    report = {
        "environment": environment(),
        "cases": len(rows),
        "refused": sum(row["refused"] for row in rows),
        "over_budget": sum(not row["within"] for row in rows),
        "rows": rows,
    }
    write_json_atomic(arguments.out, report)
    print({k: report[k] for k in ("cases", "refused", "over_budget")})


if __name__ == "__main__":
    main()
