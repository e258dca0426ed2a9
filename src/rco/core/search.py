"""Riemannian Constrained Optimization: Algorithm 1 of the paper, then the choice among what it found.

Each step draws Gumbel samples, makes every sample feasible with the exact knapsack, takes the straight-through
gradient of the loss, and lets Adam walk on the budget manifold. After the last step the candidates (the final
and the averaged logits, the options' average predicted cost, the best sample, the prior, the uniform assignment)
are compared on batches that no gradient has used, and the winner is refined; see :mod:`rco.core.refine`.

:class:`GumbelSearch` is that loop with one part left open, the walker, which moves the logits given a gradient.
RCO walks on the manifold; the Lagrangian baselines walk freely and are pushed, and differ in nothing else.
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from rco.core import refine as refinement
from rco.core.knapsack import solve_choices
from rco.core.manifold import BudgetManifold
from rco.core.optimizer import RiemannianAdam
from rco.core.problem import AllocationProblem
from rco.core.protocols import Objective
from rco.core.refine import Candidates, Counter, SampleTracker
from rco.core.relaxation import batch_order, expected_cost, gumbel_noise, straight_through, temperature
from rco.core.result import SearchResult, StepRecord

__all__ = ["RCO", "CallableObjective", "GumbelSearch", "ManifoldWalker", "Walker", "minimize"]

_STATE_VERSION = 1


class Walker(Protocol):
    """Moves the logits; how it keeps them near the budget is what tells the methods apart."""

    logits: Tensor  # (N, K) float64, requires grad

    def step(self, gradient: Tensor, loss: float) -> None:
        """Move the logits given the estimated gradient of the loss."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything but the logits, as plain tensors and numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        ...


