"""Ablations of the search settings: the nine sweeps of the paper's appendix E, on any model.

    python benchmarks/ablations.py --quick
    python benchmarks/ablations.py --sweep samples=1,4,16 --sweep temperature --seeds 5 --workers 2 --resume
    python benchmarks/ablations.py --dry-run         # number of runs and expected time

A sweep varies one setting of the loop and keeps the rest. A run is one loop with one seed, either Algorithm 1 as
printed or the whole search; equal loops of several sweeps run once. One store of candidates and one file of
sensitivities per seed serve every run. Each run leaves a file: a study that was stopped continues with the missing
ones, and seeds or sweeps can be added later.

The folder of the study gets ablations.json, ablations.md and a figure per sweep (ablation_report.py).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import typer
from ablation_report import ablation_markdown, recommend, summarize, write_ablations
from safetensors.torch import load_file
from torch import Tensor

from rco.atomic_files import make_folder, write_tensors_atomic
from rco.cli import run_command
from rco.cli.config_options import Switches, command_from_config
from rco.cli.run_job import interruptible
from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.second_order import predicted_losses
from rco.core.knapsack import solve_mckp
from rco.core.moves import layer_order, spend, uniform_allocation
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.search import MOST_CANDIDATES, RCO, PlainRCO
from rco.data.calibration import build_splits
from rco.pipeline.configs import TAU, Compute, QuantizeConfig
from rco.pipeline.estimate import forward_seconds
from rco.pipeline.evaluate_allocations import AllocationEvaluator
from rco.pipeline.jobs import run_jobs, using_threads
from rco.pipeline.planning import plan_compression, plan_groups
from rco.pipeline.progress import Progress, Silent, make_progress
from rco.runs import RunDirectory, environment
from rco.settings import check_settings, device_setting, setting

_USUAL = QuantizeConfig(model="any", device="cpu")  # the defaults of the command are the centre of the sweeps
_COMPUTE_HELP = "Type of the arithmetic; auto: float32 on a CPU, the checkpoint's elsewhere."
Kind = Literal["printed", "search"]

_QUICK: dict[str, Any] = {
    "seeds": 1, "steps": 8, "samples": 4, "refine": 4, "sequences": 16, "sensitivity": 4, "selection": 4,
    "evaluation": 4, "length": 64,
}  # fmt: skip


# ---------------------------------------------------------------------- settings


@dataclass(frozen=True, kw_only=True)
class AblationConfig:
    """Settings of a study; each is a flag of the script."""

    model: str = setting("tiny-llama", help="Built-in name, local folder or Hub id.")
    bits: str = setting("2.5", help="Average width of the quantized weights.")
    sweep: list[str] = setting(
        [],
        help="samples, steps, equal-compute, temperature, learning-rate, antithetic, seeds, grouping, "
        "calibration; repeatable, all by default. With values of your own: samples=1,4,16, equal-compute=8x100.",
        panel="Sweeps",
    )
    seeds: int = setting(
        3, help="Seeds of every point; the sweep over seeds has at least five.", panel="Sweeps", least=1
    )
    quick: bool = setting(False, help="Ends and centre of each sweep, little data, one seed.", panel="Sweeps")

    steps: int = setting(_USUAL.steps, help="Optimizer steps at the centre.", panel="Centre", least=0)
    samples: int = setting(
        _USUAL.samples, help="Gumbel samples per step at the centre.", panel="Centre", least=1
    )
    lr: float = setting(_USUAL.lr, help="Learning rate at the centre.", panel="Centre", positive=True)
    tau: float = setting(TAU[1], help="Last temperature at the centre.", panel="Centre", positive=True)
    refine: int = setting(
        _USUAL.refine_passes, help="Passes over the selection text for exchanges after the choice.",
        panel="Centre", least=0,
    )  # fmt: skip
    prior_strength: float = setting(
        _USUAL.strength, help="Scale of the search's initial logits.", panel="Centre", least=0
    )
    printed_prior: Literal["uniform", "weight-error"] = setting(
        "uniform",
        help="Initial logits of Algorithm 1 as printed: zero, or as the paper's own code.",
        panel="Centre",
    )

    widths: str = setting("2,3,4,5,6,7,8", help="Bits on offer.", panel="Candidates")
    group_size: int = setting(
        _USUAL.columns_per_scale,
        help="Columns that share a scale; 0 for one per row.",
        panel="Candidates",
        least=0,
    )
    store: Path | None = setting(
        None, help="Folder of the candidates; default: inside the run.", panel="Candidates"
    )

    data: str = setting("builtin", help="Calibration text: files, names, mixtures a+b.", panel="Data")
    sequences: int = setting(96, help="Sequences for candidates and gradients.", panel="Data", least=1)
    sensitivity: int = setting(32, help="Of these, sequences for the sensitivities.", panel="Data", least=1)
    selection: int = setting(16, help="Sequences that choose among candidates.", panel="Data", least=1)
    evaluation: int = setting(32, help="Sequences that judge the results.", panel="Data", least=1)
    length: int = setting(192, help="Tokens per sequence.", panel="Data", least=2)

    out: Path = setting(Path("runs/ablations"), help="Folder for runs, tables and plots.", panel="Machine")
    device: str = device_setting("Machine")
    compute: Compute = setting("auto", help=_COMPUTE_HELP, panel="Machine")
    workers: int = setting(1, help="Processes; each loads the model.", panel="Machine", least=1)
    threads: int = setting(1, help="Threads of each process.", panel="Machine", least=1)
    resume: bool = setting(
        False, help="Keep what `out` holds and run what is missing; seeds and sweeps may be added.",
        panel="Machine",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)

    def identity(self) -> dict[str, Any]:
        """What must agree for finished parts to be kept."""
        described = dataclasses.asdict(self)
        for name in ("out", "resume", "sweep", "seeds", "workers", "threads"):
            described.pop(name)
        described["store"] = str(self.store) if self.store else None
        return described


# ------------------------------------------------------------------------ sweeps

SWEEPS = (
    "samples", "steps", "equal-compute", "temperature", "learning-rate", "antithetic", "seeds", "grouping",
    "calibration",
)  # fmt: skip
# Sweeps whose values can be given: the field of a loop that they vary, and what a value is.
_VALUES: dict[str, tuple[str, type[int] | type[float]]] = {
    "samples": ("samples", int), "steps": ("steps", int), "temperature": ("tau", float),
    "learning-rate": ("lr", float), "calibration": ("sequences", int),
}  # fmt: skip
_SEEDS = 5  # of the sweep over seeds, where the others have fewer


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the sweeps vary of a search.

    Attributes:
        steps: Optimizer steps T.
        samples: Gumbel samples g per step.
        lr: Learning rate.
        tau: Last temperature; the first is 1.
        antithetic: Whether noise is drawn in mirrored pairs.
        grouped: Whether linears that engines fuse share a width.
        sequences: Calibration sequences that gradients use.
    """

    steps: int
    samples: int
    lr: float
    tau: float
    antithetic: bool = False
    grouped: bool = False
    sequences: int

    @property
    def key(self) -> str:
        """A name for files."""
        marks = "-antithetic" * self.antithetic + "-grouped" * self.grouped
        return f"T{self.steps}-g{self.samples}-lr{self.lr:g}-tau{self.tau:g}-n{self.sequences}{marks}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return asdict(self)


