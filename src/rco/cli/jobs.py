"""What the verbs that run long jobs share: plan or run, a way back after Ctrl-C, the table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from rco.cli.options import Switches

if TYPE_CHECKING:
    from rco.pipeline.common import Outcome, Planned

__all__ = ["interruptible", "print_evaluation", "print_plan", "run_job"]


def run_job(
    config: Any,
    switches: Switches,
    *,
    plan: Callable[[Any], Any],
    describe: Callable[[Any], tuple[dict[str, Any], list[tuple[str, str]]]],
    job: Callable[[Any, Any], Outcome],
    summarize: Callable[[Outcome], dict[str, Any]],
    show: Callable[[Outcome], None],
) -> None:
    """Do a job, or with ``--dry-run`` say what it would be.

    Args:
        config: The job's settings.
        switches: How to show it.
        plan: Checks the settings without work.
        describe: A plan as data for ``--json``, and as lines (label, text) for people.
        job: Does it.
        summarize: The outcome's own part of the JSON.
        show: Prints the outcome for people.
    """
    from rco.cli.progress import make_progress

    if switches.dry_run:
        planned = plan(config)
        data, lines = describe(planned)
        print_plan(planned, data, lines, as_json=switches.as_json)
        return
    with interruptible(), make_progress(switches.quiet or switches.as_json) as progress:
        outcome = job(config, progress)
    if switches.as_json:
        typer.echo(json.dumps({**_common_summary(outcome), **summarize(outcome)}))
    else:
        show(outcome)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside ends the command with the line that continues it."""
    try:
        yield
    except KeyboardInterrupt:
        command = " ".join(["rco", *(a for a in sys.argv[1:] if a != "--resume"), "--resume"])
        sys.stderr.write(f"\nStopped. What is done is kept; continue with:\n  {command}\n")
        raise typer.Exit(130) from None


def print_plan(
    planned: Planned[Any], data: dict[str, Any], lines: list[tuple[str, str]], *, as_json: bool
) -> None:
    """What a job would be, what it would take, and where it would go."""
    estimate = planned.estimate
    if as_json:
        shared = {"model": planned.loaded.name, "requested": str(planned.budget)}
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


def _common_summary(outcome: Outcome) -> dict[str, Any]:
    metrics = {k: v for k, v in outcome.metrics.items() if k not in ("groups", "scores", "export")}
    return {
        "folder": str(outcome.folder),
        "report": str(outcome.report),
        "checkpoint": str(outcome.checkpoint) if outcome.checkpoint else None,
        "loss": outcome.result.loss,
        "chosen_from": outcome.result.chosen_from,
        **metrics,
    }


def print_evaluation(
    outcome: Outcome, *, first: str, amount: tuple[str, Callable[[dict[str, Any]], str]]
) -> None:
    """The table of allocations on evaluation text: a name, how much it takes, KL and perplexity."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None)
    label, text = amount
    for name in (first, label, "KL to the full model", "perplexity"):
        table.add_column(name, justify="left" if name == first else "right")
    for row in outcome.metrics["evaluation"]:
        error = row["kl_error"] or 0.0
        table.add_row(
            row["name"],
            text(row),
            "" if row["name"] == "full model" else f"{row['kl']:.4f} ± {error:.4f}",
            f"{row['perplexity']:.3f}",
        )
    Console().print(table)
