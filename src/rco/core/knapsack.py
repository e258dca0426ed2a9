"""The exact multiple-choice knapsack: the best option per group within the budget, proven.

``solve_mckp`` maximises ``sum_i values[i, k_i]`` subject to the problem's exact budgets. One budget, or one per
block, goes to the compiled core algorithm in :mod:`rco.core.knapsack_kernels`; several joint budgets go to HiGHS
(:mod:`rco.core.knapsack_joint`). Whatever found it, every allocation is costed again with the problem's own
integers before it is returned.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from rco.core.problem import AllocationProblem

__all__ = ["BatchSolution", "Choices", "Solution", "solve_choices", "solve_mckp"]

Status = Literal["optimal", "infeasible", "limit"]

_STATUS: tuple[Status, ...] = ("optimal", "infeasible", "limit")
_OPTIMAL, _INFEASIBLE, _LIMIT = range(3)
_DEFAULT_STATES = 50_000_000
_DEFAULT_SECONDS = 60.0
_INT64_SAFE = 2**62
_FIRST_ROOM = 4096  # states per list; grown where a sample needs more
_LARGEST_KEPT_ROOM = 2**20  # larger lists are freed with the call that needed them


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
    """

    allocation: np.ndarray
    value: float
    cost: Any
    status: Status
    gap: float


class Choices(NamedTuple):
    """What the hot path returns: stacked arrays and nothing else. ``codes``: 0 optimal, 1 infeasible, 2 limit."""

    choices: np.ndarray  # (batch, N) int64
    codes: np.ndarray  # (batch,) int64
    gaps: np.ndarray  # (batch,) float64


