"""Measurements of models side by side: perplexity, KL to a reference, tasks, size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rco.data.calibration import CalibrationSet, build_calibration
from rco.evaluation.divergence import measure_divergence_and_perplexity
from rco.evaluation.harness import check_harness, run_harness
from rco.evaluation.perplexity import measure_perplexity
from rco.evaluation.reference_states import ReferenceStates
from rco.evaluation.size import checkpoint_size
from rco.evaluation.statistics import EvaluationError, recovery
from rco.evaluation.tasks import Task, evaluate_task, load_task
from rco.models.loading import LoadedModel, checkpoint_of, load_model
from rco.models.precision import computing_in, default_compute_dtype
from rco.pipeline.configs import EvaluateConfig
from rco.pipeline.progress import Progress, Silent

__all__ = ["HEADLINES", "evaluate", "headline", "measure_tasks", "read_tasks"]

# Main metric of a task, in order of preference; the two spellings of pass@1 are HumanEval's and MBPP's.
HEADLINES = ("acc", "pass@1", "pass_at_1", "exact_match")


def evaluate(
    config: EvaluateConfig,
    progress: Progress | None = None,
    given: Mapping[str, LoadedModel] | None = None,
) -> list[dict[str, Any]]:
    """One row per model, the reference first.

    Args:
        config: Models and measurements.
        progress: Receives messages.
        given: Models in memory, by their names in ``config``.
    """
    progress, given = progress or Silent(), given or {}
    read_tasks(config.tasks, config.limit)
    names = [path if path in given else str(checkpoint_of(path)) for path in config.paths]
    if config.reference is not None:
        names = [config.reference, *(name for name in names if name != config.reference)]
    count = progress.stage("evaluation")
    data: CalibrationSet | None = None
    states: ReferenceStates | None = None
    rows: list[dict[str, Any]] = []
    count(0, len(names))
    for position, name in enumerate(names):
        loaded = given.get(name) or load_model(name, dtype=config.dtype, device=config.device)
        with computing_in(loaded.model, default_compute_dtype(loaded.device, loaded.dtype)):
            mine = build_calibration(
                config.data,
                loaded.tokenizer,
                samples=config.sequences,
                length=config.length,
                seed=config.seed,
                part="evaluation",
            )
            if data is not None and mine.fingerprint != data.fingerprint:
                raise ValueError(
                    f"{name} tokenizes the text differently from {names[0]}, so they cannot be compared per token: "
                    "evaluate them one by one."
                )
            data = mine
            if config.reference is not None and name == config.reference:
                states = ReferenceStates.compute(loaded, data, batch_size=config.batch_size)
                row = _row(name, loaded, data, config, states, None)
            else:
                row = _row(name, loaded, data, config, loaded, states)
        rows.append(row)
        count(position + 1, len(names))
    if config.reference is not None:
        for row in rows[1:]:
            share = recovery(row.get("tasks", {}), rows[0].get("tasks", {}), HEADLINES)["average"]
            if share is not None:
                row["recovery"] = share
    return rows


def _row(
    name: str,
    loaded: LoadedModel,
    data: CalibrationSet,
    config: EvaluateConfig,
    states: LoadedModel | ReferenceStates,
    reference: ReferenceStates | None,
) -> dict[str, Any]:
    """Measurements of one model; ``states`` is the model, or its hidden states if they are known."""
    row: dict[str, Any] = {"model": name}
    if reference is None:
        row["perplexity"] = measure_perplexity(states, data, batch_size=config.batch_size)
    else:
        row["kl"], row["perplexity"] = measure_divergence_and_perplexity(
            states, reference, data, batch_size=config.batch_size
        )
    if loaded.path is not None and any(loaded.path.glob("*.safetensors")):
        row["bytes"] = checkpoint_size(loaded.path)["bytes"]
    tasks = measure_tasks(loaded, config.tasks, config.limit, config.seed)
    if tasks:
        row["tasks"] = tasks
    return row


def read_tasks(listed: str | None, limit: int | None) -> tuple[list[Task], list[str]]:
    """Tasks from JSONL files, and names of lm-eval tasks, both checked.

    Raises:
        EvaluationError: A file cannot be read, two files have one name, or lm-eval cannot run a task.
    """
    wanted = [part.strip() for part in (listed or "").split(",") if part.strip()]
    read = [load_task(part, limit=limit) for part in wanted if part.endswith(".jsonl")]
    named = [part for part in wanted if not part.endswith(".jsonl")]
    names = [task.name for task in read]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvaluationError(f"Two task files are named {twice[0]}: rename one of them.")
    if named:
        check_harness(named)
    return read, named


def measure_tasks(loaded: LoadedModel, listed: str | None, limit: int | None, seed: int) -> dict[str, Any]:
    """Results by task: JSONL files are measured here, other names by lm-eval."""
    read, named = read_tasks(listed, limit)
    tasks = {task.name: evaluate_task(loaded, task) for task in read}
    if named:
        tasks.update(run_harness(loaded, named, limit=limit, seed=seed))
    return tasks


def headline(measured: dict[str, Any]) -> float | None:
    """Main metric of a task: accuracy, or the share of working programs; None if it has neither."""
    return next((float(measured[name]) for name in HEADLINES if name in measured), None)
