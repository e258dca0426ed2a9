"""Choose one of K options for each of N groups under an exact budget; compress language models with it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from rco.lazy_names import lazy_names

if TYPE_CHECKING:  # for editors and type checkers; at run time names load on first use
    from rco.api import evaluate as evaluate
    from rco.api import prune as prune
    from rco.api import quantize as quantize
    from rco.compressed import CompressedModel as CompressedModel
    from rco.core.knapsack import Solution as Solution
    from rco.core.knapsack import solve_mckp as solve_mckp
    from rco.core.manifold import BudgetManifold as BudgetManifold
    from rco.core.objective import Objective as Objective
    from rco.core.optimizer import RiemannianAdam as RiemannianAdam
    from rco.core.optimizer import RiemannianOptimizer as RiemannianOptimizer
    from rco.core.problem import Allocation as Allocation
    from rco.core.problem import AllocationProblem as AllocationProblem
    from rco.core.problem import InfeasibleBudgetError as InfeasibleBudgetError
    from rco.core.result import SearchResult as SearchResult
    from rco.core.result import StepRecord as StepRecord
    from rco.core.search import RCO as RCO
    from rco.core.searcher import Searcher as Searcher
    from rco.models.loading import load as load
    from rco.optimize import minimize as minimize
    from rco.optimize import sweep as sweep

# Names load on first use, so that `import rco` is quick and uses no device.
_EXPORTS = {
    "Allocation": "rco.core.problem",
    "AllocationProblem": "rco.core.problem",
    "BudgetManifold": "rco.core.manifold",
    "CompressedModel": "rco.compressed",
    "InfeasibleBudgetError": "rco.core.problem",
    "Objective": "rco.core.objective",
    "RCO": "rco.core.search",
    "RiemannianAdam": "rco.core.optimizer",
    "RiemannianOptimizer": "rco.core.optimizer",
    "SearchResult": "rco.core.result",
    "Searcher": "rco.core.searcher",
    "Solution": "rco.core.knapsack",
    "StepRecord": "rco.core.result",
    "evaluate": "rco.api",
    "load": "rco.models.loading",
    "minimize": "rco.optimize",
    "prune": "rco.api",
    "quantize": "rco.api",
    "solve_mckp": "rco.core.knapsack",
    "sweep": "rco.optimize",
}

__all__ = sorted([*_EXPORTS, "__version__"])

try:
    __version__ = version("rco")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.2.0"

__getattr__, __dir__ = lazy_names(__name__, {**_EXPORTS, "__version__": __name__})
