"""Riemannian Constrained Optimization: Algorithm 1 of the paper, then the choice among the candidates it found.

:meth:`GumbelSearch.loop` is Algorithm 1, with its lines marked. Each step draws Gumbel samples, makes every
sample feasible with the exact knapsack, takes the straight-through gradient of the loss, and moves the logits.
After the last step the candidates (the final and the averaged logits, the options' losses as the search has
measured them, the best sample, the prior, the uniform assignment) are compared on batches that no gradient has
used, and the winner is refined; see :mod:`rco.core.refine`.

RCO moves the logits on the budget manifold; the Lagrangian baselines share the loop with another optimizer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.core.choice import Candidates, SampleTracker, beats
from rco.core.evaluator import Evaluator
from rco.core.expected_cost import expected_cost
from rco.core.interaction import InteractionLosses
from rco.core.measured_curvature import MeasuredCurvature
from rco.core.objective import one_hot
from rco.core.optimizer import LogitOptimizer, ManifoldOptimizer, Surface, search_surface
from rco.core.problem import AllocationProblem
from rco.core.restarts import LocalOptima
from rco.core.result import SearchResult
from rco.core.sampling import batch_order, feasible_choices, gumbel_noises
from rco.core.searcher import OPEN_END, BudgetedSearch, SearchRun, SearchState

__all__ = [
    "MOST_CANDIDATES",
    "PRINTED",
    "RCO",
    "GumbelSearch",
    "PlainRCO",
    "Schedule",
    "fit_schedule",
    "temperature",
]

_OWN_CANDIDATES = 4  # most that the loop proposes
# With the uniform assignment, the prior's knapsack, and the proxy's, unchanged and with its budget spent.
MOST_CANDIDATES = _OWN_CANDIDATES + 4
# Shares of an allowance that are left for the choice among candidates, and for the exchanges after it.
_CHOICE, _REFINE = 0.15, 0.2
_SHORT = 400  # evaluations below which nothing is left for exchanges
_FEW_STEPS = 20  # below which fewer samples are drawn, for more steps
# Where one batch gives the loss: evaluations of the loop and of the refinement before it.
_LOOP_PER_GROUP, _SHORTEST_LOOP, _LONGEST_LOOP = 20, 240, 2400
_OPENING_PER_GROUP, _SHORTEST_OPENING, _LONGEST_OPENING = 6, 120, 600
_LOOP_SECONDS = 0.75  # share of the seconds that the loop may take, where seconds are limited


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
        surface: Whether the expected cost of the logits equals the budget (``"=="``) or may stay below (``"<="``).
            None: ``"=="`` where the budget must be met exactly or costlier options are never worse, ``"<="``
            elsewhere.
        monotone: Whether costlier options are never worse, so that unspent budget is spent; None: as the
            problem declares.
        margin: Standard errors over the selection batches by which a candidate must beat the best starting point,
            and the refined allocation the best candidate.
        seed, max_evaluations, max_seconds: See :class:`rco.core.searcher.BudgetedSearch`. An allowance shortens
            the loop and the parts after it; the temperature then falls over the shorter loop.
    """

    meets_exactly: ClassVar[bool] = True

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
    surface: Surface | None = None
    monotone: bool | None = None
    margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(steps=0, samples=1, batches_per_sample=1, refine=0)
        self.require_end("steps")
        self.require_end("refine")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}.")
        if len(self.tau) != 2 or not 0 < self.tau[1] <= self.tau[0]:
            raise ValueError(f"tau must be (first, last) with first >= last > 0, got {self.tau}.")
        if self.surface not in ("==", "<=", None):
            raise ValueError(f'surface must be "==", "<=" or None, got {self.surface!r}.')
        if not self.margin >= 0:
            raise ValueError(f"margin must not be negative, got {self.margin}.")
        if not 0 < self.average_last <= 1:
            raise ValueError(f"average_last must lie in (0, 1], got {self.average_last}.")
        if self.antithetic and self.samples % 2:
            raise ValueError(f"antithetic sampling needs an even number of samples, got {self.samples}.")

    @property
    def compares_starts(self) -> bool:
        """Whether the starting points are among the candidates."""
        return self.choose

    @property
    def margin_over_starts(self) -> float:
        """Standard errors by which a candidate must beat the best starting point."""
        return self.margin

    def surface_for(self, problem: AllocationProblem) -> Surface:
        """The surface on which the logits move."""
        return self.surface or search_surface(problem)

    @abstractmethod
    def make_optimizer(self, problem: AllocationProblem, prior: Tensor, surface: Surface) -> LogitOptimizer:
        """The optimizer of this method's logits."""

    def loop(self, run: SearchRun) -> SearchResult:
        """Algorithm 1 of the paper, line by line, with the harness around it."""
        problem = run.problem
        if self.monotone is not None and self.monotone != problem.monotone:
            problem = problem.replace(monotone=self.monotone)
        state = run.resume(GumbelState(self, run, problem))
        schedule, optimizer, logits = state.schedule, state.optimizer, state.optimizer.logits  # line 1
        shape = (problem.num_groups, problem.num_options)

        def draw(step: int, tau: float, drawn: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
            """Gates of a step's samples, one by one: a device works on one sample while the next is made.

            Where one batch gives the loss, which is cheap then, they are drawn together.
            """
            together = schedule.samples if run.evaluator.one_loss else 1
            for first in range(0, schedule.samples, together):  # line 4
                some = range(first, first + together)
                noise = gumbel_noises(  # line 5: Gumbel noise
                    shape, seed=self.seed, step=step, samples=some, antithetic=self.antithetic
                )
                perturbed = logits.detach() + noise + problem.log_allowed
                found = feasible_choices(perturbed.numpy(), logits.detach(), problem)  # line 6: knapsack
                soft = torch.softmax(perturbed / tau, dim=-1)
                drawn += zip(torch.from_numpy(found), soft, strict=True)
                yield from one_hot(found, problem.num_options)  # line 7: forward z, backward softmax

        with run.allowance():
            for step in run.steps(schedule.steps, cost=state.step_cost):  # line 2
                if step == 0 and not state.open():
                    break
                if state.progress(step) >= 1.0:  # the loop's share of the seconds is used up
                    break
                tau = temperature(state.progress(step + 1), self.tau)
                drawn: list[tuple[Tensor, Tensor]] = []
                batches = state.batches(step)
                evaluated = run.evaluator.losses_and_gradients(draw(step, tau, drawn), batches)

                choices, soft = (torch.stack(parts) for parts in zip(*drawn, strict=True))
                losses = [loss for loss, _ in evaluated]
                slopes = state.corrected(choices, torch.stack([slope for _, slope in evaluated]))
                mean_slopes = (soft * slopes).sum(dim=-1, keepdim=True)
                chained = soft * (slopes - mean_slopes) / (tau * schedule.samples)  # line 7: chain rule
                for own, some, loss in zip(choices.numpy(), batches, losses, strict=True):
                    state.best.add(own, some, loss)

                mean = float(np.mean(losses))
                # Lines 9 to 14: project, Adam, retract, transport.
                optimizer.step(_sum_in_order(chained), mean)
                state.average_in(step + 1, _sum_in_order(slopes / schedule.samples))
                run.record(mean, **state.describe(tau))
        return run.choose()  # line 16, and the choice among candidates


@dataclass(frozen=True, kw_only=True)
class RCO(GumbelSearch):
    """Riemannian Constrained Optimization: gradient search with logits on the budget manifold (Algorithm 1).

    ``RCO(steps=100, seed=0).search(problem, loss)`` returns an :class:`rco.SearchResult`; :func:`rco.minimize` is
    the same in one call. A step draws samples, makes each feasible with the exact knapsack, and moves the logits
    along the averaged gradient. After the last step these candidates are compared, and the best is refined:

    ``final``, ``averaged``: Knapsacks of the last logits, and of their average over the last steps.
    ``prices``: Knapsack of the options' losses as the gradients of the last steps predict them.
    ``measured``: The same with the objective's curvature, where it is known.
    ``best sample``: The sample of the lowest loss.
    ``start``, ``prior``, ``proxy``, ``uniform``: The starting points, as far as they were given.
    ``refined``, ``best seen``: What exchanges and restarts made of them, and the best of all evaluations.

    Args:
        steps: Optimizer steps; None: as many as the allowance holds.
        samples: Samples per step, whose gradients are averaged; a short allowance may leave fewer.
        lr: Learning rate of Adam on the logits.
        tau: First and last temperature of the softmax; it falls exponentially.
        batches_per_sample: Batches of the objective that each sample is evaluated on.
        antithetic: Draw samples in pairs u and 1 - u.
        average_last: Share of the steps, counted from the end, whose logits are averaged.
        refine: Most passes over the selection batches that the refinement may take; 0: none; None: what the
            allowance leaves.
        curvature: Use the objective's curvature, if known; where one batch gives the loss it is measured.
        choose: Compare candidates; without, the knapsack of the last logits is the result.
        surface: Whether the expected cost of the logits equals the budget (``"=="``) or may stay below (``"<="``);
            None: ``"=="`` where allocations must meet the budget or costlier options are never worse.
        monotone: Whether costlier options are never worse, so that unspent budget is spent; None: as the problem
            declares.
        margin: Standard errors over the selection batches by which a candidate must beat the best starting point,
            and the refined allocation the best candidate; above 0 where allocations differ little, so that the
            choice does not fit noise.
        seed: Seed of all random draws: same seed, same result.
        max_evaluations: Most evaluations of the loss, a gradient counting as two more; None: no limit.
        max_seconds: Seconds after which no new evaluation begins, except for the final choice.
        patience: Steps in a row without a lower loss after which the search ends.
        target: A loss at or below which the search ends at once.
    """

    name: ClassVar[str] = "rco"

    def make_optimizer(self, problem: AllocationProblem, prior: Tensor, surface: Surface) -> LogitOptimizer:
        """Riemannian Adam on the budget manifold."""
        return ManifoldOptimizer(problem, prior, self.lr, surface)


# Algorithm 1 exactly as the paper prints it. Temperatures of section 3.1; the straight-through gradient without
# a term for curvature; and line 16 as result: the knapsack of the last logits, with no choice, no exchanges, and
# leftover budget unspent.
PRINTED: Mapping[str, Any] = MappingProxyType(
    {"tau": (1.0, 0.01), "refine": 0, "curvature": False, "choose": False, "monotone": False}
)


@dataclass(frozen=True, kw_only=True)
class PlainRCO(RCO):
    """Algorithm 1 as printed: the knapsack of the last logits is the result, with leftover budget unspent.

    Steps, samples, learning rate, temperatures and antithetic sampling are settings as for :class:`RCO`; the
    rest of ``PRINTED`` is fixed. Without a prior the logits start at zero. The result is not compared with the
    starting points, so it may be worse than them.
    """

    name: ClassVar[str] = "rco-plain"

    tau: tuple[float, float] = PRINTED["tau"]
    refine: int | None = field(default=PRINTED["refine"], init=False)
    curvature: bool = field(default=PRINTED["curvature"], init=False)
    choose: bool = field(default=PRINTED["choose"], init=False)
    monotone: bool | None = field(default=PRINTED["monotone"], init=False)

    def surface_for(self, problem: AllocationProblem) -> Surface:
        """C = B as printed; with the slack variable of appendix A.7 where the budget may be left unspent."""
        return self.surface or ("<=" if problem.sense == "<=" else "==")


def _sum_in_order(parts: Tensor) -> Tensor:
    """The sum over samples (line 8), in their order whichever rank has evaluated them."""
    return torch.from_numpy(np.add.reduce(parts.numpy(), axis=0))


def temperature(progress: float, tau: tuple[float, float]) -> float:
    """Exponential annealing from tau[0] to tau[1], reached at ``progress`` 1 (paper, section 3.1)."""
    start, end = tau
    return max(end, float(start * (end / start) ** progress))


@dataclass(frozen=True)
class Schedule:
    """Division of an allowance among the parts of a search.

    Attributes:
        steps: Steps of the loop.
        samples: Samples per step.
        selection: Batches that candidates are compared on.
        refine: Evaluations for what follows the choice.
        opening: Evaluations for the refinement of the starting points before the loop.
    """

    steps: int
    samples: int
    selection: int
    refine: int
    opening: int = 0


def fit_schedule(settings: GumbelSearch, evaluator: Evaluator, candidates: int, groups: int) -> Schedule:
    """The schedule of a search: its settings without an allowance, reduced to fit with one.

    A part is set aside for choosing among the candidates and for exchanges; the loop has the rest. A short loop
    benefits more from steps than from samples. Where one batch gives the loss the schedule depends on the size of
    the problem alone, and the allowance ends the search wherever it is.
    """
    available = evaluator.selection.num_batches
    if evaluator.one_loss and settings.choose and settings.refine != 0 and settings.limited:
        return _fixed_schedule(settings, groups)
    if math.isinf(evaluator.most):
        steps, passes = settings.steps, settings.refine
        if steps is None:
            steps = OPEN_END  # ended by seconds
        if passes is None:
            passes = OPEN_END
        return Schedule(steps, settings.samples, available, passes * available)
    allowance = int(evaluator.most)
    short = allowance < _SHORT
    share = _CHOICE * (2 if short else 1)  # a choice on few batches is noise
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


def _fixed_schedule(settings: GumbelSearch, groups: int) -> Schedule:
    """Opening and loop by the number of groups; all that is left of the allowance follows the loop.

    The schedule does not depend on the allowance: a larger one continues the search that a smaller one ends, so
    that its result is never worse.
    """
    per_sample = 3 * settings.batches_per_sample
    evaluations = min(max(_LOOP_PER_GROUP * groups, _SHORTEST_LOOP), _LONGEST_LOOP)
    samples, fewer = settings.samples, 2 if settings.antithetic else 1
    while samples > fewer and evaluations < per_sample * samples * _FEW_STEPS:
        samples -= fewer
    steps = max(evaluations // (per_sample * samples), 1)
    if settings.steps is not None:
        steps = min(steps, settings.steps)
    refined = OPEN_END if settings.refine is None else settings.refine
    opening = min(max(_OPENING_PER_GROUP * groups, _SHORTEST_OPENING), _LONGEST_OPENING)
    return Schedule(steps, samples, 1, refined, min(opening, refined))


class GumbelState(SearchState):
    """The logits, their averages, the best sample, and the schedule."""

    saved = ("optimizer", "average", "prices", "averaged", "interaction", "best", "optima", "measured")

    def __init__(self, settings: GumbelSearch, run: SearchRun, problem: AllocationProblem) -> None:
        super().__init__(run, problem)
        self.settings = settings
        self.candidates = _OWN_CANDIDATES if settings.choose else 1
        compared = self.candidates + run.most_starts
        self._follow(fit_schedule(settings, self.evaluator, compared, problem.num_groups))
        self.optimizer = settings.make_optimizer(problem, run.scores(), settings.surface_for(problem))
        self.average = torch.zeros_like(run.scores())
        # Losses of the options, predicted at the samples of the last steps.
        self.prices = torch.zeros_like(self.average)
        self.averaged = 0
        curvature = self.evaluator.curvature
        self.interaction = (
            InteractionLosses(problem, curvature)
            if curvature is not None and settings.curvature and problem.monotone and problem.num_joint == 1
            else None
        )
        self.best = SampleTracker(self.evaluator.objective.num_batches)
        self.optima = LocalOptima(problem, self.evaluator, settings.seed, run.refined)
        self.measured: MeasuredCurvature | None = None
        if curvature is None and settings.curvature and self.evaluator.one_loss:
            self.measured = MeasuredCurvature(problem.num_groups, problem.num_options)
            self.evaluator.measure_curvature(self.measured)

    def _follow(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.kept_back = 0 if schedule.opening else schedule.refine
        self.evaluator.select_on(schedule.selection)

    def step_cost(self, step: int) -> int:
        """A forward and a backward per sample and batch."""
        return 3 * self.schedule.samples * self.settings.batches_per_sample

    def progress(self, steps: int) -> float:
        """Completed share of the loop after that many steps: by steps or by seconds, whichever is larger."""
        by_time = self.evaluator.seconds / (_LOOP_SECONDS * self.evaluator.max_seconds)
        return max(steps / max(self.schedule.steps, 1), by_time)

    def batches(self, step: int) -> list[list[int]]:
        """The batches of each of a step's samples."""
        samples, count = self.schedule.samples, self.settings.batches_per_sample
        walk = batch_order(
            self.evaluator.objective.num_batches,
            seed=self.settings.seed,
            first=step * samples * count,
            count=samples * count,
        )
        return [walk[j * count : (j + 1) * count] for j in range(samples)]

    def corrected(self, choices: Tensor, slopes: Tensor) -> Tensor:
        """Gradients of samples in the gates (S, N, K), plus the curvature's cost of leaving their choices."""
        if self.interaction is not None:
            for own, slope in zip(choices, slopes, strict=True):
                self.interaction.add(own, slope)
        if self.measured is not None:  # for the exchanges; too noisy while it is being measured
            self.measured.add(choices, slopes)
            return slopes
        if not self.settings.curvature or self.evaluator.curvature is None:
            return slopes
        return slopes + self.evaluator.curvature[torch.arange(choices.shape[1]), choices]

    def average_in(self, steps: int, prices: Tensor) -> None:
        """Add the logits after the last steps to their average."""
        # By steps alone the last ones are known beforehand; by seconds they are those after a share of them.
        if self.progress(steps) > 1.0 - self.settings.average_last or steps == self.schedule.steps:
            self.average += self.optimizer.logits.detach()
            self.prices += prices.detach()
            self.averaged += 1

    def describe(self, tau: float) -> dict[str, Any]:
        """Temperature, expected cost, entropy and number of decided groups."""
        logits = self.optimizer.logits.detach()
        log_p = self._log_p(logits)
        p = log_p.exp()
        entropy = -torch.where(p > 0, p * log_p, 0.0).sum(dim=-1).mean()
        return {
            "best_loss": self.best.loss,
            "temperature": tau,
            "expected_cost": tuple(expected_cost(self.problem, logits).reshape(-1).tolist()),
            "entropy": float(entropy) / math.log(max(self.problem.num_options, 2)),
            "decided": int((p.max(dim=-1).values > 0.9).sum()),
        }

    def _log_p(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.detach() + self.problem.log_allowed, dim=-1)

    def propose(self, candidates: Candidates) -> None:
        """Add the result of line 16 of Algorithm 1, and the other candidates of the loop."""
        final = self._log_p(self.optimizer.logits)
        candidates.add_values("final", final)
        if not self.settings.choose:
            return
        if self.averaged:
            candidates.add_values("averaged", self._log_p(self.average / self.averaged))
        if self.interaction is not None:
            candidates.add_values("measured", self.problem.log_allowed - self.interaction.losses)
        elif self.averaged:
            candidates.add_values("prices", self.problem.log_allowed - self.prices / self.averaged)
        if self.best.choices is not None:
            candidates.add("best sample", self.best.choices, final)

    def open(self) -> bool:
        """Refine the starting points before the first step, where one batch gives the loss.

        Returns whether the loop is worth its evaluations. A long one is not where gradients predict badly what
        random moves do: what is left then goes to these; see :mod:`rco.core.restarts`.
        """
        if not self.schedule.opening:
            return True
        starts = [each[1:] for each in self.run.starts().ranked()]
        self.optima.climb(starts, min(float(self.schedule.opening), self.evaluator.left))
        if self.schedule.refine == OPEN_END:
            self.optima.try_moves(self.evaluator.left)
        long = self.problem.num_groups * _LOOP_PER_GROUP > _SHORTEST_LOOP
        return self.optima.trusted or not long

    def current_logits(self) -> Tensor:
        """The logits of the last step."""
        return self.optimizer.logits.detach().clone()

    def polish(self, ranked: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, float]:
        """Refine the candidates, then perturbations of them, while the allowance lasts."""
        allowance = min(float(self.schedule.refine), self.evaluator.left)
        if self.settings.refine is None:
            allowance = self.evaluator.left  # including what the loop did not use
        choices, losses = ranked[0]
        if allowance >= 1 and self.evaluator.in_time:
            end = self.evaluator.evaluations + allowance
            with self.run.allowance():
                self.optima.climb(ranked, allowance)
                self.optima.improve(end - self.evaluator.evaluations, self.settings.patience)
        if self.optima.found and beats(self.optima.found[0].losses, losses, self.settings.margin):
            return self.optima.best
        return choices, float(losses.mean())

    def state(self) -> dict[str, Any]:
        """The state with the schedule, which a new allowance does not change."""
        return {**super().state(), "schedule": asdict(self.schedule)}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self._follow(Schedule(**state["schedule"]))
        super().load(state)
