"""From a model and a budget to a checkpoint: plan, candidates, sensitivities, search, tuning, evaluation, export.

Every stage writes its result to the run's folder and is skipped if the result exists, so an interrupted run
continues where it stopped and ends with the same result.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rco.atomic_files import write_tensors_atomic
from rco.compression.compression import Compression
from rco.compression.second_order import diagonal_sequences
from rco.core.objective import Objective
from rco.core.problem import Allocation, AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.data.calibration import DataSplits
from rco.distributed import join, serve, shared
from rco.models.loading import LoadedModel
from rco.pipeline.checkpoints import export_checkpoint
from rco.pipeline.configs import CompressConfig, PruneConfig
from rco.pipeline.describe import describe
from rco.pipeline.evaluate_allocations import AllocationEvaluator
from rco.pipeline.planning import Planned, build_data, export_format, open_run, plan_compression
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.reference_allocations import reference_allocations
from rco.pipeline.searchers import configured_searcher, impq_pair
from rco.pipeline.tune_stage import load_tuned, tune_stage
from rco.report import build_report
from rco.runs import RunDirectory, RunError

__all__ = [
    "Outcome",
    "compress",
    "evaluate_result",
    "make_candidates",
    "measure_options",
    "method_label",
    "write_checkpoint",
]


@dataclass(frozen=True)
class Outcome:
    """Plan, results and paths of a finished run."""

    planned: Planned
    folder: Path
    result: SearchResult
    metrics: dict[str, Any]
    checkpoint: Path | None


def compress(
    config: CompressConfig,
    progress: Progress | None = None,
    given: LoadedModel | None = None,
    *,
    temporary: bool = False,
) -> Outcome | None:
    """Run the whole job, or its remaining stages with ``config.resume``. None on ranks other than 0.

    Args:
        config: Settings of the job.
        progress: Receives stages and steps.
        given: A model in memory, instead of the one named in ``config``.
        temporary: Whether the run's folder is about to be removed: no checkpoint and no report are written to it.
    """
    progress = progress or Silent()
    with join(config.rank_timeout) as ranks:
        planned = plan_compression(config, progress, ranks, given)
        compression = planned.compression
        progress.message(_expectation(planned))
        # Unsuitable text or candidates fail before the run's folder is made.
        data = build_data(config, planned.loaded.tokenizer)
        ranks.require_same("model or data", (planned.loaded.fingerprint, data.search.fingerprint))
        compression.check_store(data.search)
        if ranks.first:
            return _lead(config, planned, data, progress, temporary)
        tasks: dict[str, Callable[[], object]] = {
            "candidates": lambda: compression.candidates(data.search),
            "sensitivities": lambda: _differences(config, compression, data),
        }
        _assist(config, planned, data, tasks)
        return None


def _lead(
    config: CompressConfig, planned: Planned, data: DataSplits, progress: Progress, temporary: bool
) -> Outcome:
    compression, ranks = planned.compression, planned.ranks
    with open_run(config, planned.folder, planned.loaded) as run:
        run.write_problem(planned.problem)
        make_candidates(planned, data, run)
        known = measure_options(config, planned, data, run, progress)
        result = _search(config, planned, data, run, progress, known)
        run.update_metrics(describe(config, planned, result, run.metrics))
        with _timed(run, "tuning") if "tuning" not in run.metrics else nullcontext():
            final = tune_stage(config, planned, data, result.allocation, run, progress)
        references = reference_allocations(compression, planned.problem, result, progress)
        evaluate_result(planned, final, data, references, result, run, progress)
        if isinstance(config, PruneConfig) and config.by_domain:
            _by_domain(config, planned, data, run, progress)
        ranks.dismiss()
        written = None
        if not temporary:
            written = write_checkpoint(config, final, data, result, run, progress)
            build_report([run], run.folder / "report.html")
        return Outcome(final, run.folder, result, run.metrics, written)


# ------------------------------------------------------------------------ before the search


def make_candidates(planned: Planned, data: DataSplits, run: RunDirectory) -> None:
    """Make packed options in the store; does nothing if experts are only kept or removed."""
    compression = planned.compression
    if compression.plan.removes_only:
        return
    with _timed(run, "candidates"):
        compression.count_visits(data.search)
        planned.ranks.call("candidates")
        compression.candidates(data.search)


def measure_options(
    config: CompressConfig, planned: Planned, data: DataSplits, run: RunDirectory, progress: Progress
) -> dict[str, Tensor]:
    """Set the compression's sensitivities, read from the run if present; returns tables for the objective."""
    compression = planned.compression
    if compression.plan.removes_only:
        assert isinstance(config, PruneConfig)
        _score_experts(config, compression, data, run)
        return {}

    def differences() -> Tensor:
        planned.ranks.call("sensitivities")
        return _differences(config, compression, data, progress)

    found = _kept(run, "differences", "sensitivities.safetensors", differences)
    layer_errors = None
    mxmoe = config.searcher == "mxmoe"
    if compression.plan.experts:
        part = data.search.select(slice(0, config.sensitivity))
        layer_errors = _kept(
            run,
            "layer_errors",
            "layer_errors.safetensors",
            lambda: compression.layer_errors(part, experts_only=mxmoe),
        )
    diagonal = None
    if compression.has_diagonal_losses:
        some = data.search.select(slice(0, diagonal_sequences(config.sensitivity)))
        diagonal = _kept(
            run,
            "diagonal_losses",
            "diagonal_losses.safetensors",
            lambda: compression.diagonal_losses(some, seed=config.seed),
        )
    compression.use_differences(found, layer_errors, diagonal)
    return {"layer_errors": layer_errors} if mxmoe and layer_errors is not None else {}


