"""Measurements of models: perplexity, divergence from a reference, tasks, and file sizes."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "EvaluationError": "rco.evaluation.statistics",
    "ReferenceStates": "rco.evaluation.reference_states",
    "Task": "rco.evaluation.tasks",
    "average_bits": "rco.evaluation.size",
    "checkpoint_size": "rco.evaluation.size",
    "evaluate_task": "rco.evaluation.tasks",
    "harness_available": "rco.evaluation.harness",
    "load_task": "rco.evaluation.tasks",
    "measure_divergence": "rco.evaluation.divergence",
    "measure_divergence_and_perplexity": "rco.evaluation.divergence",
    "measure_perplexity": "rco.evaluation.perplexity",
    "recovery": "rco.evaluation.statistics",
    "run_harness": "rco.evaluation.harness",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(
            f"module 'rco.evaluation' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
