"""Choose one of K options for each of N groups under an exact budget."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Names load on first use, so that `import rco` is quick and touches no device.
_EXPORTS = {
    "Allocation": "rco.core.problem",
    "AllocationProblem": "rco.core.problem",
    "BudgetManifold": "rco.core.manifold",
    "InfeasibleBudgetError": "rco.core.problem",
    "Objective": "rco.core.protocols",
    "RCO": "rco.core.search",
    "RiemannianAdam": "rco.core.optimizer",
    "RiemannianOptimizer": "rco.core.optimizer",
    "SearchResult": "rco.core.result",
    "Searcher": "rco.core.protocols",
    "Solution": "rco.core.knapsack",
    "StepRecord": "rco.core.result",
    "load": "rco.models.load",
    "minimize": "rco.core.search",
    "solve_mckp": "rco.core.knapsack",
}

__all__ = sorted([*_EXPORTS, "__version__"])

try:
    __version__ = version("rco")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rco' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
