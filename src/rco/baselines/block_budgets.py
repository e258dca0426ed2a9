"""Blocks of groups (layers), and a budget divided over them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rco.core.objective import Objective
from rco.core.problem import AllocationProblem

__all__ = ["blocks_of", "share_budget"]


def blocks_of(
    problem: AllocationProblem, objective: Objective | None, given: Sequence[Any] | None
) -> np.ndarray:
    """(N,) block numbers from 0: as given, or from the objective, the problem or the labels.

    Labels are cut before their last number if they end in one ("layers.3.experts.17" lies in "layers.3.experts"),
    else after their first number ("layers.3.q_proj" lies in "layers.3"). Without any of these all groups are one
    block.
    """
    if given is not None and len(given) != problem.num_groups:
        raise ValueError(
            f"blocks must name a block for each of {problem.num_groups} groups, got {len(given)}."
        )
    if given is None and objective is not None and objective.group_blocks is not None:
        given = list(objective.group_blocks)
    if given is None and problem.block_index is not None:
        given = problem.block_index.tolist()
    if given is None and problem.groups is not None:
        given = _blocks_from_labels(problem.groups)
    if given is None:
        return np.zeros(problem.num_groups, dtype=np.int64)
    number: dict[Any, int] = {}
    return np.array([number.setdefault(block, len(number)) for block in given], dtype=np.int64)


def _blocks_from_labels(labels: Sequence[str]) -> list[str]:
    counted = [re.fullmatch(r"(.*\d.*\D)\d+", label) for label in labels]
    if all(counted):
        return [match.group(1) for match in counted if match]
    first = [re.match(r"\D*\d+", label) for label in labels]
    return [match.group(0) if match else label for match, label in zip(first, labels, strict=True)]


def share_budget(problem: AllocationProblem, blocks: np.ndarray) -> AllocationProblem:
    """The problem with its (first) budget divided over blocks, the same share of each block's reachable range.

    Units that do not divide go one each to the blocks with the largest remainders, the first of equal ones first.
    A block whose minimum counts cost more than its share gets that much, at the expense of the largest shares.
    Problems that already have a budget per block stay as they are. Further joint budgets are kept.
    """
    count = int(blocks.max()) + 1
    if problem.block_index is not None or count == 1:
        return problem
    costs = problem.unit_costs[0]
    unit = int(np.gcd.reduce(costs - costs.min(axis=1, keepdims=True), axis=None)) or 1
    # Whole experts are shared, not their parameters.
    lows = [int(costs[blocks == b].min(axis=1).sum()) for b in range(count)]
    widths = [(int(costs[blocks == b].max(axis=1).sum()) - low) // unit for b, low in enumerate(lows)]
    room = min((problem.unit_budgets[0] - sum(lows)) // unit, sum(widths))
    total = max(sum(widths), 1)
    shares = [width * room // total for width in widths]
    remainders = [width * room % total for width in widths]
    for block in sorted(range(count), key=lambda b: -remainders[b])[: room - sum(shares)]:
        shares[block] += 1
    if problem.min_counts is not None:
        shares = _raised(shares, _needed(problem, blocks, lows, unit))
    budgets = [low + unit * share for low, share in zip(lows, shares, strict=True)]
    common: dict[str, Any] = {
        "sense": "<=",
        "allowed": problem.allowed,
        "groups": problem.groups,
        "options": problem.options,
        "monotone": problem.monotone,
        "min_counts": problem.min_counts,
    }
    if problem.num_joint == 1:
        return AllocationProblem(costs, budgets, blocks=blocks, **common)
    inside = [np.where((blocks == b)[:, None], costs, 0) for b in range(count)]
    stacked = np.concatenate([problem.unit_costs, np.stack(inside)])
    return AllocationProblem(stacked, [*problem.unit_budgets, *budgets], **common)


def _needed(problem: AllocationProblem, blocks: np.ndarray, lows: list[int], unit: int) -> list[int]:
    """Units above its lowest total that each block needs for the minimum counts."""
    assert problem.min_counts is not None
    costs = problem.unit_costs[0]
    cheapest = problem.min_counts.cheapest(costs, problem.allowed)
    spent = costs[np.arange(len(costs)), cheapest]
    return [-(-(int(spent[blocks == b].sum()) - low) // unit) for b, low in enumerate(lows)]


def _raised(shares: list[int], needed: list[int]) -> list[int]:
    """Shares of the same sum that give every block what it needs, as far as the sum allows."""
    raised = [max(share, need) for share, need in zip(shares, needed, strict=True)]
    excess = sum(raised) - sum(shares)
    while excess > 0:
        spare = [share - need for share, need in zip(raised, needed, strict=True)]
        block = max(range(len(spare)), key=lambda b: spare[b])
        if spare[block] <= 0:
            break
        ranked = sorted(spare, reverse=True)
        # Down to the next largest share at once.
        taken = min(excess, max(1, spare[block] - (ranked[1] if len(ranked) > 1 else 0)), spare[block])
        raised[block] -= taken
        excess -= taken
    return raised
