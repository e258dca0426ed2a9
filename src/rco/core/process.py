"""What all searchers have in common: allowance, progress, checkpoints, and the choice at the end.

A method supplies a :class:`Process`, which advances step by step and at the end proposes candidates.
:class:`BudgetedSearch` runs it within its allowance and returns the best candidate on the selection split, with
the starting points among them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.core.evaluation import Evaluator, OutOfAllowance
from rco.core.knapsack import found_allocation, solve_choices
from rco.core.problem import AllocationProblem
from rco.core.protocols import Objective
from rco.core.refine import Candidates, layer_order, uniform_allocation
from rco.core.relaxation import batch_order
from rco.core.result import SearchResult, StepRecord

__all__ = [
    "BudgetedSearch",
    "OnIncumbent",
    "Process",
    "checked_table",
    "sampled_choices",
    "some_batches",
]

_STATE_VERSION = 3
_OPEN_END = 10**9
_ALLOWANCE = ("max_evaluations", "max_seconds")  # may change when a search is resumed

# The allocation is worked out when it is asked for, which may take a knapsack or more.
OnIncumbent = Callable[[StepRecord, Callable[[], np.ndarray | None]], None]


def checked_table(table: Any, problem: AllocationProblem, name: str) -> np.ndarray:
    """An (N, K) table of numbers, finite where an option is allowed; zero elsewhere."""
    array = np.asarray(torch.as_tensor(table).detach().to("cpu", torch.float64))
    shape = (problem.num_groups, problem.num_options)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}.")
    if not np.isfinite(array[problem.allowed]).all():
        group, option = np.argwhere(~np.isfinite(array) & problem.allowed)[0]
        raise ValueError(
            f"{name} must be finite for every allowed option, got {array[group, option]} for option {option} of "
            f"group {group}."
        )
    return np.where(problem.allowed, array, 0.0)


def sampled_choices(values: np.ndarray, centre: Tensor, problem: AllocationProblem) -> np.ndarray:
    """Choices (S, N) of the exact knapsacks of perturbed values (S, N, K).

    With joint budgets the solver's time may run out before it has any; such a sample is the knapsack of the
    unperturbed ``centre`` or, if that has none either, the uniform assignment.
    """
    choices = solve_choices(values, problem).choices
    missed = (choices < 0).any(axis=1)
    if missed.any():
        found = found_allocation(centre, problem)
        choices[missed] = uniform_allocation(problem) if found is None else found
    return choices


def some_batches(evaluator: Evaluator, count: int | None, seed: int, first: int = 0) -> list[int]:
    """That many different batches in an order that the seed decides; all of them for None."""
    available = evaluator.objective.num_batches
    wanted = available if count is None else min(count, available)
    return batch_order(available, seed=seed, first=first * available, count=wanted)


class Process(ABC):
    """One search by one method, between two steps of it.

    ``advance`` must leave the object as it was when it raises :class:`OutOfAllowance`, except for measurements
    that stay valid.
    """

    own_candidates: int = 1  # most that ``propose`` adds
    kept_back: int = 0  # evaluations that ``polish`` may count on

    def __init__(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> None:
        self.problem, self.evaluator, self.prior = problem, evaluator, prior
        self.notes: dict[str, Any] = {}  # what the result's settings say beside the settings

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps planned."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do before the planned steps are over."""
        return False

    def cost(self, step: int) -> int:
        """Evaluations that a step takes, where that is known; a step that is not affordable is not begun."""
        return 1

    @abstractmethod
    def advance(self, step: int) -> float:
        """Take one step, counted from 0, and return the loss that describes it."""

    @abstractmethod
    def propose(self, candidates: Candidates) -> None:
        """Hand over what was found, the method's own answer first; the search can go on afterwards."""

    def incumbent(self) -> np.ndarray | None:
        """The method's own answer if it ended now; None while it has none."""
        candidates = Candidates(self.problem, self.evaluator)
        self.propose(candidates)
        return next(iter(candidates.choices.values()), None)

    def describe(self) -> dict[str, Any]:
        """What a step's record says beside its loss and its counts."""
        return {}

    def polish(
        self, choices: np.ndarray, losses: np.ndarray, on_step: Callable[[StepRecord], None] | None
    ) -> tuple[np.ndarray, float]:
        """Improve the chosen candidate with what is left of the allowance; most methods leave it as it is.

        ``losses`` are the candidate's, one per selection batch; the loss that is returned is a mean over them.
        """
        return choices, float(losses.mean())

    def state(self) -> dict[str, Any]:
        """Plain tensors, numbers and lists."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most one-step methods hold no state
        """The inverse of :meth:`state`."""

    # What the methods have in common.

    def losses(self, choices: np.ndarray, batches: Sequence[int]) -> np.ndarray:
        """Losses of an allocation on some batches."""
        return self.evaluator.losses(choices, self.problem.num_options, batches)

    def planned(self, steps: int | None, cost: int) -> int:
        """The steps asked for; for None as many as the allowance holds, which is open where only time limits it."""
        if steps is not None:
            return steps
        allowance = self.evaluator.most - self.evaluator.reserve
        return _OPEN_END if math.isinf(allowance) else int(allowance // cost) + 1

    def scores(self) -> Tensor:
        """The prior, or zeros."""
        if self.prior is not None:
            return self.prior
        return torch.zeros(self.problem.num_groups, self.problem.num_options, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class BudgetedSearch(ABC):
    """A method: one allocation within the exact budget and the allowance.

    Args:
        seed: Of all that is drawn.
        max_evaluations: Most batches of the objective to forward, a backward counting as two more, the final
            choice and all that follows it included; None: as many as the method's settings ask for.
        max_seconds: Seconds after which no new evaluation begins, except for the final choice.
    """

    name: ClassVar[str]
    # Whether unspent budget of the uniform starting point is spent, and whether the prior's knapsack is a
    # starting point at all: not for fixed rules, which would then not be measured as what they are.
    spends_uniform: ClassVar[bool] = True
    starts_from_prior: ClassVar[bool] = True

    seed: int = 0
    max_evaluations: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}.")
        for name in _ALLOWANCE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, or None for no limit, got {value}.")

    @property
    def compares_starts(self) -> bool:
        """Whether the uniform assignment and the prior's knapsack are compared with what was found."""
        return True

    def require(self, **least: float) -> None:
        """An error for a setting below its least value."""
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ValueError(f"{name} must be at least {low}, got {value}.")

    def require_end(self, name: str) -> None:
        """An error if a number of steps is open and no allowance ends the search."""
        if getattr(self, name) is None and self.max_evaluations is None and self.max_seconds is None:
            raise ValueError(
                f"{name}=None goes on until an allowance ends; give max_evaluations or max_seconds."
            )

    @abstractmethod
    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """The method's process at its first step; bad input fails here."""

    def search(
        self,
        problem: AllocationProblem,
        objective: Objective,
        *,
        prior: Tensor | None = None,
        proxy: Tensor | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        on_checkpoint: Callable[[dict[str, Any]], None] | None = None,
        on_incumbent: OnIncumbent | None = None,
        resume: Mapping[str, Any] | None = None,
    ) -> SearchResult:
        """Find an allocation of low loss that is never over budget and never worse than its starting points.

        Args:
            problem: Costs and budget.
            objective: The loss; see :class:`rco.core.protocols.Objective`.
            prior: (N, K) scores, higher is better.
            proxy: (N, K) losses of the options, taken to add up; their exact knapsack is among the candidates.
            on_step: Called with a record after every step.
            on_checkpoint: Called after every step with a state that ``resume`` accepts.
            on_incumbent: Called after every step with its record and a function that says what the method would
                propose if it ended there, or None if it has nothing yet.
            resume: A state from ``on_checkpoint``; the search goes on to the result it would have reached. The
                allowance may differ, nothing else.
        """
        run = _Run(self, problem, objective, prior, proxy)
        if resume is not None:
            run.load(resume)
        while (record := run.advance()) is not None:
            if on_checkpoint is not None:
                on_checkpoint(run.state())
            if on_step is not None:
                on_step(record)
            if on_incumbent is not None:
                on_incumbent(record, run.process.incumbent)
        return run.conclude(on_step)


