"""Checkpoints of several sizes from one set of candidates and sensitivities, with a table and a plot of KL by size.

The smallest size has a whole search. Every other one starts from the allocation at the nearest size that is done,
and has a fifth of the first search's evaluations.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rco.atomic_files import write_json_atomic, write_text_atomic
from rco.compression.budget import Budget
from rco.core.moves import repaired
from rco.core.result import SearchResult
from rco.data.calibration import DataSplits
from rco.export.gguf_container import written_file
from rco.pipeline.checkpoints import export_checkpoint
from rco.pipeline.compress import make_candidates, measure_options
from rco.pipeline.configs import FrontierConfig
from rco.pipeline.evaluate_allocations import AllocationEvaluator
from rco.pipeline.planning import Planned, build_data, export_format, open_run, plan_compression
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.searchers import configured_searcher, make_searcher, search_settings, warm_start
from rco.plotting import figure_class, polish, save_figures
from rco.runs import environment

__all__ = ["SHARE", "Frontier", "frontier", "plan_frontier"]

SHARE = 5  # a later size has at most one part in so many of the first search's evaluations
_COLUMNS = ("size", "bytes", "kl", "perplexity", "evaluations", "seconds", "checkpoint")


@dataclass(frozen=True)
class Frontier:
    """A finished frontier.

    Attributes:
        points: One per size, smallest first: bytes asked for and promised, KL, perplexity, evaluations of the
            search (a backward counts as two), the checkpoint's name and certificate, the choices.
        folder: Folder with ``frontier.json``, ``.md``, ``.csv``, ``.svg`` and the checkpoints.
    """

    points: list[dict[str, Any]]
    folder: Path


def plan_frontier(config: FrontierConfig, progress: Progress | None = None) -> list[Planned]:
    """The plan of every size, smallest first; all sizes must be feasible.

    Raises:
        ValueError: A setting is invalid, or a size is not feasible.
    """
    sizes = config.listed()
    if config.out is not None and config.out.suffix == ".gguf":
        raise ValueError(f"A frontier has several files: `out` is a folder, got {config.out}.")
    config = dataclasses.replace(config, out=config.folder())
    first = plan_compression(config.single(sizes[0]), progress)
    compression = first.compression
    budgets = {compression.settled(Budget.parse(size=size)) for size in sizes}
    return [
        dataclasses.replace(first, budget=budget, problem=compression.problem(budget))
        for budget in sorted(budgets, key=lambda budget: budget.amount)
    ]


def frontier(config: FrontierConfig, progress: Progress | None = None) -> Frontier:
    """Search, evaluate and write every size that is not done; then the table and the plot."""
    progress = progress or Silent()
    plans = plan_frontier(config, progress)
    first, folder = plans[0], config.folder()
    compression = first.compression
    data = build_data(config, first.loaded.tokenizer)
    compression.check_store(data.search)
    with open_run(config, folder) as run:
        make_candidates(first, data, run)
        measure_options(config.single(str(int(first.budget.amount))), first, data, run, progress)
        compression.keep_references()
        evaluator = AllocationEvaluator(compression, data.evaluation)
        points: list[dict[str, Any]] = list(run.metrics.get("points", []))
        count = progress.stage("sizes")
        for number, planned in enumerate(plans):
            if int(planned.budget.amount) not in {point["size"] for point in points}:
                points.append(_point(config, planned, data, evaluator, points, folder, progress))
                run.update_metrics({"points": points})
            count(number + 1, len(plans))
        points.sort(key=lambda point: int(point["size"]))
        _write(folder, config.model, points)
        return Frontier(points, folder)


def _point(
    config: FrontierConfig,
    planned: Planned,
    data: DataSplits,
    evaluator: AllocationEvaluator,
    done: Sequence[Mapping[str, Any]],
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Search, evaluation and checkpoint of one size."""
    compression, size = planned.compression, int(planned.budget.amount)
    result = _search(config, planned, data, done, progress)
    row = evaluator.row(str(size), result.allocation, planned.problem)
    costs, groups = compression.costs("size"), np.arange(planned.problem.num_groups)
    return {
        "size": size,
        "bytes": costs.fixed + int(costs.matrix[groups, np.asarray(result.allocation)].sum()),
        **{
            key: row[key] for key in ("bits", "kl", "kl_error", "perplexity", "perplexity_error", "by_domain")
        },
        "evaluations": result.forwards + 2 * result.backwards,
        "seconds": result.seconds,
        "selection_loss": result.loss,
        **_checkpoint(config, planned, result, folder, size),
        "choices": result.allocation.tolist(),
    }


