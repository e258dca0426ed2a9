"""What the recipes share: a list of commands for one table of the paper, run one after another.

    python recipes/NAME.py --out runs/NAME              # everything; needs the hardware that the README names
    python recipes/NAME.py --only "2.5 bits"            # the rows whose name contains this
    python recipes/NAME.py --dry-run                    # every command's own --dry-run, on a tiny random model
    python recipes/NAME.py --dry-run --model MODEL      # the same on the real one: memory, time, reachable budgets

A command that was stopped goes on where it was when the recipe is run again.
"""

import argparse
import importlib
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The eight benchmarks whose mean is the paper's "Avg".
GENERAL = "arc_challenge,arc_easy,boolq,hellaswag,mmlu,openbookqa,rte,winogrande"
# Expert pruning as the scripts of the published code (github.com/IST-DASLab/RCO, 9a1e09c) call it: the data of
# every method, and RCO's own settings. The initial logits from REAP scores are the paper's; how scores become
# logits is ours.
PRUNING_DATA = "--sequences 64 --length 2048 --batch-size 4 --top-k 20"
PRUNING_RCO = (
    "--searcher rco-plain --samples 4 --antithetic --lr 0.1 --tau 1.0 0.05 --gates scale --prior reap"
)
# Candidates as that code makes them: GPTQ on asymmetric grids from the minimum to the maximum of 128 weights, and
# no training after the choice.
CANDIDATES = "--widths 2,3,4,5,6,7,8 --group-size 128 --no-symmetric --clip minmax --sweeps 0 --tune off"
# Widths as that code searches for them: Algorithm 1 from -log of the weight error.
QUANTIZATION_RCO = "--searcher rco-plain --prior weight-error --lr 0.1 --tau 1.0 0.01"
# Both run programs that the model writes: use a sandbox, and allow it with HF_ALLOW_CODE_EVAL=1.
CODING = "humaneval,mbpp"


@dataclass(frozen=True)
class Job:
    """One row of the table and the command behind it: a verb of ``rco``, or a script of benchmarks/.

    ``{model}``, ``{out}`` and ``{device}`` are filled in.
    """

    row: str
    command: str


@dataclass(frozen=True)
class Recipe:
    """One table.

    Attributes:
        table: Which table of the paper.
        model: Hub id.
        architecture: The same as a name that ``rco.testing.tiny_models`` knows.
        jobs: In the order in which they must run.
        tiny: How the random model of the dry run differs from that module's.
    """

    table: str
    model: str
    architecture: str
    jobs: tuple[Job, ...]
    tiny: dict[str, Any] = field(default_factory=dict)


def run(recipe: Recipe, arguments: list[str] | None = None) -> int:
    """Run a recipe from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=recipe.table)
    parser.add_argument("--model", help=f"Hub id or folder; default {recipe.model}, tiny in a dry run")
    parser.add_argument("--out", type=Path, default=Path("runs") / Path(sys.argv[0]).stem)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    jobs = [job for job in recipe.jobs if options.only in job.row]
    if not jobs:
        parser.error(f"no row contains {options.only!r}; there are {', '.join(j.row for j in recipe.jobs)}")
    with tempfile.TemporaryDirectory() as folder:
        model, device = options.model or recipe.model, options.device
        if options.dry_run and options.model is None:
            model, device = tiny_model(recipe, Path(folder)), "cpu"
        for job in jobs:
            words = [
                word.format(model=model, out=options.out, device=device) for word in shlex.split(job.command)
            ]
            program = "python" if words[0].endswith(".py") else "rco"
            print(f"\n== {job.row}\n{program} {shlex.join(words)}", flush=True)
            status = run_words([*words, "--dry-run"] if options.dry_run else words)
            if status:
                return status
    return 0


def run_words(words: list[str]) -> int:
    """Run a verb of ``rco``, or a script of benchmarks/ by its ``main``; returns the exit status."""
    if not words[0].endswith(".py"):
        from rco.cli import main

        return main(words)
    script = Path(__file__).parent.parent / words[0]
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    status: int = importlib.import_module(script.stem).main(words[1:])
    return status


def tiny_model(recipe: Recipe, folder: Path) -> str:
    """A random model of the recipe's architecture, small enough for any machine."""
    from rco.testing.tiny_models import save_tiny

    return str(save_tiny(recipe.architecture, folder / recipe.model.rpartition("/")[2], **recipe.tiny))
