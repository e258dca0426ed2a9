"""Contracts of searchers and objectives, as checks for any implementation.

A failed check raises an AssertionError that describes the failure.
"""

from __future__ import annotations

import numpy as np
import torch

from rco.core.moves import uniform_allocation
from rco.core.objective import Loss, as_objective
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.core.searcher import Searcher
from rco.testing.problems import QuadraticObjective, random_problem

__all__ = ["check_objective", "check_searcher"]


def check_objective(objective: Loss, num_groups: int, num_options: int) -> None:
    """Check for a finite, repeatable scalar per batch, differentiable in the gates, and the same if enqueued."""
    objective = as_objective(objective)
    generator = torch.Generator().manual_seed(0)
    choices = torch.randint(num_options, (num_groups,), generator=generator)
    assert objective.num_batches >= 1, f"num_batches is {objective.num_batches}"
    for batch in {0, objective.num_batches - 1}:
        gates = torch.nn.functional.one_hot(choices, num_options).double().requires_grad_()
        loss = objective.loss(gates, batch)
        assert loss.ndim == 0, f"the loss has shape {tuple(loss.shape)}, not ()"
        assert torch.isfinite(loss), f"the loss is {loss}"
        (gradient,) = torch.autograd.grad(loss, gates)
        assert gradient.shape == gates.shape
        assert torch.isfinite(gradient).all(), "the gradient is not finite"
        with torch.no_grad():
            again = objective.loss(gates.detach(), batch)
        assert torch.allclose(loss.detach(), again), f"the same gates gave {float(loss)} and {float(again)}"
        answers = [objective.enqueue(gates.detach(), batch) for _ in range(2)]
        for value, slope in (answer() for answer in answers):
            assert np.isclose(value, float(again), rtol=1e-4), f"the loss is {float(again)}, enqueued {value}"
            assert slope.device == gates.device, (
                f"the gradient is on {slope.device}, the gates on {gates.device}"
            )
            assert torch.allclose(slope, gradient, rtol=1e-3, atol=1e-6), "the gradient differs if enqueued"


def check_searcher(searcher: Searcher) -> None:
    """Check budgets, minimum counts, determinism, starting points, JSON, on_step, locks and blocks.

    A searcher whose ``compares_starts`` is False may be worse than a starting point.
    """
    assert searcher.name, "a searcher has a name"
    for seed, arguments in enumerate(_arguments()):
        problem = random_problem(seed, num_groups=6, num_options=3, **arguments)
        objective = QuadraticObjective(6, 3, seed=seed, num_batches=2, batch_noise=0.1)
        prior = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        _check_run(searcher, problem, objective, prior)
    blocks = AllocationProblem([0, 1], budget=[1, 2], blocks=[0, 0, 1, 1, 1])
    _check_run(searcher, blocks, QuadraticObjective(5, 2, seed=1), None)
    for problem in counted_problems():
        objective = QuadraticObjective(problem.num_groups, problem.num_options, seed=2, num_batches=2)
        _check_run(searcher, problem, objective, None)


def counted_problems() -> list[AllocationProblem]:
    """Two layers of four experts, of which at least two and one must not be removed.

    With two options of equal cost (pruning), and with removed, 2, 3 or 4 bits at costs that differ between experts,
    under a budget close to the cost of the minimum counts.
    """
    layers = [0, 0, 0, 0, 1, 1, 1, 1]
    labels = [f"layers.{layer}.experts.{expert % 4}" for expert, layer in enumerate(layers)]
    pruning = AllocationProblem(
        [[0, 1]] * 8,
        budget=4,
        groups=labels,
        monotone=True,
        min_counts={"blocks": layers, "counts": [2, 1], "options": [1]},
    )
    sizes = np.array([5, 1, 4, 2, 3, 3, 1, 2])[:, None]
    widths = AllocationProblem(
        sizes * [0, 2, 3, 4],
        budget=14,
        sense="<=",
        groups=labels,
        min_counts={"blocks": layers, "counts": [2, 1], "options": [1, 2, 3]},
    )
    return [pruning, widths]


def _arguments() -> list[dict[str, object]]:
    locked = np.ones((6, 3), dtype=bool)
    locked[0, 1:] = False
    return [{}, {"sense": "<="}, {"monotone": True}, {"allowed": locked, "sense": "<="}, {"sense": "=="}]


def _check_run(
    searcher: Searcher, problem: AllocationProblem, objective: Loss, prior: torch.Tensor | None
) -> None:
    records: list[StepRecord] = []
    result = searcher.search(problem, objective, prior=prior, on_step=records.append)
    choices = np.asarray(result.allocation)
    assert problem.is_feasible(choices), f"{searcher.name} returned an allocation over budget or forbidden"
    assert result.cost == problem.cost(choices)
    assert all(np.isfinite(record.loss) for record in records)
    again = searcher.search(problem, objective, prior=prior)
    assert result.allocation == again.allocation, "the same seed gave another allocation"
    assert SearchResult.from_json(result.to_json()).allocation == result.allocation
    uniform = uniform_allocation(problem)
    # Where a problem is declared monotone the starts are spent first, which this loss does not reward.
    promised = getattr(searcher, "compares_starts", True) and not problem.monotone
    assert not promised or result.loss <= _loss(objective, uniform, problem) + 1e-9, "worse than uniform"
    assert abs(result.loss - _loss(objective, choices, problem)) < 1e-9, "the reported loss is wrong"


@torch.no_grad()
def _loss(objective: Loss, choices: np.ndarray, problem: AllocationProblem) -> float:
    whole = as_objective(objective)
    held_back = whole if whole.selection is None else whole.selection
    gates = torch.nn.functional.one_hot(torch.from_numpy(choices), problem.num_options).double()
    return float(np.mean([float(held_back.loss(gates, b)) for b in range(held_back.num_batches)]))
