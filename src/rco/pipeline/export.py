"""Export of a finished run in any format, without a new search."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from rco.core.problem import Allocation
from rco.pipeline.checkpoints import export_checkpoint, make_exporter
from rco.pipeline.configs import CompressConfig, ExportConfig, PruneConfig, QuantizeConfig
from rco.pipeline.planning import Planned, plan_compression
from rco.pipeline.tune_stage import is_tuned, load_tuned
from rco.runs import RunDirectory, RunError

__all__ = ["export_run", "finished_kind", "plan_export", "plan_finished"]

ConfigT = TypeVar("ConfigT", bound=CompressConfig)


def plan_export(config: ExportConfig) -> tuple[Planned, Allocation, Path]:
    """Model and problem of a run, its allocation and the target folder, all checked.

    Raises:
        RunError: The run is not finished, or its model has changed.
        ValueError: The format is unknown, or does not fit this kind of run.
    """
    run = RunDirectory.open(config.run)
    make_exporter(config.format, finished_kind(run))
    planned, _ = plan_finished(run, config.device)
    allocation = run.result.allocation
    if is_tuned(run):
        tuned = load_tuned(run.folder, planned.compression, allocation)
        planned = dataclasses.replace(planned, compression=tuned)
    return planned, allocation, config.out or run.folder / config.format


def finished_kind(run: RunDirectory) -> str:
    """Kind of a finished run.

    Raises:
        RunError: The run is not finished.
    """
    kind = run.metrics.get("kind")
    if not run.finished or kind is None:
        raise RunError(f"{run.folder} is not finished: continue it with `resume=True` first.")
    return str(kind)


def plan_finished(run: RunDirectory, device: str) -> tuple[Planned, CompressConfig]:
    """Model, problem and candidates of a finished run, and its settings.

    Raises:
        RunError: The run is not finished, or its model has changed.
    """
    settings = QuantizeConfig if finished_kind(run) == "quantization" else PruneConfig
    config = _settings(settings, run, device)
    planned = plan_compression(config)
    if not planned.compression.plan.removes_only:
        planned.compression.open_store(run.metrics.get("candidates"))
    if planned.loaded.fingerprint != run.metrics["model"]["fingerprint"]:
        raise RunError(
            f"{run.config['model']} is not the model of {run.folder}: its weights have changed. Restore them, "
            "or run the search again."
        )
    return planned, config


def export_run(config: ExportConfig) -> dict[str, Any]:
    """Write the run's allocation in ``config.format``; returns the export, certificate and engine sections."""
    planned, allocation, out = plan_export(config)
    return export_checkpoint(planned, allocation, config.format, out, overwrite=config.overwrite)


def _settings(cls: type[ConfigT], run: RunDirectory, device: str) -> ConfigT:
    """The run's configuration, with another device."""
    known = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in run.config.items() if name in known}
    if values["tau"] is not None:
        values["tau"] = tuple(values["tau"])
    for name in ("store", "imatrix", "cost_table"):
        if values.get(name):
            values[name] = Path(values[name])
    return cls(**{**values, "out": run.folder, "device": device})
