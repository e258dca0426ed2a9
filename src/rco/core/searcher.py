"""The searcher interface, and the harness that every searcher runs in.

A method is a subclass of :class:`BudgetedSearch` with one method, ``loop``, which reads like this::

    state = run.resume(MyState(run))
    with run.allowance():
        for step in run.steps(self.steps, cost=...):
            ...
            run.record(loss)
    return run.choose()

:class:`SearchRun` provides the allowance, the history, checkpoints, resuming, intermediate allocations, and
the choice among the candidates and the starting points at the end. :class:`SearchState` holds the state of the
method between steps.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rco.core.choice import Candidates, start_first
from rco.core.evaluator import Evaluator, OutOfAllowance, SearchStopped
from rco.core.moves import layer_order, repaired, uniform_allocation
from rco.core.objective import Loss, one_hot
from rco.core.problem import AllocationProblem, InfeasibleBudgetError
from rco.core.result import SearchResult, StepRecord
from rco.core.sampling import batch_order

__all__ = [
    "OPEN_END",
    "BudgetedSearch",
    "FixedAnswer",
    "OnIncumbent",
    "SearchRun",
    "SearchState",
    "Searcher",
    "checked_start",
    "checked_table",
]

OPEN_END = 10**9  # steps of a search that only its allowance ends
_STATE_VERSION = 8
_START_PREFERENCE = 2.0  # logits of a starting allocation, where there is no prior
_POSITIVE = ("max_evaluations", "max_seconds", "patience")
_ALLOWANCE = (*_POSITIVE, "target")  # may change when a search is resumed

# The allocation is computed on demand, which may take a knapsack or more.
OnIncumbent = Callable[[StepRecord, Callable[[], np.ndarray | None]], None]
OnStep = Callable[[StepRecord], Any]  # True ends the search
S = TypeVar("S", bound="SearchState")


class Searcher(Protocol):
    """Picks one option per group within the budget. RCO and every baseline."""

    name: ClassVar[str]

    def search(
        self,
        problem: AllocationProblem,
        objective: Loss,
        *,
        prior: Tensor | None = None,
        proxy: Tensor | None = None,
        on_step: OnStep | None = None,
    ) -> SearchResult:
        """Find an allocation of low loss; never one over budget."""
        ...


@dataclass(frozen=True, kw_only=True)
class BudgetedSearch(ABC):
    """A method: one allocation within the exact budget and the allowance.

    Args:
        seed: Seed of all random draws.
        max_evaluations: Most batches of the objective to forward, a backward counting as two more, with the final
            choice and everything after it; None: as many as the method's settings require.
        max_seconds: Seconds after which no new evaluation begins, except for the final choice.
        patience: Steps in a row without a lower loss after which the search ends; None: it goes on.
        target: A loss at or below which the search ends at once; None: it goes on.
    """

    name: ClassVar[str]
    # Whether unspent budget of the uniform starting point is spent, and whether the prior's knapsack is a
    # starting point at all: not for fixed rules, which are to be measured unchanged.
    spends_uniform: ClassVar[bool] = True
    starts_from_prior: ClassVar[bool] = True
    # Whether the method itself keeps to budgets that must be met exactly. The others work with budgets that may be
    # left unspent, and the nearest allocation that meets them is their proposal.
    meets_exactly: ClassVar[bool] = False

    seed: int = 0
    max_evaluations: int | None = None
    max_seconds: float | None = None
    patience: int | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}.")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, or None for no limit, got {value}.")

    @property
    def limited(self) -> bool:
        """Whether an allowance ends the search."""
        return self.max_evaluations is not None or self.max_seconds is not None

    @property
    def compares_starts(self) -> bool:
        """Whether the uniform assignment and the prior's knapsack are compared with the method's candidates."""
        return True

    @property
    def margin_over_starts(self) -> float:
        """Standard errors over the selection batches by which a candidate must beat the best starting point."""
        return 0.0

    def require(self, **least: float) -> None:
        """Raise an error for a setting below its least value."""
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ValueError(f"{name} must be at least {low}, got {value}.")

    def require_end(self, name: str) -> None:
        """Raise an error if a number of steps is open and no allowance ends the search."""
        if getattr(self, name) is None and not self.limited:
            raise ValueError(
                f"{name}=None goes on until an allowance ends; give max_evaluations or max_seconds."
            )

    @abstractmethod
    def loop(self, run: SearchRun) -> SearchResult:
        """The method itself; bad input fails before its first step."""

    def search(
        self,
        problem: AllocationProblem,
        objective: Loss | Callable[[Tensor], Any],
        *,
        prior: Tensor | None = None,
        proxy: Tensor | None = None,
        start: Any = None,
        on_step: OnStep | None = None,
        on_checkpoint: Callable[[dict[str, Any]], None] | None = None,
        on_incumbent: OnIncumbent | None = None,
        resume: Mapping[str, Any] | None = None,
        best_on_failure: bool = False,
    ) -> SearchResult:
        """Find an allocation of low loss that meets the budget and is never worse than its starting points.

        Args:
            problem: Costs and budget.
            objective: The loss: an :class:`rco.core.objective.Objective`, any object with ``num_batches`` and
                ``loss(gates, batch)``, or a function of the gates.
            prior: (N, K) scores, higher is better.
            proxy: (N, K) losses of the options, taken to add up; their exact knapsack is among the candidates.
                Several estimates of them, (P, N, K), have one each.
            start: An allocation that is among the starting points; without a prior the search starts near it.
            on_step: Called with a record after every step and every exchange that pays; returning True,
                or raising StopIteration, ends the search with the best candidate so far.
            on_checkpoint: Called after every step with a state that ``resume`` accepts.
            on_incumbent: Called after every step with its record and a function that returns the allocation the
                method would propose if it ended there, or None if it has none yet.
            resume: A state from ``on_checkpoint``; the search goes on to the result it would have reached. The
                allowance may differ, nothing else.
            best_on_failure: Whether KeyboardInterrupt and losses that are not finite end the search with the best
                allocation known, and a status that tells; otherwise, or if none is known, they are raised.
        """
        callbacks = Callbacks(on_step, on_checkpoint, on_incumbent)
        run = SearchRun(self, problem, objective, StartingPoints(prior, proxy, start), callbacks, resume)
        if not best_on_failure:
            return self.loop(run)
        try:
            return self.loop(run)
        except KeyboardInterrupt:
            return run.best_known("interrupted")
        except FloatingPointError:
            return run.best_known("not finite")


class SearchState(ABC):
    """State of a method between steps, and its candidates.

    A step that raises :class:`OutOfAllowance` must leave the attributes as they were, except for measurements that
    stay valid.

    Attributes:
        saved: Names of the attributes that a checkpoint keeps: tensors, arrays, numbers, lists of them, or objects
            with ``state()`` and ``load(state)``.
        candidates: Most candidates that :meth:`propose` adds.
        kept_back: Evaluations reserved for :meth:`polish`.
    """

    saved: ClassVar[tuple[str, ...]] = ()
    candidates: int = 1
    kept_back: int = 0

    def __init__(self, run: SearchRun, problem: AllocationProblem | None = None) -> None:
        self.run, self.evaluator = run, run.evaluator
        self.problem = run.problem if problem is None else problem

    @abstractmethod
    def propose(self, candidates: Candidates) -> None:
        """Add the candidates found so far, the method's own first; the search can go on afterwards."""

    def current_logits(self) -> Tensor | None:
        """(N, K) logits of a gradient search; None for other methods."""
        return None

    def polish(self, ranked: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, float]:
        """Improve on the candidates with the rest of the allowance; most methods return the first, the best.

        Each candidate comes with its losses, one per selection batch; the returned loss is a mean over them.
        """
        choices, losses = ranked[0]
        return choices, float(losses.mean())

    def incumbent(self) -> np.ndarray | None:
        """The method's own allocation if it ended now; None while it has none."""
        candidates = Candidates(self.problem, self.evaluator)
        self.propose(candidates)
        return next(iter(candidates.choices.values()), None)

    def state(self) -> dict[str, Any]:
        """The saved attributes as plain tensors, numbers and lists."""
        return {name: _plain(getattr(self, name)) for name in self.saved}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for name in self.saved:
            current = getattr(self, name)
            if hasattr(current, "load"):
                current.load(state[name])
            else:
                setattr(self, name, _restored(state[name]))


