"""What several baselines share: options by cost, blocks of groups, seeds, and tables an objective may offer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rco.core.problem import AllocationProblem
from rco.core.process import sampled_choices
from rco.core.protocols import Objective
from rco.core.relaxation import gumbel_noise

__all__ = [
    "HasAcceptance",
    "HasBlocks",
    "HasFisherLosses",
    "HasNoise",
    "HasOptionErrors",
    "HasOutputErrors",
    "HasTokens",
    "Ladder",
    "blocks_of",
    "draw_feasible",
    "fill_upwards",
    "generator",
    "spent_and_budget",
]

# Apart from the streams that rco.core.relaxation draws its noise and its order of batches from.
_STREAM = 2


@runtime_checkable
class HasOptionErrors(Protocol):
    """An objective that knows what each option does to its group: relative squared errors t^2, (N, K)."""

    option_errors: Tensor


@runtime_checkable
class HasOutputErrors(Protocol):
    """An objective that knows what each option does to its group's outputs: squared errors, (N, K)."""

    output_errors: Tensor


@runtime_checkable
class HasFisherLosses(Protocol):
    """An objective that knows its second-order loss of every option from sampled gradients, (N, K)."""

    fisher_losses: Tensor


@runtime_checkable
class HasNoise(Protocol):
    """An objective that can add noise to the weights of a single group."""

    def noisy_loss(self, gates: Tensor, batch: int, group: int, squared_error: float, seed: int) -> Tensor:
        """The loss with noise of a relative squared error t^2 on one group; the seed decides the draw."""
        ...


@runtime_checkable
class HasAcceptance(Protocol):
    """An objective that can say how many of the compressed model's tokens the full model would accept."""

    def acceptance(self, gates: Tensor, batch: int) -> Tensor:
        """Expected acceptance on one batch, in [0, 1]; higher is better."""
        ...


@runtime_checkable
class HasBlocks(Protocol):
    """An objective that knows which block (layer) each group lies in: N ids."""

    group_blocks: Sequence[Any]


@runtime_checkable
class HasTokens(Protocol):
    """An objective that knows how many tokens one of its batches holds."""

    tokens_per_batch: int


def generator(seed: int, *counter: int) -> np.random.Generator:
    """A generator that depends on its arguments alone, so that a resumed search draws what it would have drawn."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _STREAM, *counter])))


# ------------------------------------------------------------------------------------ budgets


def spent_and_budget(problem: AllocationProblem, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exact units spent and allowed, one per budget."""
    dtype = problem.unit_costs.dtype
    return np.array(problem.units(choices), dtype=dtype), np.array(problem.unit_budgets, dtype=dtype)


