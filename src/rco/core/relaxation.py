"""From logits to feasible one-hot samples and back: Gumbel noise, temperature, straight-through gates.

Noise is a pure function of (seed, step, sample), so a run gives the same samples whether it was interrupted,
and whichever process draws them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rco.core.problem import AllocationProblem

__all__ = ["batch_order", "expected_cost", "gumbel_noise", "straight_through", "temperature"]

_NOISE_STREAM, _BATCH_STREAM = 0, 1


def _generator(seed: int, stream: int, *counter: int) -> np.random.Generator:
    """A generator that depends on its arguments alone."""
    entropy = np.random.SeedSequence(entropy=[seed, stream, *counter])
    return np.random.Generator(np.random.Philox(entropy))


def gumbel_noise(
    shape: tuple[int, int], *, seed: int, step: int, sample: int, antithetic: bool = False
) -> Tensor:
    """Standard Gumbel noise (N, K) in float64: -log(-log u).

    Antithetic samples come in pairs that share their uniforms, u and 1 - u: each is Gumbel distributed, which
    negated Gumbel noise would not be.
    """
    draw = sample // 2 if antithetic else sample
    uniform = _generator(seed, _NOISE_STREAM, step, draw).random(shape)
    if antithetic and sample % 2:
        uniform = 1.0 - uniform
    tiny = np.finfo(np.float64).tiny
    # Both ends of the unit interval are pulled in by the smallest step, so that the noise stays finite.
    uniform = np.clip(uniform, tiny, 1.0 - 2.0**-53)
    return torch.from_numpy(-np.log(-np.log(uniform)))


def batch_order(num_batches: int, *, seed: int, first: int, count: int) -> list[int]:
    """Positions first .. first + count - 1 of an endless walk over the batches, reshuffled every epoch."""
    walk = []
    for position in range(first, first + count):
        epoch, offset = divmod(position, num_batches)
        order = _generator(seed, _BATCH_STREAM, epoch).permutation(num_batches)
        walk.append(int(order[offset]))
    return walk


def temperature(step: float, steps: float, tau: tuple[float, float]) -> float:
    """Exponential annealing from tau[0] to tau[1], reached at ``step == steps`` (paper, section 3.1)."""
    start, end = tau
    return max(end, float(start * (end / start) ** (step / max(steps, 1.0))))


def expected_cost(problem: AllocationProblem, logits: Tensor) -> Tensor:
    """(J,) expected total cost of softmax(logits) under each budget (paper, Eq. 1), with gradient."""
    p = torch.softmax(logits + problem.log_allowed, dim=-1)
    per_group = (p * torch.from_numpy(problem.float_costs)).sum(dim=-1)  # (q, N)
    if problem.block_index is None:
        return per_group.sum(dim=-1)
    totals = torch.zeros(problem.num_budgets, dtype=per_group.dtype)
    return totals.index_add(0, torch.from_numpy(problem.block_index), per_group[0])


def straight_through(perturbed: Tensor, choices: Tensor) -> Tensor:
    """Gates that are exactly one-hot at ``choices`` and differentiate as softmax(perturbed)."""
    soft = torch.softmax(perturbed, dim=-1)
    hard = torch.nn.functional.one_hot(choices, perturbed.shape[-1]).to(soft.dtype)
    return (soft - soft.detach()) + hard
