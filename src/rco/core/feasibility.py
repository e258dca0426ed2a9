"""Whether a problem's budgets can be met at all, and what to say where they cannot."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from rco.core.problem_input import show

if TYPE_CHECKING:
    from rco.core.problem import AllocationProblem

__all__ = ["InfeasibleBudgetError", "check_budgets"]


class InfeasibleBudgetError(ValueError):
    """No assignment meets the budget; the message names the reachable range."""


def check_budgets(problem: AllocationProblem) -> None:
    """Refuse budgets that no assignment meets, or under which there is nothing to decide.

    Raises:
        InfeasibleBudgetError: A budget lies outside its reachable range, or joint ones cannot be met together.
        ValueError: Under "==", every assignment costs the same.
    """
    low, high = problem.floored_range
    for j, budget in enumerate(problem.budgets):
        lowest, highest = Fraction(low[j], problem.denominator), Fraction(high[j], problem.denominator)
        reachable = f"reachable totals lie between {show(lowest)} and {show(highest)}"
        if budget < lowest:
            raise InfeasibleBudgetError(
                f"{_name(problem, j)} is {show(budget)}, but {reachable}; raise it to at least "
                f"{show(lowest)}, or allow cheaper options."
            )
        if problem.sense == "==" and lowest == highest:
            raise ValueError(
                f"Under {_name(problem, j)} every assignment costs the same ({show(lowest)}): all options "
                "of each group cost the same, so the expected cost is constant, its gradient vanishes and "
                'C = B is no surface to walk on. Give options of different cost, or use sense="<=" if the '
                "budget is not meant to decide anything."
            )
        if problem.sense == "==" and budget > highest:
            raise InfeasibleBudgetError(
                f"{_name(problem, j)} is {show(budget)}, but {reachable}; lower it to at most "
                f'{show(highest)}, or use sense="<=" if it may be left unspent.'
            )
    if problem.num_joint > 1:
        _check_joint(problem)


def _name(problem: AllocationProblem, j: int) -> str:
    if problem.block_ids is not None:
        return f"the budget of block {problem.block_ids[j]!r}"
    return "the budget" if problem.num_joint == 1 else f"joint budget {j}"


def _check_joint(problem: AllocationProblem) -> None:
    """Whether the joint budgets can be met together, by the linear relaxation."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix, vstack

    cells = np.flatnonzero(problem.allowed)
    rows = cells // problem.num_options
    # In units of the ranges, shared among the groups so that entries are of moderate size.
    matrix = problem.num_groups * problem.relative_costs.reshape(problem.num_joint, -1)[:, cells]
    choose_one = csr_matrix((np.ones(len(cells)), (rows, np.arange(len(cells)))))
    totals, targets = csr_matrix(matrix), problem.num_groups * problem.relative_budgets
    # Under "==" the continuous iterate must be able to stand on every budget at once.
    exact = problem.sense == "=="
    result = linprog(
        np.zeros(len(cells)),
        A_ub=None if exact else totals,
        b_ub=None if exact else targets,
        A_eq=vstack([choose_one, totals]) if exact else choose_one,
        b_eq=np.concatenate([np.ones(problem.num_groups), targets if exact else []]),
        bounds=(0, None),
        method="highs",
        # Any limit at all: without one this HiGHS takes minutes, with one a second.
        options={"time_limit": 300.0},
    )
    if result.status == 2:
        raise InfeasibleBudgetError(
            f"The {problem.num_joint} joint budgets {[show(b) for b in problem.budgets]} cannot be met together, "
            f"although each lies in its own range {problem.feasible_range}; raise some of them."
        )
