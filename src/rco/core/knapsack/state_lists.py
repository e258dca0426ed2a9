"""Compiled kernels that close the gap between dual and solution: lists of states, without a budget grid.

A state is (offset = cost - capacity, regret) of the choices made so far. :func:`scan` drops every option whose
regret alone exceeds the gap; :func:`search` merges state lists over what is left, with dominance and with lower
bounds from the smallest regret per unit of cost among the groups still to come. Where many groups offer the same
value per cost those bounds prune nothing, and only an exact fit closes the gap: lists over two disjoint sets of
groups, joined in one pass, cover as many combinations as the product of their lengths.
"""

# numba infers and specialises all types here; annotations would be a second source that nothing checks.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from rco.core.jit import internal
from rco.core.knapsack.lagrangian_dual import GROW, LIMIT, OPTIMAL

__all__ = ["Candidates", "Lists", "Order", "scan", "search", "tolerance"]

# Closer ties than this, relative to the largest difference still in play, are rounding noise and not chased.
_TIE = 1e-13
# Lists of this many states are joined, this often for each length; exact passes in between may visit this many
# states for each one in a list.
_FIRST_WIDTH, _LAST_WIDTH = 2**12, 2**18
_JOINS = 8
_STATES_PER_WIDTH = 24


class Candidates(NamedTuple):
    """Options that may replace the base choice of their group, group after group."""

    start: np.ndarray  # first candidate of each group that has any
    owner: np.ndarray  # that group
    at: np.ndarray  # position of the option
    step: np.ndarray  # its cost above the base choice
    regret: np.ndarray


class Order(NamedTuple):
    """Groups by their cheapest regret per unit of cost, and the least of it from each group on."""

    ranked: np.ndarray
    spare: np.ndarray
    key: np.ndarray
    down: np.ndarray  # to save a unit of cost
    up: np.ndarray  # to spend one


class Lists(NamedTuple):
    """Buffers of states: four lists (three to merge with, one to keep) and the tree of options behind them."""

    offset: np.ndarray
    regret: np.ndarray
    node: np.ndarray
    tree: np.ndarray  # (2, room): parent node, candidate


@internal
def scan(n, options, base, lam, slack, tight, tight_at, candidates):
    """Collect the options whose regret is below the gap, and improve the gap by single exchanges.

    An option that saves cost is tried together with the tight group's step up. Returns (gap, position of the
    exchanged-in option or -1, whether the tight group moves up too, groups with candidates).
    """
    start, cost, value, _ = options
    first, owner, at, step, regret = candidates
    gap = lam * slack
    swap, with_tight = np.int64(-1), False
    excess, tight_r = np.int64(0), np.inf
    if tight >= 0:
        b = base[tight]
        excess = cost[tight_at] - cost[b] - slack
        tight_r = max((value[b] - value[tight_at]) + lam * (cost[tight_at] - cost[b]), 0.0)
    w, groups = 0, np.int64(0)
    for g in range(n):
        b = base[g]
        cb, vb = cost[b], value[b]
        begin = w
        for i in range(start[g], start[g + 1]):
            dc = cost[i] - cb
            r = (vb - value[i]) + lam * dc
            if r < gap and i != b:
                r = max(r, 0.0)
                at[w], step[w], regret[w] = i, dc, r
                w += 1
                if dc > 0:
                    if dc <= slack and r + lam * (slack - dc) < gap:
                        gap, swap, with_tight = r + lam * (slack - dc), i, False
                elif g != tight and excess + dc <= 0 and r + tight_r + lam * (-dc - excess) < gap:
                    gap, swap, with_tight = r + tight_r + lam * (-dc - excess), i, True
        if w > begin:
            first[groups] = begin
            owner[groups] = g
            groups += 1
    first[groups] = w
    return gap, swap, with_tight, groups


@internal
def tolerance(candidates, groups, lam):
    """Largest difference that counts as a tie; depends on the candidates alone, not on huge values out of play."""
    largest = 0.0
    for i in range(candidates.start[groups]):
        largest = max(largest, candidates.regret[i] + lam * abs(candidates.step[i]))
    return _TIE * largest


@internal
def _keep_below(cut, groups, candidates):
    """Drop candidates whose regret alone reaches the cut, in place; returns the groups left."""
    first, owner, at, step, regret = candidates
    w, kept = 0, np.int64(0)
    begin = first[0]
    for j in range(groups):
        end = first[j + 1]
        before = w
        for i in range(begin, end):
            if regret[i] < cut:
                at[w], step[w], regret[w] = at[i], step[i], regret[i]
                w += 1
        if w > before:
            first[kept] = before
            owner[kept] = owner[j]
            kept += 1
        begin = end
    first[kept] = w
    return kept


@internal
def _sort(key, index, spare, count):
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


