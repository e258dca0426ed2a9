"""MxMoE: one integer program per layer over the sensitivities of its experts.

Duanmu et al., "MxMoE: Mixed-precision quantization for MoE with accuracy and performance co-design" (2025), as the
RCO paper runs it: the sensitivity of an option is the L2 norm of what it alone does to the output of its layer,
every layer spends the same share of the budget, and the assignment of least total sensitivity is found by an
integer program (HiGHS). An expert's gate and up projection share a width and its down projection is free where the
problem's groups say so; attention is left alone. Throughput, the Hadamard transform and quantized activations are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rco.baselines.common import HasOptionErrors, HasOutputErrors, blocks_of
from rco.baselines.selection import share_budget
from rco.core.evaluation import Evaluator
from rco.core.knapsack import knapsack
from rco.core.problem import AllocationProblem
from rco.core.process import BudgetedSearch, Process, checked_table
from rco.core.refine import Candidates

__all__ = ["HasLayerErrors", "MxMoE", "solve_layer"]


@runtime_checkable
class HasLayerErrors(Protocol):
    """An objective that knows what each option alone does to the output of its layer: L2 norms, (N, K)."""

    layer_errors: Tensor


def solve_layer(
    sensitivities: np.ndarray,
    costs: np.ndarray,
    allowed: np.ndarray,
    budgets: Sequence[int],
    time_limit: float = 60.0,
) -> np.ndarray | None:
    """Options (n,) of least total sensitivity within the budgets, by HiGHS; None where it finds none in time.

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
        # The cheapest options are paid beforehand, the rest is counted in whole steps: small numbers.
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


class _MxMoE(Process):
    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        table: np.ndarray,
        blocks: np.ndarray,
        time_limit: float,
    ) -> None:
        super().__init__(problem, evaluator, None)
        self.table, self.blocks, self.time_limit = table, blocks, time_limit
        self.shared = share_budget(problem, blocks)
        self.choices: np.ndarray | None = None

    @property
    def steps(self) -> int:
        return 0

    def advance(self, step: int) -> float:
        raise AssertionError("the table is given")

    def propose(self, candidates: Candidates) -> None:
        choices = self._solve()
        if choices is None or not self.shared.is_feasible(choices):
            # No solution in time, or one over budget within the solver's tolerance; the result says so.
            self.notes["ilp_replaced_by"] = "exact knapsack of the same sensitivities"
            choices = knapsack(-self.table, self.shared)
        # What a layer's program leaves of its share stays within the layer.
        held = Candidates(self.shared, self.evaluator)
        held.add("mxmoe", choices, torch.from_numpy(-self.table))
        candidates.choices["mxmoe"] = held.choices["mxmoe"]

    def _solve(self) -> np.ndarray | None:
        shared, allowed = self.shared, self.problem.allowed
        if shared.block_index is None:
            # One layer, or further budgets that tie the layers together: one program for all.
            costs = shared.unit_costs
            return solve_layer(self.table, costs, allowed, shared.unit_budgets, self.time_limit)
        choices = np.zeros(self.problem.num_groups, dtype=np.int64)
        for block, budget in enumerate(shared.unit_budgets):
            inside = shared.block_index == block
            costs = shared.unit_costs[:1, inside]
            found = solve_layer(self.table[inside], costs, allowed[inside], [budget], self.time_limit)
            if found is None:
                return None
            choices[inside] = found
        return choices


@dataclass(frozen=True, kw_only=True)
class MxMoE(BudgetedSearch):
    """The least total layer-output sensitivity, every layer with the same share of the budget.

    The objective must offer ``layer_errors`` (N, K); ``output_errors`` or ``option_errors``, squared, stand in.

    Args:
        blocks: Layer of every group; None: what the objective, the problem or its labels say.
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

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """One program per layer."""
        objective = evaluator.objective
        if isinstance(objective, HasLayerErrors):
            name, table = "layer_errors", objective.layer_errors
        elif isinstance(objective, HasOutputErrors):
            name, table = "output_errors", objective.output_errors.clamp_min(0).sqrt()
        elif isinstance(objective, HasOptionErrors):
            name, table = "option_errors", objective.option_errors.clamp_min(0).sqrt()
        else:
            raise ValueError(
                f"{self.name} needs a table of sensitivities, but the objective ({type(objective).__name__}) has "
                "none of layer_errors, output_errors and option_errors (N, K); add one, or use one-at-a-time."
            )
        blocks = blocks_of(problem, objective, self.blocks)
        process = _MxMoE(problem, evaluator, checked_table(table, problem, name), blocks, self.time_limit)
        process.notes["sensitivities"] = name
        return process