def _kept(run: RunDirectory, name: str, file: str, measure: Callable[[], Tensor]) -> Tensor:
    """A table from a file of the run; measured and written if missing."""
    saved = run.folder / file
    if not saved.exists():
        with _timed(run, "sensitivities"):
            found = measure()
        write_tensors_atomic(saved, {name: found})
    return load_file(saved)[name]


def _differences(
    config: CompressConfig, compression: Compression, data: DataSplits, progress: Progress | None = None
) -> Tensor:
    return compression.differences(
        data.search.select(slice(0, config.sensitivity)),
        seed=config.seed,
        on_progress=progress.stage("sensitivities") if progress is not None else None,
    )


def _score_experts(
    config: PruneConfig, compression: Compression, data: DataSplits, run: RunDirectory
) -> None:
    saved = run.metrics.get("scores")
    if saved is not None:
        compression.set_scores(saved)
        return
    with _timed(run, "scores"):
        compression.score_experts(data.search, sensitivity=_sensitivity(config))
    scores = {name: [layer.tolist() for layer in layers] for name, layers in compression.scores.items()}
    run.update_metrics({"scores": scores})


def _sensitivity(config: PruneConfig) -> int:
    """Number of sequences for gradients of experts; 0 if the search starts from another score."""
    return config.sensitivity if config.start == "fisher" else 0


def _expectation(planned: Planned) -> str:
    """Message with the feasible budgets, and the expected memory and time."""
    expected, budget = planned.estimate, planned.budget
    low, high = planned.compression.budget_range(budget.kind)
    asked = str(budget) if budget.kind != "experts" else budget.argument.strip("`")
    text = (
        f"requested {asked}; {budget.kind.replace('_', ' ')} from {low} to {high} are feasible; "
        f"memory about {expected.memory / 2**30:.2f} GiB"
    )
    if expected.on_gpu:
        text += f" on the GPU, {expected.search_memory / 2**30:.2f} GiB while searching"
        if not planned.compression.plan.removes_only:
            place = "on the GPU" if expected.residency == "resident" else "in host memory"
            text += f"; candidates {place}"
    left_out = planned.compression.plan.not_for_experts
    if left_out:
        text += f"; experts do not take {', '.join(left_out)}, which round inputs"
    return f"{text}; time about {expected.seconds / 60:.1f} minutes"


# ------------------------------------------------------------------------ the search


