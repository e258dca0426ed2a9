"""The exact multiple-choice knapsack: the best option per group within the budget, proven.

:mod:`~rco.core.knapsack.solver` holds the public functions. It hands problems with one budget, or one per block, to
:mod:`~rco.core.knapsack.single_budget` (compiled kernels) and problems with several joint budgets to
:mod:`~rco.core.knapsack.joint_budgets` (HiGHS).
"""

from rco.core.knapsack.solver import (
    BatchSolution,
    Choices,
    Solution,
    found_allocation,
    knapsack,
    solve_choices,
    solve_mckp,
)

__all__ = [
    "BatchSolution",
    "Choices",
    "Solution",
    "found_allocation",
    "knapsack",
    "solve_choices",
    "solve_mckp",
]
