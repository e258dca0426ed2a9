"""Which experts may go, what each costs, and how many must: the assignment problem of expert pruning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
from torch import Tensor, nn

from rco.compression.accounting import distinct_state
from rco.compression.base import Budget
from rco.core.problem import AllocationProblem, InfeasibleBudgetError
from rco.models.moe.layers import MoELayer

__all__ = [
    "KEEP",
    "PRUNE",
    "ExpertBudgets",
    "expert_names",
    "expert_problem",
    "experts_to_prune",
    "parse_locks",
]

PRUNE, KEEP = 0, 1
OPTIONS = ("prune", "keep")

# Bytes that a tensor's entry in a safetensors header takes beside its name, at most: type, shape and offsets.
_HEADER_ENTRY = 120
# transformers may write a stacked tensor as this many tensors per expert (gate and up).
_TENSORS_PER_PARAMETER = 2


def expert_names(layers: Sequence[MoELayer]) -> list[str]:
    """Every expert by its module path, layer after layer: ``model.layers.3.mlp.experts.17``."""
    return [
        f"{layer.name}.{layer.architecture.experts}.{expert}"
        for layer in layers
        for expert in range(layer.num_experts)
    ]


def parse_locks(locks: Sequence[str], names: Sequence[str]) -> np.ndarray:
    r"""(N, 2) allowed options after locks ``REGEX=keep`` or ``REGEX=prune``; the last that matches decides.

    A pattern is searched in the expert's name, so ``layers\.3\.`` locks a layer and ``layers\.3\..*\.17$``
    one expert.
    """
    allowed = np.ones((len(names), 2), dtype=bool)
    for lock in locks:
        pattern, _, wanted = lock.rpartition("=")
        if not pattern or wanted not in OPTIONS:
            raise ValueError(f"`lock` is REGEX=keep or REGEX=prune, got {lock!r}.")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`lock={lock!r}` has an invalid pattern: {error}.") from None
        matched = [i for i, name in enumerate(names) if compiled.search(name)]
        if not matched:
            raise ValueError(
                f"`lock={lock!r}` matches no expert; experts are named {names[0]} to {names[-1]}."
            )
        allowed[matched] = [wanted == option for option in OPTIONS]
    return allowed


def experts_to_prune(budget: Budget, experts: int) -> int:
    """How many experts a budget of kind ``experts`` prunes: this is the one place where a fraction is rounded.

    A fraction f prunes floor(f * experts); a whole number is a count.
    """
    amount = budget.amount
    if amount < 1:
        count = floor(amount * experts)
        if count < 1:
            raise ValueError(
                f"`experts={float(amount):g}` of {experts} experts is less than one expert; give at least "
                f"{1 / experts:.4g}, or a count."
            )
        return count
    if amount.denominator != 1:
        raise ValueError(
            f"`experts` is a fraction below 1 or a whole number of experts, got {float(amount):g}. "
            f"The model has {experts} experts."
        )
    return int(amount)


@dataclass(frozen=True)
class ExpertBudgets:
    """What experts weigh.

    Attributes:
        per_expert: For every layer, what one of its experts adds to the total.
        fixed: What stays when every expert is gone.
    """

    per_expert: tuple[int, ...]
    fixed: int

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[MoELayer], kind: str) -> ExpertBudgets:
        """In experts, parameters, or bytes of all safetensors files (an upper bound, by the headers' digits)."""
        if kind == "experts":
            return cls((1,) * len(layers), 0)
        state = distinct_state(model)
        header = kind == "size"

        def weigh(value: Tensor) -> int:
            return value.numel() * (value.element_size() if header else 1)

        def entry(name: str) -> int:
            return len(name) + _HEADER_ENTRY if header else 0

        total = sum(weigh(value) + entry(name) for name, value in state.items())
        total += 4096 if header else 0  # alignment and the frame of the headers
        per_expert = []
        for layer in layers:
            share = 0
            for part in (layer.router, layer.experts):
                for name, value in [*part.named_parameters(), *part.named_buffers()]:
                    if not value.ndim or value.shape[0] != layer.num_experts:
                        continue
                    share += weigh(value) // layer.num_experts
                    if part is layer.experts:
                        path = f"{layer.name}.{layer.architecture.experts}.{layer.num_experts}.{name}.weight"
                        share += _TENSORS_PER_PARAMETER * entry(path)
                        total += _TENSORS_PER_PARAMETER * entry(path) * layer.num_experts
            per_expert.append(share)
        experts = sum(share * layer.num_experts for share, layer in zip(per_expert, layers, strict=True))
        return cls(tuple(per_expert), total - experts)


def expert_problem(
    model: nn.Module,
    layers: Sequence[MoELayer],
    budget: Budget,
    *,
    uniform: bool = False,
    min_per_layer: int = 0,
    locks: Sequence[str] = (),
) -> AllocationProblem:
    """Keep or prune every expert: exactly as many pruned as asked, never fewer kept than a router picks.

    Args:
        model: The full model.
        layers: Its sparse layers.
        budget: ``experts`` to prune (a fraction or a count), or the most ``parameters`` or bytes (``size``) that
            the model may have.
        uniform: The same number kept in every layer.
        min_per_layer: Fewest experts that a layer keeps; the router's top-k is the least in any case.
        locks: ``REGEX=keep`` or ``REGEX=prune`` over names of experts.

    Raises:
        InfeasibleBudgetError: No choice of experts meets the budget.
        ValueError: Anything else that is wrong with what was asked.
    """
    if budget.kind not in ("experts", "parameters", "size"):
        raise ValueError(f"Expert pruning takes a budget of experts, parameters or size, got {budget.kind}.")
    counts = [layer.num_experts for layer in layers]
    floors = [max(layer.top_k, min_per_layer) for layer in layers]
    for layer, least in zip(layers, floors, strict=True):
        if least > layer.num_experts:
            raise ValueError(
                f"`min_per_layer={min_per_layer}` is more than the {layer.num_experts} experts of {layer.name}."
            )
    names = expert_names(layers)
    allowed = parse_locks(locks, names)
    weights = ExpertBudgets.of(model, layers, budget.kind)
    blocks = np.repeat(np.arange(len(layers)), counts)
    for layer, least, members in zip(layers, floors, range(len(layers)), strict=True):
        free = int(allowed[blocks == members, KEEP].sum())
        if free < least:
            raise ValueError(
                f"The locks leave {free} experts in {layer.name}, which must keep at least {least} (its router "
                f"picks {layer.top_k} per token); lock fewer to prune."
            )
    if uniform:
        target: Any = _uniform_budgets(layers, floors, budget, weights)
    else:
        target = _total_budget(counts, floors, budget, weights)
    costs = np.zeros((len(names), 2), dtype=np.int64)
    costs[:, KEEP] = np.repeat(np.array(weights.per_expert, dtype=np.int64), counts)
    arguments: dict[str, Any] = {
        "blocks": blocks if uniform else None,
        "allowed": allowed,
        "groups": names,
        "options": OPTIONS,
        "monotone": True,
        "floors": {"blocks": blocks, "counts": floors, "option": KEEP},
    }
    # A block that the locks decide altogether has no surface C = B to walk on.
    decided = [not allowed[blocks == b].all(axis=1).any() for b in range(len(layers))]
    stuck = any(decided) if uniform else all(decided)
    try:
        return AllocationProblem(costs, target, sense="<=" if stuck else "==", **arguments)
    except InfeasibleBudgetError as error:
        kept = [int(allowed[blocks == b, KEEP].sum()) for b in range(len(layers))]
        forced = [max(least, int((~allowed[blocks == b, PRUNE]).sum())) for b, least in enumerate(floors)]
        raise InfeasibleBudgetError(
            f"{_asked(budget)} cannot be met: with the locks and at least {_range(floors)} experts per layer "
            f"between {sum(forced)} and {sum(kept)} of {len(names)} experts stay. ({error})"
        ) from None


def _total_budget(
    counts: Sequence[int], floors: Sequence[int], budget: Budget, weights: ExpertBudgets
) -> Fraction | int:
    total = sum(counts)
    if budget.kind == "experts":
        pruned = experts_to_prune(budget, total)
        if total - pruned < sum(floors):
            raise InfeasibleBudgetError(
                f"{_asked(budget)} would keep {max(total - pruned, 0)} of {total} experts, but the routers need "
                f"{_range(floors)} in each of {len(counts)} layers, {sum(floors)} together; prune at most "
                f"{total - sum(floors)}."
            )
        return total - pruned
    room = budget.amount - weights.fixed
    least = sum(share * floor for share, floor in zip(weights.per_expert, floors, strict=True))
    most = sum(share * count for share, count in zip(weights.per_expert, counts, strict=True))
    _check_room(budget, room, weights.fixed, least, most)
    return min(room, Fraction(most))


def _uniform_budgets(
    layers: Sequence[MoELayer], floors: Sequence[int], budget: Budget, weights: ExpertBudgets
) -> list[int]:
    counts = [layer.num_experts for layer in layers]
    if budget.kind == "experts":
        if budget.amount < 1:
            pruned = [floor(budget.amount * count) for count in counts]
            if min(pruned) < 1:
                raise ValueError(f"{_asked(budget)} is less than one expert per layer of {min(counts)}.")
        else:
            asked = experts_to_prune(budget, sum(counts))
            if asked % len(layers):
                near = asked // len(layers) * len(layers)
                raise ValueError(
                    f"`uniform` prunes the same number in each of {len(layers)} layers, and {asked} is no multiple "
                    f"of {len(layers)}; ask for {near} or {near + len(layers)}."
                )
            pruned = [asked // len(layers)] * len(layers)
        kept = [count - gone for count, gone in zip(counts, pruned, strict=True)]
    else:
        room = budget.amount - weights.fixed
        _check_room(
            budget,
            room,
            weights.fixed,
            max(floors) * sum(weights.per_expert),
            min(counts) * sum(weights.per_expert),
        )
        kept = [min(floor(room / sum(weights.per_expert)), min(counts))] * len(layers)
    for layer, least, stays in zip(layers, floors, kept, strict=True):
        if stays < least:
            raise InfeasibleBudgetError(
                f"{_asked(budget)} would keep {max(stays, 0)} of {layer.num_experts} experts in {layer.name}, "
                f"which must keep at least {least} (its router picks {layer.top_k} per token)."
            )
    return [stays * share for stays, share in zip(kept, weights.per_expert, strict=True)]


def _check_room(budget: Budget, room: Fraction, fixed: int, least: int, most: int) -> None:
    unit = "bytes" if budget.kind == "size" else "parameters"
    if room < least:
        raise InfeasibleBudgetError(
            f"{_asked(budget)} is too little: without any expert the model takes {fixed:,} {unit}, and with the "
            f"fewest its routers need {fixed + least:,}; the full model takes {fixed + most:,}."
        )
    if room >= most:
        raise ValueError(
            f"{_asked(budget)} holds the full model ({fixed + most:,} {unit}): nothing is to be "
            "pruned. Ask for less."
        )


def _asked(budget: Budget) -> str:
    if budget.kind == "experts":
        return f"`experts={float(budget.amount):g}`"
    return f"`{budget.kind}={int(budget.amount)}`"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"