class FixedAnswer(SearchState):
    """The state of a rule that needs no steps: named allocations that are ready at once."""

    def __init__(self, run: SearchRun, **answers: np.ndarray) -> None:
        super().__init__(run)
        self.answers = answers
        self.candidates = len(answers)

    def propose(self, candidates: Candidates) -> None:
        """Add the allocations unchanged."""
        candidates.choices.update(self.answers)


class StartingPoints(NamedTuple):
    """What is known before a search, as for :meth:`BudgetedSearch.search`."""

    prior: Tensor | None = None
    proxy: Tensor | None = None
    start: Any = None


class Callbacks(NamedTuple):
    """Functions that a search calls, as for :meth:`BudgetedSearch.search`."""

    on_step: OnStep | None = None
    on_checkpoint: Callable[[dict[str, Any]], None] | None = None
    on_incumbent: OnIncumbent | None = None


class SearchRun:
    """One search by one method: its allowance, its history and its result.

    Args:
        settings: The method.
        problem: Costs and budget.
        objective: The loss.
        starting: Prior, proxy and starting allocation.
        callbacks: Functions to call.
        resume: A checkpoint to continue from.

    Attributes:
        target: The problem as given.
        problem: The problem that the method works on: the same, or with budgets that may be left unspent.
        prior: (N, K) float64 scores, or None.
        start: Starting allocation, or None.
        evaluator: The objective, counted.
        most_starts: Most starting points that the final choice compares.
        step: Steps taken so far.
        notes: Further entries of the result's settings.
    """

    def __init__(
        self,
        settings: BudgetedSearch,
        problem: AllocationProblem,
        objective: Loss | Callable[[Tensor], Any],
        starting: StartingPoints = StartingPoints(),  # noqa: B008 - a tuple
        callbacks: Callbacks = Callbacks(),  # noqa: B008 - a tuple
        resume: Mapping[str, Any] | None = None,
    ) -> None:
        problem.require_reachable()
        prior, proxy, start = starting
        self.settings, self.target = settings, problem
        self.problem = problem if settings.meets_exactly else problem.relaxed
        self.prior = None if prior is None else torch.from_numpy(checked_table(prior, problem, "prior"))
        self._proxy = None if proxy is None else _checked_proxies(proxy, problem)
        self._callbacks = callbacks
        self._uniform = uniform_allocation(problem)
        self.start = None if start is None else checked_start(start, problem)
        self.status = "finished"
        self._since_best = 0
        self.evaluator = Evaluator(
            objective, problem, evaluations=settings.max_evaluations, seconds=settings.max_seconds
        )
        self.most_starts = self._most_starts()
        self.notes: dict[str, Any] = {}
        self.step = 0
        self._planned = 0
        self._best = self._shown = math.inf
        self._history: list[StepRecord] = []
        self._state: SearchState | None = None
        self._resumed = resume
        if resume is not None:
            self._load(resume)

    def _most_starts(self) -> int:
        """Most starting points that the final choice compares."""
        if not self.settings.compares_starts:
            return 0
        spent = 2 if self.problem.monotone else 1
        known = self.settings.starts_from_prior
        proxies = 0 if self._proxy is None else len(self._proxy)
        priors = int(known and self.prior is not None) + spent * int(known) * proxies
        return 1 + priors + int(self.start is not None)

    # ------------------------------------------------------------ interface of loops

    def scores(self) -> Tensor:
        """The prior; without one a preference for the starting allocation, or zeros."""
        if self.prior is not None:
            return self.prior
        if self.start is not None:
            return _START_PREFERENCE * one_hot(self.start, self.problem.num_options)
        return torch.zeros(self.problem.num_groups, self.problem.num_options, dtype=torch.float64)

    def losses(self, choices: np.ndarray, batches: Sequence[int]) -> np.ndarray:
        """Losses of an allocation on some batches."""
        return self.evaluator.losses(choices, self.problem.num_options, batches)

    def some_batches(self, count: int | None, first: int = 0) -> list[int]:
        """That many different batches in an order set by the seed; all of them for None."""
        available = self.evaluator.objective.num_batches
        wanted = available if count is None else min(count, available)
        return batch_order(available, seed=self.settings.seed, first=first * available, count=wanted)

    def resume(self, state: S) -> S:
        """Take a method's state into the run; it is loaded from the checkpoint if the search is resumed."""
        self._state = state
        if self._resumed is not None:
            state.load(self._resumed["process"])
        compared = state.candidates + self.most_starts
        self.evaluator.keep_back(compared * len(self.evaluator.selection_batches) + state.kept_back)
        return state

    def planned(self, steps: int | None, cost: int) -> int:
        """The requested steps; for None as many as the allowance holds, unbounded if only time limits it."""
        if steps is not None:
            return steps
        allowance = self.evaluator.most - self.evaluator.reserve
        return OPEN_END if math.isinf(allowance) else int(allowance // cost) + 1

    @contextlib.contextmanager
    def allowance(self) -> Iterator[None]:
        """Context that ends the loop inside it when the allowance runs out or a callback ends the search.

        An unfinished step is dropped.
        """
        try:
            with contextlib.suppress(OutOfAllowance):
                yield
        except SearchStopped as stop:
            self.status = str(stop)

    def steps(self, planned: int, cost: Callable[[int], int] | int = 1) -> Iterator[int]:
        """Step numbers from 0, or from the step of a resumed search, while the allowance covers the next one.

        Args:
            planned: Steps planned.
            cost: Evaluations that a step takes, as far as that is known.
        """
        price = cost if callable(cost) else lambda step: cost
        self._planned = planned
        self._check_allowance(price(0) if planned else 0)
        while self.step < planned and price(self.step) <= self.evaluator.left and self.evaluator.in_time:
            before = self.step
            yield before
            if self.step == before:
                raise RuntimeError(f"The loop of {self.settings.name} did not record its step {before}.")

    def record(self, loss: float, **described: Any) -> None:
        """End a step: keep its record and its checkpoint, and call back.

        Args:
            loss: The loss that describes the step.
            described: Further fields of :class:`StepRecord`.
        """
        assert self._state is not None, "a loop resumes a state before its first step"
        self.step += 1
        lowest = min(self._best, loss, described.get("best_loss", loss))
        self._since_best = 0 if lowest < self._best else self._since_best + 1
        self._best = lowest
        fields: dict[str, Any] = {
            "step": self.step,
            "steps": self._planned,
            "loss": loss,
            "best_loss": self._best,
            "forwards": self.evaluator.forwards,
            "backwards": self.evaluator.backwards,
            "seconds": self.evaluator.seconds,
            **described,
        }
        record = self._with_allocation(StepRecord(**fields))
        self._history.append(record)
        if self._callbacks.on_checkpoint is not None:
            self._callbacks.on_checkpoint(self._checkpoint())
        stop = self._calls_for_a_stop(record)
        if self._callbacks.on_incumbent is not None:
            self._callbacks.on_incumbent(record, self._state.incumbent)
        if stop is not None:
            raise SearchStopped(stop)
        if self.settings.patience is not None and self._since_best >= self.settings.patience:
            raise SearchStopped("patience")

    def refined(self, record: StepRecord) -> None:
        """Keep the record of an exchange that paid, and call back."""
        record = self._with_allocation(record)
        self._history.append(record)
        stop = self._calls_for_a_stop(record)
        if stop is not None:
            raise SearchStopped(stop)

    def _with_allocation(self, record: StepRecord) -> StepRecord:
        """The record with the best allocation, if it is new since the last record."""
        if self.evaluator.best_choices is None or self.evaluator.best_loss >= self._shown:
            return record
        self._shown = self.evaluator.best_loss
        return replace(record, allocation=tuple(self.evaluator.best_choices.tolist()))

    def _calls_for_a_stop(self, record: StepRecord) -> str | None:
        """Call back; the status if that or the target ends the search."""
        if self._callbacks.on_step is not None:
            try:
                answer = self._callbacks.on_step(record)
                if answer in (True,):  # not just any value: progress bars return some
                    return "stopped"
            except StopIteration:
                return "stopped"
        target = self.settings.target
        return "target" if target is not None and record.best_loss <= target else None

    def choose(self) -> SearchResult:
        """Compare the candidates with the starting points on the selection split, and polish the winner."""
        state = self._state
        assert state is not None, "a loop resumes a state before it ends"
        if not self._planned:
            self._check_allowance(0)
        candidates = Candidates(state.problem, self.evaluator)
        state.propose(candidates)
        proposed = list(candidates.choices)
        # Joint knapsacks can run out of time, so that a method has nothing to propose.
        if self.settings.compares_starts or not candidates.choices:
            self._add_starts(candidates)
        if self.target.exact:
            for name, choices in candidates.choices.items():
                candidates.choices[name] = repaired(self.target, choices)
        for name, choices in candidates.choices.items():
            assert self.target.is_feasible(choices), (
                f"{self.settings.name} proposed {name}, which is infeasible"
            )
        starts = [each for name, each in candidates.choices.items() if name not in proposed]
        ranked = start_first(candidates.ranked(), starts, self.settings.margin_over_starts)
        name, choices, losses = ranked[0]
        loss = float(losses.mean())
        self.evaluator.keep_back(0)
        if self.status == "finished":
            polished, better = state.polish([each[1:] for each in ranked])
            if better < loss:
                name, choices, loss = "refined", polished, better
                candidates.losses[name] = loss
        seen = self.evaluator.best_choices  # a sample, or an exchange
        if self.settings.compares_starts and seen is not None and self.evaluator.best_loss < loss:
            name, choices, loss = "best seen", seen, self.evaluator.best_loss
            candidates.losses[name] = loss
        return self._result(choices, loss, name, candidates.losses)

    def best_known(self, status: str) -> SearchResult:
        """The result of a search that failed: the best allocation known; without one the failure is raised."""
        choices = self.evaluator.best_choices
        if choices is None:
            raise  # the failure that is being handled
        self.status = status
        return self._result(choices, self.evaluator.best_loss, "best seen", {})

    def _result(
        self, choices: np.ndarray, loss: float, name: str, candidates: dict[str, float]
    ) -> SearchResult:
        settings = {**asdict(self.settings), **self.notes, "steps_taken": self.step}
        return SearchResult(
            allocation=self.target.allocation(choices),
            loss=loss,
            cost=self.target.cost(choices),
            history=self._history,
            method=self.settings.name,
            seed=self.settings.seed,
            chosen_from=name,
            candidates=candidates,
            forwards=self.evaluator.forwards,
            backwards=self.evaluator.backwards,
            seconds=self.evaluator.seconds,
            settings={k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
            status=self.status,
            problem=self.target,
            logits=None if self._state is None else self._state.current_logits(),
        )

    def _check_allowance(self, first: int) -> None:
        reserve = self.evaluator.reserve
        if self._resumed is None and self.evaluator.left < first:
            raise ValueError(
                f"max_evaluations={self.settings.max_evaluations} is too little for {self.settings.name}: its "
                f"first step takes {first} evaluations and the final choice {reserve}; raise it to at least "
                f"{first + reserve}, or give the method smaller settings."
            )

    def starts(self) -> Candidates:
        """The starting points, ready to be compared."""
        candidates = Candidates(self.problem, self.evaluator)
        self._add_starts(candidates)
        return candidates

    def _add_starts(self, candidates: Candidates) -> None:
        if self.start is not None:
            candidates.add("start", self.start, self.scores())
        if self.settings.starts_from_prior and self._proxy is not None:
            for number, table in enumerate(self._proxy, start=1):
                candidates.add_exactly("proxy" if number == 1 else f"proxy {number}", -table)
        if self.settings.starts_from_prior and self.prior is not None:
            candidates.add_values("prior", self.prior)
        if self.settings.spends_uniform:
            candidates.add("uniform", self._uniform, torch.from_numpy(layer_order(self.problem)))
        else:
            candidates.choices["uniform"] = self._uniform

    # -------------------------------------------------------- checkpoints

    def _plain_settings(self) -> dict[str, Any]:
        plain = asdict(self.settings).items()
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain if k not in _ALLOWANCE}

    def _checkpoint(self) -> dict[str, Any]:
        """Everything a later process needs, as plain tensors, numbers and lists."""
        assert self._state is not None
        return {
            "version": _STATE_VERSION,
            "method": self.settings.name,
            "settings": self._plain_settings(),
            "problem": self.target.fingerprint,
            "prior": _plain(self.prior),
            "proxy": _plain(self._proxy),
            "start": None if self.start is None else torch.from_numpy(self.start.copy()),
            "step": self.step,
            "best": self._best,
            "since_best": self._since_best,
            "shown": self._shown,
            "evaluator": self.evaluator.state(),
            "history": [asdict(record) for record in self._history],
            "process": self._state.state(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; another method, problem, prior or setting is an error."""
        if state.get("version") != _STATE_VERSION or state.get("method") != self.settings.name:
            raise ValueError(
                f"The checkpoint is from {state.get('method')}, version {state.get('version')}; this search is "
                f"{self.settings.name} and reads version {_STATE_VERSION}."
            )
        if state["problem"] != self.target.fingerprint:
            raise ValueError(
                "The checkpoint belongs to another problem (costs, budget or locks differ); resume with the same "
                "problem or start anew."
            )
        for name, mine in self._plain_settings().items():
            if state["settings"].get(name) != mine:
                raise ValueError(
                    f"The checkpoint was made with {name}={state['settings'].get(name)}, this search has "
                    f"{name}={mine}; resume with the same settings or start anew."
                )
        start = None if self.start is None else torch.from_numpy(self.start)
        for name, table in (("prior", self.prior), ("proxy", self._proxy), ("start", start)):
            theirs = state[name]
            same = theirs is table if theirs is None or table is None else torch.equal(theirs, table)
            if not same:
                raise ValueError(
                    f"The checkpoint was started from another {name}; resume with the same one or start anew."
                )
        self.step, self._best = state["step"], state["best"]
        self._since_best, self._shown = state["since_best"], state["shown"]
        self.evaluator.load(state["evaluator"])
        self._history = [StepRecord.from_dict(record) for record in state["history"]]


def checked_start(start: Any, problem: AllocationProblem) -> np.ndarray:
    """A starting allocation as an array; it must be feasible."""
    choices = np.asarray(problem.allocation(start))
    if not problem.is_feasible(choices):
        raise InfeasibleBudgetError(
            f"The starting allocation is not feasible: it costs {problem.cost(choices)}, the budget is "
            f"{problem.budget}, and it must use allowed options and keep the minimum counts."
        )
    return choices


def _checked_proxies(proxy: Any, problem: AllocationProblem) -> Tensor:
    """(P, N, K) tables of one table or several."""
    tables = torch.as_tensor(proxy)
    listed = tables if tables.ndim == 3 and len(tables) else [tables]
    return torch.stack([torch.from_numpy(checked_table(table, problem, "proxy")) for table in listed])


def checked_table(table: Any, problem: AllocationProblem, name: str) -> np.ndarray:
    """An (N, K) table of numbers, finite where an option is allowed; zero elsewhere."""
    array = np.asarray(torch.as_tensor(table).detach().to("cpu", torch.float64))
    shape = (problem.num_groups, problem.num_options)
    if array.shape != shape:
        hint = " For an allocation give start= instead." if array.shape == shape[:1] else ""
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}.{hint}")
    if not np.isfinite(array[problem.allowed]).all():
        group, option = np.argwhere(~np.isfinite(array) & problem.allowed)[0]
        raise ValueError(
            f"{name} must be finite for every allowed option, got {array[group, option]} for option {option} of "
            f"group {group}."
        )
    return np.where(problem.allowed, array, 0.0)


def _plain(value: Any) -> Any:
    """A copy of a value for a checkpoint; arrays are marked, so that they come back as arrays."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value.copy())}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.state() if hasattr(value, "state") else value


def _restored(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return value["array"].numpy().copy()
    return [_restored(entry) for entry in value] if isinstance(value, list) else value
