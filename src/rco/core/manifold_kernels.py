"""Compiled loops of the budget manifold for one budget or separable blocks.

In numpy a step takes 2.1 to 2.5 times as long (``benchmarks/results/manifold_step.json``).

Blocks share no group, so each is a scalar problem over its own rows; ``order`` lists the groups block by block and
``offsets`` (J + 1,) holds the start of each block. Arrays are C-contiguous float64.
"""

from __future__ import annotations

import math

import numpy as np

from rco.core.jit import entry, internal

__all__ = ["local_cost", "project_rows", "retract_rows"]

_GROWTH = 4.0  # of the bracket per step while the root is not yet enclosed
_LIMIT = 2000  # evaluations per block; growing to the edge of float64 takes about 500
_TINY = 1e-250  # squared norms below this have lost digits to underflow


@internal
def _likeliest(row: np.ndarray) -> int:
    """The option with the largest logit; costs counted from its cost keep near one-hot rows accurate."""
    top = 0
    for k in range(1, len(row)):
        if row[k] > row[top]:
            top = k
    return top


@entry
def local_cost(
    x: np.ndarray, costs: np.ndarray, order: np.ndarray, offsets: np.ndarray, normal: np.ndarray
) -> np.ndarray:
    """Expected cost of every block (J,); writes ``p_ik (c_ik - E_i[c])`` to ``normal``."""
    expected = np.zeros(len(offsets) - 1)
    for j in range(len(expected)):
        total, lost = 0.0, 0.0  # compensated sum: keeps the last digits over thousands of groups
        for index in range(offsets[j], offsets[j + 1]):
            i = order[index]
            top = _likeliest(x[i])
            weight, above = 0.0, 0.0
            for k in range(x.shape[1]):
                e = math.exp(x[i, k] - x[i, top])
                normal[i, k] = e
                weight += e
                above += e * (costs[i, k] - costs[i, top])
            above /= weight
            for k in range(x.shape[1]):
                normal[i, k] *= (costs[i, k] - costs[i, top] - above) / weight
            mean = costs[i, top] + above
            added = total + mean
            lost += (total - added) + mean if total >= mean else (mean - added) + total
            total = added
        expected[j] = total + lost
    return expected


@internal
def _evaluate(
    x: np.ndarray,
    costs: np.ndarray,
    directions: np.ndarray,
    rows: np.ndarray,
    shift: float,
    moved: np.ndarray,
) -> tuple[float, float]:
    """Expected cost of one block at ``x + shift * directions``, which goes to ``moved``, and its derivative."""
    total, lost, slope = 0.0, 0.0, 0.0
    for i in rows:
        for k in range(x.shape[1]):
            moved[i, k] = x[i, k] + shift * directions[i, k]
        top = _likeliest(moved[i])
        weight, above, along, mixed = 0.0, 0.0, 0.0, 0.0
        for k in range(x.shape[1]):
            e = math.exp(moved[i, k] - moved[i, top])
            c, d = costs[i, k] - costs[i, top], directions[i, k] - directions[i, top]
            weight += e
            above += e * c
            along += e * d
            mixed += e * c * d
        above /= weight
        slope += mixed / weight - above * (along / weight)
        mean = costs[i, top] + above
        added = total + mean
        lost += (total - added) + mean if total >= mean else (mean - added) + total
        total = added
    return total + lost, slope


@internal
def _log_odds_step(shift: float, residual: float, slope: float, target: float, span: float) -> float:
    """Newton on ``log(C / (span - C))``, nearly linear where C is exponential; NaN where that is undefined."""
    cost = target + residual
    if not (slope > 0.0 and cost > 0.0 and cost < span and target < span):
        return math.nan
    gap = math.log1p(residual / target) - math.log1p(-residual / (span - target))
    return shift - gap * (cost * (1.0 - cost / span)) / slope


