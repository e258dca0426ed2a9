"""Methods side by side on one problem: the same candidates, tokens and evaluation, several seeds, one table.

Every search may forward the same number of tokens, a backward counted as two. Preparation counts too: the gradients
for RCO's prior and curvature, HIGGS's disturbances, the comparison of candidates, the exchanges. Work that all
methods share is free: the candidates, scores from one forward pass, and the full model's predictions.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from rco.atomic_files import make_folder, write_tensors_atomic
from rco.compression.budget import Budget
from rco.compression.llama_mixes import mix_choices
from rco.compression.priors import score_table
from rco.compression.second_order import diagonal_sequences, predicted_losses
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.core.search import MOST_CANDIDATES
from rco.data.calibration import CalibrationSet, DataSplits
from rco.pipeline.compare_figures import draw_comparison, draw_divergence
from rco.pipeline.compare_tables import write_comparison
from rco.pipeline.configs import PLAIN, ComparePruneConfig, CompareQuantizeConfig
from rco.pipeline.entrants import Allowance, Entrant, ExpertEntrant, is_fixed, parse_methods
from rco.pipeline.estimate import Estimate
from rco.pipeline.evaluate import measure_tasks, read_tasks
from rco.pipeline.evaluate_allocations import AllocationEvaluator
from rco.pipeline.jobs import run_jobs
from rco.pipeline.planning import build_data, open_run, plan_compression, run_folder, slug
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.searchers import impq_pair, make_searcher, search_settings, warm_start
from rco.runs import available_cores, free_memory

__all__ = [
    "Comparison",
    "Contest",
    "ExpertContest",
    "SearchJob",
    "SweepJob",
    "WidthContest",
    "compare",
    "fitting_workers",
    "list_jobs",
    "make_contest",
]

CompareConfig = CompareQuantizeConfig | ComparePruneConfig

_PROCESS = 2**29  # bytes that Python and torch take before there is a model
# Largest share of an allowance for the gradients of the prior.
_PRIOR_SHARE = 0.25
_CURVE_SHARES = (1 / 16, 1 / 4)  # of the allowance, after which the current best is evaluated
_SWEEP_SHARE = 0.25  # of the allowance, for each budget of a sweep
# For experts: shares of a long and of a short allowance for the initial sensitivities of a gradient search.
_SENSITIVITY, _SENSITIVITY_SHORT = 0.2, 0.6
_SHORT = 400  # evaluations below which a search with sensitivities has no budget for steps
_START_CANDIDATES = 4  # before its first step: the uniform assignment, the knapsacks of prior and proxy


@dataclass(frozen=True)
class Comparison:
    """Results of a comparison and the paths of its files.

    Attributes:
        rows: One per budget and method: means and standard deviations over seeds.
        entries: One per search.
        failed: Reasons of failed searches, by name.
        folder: Folder with ``comparison.json``, ``comparison.md``, ``comparison.csv`` and the plots.
        plots: Paths of the plots.
    """

    rows: list[dict[str, Any]]
    entries: list[dict[str, Any]]
    failed: dict[str, str]
    folder: Path
    plots: list[Path]


@dataclass(frozen=True)
class SearchJob:
    """One search with one method.

    Attributes:
        budget: Budget as typed.
        label: Name of the method in the comparison.
        share: Share of the allowance.
        seed: Seed of the search.
        curve: Also evaluate intermediate results.
    """

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
    """RCO at a series of budgets, each search starting from the previous result."""

    budgets: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """The job's file."""
        return slug(f"sweep-{self.budgets[0]}-{self.budgets[-1]}-{len(self.budgets)}-{self.seed}")


@dataclass(frozen=True)
class _Prepared:
    """Tables measured before a search, and the batches and seconds that they took."""

    differences: Tensor | None = None
    layer_errors: Tensor | None = None
    diagonal: Tensor | None = None
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0

    @property
    def evaluations(self) -> int:
        """Batches forwarded, a backward counted as two more."""
        return self.forwards + 2 * self.backwards


