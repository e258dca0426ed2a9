"""Ways of choosing widths, side by side: the same candidates, the same tokens, the same evaluation.

Every search may forward the same number of tokens, a backward counted as two, and whatever prepares it counts: the
gradients behind RCO's prior and curvature, HIGGS's disturbances, the choice among candidates, the exchanges. What
is the same for all is free: the candidates themselves, and the full model's predictions.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from rco.compression.base import Budget
from rco.compression.sensitivity import (
    fisher_differences,
    logits_from_losses,
    logits_from_weights,
    predicted_losses,
    second_order,
)
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.core.search import MOST_CANDIDATES
from rco.folders import make_folder, write_tensors_atomic
from rco.pipeline.common import build_data, open_run, slug
from rco.pipeline.compare import Comparison, fitting_workers, parse_methods, run_comparison, seeds_of
from rco.pipeline.compare_configs import CompareQuantizeConfig
from rco.pipeline.compare_figures import draw_comparison
from rco.pipeline.configs import QuantizeConfig
from rco.pipeline.entrants import FIXED, Allowance, Entrant
from rco.pipeline.evaluate import measure_tasks, read_tasks
from rco.pipeline.judge import Judge
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.quantize import impq_pair, plan_quantization

__all__ = [
    "QuantizeContest",
    "QuantizeJob",
    "SweepJob",
    "compare_quantization",
    "list_jobs",
]

# Most of an allowance that goes into the gradients behind the prior.
_PRIOR_SHARE = 0.25
_CURVE_SHARES = (1 / 16, 1 / 4)  # of the allowance, after which the present answer is judged; and at the end
_SWEEP_SHARE = 0.25  # of the allowance, for each budget of a sweep


@dataclass(frozen=True)
class QuantizeJob:
    """One method, once: ``share`` of the allowance, with or without RCO's prior."""

    budget: str
    label: str
    share: float
    seed: int
    curve: bool = False

    @property
    def name(self) -> str:
        """The job's file."""
        return slug(f"{self.budget}-{self.label}-{self.seed}")


@dataclass(frozen=True)
class SweepJob:
    """RCO at one budget after the other, each search started from what the one before has found."""

    budgets: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """The job's file."""
        return slug(f"sweep-{self.budgets[0]}-{self.budgets[-1]}-{len(self.budgets)}-{self.seed}")


def default_tokens(config: CompareQuantizeConfig) -> int:
    """What RCO forwards with the given settings, a backward counted as two."""
    gradients = config.sensitivity + config.steps * config.samples * config.batch_size
    forwards = config.selection * (MOST_CANDIDATES + config.refine_passes)
    return (3 * gradients + forwards) * config.length


def budget_of(config: QuantizeConfig) -> Budget:
    """The one budget of a configuration."""
    return Budget.parse(**config.budgets())


