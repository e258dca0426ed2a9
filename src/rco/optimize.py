"""Minimisation of a loss over assignments under a budget, by RCO or any other method of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rco import registry
from rco.core.moves import repaired
from rco.core.objective import CallableObjective, Loss, Objective, as_objective
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.core.search import GumbelSearch
from rco.core.searcher import BudgetedSearch

__all__ = ["minimize", "sweep"]

_STEPS, _SAMPLES = 200, 16
# Without an allowance the exchanges after the loop of a gradient search may spend this share of its evaluations.
_REFINE_SHARE, _LEAST_REFINE = 0.5, 64
_OPEN = ("steps", "generations", "refine")  # settings that an allowance ends


def minimize(
    loss: Callable[[Tensor], Any] | Loss,
    problem: AllocationProblem,
    *,
    method: str = "rco",
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    batched: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    prior: Tensor | None = None,
    start: Any = None,
    on_step: Callable[[StepRecord], Any] | None = None,
    on_checkpoint: Callable[[dict[str, Any]], None] | None = None,
    resume: Mapping[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    **settings: Any,
) -> SearchResult:
    """Minimise a function of one-hot gates (N, K) under the problem's budget.

    The function gets float64 gates (float32 if it refuses those) on the given device. RCO and the other gradient
    methods need a torch number with gradient; the others also take plain floats.

    Args:
        loss: The function, or an :class:`rco.Objective` with several batches.
        problem: Costs and budget.
        method: ``"rco"`` or another name of ``rco.registry.METHODS``. Without gradient: ``"annealing"``,
            ``"evopress"``, ``"greedy"``, ``"random"`` and others.
        max_evaluations: Most evaluations of the loss, a gradient counting as two more. With an allowance the number
            of steps, unless given, is chosen by the method.
        max_seconds: Seconds after which the search ends.
        seed: Seed of all random draws: same seed, same result.
        batched: Whether the function takes gates (B, N, K) and returns (B,).
        dtype: Type of the gates that the function gets; None: found out.
        device: Device of the gates that the function gets.
        prior: (N, K) scores, higher is better, from which the search starts.
        start: An allocation from which the search starts; it must be feasible.
        on_step: Called with every :class:`rco.StepRecord`; returning True ends the search.
        on_checkpoint: Called after every step with a state that ``resume`` accepts.
        resume: A state from ``on_checkpoint``.
        checkpoint: A file that holds the state after every step; if it exists, the search continues from it.
        settings: Settings of the method, such as ``steps``, ``samples``, ``patience`` and ``target``; see
            :class:`rco.RCO`.

    Returns:
        The best allocation found. Its ``status`` tells whether the search was finished, stopped, interrupted, or
        ended by a loss that was not finite.

    Raises:
        TypeError: Unknown settings, or a loss without gradient for a method that needs one.
        InfeasibleBudgetError: No allocation meets the budget; the message names the nearest totals.
    """
    searcher = _searcher(method, max_evaluations, max_seconds, seed, settings)
    objective: Objective
    if callable(loss) and not hasattr(loss, "loss"):
        objective = CallableObjective(loss, batched=batched, dtype=dtype, device=device)
    else:
        objective = as_objective(loss)
    if checkpoint is not None:
        path = Path(checkpoint)
        if resume is None and path.exists():
            resume = torch.load(path, weights_only=True)
        on_checkpoint = _writing(path, on_checkpoint)
    return searcher.search(
        problem,
        objective,
        prior=prior,
        start=start,
        on_step=on_step,
        on_checkpoint=on_checkpoint,
        resume=resume,
        best_on_failure=True,
    )


def sweep(
    loss: Callable[[Tensor], Any] | Loss,
    problem: AllocationProblem,
    budgets: Iterable[Any],
    **settings: Any,
) -> list[SearchResult]:
    """Minimise under several budgets, each search starting from the result of the next smaller budget.

    Where budgets may be left unspent, a larger budget therefore never gives a worse result than a smaller one.

    Args:
        loss: As for :func:`minimize`.
        problem: Costs; its own budget is not used.
        budgets: The budgets, as numbers or, for several, sequences of them.
        settings: Arguments of :func:`minimize`, for each search alone.

    Returns:
        One result per budget, in the order given.
    """
    problems = [problem.replace(budget=budget) for budget in budgets]
    order = sorted(range(len(problems)), key=lambda i: problems[i].budgets)
    results: dict[int, SearchResult] = {}
    last: SearchResult | None = None
    for i in order:
        arguments = dict(settings)
        if last is not None:
            near = last.allocation.choices
            usable = problems[i].is_feasible(near) or problems[i].exact
            arguments["start"] = repaired(problems[i], near) if usable else arguments.get("start")
        last = results[i] = minimize(loss, problems[i], **arguments)
    return [results[i] for i in range(len(problems))]


def _searcher(
    method: str, max_evaluations: int | None, max_seconds: float | None, seed: int, settings: dict[str, Any]
) -> BudgetedSearch:
    kind: type[BudgetedSearch] = registry.load(registry.METHODS, method, "method")
    known = {field.name for field in fields(kind) if field.init}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(f"Unknown settings {unknown}; {method} takes {sorted(known)}.")
    given: dict[str, Any] = {"seed": seed, "max_evaluations": max_evaluations, "max_seconds": max_seconds}
    if max_evaluations is not None or max_seconds is not None:
        given |= {name: None for name in _OPEN if name in known}
    elif issubclass(kind, GumbelSearch):
        steps, samples = settings.get("steps", _STEPS), settings.get("samples", _SAMPLES)
        given |= {"steps": steps, "samples": samples}
        if "refine" in known:
            given["refine"] = max(_LEAST_REFINE, int(_REFINE_SHARE * 3 * (steps or 0) * samples))
    return kind(**{**given, **settings})


def _writing(
    path: Path, further: Callable[[dict[str, Any]], None] | None
) -> Callable[[dict[str, Any]], None]:
    """A callback that writes states to a file in one piece, and passes them on."""

    def write(state: dict[str, Any]) -> None:
        partial = path.with_name(f"{path.name}.partial")
        torch.save(state, partial)
        partial.replace(path)
        if further is not None:
            further(state)

    return write
