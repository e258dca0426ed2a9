"""What every kind of compression shares: a checked plan, and the stages that only differ in their backend."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rco.compression.base import Backend, Budget
from rco.core.problem import Allocation, AllocationProblem
from rco.core.protocols import Objective
from rco.core.result import SearchResult, StepRecord
from rco.data.calibration import DataSplits, build_splits
from rco.data.sources import resolve_source
from rco.distributed import Ranks, serve, shared
from rco.models.files import read_config
from rco.models.loading import LoadedModel, load_model, locate_model, refuse_quantized
from rco.models.spread import Spread
from rco.pipeline.configs import CompressConfig
from rco.pipeline.estimate import Estimate
from rco.pipeline.judge import Judge
from rco.pipeline.progress import Progress
from rco.pipeline.searchers import configured_searcher
from rco.runs import RunDirectory

__all__ = [
    "Outcome",
    "Planned",
    "assist",
    "build_data",
    "check_sources",
    "check_used",
    "describe_model",
    "judge_all",
    "load_for",
    "method_label",
    "open_run",
    "run_folder",
    "run_search",
    "search_stage",
    "shared_objective",
    "slug",
    "timed",
]

BackendT = TypeVar("BackendT", bound=Backend)


@dataclass(frozen=True)
class Planned(Generic[BackendT]):
    """A compression that has been checked as far as it can be without work."""

    loaded: LoadedModel
    backend: BackendT
    problem: AllocationProblem
    budget: Budget
    folder: Path
    estimate: Estimate
    ranks: Ranks = field(default_factory=Ranks, kw_only=True)


@dataclass(frozen=True)
class Outcome:
    """A finished run: its plan, what was found and measured, and where the files are."""

    planned: Planned[Any]
    folder: Path
    result: SearchResult
    metrics: dict[str, Any]
    report: Path
    checkpoint: Path | None


class timed:
    """Adds the seconds spent inside to the run's timings."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run, self._name = run, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        timings = dict(self._run.metrics.get("timings", {}))
        timings[self._name] = timings.get(self._name, 0.0) + time.perf_counter() - self._began
        self._run.update_metrics({"timings": timings})


def run_folder(config: CompressConfig, budget: Budget, prefix: str = "") -> Path:
    """Where a run goes: what the user said, or a name made of model and budget."""
    suffix = "-uniform" if getattr(config, "uniform", False) else ""
    name = f"{prefix}{Path(config.model).name}-{budget.kind}-{config.requested}{suffix}"
    return config.out or Path("runs") / slug(name)


def load_for(config: CompressConfig, ranks: Ranks, given: LoadedModel | None = None) -> LoadedModel:
    """The model on this rank's device, or divided among its GPUs; the one that was passed, if any."""
    if given is not None:
        return given
    if config.device_map != "none" and config.device != "cuda":
        raise ValueError(
            f"`device_map` divides a model among GPUs: add `device='cuda'`, got {config.device}."
        )
    folder, gguf = locate_model(config.model)
    if gguf is None:
        refuse_quantized(read_config(folder), config.model)
    spread = None if config.device_map == "none" else Spread(config.device_map, ranks.gpus)
    return load_model(
        config.model,
        dtype=config.dtype,
        device=ranks.device(config.device, spread is not None),
        spread=spread,
    )


def open_run(
    config: CompressConfig, folder: Path, given: LoadedModel | None = None
) -> AbstractContextManager[RunDirectory]:
    """The run's folder: a new one, or with ``config.resume`` the one that is there."""
    identity = config.identity()
    if given is not None and given.path is None:  # no name tells one model in memory from another
        identity["weights"] = given.fingerprint
    return (RunDirectory.resume if config.resume else RunDirectory.create)(folder, identity)


def check_sources(config: CompressConfig) -> None:
    """Refuse text that cannot be found, before the model is loaded."""
    for spec in (config.data, config.eval_data):
        if spec is not None:
            resolve_source(spec)


def build_data(config: CompressConfig, tokenizer: Any, spec: str | None = None) -> DataSplits:
    """Search, selection and evaluation text; ``spec`` replaces the calibration text."""
    return build_splits(
        spec if spec is not None and spec != str(config.data) else config.data,
        tokenizer,
        search=config.sequences,
        selection=config.selection,
        evaluation=config.evaluation,
        length=config.length,
        seed=config.seed,
        evaluation_spec=config.eval_data or (config.data if spec else None),
    )


def run_search(
    run: RunDirectory,
    searcher: Any,
    problem: AllocationProblem,
    objective: Objective,
    beliefs: Mapping[str, Tensor | None],
    progress: Progress,
    describe_cost: Callable[[float], str],
) -> SearchResult:
    """Search with a checkpoint after every step, from the newest checkpoint if there is one; keep the result.

    ``beliefs`` are the search's ``prior`` and ``proxy``, where they are known; ``describe_cost`` puts an expected
    cost into words for the progress.
    """
    checkpoint = run.load_checkpoint()
    step, state = checkpoint if checkpoint is not None else (0, None)
    run.truncate_history(step)

    def on_checkpoint(current: dict[str, Any]) -> None:
        run.append_history(current["history"][-1])
        run.save_checkpoint(current["step"], current)

    def on_step(record: StepRecord) -> None:
        spent = record.expected_cost
        progress.step(record, "" if spent is None else describe_cost(sum(spent)))
        if record.phase == "refine":  # search steps are written with their checkpoint
            run.append_history(record)

    arguments: dict[str, Any] = dict(beliefs)
    if "on_checkpoint" in inspect.signature(searcher.search).parameters:
        arguments.update(on_checkpoint=on_checkpoint, resume=state)
    result: SearchResult = searcher.search(problem, objective, on_step=on_step, **arguments)
    run.write_result(result)
    run.clear_checkpoints()
    return result


