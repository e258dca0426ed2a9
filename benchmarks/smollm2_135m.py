"""SmolLM2-135M at 3.0 bits on a CPU: minutes, peak memory and quality of one `rco quantize`.

    pip install 'rco[smollm2]'
    python benchmarks/smollm2_135m.py --threads 1

The command runs in a process of its own. Its settings are below the defaults where one core would need longer than
an hour: shorter and fewer sequences, fewer samples.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

SETTINGS = {
    "--length": 256,
    "--sequences": 48,
    "--sensitivity": 24,
    "--selection": 8,
    "--evaluation": 16,
    "--steps": 30,
    "--samples": 3,
    "--refine": 10,
    "--sweeps": 2,
    "--tune": "off",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--keep", type=Path, help="folder of the run; a temporary one otherwise")
    parser.add_argument("--out", type=Path, default=RESULTS / "smollm2_135m.json")
    arguments = parser.parse_args()

    from rco.runs import environment, write_json_atomic

    command = ["quantize", "smollm2-135m", "--bits", "3.0"]
    command += [str(part) for pair in SETTINGS.items() for part in pair]
    threads = {
        name: str(arguments.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "run"
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "rco", *command, "--out", str(folder)],
            env={**os.environ, **threads},
            check=True,
        )
        seconds = time.perf_counter() - began
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    write_json_atomic(
        arguments.out,
        {
            "command": shlex.join(["rco", *command]),
            "environment": environment(),
            "threads": arguments.threads,
            "minutes": seconds / 60,
            "peak_gib": peak / 2**30,
            "timings": metrics["timings"],
            "budget": metrics["budget"],
            "certificate": metrics["certificate"],
            "evaluation": metrics["evaluation"],
        },
    )
    print(f"{seconds / 60:.1f} minutes, {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