@dataclass(frozen=True)
class Point:
    """One row of a sweep's table: its label, the loop, and the seeds it is run with."""

    label: str
    loop: Loop
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """One table and one plot.

    Attributes:
        name: As in :data:`SWEEPS`.
        title: For people.
        varies: What the rows differ in.
        points: The rows.
        setting: Field of :class:`Loop` whose best value is worth recommending; None if there is none.
    """

    name: str
    title: str
    varies: str
    points: tuple[Point, ...]
    setting: str | None = None


def make_sweeps(
    centre: Loop, seeds: int, *, names: Sequence[str] = (), quick: bool = False, can_group: bool = True
) -> list[Sweep]:
    """The sweeps around a centre.

    Args:
        centre: The loop that every sweep passes through.
        seeds: Runs of each point, with seeds 0, 1, ...; the sweep over seeds has at least five.
        names: Which sweeps; all of them if empty. ``samples=1,4,16`` names the values, too, beside the centre's;
            ``equal-compute=8x100,32x50`` names pairs of samples and steps, which need not be of equal compute.
        quick: The ends of each range and the centre only, and no more seeds than asked for.
        can_group: Whether the model has linears that engines fuse; without any, ``grouping`` is left out.

    Raises:
        ValueError: A name is unknown, a value makes no sense, or the centre is too small to be halved twice.
    """
    given = dict(part.partition("=")[::2] for part in names)
    names = list(given)
    unknown = [name for name in names if name not in SWEEPS]
    if unknown:
        raise ValueError(f"Unknown sweeps {', '.join(unknown)}; there are {', '.join(SWEEPS)}.")
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1, got {seeds}.")
    if centre.steps < 4 or centre.samples < 4 or centre.samples % 4 or centre.steps % 4:
        raise ValueError(
            "The sweeps quarter the centre's steps and samples: both must be multiples of 4, got "
            f"{centre.steps} steps and {centre.samples} samples."
        )
    if centre.sequences < 16:
        raise ValueError(f"The sweeps need at least 16 calibration sequences, got {centre.sequences}.")
    if not can_group and "grouping" in names:
        raise ValueError("The sweep 'grouping' needs linears that engines fuse, and this model has none.")
    wanted = [name for name in SWEEPS if (not names or name in names) and (can_group or name != "grouping")]
    makers = {
        "samples": _samples, "steps": _steps, "equal-compute": _equal_compute, "temperature": _temperature,
        "learning-rate": _learning_rate, "antithetic": _antithetic, "seeds": _seeds, "grouping": _grouping,
        "calibration": _calibration,
    }  # fmt: skip
    made = [makers[name](centre, tuple(range(seeds)), quick) for name in wanted]
    made = [_revalued(sweep, given.get(sweep.name, ""), centre, tuple(range(seeds))) for sweep in made]
    return [replace(sweep, points=_ends(sweep.points, centre)) if quick else sweep for sweep in made]