def search_stage(
    config: CompressConfig,
    planned: Planned[Any],
    data: DataSplits,
    beliefs: Callable[[], Mapping[str, Tensor | None]],
    run: RunDirectory,
    progress: Progress,
    known: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> SearchResult:
    """The run's result: searched for, or read if the search is done.

    ``beliefs`` gives the search's ``prior`` and ``proxy``, where they are known. ``known`` are attributes that the
    objective gets: what a method reads of the model beside its loss. ``own`` are settings for whichever method has
    them.
    """
    if run.finished:
        return run.result
    searcher = configured_searcher(config, own)
    device = planned.loaded.device
    with timed(run, "search"), shared_objective(planned, data) as objective:
        for name, value in (known or {}).items():
            setattr(objective, name, value)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what earlier stages have left is not this one's
            torch.cuda.reset_peak_memory_stats(device)
        result = run_search(
            run,
            searcher,
            planned.problem,
            objective,
            beliefs(),
            progress,
            lambda units: planned.backend.describe_cost(planned.budget.kind, units),
        )
        if device.type == "cuda":
            measured = torch.cuda.max_memory_reserved(device)
            expected = planned.estimate.search_memory
            run.update_metrics({"memory": {"search_bytes": measured, "expected_bytes": expected}})
    return result


@contextmanager
def shared_objective(planned: Planned[Any], data: DataSplits, spec: str | None = None) -> Iterator[Objective]:
    """Rank 0: the objective, answered by all ranks; ``spec`` is what the data were built from, if not as usual."""
    planned.ranks.call("search", spec)
    with (
        planned.backend.objective(data.search, data.selection) as objective,
        shared(objective, planned.ranks) as together,
    ):
        yield together


def assist(
    config: CompressConfig,
    planned: Planned[Any],
    data: DataSplits,
    tasks: Mapping[str, Callable[[], object]] | None = None,
) -> None:
    """The other ranks: take part in the shared stages, and in a job's own ``tasks``, as rank 0 calls for them."""

    def search(spec: str | None) -> None:
        own = data if spec is None else build_data(config, planned.loaded.tokenizer, spec)
        with planned.backend.objective(own.search, own.selection) as objective:
            serve(objective, planned.ranks)

    def evaluate(listed: Sequence[tuple[str, Allocation | None]]) -> None:
        for _ in _measured(planned, data, listed):
            pass

    planned.ranks.follow({"search": search, "evaluation": evaluate, **(tasks or {})})


def judge_all(
    planned: Planned[Any],
    data: DataSplits,
    wanted: Sequence[tuple[str, Allocation | None]],
    result: SearchResult,
    run: RunDirectory,
    progress: Progress,
) -> None:
    """Evaluate named allocations (None is the full model) and the result; each row is kept as it is measured."""
    rows = list(run.metrics.get("evaluation", []))
    done = {row["name"] for row in rows}
    listed = [*wanted, (method_label(result), result.allocation)]
    missing = [entry for entry in listed if entry[0] not in done]
    count = progress.stage("evaluation")
    planned.ranks.call("evaluation", missing)
    with timed(run, "evaluation"):
        for found in _measured(planned, data, missing):
            rows += [{**row, "chosen": row["name"] == method_label(result)} for row in found]
            run.update_metrics({"evaluation": rows})
            count(len(rows), len(listed))


def _measured(
    planned: Planned[Any], data: DataSplits, listed: Sequence[tuple[str, Allocation | None]]
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the comparison in their order, as many at a time as there are ranks."""
    judge = Judge(planned.backend, data.evaluation)
    ranks = planned.ranks
    for start in range(0, len(listed), ranks.count):
        part = listed[start : start + ranks.count]

        def share(mine: Sequence[int], part: Sequence[Any] = part) -> list[dict[str, Any]]:
            return [judge.row(part[item][0], part[item][1], planned.problem) for item in mine]

        yield ranks.map(share, len(part))


def method_label(result: SearchResult) -> str:
    """What tables call a result."""
    return result.method.upper() if result.method == "rco" else result.method


def check_used(budget: Budget, used: int, allowed: int | Fraction) -> None:
    """Refuse a checkpoint that takes more than was asked for; the search makes that impossible."""
    if used > allowed:
        raise RuntimeError(
            f"Internal error: the checkpoint takes {used:,} where {budget} allow {float(allowed):,.0f}; "
            "please report this."
        )


def describe_model(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """The model, for the run's metrics."""
    return {
        "name": name,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "blocks": len(loaded.layout.blocks(loaded.model)),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "fingerprint": loaded.fingerprint,
    }


def slug(text: str) -> str:
    """A folder's name from any text."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in text)