class _Run:
    """A process, its evaluator and its history."""

    def __init__(
        self,
        settings: BudgetedSearch,
        problem: AllocationProblem,
        objective: Objective,
        prior: Tensor | None,
        proxy: Tensor | None,
    ) -> None:
        self.settings, self.problem = settings, problem
        self.prior = None if prior is None else torch.from_numpy(checked_table(prior, problem, "prior"))
        self.proxy = None if proxy is None else torch.from_numpy(checked_table(proxy, problem, "proxy"))
        self.uniform = uniform_allocation(problem)
        self.evaluator = Evaluator(objective)
        self.evaluator.limit(settings.max_evaluations, settings.max_seconds)
        self.evaluator.starts = self._most_starts()
        self.process = settings.begin(problem, self.evaluator, self.prior)
        self._keep_back()
        self._check_allowance()
        self.step = 0
        self.best = math.inf
        self.history: list[StepRecord] = []

    def _most_starts(self) -> int:
        """Starting points that the final choice compares, at most."""
        if not self.settings.compares_starts:
            return 0
        spent = 2 if self.problem.monotone else 1
        known = self.settings.starts_from_prior
        return 1 + int(known and self.prior is not None) + spent * int(known and self.proxy is not None)

    def _keep_back(self) -> None:
        """Set evaluations aside for the final choice and what follows it."""
        compared = self.process.own_candidates + self.evaluator.starts
        self.evaluator.reserve = compared * len(self.evaluator.selection_batches) + self.process.kept_back

    def _check_allowance(self) -> None:
        first = self.process.cost(0) if self.process.steps and not self.process.done else 0
        reserve = self.evaluator.reserve
        if self.evaluator.left < first:
            raise ValueError(
                f"max_evaluations={self.settings.max_evaluations} is too little for {self.settings.name}: its "
                f"first step takes {first} evaluations and the final choice {reserve}; raise it to at least "
                f"{first + reserve}, or give the method smaller settings."
            )

    def advance(self) -> StepRecord | None:
        """One step, or None if the search is over."""
        process, evaluator = self.process, self.evaluator
        if self.step >= process.steps or process.done:
            return None
        if process.cost(self.step) > evaluator.left or not evaluator.in_time:
            return None
        try:
            loss = process.advance(self.step)
        except OutOfAllowance:
            return None
        self.step += 1
        self.best = min(self.best, loss)
        described: dict[str, Any] = {
            "step": self.step,
            "steps": process.steps,
            "loss": loss,
            "best_loss": self.best,
            "forwards": evaluator.forwards,
            "backwards": evaluator.backwards,
            "seconds": evaluator.seconds,
            **process.describe(),
        }
        record = StepRecord(**described)
        self.history.append(record)
        return record

    def conclude(self, on_step: Callable[[StepRecord], None] | None) -> SearchResult:
        """Compare what was found with the starting points on the selection split, and polish the winner."""
        candidates = Candidates(self.process.problem, self.evaluator)
        self.process.propose(candidates)
        # Joint knapsacks can run out of time, so that a method has nothing to propose.
        if self.settings.compares_starts or not candidates.choices:
            self._add_starts(candidates)
        for name, choices in candidates.choices.items():
            assert self.problem.is_feasible(choices), f"{self.settings.name} proposed {name} over budget"
        name, choices, losses = candidates.best()
        loss = float(losses.mean())
        self.evaluator.reserve = 0
        polished, better = self.process.polish(choices, losses, on_step)
        if better < loss:
            name, choices, loss = "refined", polished, better
            candidates.losses[name] = loss
        settings = asdict(self.settings)
        return SearchResult(
            allocation=self.problem.allocation(choices),
            loss=loss,
            cost=self.problem.cost(choices),
            history=self.history,
            method=self.settings.name,
            seed=self.settings.seed,
            chosen_from=name,
            candidates=candidates.losses,
            forwards=self.evaluator.forwards,
            backwards=self.evaluator.backwards,
            seconds=self.evaluator.seconds,
            settings={**settings, **self.process.notes, "steps_taken": self.step},
        )

    def _add_starts(self, candidates: Candidates) -> None:
        if self.settings.starts_from_prior and self.proxy is not None:
            candidates.add_exactly("proxy", -self.proxy)
        if self.settings.starts_from_prior and self.prior is not None:
            candidates.add_values("prior", self.prior)
        if self.settings.spends_uniform:
            candidates.add("uniform", self.uniform, torch.from_numpy(layer_order(self.problem)))
        else:
            candidates.choices["uniform"] = self.uniform

    # -------------------------------------------------------- checkpoints

    def _plain_settings(self) -> dict[str, Any]:
        plain = asdict(self.settings).items()
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain if k not in _ALLOWANCE}

    def state(self) -> dict[str, Any]:
        """Everything a later process needs, as plain tensors, numbers and lists."""
        return {
            "version": _STATE_VERSION,
            "method": self.settings.name,
            "settings": self._plain_settings(),
            "problem": self.problem.fingerprint,
            "prior": None if self.prior is None else self.prior.clone(),
            "proxy": None if self.proxy is None else self.proxy.clone(),
            "step": self.step,
            "best": self.best,
            "counter": [self.evaluator.forwards, self.evaluator.backwards],
            "seconds": self.evaluator.seconds,
            "history": [asdict(record) for record in self.history],
            "process": self.process.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; another method, problem, prior or setting is an error."""
        if state.get("version") != _STATE_VERSION or state.get("method") != self.settings.name:
            raise ValueError(
                f"The checkpoint is one of {state.get('method')}, version {state.get('version')}; this search is "
                f"{self.settings.name} and reads version {_STATE_VERSION}."
            )
        if state["problem"] != self.problem.fingerprint:
            raise ValueError("The checkpoint belongs to another problem (costs, budget or locks differ).")
        for name, mine in self._plain_settings().items():
            if state["settings"].get(name) != mine:
                raise ValueError(
                    f"The checkpoint was made with {name}={state['settings'].get(name)}, this search has "
                    f"{name}={mine}; resume with the same settings or start anew."
                )
        for name, mine in (("prior", self.prior), ("proxy", self.proxy)):
            theirs = state[name]
            same = theirs is mine if theirs is None or mine is None else torch.equal(theirs, mine)
            if not same:
                raise ValueError(f"The checkpoint was started from another {name}.")
        self.step, self.best = state["step"], state["best"]
        self.evaluator.forwards, self.evaluator.backwards = state["counter"]
        self.evaluator.seconds_before = state["seconds"]
        self.history = [_step_record(record) for record in state["history"]]
        self.process.load(state["process"])
        self._keep_back()


def _step_record(record: Mapping[str, Any]) -> StepRecord:
    cost = record["expected_cost"]
    return StepRecord(**{**record, "expected_cost": tuple(cost) if cost is not None else None})