def _search(
    config: CompressConfig,
    planned: Planned,
    data: DataSplits,
    run: RunDirectory,
    progress: Progress,
    known: Mapping[str, Tensor],
) -> SearchResult:
    """The run's result, from a search or, if already done, from its file.

    ``known`` are tables for the objective (:meth:`rco.core.objective.Objective.table`).
    """
    if run.finished:
        found, groups = run.result, planned.problem.num_groups
        if len(found.allocation) != groups:
            raise RunError(
                f"The allocation in {run.folder} has {len(found.allocation)} groups, but the model has {groups}: "
                "it belongs to another model. Remove the folder, or choose another one."
            )
        return found
    compression, device = planned.compression, planned.loaded.device
    own = {"pair": impq_pair(compression.plan, planned.problem), "margin": compression.refinement_margin}
    searcher = configured_searcher(config, own)
    with _timed(run, "search"), _shared_objective(planned, data) as objective:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # so that the peak excludes memory cached by earlier stages
            torch.cuda.reset_peak_memory_stats(device)
        result = _run_search(
            run,
            searcher,
            planned.problem,
            objective.with_tables(**known),
            _search_inputs(config, planned),
            progress,
            lambda units: compression.describe_cost(planned.budget.kind, units),
        )
        if device.type == "cuda":
            measured = torch.cuda.max_memory_reserved(device)
            expected = planned.estimate.search_memory
            run.update_metrics({"memory": {"search_bytes": measured, "expected_bytes": expected}})
    return result


def _search_inputs(config: CompressConfig, planned: Planned) -> dict[str, Tensor]:
    scale = config.prior_scale if isinstance(config, PruneConfig) else "global"
    return planned.compression.search_inputs(planned.problem, config.start, config.strength, scale)


def _run_search(
    run: RunDirectory,
    searcher: Any,
    problem: AllocationProblem,
    objective: Objective,
    inputs: Mapping[str, Tensor],
    progress: Progress,
    describe_cost: Callable[[float], str],
) -> SearchResult:
    """Search from the newest checkpoint, if there is one, with a checkpoint after every step; write the result.

    ``inputs`` are the search's ``prior`` and ``proxy``, if known; ``describe_cost`` formats an expected cost for
    the progress.
    """
    checkpoint = run.load_checkpoint()
    step, state = checkpoint if checkpoint is not None else (0, None)
    run.truncate_history(step)

    def on_checkpoint(current: dict[str, Any]) -> None:
        run.append_history(current["history"][-1])
        run.save_checkpoint(current["step"], current)

    def on_step(record: StepRecord) -> None:
        spent = record.expected_cost
        # Several budgets are those of blocks, or bits or bytes and then a second one.
        total = None if spent is None else sum(spent[:1] if problem.num_joint > 1 else spent)
        progress.step(record, "" if total is None else describe_cost(total))
        if record.phase == "refine":  # search steps are written with their checkpoint
            run.append_history(record)

    arguments: dict[str, Any] = dict(inputs)
    if "on_checkpoint" in inspect.signature(searcher.search).parameters:
        arguments.update(on_checkpoint=on_checkpoint, resume=state)
    result: SearchResult = searcher.search(problem, objective, on_step=on_step, **arguments)
    run.write_result(result)
    run.clear_checkpoints()
    return result


@contextmanager
def _shared_objective(planned: Planned, data: DataSplits, spec: str | None = None) -> Iterator[Objective]:
    """Rank 0: the objective, computed by all ranks; ``spec`` is the text of ``data``, if not the configured one."""
    planned.ranks.call("search", spec)
    with (
        planned.compression.objective(data.search, data.selection) as objective,
        shared(objective, planned.ranks) as together,
    ):
        yield together


def _assist(
    config: CompressConfig, planned: Planned, data: DataSplits, tasks: Mapping[str, Callable[[], object]]
) -> None:
    """Other ranks: take part in the stages that rank 0 starts."""

    def search(spec: str | None) -> None:
        own = data if spec is None else build_data(config, planned.loaded.tokenizer, spec)
        with planned.compression.objective(own.search, own.selection) as objective:
            serve(objective, planned.ranks)

    def evaluate(listed: Sequence[Listed]) -> None:
        tuned = planned.compression
        for _, allocation, with_tuned in listed:
            if with_tuned and allocation is not None:
                tuned = load_tuned(planned.folder, planned.compression, allocation)
        for _ in _measured(planned, data, listed, tuned):
            pass

    planned.ranks.follow({"search": search, "evaluation": evaluate, "wait": lambda: None, **tasks})


# ------------------------------------------------------------------------ after the search