def _revalued(sweep: Sweep, text: str, centre: Loop, seeds: tuple[int, ...]) -> Sweep:
    """The sweep at the values of a list such as 1,4,16, with the centre among them."""
    if not text:
        return sweep
    loops = {centre}
    try:
        for part in text.split(","):
            if sweep.name == "equal-compute":
                samples, steps = map(int, part.split("x"))
                loops.add(replace(centre, samples=samples, steps=steps))
            else:
                field, kind = _VALUES[sweep.name]
                changed: dict[str, Any] = {field: kind(part)}
                loops.add(replace(centre, **changed))
    except (KeyError, ValueError):
        raise ValueError(
            f"{sweep.name}={text}: {', '.join(_VALUES)} take a list of numbers, as in samples=1,4,16, and "
            "equal-compute samples x steps, as in equal-compute=8x100,32x50; the other sweeps take no values."
        ) from None
    if any(min(loop.samples, loop.steps, loop.lr, loop.tau, loop.sequences) <= 0 for loop in loops):
        raise ValueError(f"{sweep.name}={text}: all values must be positive.")
    if any(loop.sequences > centre.sequences for loop in loops):
        raise ValueError(f"{sweep.name}={text}: there are {centre.sequences} sequences; raise `sequences`.")
    if sweep.name == "equal-compute":
        ordered = sorted(loops, key=lambda loop: (loop.samples, loop.steps))
        labels = [f"g={loop.samples}, T={loop.steps}" for loop in ordered]
    else:
        field = _VALUES[sweep.name][0]
        ordered = sorted(loops, key=lambda loop: float(getattr(loop, field)), reverse=field == "tau")
        labels = [f"{getattr(loop, field):g}" for loop in ordered]
    points = tuple(Point(label, loop, seeds) for label, loop in zip(labels, ordered, strict=True))
    return replace(sweep, points=points)


