"""The assignment problem of a plan under a budget: costs, allowed options, experts that routers need."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np

from rco.compression.budget import Budget
from rco.compression.costs import Costs
from rco.compression.plan import CompressionPlan
from rco.compression.second_budget import SecondBudget
from rco.core.problem import AllocationProblem, InfeasibleBudgetError
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.moe.layers import MoELayer

__all__ = ["assignment_problem", "experts_to_prune"]


def assignment_problem(
    costs: Costs,
    budget: Budget,
    *,
    second: SecondBudget | None = None,
    uniform: bool = False,
    min_per_layer: int = 0,
) -> AllocationProblem:
    """Groups, options, exact costs and the budget in the same integers.

    Args:
        costs: Of the plan, for the budget's kind.
        budget: The requested budget.
        second: A further budget that must hold at the same time; an upgrade must fit both.
        uniform: Keep the same number of experts in every layer; for plans that only keep or remove experts.
        min_per_layer: Fewest experts that a layer keeps; never below its router's top-k.

    Raises:
        InfeasibleBudgetError: No assignment meets the budget.
        ValueError: The request is invalid for another reason.
    """
    plan = costs.plan
    arguments: dict[str, Any] = {
        "allowed": plan.allowed,
        "groups": [group.name for group in plan.groups],
        "options": list(plan.labels),
        "monotone": True,
    }
    if plan.removes_only:
        return _removal_problem(costs, budget, arguments, uniform, min_per_layer)
    if REMOVED in plan.options:
        arguments["min_counts"] = _min_counts(plan, min_per_layer)
    try:
        if second is None:
            return AllocationProblem(costs.matrix, budget=costs.total(budget.amount), **arguments)
    except InfeasibleBudgetError as error:
        low, high = costs.range
        raise InfeasibleBudgetError(
            f"`{budget.kind}` must lie between {low} and {high} with these widths, locks and groups, got "
            f"{budget}."
        ) from error
    matrix, most, unit = second.costs(plan)
    both, limits = np.stack([costs.matrix, matrix]), [costs.total(budget.amount), most]
    try:
        return AllocationProblem(both, limits, sense="<=", **arguments)
    except InfeasibleBudgetError as error:
        low, high = costs.range
        least = Fraction(int(np.where(plan.allowed, matrix, matrix.max()).min(axis=1).sum()), unit)
        raise InfeasibleBudgetError(
            f"No allocation meets both budgets: `{budget.kind}` alone must lie between {low} and {high}, got "
            f"{budget}; `{second.name}` alone must be at least {float(least):.6g}, got {float(second.amount):.6g}. "
            f"({error})"
        ) from error


def _min_counts(plan: CompressionPlan, min_per_layer: int) -> dict[str, Any]:
    """Fewest experts kept per layer, at least its router's top-k; groups outside expert layers have no minimum."""
    layers, blocks = plan.sparse_layers, plan.layer_of_group
    counts = [max(layer.top_k, min_per_layer) for layer in layers]
    staying = [column for column, option in enumerate(plan.options) if option != REMOVED]
    if (blocks < 0).any():
        blocks, counts = np.where(blocks < 0, len(layers), blocks), [*counts, 0]
    return {"blocks": blocks, "counts": counts, "options": staying}


def experts_to_prune(budget: Budget, experts: int) -> int:
    """Number of experts that a budget of kind ``experts`` prunes; fractions are rounded here and nowhere else.

    A fraction f prunes floor(f * experts); a whole number is a count.
    """
    amount = budget.amount
    if amount < 1:
        count = floor(amount * experts)
        if count < 1:
            raise ValueError(
                f"{budget.argument} of {experts} experts is less than one expert; give at least "
                f"{1 / experts:.4g}, or a count."
            )
        return count
    if amount.denominator != 1:
        raise ValueError(
            f"`experts` is a fraction below 1 or a whole number of experts, got {float(amount):g}. "
            f"The model has {experts} experts."
        )
    return int(amount)


