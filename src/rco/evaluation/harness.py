"""Tasks of lm-eval through its Python API, where it is installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rco.evaluation.statistics import EvaluationError
from rco.models.loading import LoadedModel
from rco.requirements import find_problem

__all__ = ["check_harness", "run_harness"]

# Tasks whose answers are programs; lm-eval runs them on this machine to see whether they work.
_RUNS_CODE = ("humaneval", "mbpp")
_ALLOW_CODE = "HF_ALLOW_CODE_EVAL"


def check_harness(tasks: Sequence[str]) -> None:
    """Refuse what cannot be run, before a model is loaded for it.

    Raises:
        EvaluationError: lm-eval is not installed, or would run generated code and nobody has allowed that.
    """
    if not tasks:
        raise EvaluationError("Name at least one lm-eval task, e.g. arc_easy.")
    missing = find_problem("lm-eval")
    if missing is not None:
        raise EvaluationError(f"Measuring {', '.join(tasks)} needs {missing} JSONL files need nothing.")
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
        tasks: Names as lm-eval knows them, or paths of its YAML files.
        limit: Questions per task; None for all.
        num_fewshot: Examples before each question; None for the task's own number.
        batch_size: Questions at a time.
        seed: For the choice of examples.

    Returns:
        For every task (or group of tasks) that was named its metrics by plain name, each with
        ``<metric>_stderr`` where lm-eval gives one.

    Raises:
        EvaluationError: As :func:`check_harness`, or a task is unknown to lm-eval, or its data cannot be had.
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
            bootstrap_iters=100,  # 0 would drop the standard errors that need no bootstrap, too
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
    # A group such as mmlu comes with its dozens of parts; whoever asked for the group wants its mean.
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