@entry
def retract_rows(
    x: np.ndarray,
    costs: np.ndarray,
    directions: np.ndarray,
    order: np.ndarray,
    offsets: np.ndarray,
    target: np.ndarray,
    span: np.ndarray,
    tolerance: np.ndarray,
    half_width: np.ndarray,
    below_target: np.ndarray,
    bisect: bool,
    moved: np.ndarray,
    shift: np.ndarray,
    used: np.ndarray,
) -> bool:
    """Shift each block's rows along the directions until its expected cost is ``target[j]`` within tolerance.

    Newton steps are taken inside a bracket only: far from the root the cost is a staircase with flat parts where
    the derivative underflows. With ``bisect`` the bracket ``-half_width .. half_width`` is halved as in the paper
    (and widened should the root lie outside). With ``below_target[j]`` a block at or below its target stays, and
    its target is lowered to its cost, so that a further call leaves it unchanged as well.

    Adds each block's evaluations to ``used``. Where a bracket shrinks to neighbouring floats first, ``moved`` and
    ``shift`` hold the last attempt.

    Returns:
        Whether every block converged.
    """
    converged = True
    for j in range(len(offsets) - 1):
        rows = order[offsets[j] : offsets[j + 1]]
        t, count = 0.0, 0
        low, high = -half_width[j], half_width[j]
        below, above = False, False  # whether low and high are known to enclose the root
        reach, previous = 1.0, math.inf
        while True:
            cost, slope = _evaluate(x, costs, directions, rows, t, moved)
            count += 1
            if below_target[j] and count == 1:
                target[j] = min(target[j], cost)
            residual = cost - target[j]
            if abs(residual) <= tolerance[j]:
                break
            if not math.isfinite(residual) or count >= _LIMIT:
                converged = False
                break
            if residual > 0.0:
                high, above = t, True
            else:
                low, below = t, True
            enclosed = below and above
            if bisect:
                following = low + 0.5 * (high - low)
                if not (enclosed or low < following < high):
                    reach *= _GROWTH
                    low, high = low - (0.0 if below else reach), high + (0.0 if above else reach)
                    following = low + 0.5 * (high - low)
            else:
                if not enclosed:  # the open end moves out by a growing distance, which limits the step
                    low, high = (low, t + reach) if below else (t - reach, high)
                    reach *= _GROWTH
                following = _log_odds_step(t, residual, slope, target[j], span[j])
                slow = enclosed and abs(residual) > 0.5 * previous
                if slow or not (low < following < high):
                    following = low + 0.5 * (high - low) if enclosed else (high if below else low)
            if (enclosed and not low < following < high) or not math.isfinite(following):
                converged = False
                break
            previous = abs(residual)
            t = following
        shift[j] = t
        used[j] += count
    return converged


@entry
def project_rows(
    normal: np.ndarray,
    last: np.ndarray,
    v: np.ndarray,
    along: np.ndarray,
    order: np.ndarray,
    offsets: np.ndarray,
    projected: np.ndarray,
    projected_along: np.ndarray,
) -> None:
    """Remove each block's augmented normal ``(normal rows, last[j])`` from ``(v, along)``."""
    for j in range(len(offsets) - 1):
        rows = order[offsets[j] : offsets[j + 1]]
        factor, inner, squared = 1.0, 0.0, 0.0
        for attempt in range(2):
            inner, squared = factor * last[j] * along[j], (factor * last[j]) ** 2
            for i in rows:
                for k in range(v.shape[1]):
                    n = factor * normal[i, k]
                    inner += n * v[i, k]
                    squared += n * n
            if squared > _TINY or attempt == 1:
                break
            largest = last[j]
            for i in rows:
                for k in range(v.shape[1]):
                    largest = max(largest, abs(normal[i, k]))
            factor = 1.0 / largest if largest > 1e-300 else 0.0
        coefficient = 0.0 if squared == 0.0 else factor * inner / squared
        for i in rows:
            for k in range(v.shape[1]):
                projected[i, k] = v[i, k] - coefficient * normal[i, k]
        projected_along[j] = along[j] - coefficient * last[j]
