"""Selection among candidate allocations on held-back batches, and the best sample of a search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.core.evaluator import Evaluator
from rco.core.knapsack import found_allocation
from rco.core.moves import spend
from rco.core.problem import AllocationProblem

__all__ = ["Candidates", "SampleTracker", "beats", "start_first"]

_HORIZON = 32  # samples in the moving average of losses


class Candidates:
    """Candidate allocations, compared on the selection batches.

    If the problem is monotone, each candidate first spends its leftover budget.
    """

    def __init__(self, problem: AllocationProblem, evaluator: Evaluator) -> None:
        self.problem, self.evaluator = problem, evaluator
        self.choices: dict[str, np.ndarray] = {}
        self.losses: dict[str, float] = {}

    def add(self, name: str, choices: np.ndarray, values: Tensor) -> None:
        """Add an allocation; leftover budget goes to the switches that gain most of ``values``."""
        if self.problem.monotone:
            choices = spend(self.problem, choices, values.numpy())
        self.choices[name] = choices

    def add_values(self, name: str, values: Tensor) -> None:
        """Add the exact knapsack of some values, unless its time limit passes before it has an allocation."""
        found = found_allocation(values.numpy(), self.problem)
        if found is not None:
            self.add(name, found, values)

    def add_exactly(self, name: str, values: Tensor) -> None:
        """Add the exact knapsack of some values unchanged, and a second candidate with its budget spent."""
        found = found_allocation(values.numpy(), self.problem)
        if found is None:
            return
        self.choices[name] = found
        if self.problem.monotone:
            self.add(f"{name}, spent", found, values)

    def ranked(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Names, choices and selection losses, best first; equal candidates are evaluated and returned once."""
        different = {choices.tobytes(): choices for choices in self.choices.values()}
        found = self.evaluator.many_selection_losses(
            list(different.values()), self.problem.num_options, self.evaluator.selection_batches
        )
        losses = dict(zip(different, found, strict=True))
        self.losses = {name: float(losses[c.tobytes()].mean()) for name, c in self.choices.items()}
        ranked: dict[bytes, tuple[str, np.ndarray, np.ndarray]] = {}
        for name in sorted(self.losses, key=lambda n: self.losses[n]):
            key = self.choices[name].tobytes()
            ranked.setdefault(key, (name, self.choices[name], losses[key]))
        return list(ranked.values())


def beats(losses: np.ndarray, others: np.ndarray, margin: float) -> bool:
    """Whether losses on the same batches are lower, by so many standard errors of the mean difference."""
    change = losses - others
    error = float(change.std(ddof=1)) / len(change) ** 0.5 if len(change) > 1 else 0.0
    return float(losses.mean()) < float(others.mean()) - margin * error


def start_first(
    ranked: Sequence[tuple[str, np.ndarray, np.ndarray]], starts: Iterable[np.ndarray], margin: float
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """A ranking that begins with the best starting point unless the best candidate beats that by the margin."""
    known = {choices.tobytes() for choices in starts}
    best = next((each for each in ranked if each[1].tobytes() in known), None)
    if best is None or not margin or beats(ranked[0][2], best[2], margin):
        return list(ranked)
    return [best, *(each for each in ranked if each is not best)]


class SampleTracker:
    """The best sample so far, corrected for the difficulty of the batches it was measured on.

    Samples are measured on different batches, some harder than others. The difficulty of a batch is estimated
    from the samples: the mean distance of its losses from the moving average of all losses. A batch that was
    never visited counts as average.
    """

    def __init__(self, num_batches: int) -> None:
        self._excess = np.zeros(num_batches)  # sums of a batch's losses above the moving average
        self._visits = np.zeros(num_batches, dtype=np.int64)
        self._average, self._count = 0.0, 0
        self._batches: list[int] = []  # those of the best sample, and its loss there
        self._measured = math.inf
        self.choices: np.ndarray | None = None
        self.loss = math.inf

    def _difficulty(self, batches: Sequence[int]) -> float:
        if len(self._visits) == 1:
            return 0.0  # every sample was measured on the same batch
        index = np.asarray(batches)
        return float((self._excess[index] / np.maximum(self._visits[index], 1)).mean())

    def add(self, choices: np.ndarray, batches: Sequence[int], loss: float) -> None:
        """Record a sample's loss on its batches."""
        # Both samples are corrected with the current difficulty estimates.
        best = self._measured - self._difficulty(self._batches) if self._batches else math.inf
        if loss - self._difficulty(batches) < best:
            self.choices, self._batches, self._measured = choices.copy(), list(batches), loss
        if self._count and len(self._visits) > 1:
            index = np.asarray(batches)
            np.add.at(self._excess, index, loss - self._average)
            np.add.at(self._visits, index, 1)
        self._count += 1
        self._average += (loss - self._average) / min(self._count, _HORIZON)
        self.loss = min(self.loss, loss)

    def state(self) -> dict[str, Any]:
        """The state as plain tensors and numbers."""
        return {
            "excess": torch.from_numpy(self._excess.copy()),
            "visits": torch.from_numpy(self._visits.copy()),
            "average": self._average,
            "count": self._count,
            "batches": list(self._batches),
            "measured": self._measured,
            "choices": None if self.choices is None else torch.from_numpy(self.choices.copy()),
            "loss": self.loss,
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self._excess, self._visits = state["excess"].numpy().copy(), state["visits"].numpy().copy()
        self._average, self._count = state["average"], state["count"]
        self._batches, self._measured = list(state["batches"]), state["measured"]
        self.choices = None if state["choices"] is None else state["choices"].numpy().copy()
        self.loss = state["loss"]
