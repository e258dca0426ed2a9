"""``rco quantize``: from a model and a budget to a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from rco.cli.config_options import Switches, command_from_config
from rco.cli.run_job import print_evaluation, print_loading, report_of, run_job
from rco.pipeline.configs import QuantizeConfig

if TYPE_CHECKING:
    from rco.compressed import CompressedModel
    from rco.pipeline.planning import Planned

__all__ = ["quantize"]


def _quantize(config: QuantizeConfig, switches: Switches) -> None:
    """Quantize a language model to an exact budget, with a width chosen for every layer.

    rco quantize tiny-llama --bits 2.5

    rco quantize MODEL --size 3.1GB --serve vllm --out runs/mine
    """
    run_job(
        config,
        switches,
        describe=_describe,
        summarize=lambda result: {"allocation": result.search.allocation.to_dict()},
        show=_show,
    )


quantize = command_from_config(QuantizeConfig, _quantize)


def _describe(planned: Planned) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    from rco.formats.integer import IntegerGrid
    from rco.formats.original import ORIGINAL
    from rco.formats.removed import REMOVED
    from rco.models.embeddings import EMBEDDING_ROLE

    plan, problem, budget = planned.compression.plan, planned.problem, planned.budget
    low, high = planned.compression.budget_range(budget.kind)
    options, embedding = plan.options, None
    if plan.target is None:  # formats of an embedding are its own
        embedding = next((group for group in plan.groups if group.members[0].role == EMBEDDING_ROLE), None)
        options = tuple(option for option in options if option in plan.menus[False])
    grids = [option for option in options if isinstance(option, IntegerGrid)]
    others = [option.name for option in options if option not in (*grids, ORIGINAL, REMOVED)]
    types, integers = plan.block_types or others, bool(grids) and not plan.block_types
    grid = None if not integers else "symmetric" if plan.symmetric else "asymmetric"
    data = {
        "groups": problem.num_groups,
        "linears": len(plan.linears),
        "left_alone": list(plan.skipped),
        "unverified": {each.name: each.reason for each in plan.unread},
        "embedding": None if embedding is None else [option.name for option in embedding.options],
        "widths": [option.bits for option in options],
        "grid": grid,
        "group_size": plan.group_size if integers else None,
        "types": types,
        "range": [low, high],
        "effective_units": problem.unit_budgets[0],
    }
    scales = f"groups of {plan.group_size}" if plan.group_size else "one scale per row"
    parts = [f"as {', '.join(types)}"] if types else []
    stored = "; ".join(
        [*parts, *([f"{grid} grids, {scales}" if types else f"{grid}, {scales}"] if integers else [])]
    )
    widths = ", ".join(str(bits) for bits in dict.fromkeys(option.bits for option in options))
    fixed = planned.compression.costs(budget.kind).fixed
    searched = f"bytes for these, {fixed:,} for everything else" if fixed else "units for the search"
    lines = [
        ("groups", f"{problem.num_groups} of {len(plan.linears)} linears"),
        *([("left alone", ", ".join(plan.skipped))] if plan.skipped else []),
        *([("unverified", plan.unverified)] if plan.unread else []),
        ("widths", f"{widths} bits, {stored}"),
        *([("embedding", ", ".join(option.name for option in embedding.options))] if embedding else []),
        ("range", f"{budget.kind} from {low} to {high}"),
        ("budget", f"{budget}: {problem.unit_budgets[0]:,} {searched}"),
    ]
    return data, lines


def _show(result: CompressedModel) -> None:
    print_evaluation(
        result, first="allocation", amount=("bits", lambda row: f"{row['bits']:.4f}".rstrip("0").rstrip("."))
    )
    budget = result.metrics["budget"]
    typer.echo(
        f"budget      {budget['requested']} {budget['kind']} requested: {budget['effective']}, "
        f"used {budget['used']}"
    )
    second = budget.get("second")
    if second is not None:
        typer.echo(f"second      {second['kind']} at most {second['allowed']:.6g}: used {second['used']:.6g}")
    written = result.metrics.get("export", {})
    if written.get("usage"):
        typer.echo(f"recipe      {result.checkpoint}: its README.md has the commands")
    elif result.checkpoint:
        typer.echo(f"checkpoint  {result.checkpoint}")
        print_loading(written)
    typer.echo(f"report      {report_of(result)}")