def draw_feasible(
    log_p: Tensor, problem: AllocationProblem, *, seed: int, step: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Feasible samples (S, N) around log-probabilities, and the perturbed values (S, N, K) they maximise."""
    shape = (problem.num_groups, problem.num_options)
    noise = [gumbel_noise(shape, seed=seed, step=step, sample=j) for j in range(samples)]
    values = (log_p + torch.stack(noise) + problem.log_allowed).numpy()
    return sampled_choices(values, log_p, problem), values


class Ladder:
    """Each group's allowed options from the cheapest to the dearest; options of equal cost share a rung.

    With joint budgets an option's cost is the sum of its costs, each in units of its budget's reachable range.

    Attributes:
        size: (N, K) float costs in those units.
        rung: (N, K) int64 position of every option, counted from 0; -1 if forbidden.
        top: (N,) highest rung.
    """

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem = problem
        low, high = problem.unit_range
        width = [max(h - lo, 1) for lo, h in zip(low, high, strict=True)]
        costs = problem.unit_costs
        if problem.block_index is None:
            scaled = [costs[j].astype(np.float64) / float(width[j]) for j in range(len(costs))]
            self.size = np.sum(scaled, axis=0)
        else:
            self.size = costs[0].astype(np.float64) / float(sum(width))
        exact = costs[0] if problem.num_joint == 1 else self.size
        self.rung = np.full(problem.allowed.shape, -1, dtype=np.int64)
        for row, ok, cost in zip(self.rung, problem.allowed, exact, strict=True):
            row[ok] = np.unique(cost[ok], return_inverse=True)[1].reshape(-1)
        self.top = self.rung.max(axis=1)
        self._groups = np.arange(problem.num_groups)

    def at(self, rung: str) -> np.ndarray:
        """The first option on the lowest or highest rung of every group."""
        wanted = self.top if rung == "dearest" else np.zeros_like(self.top)
        return np.asarray((self.rung == wanted[:, None]).argmax(axis=1), dtype=np.int64)

    def neighbours(self, choices: np.ndarray, step: int) -> np.ndarray:
        """(N, K) options that lie ``step`` rungs above (below, if negative) the chosen ones."""
        wanted = self.rung[self._groups, choices] + step
        return np.asarray((self.rung == wanted[:, None]) & (self.rung >= 0))

    def change(self, choices: np.ndarray) -> np.ndarray:
        """(q, N, K) exact change in units when one group switches to an option."""
        costs = self.problem.unit_costs
        return np.asarray(costs - costs[:, self._groups, choices][:, :, None])

    def fits(self, choices: np.ndarray) -> np.ndarray:
        """(N, K) whether a single switch leaves every budget kept, given that they are kept now."""
        spent, budget = spent_and_budget(self.problem, choices)
        room, change = budget - spent, self.change(choices)
        if self.problem.block_index is None:
            return np.asarray((change <= room[:, None, None]).all(axis=0), dtype=bool)
        return np.asarray(change[0] <= room[self.problem.block_index][:, None], dtype=bool)

    def relieves(self, choices: np.ndarray) -> np.ndarray:
        """(N, K) whether a single switch spends less of a budget that is exceeded now, and more of no such."""
        spent, budget = spent_and_budget(self.problem, choices)
        over, change = spent > budget, self.change(choices)
        if self.problem.block_index is None:
            exceeded = change[over]
            return np.asarray((exceeded < 0).any(axis=0) & (exceeded <= 0).all(axis=0), dtype=bool)
        return np.asarray((change[0] < 0) & over[self.problem.block_index][:, None], dtype=bool)

    def require_order(self, method: str) -> None:
        """An error if joint budgets order a group's options differently, so that "dearer" has no meaning."""
        costs = self.problem.unit_costs
        for group in range(self.problem.num_groups if len(costs) > 1 else 0):
            ok = self.problem.allowed[group]
            order = np.argsort(self.size[group, ok], kind="stable")
            steps = np.diff(costs[:, group, ok][:, order], axis=1)
            if (steps < 0).any():
                raise ValueError(
                    f"{method} goes from cheaper to dearer options, but the joint budgets order the options of "
                    f"group {group} differently; use a search that needs no such order, such as rco or evopress."
                )


def fill_upwards(ladder: Ladder, choices: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Raise groups of a feasible allocation by one rung in the given order, each if it still fits."""
    problem = ladder.problem
    choices = choices.copy()
    above = ladder.neighbours(choices, 1)
    target = above.argmax(axis=1)
    # A group is raised once, so that what each step costs is known beforehand.
    change = ladder.change(choices)[:, np.arange(len(choices)), target]
    spent, budget = spent_and_budget(problem, choices)
    room = budget - spent
    blocks = problem.block_index
    can_rise = np.asarray(above.any(axis=1))
    for group in order[can_rise[order]].tolist():
        if blocks is None:
            left = room - change[:, group]
        else:
            left = room.copy()
            left[blocks[group]] -= change[0, group]
        if (left >= 0).all():
            room, choices[group] = left, target[group]
    return choices


# ------------------------------------------------------------------------------------- blocks


def blocks_of(
    problem: AllocationProblem, objective: Objective | None, given: Sequence[Any] | None
) -> np.ndarray:
    """(N,) block numbers from 0: as given, as the objective or the problem has them, or as the labels tell.

    Labels are cut before their last number if they end in one ("layers.3.experts.17" lies in "layers.3.experts"),
    else after their first number ("layers.3.q_proj" lies in "layers.3"). Without any of these all is one block.
    """
    if given is not None and len(given) != problem.num_groups:
        raise ValueError(
            f"blocks must name a block for each of {problem.num_groups} groups, got {len(given)}."
        )
    if given is None and isinstance(objective, HasBlocks):
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
