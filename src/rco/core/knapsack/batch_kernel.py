"""The compiled entry points of the exact multiple-choice knapsack.

With a multiplier ``lam >= 0`` and the regret ``r_ik = max_j(v_ij - lam c_ij) - (v_ik - lam c_ik) >= 0``, every
feasible choice x is worth ``L(lam) - [sum of its regrets + lam * slack]``, and the bracket is minimised:
:mod:`~rco.core.knapsack.lagrangian_dual` finds ``lam`` and a first solution,
:mod:`~rco.core.knapsack.state_lists` closes the gap. There is no budget
grid, so time does not depend on the budget. Costs, slack and offsets are int64; only values, the multiplier and
regrets are floats.
"""

# numba infers and specialises all types here; annotations would be a second source that nothing checks.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import inspect
import zlib

import numpy as np

from rco.core.jit import entry, internal
from rco.core.knapsack import lagrangian_dual, state_lists
from rco.core.knapsack.lagrangian_dual import (
    GROW,
    INFEASIBLE,
    OPTIMAL,
    Active,
    Options,
    drop_equal,
    fill,
    multiplier,
    rescale,
    select,
    undominated,
)
from rco.core.knapsack.state_lists import Candidates, Lists, Order, scan, search, tolerance

__all__ = ["DISTINCT", "GENERAL", "SELECTION", "audit", "solve_batch"]

GENERAL, DISTINCT, SELECTION = 0, 1, 2


@internal
def _solve_block(
    values, costs, perm, counts, order, first, n, capacity, distinct,
    options, active, base, chosen, candidates, ranking, lists, sample, max_states,
):  # fmt: skip
    """One knapsack: positions of the solution in ``chosen``; returns (code, certified gap)."""
    cheapest, dearest, largest = undominated(values, costs, perm, counts, order, first, n, options)
    if cheapest < 0 or cheapest > capacity:
        return INFEASIBLE, 0.0
    start, cost, value = options.start, options.cost, options.value
    if not distinct:
        drop_equal(n, options)
    if dearest <= capacity:
        for g in range(n):
            chosen[g] = start[g + 1] - 1
        return OPTIMAL, 0.0
    unit = rescale(value, start[n], largest)
    lam, slack, tied = multiplier(n, options, cheapest, capacity, base, active, sample)
    slack, tight, tight_at = fill(active, tied, cost, base, slack)
    for g in range(n):
        chosen[g] = base[g]
    if slack == 0:
        return OPTIMAL, 0.0
    gap, swap, with_tight, groups = scan(n, options, base, lam, slack, tight, tight_at, candidates)
    if swap >= 0:
        for g in range(n):
            if start[g] <= swap < start[g + 1]:
                chosen[g] = swap
        if with_tight:
            chosen[tight] = tight_at
    eps = tolerance(candidates, groups, lam)
    if gap <= eps:
        return OPTIMAL, 0.0
    code, left = search(n, base, chosen, groups, candidates, ranking, lam, slack, gap, eps, lists, max_states)
    return code, left * unit


