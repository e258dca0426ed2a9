"""MxMoE: one integer program per layer over the sensitivities of its experts.

Duanmu et al., "MxMoE: Mixed-precision quantization for MoE with accuracy and performance co-design" (2025), as the
RCO paper runs it: the sensitivity of an option is the L2 norm of its effect, alone, on the output of its layer,
every layer spends the same share of the budget, and the assignment of least total sensitivity is found by an
integer program (HiGHS). An expert's gate and up projection share a width and its down projection is free if the
problem's groups are formed so; attention is left unchanged. Throughput, the Hadamard transform and quantized
activations are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from rco.baselines.block_budgets import blocks_of, share_budget
from rco.core.choice import Candidates
from rco.core.knapsack import knapsack
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.searcher import BudgetedSearch, FixedAnswer, SearchRun, checked_table

__all__ = ["MxMoE", "solve_layer"]


def solve_layer(
    sensitivities: np.ndarray,
    costs: np.ndarray,
    allowed: np.ndarray,
    budgets: Sequence[int],
    time_limit: float = 60.0,
) -> np.ndarray | None:
    """Options (n,) of least total sensitivity within the budgets, by HiGHS; None if it finds none in time.

    Args:
        sensitivities: (n, K).
        costs: (q, n, K) integers, one table per budget.
        allowed: (n, K) booleans.
        budgets: (q,) most units.
        time_limit: Seconds.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron

    count, options = sensitivities.shape
    one_each = kron(eye_array(count), np.ones((1, options)), format="csr")
    constraints = [LinearConstraint(one_each, 1, 1)]
    for table, budget in zip(costs, budgets, strict=True):
        # The cost of the cheapest options is subtracted, the rest counted in whole steps, to keep numbers small.
        least = table.min(axis=1, keepdims=True)
        above = table - least
        unit = int(np.gcd.reduce(above, axis=None)) or 1
        room = (int(budget) - int(least.sum())) // unit
        row = csr_array((above // unit).reshape(1, -1).astype(float))
        constraints.append(LinearConstraint(row, -np.inf, float(room)))
    scale = float(np.abs(np.where(allowed, sensitivities, 0.0)).max(initial=0.0)) or 1.0
    result = milp(
        np.where(allowed, sensitivities, 0.0).reshape(-1) / scale,
        integrality=np.ones(count * options),
        bounds=Bounds(0, allowed.reshape(-1).astype(float)),
        constraints=constraints,
        options={"time_limit": time_limit, "mip_rel_gap": 1e-9},
    )
    if result.x is None:
        return None
    return np.asarray(result.x.reshape(count, options).argmax(axis=1), dtype=np.int64)


def _solve_layers(shared: AllocationProblem, table: np.ndarray, time_limit: float) -> np.ndarray | None:
    """One program per budget block; None if one finds nothing in time."""
    allowed = shared.allowed
    if shared.block_index is None:
        # One layer, or further budgets that couple the layers: one program for all.
        return solve_layer(table, shared.unit_costs, allowed, shared.unit_budgets, time_limit)
    choices = np.zeros(shared.num_groups, dtype=np.int64)
    for block, budget in enumerate(shared.unit_budgets):
        inside = shared.block_index == block
        costs = shared.unit_costs[:1, inside]
        found = solve_layer(table[inside], costs, allowed[inside], [budget], time_limit)
        if found is None:
            return None
        choices[inside] = found
    return choices


@dataclass(frozen=True, kw_only=True)
class MxMoE(BudgetedSearch):
    """The least total layer-output sensitivity, every layer with the same share of the budget.

    The objective must have the table ``layer_errors`` (N, K), or the squares ``output_errors`` or
    ``option_errors``.

    Args:
        blocks: Layer of every group; None: those of the objective, of the problem or of its labels.
        time_limit: Seconds per layer.
    """

    name: ClassVar[str] = "mxmoe"
    spends_uniform: ClassVar[bool] = False
    starts_from_prior: ClassVar[bool] = False

    blocks: tuple[Any, ...] | None = None
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.time_limit > 0:
            raise ValueError(f"time_limit must be positive, got {self.time_limit}.")

    def loop(self, run: SearchRun) -> SearchResult:
        """Solve one program per layer, without steps."""
        name, table = self._sensitivities(run)
        run.notes["sensitivities"] = name
        shared = share_budget(run.problem, blocks_of(run.problem, run.evaluator.objective, self.blocks))
        choices = _solve_layers(shared, table, self.time_limit)
        if choices is None or not shared.is_feasible(choices):
            # No solution in time, or one over budget within the solver's tolerance; the result reports it.
            run.notes["ilp_replaced_by"] = "exact knapsack of the same sensitivities"
            choices = knapsack(-table, shared)
        # Budget that a layer's program leaves over stays within the layer.
        held = Candidates(shared, run.evaluator)
        held.add("mxmoe", choices, torch.from_numpy(-table))
        run.resume(FixedAnswer(run, **held.choices))
        return run.choose()

    def _sensitivities(self, run: SearchRun) -> tuple[str, np.ndarray]:
        """Name of the table, and its entries as norms."""
        objective = run.evaluator.objective
        for name in ("layer_errors", "output_errors", "option_errors"):
            table = objective.table(name)
            if table is not None:
                norms = table if name == "layer_errors" else table.clamp_min(0).sqrt()
                return name, checked_table(norms, run.problem, name)
        raise ValueError(
            f"{self.name} needs a table of sensitivities, but the objective ({objective.described}) has none of "
            "layer_errors, output_errors and option_errors (N, K); add one, or use one-at-a-time."
        )