class ManifoldWalker:
    """Lines 9 to 14 of Algorithm 1: project, Adam, retract, transport."""

    def __init__(self, problem: AllocationProblem, prior: Tensor, lr: float) -> None:
        manifold = BudgetManifold(_with_interior(problem))
        self.logits = manifold.retract(prior.clone()).requires_grad_()
        self._optimizer = RiemannianAdam([self.logits], manifold, lr=lr)

    def step(self, gradient: Tensor, loss: float) -> None:
        """One step of Riemannian Adam."""
        self.logits.grad = gradient
        self._optimizer.step()
        self.logits.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return copy.deepcopy(dict(self._optimizer.state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._optimizer.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class GumbelSearch(ABC):
    """Gradient search over whole assignments under an exact budget.

    Args:
        steps: Optimizer steps T.
        samples: Gumbel samples g per step, whose gradients are averaged.
        lr: Learning rate of Adam on the logits.
        tau: First and last temperature of the exponential schedule.
        seed: Of the noise and of the order of batches.
        batches_per_sample: Batches of the objective that each sample is evaluated on.
        antithetic: Draw samples in pairs u and 1 - u.
        average_last: Fraction of the steps, counted from the end, whose logits are averaged into a candidate.
        refine: Most evaluations (passes over the selection batches) that exchange moves may spend; 0: none.
        curvature: Correct the gradient of options that were not sampled by the objective's curvature, if known.
        monotone: Whether costlier options are never worse, so that unspent budget is spent; None: as the
            problem declares.
    """

    name: ClassVar[str]

    steps: int = 200
    samples: int = 16
    lr: float = 0.1
    tau: tuple[float, float] = (1.0, 0.01)
    seed: int = 0
    batches_per_sample: int = 1
    antithetic: bool = False
    average_last: float = 0.25
    refine: int = 64
    curvature: bool = True
    monotone: bool | None = None

    def __post_init__(self) -> None:
        for name, low in (
            ("steps", 0),
            ("samples", 1),
            ("batches_per_sample", 1),
            ("refine", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}.")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}.")
        if len(self.tau) != 2 or not 0 < self.tau[1] <= self.tau[0]:
            raise ValueError(f"tau must be (first, last) with first >= last > 0, got {self.tau}.")
        if not 0 < self.average_last <= 1:
            raise ValueError(f"average_last must lie in (0, 1], got {self.average_last}.")
        if self.antithetic and self.samples % 2:
            raise ValueError(f"antithetic sampling needs an even number of samples, got {self.samples}.")

    @abstractmethod
    def make_walker(self, problem: AllocationProblem, prior: Tensor) -> Walker:
        """What moves the logits of this method."""

    def search(
        self,
        problem: AllocationProblem,
        objective: Objective,
        *,
        prior: Tensor | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        on_checkpoint: Callable[[dict[str, Any]], None] | None = None,
        resume: Mapping[str, Any] | None = None,
    ) -> SearchResult:
        """Find an allocation of low loss that is never over budget and never worse than its starting points.

        Args:
            problem: Costs and budget.
            objective: The loss; see :class:`rco.core.protocols.Objective`.
            prior: (N, K) initial logits, higher is better; zeros if None. One retraction puts them on budget.
            on_step: Called with a record after every step.
            on_checkpoint: Called after every step with a state that ``resume`` accepts.
            resume: A state from ``on_checkpoint``: the search goes on from there to the result it would have
                reached without interruption.
        """
        run = _Run(self, problem, objective, prior)
        if resume is not None:
            run.load(resume)
        while run.step < self.steps:
            record = run.advance()
            if on_checkpoint is not None:
                on_checkpoint(run.state())
            if on_step is not None:
                on_step(record)
        return run.conclude(on_step)


@dataclass(frozen=True, kw_only=True)
class RCO(GumbelSearch):
    """Riemannian Constrained Optimization: the iterate walks on the budget manifold (Algorithm 1).

    The settings are those of :class:`GumbelSearch`.
    """

    name: ClassVar[str] = "rco"

    def make_walker(self, problem: AllocationProblem, prior: Tensor) -> Walker:
        """Riemannian Adam on the budget manifold."""
        return ManifoldWalker(problem, prior, self.lr)


class _Run:
    """The state of one search: logits, optimizer, what has been seen."""

    def __init__(
        self, settings: GumbelSearch, problem: AllocationProblem, objective: Objective, prior: Tensor | None
    ) -> None:
        if objective.num_batches < 1:
            raise ValueError(f"The objective must have at least one batch, got {objective.num_batches}.")
        if settings.monotone is not None and settings.monotone != problem.monotone:
            problem = problem.replace(monotone=settings.monotone)
        self.settings, self.problem, self.objective = settings, problem, objective
        self.counter = Counter(objective)
        self.prior = _check_prior(prior, problem)
        self.walker = settings.make_walker(problem, self.prior)
        self.average = torch.zeros_like(self.prior)
        # What each option would cost, predicted at the samples of the last steps.
        self.prices = torch.zeros_like(self.prior)
        self.averaged = 0
        self.best = SampleTracker(objective.num_batches)
        self.history: list[StepRecord] = []
        self.step = 0
        self.seconds_before = 0.0
        self.began = time.perf_counter()

    @property
    def logits(self) -> Tensor:
        return self.walker.logits

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def advance(self) -> StepRecord:
        """Lines 3 to 14 of Algorithm 1."""
        settings = self.settings
        tau = temperature(self.step, settings.steps, settings.tau)
        noise = torch.stack(
            [
                gumbel_noise(
                    (self.problem.num_groups, self.problem.num_options),
                    seed=settings.seed,
                    step=self.step,
                    sample=j,
                    antithetic=settings.antithetic,
                )
                for j in range(settings.samples)
            ]
        )
        values = (self.logits.detach() + noise + self.problem.log_allowed).numpy()
        choices = torch.from_numpy(solve_choices(values, self.problem).choices)

        gates = [
            straight_through((self.logits + noise[j] + self.problem.log_allowed) / tau, choices[j])
            for j in range(settings.samples)
        ]
        batches = [
            batch_order(
                self.objective.num_batches,
                seed=settings.seed,
                first=(self.step * settings.samples + j) * settings.batches_per_sample,
                count=settings.batches_per_sample,
            )
            for j in range(settings.samples)
        ]
        evaluated = self.counter.losses_and_gradients(
            [(sample.detach(), walk) for sample, walk in zip(gates, batches, strict=True)]
        )

        gradient = torch.zeros_like(self.logits)
        prices = torch.zeros_like(self.logits)
        losses = []
        # The order of the sums is fixed here, whoever has evaluated the samples.
        for j, (loss, gate_gradient) in enumerate(evaluated):
            bend = self.counter.bend(choices[j]) if settings.curvature else None
            if bend is not None:
                gate_gradient = gate_gradient + bend
            # The chain rule through the straight-through softmax.
            (sample_gradient,) = torch.autograd.grad(gates[j], self.logits, gate_gradient)
            gradient += sample_gradient / settings.samples
            prices += gate_gradient / settings.samples
            losses.append(loss)
            self.best.see(choices[j].numpy(), batches[j], loss)

        self.walker.step(gradient, float(np.mean(losses)))
        self.step += 1
        if self.step > settings.steps - max(1, math.ceil(settings.average_last * settings.steps)):
            self.average += self.logits.detach()
            self.prices += prices.detach()
            self.averaged += 1
        record = self._record(float(np.mean(losses)), tau)
        self.history.append(record)
        return record

    def _record(self, loss: float, tau: float) -> StepRecord:
        with torch.no_grad():
            log_p = torch.log_softmax(self.logits + self.problem.log_allowed, dim=-1)
            p = log_p.exp()
            entropy = -torch.where(p > 0, p * log_p, 0.0).sum(dim=-1).mean() / math.log(
                max(self.problem.num_options, 2)
            )
            cost = expected_cost(self.problem, self.logits)
        return StepRecord(
            step=self.step,
            steps=self.settings.steps,
            loss=loss,
            best_loss=self.best.loss,
            temperature=tau,
            expected_cost=tuple(cost.reshape(-1).tolist()),
            entropy=float(entropy),
            decided=int((p.max(dim=-1).values > 0.9).sum()),
            forwards=self.counter.forwards,
            backwards=self.counter.backwards,
            seconds=self.seconds,
        )

    def conclude(self, on_step: Callable[[StepRecord], None] | None) -> SearchResult:
        """Line 16 of Algorithm 1, the choice among candidates on the selection split, and the exchanges."""
        candidates = Candidates(self.problem, self.counter)
        final = torch.log_softmax(self.logits.detach() + self.problem.log_allowed, dim=-1)
        candidates.add_values("final", final)
        if self.averaged:
            mean = self.average / self.averaged
            candidates.add_values("averaged", torch.log_softmax(mean + self.problem.log_allowed, dim=-1))
            candidates.add_values("prices", self.problem.log_allowed - self.prices / self.averaged)
        if self.best.choices is not None:
            candidates.add("best sample", self.best.choices, final)
        candidates.add_values("prior", torch.log_softmax(self.prior + self.problem.log_allowed, dim=-1))
        candidates.add_uniform()
        name, choices, loss = candidates.best()
        if self.settings.refine:
            refined = refinement.refine(
                self.problem, self.counter, choices, allowance=self.settings.refine, on_step=on_step
            )
            if refined.loss < loss:
                candidates.losses["refined"] = refined.loss
                name, choices, loss = "refined", refined.choices, refined.loss
        return SearchResult(
            allocation=self.problem.allocation(choices),
            loss=loss,
            cost=self.problem.cost(choices),
            history=self.history,
            method=self.settings.name,
            seed=self.settings.seed,
            chosen_from=name,
            candidates=candidates.losses,
            forwards=self.counter.forwards,
            backwards=self.counter.backwards,
            seconds=self.seconds,
            settings=asdict(self.settings),
        )

    # -------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Everything a later process needs, as plain tensors, numbers and lists."""
        return {
            "version": _STATE_VERSION,
            "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.settings).items()},
            "problem": self.problem.fingerprint,
            "prior": self.prior,
            "step": self.step,
            "logits": self.logits.detach().clone(),
            "walker": self.walker.state_dict(),
            "average": self.average.clone(),
            "prices": self.prices.clone(),
            "averaged": self.averaged,
            "best": self.best.state(),
            "counter": [self.counter.forwards, self.counter.backwards],
            "history": [asdict(record) for record in self.history],
            "seconds": self.seconds,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; another problem, prior or setting is an error, never a mixture."""
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"The checkpoint has version {state.get('version')}, this code reads {_STATE_VERSION}."
            )
        if state["problem"] != self.problem.fingerprint:
            raise ValueError("The checkpoint belongs to another problem (costs, budget or locks differ).")
        mine = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.settings).items()}
        for name in mine:
            if state["settings"][name] != mine[name]:
                raise ValueError(
                    f"The checkpoint was made with {name}={state['settings'][name]}, this search has "
                    f"{name}={mine[name]}; resume with the same settings or start anew."
                )
        if not torch.equal(state["prior"], self.prior):
            raise ValueError("The checkpoint was started from another prior.")
        with torch.no_grad():
            self.logits.copy_(state["logits"])
        self.walker.load_state_dict(state["walker"])
        self.average = state["average"].clone()
        self.prices = state["prices"].clone()
        self.averaged = state["averaged"]
        self.best.load(state["best"])
        self.counter.forwards, self.counter.backwards = state["counter"]
        self.step = state["step"]
        self.seconds_before = state["seconds"]
        self.history = [_step_record(record) for record in state["history"]]


class CallableObjective:
    """A plain function of the gates as an objective with one batch."""

    num_batches = 1

    def __init__(self, loss_of_gates: Callable[[Tensor], Tensor]) -> None:
        self._loss = loss_of_gates

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """The function's value; there is only batch 0."""
        return self._loss(gates)


def minimize(
    loss_of_gates: Callable[[Tensor], Tensor],
    problem: AllocationProblem,
    *,
    steps: int = 200,
    samples: int = 16,
    seed: int = 0,
    prior: Tensor | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    **settings: Any,
) -> SearchResult:
    """Minimise a differentiable function of one-hot gates (N, K) under the problem's budget.

    Further settings are those of :class:`RCO`.
    """
    unknown = sorted(set(settings) - {f.name for f in fields(RCO)})
    if unknown:
        raise TypeError(f"Unknown settings {unknown}; RCO takes {sorted(f.name for f in fields(RCO))}.")
    searcher = replace(RCO(), steps=steps, samples=samples, seed=seed, **settings)
    return searcher.search(problem, CallableObjective(loss_of_gates), prior=prior, on_step=on_step)


def _step_record(record: Mapping[str, Any]) -> StepRecord:
    cost = record["expected_cost"]
    return StepRecord(**{**record, "expected_cost": tuple(cost) if cost is not None else None})


def _check_prior(prior: Tensor | None, problem: AllocationProblem) -> Tensor:
    shape = (problem.num_groups, problem.num_options)
    if prior is None:
        return torch.zeros(shape, dtype=torch.float64)
    prior = torch.as_tensor(prior).detach().to("cpu", torch.float64)
    if prior.shape != shape:
        raise ValueError(f"prior must have shape {shape}, got {tuple(prior.shape)}.")
    prior = torch.where(torch.tensor(problem.allowed), prior, 0.0)
    if not torch.isfinite(prior).all():
        raise ValueError("prior must be finite for every allowed option.")
    return prior


def _with_interior(problem: AllocationProblem) -> AllocationProblem:
    """An equivalent problem whose manifold has points, where a budget sits at an end of its range.

    At its lowest total a budget leaves the cheapest options alone; at its highest it forbids nothing. Both are
    only reached at infinite logits under "==", and hold trivially under "<=".
    """
    if problem.sense == "<=":
        return _cheapest_only(problem)
    low, high = problem.unit_range
    if all(lowest < b < highest for lowest, b, highest in zip(low, problem.unit_budgets, high, strict=True)):
        return problem
    return _cheapest_only(problem.replace(sense="<="))


def _cheapest_only(problem: AllocationProblem) -> AllocationProblem:
    """Forbid what a budget at its lowest total forbids anyway."""
    low, _ = problem.unit_range
    allowed = problem.allowed.copy()
    for j, (lowest, budget) in enumerate(zip(low, problem.unit_budgets, strict=True)):
        if budget > lowest:
            continue
        costs = problem.unit_costs[j if problem.block_index is None else 0]
        members = slice(None) if problem.block_index is None else problem.block_index == j
        allowed[members] &= (costs == costs.min(axis=1, keepdims=True))[members]
    return problem if (allowed == problem.allowed).all() else problem.replace(allowed=allowed)