def _compile(revision: int):
    """The entry point, cached by numba under a key that includes the files its callees lie in."""

    @entry
    def solve_batch(
        values, costs, perm, counts, order, offsets, capacity, shape,
        cell_floats, cell_ints, side_floats, side_ints, d, r, node, tree, max_states, begin, choices, status, gaps,
    ):  # fmt: skip
        """Solve samples from ``begin`` on; returns the first one that needs larger lists, or the batch size.

        Args:
            values: (batch, N, K) float64; -inf forbids an option.
            costs: (N, K) int64, groups in block order, each row ascending over its ``counts`` usable options.
            perm: (N, K) the option that each cell of ``costs`` belongs to.
            counts: (N,) usable options per group.
            order: (N,) the group that each row of ``costs`` belongs to.
            offsets: (J + 1,) start of each block.
            capacity: (J,) int64, one per block.
            shape: (J,) GENERAL; DISTINCT where no group has two options of one cost; SELECTION where each has at
                most two, at cost 0 and 1.
            cell_floats: (2, cells) float64 scratch, a cell for each option of the largest block.
            cell_ints: (4, cells) int64 scratch.
            side_floats: (4, side) float64 scratch, an entry for each group of the largest block, and 32 more.
            side_ints: (10, side) int64 scratch.
            d: (4, room) int64 state offsets.
            r: (4, room) float64 state regrets.
            node: (4, room) int32 state nodes.
            tree: (2, room) int32 parents and options.
            max_states: States that one block may visit before it stops with status LIMIT.
            begin: First sample to solve.
            choices: (batch, N) int64 out; -1 throughout where infeasible.
            status: (batch,) int64 out.
            gaps: (batch,) float64 out, zero where optimal.
        """
        revision  # noqa: B018 - a closure variable, and with it part of the cache key
        options = Options(side_ints[0], cell_ints[0], cell_floats[0], cell_ints[1])
        active = Active(side_ints[1], side_ints[2], side_ints[3], side_ints[4])
        base, chosen = side_ints[5], side_ints[6]
        candidates = Candidates(side_ints[7], side_ints[8], cell_ints[2], cell_ints[3], cell_floats[1])
        # The ranking sorts in the buffers of the active groups, which are no longer needed then.
        ranking = Order(side_ints[9], side_ints[1], side_floats[0], side_floats[1], side_floats[2])
        lists = Lists(d, r, node, tree)
        sample = side_floats[3]
        batch = values.shape[0]
        for b in range(begin, batch):
            status[b] = OPTIMAL
            gaps[b] = 0.0
            for j in range(len(capacity)):
                first = offsets[j]
                n = offsets[j + 1] - first
                gap = 0.0
                if shape[j] == SELECTION:
                    code = select(
                        values[b], perm, counts, order, first, n, capacity[j],
                        options.value, candidates.regret, sample, choices[b],
                    )  # fmt: skip
                else:
                    code, gap = _solve_block(
                        values[b], costs, perm, counts, order, first, n, capacity[j], shape[j] == DISTINCT,
                        options, active, base, chosen, candidates, ranking, lists, sample, max_states,
                    )  # fmt: skip
                if code == GROW:
                    return b
                if code == INFEASIBLE:
                    status[b] = INFEASIBLE
                    gaps[b] = 0.0
                    for g in range(choices.shape[1]):
                        choices[b, g] = -1
                    break
                status[b] = max(status[b], code)
                gaps[b] += gap
                if shape[j] != SELECTION:
                    for g in range(n):
                        choices[b, order[first + g]] = options.column[chosen[g]]
        return batch

    return solve_batch


# numba checks only the file of a cached function for changes, not those of the functions it calls.
solve_batch = _compile(
    zlib.crc32((inspect.getsource(lagrangian_dual) + inspect.getsource(state_lists)).encode())
)


@entry
def audit(values, unit_costs, choices, block_of, budgets, totals, worth):
    """Cost and value of every sample's choices, independent of the solver's reductions and scaling.

    Returns the first sample that exceeds a budget, or -1. Values are summed with compensation, so that a total
    does not depend on the order of groups by more than its last digits.
    """
    over = -1
    for b in range(choices.shape[0]):
        for j in range(totals.shape[1]):
            totals[b, j] = 0
        worth[b] = -np.inf
        if choices[b, 0] < 0:
            continue
        total, lost = 0.0, 0.0
        for g in range(choices.shape[1]):
            k = choices[b, g]
            totals[b, block_of[g]] += unit_costs[g, k]
            x = values[b, g, k]
            y = total + x
            lost += (total - y) + x if abs(total) >= abs(x) else (x - y) + total
            total = y
        worth[b] = total + lost if abs(total) < np.inf else total
        for j in range(totals.shape[1]):
            if over < 0 and totals[b, j] > budgets[j]:
                over = b
    return over