class QuantizeContest:
    """The model, its candidates and the judge, in one process."""

    def __init__(self, config: CompareQuantizeConfig) -> None:
        self.config = config
        self.allowance = Allowance.parse(config.allowance, default_tokens(config))
        budgets = [config.single(text) for text in config.budget_list()]
        self.planned = plan_quantization(budgets[0])
        self.backend = self.planned.backend
        for each in budgets[1:]:
            self.backend.problem(budget_of(each))  # one out of reach is said now
        self.backend.keep_references = True
        self.data = build_data(config, self.planned.loaded.tokenizer)
        self.tokens_per_batch = config.batch_size * config.length
        self._judge: Judge | None = None

    def prepare(self) -> None:
        """Build the candidates that are missing."""
        self.backend.prepare(self.data.search)

    @property
    def judge(self) -> Judge:
        """Knows the full model's predictions on the evaluation text."""
        if self._judge is None:
            self._judge = Judge(self.backend, self.data.evaluation)
        return self._judge

    def do(self, job: QuantizeJob | SweepJob) -> dict[str, Any]:
        """The entries of the table that a job makes."""
        if self.backend.store is None:
            self.prepare()
        if isinstance(job, QuantizeJob):
            return {"entries": [self.measure(job)]}
        entries: list[dict[str, Any]] = []
        for budget in job.budgets:
            before = np.array(entries[-1]["choices"]) if entries else None
            entry = self.measure(QuantizeJob(budget, "rco", _SWEEP_SHARE, job.seed), before)
            entries.append({**entry, "label": "sweep"})
        return {"entries": entries}

    def measure(self, job: QuantizeJob, before: np.ndarray | None = None) -> dict[str, Any]:
        """Search, then judge what was found; ``before`` is an allocation to start from."""
        problem = self.backend.problem(budget_of(self.config.single(job.budget)))
        curve = _Curve(job.share, self.allowance) if job.curve else None
        result, prepared = self._search(job, problem, curve, before)
        spent = result.forwards + 2 * result.backwards
        row = self.judge.row(job.label, result.allocation, problem)
        keys = ("kl", "kl_error", "perplexity", "perplexity_error", "by_domain", "bits", "within_budget")
        entry = {
            "budget": job.budget,
            "label": job.label,
            "method": result.method,
            "seed": job.seed,
            **{key: row[key] for key in keys},
            "bits_exact": str(self.backend.average_width(result.allocation)),
            "forward_tokens": (result.forwards + prepared.forwards) * self.tokens_per_batch,
            "backward_tokens": (result.backwards + prepared.backwards) * self.tokens_per_batch,
            "tokens": (spent + prepared.evaluations) * self.tokens_per_batch,
            "seconds": result.seconds + prepared.seconds,
            "selection_loss": result.loss,
            "chosen_from": result.chosen_from,
            "candidates": result.candidates,
            "settings": json.loads(json.dumps(result.settings, default=str)),
            "choices": result.allocation.tolist(),
        }
        if curve is not None:
            points = [
                [tokens, self.judge.divergence(problem.allocation(choices))]
                for tokens, choices in curve.points.items()
                if tokens < entry["tokens"]
            ]
            entry["curve"] = [*points, [entry["tokens"], entry["kl"]]]
        if self.config.tasks:
            with self.backend.apply(result.allocation) as model:
                entry["tasks"] = measure_tasks(model, self.config.tasks, self.config.limit, self.config.seed)
        return entry

    # ------------------------------------------------------------------ searching

    def _search(
        self,
        job: QuantizeJob,
        problem: AllocationProblem,
        curve: _Curve | None,
        before: np.ndarray | None,
    ) -> tuple[SearchResult, _Prepared]:
        entrant = Entrant.parse(job.label)
        tokens, seconds = self.allowance.tokens, self.allowance.seconds
        evaluations = None if tokens is None else int(job.share * tokens) // self.tokens_per_batch
        prepared = self._prepare_search(entrant, job.seed, evaluations)
        left = None if evaluations is None else evaluations - prepared.evaluations
        config = self.config
        searcher = entrant.make(
            left,
            None if seconds is None else max(job.share * seconds - prepared.seconds, 1e-9),
            job.seed,
            config,
            pair=impq_pair(self.backend.plan.widths, problem),
        )
        prior = proxy = None
        self.backend.curvature = None
        if entrant.prior:
            assert prepared.differences is not None
            found = second_order(self.backend, prepared.differences, prepared.layer_errors)
            prior, proxy = logits_from_losses(found.losses, problem, config.strength), found.losses
            if before is not None:
                prior[torch.arange(len(before)), torch.from_numpy(before)] += config.strength
            self.backend.curvature = found.curvature
        elif entrant.start == "weight-error":
            prior = logits_from_weights(self.backend.weight_distances(), problem)

        def on_incumbent(record: StepRecord, incumbent: Callable[[], np.ndarray | None]) -> None:
            spent = record.forwards + 2 * record.backwards + prepared.evaluations
            if curve is not None:
                curve.see(spent * self.tokens_per_batch, record.seconds + prepared.seconds, incumbent)

        with self.backend.objective(self.data.search, self.data.selection) as objective:
            if entrant.measures_fisher and prepared.differences is not None:
                known = self.backend.relative_errors() if entrant.pooled else None
                objective.fisher_losses = predicted_losses(prepared.differences, known)
            if entrant.method == "mxmoe" and prepared.layer_errors is not None:
                objective.layer_errors = prepared.layer_errors
            result: SearchResult = searcher.search(
                problem,
                objective,
                prior=prior,
                proxy=proxy,
                on_incumbent=on_incumbent if curve is not None else None,
            )
        return result, prepared

    def _prepare_search(self, entrant: Entrant, seed: int, evaluations: int | None) -> _Prepared:
        """Sensitivities on as many sequences as the allowance should give to them."""
        fisher = entrant.prior or entrant.measures_fisher
        mxmoe = entrant.method == "mxmoe"
        layers = bool(self.backend.plan.experts) and (entrant.prior or mxmoe)
        # A forward and a backward; the full model once, and its experts at every width.
        backwards = 1 if fisher else 0
        forwards = backwards + (1 + len(self.backend.plan.widths) if layers else 0)
        if not forwards:
            return _Prepared()
        most = len(self.data.search) if entrant.measures_fisher else self.config.sensitivity
        if evaluations is not None:
            share = _PRIOR_SHARE if entrant.prior else 0.9
            fits = int(share * evaluations) // (forwards + 2 * backwards) * self.config.batch_size
            most = max(1, min(most, fits))
        part, batches = self.data.search.select(slice(0, most)), -(-most // self.config.batch_size)
        differences = layer_errors = None
        seconds = layer_seconds = 0.0
        if fisher:
            differences, seconds = self._measured_once(
                f"{seed}-{most}", lambda: fisher_differences(self.backend, part, seed=seed)
            )
        if layers:
            layer_errors, layer_seconds = self._measured_once(
                f"layers-{most}-{'experts' if mxmoe else 'all'}",
                lambda: self.backend.layer_errors(part, experts_only=mxmoe),
            )
        return _Prepared(
            differences, layer_errors, forwards * batches, backwards * batches, seconds + layer_seconds
        )

    def _measured_once(self, name: str, measure: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """A table that searches share, and the seconds that it took."""
        folder = make_folder(self.config.folder() / "sensitivities")
        path = folder / f"{name}.safetensors"
        if not path.exists():
            began = time.perf_counter()
            found = measure()
            seconds = time.perf_counter() - began
            # Workers that need it at the same moment measure the same.
            write_tensors_atomic(path, {"table": found}, {"seconds": str(seconds)}, shared=True)
        with safe_open(path, "pt") as file:
            return file.get_tensor("table"), float(file.metadata()["seconds"])


class _Curve:
    """What a search would have answered at a few shares of its allowance: tokens spent -> choices."""

    def __init__(self, share: float, allowance: Allowance) -> None:
        self._tokens = None if allowance.tokens is None else share * allowance.tokens
        self._seconds = None if allowance.seconds is None else share * allowance.seconds
        self._due = list(_CURVE_SHARES)
        self.points: dict[int, np.ndarray] = {}

    def see(self, tokens: int, seconds: float, incumbent: Callable[[], np.ndarray | None]) -> None:
        """Note the first answer after each share, whichever of the limits is nearer."""
        used = max(
            0.0 if self._tokens is None else tokens / self._tokens,
            0.0 if self._seconds is None else seconds / self._seconds,
        )
        if not self._due or used < self._due[0]:
            return
        choices = incumbent()
        if choices is not None:
            self.points[tokens] = choices.copy()
            self._due = [share for share in self._due if share > used]


@dataclass(frozen=True)
class _Prepared:
    """What was measured before a search, and the batches and seconds that it took."""

    differences: Tensor | None = None
    layer_errors: Tensor | None = None
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0

    @property
    def evaluations(self) -> int:
        """Batches forwarded, a backward counted as two more."""
        return self.forwards + 2 * self.backwards


def list_jobs(config: CompareQuantizeConfig) -> list[QuantizeJob | SweepJob]:
    """All jobs, seed by seed, so that what is there after a while is whole seeds."""
    listed = parse_methods(config.methods)
    for label, _, _ in listed:
        Entrant.parse(label)
    seeds = seeds_of(config.seed, config.seeds)
    jobs: list[QuantizeJob | SweepJob] = []
    for seed in seeds:
        if config.sweep:
            jobs.append(SweepJob(tuple(config.front()), seed))
        for budget in config.budget_list():
            for label, name, share in listed:
                if seed == seeds[0] or name not in FIXED:
                    jobs.append(QuantizeJob(budget, label, share, seed, config.curves and seed == seeds[0]))
    return jobs


def compare_quantization(config: CompareQuantizeConfig, progress: Progress | None = None) -> Comparison:
    """Run the jobs that the folder does not hold yet; write tables and plots."""
    progress = progress or Silent()
    jobs = list_jobs(config)
    read_tasks(config.tasks, config.limit)  # refused now, not after the searches
    config = dataclasses.replace(
        config, out=config.folder(), store=config.store or config.folder() / "candidates"
    )
    contest = QuantizeContest(config)

    def describe(_: list[dict[str, Any]]) -> dict[str, Any]:
        full = contest.judge.row("full model", None, contest.planned.problem)
        if config.tasks:
            full["tasks"] = measure_tasks(contest.planned.loaded, config.tasks, config.limit, config.seed)
        return {
            "title": f"{config.model}: average widths {', '.join(config.budget_list())}",
            "tokens": contest.allowance.tokens,
            "seconds": contest.allowance.seconds,
            "full_model": full,
        }

    with open_run(config, config.folder()) as run:
        contest.backend.on_progress = progress.stage("candidates")
        contest.prepare()
        return run_comparison(
            run,
            jobs,
            QuantizeContest,
            config,
            describe,
            progress,
            draw=draw_comparison,
            workers=config.workers or fitting_workers(contest.planned.estimate, config.threads),
            threads=config.threads,
            here=contest,
        )
