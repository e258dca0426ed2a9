"""The solver of multiple-choice knapsacks: checks values, dispatches by kind of budget, verifies the result.

``solve_mckp`` maximises ``sum_i values[i, k_i]`` subject to the problem's budgets. One budget, or one per block,
goes to compiled kernels (:mod:`~rco.core.knapsack.single_budget`, and :mod:`~rco.core.knapsack.equality` where it
must be met exactly); several joint budgets go to HiGHS (:mod:`~rco.core.knapsack.joint_budgets`). Every allocation
is costed again with the problem's own integers before it is returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from rco.core.knapsack.single_budget import Choices, over_budget, plans, total_value
from rco.core.problem import AllocationProblem, InfeasibleBudgetError

__all__ = [
    "BatchSolution",
    "Choices",
    "Solution",
    "found_allocation",
    "knapsack",
    "solve_choices",
    "solve_mckp",
]

Status = Literal["optimal", "infeasible", "limit"]

_STATUS: tuple[Status, ...] = ("optimal", "infeasible", "limit")  # by code
_DEFAULT_STATES = 20_000_000
_DEFAULT_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class Solution:
    """One solved knapsack.

    Attributes:
        allocation: (N,) int64 option indices; all -1 if infeasible.
        value: Sum of the chosen values; ``-inf`` if infeasible.
        cost: Exact total cost as :meth:`AllocationProblem.cost` gives it; ``None`` if infeasible.
        status: ``"optimal"``; ``"infeasible"`` (the finite values leave no affordable choice); or ``"limit"``
            (the work limit was reached: the allocation is within the budget and within ``gap`` of the optimum).
        gap: Certified bound on how much the optimum can exceed ``value``; 0 when optimal or infeasible.

    With several joint budgets, where merely finding an affordable choice is hard, "limit" may come without one:
    the allocation is then -1 throughout and the gap infinite.
    """

    allocation: np.ndarray
    value: float
    cost: Any
    status: Status
    gap: float


class BatchSolution(Sequence[Solution]):
    """A sequence of :class:`Solution`, built on access, with the stacked arrays as attributes."""

    def __init__(self, problem: AllocationProblem, found: Choices, value: np.ndarray, units: Any) -> None:
        self._problem, self._found, self._units = problem, found, units
        self.value = value
        """(batch,) float64 sums of the chosen values, ``-inf`` where there is no choice."""

    @property
    def allocation(self) -> np.ndarray:
        """(batch, N) int64 option indices."""
        return self._found.choices

    @property
    def gap(self) -> np.ndarray:
        """(batch,) float64 certified gaps."""
        return self._found.gaps

    @property
    def status(self) -> tuple[Status, ...]:
        """One status per sample."""
        return tuple(_STATUS[code] for code in self._found.codes.tolist())

    @property
    def cost(self) -> list[Any]:
        """Exact total costs, ``None`` where there is no choice."""
        return [self._cost(b) for b in range(len(self))]

    def _cost(self, index: int) -> Any:
        if self._found.choices[index, 0] < 0:
            return None
        return self._problem.priced(self._units[index])

    def __len__(self) -> int:
        return len(self._found.choices)

    @overload
    def __getitem__(self, index: int) -> Solution: ...
    @overload
    def __getitem__(self, index: slice) -> BatchSolution: ...
    def __getitem__(self, index: int | slice) -> Solution | BatchSolution:
        found = self._found
        if isinstance(index, slice):
            part = Choices(*(array[index] for array in found))
            return BatchSolution(self._problem, part, self.value[index], self._units[index])
        status = _STATUS[found.codes[index]]
        value, gap = float(self.value[index]), float(found.gaps[index])
        return Solution(found.choices[index], value, self._cost(index), status, gap)

    def __iter__(self) -> Iterator[Solution]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        counts = {name: self.status.count(name) for name in _STATUS if name in self.status}
        return f"BatchSolution({len(self)} samples, {counts})"


def solve_mckp(
    values: Any,
    problem: AllocationProblem,
    *,
    max_states: int = _DEFAULT_STATES,
    time_limit: float = _DEFAULT_SECONDS,
) -> Solution | BatchSolution:
    """Choose one option per group, of the largest total value within the budget.

    The total cost never exceeds the budget; under ``sense="=="`` it equals the budget. Ties are broken the same way
    on every call. Values closer than 1e-13 of the largest difference in play count as tied.

    Args:
        values: (N, K) or (batch, N, K) numbers, a numpy array or torch tensor; ``-inf`` forbids an option.
        problem: Costs, budgets, blocks and locks.
        max_states: Most search states of one knapsack, which then stops with status ``"limit"``. Random values stay
            far below it; many equal value-to-cost ratios with large odd costs can reach it.
        time_limit: Seconds for each sample of a problem with several joint budgets, which HiGHS solves.

    Returns:
        A :class:`Solution` for (N, K) values, a :class:`BatchSolution` for (batch, N, K).

    Raises:
        ValueError: Values of the wrong shape, or NaN or ``+inf`` among them.
    """
    array = _checked_values(values, problem)
    single = array.ndim == 2
    if single:
        array = array[None]
    solutions = BatchSolution(problem, *_solve(array, problem, max_states, time_limit))
    return solutions[0] if single else solutions


def solve_choices(
    values: Any,
    problem: AllocationProblem,
    *,
    max_states: int = _DEFAULT_STATES,
    time_limit: float = _DEFAULT_SECONDS,
) -> Choices:
    """:func:`solve_mckp` for loops: stacked choices, status codes and gaps, without an object per sample."""
    array = _checked_values(values, problem)
    return _solve(array[None] if array.ndim == 2 else array, problem, max_states, time_limit)[0]


def found_allocation(values: np.ndarray | Tensor, problem: AllocationProblem) -> np.ndarray | None:
    """Choices of the exact knapsack of some values; None if there are none, or none within its time limit."""
    solution = solve_mckp(values, problem)
    assert isinstance(solution, Solution)
    return None if (solution.allocation < 0).any() else solution.allocation


def knapsack(values: np.ndarray | Tensor, problem: AllocationProblem) -> np.ndarray:
    """Choices of the exact knapsack of some values; an error where it has no solution within the budgets."""
    found = found_allocation(values, problem)
    if found is None:
        problem.require_reachable()
        raise InfeasibleBudgetError(
            f"The knapsack found no allocation that meets the budgets {problem.budget}, or none within its limits "
            f"on states and seconds ({_DEFAULT_SECONDS:.0f}); "
            + (
                'use sense="<=", or costs in larger units.'
                if problem.exact
                else "raise the budgets, or allow cheaper options."
            )
        )
    return found


def _checked_values(values: Any, problem: AllocationProblem) -> np.ndarray:
    """Contiguous float64 values without NaN or +inf."""
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"values must hold numbers, got dtype {array.dtype}.")
    if array.ndim not in (2, 3) or array.shape[-2:] != (problem.num_groups, problem.num_options):
        raise ValueError(
            f"values must have shape ({problem.num_groups}, {problem.num_options}) or (batch, "
            f"{problem.num_groups}, {problem.num_options}), got {array.shape}."
        )
    array = np.ascontiguousarray(array, dtype=np.float64)
    if array.size and not array.max() < math.inf:  # NaN compares false, too
        position = tuple(int(i) for i in np.argwhere(~(array < math.inf))[0])
        raise ValueError(
            f"values must be finite or -inf (which forbids an option), got {array[position]} at {position}."
        )
    return array


def _solve(
    values: np.ndarray, problem: AllocationProblem, max_states: int, time_limit: float
) -> tuple[Choices, np.ndarray, Any]:
    """Choices, their values, and exact costs in the problem's units; an error for choices that miss a budget."""
    if not 1 <= max_states < 2**31:
        raise ValueError(f"max_states must lie between 1 and 2**31 - 1, got {max_states}.")
    if problem.num_joint > 1 or (problem.exact and problem.min_counts is not None):
        from rco.core.knapsack.joint_budgets import solve_joint

        found = Choices(*solve_joint(values, problem, time_limit))
    elif problem.exact:
        from rco.core.knapsack.equality import solve_equality

        found = solve_equality(values, problem, max_states)
    else:
        prepared = plans(problem)
        if problem.min_counts is None:
            found = prepared.solve(values, problem, max_states)
        else:
            from rco.core.knapsack.counted import solve_counted

            found = solve_counted(values, problem, max_states)
            if not all(c[0] < 0 or problem.min_counts.met(c) for c in found.choices):
                raise RuntimeError(
                    "Internal error: the knapsack solver broke a minimum count; please report this."
                )
        if problem.unit_costs.dtype != object:
            return found, *prepared.audit(values, found, problem)
    worth = np.full(len(values), -math.inf)
    units: list[list[int] | None] = [None] * len(values)
    for b, choice in enumerate(found.choices):
        if choice[0] >= 0:
            worth[b], units[b] = total_value(values[b], choice), problem.units(choice)
            if not problem.is_feasible(choice):
                raise over_budget(b)
    return found, worth, units
