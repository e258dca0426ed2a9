"""Compiled kernels of the Lagrangian dual: from values to the multiplier and a first solution.

:func:`undominated` keeps, per group, the options that cost more and are worth more than all before them;
:func:`multiplier` minimises the Lagrangian dual over them; :func:`fill` spends what the dual leaves among tied
groups. :func:`select` is the whole solution where each group has two options at unit cost.

The functions are small and allocate nothing: numba counts references in any function that grows arrays, which
costs more than the arithmetic here. Unpredictable branches are replaced by arithmetic.
"""

# numba infers and specialises all types here; annotations would be a second source that nothing checks.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rco.core.jit import internal

__all__ = [
    "GROW",
    "INFEASIBLE",
    "LIMIT",
    "OPTIMAL",
    "Active",
    "Options",
    "drop_equal",
    "fill",
    "multiplier",
    "rescale",
    "select",
    "undominated",
]

OPTIMAL, INFEASIBLE, LIMIT, GROW = 0, 1, 2, 3

# Values outside this range are rescaled by a power of two, so that no product over- or underflows.
_SMALLEST, _LARGEST = 2.0**-500, 2.0**500
_SAMPLE = 31  # entries sampled for a pivot


class Options(NamedTuple):
    """The options in play, group after group in order of cost; other arrays hold positions in these."""

    start: np.ndarray  # (n + 1,) first position of each group
    cost: np.ndarray
    value: np.ndarray
    column: np.ndarray  # in the problem


class Active(NamedTuple):
    """Groups whose choice is still open, each with an interval of positions."""

    group: np.ndarray
    low: np.ndarray
    high: np.ndarray
    pick: np.ndarray


@internal
def undominated(values, costs, perm, counts, order, first, n, options):
    """Write each group's undominated options in order of cost.

    Returns (cheapest total, dearest total, largest absolute value kept); the cheapest is -1 if a group is empty.
    Every option is written, and the end moved only past those to keep.
    """
    start, cost, value, column = options
    w = 0
    cheapest, dearest = np.int64(0), np.int64(0)
    largest = 0.0
    for g in range(n):
        p = first + g
        row = order[p]
        begin = w
        start[g] = begin
        best = -np.inf
        for j in range(counts[p]):
            k = perm[p, j]
            x = values[row, k]
            cost[w] = costs[p, j]
            value[w] = x
            column[w] = k
            keep = x > best
            w += np.int64(keep)
            best = x if keep else best
        if w == begin:
            return np.int64(-1), dearest, largest
        cheapest += cost[begin]
        dearest += cost[w - 1]
        largest = max(largest, max(best, -value[begin]))
    start[n] = w
    return cheapest, dearest, largest


@internal
def drop_equal(n, options):
    """Of undominated options that cost the same keep the last, which is worth most."""
    start, cost, value, column = options
    w, begin = 0, start[0]
    for g in range(n):
        end = start[g + 1]
        start[g] = w
        for i in range(begin, end):
            if i + 1 == end or cost[i + 1] != cost[i]:
                cost[w], value[w], column[w] = cost[i], value[i], column[i]
                w += 1
        begin = end
    start[n] = w


@internal
def rescale(value, count, largest):
    """Bring extreme values into range by a power of two; returns the factor that undoes it."""
    if largest == 0.0 or _SMALLEST < largest < _LARGEST:
        return 1.0
    exponent = np.floor(np.log2(largest))
    half = np.floor(-0.5 * exponent)  # in two steps: 2**1074 is no float64
    for i in range(count):
        value[i] = value[i] * 2.0**half * 2.0 ** (-exponent - half)
    return 2.0**exponent


