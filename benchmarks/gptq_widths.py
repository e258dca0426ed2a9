"""How long GPTQ takes for seven widths at once, in units of one width.

Two ratios per layer shape: of the whole work from a layer's calibration inputs to its packed candidates (Hessian,
factor, columns), which is what making candidates costs and what the limit is for, and of the solve alone on a given
Hessian, which is more. GPTQ proper, and GPTQ with the sweeps that `rco quantize` adds to it. Times are the best of
several interleaved repeats. Run: python benchmarks/gptq_widths.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numba
import torch

from rco.formats.gptq import gptq
from rco.formats.hessian import HessianAccumulator
from rco.formats.integer import IntegerGrid
from rco.pipeline.configs import QuantizeConfig

SHAPES = [(704, 256), (1024, 1024), (2816, 1024)]
WIDTHS = range(2, 9)
SWEEPS = (0, QuantizeConfig.sweeps)
LIMIT = 2.5


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def correlated_inputs(tokens: int, features: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    mixing = torch.randn(features, features, generator=rng) / features**0.5
    sizes = 0.2 + 3 * torch.rand(features, generator=rng) ** 4
    return torch.randn(tokens, features, generator=rng) @ mixing * sizes


def measure(rows: int, cols: int, sweeps: int, tokens: int, group: int, repeats: int) -> dict[str, object]:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    batch = correlated_inputs(min(tokens, 4096), cols)
    grids = [IntegerGrid(bits, group) for bits in WIDTHS]

    def accumulate() -> torch.Tensor:
        total = HessianAccumulator(cols)
        for _ in range(tokens // len(batch)):
            total.add(batch)
        return total.matrix()

    hessian = accumulate()
    result = gptq(weight, hessian, grids, sweeps=sweeps)  # also compiles
    gathering = min(seconds(accumulate) for _ in range(min(repeats, 3)))
    seven, single = [], {grid.bits: [] for grid in grids}
    for _ in range(repeats):
        seven.append(seconds(lambda: gptq(weight, hessian, grids, sweeps=sweeps)))
        for grid in grids:
            single[grid.bits].append(seconds(lambda grid=grid: gptq(weight, hessian, [grid], sweeps=sweeps)))
    one = sum(min(times) for times in single.values()) / len(single)
    return {
        "shape": [rows, cols],
        "sweeps": sweeps,
        "tokens": tokens,
        "group_size": group,
        "hessian_s": gathering,
        "one_width_s": one,
        "one_width_by_bits_s": {str(bits): min(times) for bits, times in single.items()},
        "seven_widths_s": min(seven),
        "seven_singly_s": one * len(grids),
        "ratio_from_inputs": (gathering + min(seven)) / (gathering + one),
        "ratio_solve_alone": min(seven) / one,
        "error_relative_to_rounding": (result.errors / result.nearest_errors).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128 * 512, help="calibration tokens behind the Hessian")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gptq_widths.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    layers = []
    for (rows, cols), sweeps in itertools.product(SHAPES, SWEEPS):
        row = measure(rows, cols, sweeps, arguments.tokens, arguments.group_size, arguments.repeats)
        layers.append(row)
        print(
            f"{rows}x{cols}, {sweeps} sweeps: Hessian {row['hessian_s']:.3f} s, one width "
            f"{row['one_width_s']:.3f} s, seven {row['seven_widths_s']:.3f} s; ratio from inputs "
            f"{row['ratio_from_inputs']:.2f}, solve alone {row['ratio_solve_alone']:.2f}",
            flush=True,
        )
    report = {
        "benchmark": "gptq_widths",
        "limit": LIMIT,
        "within_limit": all(row["ratio_from_inputs"] <= LIMIT for row in layers if not row["sweeps"]),
        "within_limit_with_sweeps": all(row["ratio_from_inputs"] <= LIMIT for row in layers),
        "layers": layers,
        "environment": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": arguments.threads,
            "load_average_at_start": load,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numba": numba.__version__,
        },
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.out.with_suffix(".tmp")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(arguments.out)
    print(
        f"within {LIMIT}: {report['within_limit']}, with sweeps {report['within_limit_with_sweeps']}; "
        f"written to {arguments.out}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