@internal
def _arrange(groups, candidates, order):
    """Fill the order; ties go by a golden-section stride, since neighbours are alike and joins need variety."""
    first, _, _, step, regret = candidates
    ranked, spare, key, down, up = order
    stride = int(0.618 * groups) | 1
    while math.gcd(stride, groups) != 1:
        stride += 2
    for j in range(groups):
        key[j] = np.inf
        ranked[j] = (j * stride) % groups
        for i in range(first[j], first[j + 1]):
            key[j] = min(key[j], regret[i] / abs(step[i]))
    _sort(key, ranked, spare, groups)
    down[groups] = np.inf
    up[groups] = np.inf
    for s in range(groups - 1, -1, -1):
        j = ranked[s]
        down[s], up[s] = down[s + 1], up[s + 1]
        for i in range(first[j], first[j + 1]):
            slope = regret[i] / abs(step[i])
            if step[i] < 0:
                down[s] = min(down[s], slope)
            else:
                up[s] = min(up[s], slope)


@internal
def _merge(lists, a, na, c, nc, into, step, regret, option, nodes, lam, down, up, gap, cut, eps):
    """Merge list ``a`` with list ``c`` moved by one option; drop what is dominated or cannot beat the cut.

    Lists are sorted by offset d; a state is worth less the larger ``r - lam d``, which must fall along a list.
    States below ``gap`` that fit are solutions. Returns (length, tree size, gap, node of a new best or -2).
    """
    ad, ar, an = lists.offset[a], lists.regret[a], lists.node[a]
    cd, cr, cn = lists.offset[c], lists.regret[c], lists.node[c]
    od, out, on = lists.offset[into], lists.regret[into], lists.node[into]
    tree = lists.tree
    i, j, w = 0, 0, np.int64(0)
    best = np.int64(-2)
    worth = np.inf
    while i < na or j < nc:
        moved = False
        if j < nc:
            d, r = cd[j] + step, cr[j] + regret
            moved = i >= na or d < ad[i] or (d == ad[i] and r < ar[i])
        if moved:
            node = np.int64(cn[j])
            j += 1
        else:
            d, r, node = ad[i], ar[i], np.int64(an[i])
            i += 1
        f = r - lam * d
        if f >= worth:
            continue
        worth = f
        if (r + d * down if d > 0 else r - d * up) >= cut:
            continue
        if moved:
            tree[0, nodes], tree[1, nodes] = node, option
            node = nodes
            nodes += 1
        od[w], out[w], on[w] = d, r, node
        w += 1
        if d <= 0 and f < gap:
            gap, best = f, node
            cut = gap - eps
    return w, nodes, gap, best


@internal
def _lowest(d, r, count, down, up):
    """The least regret plus slack that any completion of these states can reach."""
    low = np.inf
    for i in range(count):
        low = min(low, r[i] + d[i] * down if d[i] > 0 else r[i] - d[i] * up)
    return low


@internal
def _expand(groups, candidates, order, lam, slack, gap, eps, lists, limit):
    """Run the state lists over all groups.

    Returns (code, gap, node of the best solution or -2, lower bound on what was not explored, states visited).
    """
    first, step, regret = candidates.start, candidates.step, candidates.regret
    down, up = order.down, order.up
    room, nodes_room = lists.offset.shape[1], lists.tree.shape[1]
    # Typed numbers: a literal would make numba compile the functions it is passed to twice.
    now, count, nodes = np.int64(0), np.int64(1), np.int64(0)
    best, work = np.int64(-2), 0
    lists.offset[0, 0], lists.regret[0, 0], lists.node[0, 0] = -slack, 0.0, -1
    for s in range(groups):
        j = order.ranked[s]
        rest_down, rest_up = down[s + 1], min(lam, up[s + 1])
        merged, size = now, count
        for i in range(first[j], first[j + 1]):
            work += size + count
            if work > limit:
                low = _lowest(lists.offset[now], lists.regret[now], count, down[s], min(lam, up[s]))
                return LIMIT, gap, best, min(low, gap), work
            if size + count > room or nodes + count > nodes_room:
                return GROW, gap, best, 0.0, work
            into = 3 - now - merged if merged != now else (now + 1) % 3
            size, nodes, gap, node = _merge(
                lists, merged, size, now, count, into, step[i], regret[i], i, nodes,
                lam, rest_down, rest_up, gap, gap - eps, eps,
            )  # fmt: skip
            merged = into
            if node != -2:
                best = node
        now, count = merged, size
        if count == 0:
            break
    return OPTIMAL, gap, best, gap, work


