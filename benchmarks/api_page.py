"""The page docs/api.md, made from the docstrings of the core's public names.

python benchmarks/api_page.py docs/api.md
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import rco

NAMES = [
    "minimize",
    "sweep",
    "AllocationProblem",
    "Allocation",
    "solve_mckp",
    "Solution",
    "BudgetManifold",
    "RiemannianAdam",
    "RiemannianOptimizer",
    "RCO",
    "SearchResult",
    "StepRecord",
    "Objective",
    "Searcher",
    "InfeasibleBudgetError",
]


def page() -> str:
    """The whole page."""
    parts = [
        "# API",
        "",
        "The core's public names, from their docstrings (`python benchmarks/api_page.py docs/api.md`).",
        "",
    ]
    for name in NAMES:
        value = getattr(rco, name)
        parts += [f"## `rco.{name}`", "", _signature(value), *_documented(value)]
        if inspect.isclass(value):
            for method, member in vars(value).items():
                function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                own = (
                    getattr(function, "__qualname__", "") == f"{name}.{method}"
                )  # torch patches some when used
                if own and not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                    parts += [f"### `{name}.{method}`", "", _signature(function), *_documented(function)]
    return "\n".join(parts).rstrip() + "\n"


def _signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f"```python\n{getattr(value, '__name__', '')}{text}\n```\n"


def _documented(value: object) -> list[str]:
    return ["```text", inspect.getdoc(value) or "", "```", ""]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