@internal
def _sample_slope(low, high, m, cost, value, sample):
    """The median slope of some active groups: the pivot when secant steps shrink too little."""
    count = min(m, _SAMPLE)
    for s in range(count):
        a = (s * m) // count
        slope = (value[high[a]] - value[low[a]]) / (cost[high[a]] - cost[low[a]])
        t = s
        while t > 0 and sample[t - 1] > slope:
            sample[t] = sample[t - 1]
            t -= 1
        sample[t] = slope
    return sample[count // 2]


@internal
def _pick(low, high, pick, m, cost, value, lam):
    """Pick the best of each interval; returns cost and value above the low ends, and value below the high ones."""
    cost_above = np.int64(0)
    value_above = 0.0
    value_below = 0.0
    for a in range(m):
        lo, hi = low[a], high[a]
        c0, v0 = cost[lo], value[lo]
        at = lo
        best = 0.0
        for i in range(lo + 1, hi + 1):
            t = (value[i] - v0) - lam * (cost[i] - c0)
            better = t > best
            best = t if better else best
            at = i if better else at
        pick[a] = at
        cost_above += cost[at] - c0
        value_above += value[at] - v0
        value_below += value[hi] - value[at]
    return cost_above, value_above, value_below


@internal
def _narrow(group, low, high, pick, m, base, over):
    """Move one end of every interval to the pick and retire the groups whose interval has closed."""
    kept = 0
    for a in range(m):
        g, at = group[a], pick[a]
        lo = low[a] if over else at
        hi = at if over else high[a]
        base[g] = lo
        group[kept], low[kept], high[kept] = g, lo, hi
        kept += np.int64(lo != hi)
    return kept


@internal
def multiplier(n, options, cheapest, capacity, base, active, sample):
    """Minimise the dual: returns (lam, slack of the feasible side, groups still tied between two options).

    A secant step intersects the supporting lines of both ends: either it finds a better choice in some interval,
    or it is at the minimum. Any multiplier is valid for what follows, so rounding costs time at most.
    """
    start, cost, value, _ = options
    group, low, high, pick = active
    m = np.int64(0)
    cost_lo, dc = cheapest, np.int64(0)
    dv = 0.0
    for g in range(n):
        lo, hi = start[g], start[g + 1] - 1
        base[g] = lo
        group[m], low[m], high[m] = g, lo, hi
        m += np.int64(hi != lo)
        dc += cost[hi] - cost[lo]
        dv += value[hi] - value[lo]
    before, steps = m, 0
    while True:
        lam = dv / dc
        secant = steps % 4 != 3 or 2 * m <= before
        if steps % 4 == 3:
            before = m
        if not secant:
            lam = _sample_slope(low, high, m, cost, value, sample)
        steps += 1
        above, value_above, value_below = _pick(low, high, pick, m, cost, value, lam)
        total = cost_lo + above
        if total == capacity:
            for a in range(m):
                base[group[a]] = pick[a]
            return lam, np.int64(0), np.int64(0)
        if above == 0 or above == dc:
            if secant:
                return lam, capacity - cost_lo, m
            continue
        over = total > capacity
        m = _narrow(group, low, high, pick, m, base, over)
        if over:
            dv, dc = value_above, above
        else:
            cost_lo = total
            dv, dc = value_below, dc - above


@internal
def fill(active, m, cost, base, slack):
    """Spend slack on tied groups; returns what is left, the tied group that overshoots it least, its upper end."""
    group, low, high, _ = active
    tight = -1
    for a in range(m):
        step = cost[high[a]] - cost[low[a]]
        if step <= slack:
            base[group[a]] = high[a]
            slack -= step
        else:
            base[group[a]] = low[a]
            if tight < 0 or step < cost[high[tight]] - cost[low[tight]]:
                tight = a
    if tight < 0:
        return slack, np.int64(-1), np.int64(-1)
    return slack, group[tight], high[tight]


@internal
def _threshold(a, m, rank, sample):
    """The ``rank``-th largest of ``a[:m]``, counted from 1; destroys ``a``."""
    while True:
        count = min(m, _SAMPLE)
        for s in range(count):
            x = a[(s * m) // count]
            t = s
            while t > 0 and sample[t - 1] < x:
                sample[t] = sample[t - 1]
                t -= 1
            sample[t] = x
        pivot = sample[((rank - 1) * count) // m]
        above, equal = 0, 0
        for i in range(m):
            above += np.int64(a[i] > pivot)
            equal += np.int64(a[i] == pivot)
        if above < rank <= above + equal:
            return pivot
        upper = rank <= above
        if not upper:
            rank -= above + equal
        w = 0
        for i in range(m):
            x = a[i]
            a[w] = x
            w += np.int64(x > pivot if upper else x < pivot)
        m = w


@internal
def _gains(values, perm, counts, order, first, n, scale, gain, scratch):
    """Value of option 1 above option 0; returns how many are positive, forced (+inf), void, too large."""
    positive, forced, void, large = 0, 0, 0, 0
    for g in range(n):
        p = first + g
        low = scale * values[order[p], perm[p, 0]]
        high = scale * values[order[p], perm[p, 1]] if counts[p] == 2 else -np.inf
        x = high - low
        gain[g] = x
        scratch[g] = x
        positive += np.int64(x > 0.0)
        forced += np.int64(x == np.inf)
        void += np.int64(x != x)  # -inf on both sides
        large += np.int64(abs(x) == np.inf and low > -np.inf and high > -np.inf)
    return positive, forced, void, large


@internal
def select(values, perm, counts, order, first, n, capacity, gain, scratch, sample, choice):
    """The knapsack of at most two options at cost 0 and 1: take the largest gains; returns the code."""
    positive, forced, void, large = _gains(values, perm, counts, order, first, n, 1.0, gain, scratch)
    if large > 0:  # differences of halves cannot overflow
        positive, forced, void, large = _gains(values, perm, counts, order, first, n, 0.5, gain, scratch)
    if void > 0:
        return INFEASIBLE
    if forced > capacity:
        return INFEASIBLE
    cut, ties = 0.0, np.int64(0)
    if positive > capacity:
        cut = np.inf
        if capacity > 0:
            cut = _threshold(scratch, n, capacity, sample)
            ties = capacity
            for g in range(n):
                ties -= np.int64(gain[g] > cut)
    for g in range(n):
        x = gain[g]
        take = x > cut
        if x == cut and ties > 0:  # of equal gains the first groups, as far as the budget goes
            take = True
            ties -= 1
        choice[order[first + g]] = perm[first + g, np.int64(take)]
    return OPTIMAL