def _search(
    config: FrontierConfig,
    planned: Planned,
    data: DataSplits,
    done: Sequence[Mapping[str, Any]],
    progress: Progress,
) -> SearchResult:
    """A whole search for the first size; after it a short one from the allocation at the nearest size."""
    problem, compression = planned.problem, planned.compression
    inputs = compression.search_inputs(problem, config.start, config.strength)
    searcher = configured_searcher(config)
    start: np.ndarray | None = None
    if done:
        nearest = min(done, key=lambda point: abs(int(point["size"]) - planned.budget.amount))
        before = np.array(nearest["choices"])
        inputs = warm_start(inputs, before, config.strength)
        start = repaired(problem, before)
        settings = search_settings(config)
        limits = {
            "steps": None,
            "refine": None if settings["refine"] else 0,
            "max_evaluations": max(int(done[0]["evaluations"]) // SHARE, 1),
        }
        searcher = make_searcher(config.searcher, {**settings, **limits})
    with compression.objective(data.search, data.selection) as objective:
        result: SearchResult = searcher.search(
            problem, objective, start=start, on_step=progress.step, **inputs
        )
    return result


def _checkpoint(
    config: FrontierConfig, planned: Planned, result: SearchResult, folder: Path, size: int
) -> dict[str, Any]:
    """Write the checkpoint: a folder, or for GGUF one file."""
    format = export_format(config.single(str(size)))
    if format == "none":
        return {"checkpoint": None, "certificate": None}
    target = folder / f"model-{size}"
    written = export_checkpoint(planned, result.allocation, format, target, overwrite=True)
    if format == "gguf":
        file = target.with_suffix(".gguf")
        os.replace(written_file(target), file)
        target.rmdir()
        target = file
    return {"checkpoint": target.name, "certificate": written.get("certificate")}


def _write(folder: Path, model: str, points: Sequence[Mapping[str, Any]]) -> None:
    """The table as JSON, Markdown and CSV, and the plot."""
    about = {"model": model, "share": f"1/{SHARE}", "environment": environment()}
    write_json_atomic(folder / "frontier.json", {**about, "points": list(points)})
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([point[column] for column in _COLUMNS] for point in points)
    write_text_atomic(folder / "frontier.csv", table.getvalue())
    lines = [
        f"# {model}: KL by size",
        "",
        "Evaluations are batches that a search forwards, a backward counted as two.",
        "",
        "| size asked for | bytes | KL to the full model | perplexity | evaluations | seconds | checkpoint |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {point['size']:,} | {point['bytes']:,} | {point['kl']:.4f} ± {point['kl_error'] or 0.0:.4f} | "
        f"{point['perplexity']:.3f} | {point['evaluations']} | {point['seconds']:.0f} | "
        f"{point['checkpoint'] or ''} |"
        for point in points
    ]
    write_text_atomic(folder / "frontier.md", "\n".join(lines) + "\n")
    figure = figure_class()(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(
        [point["bytes"] / 1e6 for point in points],
        [point["kl"] for point in points],
        yerr=[point["kl_error"] or 0.0 for point in points],
        marker="o",
        capsize=2,
    )
    axes.set_yscale("log")
    axes.set_xlabel("size (MB)")
    axes.set_ylabel("KL to the full model (nats per token)")
    polish(axes, model)
    save_figures(folder, {"frontier": figure}, ["svg"])
