"""Losses of options as a search measures them, against exact ones."""

import numpy as np
import pytest
import torch

from rco.core.interaction import InteractionLosses
from rco.core.problem import AllocationProblem
from rco.core.search import RCO

SIZES = torch.tensor(
    [2.0, 1.0, 0.5, 0.0], dtype=torch.float64
)  # of the error of each option; the last has none


class SumOfErrors:
    """|sum of the chosen errors|^2 / 2; an option's error has its group's direction."""

    num_batches = 1

    def __init__(self, groups: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        # A common part, so that errors meet.
        direction = 0.4 + torch.randn(groups, 6, generator=rng, dtype=torch.float64)
        self.errors = SIZES[None, :, None] * direction[:, None, :]  # (N, K, 6)
        gaps = self.errors[:, :, None] - self.errors[:, None, :]
        self.curvature = 0.5 * gaps.square().sum(dim=-1)

    def loss(self, gates: torch.Tensor, batch: int) -> torch.Tensor:
        return 0.5 * torch.einsum("ik,ikd->d", gates, self.errors).square().sum()


def make_problem(groups: int, budget: int) -> AllocationProblem:
    return AllocationProblem(np.tile([1, 2, 3, 4], (groups, 1)), budget, monotone=True)


def gradient_at(objective: SumOfErrors, choices: torch.Tensor) -> torch.Tensor:
    gates = torch.nn.functional.one_hot(choices, 4).double().requires_grad_()
    return torch.autograd.grad(objective.loss(gates, 0), gates)[0]


def exact_losses(objective: SumOfErrors, choices: torch.Tensor) -> torch.Tensor:
    """What switching each group alone changes, above its last option."""
    found = torch.empty(len(choices), 4, dtype=torch.float64)
    for group in range(len(choices)):
        for option in range(4):
            other = choices.clone()
            other[group] = option
            found[group, option] = objective.loss(torch.nn.functional.one_hot(other, 4).double(), 0)
    return found - found[:, -1:]


@pytest.mark.parametrize("seed", range(5))
def test_without_noise_the_losses_at_an_assignment_are_exact(seed):
    objective = SumOfErrors(8, seed)
    choices = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, size=8))
    measured = InteractionLosses(make_problem(8, 20), objective.curvature)
    for _ in range(2):
        measured.add(choices, gradient_at(objective, choices))
    torch.testing.assert_close(measured.losses, exact_losses(objective, choices))


def test_noise_is_shrunk():
    """Around one assignment, with noisy gradients, the shrunk factors err less than the plain means."""
    objective = SumOfErrors(40, 0)
    rng = torch.Generator().manual_seed(0)
    choices = torch.randint(0, 3, (40,), generator=rng)
    exact = InteractionLosses(make_problem(40, 100), objective.curvature)
    noisy = InteractionLosses(make_problem(40, 100), objective.curvature)
    clean = gradient_at(objective, choices)
    total = torch.zeros(40, dtype=torch.float64)
    own = objective.curvature[torch.arange(40), :, 3]
    for _ in range(4):
        exact.add(choices, clean)
        gradient = clean + 12.0 * own.sqrt() * torch.randn(40, 4, generator=rng, dtype=torch.float64)
        noisy.add(choices, gradient)
        slope = gradient[torch.arange(40), choices] - gradient[:, 3]
        mine = own[torch.arange(40), choices]
        total += (slope - 2 * mine) / mine.sqrt() / 4
    assert (noisy.factors - exact.factors).square().mean() < 0.8 * (total - exact.factors).square().mean()


def test_nothing_seen_leaves_the_own_terms():
    objective = SumOfErrors(5, 1)
    measured = InteractionLosses(make_problem(5, 12), objective.curvature)
    torch.testing.assert_close(measured.losses, objective.curvature[torch.arange(5), :, 3])
    # At the best options there is nothing to learn from.
    best = torch.full((5,), 3)
    measured.add(best, gradient_at(objective, best))
    torch.testing.assert_close(measured.losses, objective.curvature[torch.arange(5), :, 3])


def test_a_search_with_curvature_resumes_to_the_same_result():
    objective, problem = SumOfErrors(10, 2), make_problem(10, 25)
    searcher = RCO(steps=12, samples=2, seed=3)
    states = []
    whole = searcher.search(problem, objective, on_checkpoint=states.append)
    assert "measured" in whole.candidates
    assert "prices" not in whole.candidates
    again = searcher.search(problem, objective, resume=states[4])
    assert again.candidates == whole.candidates
    np.testing.assert_array_equal(np.asarray(again.allocation), np.asarray(whole.allocation))