def _removal_problem(
    costs: Costs, budget: Budget, arguments: dict[str, Any], uniform: bool, min_per_layer: int
) -> AllocationProblem:
    """The problem of removing the requested number of experts, each layer keeping at least its router's top-k."""
    plan, allowed = costs.plan, arguments["allowed"]
    layers, blocks = plan.sparse_layers, plan.layer_of_group
    prune, keep = plan.options.index(REMOVED), plan.options.index(ORIGINAL)
    least = [max(layer.top_k, min_per_layer) for layer in layers]
    for number, (layer, count) in enumerate(zip(layers, least, strict=True)):
        if count > layer.num_experts:
            raise ValueError(
                f"`min_per_layer={min_per_layer}` is more than the {layer.num_experts} experts of {layer.name}."
            )
        free = int(allowed[blocks == number, keep].sum())
        if free < count:
            raise ValueError(
                f"The locks leave {free} experts in {layer.name}, which must keep at least {count} (its router "
                f"picks {layer.top_k} per token); lock fewer to prune."
            )
    target: Any = (_uniform_budgets if uniform else _total_budget)(layers, least, budget, costs)
    arguments["blocks"] = blocks if uniform else None
    arguments["min_counts"] = _min_counts(plan, min_per_layer)
    # A block fully fixed by the locks has no surface C = B to search on.
    decided = [not allowed[blocks == b].all(axis=1).any() for b in range(len(layers))]
    stuck = any(decided) if uniform else all(decided)
    try:
        return AllocationProblem(costs.matrix, target, sense="<=" if stuck else None, **arguments)
    except InfeasibleBudgetError as error:
        kept = [int(allowed[blocks == b, keep].sum()) for b in range(len(layers))]
        forced = [max(count, int((~allowed[blocks == b, prune]).sum())) for b, count in enumerate(least)]
        raise InfeasibleBudgetError(
            f"{budget.argument} cannot be met: with the locks and at least {_range(least)} experts per layer "
            f"between {sum(forced)} and {sum(kept)} of {len(plan.groups)} experts stay. ({error})"
        ) from None


def _total_budget(
    layers: Sequence[MoELayer], least: Sequence[int], budget: Budget, costs: Costs
) -> Fraction | int:
    counts, shares = [layer.num_experts for layer in layers], costs.shares
    total = sum(counts)
    if budget.kind == "experts":
        pruned = experts_to_prune(budget, total)
        if total - pruned < sum(least):
            raise InfeasibleBudgetError(
                f"{budget.argument} would keep {max(total - pruned, 0)} of {total} experts, but the routers need "
                f"{_range(least)} in each of {len(counts)} layers, {sum(least)} together; prune at most "
                f"{total - sum(least)}."
            )
        return total - pruned
    available = budget.amount - shares.fixed
    fewest = sum(share * count for share, count in zip(shares.per_expert, least, strict=True))
    most = sum(share * count for share, count in zip(shares.per_expert, counts, strict=True))
    _check_available(budget, available, costs, fewest, most)
    return min(available, Fraction(most))


def _uniform_budgets(
    layers: Sequence[MoELayer], least: Sequence[int], budget: Budget, costs: Costs
) -> list[int]:
    counts, shares = [layer.num_experts for layer in layers], costs.shares
    if budget.kind == "experts":
        if budget.amount < 1:
            pruned = [floor(budget.amount * count) for count in counts]
            if min(pruned) < 1:
                raise ValueError(f"{budget.argument} is less than one expert per layer of {min(counts)}.")
        else:
            asked = experts_to_prune(budget, sum(counts))
            if asked % len(layers):
                near = asked // len(layers) * len(layers)
                raise ValueError(
                    f"`uniform` prunes the same number in each of {len(layers)} layers, and {asked} is not a "
                    f"multiple of {len(layers)}; ask for {near} or {near + len(layers)}."
                )
            pruned = [asked // len(layers)] * len(layers)
        kept = [count - gone for count, gone in zip(counts, pruned, strict=True)]
    else:
        available, together = budget.amount - shares.fixed, sum(shares.per_expert)
        _check_available(budget, available, costs, max(least) * together, min(counts) * together)
        kept = [min(floor(available / together), min(counts))] * len(layers)
    for layer, fewest, stays in zip(layers, least, kept, strict=True):
        if stays < fewest:
            raise InfeasibleBudgetError(
                f"{budget.argument} would keep {max(stays, 0)} of {layer.num_experts} experts in {layer.name}, "
                f"which must keep at least {fewest} (its router picks {layer.top_k} per token)."
            )
    return [stays * share for stays, share in zip(kept, shares.per_expert, strict=True)]


def _check_available(budget: Budget, available: Fraction, costs: Costs, least: int, most: int) -> None:
    fixed, unit = costs.fixed, costs.unit
    if available < least:
        raise InfeasibleBudgetError(
            f"{budget.argument} is too small: the model takes {fixed:,} {unit} without experts, {fixed + least:,} "
            f"with the fewest that its routers need, and {fixed + most:,} in full."
        )
    if available >= most:
        raise ValueError(
            f"{budget.argument} is enough for the full model ({fixed + most:,} {unit}), so nothing would be "
            "pruned; give a smaller budget."
        )


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"
