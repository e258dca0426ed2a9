"""Tuning of a finished run, without a new search."""

from __future__ import annotations

from typing import Any

from rco.pipeline.compress import evaluate_result, method_label, write_checkpoint
from rco.pipeline.configs import QuantizeConfig, TuneConfig
from rco.pipeline.export import plan_finished
from rco.pipeline.planning import Planned, build_data
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.tune_stage import TuningPlan, plan_tuning, tune_stage
from rco.report import build_report
from rco.runs import RunDirectory, RunError

__all__ = ["expected_tuning", "tune_run"]


def tune_run(config: TuneConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Tune a finished run's weights, measure them, and write its checkpoint and report again.

    The weights that the search chose are tuned. Of two tunings of a run the better one stays.

    Returns:
        The run's metrics.

    Raises:
        RunError: The run is not a finished quantization, or its model has changed.
    """
    progress = progress or Silent()
    with RunDirectory.open(config.run, write=True) as run:
        planned, settings = _plan(run, config)
        result, data = run.result, build_data(settings, planned.loaded.tokenizer)
        if not config.resume:
            run.clear_checkpoints()
        final = tune_stage(
            settings,
            planned,
            data,
            result.allocation,
            run,
            progress,
            mode=config.tune,
            tokens=config.tune_tokens,
            again=True,
        )
        label, exported = method_label(result), "export" in run.metrics
        run.drop_metrics("export")
        rows = [row for row in run.metrics.get("evaluation", []) if not row["name"].startswith(label)]
        run.update_metrics({"evaluation": rows})
        evaluate_result(planned, final, data, [], result, run, progress)
        if exported:
            write_checkpoint(settings, final, data, result, run, progress)
        build_report([run], run.folder / "report.html")
        return run.metrics


def expected_tuning(config: TuneConfig) -> TuningPlan | None:
    """What :func:`tune_run` would do, and the memory and time that it would take; None: nothing."""
    run = RunDirectory.open(config.run)
    planned, settings = _plan(run, config)
    _, weights = planned.compression.deployed(run.result.allocation)
    return plan_tuning(settings, planned.compression, weights, mode=config.tune, tokens=config.tune_tokens)


def _plan(run: RunDirectory, config: TuneConfig) -> tuple[Planned, QuantizeConfig]:
    planned, settings = plan_finished(run, config.device)
    if not isinstance(settings, QuantizeConfig):
        raise RunError(f"{run.folder} is a run of pruning: only quantized weights can be tuned.")
    return planned, settings
