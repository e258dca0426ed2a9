"""Tasks of lm-eval through its Python API, if installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rco.evaluation.statistics import EvaluationError
from rco.models.loading import LoadedModel
from rco.requirements import find_problem

__all__ = ["check_harness", "run_harness"]

# Tasks whose answers are programs, which lm-eval runs on this machine.
_RUNS_CODE = ("humaneval", "mbpp")
_ALLOW_CODE = "HF_ALLOW_CODE_EVAL"


def check_harness(tasks: Sequence[str]) -> None:
    """Raise for tasks that cannot be run, before a model is loaded.

    Raises:
        EvaluationError: lm-eval is not installed, or would run generated code without permission.
    """
    if not tasks:
        raise EvaluationError("Name at least one lm-eval task, e.g. arc_easy.")
    missing = find_problem("lm-eval")
    if missing is not None:
        raise EvaluationError(f"Measuring {', '.join(tasks)} needs {missing} Tasks in JSONL files do not.")
    runs_code = _running_code(tasks)
    if runs_code and os.environ.get(_ALLOW_CODE) != "1":
        raise EvaluationError(
            f"{', '.join(runs_code)} run programs that the model writes, on this machine. In a sandbox, allow it "
            f"with {_ALLOW_CODE}=1; otherwise drop them from the tasks."
        )


def _running_code(tasks: Sequence[str]) -> list[str]:
    return [task for task in tasks if task.startswith(_RUNS_CODE)]


def run_harness(
    loaded: LoadedModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Measure lm-eval tasks on a model in memory.

    Args:
        loaded: The model, with its tokenizer.
        tasks: Names of lm-eval tasks, or paths of its YAML files.
        limit: Questions per task; None for all.
        num_fewshot: Examples before each question; None for the task's own number.
        batch_size: Questions at a time.
        seed: Seed for the choice of examples.

    Returns:
        Metrics by plain name for every named task (or group of tasks), with ``<metric>_stderr`` if lm-eval
        computes one.

    Raises:
        EvaluationError: As :func:`check_harness`, or a task is unknown to lm-eval, or its data are unavailable.
    """
    check_harness(tasks)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)
    try:
        report = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=100,  # 0 would also drop the standard errors that need no bootstrap
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            confirm_run_unsafe_code=bool(_running_code(tasks)),
        )
    except (KeyError, ValueError, ConnectionError, OSError) as error:
        raise EvaluationError(
            f"lm-eval could not run {', '.join(tasks)}: {error}. Check the names with `lm-eval ls tasks`, and that "
            "the data sets are on this machine or the Hub can be reached."
        ) from error
    results = report["results"]
    # For a group such as mmlu, keep its mean and drop its dozens of parts.
    named = [task for task in tasks if task in results] or list(results)
    return {task: _plain(results[task]) for task in named}


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """``acc,none`` becomes ``acc``, ``acc_stderr,none`` becomes ``acc_stderr``; all else is dropped."""
    plain: dict[str, Any] = {}
    for key, value in metrics.items():
        name, metric, _ = key.partition(",")
        if metric and isinstance(value, int | float) and not isinstance(value, bool):
            plain.setdefault(name, value)
    return plain