class BatchSolution(Sequence[Solution]):
    """A sequence of :class:`Solution`, built as they are asked for, with the stacked arrays beside it."""

    def __init__(self, problem: AllocationProblem, values: np.ndarray, found: Choices) -> None:
        self._problem, self._values, self._found = problem, values, found

    @property
    def allocation(self) -> np.ndarray:
        """(batch, N) int64 option indices."""
        return self._found.choices

    @cached_property
    def value(self) -> np.ndarray:
        """(batch,) float64 sums of the chosen values, ``-inf`` where infeasible."""
        picked = np.take_along_axis(self._values, np.maximum(self._found.choices, 0)[:, :, None], axis=2)
        return np.where(self._found.codes == _INFEASIBLE, -np.inf, picked[:, :, 0].sum(axis=1))

    @property
    def gap(self) -> np.ndarray:
        """(batch,) float64 certified gaps."""
        return self._found.gaps

    @property
    def status(self) -> tuple[Status, ...]:
        """One status per sample."""
        return tuple(_STATUS[code] for code in self._found.codes.tolist())

    @cached_property
    def cost(self) -> list[Any]:
        """Exact total costs, ``None`` where infeasible."""
        return [
            None if code == _INFEASIBLE else self._problem.cost(choice)
            for choice, code in zip(self._found.choices, self._found.codes.tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self._found.choices)

    @overload
    def __getitem__(self, index: int) -> Solution: ...
    @overload
    def __getitem__(self, index: slice) -> BatchSolution: ...
    def __getitem__(self, index: int | slice) -> Solution | BatchSolution:
        if isinstance(index, slice):
            found = Choices(*(array[index] for array in self._found))
            return BatchSolution(self._problem, self._values[index], found)
        choice, code = self._found.choices[index], int(self._found.codes[index])
        if code == _INFEASIBLE:
            return Solution(choice, -math.inf, None, "infeasible", 0.0)
        picked = self._values[index][np.arange(len(choice)), choice]
        return Solution(
            choice,
            float(picked.sum()),
            self._problem.cost(choice),
            _STATUS[code],
            float(self._found.gaps[index]),
        )

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

    A discrete allocation never exceeds the budget, whatever the problem's ``sense``. Ties are broken the same
    way on every call. Values closer than 1e-13 of the largest difference in play count as tied.

    Args:
        values: (N, K) or (batch, N, K) numbers, a numpy array or torch tensor; ``-inf`` forbids an option.
        problem: Costs, budgets, blocks and locks.
        max_states: Work after which one knapsack stops with status ``"limit"``; noisy logits stay far below it,
            many exactly equal value-to-cost ratios with large odd costs need not.
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
    solutions = BatchSolution(problem, array, _solve(array, problem, max_states, time_limit))
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
    return _solve(array[None] if array.ndim == 2 else array, problem, max_states, time_limit)


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


def _solve(values: np.ndarray, problem: AllocationProblem, max_states: int, time_limit: float) -> Choices:
    if max_states < 1:
        raise ValueError(f"max_states must be at least 1, got {max_states}.")
    if problem.num_joint > 1:
        from rco.core.knapsack_joint import solve_joint

        found = Choices(*solve_joint(values, problem, time_limit))
    else:
        found = _plans(problem).solve(values, problem, max_states)
    _check_budgets(found, problem)
    return found


# ------------------------------------------------------------------ preparation, once per problem


class _Plan:
    """A problem laid out for the kernels: blocks contiguous, options by cost, unusable options left out."""

    def __init__(
        self, costs: np.ndarray, capacity: Sequence[int], allowed: np.ndarray, block_index: np.ndarray | None
    ) -> None:
        num_groups, num_options = costs.shape
        if block_index is None:
            self.order = np.arange(num_groups)
            self.offsets = np.array([0, num_groups])
            cap_of = np.full((num_groups, 1), capacity[0])
        else:
            self.order = np.argsort(block_index, kind="stable")
            self.offsets = np.concatenate([[0], np.cumsum(np.bincount(block_index))])
            cap_of = np.array(capacity)[block_index[self.order]][:, None]
        costs = costs[self.order]
        usable = allowed[self.order] & (costs <= cap_of)
        # A common factor within a block makes fewer offsets distinct, and lets the budget be rounded down to it.
        divisor = np.gcd.reduceat(np.gcd.reduce(np.where(usable, costs, 0), axis=1), self.offsets[:-1])
        divisor = np.maximum(divisor, 1)
        costs = costs // np.repeat(divisor, np.diff(self.offsets))[:, None]
        self.capacity = np.array(capacity, dtype=np.int64) // divisor
        self.perm = np.argsort(np.where(usable, costs, _INT64_SAFE), axis=1, kind="stable")
        self.costs = np.take_along_axis(costs, self.perm, axis=1)
        self.counts = usable.sum(axis=1)
        self.shape = self._shapes()
        self.room = _FIRST_ROOM
        self._make_room(int(np.diff(self.offsets).max()), num_options)

    def _shapes(self) -> np.ndarray:
        """What each block may take for granted, see :func:`rco.core.knapsack_kernels.solve_batch`."""
        from rco.core.knapsack_kernels import DISTINCT, GENERAL, SELECTION

        index = np.arange(self.costs.shape[1])
        beyond = index >= self.counts[:, None]
        steps = np.diff(self.costs, axis=1) > 0
        distinct = (steps | beyond[:, 1:]).all(axis=1)
        unit = (self.counts <= 2) & ((self.costs == index) | beyond).all(axis=1)
        by_block = [np.logical_and.reduceat(rows, self.offsets[:-1]) for rows in (distinct, unit)]
        return np.where(by_block[1], SELECTION, np.where(by_block[0], DISTINCT, GENERAL))

    def _make_room(self, num_groups: int, num_options: int) -> None:
        cells, side = num_groups * num_options, num_groups + 32
        self.workspace = (
            np.empty((2, cells)),
            np.empty((4, cells), dtype=np.int64),
            np.empty((4, side)),
            np.empty((10, side), dtype=np.int64),
        )
        self.lists = _state_lists(self.room)

    def solve(self, values: np.ndarray, max_states: int) -> Choices:
        """All samples of a batch; a sample that outgrows the state lists is repeated with larger ones."""
        from rco.core.knapsack_kernels import solve_batch

        batch, num_groups, _ = values.shape
        found = Choices(
            np.empty((batch, num_groups), dtype=np.int64), np.empty(batch, dtype=np.int64), np.empty(batch)
        )
        done, room, lists = 0, self.room, self.lists
        while True:
            done = solve_batch(
                values, self.costs, self.perm, self.counts, self.order, self.offsets, self.capacity, self.shape,
                *self.workspace, *lists, max_states, done, *found,
            )  # fmt: skip
            if done >= batch:
                return found
            room *= 4
            lists = _state_lists(room)
            if room <= _LARGEST_KEPT_ROOM:
                self.room, self.lists = room, lists


def _state_lists(room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.empty((3, room), dtype=np.int64),
        np.empty((3, room)),
        np.empty((3, room), dtype=np.int32),
        np.empty((2, 8 * room), dtype=np.int32),
    )


@dataclass(frozen=True)
class _Plans:
    """The knapsack as it is, or, where its integers outgrow int64, rounded in both directions.

    Rounding costs down (and the capacity down: a sum of integers that fits the one fits the other) relaxes the
    problem, rounding costs up tightens it. If the relaxed optimum is affordable it is the optimum.
    """

    relaxed: _Plan
    tightened: _Plan | None

    def solve(self, values: np.ndarray, problem: AllocationProblem, max_states: int) -> Choices:
        found = self.relaxed.solve(values, max_states)
        if self.tightened is None:
            return found
        for b in range(len(values)):
            if found.codes[b] == _INFEASIBLE or problem.is_feasible(found.choices[b]):
                continue
            bound = _total(values[b], found.choices[b]) + found.gaps[b]
            found.choices[b], found.codes[b] = self._affordable(values[b], problem, max_states)
            if found.codes[b] != _INFEASIBLE:
                found.gaps[b] = max(bound - _total(values[b], found.choices[b]), 0.0)
                found.codes[b] = _LIMIT if found.gaps[b] > 0 else _OPTIMAL
        return found

    def _affordable(
        self, values: np.ndarray, problem: AllocationProblem, max_states: int
    ) -> tuple[np.ndarray, int]:
        """The tightened optimum; failing that, the cheapest choice, which tells whether there is any."""
        assert self.tightened is not None
        tightened = self.tightened.solve(values[None], max_states)
        if tightened.codes[0] != _INFEASIBLE:
            return tightened.choices[0], _LIMIT
        usable = problem.allowed & (values > -math.inf)
        priced = np.where(usable, problem.unit_costs[0], problem.unit_costs[0].max() + 1)
        cheapest = priced.argmin(axis=1)
        if usable.any(axis=1).all() and problem.is_feasible(cheapest):
            return cheapest, _LIMIT
        return np.full(len(values), -1), _INFEASIBLE


def _total(values: np.ndarray, choices: np.ndarray) -> float:
    return float(values[np.arange(len(choices)), choices].sum())


# Plans by problem identity; an entry leaves with its problem.
_PLANS: dict[int, _Plans] = {}


def _plans(problem: AllocationProblem) -> _Plans:
    plans = _PLANS.get(id(problem))
    if plans is None:
        plans = _PLANS[id(problem)] = _prepare(problem)
        weakref.finalize(problem, _PLANS.pop, id(problem), None)
    return plans


def _prepare(problem: AllocationProblem) -> _Plans:
    costs, allowed, blocks = problem.reduced.costs[0], problem.allowed, problem.block_index
    dearest = costs.max(axis=1)
    total = sum(int(c) for c in dearest)
    capacity = [min(c, total) for c in problem.reduced.capacity]
    if total < _INT64_SAFE:
        return _Plans(_Plan(costs.astype(np.int64), capacity, allowed, blocks), None)
    shift = (total // _INT64_SAFE).bit_length() + 1
    wide = costs.astype(object)
    down = (wide >> shift).astype(np.int64)
    up = (-(-wide >> shift)).astype(np.int64)
    capacity = [c >> shift for c in capacity]
    return _Plans(_Plan(down, capacity, allowed, blocks), _Plan(up, capacity, allowed, blocks))


def _check_budgets(found: Choices, problem: AllocationProblem) -> None:
    """Cost every allocation again, with the problem's own integers; over budget is a bug, never a result."""
    if problem.unit_costs.dtype == object or problem.num_joint > 1:
        over = [
            b
            for b in range(len(found.codes))
            if found.codes[b] != _INFEASIBLE and not problem.is_feasible(found.choices[b])
        ]
    else:
        from rco.core.knapsack_kernels import total_costs

        block_of = problem.block_index
        if block_of is None:
            block_of = np.zeros(problem.num_groups, dtype=np.int64)
        totals = np.empty((len(found.codes), problem.num_budgets), dtype=np.int64)
        total_costs(problem.unit_costs[0], found.choices, block_of, totals)
        budgets = np.array([min(b, _INT64_SAFE) for b in problem.unit_budgets])
        over = np.flatnonzero((totals > budgets).any(axis=1) & (found.codes != _INFEASIBLE)).tolist()
    if over:
        raise RuntimeError(
            f"Internal error: the knapsack solver exceeded a budget in sample {over[0]}; please report this with "
            "the problem and the values."
        )