def _ends(points: tuple[Point, ...], centre: Loop) -> tuple[Point, ...]:
    """First, centre and last of a range of loops."""
    if len(points) < 4:
        return points
    return tuple(p for i, p in enumerate(points) if i in (0, len(points) - 1) or p.loop == centre)


def _samples(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    g = centre.samples
    values = (g // 4, g // 2, g, 2 * g)
    points = tuple(Point(str(v), replace(centre, samples=v), seeds) for v in values)
    return Sweep("samples", "Gumbel samples per step", "samples g", points, "samples")


def _steps(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    t = centre.steps
    values = (t // 4, t // 2, t, 2 * t)
    points = tuple(Point(str(v), replace(centre, steps=v), seeds) for v in values)
    return Sweep("steps", "Optimization steps", "steps T", points, "steps")


def _equal_compute(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    g, t = centre.samples, centre.steps
    pairs = ((g // 4, 4 * t), (g, t), (4 * g, t // 4))
    points = tuple(Point(f"g={a}, T={b}", replace(centre, samples=a, steps=b), seeds) for a, b in pairs)
    return Sweep("equal-compute", "Samples against steps at equal compute", "samples and steps", points)


def _temperature(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    values = sorted({0.3, 0.1, 0.03, 0.01, centre.tau}, reverse=True)
    points = tuple(Point(f"{v:g}", replace(centre, tau=v), seeds) for v in values)
    return Sweep("temperature", "Final temperature", "last temperature", points, "tau")


def _learning_rate(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    values = (centre.lr * 0.3, centre.lr, centre.lr * 3)
    points = tuple(Point(f"{v:g}", replace(centre, lr=v), seeds) for v in values)
    return Sweep("learning-rate", "Learning rate", "learning rate", points, "lr")


def _antithetic(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    points = tuple(Point("yes" if v else "no", replace(centre, antithetic=v), seeds) for v in (False, True))
    return Sweep("antithetic", "Antithetic sampling", "antithetic", points, "antithetic")


def _seeds(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    listed = seeds if quick else tuple(range(max(_SEEDS, len(seeds))))
    points = tuple(Point(str(seed), centre, (seed,)) for seed in listed)
    return Sweep("seeds", "Spread over seeds", "seed", points)


def _grouping(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    n = centre.sequences
    points = tuple(
        Point(
            f"{'grouped' if grouped else 'none'}, {count}",
            replace(centre, grouped=grouped, sequences=count),
            seeds,
        )
        for count in (n // 4, n)
        for grouped in (False, True)
    )
    return Sweep("grouping", "Layer grouping", "grouping, calibration sequences", points, "grouped")


def _calibration(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    n = centre.sequences
    points = tuple(Point(str(v), replace(centre, sequences=v), seeds) for v in (n // 16, n // 4, n))
    return Sweep("calibration", "Calibration size", "calibration sequences", points, "sequences")


# -------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class AblationRun:
    """One search: a loop, a seed, and whether it is the printed algorithm or the whole search."""

    loop: Loop
    seed: int
    kind: Kind

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.loop.key}-seed{self.seed}-{self.kind}"


@dataclass(frozen=True)
class AblationPlan:
    """What a study will do.

    Attributes:
        config: With the values of ``quick`` filled in.
        sweeps: Tables to come.
        runs: Distinct searches, the longest first.
        seconds: On one core of this machine, all runs together.
    """

    config: AblationConfig
    sweeps: list[Sweep]
    runs: list[AblationRun]
    seconds: float


def plan_ablations(config: AblationConfig) -> AblationPlan:
    """Check everything that can be checked without work, and estimate the rest."""
    config = dataclasses.replace(config, **_QUICK) if config.quick else config
    planned = plan_compression(_quantize_config(config))
    centre = _centre(config)
    sweeps = make_sweeps(
        centre,
        config.seeds,
        names=config.sweep,
        quick=config.quick,
        can_group=bool(_ties(planned.compression)),
    )
    runs = {
        run.name: run
        for sweep in sweeps
        for point in sweep.points
        for seed in point.seeds
        for run in (AblationRun(point.loop, seed, "printed"), AblationRun(point.loop, seed, "search"))
    }
    ordered = sorted(runs.values(), key=lambda run: -_passes(config, run))
    passes = sum(_passes(config, run) for run in ordered)
    return AblationPlan(
        config,
        sweeps,
        ordered,
        passes * forward_seconds(planned.loaded, planned.compression.compute_dtype, config.length),
    )


def run_ablations(
    config: AblationConfig, progress: Progress | None = None
) -> tuple[dict[str, Any], list[Path]]:
    """Run what is missing and write tables and plots; returns the record and the files written."""
    progress = progress or Silent()
    plan = plan_ablations(config)
    config = plan.config
    open_run = RunDirectory.resume if config.resume else RunDirectory.create
    with open_run(config.out, config.identity()) as folder, using_threads(config.threads * config.workers):
        config = dataclasses.replace(config, store=config.store or folder.folder / "candidates")
        bench = _Bench(config, folder.folder, progress)
        bench.measure_sensitivities(sorted({run.seed for run in plan.runs}), progress)
        results, failed = run_jobs(
            plan.runs,
            folder.folder / "parts",
            _make_bench,
            (config, folder.folder),
            workers=config.workers,
            threads=config.threads,
            here=bench,
            on_done=progress.stage("runs"),
        )
        for name, reason in failed.items():
            raise ValueError(f"{name} failed: {reason}")
        record = _record(plan, bench, [results[run.name] for run in plan.runs])
        return record, write_ablations(folder.folder, record)


def _make_bench(argument: tuple[AblationConfig, Path]) -> _Bench:
    """What a process of its own works with."""
    return _Bench(*argument, Silent())


class _Bench:
    """Model, candidates and data of one process."""

    def __init__(self, config: AblationConfig, folder: Path, progress: Progress) -> None:
        self.config = config
        self._folder = make_folder(folder / "sensitivities")
        quantize = _quantize_config(config)
        planned = plan_compression(quantize, progress)
        self.backend = planned.compression
        self.data = build_splits(
            config.data,
            planned.loaded.tokenizer,
            search=config.sequences,
            selection=config.selection,
            evaluation=config.evaluation,
            length=config.length,
            seed=0,
        )
        self.backend.candidates(self.data.search)
        tied = plan_groups(dataclasses.replace(quantize, tie=_ties(self.backend)), planned.loaded)
        self._grouped = self.backend.regrouped(tied)
        self._evaluator = AllocationEvaluator(self.backend, self.data.evaluation)
        self._known: dict[bytes, dict[str, Any]] = {}

    # ---------------------------------------------------------- sensitivities

    def measure_sensitivities(self, seeds: Sequence[int], progress: Progress) -> None:
        """Write one file per seed, for every linear on its own."""
        count = progress.stage("sensitivities")
        data = self.data.search.select(slice(0, self.config.sensitivity))
        for position, seed in enumerate(seeds):
            path = self._sensitivity_file(seed)
            if not path.exists():
                differences = self.backend.differences(data, seed=seed)
                write_tensors_atomic(path, {"differences": differences})
            count(position + 1, len(seeds))

    def _sensitivity_file(self, seed: int) -> Path:
        return self._folder / f"seed{seed}.safetensors"

    def _differences(self, backend: Compression, loop: Loop, seed: int) -> Tensor:
        """(S, N, K) of the backend's groups, on the sequences that the loop may see.

        Sequences are drawn for one after another and a group's change is the sum of its members', so the file
        of single linears holds every case.
        """
        single = load_file(self._sensitivity_file(seed))["differences"][: loop.sequences]
        row = self.backend.rows
        groups = [[row[member.name] for member in group.members] for group in backend.plan.groups]
        return torch.stack([single[:, members].sum(dim=1) for members in groups], dim=1)

    # ------------------------------------------------------------------- runs

    def do(self, run: AblationRun) -> dict[str, Any]:
        """Search, and measure what was found on the evaluation text."""
        loop, config = run.loop, self.config
        backend = self._grouped if loop.grouped else self.backend
        problem = self._problem(backend)
        printed = run.kind == "printed"
        data = self.data.search.select(slice(0, loop.sequences))
        # The printed algorithm chooses nothing; one sequence keeps that part of the search short.
        selection = self.data.selection.select(slice(0, 1)) if printed else self.data.selection
        backend.use_differences(None if printed else self._differences(backend, loop, run.seed))
        start = config.printed_prior if printed else "fisher"
        inputs: dict[str, Any] = backend.search_inputs(
            problem, start, 1.0 if printed else config.prior_strength
        )
        settings: dict[str, Any] = {
            "steps": loop.steps,
            "samples": loop.samples,
            "lr": loop.lr,
            "tau": (1.0, loop.tau),
            "antithetic": loop.antithetic,
            "seed": run.seed,
        }
        searcher = PlainRCO(**settings) if printed else RCO(**settings, refine=config.refine)
        last: dict[str, Any] = {}
        with backend.objective(data, selection) as objective:
            result = searcher.search(problem, objective, on_checkpoint=last.update, **inputs)
        choices = np.asarray(result.allocation)
        found = {"search": choices}
        if printed:
            liked = torch.log_softmax(
                last["process"]["optimizer"]["logits"] + problem.log_allowed, dim=-1
            ).numpy()
            found = {"printed": choices, "spent": spend(problem, choices, liked)}
        return {
            "key": loop.key,
            "loop": loop.to_dict(),
            "seed": run.seed,
            "measured": {name: self._measure(backend, choices) for name, choices in found.items()},
            "tokens": self._tokens(run, result),
            "seconds": result.history[-1].seconds if printed else result.seconds,
            "chosen_from": "final" if printed else result.chosen_from,
            "selection_loss": None if printed else result.loss,
        }

    def _problem(self, backend: Compression) -> AllocationProblem:
        return backend.problem(Budget.parse(bits=self.config.bits))

    def _tokens(self, run: AblationRun, result: SearchResult) -> int:
        """Tokens forwarded, a backward counted as two; the search's with its sensitivities."""
        if run.kind == "printed":
            steps = result.history[-1]
            return (steps.forwards + 2 * steps.backwards) * self.config.length
        sensitivities = min(self.config.sensitivity, run.loop.sequences)
        return (result.forwards + 2 * result.backwards + 3 * sensitivities) * self.config.length

    def _measure(self, backend: Compression, choices: np.ndarray) -> dict[str, Any]:
        """KL and perplexity of an allocation, as one of single linears."""
        row = self.backend.rows
        single = np.empty(len(row), dtype=np.int64)
        for group, choice in zip(backend.plan.groups, choices.tolist(), strict=True):
            single[[row[member.name] for member in group.members]] = choice
        key = single.tobytes()
        if key not in self._known:
            problem = self._problem(self.backend)
            judged = self._evaluator.row("", problem.allocation(single), problem)
            if not judged["within_budget"]:
                raise RuntimeError("Internal error: a search left its budget; please report this.")
            self._known[key] = {
                "kl": judged["kl"],
                "perplexity": judged["perplexity"],
                "bits": judged["bits"],
                "widths": [self.backend.plan.widths[choice] for choice in single.tolist()],
            }
        return self._known[key]

    def references(self) -> dict[str, dict[str, Any]]:
        """What needs no search: neighbouring widths in layer order, and the knapsack of the sensitivities."""
        problem = self._problem(self.backend)
        interpolation = spend(problem, uniform_allocation(problem), layer_order(problem))
        differences = load_file(self._sensitivity_file(0))["differences"]
        losses = predicted_losses(differences, self.backend.relative_errors()).numpy()
        proxy = spend(problem, solve_mckp(-losses, problem).allocation, -losses)
        return {
            "uniform interpolation": self._measure(self.backend, interpolation),
            "proxy knapsack": self._measure(self.backend, proxy),
        }


def _centre(config: AblationConfig) -> Loop:
    return Loop(
        steps=config.steps,
        samples=config.samples,
        lr=config.lr,
        tau=config.tau,
        sequences=config.sequences,
    )


def _quantize_config(config: AblationConfig) -> QuantizeConfig:
    return QuantizeConfig(
        model=config.model,
        bits=config.bits,
        format="none",
        store=config.store or config.out / "candidates",
        widths=config.widths,
        group_size=config.group_size,
        data=config.data,
        sequences=config.sequences,
        sensitivity=config.sensitivity,
        selection=config.selection,
        evaluation=config.evaluation,
        length=config.length,
        device=config.device,
        compute=config.compute,
    )


def _ties(backend: Compression) -> list[str]:
    """Kinds that engines fuse, of which the model has at least two."""
    kinds = {info.kind for info in backend.plan.linears}
    fused = ([kind for kind in group if kind in kinds] for group in backend.loaded.layout.fused_groups)
    return [",".join(group) for group in fused if len(group) > 1]


def _passes(config: AblationConfig, run: AblationRun) -> int:
    """Forward passes of a run, a backward counted as two."""
    loop = 3 * run.loop.steps * run.loop.samples
    if run.kind == "printed":
        return loop + 2 * config.evaluation
    return loop + config.selection * (MOST_CANDIDATES + config.refine) + config.evaluation


def _record(plan: AblationPlan, bench: _Bench, runs: list[dict[str, Any]]) -> dict[str, Any]:
    sweeps = summarize(plan.sweeps, runs)
    settings = {name: value for name, value in plan.config.identity().items() if name != "store"}
    settings["device"] = str(bench.backend.loaded.device)
    return {
        "study": "ablations",
        "command": _command(plan.config),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment(),
        "settings": {**settings, "seeds": plan.config.seeds, "threads": plan.config.threads},
        "centre": _centre(plan.config).to_dict(),
        "linears": len(bench.backend.plan.linears),
        "core_minutes": sum(run["seconds"] for run in runs) * plan.config.threads / 60,
        "references": bench.references(),
        "sweeps": sweeps,
        "recommended": recommend(sweeps, _centre(plan.config)),
        "runs": runs,
    }


def _command(config: AblationConfig) -> str:
    """A command that makes the same record."""
    flags = []
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if field.name in ("out", "store", "resume", "sweep") or value == default:
            continue
        if config.quick and field.name in _QUICK:
            continue
        name = field.name.replace("_", "-")
        flags.append(f"--{name}" if value is True else f"--{name} {value}")
    return " ".join(["python benchmarks/ablations.py", *(f"--sweep {name}" for name in config.sweep), *flags])


def ablations(config: AblationConfig, switches: Switches) -> None:
    """Sweep the settings of the search one by one: the nine ablations of the paper, on any model."""
    if switches.dry_run:
        plan = plan_ablations(config)
        typer.echo(
            f"{len(plan.runs)} runs for {len(plan.sweeps)} sweeps ({', '.join(s.name for s in plan.sweeps)}), "
            f"about {plan.seconds / 60:.0f} minutes on one core of this machine"
        )
        return
    with interruptible(), make_progress(switches.quiet or switches.as_json) as progress:
        record, written = run_ablations(config, progress)
    typer.echo(json.dumps(record) if switches.as_json else ablation_markdown(record))
    for path in written:
        typer.echo(f"wrote {path}", err=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(command_from_config(AblationConfig, ablations))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; 0 for success, 1 for failure, 2 for wrong usage."""
    return run_command(typer.main.get_command(app), arguments, "ablations.py")


if __name__ == "__main__":
    sys.exit(main())
