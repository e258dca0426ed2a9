"""Compiled kernels of the exact multiple-choice knapsack: no budget grid, time independent of the budget.

With a multiplier ``lam >= 0`` and the regret ``r_ik = max_j(v_ij - lam c_ij) - (v_ik - lam c_ik) >= 0``, every
feasible choice x is worth ``L(lam) - [sum of its regrets + lam * slack]``. The bracket is what is minimised:

1. :func:`_undominated` keeps, per group, the options that cost more and are worth more than all before them.
2. :func:`_multiplier` finds the minimum of the dual by secant steps over the intervals of options that can
   still be chosen. Any multiplier is valid, so its rounding never affects exactness.
3. :func:`_fill` and :func:`_scan` build a first solution and drop every option whose regret alone exceeds the gap.
4. :func:`_expand` merges lists of states (cost - capacity, regret) over what is left, with dominance and with
   lower bounds from the smallest regret per unit of cost among the groups still to come.

Costs, slack and state offsets are int64; only values, the multiplier and regrets are floats. The functions are
small and allocate nothing: numba counts references in any function that grows arrays, which costs more than the
arithmetic here. Options are addressed by their position in the compact lists that step 1 writes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["DISTINCT", "GENERAL", "SELECTION", "solve_batch", "total_costs"]

OPTIMAL, INFEASIBLE, LIMIT, GROW = 0, 1, 2, 3
GENERAL, DISTINCT, SELECTION = 0, 1, 2

# Only the two functions that Python calls need the wrappers that unpack Python objects: half the compile time.
_internal = njit(cache=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

# Closer ties than this, relative to the largest difference still in play, are rounding noise and not chased.
_TIE = 1e-13
# Values outside this range are rescaled by a power of two, so that no product over- or underflows.
_SMALLEST, _LARGEST = 2.0**-500, 2.0**500
_SAMPLE = 31  # entries looked at for a pivot
# Exact passes before, between and after the beam passes: (states allowed, beam width of the pass before).
_FIRST_PASS, _SECOND_PASS = 100_000, 2_000_000
_NARROW_BEAM, _WIDE_BEAM = 1024, 16384


@_internal
def _undominated(values, costs, perm, counts, order, first, n, start, cc, vv, kk):  # type: ignore[no-untyped-def]
    """Write each group's undominated options in order of cost.

    Returns (cheapest total, dearest total, largest absolute value kept); the cheapest is -1 if a group is empty.
    Every option is written and the end moved only past those to keep: a branch here would be a coin toss.
    """
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
            cc[w] = costs[p, j]
            vv[w] = x
            kk[w] = k
            keep = x > best
            w += np.int64(keep)
            best = x if keep else best
        if w == begin:
            return np.int64(-1), dearest, largest
        cheapest += cc[begin]
        dearest += cc[w - 1]
        largest = max(largest, max(best, -vv[begin]))
    start[n] = w
    return cheapest, dearest, largest


@_internal
def _drop_equal(n, start, cc, vv, kk):  # type: ignore[no-untyped-def]
    """Of options that cost the same keep the last, which is worth most."""
    w, begin = 0, start[0]
    for g in range(n):
        end = start[g + 1]
        start[g] = w
        for i in range(begin, end):
            if i + 1 == end or cc[i + 1] != cc[i]:
                cc[w], vv[w], kk[w] = cc[i], vv[i], kk[i]
                w += 1
        begin = end
    start[n] = w


@_internal
def _threshold(a, m, rank, sample):  # type: ignore[no-untyped-def]
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
        w = 0
        if rank <= above:
            for i in range(m):
                x = a[i]
                a[w] = x
                w += np.int64(x > pivot)
        else:
            for i in range(m):
                x = a[i]
                a[w] = x
                w += np.int64(x < pivot)
            rank -= above + equal
        m = w


@_internal
def _select(values, perm, counts, order, first, n, capacity, gain, scratch, sample, choice):  # type: ignore[no-untyped-def]
    """The knapsack of at most two options at cost 0 and 1: take the largest gains; returns the code."""
    positive, forced = 0, 0
    for g in range(n):
        p = first + g
        x = 0.5 * values[order[p], perm[p, 0]]
        if counts[p] == 1:
            x = x - np.inf if x > -np.inf else np.nan
        else:
            x = 0.5 * values[order[p], perm[p, 1]] - x  # halves, so that no difference overflows
        if x != x:
            return INFEASIBLE
        gain[g] = x
        scratch[g] = x
        positive += np.int64(x > 0.0)
        forced += np.int64(x == np.inf)
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
        if x == cut and ties > 0:
            take = True
            ties -= 1
        choice[order[first + g]] = perm[first + g, np.int64(take)]
    return OPTIMAL


@_internal
def _rescale(vv, count, largest):  # type: ignore[no-untyped-def]
    """Bring extreme values into range by a power of two; returns the factor that undoes it."""
    if largest == 0.0 or _SMALLEST < largest < _LARGEST:
        return 1.0
    exponent = np.floor(np.log2(largest))
    half = np.floor(-0.5 * exponent)  # in two steps: 2**1074 is no float64
    for i in range(count):
        vv[i] = vv[i] * 2.0**half * 2.0 ** (-exponent - half)
    return 2.0**exponent


@_internal
def _sample_slope(act, alo, ahi, m, cc, vv, scratch):  # type: ignore[no-untyped-def]
    """The median slope of some active groups: the pivot when secant steps shrink too little."""
    count = min(m, _SAMPLE)
    for s in range(count):
        a = (s * m) // count
        slope = (vv[ahi[a]] - vv[alo[a]]) / (cc[ahi[a]] - cc[alo[a]])
        t = s
        while t > 0 and scratch[t - 1] > slope:
            scratch[t] = scratch[t - 1]
            t -= 1
        scratch[t] = slope
    return scratch[count // 2]


@_internal
def _pick(alo, ahi, pick, m, cc, vv, lam):  # type: ignore[no-untyped-def]
    """Best option of each active interval at ``lam``; its cost and value above the low end, value below the high."""
    cost_above = np.int64(0)
    value_above = 0.0
    value_below = 0.0
    for a in range(m):
        lo, hi = alo[a], ahi[a]
        c0, v0 = cc[lo], vv[lo]
        at = lo
        best = 0.0
        for i in range(lo + 1, hi + 1):
            t = (vv[i] - v0) - lam * (cc[i] - c0)
            better = t > best
            best = t if better else best
            at = i if better else at
        pick[a] = at
        cost_above += cc[at] - c0
        value_above += vv[at] - v0
        value_below += vv[hi] - vv[at]
    return cost_above, value_above, value_below


@_internal
def _narrow(act, alo, ahi, pick, m, base, over):  # type: ignore[no-untyped-def]
    """Move one end of every interval to the pick and retire the groups whose interval has closed."""
    kept = 0
    for a in range(m):
        g, at = act[a], pick[a]
        lo = alo[a] if over else at
        hi = at if over else ahi[a]
        base[g] = lo
        act[kept], alo[kept], ahi[kept] = g, lo, hi
        kept += np.int64(lo != hi)
    return kept


@_internal
def _multiplier(n, start, cc, vv, cheapest, capacity, base, act, alo, ahi, pick, scratch):  # type: ignore[no-untyped-def]
    """Minimise the dual: returns (lam, slack of the feasible side, groups still tied between two options)."""
    m = np.int64(0)
    cost_lo, dc = cheapest, np.int64(0)
    dv = 0.0
    for g in range(n):
        lo, hi = start[g], start[g + 1] - 1
        base[g] = lo
        act[m], alo[m], ahi[m] = g, lo, hi
        m += np.int64(hi != lo)
        dc += cc[hi] - cc[lo]
        dv += vv[hi] - vv[lo]
    before, steps = m, 0
    while True:
        lam = dv / dc
        secant = steps % 4 != 3 or 2 * m <= before
        if steps % 4 == 3:
            before = m
        if not secant:
            lam = _sample_slope(act, alo, ahi, m, cc, vv, scratch)
        steps += 1
        above, value_above, value_below = _pick(alo, ahi, pick, m, cc, vv, lam)
        cost = cost_lo + above
        if cost == capacity:
            for a in range(m):
                base[act[a]] = pick[a]
            return lam, np.int64(0), 0
        if above == 0 or above == dc:
            if secant:
                return lam, capacity - cost_lo, m
            continue
        over = cost > capacity
        m = _narrow(act, alo, ahi, pick, m, base, over)
        if over:
            dv, dc = value_above, above
        else:
            cost_lo = cost
            dv, dc = value_below, dc - above


@_internal
def _fill(act, alo, ahi, m, cc, base, slack):  # type: ignore[no-untyped-def]
    """Spend slack on tied groups; returns what is left and the tied group that overshoots it least."""
    tight = -1
    for a in range(m):
        step = cc[ahi[a]] - cc[alo[a]]
        if step <= slack:
            base[act[a]] = ahi[a]
            slack -= step
        else:
            base[act[a]] = alo[a]
            if tight < 0 or step < cc[ahi[tight]] - cc[alo[tight]]:
                tight = a
    if tight < 0:
        return slack, -1, -1
    return slack, act[tight], ahi[tight]


@_internal
def _scan(n, start, cc, vv, base, lam, slack, tight, tight_at, cand_at, cand_dc, cand_r, cand_start, owner):  # type: ignore[no-untyped-def]
    """Collect the options whose regret is below the gap, and improve the gap by single exchanges.

    Returns (gap, position of the exchanged-in option or -1, whether the tight group moves up too, groups with
    candidates). An option that saves cost is tried together with the tight group's step up.
    """
    gap = lam * slack
    swap, with_tight = -1, False
    excess, tight_r = np.int64(0), np.inf
    if tight >= 0:
        b = base[tight]
        excess = cc[tight_at] - cc[b] - slack
        tight_r = max((vv[b] - vv[tight_at]) + lam * (cc[tight_at] - cc[b]), 0.0)
    w, groups = 0, 0
    for g in range(n):
        b = base[g]
        cb, vb = cc[b], vv[b]
        w0 = w
        for i in range(start[g], start[g + 1]):
            dc = cc[i] - cb
            r = (vb - vv[i]) + lam * dc
            if r < gap and i != b:
                r = max(r, 0.0)
                cand_at[w], cand_dc[w], cand_r[w] = i, dc, r
                w += 1
                if dc > 0:
                    if dc <= slack and r + lam * (slack - dc) < gap:
                        gap, swap, with_tight = r + lam * (slack - dc), i, False
                elif g != tight and excess + dc <= 0 and r + tight_r + lam * (-dc - excess) < gap:
                    gap, swap, with_tight = r + tight_r + lam * (-dc - excess), i, True
        if w > w0:
            cand_start[groups] = w0
            owner[groups] = g
            groups += 1
    cand_start[groups] = w
    return gap, swap, with_tight, groups


@_internal
def _tolerance(cand_dc, cand_r, count, lam):  # type: ignore[no-untyped-def]
    largest = 0.0
    for i in range(count):
        largest = max(largest, cand_r[i] + lam * abs(cand_dc[i]))
    return _TIE * largest


@_internal
def _keep_below(cut, groups, cand_at, cand_dc, cand_r, cand_start, owner):  # type: ignore[no-untyped-def]
    """Drop candidates whose regret alone reaches the cut, in place; returns the groups left."""
    w, kept = 0, 0
    begin = cand_start[0]
    for j in range(groups):
        end = cand_start[j + 1]
        w0 = w
        for i in range(begin, end):
            if cand_r[i] < cut:
                cand_at[w], cand_dc[w], cand_r[w] = cand_at[i], cand_dc[i], cand_r[i]
                w += 1
        if w > w0:
            cand_start[kept] = w0
            owner[kept] = owner[j]
            kept += 1
        begin = end
    cand_start[kept] = w
    return kept


@_internal
def _sort(key, index, spare, count):  # type: ignore[no-untyped-def]
    """Stable bottom-up merge sort of ``index`` by ``key[index]``."""
    width = 1
    while width < count:
        for left in range(0, count, 2 * width):
            middle, right = min(left + width, count), min(left + 2 * width, count)
            i, j = left, middle
            for w in range(left, right):
                if i < middle and (j >= right or key[index[i]] <= key[index[j]]):
                    spare[w] = index[i]
                    i += 1
                else:
                    spare[w] = index[j]
                    j += 1
        for w in range(count):
            index[w] = spare[w]
        width *= 2


@_internal
def _arrange(groups, cand_start, cand_dc, cand_r, key, index, spare, down, up):  # type: ignore[no-untyped-def]
    """Order groups by their cheapest regret per unit of cost; suffix minima of that, down and up."""
    for j in range(groups):
        key[j] = np.inf
        index[j] = j
        for i in range(cand_start[j], cand_start[j + 1]):
            key[j] = min(key[j], cand_r[i] / abs(cand_dc[i]))
    _sort(key, index, spare, groups)
    down[groups] = np.inf
    up[groups] = np.inf
    for s in range(groups - 1, -1, -1):
        j = index[s]
        down[s], up[s] = down[s + 1], up[s + 1]
        for i in range(cand_start[j], cand_start[j + 1]):
            slope = cand_r[i] / abs(cand_dc[i])
            if cand_dc[i] < 0:
                down[s] = min(down[s], slope)
            else:
                up[s] = min(up[s], slope)


@_internal
def _merge(ad, ar, an, na, cd, cr, cn, nc, step, regret, option, od, orr, on, arena, nodes, lam, down, up, gap, eps):  # type: ignore[no-untyped-def]
    """Merge list A with list C moved by one option; drop what is dominated or cannot beat the gap.

    Lists are sorted by offset d = cost - capacity; a state is worth less the larger ``r - lam d``, so that
    this must fall along a list. Returns (length, arena size, gap, node of a new best solution or -2).
    """
    i, j, w = 0, 0, 0
    best = -2
    worth = np.inf
    cut = gap - eps
    while i < na or j < nc:
        moved = False
        if j < nc:
            d, r = cd[j] + step, cr[j] + regret
            moved = i >= na or d < ad[i] or (d == ad[i] and r < ar[i])
        if moved:
            node = cn[j]
            j += 1
        else:
            d, r, node = ad[i], ar[i], an[i]
            i += 1
        f = r - lam * d
        if f >= worth:
            continue
        worth = f
        if (r + d * down if d > 0 else r - d * up) >= cut:
            continue
        if moved:
            arena[0, nodes] = node
            arena[1, nodes] = option
            node = nodes
            nodes += 1
        od[w], orr[w], on[w] = d, r, node
        w += 1
        if d <= 0 and f < gap:
            gap, best = f, node
            cut = gap - eps
    return w, nodes, gap, best


@_internal
def _lowest(d, r, begin, end, down, up):  # type: ignore[no-untyped-def]
    """The least regret plus slack that any completion of these states can reach."""
    low = np.inf
    for i in range(begin, end):
        low = min(low, r[i] + d[i] * down if d[i] > 0 else r[i] - d[i] * up)
    return low


@_internal
def _window(d, count, width):  # type: ignore[no-untyped-def]
    """The ``width`` states around zero offset: their begin in the sorted list."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if d[middle] <= 0:
            low = middle + 1
        else:
            high = middle
    return min(max(low - width // 2, 0), count - width)


@_internal
def _expand(  # type: ignore[no-untyped-def]
    groups, index, cand_start, cand_dc, cand_r, down, up, lam, slack, gap, eps, ld, lr, ln, arena, limit, width
):
    """Run the state lists over all groups; with a ``width``, keep only that many states around zero offset.

    Returns (code, gap, node of the best solution or -2, lower bound on what was not explored, states visited).
    """
    room = ld.shape[1]
    ld[0, 0], lr[0, 0], ln[0, 0] = -slack, 0.0, -1
    # Typed zeros: a literal would make numba compile the functions it is passed to twice.
    none, now, count, nodes = np.int64(0), np.int64(0), np.int64(1), np.int64(0)
    best, lower, work = -2, np.inf, 0
    for s in range(groups):
        j = index[s]
        rest_down, rest_up = down[s + 1], min(lam, up[s + 1])
        merged, size = now, count
        for i in range(cand_start[j], cand_start[j + 1]):
            work += size + count
            if work > limit:
                low = _lowest(ld[now], lr[now], none, count, down[s], min(lam, up[s]))
                return LIMIT, gap, best, min(low, lower), work
            if size + count > room or nodes + count > arena.shape[1]:
                return GROW, gap, best, 0.0, work
            into = 3 - now - merged if merged != now else (now + 1) % 3
            size, nodes, gap, node = _merge(
                ld[merged], lr[merged], ln[merged], size, ld[now], lr[now], ln[now], count,
                cand_dc[i], cand_r[i], i, ld[into], lr[into], ln[into], arena, nodes,
                lam, rest_down, rest_up, gap, eps,
            )  # fmt: skip
            merged = into
            if node != -2:
                best = node
        now, count = merged, size
        if count == 0:
            break
        if 0 < width < count:
            begin = _window(ld[now], count, width)
            lower = min(lower, _lowest(ld[now], lr[now], none, begin, rest_down, rest_up))
            lower = min(lower, _lowest(ld[now], lr[now], begin + width, count, rest_down, rest_up))
            for i in range(width):
                ld[now, i], lr[now, i], ln[now, i] = ld[now, begin + i], lr[now, begin + i], ln[now, begin + i]
            count = width
    return OPTIMAL, gap, best, lower, work


@_internal
def _adopt(node, arena, groups, cand_start, cand_at, owner, n, base, chosen):  # type: ignore[no-untyped-def]
    """Write the solution that a chain of arena nodes describes."""
    for g in range(n):
        chosen[g] = base[g]
    while node >= 0:
        i = arena[1, node]
        low, high = 0, groups - 1
        while low < high:
            middle = (low + high + 1) // 2
            if cand_start[middle] <= i:
                low = middle
            else:
                high = middle - 1
        chosen[owner[low]] = cand_at[i]
        node = arena[0, node]


@_internal
def _search(  # type: ignore[no-untyped-def]
    n, base, chosen, groups, cand_at, cand_dc, cand_r, cand_start, owner, lam, slack, gap, eps,
    key, index, spare, down, up, ld, lr, ln, arena, max_states,
):  # fmt: skip
    """Close the gap: exact passes, with beam passes between them for a better solution to prune with."""
    lower, spent = 0.0, 0
    for stage in range(6):
        width, allowed = 0, max_states - spent
        if stage == 0:
            allowed = min(allowed, _FIRST_PASS)
        elif stage == 1:
            width, allowed = _NARROW_BEAM, min(allowed, _SECOND_PASS)
        elif stage == 2:
            allowed = min(allowed, _SECOND_PASS)
        elif stage == 3:
            width, allowed = _WIDE_BEAM, allowed // 2
        elif stage == 5:
            break
        groups = _keep_below(gap - eps, groups, cand_at, cand_dc, cand_r, cand_start, owner)
        _arrange(groups, cand_start, cand_dc, cand_r, key, index, spare, down, up)
        code, gap, best, low, work = _expand(
            groups, index, cand_start, cand_dc, cand_r, down, up, lam, slack, gap, eps,
            ld, lr, ln, arena, allowed, width,
        )  # fmt: skip
        if code == GROW:
            return GROW, 0.0
        if best != -2:
            _adopt(best, arena, groups, cand_start, cand_at, owner, n, base, chosen)
        lower = max(lower, min(low, gap))
        if (code == OPTIMAL and (width == 0 or low >= gap - eps)) or gap - lower <= eps:
            return OPTIMAL, 0.0
        spent += work
        if spent >= max_states:
            break
    return LIMIT, gap - lower


@_internal
def _solve_block(  # type: ignore[no-untyped-def]
    values, costs, perm, counts, order, first, n, capacity, distinct, start, cc, vv, kk, base, chosen,
    act, alo, ahi, pick, cand_at, cand_dc, cand_r, cand_start, owner, key, index, spare, down, up, sample, ld, lr, ln, arena, max_states,
):  # fmt: skip
    """One knapsack: positions of the solution in ``chosen``; returns (code, certified gap)."""
    cheapest, dearest, largest = _undominated(
        values, costs, perm, counts, order, first, n, start, cc, vv, kk
    )
    if cheapest < 0 or cheapest > capacity:
        return INFEASIBLE, 0.0
    if not distinct:
        _drop_equal(n, start, cc, vv, kk)
    if dearest <= capacity:
        for g in range(n):
            chosen[g] = start[g + 1] - 1
        return OPTIMAL, 0.0
    unit = _rescale(vv, start[n], largest)
    lam, slack, tied = _multiplier(n, start, cc, vv, cheapest, capacity, base, act, alo, ahi, pick, sample)
    slack, tight, tight_at = _fill(act, alo, ahi, tied, cc, base, slack)
    for g in range(n):
        chosen[g] = base[g]
    if slack == 0:
        return OPTIMAL, 0.0
    gap, swap, with_tight, groups = _scan(
        n, start, cc, vv, base, lam, slack, tight, tight_at, cand_at, cand_dc, cand_r, cand_start, owner
    )
    if swap >= 0:
        for g in range(n):
            if start[g] <= swap < start[g + 1]:
                chosen[g] = swap
        if with_tight:
            chosen[tight] = tight_at
    eps = _tolerance(cand_dc, cand_r, cand_start[groups], lam)
    if gap <= eps:
        return OPTIMAL, 0.0
    code, left = _search(
        n, base, chosen, groups, cand_at, cand_dc, cand_r, cand_start, owner, lam, slack, gap, eps,
        key, index, spare, down, up, ld, lr, ln, arena, max_states,
    )  # fmt: skip
    return code, left * unit


@njit(cache=True, error_model="numpy")
def solve_batch(  # type: ignore[no-untyped-def]
    values, costs, perm, counts, order, offsets, capacity, shape,
    cell_floats, cell_ints, side_floats, side_ints, ld, lr, ln, arena, max_states, begin, choices, status, gaps,
):  # fmt: skip
    """Solve samples from ``begin`` on; returns the first unsolved one (it needs more room) or the batch size.

    Args:
        values: (batch, N, K) float64; -inf forbids an option.
        costs: (N, K) int64, groups in block order, each row ascending over its ``counts`` usable options.
        perm: (N, K) the option that each cell of ``costs`` belongs to.
        counts: (N,) usable options per group.
        order: (N,) the group that each row of ``costs`` belongs to.
        offsets: (J + 1,) where each block begins.
        capacity: (J,) int64, one per block.
        shape: (J,) GENERAL; DISTINCT where no group has two options of one cost; SELECTION where each has at
            most two, at cost 0 and 1.
        cell_floats: (2, cells) float64 scratch, a cell for each option of the largest block.
        cell_ints: (4, cells) int64 scratch.
        side_floats: (4, side) float64 scratch, a place for each group of the largest block, and 32 more.
        side_ints: (10, side) int64 scratch.
        ld: (3, room) int64 state offsets.
        lr: (3, room) float64 state regrets.
        ln: (3, room) int32 state nodes.
        arena: (2, room) int32 parents and options.
        max_states: States that one block may visit before it stops with status LIMIT.
        begin: First sample to solve.
        choices: (batch, N) int64 out; -1 throughout where infeasible.
        status: (batch,) int64 out.
        gaps: (batch,) float64 out, zero where optimal.
    """
    vv, cand_r = cell_floats[0], cell_floats[1]
    cc, kk, cand_at, cand_dc = cell_ints[0], cell_ints[1], cell_ints[2], cell_ints[3]
    key, down, up, sample = side_floats[0], side_floats[1], side_floats[2], side_floats[3]
    start, base, chosen, act, alo = side_ints[0], side_ints[1], side_ints[2], side_ints[3], side_ints[4]
    ahi, pick, cand_start, owner, index = side_ints[5], side_ints[6], side_ints[7], side_ints[8], side_ints[9]
    batch = values.shape[0]
    for b in range(begin, batch):
        v = values[b]
        status[b] = OPTIMAL
        gaps[b] = 0.0
        for j in range(len(capacity)):
            first = offsets[j]
            n = offsets[j + 1] - first
            gap = 0.0
            if shape[j] == SELECTION:
                code = _select(
                    v, perm, counts, order, first, n, capacity[j], vv, cand_r, sample, choices[b]
                )
            else:
                code, gap = _solve_block(
                    v, costs, perm, counts, order, first, n, capacity[j], shape[j] == DISTINCT,
                    start, cc, vv, kk, base, chosen, act, alo, ahi, pick, cand_at, cand_dc, cand_r, cand_start,
                    owner, key, index, act, down, up, sample, ld, lr, ln, arena, max_states,
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
                    choices[b, order[first + g]] = kk[chosen[g]]
    return batch


@njit(cache=True, error_model="numpy")
def total_costs(unit_costs, choices, block_of, totals):  # type: ignore[no-untyped-def]
    """Exact int64 totals (batch, J) of the given costs, apart from anything the solver reduced."""
    for b in range(choices.shape[0]):
        for j in range(totals.shape[1]):
            totals[b, j] = 0
        if choices[b, 0] >= 0:
            for g in range(choices.shape[1]):
                totals[b, block_of[g]] += unit_costs[g, choices[b, g]]
