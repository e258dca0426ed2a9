"""Feasible one-hot samples of logits: Gumbel noise, exact knapsacks, and random streams.

Everything drawn is a pure function of its seed and counters, so a run gives the same samples whether it was
interrupted or not, and whichever process draws them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rco.core.knapsack import found_allocation, solve_choices
from rco.core.moves import uniform_allocation
from rco.core.problem import AllocationProblem

__all__ = [
    "batch_order",
    "draw_feasible",
    "feasible_choices",
    "generator",
    "gumbel_noise",
    "gumbel_noises",
]

_NOISE, _BATCHES, _METHODS = range(3)  # streams that never share a number


def _stream(seed: int, *counter: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *counter])))


def generator(seed: int, *counter: int) -> np.random.Generator:
    """A generator for a method's own draws that depends on its arguments alone."""
    return _stream(seed, _METHODS, *counter)


def gumbel_noise(
    shape: tuple[int, int], *, seed: int, step: int, sample: int, antithetic: bool = False
) -> Tensor:
    """The noise (N, K) of one sample; see :func:`gumbel_noises`."""
    some = range(sample, sample + 1)
    return gumbel_noises(shape, seed=seed, step=step, samples=some, antithetic=antithetic)[0]


def gumbel_noises(
    shape: tuple[int, int], *, seed: int, step: int, samples: range, antithetic: bool = False
) -> Tensor:
    """Standard Gumbel noise (S, N, K) of some samples of a step, in float64: -log(-log u).

    Antithetic samples come in pairs that share their uniforms, u and 1 - u: each is Gumbel distributed, which
    negated Gumbel noise would not be.
    """
    uniform = np.empty((len(samples), *shape))
    for own, sample in zip(uniform, samples, strict=True):
        _stream(seed, _NOISE, step, sample // 2 if antithetic else sample).random(out=own)
        if antithetic and sample % 2:
            np.subtract(1.0, own, out=own)
    tiny = np.finfo(np.float64).tiny
    # Both ends of the unit interval are pulled in by the smallest step, so that the noise stays finite.
    uniform = np.clip(uniform, tiny, 1.0 - 2.0**-53)
    return torch.from_numpy(-np.log(-np.log(uniform)))


def batch_order(num_batches: int, *, seed: int, first: int, count: int) -> list[int]:
    """Positions first .. first + count - 1 of an endless walk over the batches, reshuffled every epoch."""
    if num_batches == 1:
        return [0] * count
    walk = []
    for position in range(first, first + count):
        epoch, offset = divmod(position, num_batches)
        order = _stream(seed, _BATCHES, epoch).permutation(num_batches)
        walk.append(int(order[offset]))
    return walk


def feasible_choices(values: np.ndarray, centre: Tensor, problem: AllocationProblem) -> np.ndarray:
    """Choices (S, N) of the exact knapsacks of perturbed values (S, N, K).

    With joint budgets the solver's time limit may pass before it has an allocation; such a sample is the knapsack
    of the unperturbed ``centre`` or, if that has none either, the uniform assignment.
    """
    choices = solve_choices(values, problem).choices
    missed = (choices < 0).any(axis=1)
    if missed.any():
        found = found_allocation(centre, problem)
        choices[missed] = uniform_allocation(problem) if found is None else found
    return choices


def draw_feasible(
    log_p: Tensor, problem: AllocationProblem, *, seed: int, step: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Feasible samples (S, N) around log-probabilities, and the perturbed values (S, N, K) they maximise."""
    shape = (problem.num_groups, problem.num_options)
    noise = gumbel_noises(shape, seed=seed, step=step, samples=range(samples))
    values = (log_p + noise + problem.log_allowed).numpy()
    return feasible_choices(values, log_p, problem), values