def evaluate_result(
    planned: Planned,
    final: Planned,
    data: DataSplits,
    references: Sequence[tuple[str, Allocation | None]],
    result: SearchResult,
    run: RunDirectory,
    progress: Progress,
) -> None:
    """Measure named allocations (None is the full model) and the result; each row is written once measured.

    Args:
        planned: The compression with untuned candidates.
        final: The one with tuned weights for the result; the same if they were not tuned.
        data: Text of the run.
        references: Allocations for comparison.
        result: The result of the search.
        run: The run, whose metrics get the rows.
        progress: Receives the count of rows.
    """
    label, tuned = method_label(result), final.compression is not planned.compression
    rows = [{**row, "chosen": row["name"] == label} for row in run.metrics.get("evaluation", [])]
    done = {row["name"] for row in rows}
    listed: list[Listed] = [(name, allocation, False) for name, allocation in references]
    if tuned:
        listed.append((f"{label}, not tuned", result.allocation, False))
    listed.append((label, result.allocation, tuned))
    missing = [entry for entry in listed if entry[0] not in done]
    count = progress.stage("evaluation")
    planned.ranks.call("evaluation", missing)
    with _timed(run, "evaluation"):
        for found in _measured(planned, data, missing, final.compression):
            rows += [{**row, "chosen": row["name"] == label} for row in found]
            run.update_metrics({"evaluation": rows})
            count(len(rows), len(listed))


Listed = tuple[str, Allocation | None, bool]  # name, allocation, whether with tuned weights


def _measured(
    planned: Planned, data: DataSplits, listed: Sequence[Listed], tuned: Compression
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the comparison in their order, as many at a time as there are ranks."""
    evaluator = AllocationEvaluator(planned.compression, data.evaluation)
    ranks = planned.ranks
    for start in range(0, len(listed), ranks.count):
        part = listed[start : start + ranks.count]

        def share(mine: Sequence[int], part: Sequence[Any] = part) -> list[dict[str, Any]]:
            return [
                evaluator.row(part[item][0], part[item][1], planned.problem, tuned if part[item][2] else None)
                for item in mine
            ]

        yield ranks.map(share, len(part))


def _by_domain(
    config: PruneConfig, planned: Planned, data: DataSplits, run: RunDirectory, progress: Progress
) -> None:
    """Search on every domain alone; measure each resulting model on every domain."""
    compression = planned.compression
    moe = dict(run.metrics["moe"])
    measured: dict[str, Any] = dict(moe.get("by_domain", {}))
    evaluator = AllocationEvaluator(compression, data.evaluation)
    domains = list(dict.fromkeys(data.search.domains))
    count = progress.stage("domains")
    before = {name: list(layers) for name, layers in compression.scores.items()}
    with _timed(run, "domains"):
        for position, domain in enumerate(domains):
            if domain not in measured:
                own = build_data(config, planned.loaded.tokenizer, spec=domain)
                compression.score_experts(own.search, sensitivity=_sensitivity(config))
                searcher = configured_searcher(config)
                with _shared_objective(planned, own, domain) as objective:
                    result = searcher.search(planned.problem, objective, **_search_inputs(config, planned))
                measured[domain] = evaluator.row(domain, result.allocation, planned.problem)["by_domain"]
                moe["by_domain"] = measured
                run.update_metrics({"moe": moe})
            count(position + 1, len(domains))
    compression.set_scores(before)


def write_checkpoint(
    config: CompressConfig,
    planned: Planned,
    data: DataSplits,
    result: SearchResult,
    run: RunDirectory,
    progress: Progress,
) -> Path | None:
    """Write the run's checkpoint unless it is there; None if the run has none."""
    format, target = export_format(config), run.folder / "model"
    if format == "none":
        return None
    if "export" in run.metrics and target.exists():
        return target
    count = progress.stage("export")
    count(0, 1)
    with _timed(run, "export"):
        tokens = data.evaluation.tokens[:1]
        run.update_metrics(
            export_checkpoint(planned, result.allocation, format, target, tokens, overwrite=True)
        )
    count(1, 1)
    return target


def method_label(result: SearchResult) -> str:
    """Name of a result in tables."""
    return result.method.upper() if result.method == "rco" else result.method


class _timed:
    """Adds the seconds spent inside to the run's timings."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run, self._name = run, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        timings = dict(self._run.metrics.get("timings", {}))
        timings[self._name] = timings.get(self._name, 0.0) + time.perf_counter() - self._began
        self._run.update_metrics({"timings": timings})
