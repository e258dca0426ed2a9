"""``rco bench ablations``: the sweeps of :mod:`rco.studies.ablation_sweeps`, run on one quantization problem.

One store of candidates and one file of sensitivities per seed serve every run. A run is one loop with one seed,
either Algorithm 1 as printed or the whole search. Each run leaves a file: a study that was stopped goes on with
what is missing, and seeds or sweeps can be added later.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.second_order import predicted_losses
from rco.core.knapsack import solve_mckp
from rco.core.plain import PlainRCO
from rco.core.problem import AllocationProblem
from rco.core.refine import layer_order, spend, uniform_allocation
from rco.core.result import SearchResult
from rco.core.search import MOST_CANDIDATES, RCO
from rco.data.calibration import build_splits
from rco.folders import make_folder, write_tensors_atomic
from rco.pipeline.configs import AblationConfig, QuantizeConfig
from rco.pipeline.estimate import forward_seconds
from rco.pipeline.jobs import run_jobs
from rco.pipeline.judge import Judge
from rco.pipeline.planning import plan_compression, plan_groups
from rco.pipeline.progress import Progress, Silent
from rco.runs import RunDirectory, environment
from rco.studies.ablation_report import recommend, summarize, write_ablations
from rco.studies.ablation_sweeps import Loop, Sweep, make_sweeps

__all__ = ["AblationPlan", "AblationRun", "plan_ablations", "run_ablations"]

Kind = Literal["printed", "search"]

_QUICK: dict[str, Any] = {
    "seeds": 1, "steps": 8, "samples": 4, "refine": 4, "sequences": 16, "sensitivity": 4, "selection": 4,
    "evaluation": 4, "length": 64,
}  # fmt: skip


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
    with open_run(config.out, config.identity()) as folder:
        config = dataclasses.replace(config, store=config.store or folder.folder / "candidates")
        torch.set_num_threads(config.threads * config.workers)
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
        return record, write_ablations(folder.folder, record, _formats(progress))


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
        self._judge = Judge(self.backend, self.data.evaluation)
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
        beliefs: dict[str, Any] = backend.beliefs(problem, start, 1.0 if printed else config.prior_strength)
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
            result = searcher.search(problem, objective, on_checkpoint=last.update, **beliefs)
        choices = np.asarray(result.allocation)
        found = {"search": choices}
        if printed:
            liked = torch.log_softmax(last["process"]["logits"] + problem.log_allowed, dim=-1).numpy()
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
            judged = self._judge.row("", problem.allocation(single), problem)
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


def _formats(progress: Progress) -> Sequence[str]:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        progress.message("The plots are left out: they need matplotlib (pip install 'rco[plot]').")
        return ()
    return ("png", "svg")


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
    return " ".join(["rco bench ablations", *(f"--sweep {name}" for name in config.sweep), *flags])