class Contest(ABC):
    """Runs the jobs of a comparison in one process, with the model, its candidates and an evaluator."""

    config: CompareConfig
    allowance: Allowance

    def __init__(self, first: Any) -> None:
        self.planned = plan_compression(first)
        self.compression = self.planned.compression
        self.tokens_per_batch = self.config.batch_size * self.config.length

    @abstractmethod
    def prepare(self, seed: int) -> tuple[DataSplits, AllocationEvaluator]:
        """Make candidates or scores; returns the text of a seed and its evaluator."""

    @abstractmethod
    def problem(self, budget: str) -> AllocationProblem:
        """The problem at a budget as typed."""

    @abstractmethod
    def search(
        self, job: SearchJob, problem: AllocationProblem, curve: _Curve | None, before: np.ndarray | None
    ) -> tuple[SearchResult, _Prepared]:
        """Run a method; ``before`` is an allocation to start from."""

    @abstractmethod
    def describe(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Title, allowance and full model; see :func:`rco.pipeline.compare_tables.write_comparison`."""

    def do(self, job: SearchJob | SweepJob) -> dict[str, Any]:
        """Run a job; returns its entries of the table."""
        if isinstance(job, SearchJob):
            return {"entries": [self.measure(job)] if self.takes_part(job) else []}
        entries: list[dict[str, Any]] = []
        for budget in job.budgets:
            before = np.array(entries[-1]["choices"]) if entries else None
            entry = self.measure(SearchJob(budget, "rco", _SWEEP_SHARE, job.seed), before)
            entries.append({**entry, "label": "sweep"})
        return {"entries": entries}

    def takes_part(self, job: SearchJob) -> bool:
        """Whether a method has a result at a budget."""
        return True

    def measure(self, job: SearchJob, before: np.ndarray | None = None) -> dict[str, Any]:
        """Search, then evaluate the result; ``before`` is an allocation to start from."""
        _, evaluator = self.prepare(job.seed)
        problem = self.problem(job.budget)
        curve = _Curve(job.share, self.allowance) if job.curve else None
        result, prepared = self.search(job, problem, curve, before)
        row = evaluator.row(job.label, result.allocation, problem)
        spent = result.forwards + 2 * result.backwards + prepared.evaluations
        entry = {
            "budget": self._budget_label(job.budget),
            "label": job.label,
            "method": result.method,
            "seed": job.seed,
            **{key: value for key, value in row.items() if key != "name"},
            **self._amounts(result, evaluator, problem),
            "forward_tokens": (result.forwards + prepared.forwards) * self.tokens_per_batch,
            "backward_tokens": (result.backwards + prepared.backwards) * self.tokens_per_batch,
            "tokens": spent * self.tokens_per_batch,
            "seconds": result.seconds + prepared.seconds,
            "selection_loss": result.loss,
            "chosen_from": result.chosen_from,
            "candidates": result.candidates,
            "settings": json.loads(json.dumps(result.settings, default=str)),
            "choices": result.allocation.tolist(),
        }
        if curve is not None:
            points = [
                [tokens, evaluator.divergence(problem.allocation(choices))]
                for tokens, choices in curve.points.items()
                if tokens < entry["tokens"]
            ]
            entry["curve"] = [*points, [entry["tokens"], entry["kl"]]]
        return entry

    def _budget_label(self, budget: str) -> str:
        return budget

    @abstractmethod
    def _amounts(
        self, result: SearchResult, evaluator: AllocationEvaluator, problem: AllocationProblem
    ) -> dict[str, Any]:
        """Size of an allocation and other values of an entry beside its quality."""


class WidthContest(Contest):
    """Methods for choosing widths, on the same candidates and text."""

    def __init__(self, config: CompareQuantizeConfig) -> None:
        self.config: CompareQuantizeConfig = config
        self.allowance = Allowance.parse(config.allowance, default_tokens(config))
        super().__init__(config.single(config.budget_list()[0]))
        self.compression.keep_references()
        for budget in config.budget_list()[1:]:
            self.problem(budget)  # infeasible budgets fail early
        self._data = build_data(config, self.planned.loaded.tokenizer)
        self._evaluator: AllocationEvaluator | None = None

    def prepare(self, seed: int) -> tuple[DataSplits, AllocationEvaluator]:
        """Make missing candidates; text and evaluator are the same for all seeds."""
        if self.compression.store is None:
            self.compression.candidates(self._data.search)
        if self._evaluator is None:
            self._evaluator = AllocationEvaluator(self.compression, self._data.evaluation)
        return self._data, self._evaluator

    def problem(self, budget: str) -> AllocationProblem:
        """The problem at a budget as typed."""
        return self.compression.problem(Budget.parse(**self.config.single(budget).budgets()))

    def describe(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Title, allowance and full model."""
        config = self.config
        _, evaluator = self.prepare(config.seed)
        full = evaluator.row("full model", None, self.planned.problem)
        if config.tasks:
            full["tasks"] = measure_tasks(self.planned.loaded, config.tasks, config.limit, config.seed)
        return {
            "title": f"{config.model}: {config.budget_kind} {', '.join(config.budget_list())}",
            "tokens": self.allowance.tokens,
            "seconds": self.allowance.seconds,
            "full_model": full,
        }

    def search(
        self, job: SearchJob, problem: AllocationProblem, curve: _Curve | None, before: np.ndarray | None
    ) -> tuple[SearchResult, _Prepared]:
        """Run a method; ``before`` is an allocation to start from."""
        entrant, config, compression = Entrant.parse(job.label), self.config, self.compression
        if entrant.mix:
            return self._as_it_is(job.label, problem), _Prepared()
        tokens, seconds = self.allowance.tokens, self.allowance.seconds
        evaluations = None if tokens is None else int(job.share * tokens) // self.tokens_per_batch
        prepared = self._measure_options(entrant, job.seed, evaluations)
        searcher = entrant.make(
            None if evaluations is None else evaluations - prepared.evaluations,
            None if seconds is None else max(job.share * seconds - prepared.seconds, 1e-9),
            job.seed,
            config,
            pair=impq_pair(compression.plan, problem),
            margin=compression.refinement_margin,
        )
        inputs: dict[str, Tensor] = {}
        differences = prepared.differences if entrant.prior else None
        compression.use_differences(differences, prepared.layer_errors, prepared.diagonal)
        if entrant.prior:
            inputs = compression.search_inputs(problem, "fisher", config.strength)
            inputs = warm_start(inputs, before, config.strength)
        elif entrant.start == "weight-error":
            inputs = compression.search_inputs(problem, "weight-error", 1.0)

        def on_incumbent(record: StepRecord, incumbent: Callable[[], np.ndarray | None]) -> None:
            spent = record.forwards + 2 * record.backwards + prepared.evaluations
            if curve is not None:
                curve.see(spent * self.tokens_per_batch, record.seconds + prepared.seconds, incumbent)

        with compression.objective(self._data.search, self._data.selection) as objective:
            tables = {}
            if entrant.measures_fisher and prepared.differences is not None:
                known = compression.relative_errors() if entrant.pooled else None
                tables["fisher_losses"] = predicted_losses(prepared.differences, known)
            if entrant.method == "mxmoe" and prepared.layer_errors is not None:
                tables["layer_errors"] = prepared.layer_errors
            result: SearchResult = searcher.search(
                problem,
                objective.with_tables(**tables),
                on_incumbent=on_incumbent if curve is not None else None,
                **inputs,
            )
        return result, prepared

    def takes_part(self, job: SearchJob) -> bool:
        """Whether a method has a result: a mixture of llama.cpp, whose size is its own, must fit the budget."""
        if not Entrant.parse(job.label).mix:
            return True
        problem = self.problem(job.budget)
        return problem.is_feasible(problem.allocation(mix_choices(self.compression.plan, job.label)))

    def _as_it_is(self, name: str, problem: AllocationProblem) -> SearchResult:
        """A mixture of llama.cpp with its loss on the selection text."""
        allocation = problem.allocation(mix_choices(self.compression.plan, name))
        with self.compression.objective(self._data.search, self._data.selection) as objective:
            held_back = objective.selection
            assert held_back is not None
            gates = allocation.one_hot(problem.num_options)
            with torch.no_grad():
                losses = [float(held_back.loss(gates, batch)) for batch in range(held_back.num_batches)]
        return SearchResult(allocation, statistics.fmean(losses), problem.cost(allocation), method=name)

    def _measure_options(self, entrant: Entrant, seed: int, evaluations: int | None) -> _Prepared:
        """Measure sensitivities on a number of sequences that fits the allowance."""
        compression, config, text = self.compression, self.config, self._data.search
        fisher = entrant.prior or entrant.measures_fisher
        mxmoe = entrant.method == "mxmoe"
        layers = bool(compression.plan.experts) and (entrant.prior or mxmoe)
        # Gradients: a forward and a backward. Layer errors: the full model once, and its experts at every width.
        backwards = 1 if fisher else 0
        forwards = backwards + (1 + len(compression.plan.options) if layers else 0)
        if not forwards:
            return _Prepared()
        most = len(text) if entrant.measures_fisher else config.sensitivity
        if evaluations is not None:
            share = _PRIOR_SHARE if entrant.prior else 0.9
            fits = int(share * evaluations) // (forwards + 2 * backwards) * config.batch_size
            most = max(1, min(most, fits))
        part, batches = text.select(slice(0, most)), -(-most // config.batch_size)
        differences = layer_errors = None
        seconds = layer_seconds = 0.0
        if fisher:
            differences, seconds = self._measured_once(
                f"{seed}-{most}", lambda: compression.differences(part, seed=seed)
            )
        if layers:
            layer_errors, layer_seconds = self._measured_once(
                f"layers-{most}-{'experts' if mxmoe else 'all'}",
                lambda: compression.layer_errors(part, experts_only=mxmoe),
            )
        forwards, backwards = forwards * batches, backwards * batches
        diagonal, diagonal_seconds = None, 0.0
        if entrant.prior and compression.has_diagonal_losses:
            some = text.select(slice(0, diagonal_sequences(most)))
            diagonal, diagonal_seconds = self._measured_once(
                f"diagonal-{seed}-{len(some)}", lambda: compression.diagonal_losses(some, seed=seed)
            )
            # A forward and a backward, and the outputs under every option.
            measured = -(-len(some) // config.batch_size)
            forwards += (1 + len(compression.plan.options)) * measured
            backwards += measured
        return _Prepared(
            differences, layer_errors, diagonal, forwards, backwards,
            seconds + layer_seconds + diagonal_seconds,
        )  # fmt: skip

    def _measured_once(self, name: str, measure: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """A table shared by searches, and the seconds that its measurement took."""
        folder = make_folder(self.config.folder() / "sensitivities")
        path = folder / f"{name}.safetensors"
        if not path.exists():
            began = time.perf_counter()
            found = measure()
            seconds = time.perf_counter() - began
            # Workers that need it at the same time each measure it, with the same result.
            write_tensors_atomic(path, {"table": found}, {"seconds": str(seconds)}, shared=True)
        with safe_open(path, "pt") as file:
            return file.get_tensor("table"), float(file.metadata()["seconds"])

    def _amounts(
        self, result: SearchResult, evaluator: AllocationEvaluator, problem: AllocationProblem
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"bits_exact": str(self.compression.average_width(result.allocation))}
        if self.compression.plan.target is not None:
            costs, rows = self.compression.costs("size"), np.arange(problem.num_groups)
            found["bytes"] = costs.fixed + int(costs.matrix[rows, np.asarray(result.allocation)].sum())
        if self.config.tasks:
            with self.compression.apply(result.allocation) as model:
                found["tasks"] = measure_tasks(model, self.config.tasks, self.config.limit, self.config.seed)
        return found


class ExpertContest(Contest):
    """Methods for choosing experts; every seed has its own text and scores."""

    def __init__(self, config: ComparePruneConfig) -> None:
        self.config: ComparePruneConfig = config
        self.allowance = Allowance(config.tokens or default_tokens(config))
        super().__init__(config)
        self._prepared: tuple[int, DataSplits, AllocationEvaluator] | None = None

    def prepare(self, seed: int) -> tuple[DataSplits, AllocationEvaluator]:
        """Text, scores and evaluator of a seed."""
        if self._prepared is None or self._prepared[0] != seed:
            data = build_data(dataclasses.replace(self.config, seed=seed), self.planned.loaded.tokenizer)
            self.compression.score_experts(data.search)
            self._prepared = seed, data, AllocationEvaluator(self.compression, data.evaluation)
        return self._prepared[1:]

    def problem(self, budget: str) -> AllocationProblem:
        """The problem; a pruning comparison has one budget."""
        return self.planned.problem

    def _budget_label(self, budget: str) -> str:
        experts = self.planned.problem.num_groups
        return f"{experts - self.planned.kept_experts} of {experts} experts pruned"

    def describe(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Title, allowance and full model, whose perplexity is a mean over the seeds' texts."""
        known = {entry["seed"]: entry["full_perplexity"] for entry in entries}
        return {
            "title": self.config.model,
            "tokens": self.allowance.tokens,
            "seconds": None,
            "full_model": {"perplexity": statistics.fmean(known.values())},
        }

    def search(
        self, job: SearchJob, problem: AllocationProblem, curve: _Curve | None, before: np.ndarray | None
    ) -> tuple[SearchResult, _Prepared]:
        """Run a method within its share of the allowance."""
        assert self.allowance.tokens is not None
        return self.run(job.label.partition("@")[0], job.seed, int(job.share * self.allowance.tokens))

    def run(self, method: str, seed: int, tokens: int) -> tuple[SearchResult, _Prepared]:
        """Run a method with a seed and an allowance of tokens."""
        data, _ = self.prepare(seed)
        entrant = ExpertEntrant.parse(method)
        allowance = tokens // self.tokens_per_batch
        prepared = self._sense(entrant, data.search, seed, allowance)
        selection = data.selection
        if prepared.forwards and allowance < _SHORT:
            # No budget for steps: only the starting points are compared, on as much text as the allowance permits.
            left = (allowance - prepared.evaluations) // _START_CANDIDATES
            selection = selection.select(slice(0, max(left, 1) * self.config.batch_size))
            settings = {**search_settings(self.config), "steps": 0, "refine": 0, "seed": seed}
            searcher = make_searcher(entrant.method, settings)
        else:
            searcher = entrant.make(allowance - prepared.evaluations, seed, self.config)
        with self.compression.objective(data.search, selection) as objective:
            result: SearchResult = searcher.search(
                self.planned.problem, objective, **self._search_inputs(entrant)
            )
        return result, prepared

    def _sense(self, entrant: ExpertEntrant, data: CalibrationSet, seed: int, allowance: int) -> _Prepared:
        """Compute the gradients for a prior from sensitivities."""
        config, compression = self.config, self.compression
        compression.scores.pop("fisher", None)  # measured by another search, on another allowance
        usual = "none" if entrant.method == PLAIN else config.start
        if not entrant.gradient_search or (entrant.score or usual) != "fisher":
            return _Prepared()
        share = _SENSITIVITY_SHORT if allowance < _SHORT else _SENSITIVITY
        most = max(int(share * allowance / 3), 1) * config.batch_size
        count = min(config.sensitivity, most, len(data))
        compression.sense_removal(data.select(slice(0, count)), seed)
        batches = -(-count // config.batch_size)
        return _Prepared(forwards=batches, backwards=batches)

    def _search_inputs(self, entrant: ExpertEntrant) -> dict[str, Tensor]:
        config, compression = self.config, self.compression
        if not entrant.gradient_search:
            # Baselines use raw scores; EvoESAP orders experts within a layer by REAP, as published.
            return {"prior": score_table(compression.scores[entrant.score or "reap"])}
        if entrant.score is not None:
            return {"prior": compression.logits_of_scores(entrant.score, config.strength, config.prior_scale)}
        start = "none" if entrant.method == PLAIN else config.start
        return compression.search_inputs(self.planned.problem, start, config.strength, config.prior_scale)

    def _amounts(
        self, result: SearchResult, evaluator: AllocationEvaluator, problem: AllocationProblem
    ) -> dict[str, Any]:
        return {
            "full_perplexity": evaluator.row("full model", None, problem)["perplexity"],
            "kept_per_layer": [len(layer) for layer in self.compression.kept(result.allocation)],
        }


class _Curve:
    """Intermediate results of a search at a few shares of its allowance: choices by tokens spent."""

    def __init__(self, share: float, allowance: Allowance) -> None:
        self._tokens = None if allowance.tokens is None else share * allowance.tokens
        self._seconds = None if allowance.seconds is None else share * allowance.seconds
        self._due = list(_CURVE_SHARES)
        self.points: dict[int, np.ndarray] = {}

    def see(self, tokens: int, seconds: float, incumbent: Callable[[], np.ndarray | None]) -> None:
        """Record the first result after each share of tokens or seconds, whichever is reached first."""
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


def default_tokens(config: CompareConfig) -> int:
    """Tokens that RCO forwards with these settings, a backward counted as two."""
    scored = isinstance(config, ComparePruneConfig) and config.start != "fisher"  # without gradients
    sensitivity = 0 if scored else config.sensitivity
    gradients = sensitivity + config.steps * config.samples * config.batch_size
    forwards = config.selection * (MOST_CANDIDATES + config.refine_passes)
    return (3 * gradients + forwards) * config.length


def make_contest(config: CompareConfig) -> Contest:
    """The contest of a configuration; called in every process of a comparison."""
    return WidthContest(config) if isinstance(config, CompareQuantizeConfig) else ExpertContest(config)


def list_jobs(config: CompareConfig) -> list[SearchJob | SweepJob]:
    """All jobs, seed by seed, so that an interrupted comparison has complete seeds."""
    listed = parse_methods(config.methods)
    if config.seeds < 1:
        raise ValueError(f"`seeds` must be at least 1, got {config.seeds}.")
    seeds = range(config.seed, config.seed + config.seeds)
    if isinstance(config, ComparePruneConfig):
        for _, name, _ in listed:
            ExpertEntrant.parse(name)
        return [
            SearchJob(config.requested, label, share, seed) for seed in seeds for label, _, share in listed
        ]
    for label, _, _ in listed:
        Entrant.parse(label)
    jobs: list[SearchJob | SweepJob] = []
    for seed in seeds:
        if config.sweep:
            jobs.append(SweepJob(tuple(config.front()), seed))
        for budget in config.budget_list():
            for label, name, share in listed:
                if seed == seeds[0] or not is_fixed(name):
                    jobs.append(SearchJob(budget, label, share, seed, config.curves and seed == seeds[0]))
    return jobs


def compare(config: CompareConfig, progress: Progress | None = None) -> Comparison:
    """Run the jobs without a result in the folder; write tables and plots.

    Raises:
        ValueError: Every search failed.
    """
    progress = progress or Silent()
    jobs = list_jobs(config)
    if isinstance(config, CompareQuantizeConfig):
        read_tasks(config.tasks, config.limit)  # fail before the searches
        folder = config.folder()
        config = dataclasses.replace(config, out=folder, store=config.store or folder / "candidates")
    contest = make_contest(config)
    planned = contest.planned
    if isinstance(config, ComparePruneConfig):
        folder = run_folder(config, planned.budget, prefix="compare-")
    with open_run(config, folder) as run:
        if not planned.compression.plan.removes_only:
            contest.compression.on_progress = progress.stage("candidates")
        run.write_problem(planned.problem)
        contest.prepare(config.seed)
        results, failed = run_jobs(
            jobs,
            run.folder / "jobs",
            make_contest,
            config,
            workers=config.workers or fitting_workers(planned.estimate, config.threads),
            threads=config.threads,
            here=contest,
            on_done=progress.stage("comparison"),
        )
        for name, reason in failed.items():
            progress.message(f"{name} failed: {reason}")
        if not results:
            raise ValueError(_nothing_to_compare(failed))
        entries = [entry for job in jobs if job.name in results for entry in results[job.name]["entries"]]
        about = {**contest.describe(entries), "failed": failed}
        draw = draw_divergence if isinstance(config, ComparePruneConfig) else draw_comparison
        rows, plots = write_comparison(run.folder, about, entries, draw)
        return Comparison(rows, entries, failed, run.folder, plots)


def fitting_workers(expected: Estimate, threads: int) -> int:
    """Number of processes that fit the cores and the free memory of this machine; one on a GPU."""
    if expected.on_gpu:
        return 1
    fitting, free = available_cores() // threads, free_memory()
    if free is not None:
        fitting = min(fitting, free // (expected.memory + _PROCESS))
    return max(1, fitting)


def _nothing_to_compare(failed: Mapping[str, str]) -> str:
    """Message with the failed jobs grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed.items():
        by_reason.setdefault(reason, []).append(name)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    return f"No search succeeded, so there is nothing to compare. {reasons}"
