"""Checks and conversions of what an AllocationProblem is built from; each says what is wrong and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from rco.core.exact import ExactArray, exact_array, integer_array

__all__ = [
    "check_allowed",
    "check_labels",
    "check_weights",
    "costs_with_holes",
    "count_groups",
    "fill_forbidden",
    "json_number",
    "plain",
    "show",
    "weighted_costs",
]

_INT64_SAFE = 2**62


def plain(value: Fraction) -> int | Fraction:
    """An int where the fraction is whole."""
    return value.numerator if value.denominator == 1 else value


def json_number(value: Fraction) -> int | str:
    """An int, or a "p/q" string."""
    return value.numerator if value.denominator == 1 else str(value)


def show(value: Fraction) -> str:
    """For messages."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def costs_with_holes(option_costs: Any, allowed: Any) -> ExactArray:
    """Exact costs; entries of forbidden options may hold anything, NaN included."""
    if allowed is not None:
        mask = np.asarray(allowed)
        raw = np.asarray(option_costs)
        if raw.dtype.kind == "f" and raw.ndim >= 2 and raw.shape[-2:] == mask.shape and mask.dtype == bool:
            option_costs = np.where(mask, raw, 0.0)
    costs = exact_array(option_costs, "option_costs")
    if costs.numerators.ndim not in (1, 2, 3):
        raise ValueError(
            f"option_costs must have shape (K,), (N, K) or (q, N, K), got {costs.numerators.shape}."
        )
    if 0 in costs.numerators.shape:
        raise ValueError(
            f"option_costs is empty: shape {costs.numerators.shape}; N, K and q must be at least 1."
        )
    return costs


def count_groups(
    costs: ExactArray, weights: Any, blocks: Any, allowed: Any, groups: Sequence[str] | None, budget: Any
) -> int:
    """N, from whichever argument carries it."""
    if costs.numerators.ndim >= 2:
        return int(costs.numerators.shape[-2])
    for name, value in (("weights", weights), ("blocks", blocks), ("allowed", allowed), ("groups", groups)):
        if value is not None:
            count = len(value)
            if count == 0:
                raise ValueError(f"{name} is empty: a problem needs at least one group.")
            return count
    raise ValueError(
        "The number of groups is unknown: with shared (K,) option_costs give weights, blocks, allowed or groups "
        "(one entry per group), or repeat the costs as an (N, K) array."
    )


def check_allowed(allowed: Any, num_groups: int, num_options: int) -> np.ndarray:
    """Booleans (N, K), each group with at least one allowed option."""
    if allowed is None:
        return np.ones((num_groups, num_options), dtype=bool)
    mask = np.asarray(allowed)
    if mask.dtype != bool or mask.shape != (num_groups, num_options):
        raise ValueError(
            f"allowed must be booleans of shape ({num_groups}, {num_options}), got {mask.dtype} of shape "
            f"{mask.shape}."
        )
    closed = np.flatnonzero(~mask.any(axis=1))
    if closed.size:
        raise ValueError(f"Group {int(closed[0])} has no allowed option; leave each group at least one.")
    mask = mask.copy()
    mask.setflags(write=False)
    return mask


def check_weights(weights: Any, num_groups: int) -> ExactArray | None:
    """Positive exact weights (N,)."""
    if weights is None:
        return None
    exact = exact_array(weights, "weights")
    if exact.numerators.shape != (num_groups,):
        raise ValueError(f"weights must have shape ({num_groups},), got {exact.numerators.shape}.")
    bad = np.flatnonzero(exact.numerators <= 0)
    if bad.size:
        i = int(bad[0])
        value = show(Fraction(int(exact.numerators[i]), exact.denominator))
        raise ValueError(
            f"weights must be positive, got {value} for group {i}; drop the group or give it a weight."
        )
    return exact


def check_labels(labels: Sequence[str] | None, count: int, name: str) -> tuple[str, ...] | None:
    """Labels as strings, as many as needed."""
    if labels is None:
        return None
    labels = tuple(str(label) for label in labels)
    if len(labels) != count:
        raise ValueError(f"{name} must hold {count} labels, got {len(labels)}.")
    return labels


def fill_forbidden(costs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Give forbidden options the cost of their group's first allowed option, so that they widen no range."""
    if allowed.all():
        return costs
    first = allowed.argmax(axis=1)
    fallback = costs[:, np.arange(costs.shape[1]), first]
    return np.where(allowed[None], costs, fallback[:, :, None])


def weighted_costs(directions: ExactArray, weights: ExactArray | None) -> tuple[np.ndarray, int]:
    """Exact ``w_i c_ik`` over one denominator, as int64 where even their sum over all groups fits."""
    costs = directions.numerators
    factor = weights.numerators if weights is not None else np.ones(costs.shape[1], dtype=np.int64)
    largest = max(abs(int(costs.min())), abs(int(costs.max()))) * int(factor.max()) * len(factor)
    if costs.dtype == object or factor.dtype == object or largest >= _INT64_SAFE:
        product = costs.astype(object) * factor.astype(object)[None, :, None]
        product = integer_array(product) if largest < _INT64_SAFE else product
    else:
        product = costs * factor[None, :, None]
    denominator = directions.denominator * (weights.denominator if weights is not None else 1)
    divisor = math.gcd(denominator, int(np.gcd.reduce(product, axis=None)))
    return product // divisor, denominator // divisor
