"""Long jobs on the command line: plan or run, the command that continues after Ctrl-C, the final table."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rco.cli.config_options import Switches
from rco.cli.flags import as_flags

if TYPE_CHECKING:
    from rco.compressed import CompressedModel
    from rco.pipeline.planning import Planned

__all__ = ["interruptible", "print_evaluation", "print_loading", "print_plan", "report_of", "run_job"]


def run_job(
    config: Any,
    switches: Switches,
    *,
    describe: Callable[[Any], tuple[dict[str, Any], list[tuple[str, str]]]],
    summarize: Callable[[CompressedModel], dict[str, Any]],
    show: Callable[[CompressedModel], None],
) -> None:
    """Compress a model, or with ``--dry-run`` print the plan.

    Args:
        config: The settings.
        switches: Form of the output.
        describe: A plan as data for ``--json``, and as lines (label, text) of text output.
        summarize: The part of the JSON that is specific to the command.
        show: Prints the result as text.
    """
    from rco.api import compress
    from rco.compression.budget import Budget
    from rco.distributed import is_first_rank
    from rco.pipeline.planning import plan_compression, run_folder

    if switches.dry_run:
        if not is_first_rank():
            return
        planned = plan_compression(config, outline=True)
        data, lines = describe(planned)
        print_plan(planned, data, lines, as_json=switches.as_json)
        return
    quiet = switches.quiet or switches.as_json or not is_first_rank()
    if config.out is None:
        config = dataclasses.replace(config, out=run_folder(config, Budget.parse(**config.budgets())))
    with interruptible():
        result = compress(config, progress=not quiet)
    if result is None:
        return
    if switches.as_json:
        typer.echo(json.dumps({**_common_summary(result), **summarize(result)}))
    else:
        show(result)


@contextmanager
def interruptible() -> Iterator[None]:
    """On Ctrl-C or the loss of another rank, end with the command line that continues the run."""
    from rco.distributed import RankLostError, is_first_rank

    try:
        yield
    except KeyboardInterrupt:
        if is_first_rank():
            sys.stderr.write(f"\nStopped. {_way_on()}")
        raise typer.Exit(130) from None
    except RankLostError as error:
        sys.stderr.write(f"Error on rank {os.environ.get('RANK', '0')}: {as_flags(str(error))} {_way_on()}")
        raise typer.Exit(1) from None


def _way_on() -> str:
    script = Path(sys.argv[0])
    program = ["python", str(script)] if script.suffix == ".py" and script.stem != "__main__" else ["rco"]
    command = [*program, *(a for a in sys.argv[1:] if a != "--resume"), "--resume"]
    if "LOCAL_WORLD_SIZE" in os.environ:
        command = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", *command]
    return f"Finished work is kept; continue with:\n  {' '.join(command)}\n"


def print_plan(
    planned: Planned, data: dict[str, Any], lines: list[tuple[str, str]], *, as_json: bool
) -> None:
    """Print the plan of a job with its expected memory, time and folder."""
    estimate = planned.estimate
    if as_json:
        device = str(planned.loaded.device)
        shared = {"model": planned.loaded.name, "device": device, "requested": str(planned.budget)}
        typer.echo(
            json.dumps({**shared, **data, "estimate": estimate.to_dict(), "folder": str(planned.folder)})
        )
        return
    memory = estimate.memory
    size = f"{memory / 2**30:.2f} GiB" if memory >= 2**28 else f"{memory / 2**20:.1f} MiB"
    for label, text in [
        ("model", planned.loaded.name),
        *lines,
        ("memory", f"about {size}"),
        ("time", f"about {estimate.seconds / 60:.1f} minutes on this machine"),
        ("folder", str(planned.folder)),
    ]:
        typer.echo(f"{label:<12}{text}")


def _common_summary(result: CompressedModel) -> dict[str, Any]:
    metrics = {k: v for k, v in result.metrics.items() if k not in ("groups", "scores", "export")}
    return {
        "folder": str(result.folder),
        "report": str(report_of(result)),
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "loss": result.search.loss,
        "chosen_from": result.search.chosen_from,
        **metrics,
    }


def report_of(result: CompressedModel) -> Path:
    """Path of the report in the folder of a run."""
    assert result.folder is not None  # runs of the command line have a folder
    return result.folder / "report.html"


def print_evaluation(
    result: CompressedModel, *, first: str, amount: tuple[str, Callable[[dict[str, Any]], str]]
) -> None:
    """Print the table of allocations on evaluation text: name, size, KL and perplexity."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None)
    label, text = amount
    for name in (first, label, "KL to the full model", "perplexity"):
        table.add_column(name, justify="left" if name == first else "right")
    for row in result.metrics["evaluation"]:
        error = row["kl_error"] or 0.0
        table.add_row(
            row["name"],
            text(row),
            "" if row["name"] == "full model" else f"{row['kl']:.4f} ± {error:.4f}",
            f"{row['perplexity']:.3f}",
        )
    Console().print(table)


def print_loading(export: dict[str, Any]) -> None:
    """Print how to load a checkpoint that brings its own model code."""
    if export.get("usage"):  # a recipe, whose scripts are not the model's code
        return
    if any(str(name).endswith(".py") for name in export.get("files") or {}):
        typer.echo(
            "loading     use trust_remote_code=True or rco.load: the checkpoint has its own model code"
        )