@internal
def _half(half, origin, groups, candidates, order, lam, offset, cut, lists, nodes, width):
    """All states of every other group from ``origin`` on, for as long as they number at most ``width``.

    Returns (row of the list, its length, tree size, groups used).
    """
    first, step, regret = candidates.start, candidates.step, candidates.regret
    now, count, used = np.int64(0), np.int64(1), 0
    lists.offset[0, 0], lists.regret[0, 0], lists.node[0, 0] = offset, 0.0, -1
    for q in range(half, groups, 2):
        j = order.ranked[(origin + q) % groups]
        more = first[j + 1] - first[j]
        if count * (more + 1) > width or nodes + count * more > lists.tree.shape[1]:
            break
        merged, size = now, count
        for i in range(first[j], first[j + 1]):
            into = 3 - now - merged if merged != now else (now + 1) % 3
            size, nodes, _, _ = _merge(
                lists, merged, size, now, count, into, step[i], regret[i], i, nodes,
                lam, 0.0, 0.0, -1.0, cut, 0.0,
            )  # fmt: skip
            merged = into
        now, count = merged, size
        used += 1
    return now, count, nodes, used


@internal
def _join(ad, ar, na, bd, br, nb, lam, gap):
    """The best pair of states, one of each list, that fits together: (its regret plus slack, i, j)."""
    at_i, at_j = np.int64(-1), np.int64(-1)
    j = nb - 1
    for i in range(na):
        while j >= 0 and ad[i] + bd[j] > 0:
            j -= 1
        if j < 0:
            break
        z = ar[i] + br[j] - lam * (ad[i] + bd[j])
        if z < gap:
            gap, at_i, at_j = z, i, j
    return gap, at_i, at_j


@internal
def _adopt(node, other, tree, groups, candidates, n, base, chosen):
    """Write the solution that two chains of nodes make of the base choices."""
    first, owner, at, _, _ = candidates
    for g in range(n):
        chosen[g] = base[g]
    for chain in (node, other):
        while chain >= 0:
            i = tree[1, chain]
            low, high = 0, groups - 1
            while low < high:
                middle = (low + high + 1) // 2
                if first[middle] <= i:
                    low = middle
                else:
                    high = middle - 1
            chosen[owner[low]] = at[i]
            chain = np.int64(tree[0, chain])


@internal
def _pairs(n, base, chosen, groups, candidates, order, lam, slack, gap, eps, lists, width, limit):
    """Improve the solution by joining full lists over two sets of groups.

    Returns (gap, whether the solution is proven optimal: all groups covered or no gap left; states visited).
    """
    d, r, node = lists.offset, lists.regret, lists.node
    none, origin, work = np.int64(0), np.int64(0), 0
    for _ in range(_JOINS):
        cut = gap - eps
        row, na, nodes, used_a = _half(
            none, origin, groups, candidates, order, lam, -slack, cut, lists, none, width
        )
        for i in range(na):
            d[3, i], r[3, i], node[3, i] = d[row, i], r[row, i], node[row, i]
        row, nb, nodes, used_b = _half(
            none + 1, origin, groups, candidates, order, lam, none, cut, lists, nodes, width
        )
        gap, i, j = _join(d[3], r[3], na, d[row], r[row], nb, lam, gap)
        if i >= 0:
            _adopt(
                np.int64(node[3, i]), np.int64(node[row, j]), lists.tree, groups, candidates, n, base, chosen
            )
        work += 2 * (na + nb)
        used = used_a + used_b
        origin += used
        if used == groups or gap <= eps:
            return gap, True, work
        if work > limit or origin >= groups or used == 0:
            break
    return gap, False, work


@internal
def search(n, base, chosen, groups, candidates, order, lam, slack, gap, eps, lists, max_states):
    """Close the gap: exact passes of growing size, with joined lists between them to prune better.

    Returns (code, certified gap that is left).
    """
    lower, spent = 0.0, 0
    width = np.int64(_FIRST_WIDTH)
    while True:
        groups = _keep_below(gap - eps, groups, candidates)
        _arrange(groups, candidates, order)
        allowed = max_states - spent
        if width <= _LAST_WIDTH:
            allowed = min(allowed, _STATES_PER_WIDTH * width)
        code, gap, best, low, work = _expand(groups, candidates, order, lam, slack, gap, eps, lists, allowed)
        if code == GROW:
            return GROW, 0.0
        if best != -2:
            _adopt(best, np.int64(-1), lists.tree, groups, candidates, n, base, chosen)
        lower = max(lower, low)
        if code == OPTIMAL or gap - lower <= eps:
            return OPTIMAL, 0.0
        spent += work
        if spent >= max_states:
            return LIMIT, gap - lower
        if width <= _LAST_WIDTH:
            if width > lists.offset.shape[1]:
                return GROW, 0.0
            gap, proven, work = _pairs(
                n,
                base,
                chosen,
                groups,
                candidates,
                order,
                lam,
                slack,
                gap,
                eps,
                lists,
                width,
                max_states - spent,
            )
            spent += work
            if proven or gap - lower <= eps:
                return OPTIMAL, 0.0
            width *= 4
