"""Small assignment problems with losses that do not decompose, and their true optimum by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.core.objective import Loss, Objective
from rco.core.problem import AllocationProblem

__all__ = [
    "NetworkObjective",
    "QuadraticObjective",
    "enumerate_feasible",
    "random_problem",
    "true_optimum",
]


def random_problem(
    seed: int, num_groups: int = 6, num_options: int = 3, **arguments: Any
) -> AllocationProblem:
    """Random integer costs that grow with the option, and a budget in the middle half of its range.

    A budget that must be met exactly (``sense="=="``) is the total of a random assignment.
    """
    rng = np.random.default_rng(seed)
    costs = np.cumsum(rng.integers(1, 6, size=(num_groups, num_options)), axis=1)
    low, high = int(costs.min(axis=1).sum()), int(costs.max(axis=1).sum())
    budget = low + int(rng.integers((high - low) // 4, 3 * (high - low) // 4 + 1))
    if arguments.get("sense") == "==":
        allowed = np.asarray(arguments.get("allowed", np.ones(costs.shape, dtype=bool)))
        drawn = np.where(allowed, rng.random(costs.shape), -1.0).argmax(axis=1)
        return AllocationProblem(costs, budget=int(costs[np.arange(num_groups), drawn].sum()), **arguments)
    return AllocationProblem(costs, budget=max(low + 1, min(budget, high - 1)), **arguments)


class QuadraticObjective(Objective):
    """A random quadratic in the gates: every pair of choices interacts.

    Args:
        num_groups: N.
        num_options: K.
        seed: Seed of the coefficients.
        coupling: Size of the interactions relative to the separate terms.
        num_batches: Batches; each adds its own perturbation to the coefficients.
        batch_noise: Size of that perturbation.
    """

    def __init__(
        self,
        num_groups: int,
        num_options: int,
        seed: int = 0,
        coupling: float = 0.5,
        num_batches: int = 1,
        batch_noise: float = 0.0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = num_groups * num_options

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.num_batches = num_batches
        self._linear = normal(size)
        interaction = normal(size, size)
        self._interaction = coupling * (interaction + interaction.T) / (2 * num_groups**0.5)
        self._batch_linear = batch_noise * normal(num_batches, size)
        self._offset = 10.0 + 3.0 * num_groups

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """Offset + <a + a_batch, g> + <g, A g>."""
        flat = gates.reshape(-1)
        separate: Tensor = flat @ (self._linear + self._batch_linear[batch])
        together: Tensor = flat @ self._interaction @ flat
        return self._offset + separate + together


class NetworkObjective(Objective):
    """A random two-layer network of the gates: smooth, joint, with no structure to exploit."""

    num_batches = 1

    def __init__(self, num_groups: int, num_options: int, seed: int = 0, width: int = 32) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = num_groups * num_options
        self._first = torch.randn(width, size, generator=generator, dtype=torch.float64) / num_groups**0.5
        self._second = torch.randn(width, generator=generator, dtype=torch.float64) / width**0.5

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """<v, tanh(U g)>."""
        loss: Tensor = self._second @ torch.tanh(2.0 * self._first @ gates.reshape(-1))
        return loss


def enumerate_feasible(problem: AllocationProblem) -> Iterator[np.ndarray]:
    """Every feasible allocation, in lexicographic order; for small problems."""
    options = [np.flatnonzero(row).tolist() for row in problem.allowed]
    for choices in itertools.product(*options):
        candidate = np.array(choices, dtype=np.int64)
        if problem.is_feasible(candidate):
            yield candidate


@torch.no_grad()
def true_optimum(problem: AllocationProblem, objective: Loss) -> tuple[np.ndarray, float]:
    """The best feasible allocation and its mean loss over all batches, by enumeration."""
    best, best_loss = None, float("inf")
    for choices in enumerate_feasible(problem):
        gates = torch.nn.functional.one_hot(torch.from_numpy(choices), problem.num_options).double()
        loss = float(np.mean([float(objective.loss(gates, batch)) for batch in range(objective.num_batches)]))
        if loss < best_loss:
            best, best_loss = choices, loss
    if best is None:
        raise ValueError("The problem has no feasible allocation.")
    return best, best_loss
