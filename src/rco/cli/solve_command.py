"""``rco solve``: the exact knapsack for a problem from a file or from stdin."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np

    from rco.core.knapsack import BatchSolution, Solution
    from rco.core.problem import AllocationProblem

__all__ = ["solve"]

_HINT = "'PROBLEM'"


def solve(
    problem: Annotated[
        str,
        typer.Argument(
            metavar="PROBLEM",
            help="A JSON file, or - for stdin: option_costs, budget, values, and the other fields of a problem.",
        ),
    ],
    max_states: Annotated[
        int,
        typer.Option(
            "--max-states",
            min=1,
            max=2**31 - 1,
            help="Most search states; at the limit the best choice so far is printed, with its gap.",
        ),
    ] = 20_000_000,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", help="Most seconds per item of a batch, for several joint budgets."),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Choose one option per group with the largest total value within the budget, proven optimal.

    The file holds one object. "values" is (N, K) or (batch, N, K); null forbids an option.
    Strings such as "2.5" or "7/3" are read as exact numbers. Exit status 1: there is no feasible choice.

    rco solve problem.json

    rco solve --json - < problem.json
    """
    from rco.core.knapsack import Solution, solve_mckp
    from rco.core.problem import AllocationProblem, InfeasibleBudgetError

    described = _read(problem)
    values = _values(described.pop("values"))
    try:
        parsed = AllocationProblem.from_dict(described)
        solved = solve_mckp(values, parsed, max_states=max_states, time_limit=time_limit)
    except InfeasibleBudgetError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=_HINT) from None
    except TypeError as error:
        raise typer.BadParameter(
            f"a field has a value of the wrong type: {error}", param_hint=_HINT
        ) from None

    if isinstance(solved, Solution):
        infeasible = int(solved.allocation[0]) < 0
        shown = _describe(solved, parsed) | {"budget": _number(parsed.budget)}
    else:
        infeasible = any(int(row[0]) < 0 for row in solved.allocation)
        shown = {"solutions": [_describe(s, parsed) for s in solved], "budget": _number(parsed.budget)}
    if as_json:
        typer.echo(json.dumps(shown))
    else:
        _print(solved, values, parsed)
    if infeasible:
        typer.echo(
            "Error: no choice of allowed options is within the budget; allow cheaper options.", err=True
        )
        raise typer.Exit(1)


def _read(source: str) -> dict[str, Any]:
    """The JSON object in a file or on stdin."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {source}: {error}", param_hint=_HINT) from None
    try:
        described = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise typer.BadParameter(f"{source} is not JSON: {error}", param_hint=_HINT) from None
    if not isinstance(described, dict):
        raise typer.BadParameter(
            f"{source} must hold one JSON object, got {type(described).__name__}.", param_hint=_HINT
        )
    if "values" not in described:
        raise typer.BadParameter(
            'the key "values" is missing: (N, K) numbers, the value of each option of each group.',
            param_hint=_HINT,
        )
    return described


def _values(given: Any) -> np.ndarray:
    """Float array of nested lists; null is a forbidden option."""
    import numpy as np

    def cell(value: Any) -> Any:
        if isinstance(value, list):
            return [cell(entry) for entry in value]
        return -math.inf if value is None else float(Fraction(value) if isinstance(value, str) else value)

    try:
        return np.array(cell(given), dtype=np.float64)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError) as error:
        raise typer.BadParameter(
            f'"values" must be a rectangular array of numbers or null: {error}', param_hint=_HINT
        ) from None


def _number(value: Any) -> Any:
    """An exact number as JSON: an integer, a "p/q" string, or null if not finite."""
    if isinstance(value, tuple):
        return [_number(entry) for entry in value]
    if isinstance(value, Fraction):
        return str(value)
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _describe(solution: Solution, problem: AllocationProblem) -> dict[str, Any]:
    allocation, labels = None, None
    if int(solution.allocation[0]) >= 0:
        allocation = solution.allocation.tolist()
        if problem.groups or problem.options:
            labels = problem.allocation(solution.allocation).to_dict()
    described: Mapping[str, Any] = {
        "status": solution.status,
        "value": _number(solution.value),
        "cost": _number(solution.cost),
        "gap": _number(solution.gap),
        "allocation": allocation,
        "labels": labels,
    }
    return {key: value for key, value in described.items() if key != "labels" or value is not None}


def _print(solved: Solution | BatchSolution, values: np.ndarray, problem: AllocationProblem) -> None:
    from rich.console import Console
    from rich.table import Table

    from rco.core.knapsack import Solution

    console = Console(highlight=False, soft_wrap=True)
    if isinstance(solved, Solution):
        if int(solved.allocation[0]) >= 0:
            table = Table("group", "option", "value")
            for i, k in enumerate(solved.allocation.tolist()):
                group = problem.groups[i] if problem.groups else str(i)
                option = problem.options[k] if problem.options else str(k)
                table.add_row(group, option, f"{values[i, k]:.6g}")
            console.print(table)
        summary = {
            "status": solved.status,
            "value": f"{solved.value:.12g}",
            "cost": _text(solved.cost),
            "budget": _text(problem.budget),
            "gap": f"{solved.gap:.3g}",
        }
        for name, text in summary.items():
            console.print(f"{name:<7} {text}")
        return
    table = Table("sample", "status", "value", "cost", "gap", "allocation")
    for b, solution in enumerate(solved):
        choices = " ".join(map(str, solution.allocation[:16].tolist()))
        more = " ..." if len(solution.allocation) > 16 else ""
        table.add_row(
            str(b),
            solution.status,
            f"{solution.value:.12g}",
            _text(solution.cost),
            f"{solution.gap:.3g}",
            choices + more,
        )
    console.print(table)
    console.print(f"budget  {_text(problem.budget)}")


def _text(value: Any) -> str:
    """An exact number as text."""
    if isinstance(value, tuple):
        return ", ".join(_text(entry) for entry in value)
    return "-" if value is None else str(value)
