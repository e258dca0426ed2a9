"""Riemannian Constrained Optimization: Algorithm 1 of the paper, then the choice among what it found.

Each step draws Gumbel samples, makes every sample feasible with the exact knapsack, takes the straight-through
gradient of the loss, and lets Adam walk on the budget manifold. After the last step the candidates (the final
and the averaged logits, what the options cost as measured, the best sample, the prior, the uniform assignment)
are compared on batches that no gradient has used, and the winner is refined; see :mod:`rco.core.refine`.

:class:`GumbelSearch` is that loop with one part left open, the walker, which moves the logits given a gradient.
RCO walks on the manifold; the Lagrangian baselines walk freely and are pushed, and differ in nothing else.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.core.evaluation import Evaluator
from rco.core.interaction import MeasuredLosses
from rco.core.problem import AllocationProblem
from rco.core.process import BudgetedSearch, Process, sampled_choices
from rco.core.refine import Candidates, SampleTracker, refine
from rco.core.relaxation import batch_order, expected_cost, gumbel_noise, straight_through, temperature
from rco.core.result import SearchResult, StepRecord
from rco.core.walker import ManifoldWalker, Walker

__all__ = [
    "MOST_CANDIDATES",
    "RCO",
    "CallableObjective",
    "GumbelSearch",
    "Schedule",
    "fit_schedule",
    "minimize",
]

_OWN_CANDIDATES = 4  # most that the loop proposes
# Compared at the end: with the uniform assignment, the prior's knapsack, and the proxy's as it is and spent.
MOST_CANDIDATES = _OWN_CANDIDATES + 4
# Shares of an allowance that are left for the choice among candidates, and for the exchanges after it.
_CHOICE, _REFINE = 0.15, 0.2
_SHORT = 400  # evaluations below which nothing is left for exchanges
_FEW_STEPS = 20  # below which samples are given up for steps
_LOOP_SECONDS = 0.75  # share of the seconds that the loop may take, where seconds are limited
_OPEN_END = 10**9


@dataclass(frozen=True, kw_only=True)
class GumbelSearch(BudgetedSearch):
    """Gradient search over whole assignments under an exact budget.

    Args:
        steps: Optimizer steps T; None: as many as the allowance holds.
        samples: Gumbel samples g per step, whose gradients are averaged; a short allowance may leave fewer.
        lr: Learning rate of Adam on the logits.
        tau: First and last temperature of the exponential schedule.
        batches_per_sample: Batches of the objective that each sample is evaluated on.
        antithetic: Draw samples in pairs u and 1 - u.
        average_last: Fraction of the steps, counted from the end, whose logits are averaged into a candidate.
        refine: Most passes over the selection batches that exchange moves may spend; 0: none; None: what the
            allowance leaves.
        curvature: Correct the gradient of options that were not sampled by the objective's curvature, if known.
        choose: Compare the final knapsack with other candidates and the starting points; without, the final one is
            the result. Algorithm 1 as printed is ``choose=False, refine=0, curvature=False, monotone=False``.
        monotone: Whether costlier options are never worse, so that unspent budget is spent; None: as the
            problem declares.
        seed, max_evaluations, max_seconds: See :class:`rco.core.process.BudgetedSearch`. An allowance shortens
            the loop and what follows it; the temperature then falls over what is left.
    """

    steps: int | None = 200
    samples: int = 16
    lr: float = 0.1
    tau: tuple[float, float] = (1.0, 0.01)
    batches_per_sample: int = 1
    antithetic: bool = False
    average_last: float = 0.25
    refine: int | None = 64
    curvature: bool = True
    choose: bool = True
    monotone: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(steps=0, samples=1, batches_per_sample=1, refine=0)
        self.require_end("steps")
        self.require_end("refine")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}.")
        if len(self.tau) != 2 or not 0 < self.tau[1] <= self.tau[0]:
            raise ValueError(f"tau must be (first, last) with first >= last > 0, got {self.tau}.")
        if not 0 < self.average_last <= 1:
            raise ValueError(f"average_last must lie in (0, 1], got {self.average_last}.")
        if self.antithetic and self.samples % 2:
            raise ValueError(f"antithetic sampling needs an even number of samples, got {self.samples}.")

    @property
    def compares_starts(self) -> bool:
        """Whether the starting points are among the candidates."""
        return self.choose

    @abstractmethod
    def make_walker(self, problem: AllocationProblem, prior: Tensor) -> Walker:
        """What moves the logits of this method."""

    def begin(self, problem: AllocationProblem, evaluator: Evaluator, prior: Tensor | None) -> Process:
        """The loop at its first step, with a schedule that fits the allowance."""
        if self.monotone is not None and self.monotone != problem.monotone:
            problem = problem.replace(monotone=self.monotone)
        return GumbelProcess(problem, evaluator, prior, self)


@dataclass(frozen=True, kw_only=True)
class RCO(GumbelSearch):
    """Riemannian Constrained Optimization: the iterate walks on the budget manifold (Algorithm 1).

    The settings are those of :class:`GumbelSearch`.
    """

    name: ClassVar[str] = "rco"

    def make_walker(self, problem: AllocationProblem, prior: Tensor) -> Walker:
        """Riemannian Adam on the budget manifold."""
        return ManifoldWalker(problem, prior, self.lr)


@dataclass(frozen=True)
class Schedule:
    """How an allowance is divided.

    Attributes:
        steps: Of the loop.
        samples: Per step.
        selection: Batches that candidates are compared on.
        refine: Evaluations for what follows the choice.
    """

    steps: int
    samples: int
    selection: int
    refine: int


def fit_schedule(settings: GumbelSearch, evaluator: Evaluator, candidates: int) -> Schedule:
    """The settings as they are without an allowance; with one, as much of each part as it holds.

    A part is set aside for choosing among the candidates and for exchanges; the loop has the rest. A short loop is
    better off with steps than with samples.
    """
    available = evaluator.selection.num_batches
    if math.isinf(evaluator.most):
        steps, passes = settings.steps, settings.refine
        if steps is None:
            steps = _OPEN_END  # ended by seconds
        if passes is None:
            passes = _OPEN_END
        return Schedule(steps, settings.samples, available, passes * available)
    allowance = int(evaluator.most)
    short = allowance < _SHORT
    share = _CHOICE * (2 if short else 1)  # few batches would choose by their noise
    selection = min(available, max(1, int(share * allowance / candidates)))
    refined = 0 if short or settings.refine == 0 else int(_REFINE * allowance)
    if settings.refine is not None:
        refined = min(refined, settings.refine * selection)
    left = allowance - candidates * selection - refined
    samples, per_sample = settings.samples, 3 * settings.batches_per_sample
    fewer = 2 if settings.antithetic else 1
    while samples > fewer and left < per_sample * samples * _FEW_STEPS:
        samples -= fewer
    steps = max(left // (per_sample * samples), 1)
    return Schedule(
        steps if settings.steps is None else min(steps, settings.steps), samples, selection, refined
    )


class GumbelProcess(Process):
    """The loop's state: the walker, what has been averaged, the best sample."""

    def __init__(
        self,
        problem: AllocationProblem,
        evaluator: Evaluator,
        prior: Tensor | None,
        settings: GumbelSearch,
    ) -> None:
        super().__init__(problem, evaluator, prior)
        self.settings = settings
        self.own_candidates = _OWN_CANDIDATES if settings.choose else 1
        self._follow(fit_schedule(settings, evaluator, self.own_candidates + evaluator.starts))
        self.walker = settings.make_walker(problem, self.scores())
        self.average = torch.zeros_like(self.scores())
        # What each option would cost, predicted at the samples of the last steps.
        self.prices = torch.zeros_like(self.average)
        self.averaged = 0
        self.measured = (
            MeasuredLosses(problem, evaluator.curvature)
            if evaluator.curvature is not None and settings.curvature and problem.monotone
            else None
        )
        self.best = SampleTracker(evaluator.objective.num_batches)
        self.taken = 0
        self.tau = settings.tau[0]

    def _follow(self, schedule: Schedule) -> None:
        self.schedule, self.kept_back = schedule, schedule.refine
        self.evaluator.selection_batches = range(schedule.selection)

    @property
    def steps(self) -> int:
        """As the schedule says."""
        return self.schedule.steps

    @property
    def done(self) -> bool:
        """Whether the loop's share of the seconds is used up, where seconds are limited."""
        return self.progress >= 1.0

    def cost(self, step: int) -> int:
        """A forward and a backward per sample and batch."""
        return 3 * self.schedule.samples * self.settings.batches_per_sample

    @property
    def progress(self) -> float:
        """How much of the loop is over, by steps or by seconds, whichever is further."""
        return self._progress_after(self.taken)

    def _progress_after(self, steps: int) -> float:
        by_time = self.evaluator.seconds / (_LOOP_SECONDS * self.evaluator.max_seconds)
        return max(steps / max(self.steps, 1), by_time)

    def advance(self, step: int) -> float:
        """Lines 3 to 14 of Algorithm 1."""
        settings, logits, samples = self.settings, self.walker.logits, self.schedule.samples
        self.tau = temperature(self._progress_after(step + 1), 1.0, settings.tau)
        drawn: list[tuple[Tensor, Tensor]] = []  # choices and gates
        count = settings.batches_per_sample
        walk = batch_order(
            self.evaluator.objective.num_batches,
            seed=settings.seed,
            first=step * samples * count,
            count=samples * count,
        )
        batches = [walk[j * count : (j + 1) * count] for j in range(samples)]

        def draw() -> Iterator[Tensor]:
            """Knapsack after knapsack: a device that has been given one sample works while the next is made."""
            for j in range(samples):
                drawn.append(self._sample(step, j))
                yield drawn[-1][1].detach()

        evaluated = self.evaluator.losses_and_gradients(draw(), batches)

        gradient, prices = torch.zeros_like(logits), torch.zeros_like(logits)
        losses = []
        # The order of the sums is fixed here, whoever has evaluated the samples.
        for (choices, gates), some, (loss, gate_gradient) in zip(drawn, batches, evaluated, strict=True):
            if self.measured is not None:
                self.measured.see(choices, gate_gradient)
            bend = self.evaluator.bend(choices) if settings.curvature else None
            if bend is not None:
                gate_gradient = gate_gradient + bend
            # The chain rule through the straight-through softmax.
            (sample_gradient,) = torch.autograd.grad(gates, logits, gate_gradient)
            gradient += sample_gradient / samples
            prices += gate_gradient / samples
            losses.append(loss)
            self.best.see(choices.numpy(), some, loss)

        self.walker.step(gradient, float(np.mean(losses)))
        self.taken = step + 1
        # By steps alone the last ones are known beforehand; by seconds they are those after a share of them.
        if self.progress > 1.0 - settings.average_last or self.taken == self.steps:
            self.average += logits.detach()
            self.prices += prices.detach()
            self.averaged += 1
        return float(np.mean(losses))

    def _sample(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Choices (N,) of one feasible sample and its straight-through gates (N, K)."""
        settings, logits = self.settings, self.walker.logits
        shape = (self.problem.num_groups, self.problem.num_options)
        noise = gumbel_noise(
            shape, seed=settings.seed, step=step, sample=number, antithetic=settings.antithetic
        )
        perturbed = logits + noise + self.problem.log_allowed
        values = perturbed.detach().numpy()[None]
        (found,) = sampled_choices(values, logits.detach(), self.problem)
        choices = torch.from_numpy(found)
        return choices, straight_through(perturbed / self.tau, choices)

    def describe(self) -> dict[str, Any]:
        """Temperature, expected cost, and how far the groups are decided."""
        with torch.no_grad():
            log_p = torch.log_softmax(self.walker.logits + self.problem.log_allowed, dim=-1)
            p = log_p.exp()
            entropy = -torch.where(p > 0, p * log_p, 0.0).sum(dim=-1).mean()
            cost = expected_cost(self.problem, self.walker.logits)
        return {
            "best_loss": self.best.loss,
            "temperature": self.tau,
            "expected_cost": tuple(cost.reshape(-1).tolist()),
            "entropy": float(entropy) / math.log(max(self.problem.num_options, 2)),
            "decided": int((p.max(dim=-1).values > 0.9).sum()),
        }

    def _log_p(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.detach() + self.problem.log_allowed, dim=-1)

    def propose(self, candidates: Candidates) -> None:
        """Line 16 of Algorithm 1, and what else the loop has learned."""
        final = self._log_p(self.walker.logits)
        candidates.add_values("final", final)
        if not self.settings.choose:
            return
        if self.averaged:
            candidates.add_values("averaged", self._log_p(self.average / self.averaged))
        if self.measured is not None:
            candidates.add_values("measured", self.problem.log_allowed - self.measured.losses)
        elif self.averaged:
            candidates.add_values("prices", self.problem.log_allowed - self.prices / self.averaged)
        if self.best.choices is not None:
            candidates.add("best sample", self.best.choices, final)

    def polish(
        self, choices: np.ndarray, losses: np.ndarray, on_step: Callable[[StepRecord], None] | None
    ) -> tuple[np.ndarray, float]:
        """Exchanges, while the allowance lasts and they pay."""
        allowance = min(float(self.schedule.refine), self.evaluator.left)
        if self.settings.refine is None:
            allowance = self.evaluator.left  # with what the loop has left over
        if allowance < 1 or not self.evaluator.in_time:
            return choices, float(losses.mean())
        refined = refine(self.problem, self.evaluator, choices, losses, allowance=allowance, on_step=on_step)
        return refined.choices, refined.loss

    def state(self) -> dict[str, Any]:
        """Logits, walker, averages and the schedule, which a new allowance does not change."""
        return {
            "schedule": asdict(self.schedule),
            "taken": self.taken,
            "logits": self.walker.logits.detach().clone(),
            "walker": self.walker.state_dict(),
            "average": self.average.clone(),
            "prices": self.prices.clone(),
            "averaged": self.averaged,
            "measured": None if self.measured is None else self.measured.state(),
            "best": self.best.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self._follow(Schedule(**state["schedule"]))
        self.taken = state["taken"]
        with torch.no_grad():
            self.walker.logits.copy_(state["logits"])
        self.walker.load_state_dict(state["walker"])
        self.average, self.prices = state["average"].clone(), state["prices"].clone()
        self.averaged = state["averaged"]
        if self.measured is not None:
            self.measured.load(state["measured"])
        self.best.load(state["best"])


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
