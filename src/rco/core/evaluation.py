"""Asking an objective many questions at once, in the order of the questions, wherever they are answered.

A search knows a whole step's samples, or a round's candidates, before it needs the first answer. Handing them over
together lets an objective spread them over devices; one that cannot is asked one by one, with the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rco.core.protocols import Objective

__all__ = ["ParallelObjective", "Request", "losses", "losses_and_gradients"]

Request = tuple[Tensor, int]  # gates (N, K) and a batch


@runtime_checkable
class ParallelObjective(Protocol):
    """An objective that answers many requests at once.

    The answer to a request must not depend on the others, nor on where it is computed: a search then gives the same
    result on one device and on many.
    """

    num_batches: int

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """As :meth:`rco.core.protocols.Objective.loss`."""
        ...

    def losses(self, requests: Sequence[Request]) -> list[float]:
        """The loss of every request, without gradient."""
        ...

    def losses_and_gradients(self, requests: Sequence[Request]) -> list[tuple[float, Tensor]]:
        """The loss of every request and its gradient with respect to the gates."""
        ...


@torch.no_grad()
def losses(objective: Objective, requests: Sequence[Request]) -> list[float]:
    """The loss of every request, without gradient."""
    if isinstance(objective, ParallelObjective):
        return objective.losses(requests)
    return [float(objective.loss(gates, batch)) for gates, batch in requests]


def losses_and_gradients(objective: Objective, requests: Sequence[Request]) -> list[tuple[float, Tensor]]:
    """The loss of every request and its gradient with respect to the gates."""
    if isinstance(objective, ParallelObjective):
        return objective.losses_and_gradients(requests)
    answers = []
    for gates, batch in requests:
        leaf = gates.detach().requires_grad_()
        loss = objective.loss(leaf, batch)
        (gradient,) = torch.autograd.grad(loss, leaf)
        answers.append((float(loss.detach()), gradient))
    return answers
