"""Measurements of models: perplexity, divergence from a reference, tasks, and file sizes."""

from __future__ import annotations

from rco.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
