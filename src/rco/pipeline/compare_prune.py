"""Ways of choosing experts, side by side: searches at equal tokens, and the plain scores."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rco import tables
from rco.compression.expert_pruning import SCORES, ExpertPruningBackend, score_table
from rco.core.result import SearchResult
from rco.core.search import MOST_CANDIDATES, GumbelSearch
from rco.data.calibration import CalibrationSet, DataSplits
from rco.pipeline.common import build_data, open_run, run_folder, slug
from rco.pipeline.compare import Comparison, fitting_workers, parse_methods, run_comparison, seeds_of
from rco.pipeline.compare_figures import draw_divergence
from rco.pipeline.configs import PLAIN, ComparePruneConfig
from rco.pipeline.judge import Judge
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.prune import PlannedPruning, plan_pruning
from rco.pipeline.searchers import make_searcher, search_settings

__all__ = ["PruneContest", "PruneJob", "compare_pruning", "default_tokens", "resolve_method"]

# Shares of an allowance for the sensitivities that a gradient search starts from: a long one, and a short one.
_SENSITIVITY, _SENSITIVITY_SHORT = 0.2, 0.6
_SHORT = 400  # evaluations below which nothing is left for steps where sensitivities are known
_START_CANDIDATES = 4  # before its first step: the uniform assignment, the knapsacks of prior and proxy
# From all experts down is the direction that pruning goes; up from too few for the router is none.
_ALIASES = {"greedy": "greedy-down"}
_BY_ACCEPTANCE = "evoesap-acceptance"


@dataclass(frozen=True)
class Entrant:
    """A name of ``--methods`` taken apart.

    Attributes:
        method: Name in the table of methods.
        score: Score that the method picks, orders or starts by; None for its usual prior, which of Algorithm 1 as
            printed is none.
        settings: What the name says beyond that.
    """

    method: str
    score: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def resolve_method(name: str) -> Entrant:
    """A method of the table, or a score (``reap``, ``reap-global``).

    ``evoesap-SCORE`` orders by another score, ``evoesap-acceptance`` breeds by expected acceptance.

    Raises:
        ValueError: The name is none of these.
    """
    score, _, tail = name.partition("-")
    if score in SCORES and tail in ("", "global"):
        return Entrant("top-global" if tail else "top-per-block", score)
    if name == _BY_ACCEPTANCE:
        return Entrant("evoesap", settings={"fitness": "acceptance"})
    method, _, score = name.rpartition("-")
    if score in SCORES and method in tables.METHODS:
        return Entrant(_ALIASES.get(method, method), score)
    if name not in tables.METHODS:
        derived = [f"{s}-global" for s in SCORES] + [f"evoesap-{s}" for s in SCORES]
        raise tables.unknown_name("method", name, [*tables.METHODS, *SCORES, *derived, _BY_ACCEPTANCE])
    return Entrant(_ALIASES.get(name, name))


@dataclass(frozen=True)
class PruneJob:
    """One method, once, with a share of the tokens."""

    label: str
    method: str
    share: float
    seed: int

    @property
    def name(self) -> str:
        """The job's file."""
        return slug(f"{self.label}-{self.seed}")


def default_tokens(config: ComparePruneConfig) -> int:
    """What RCO forwards with the given settings, a backward counted as two."""
    evaluations = 3 * config.steps * config.samples + config.selection * (
        MOST_CANDIDATES + config.refine_passes
    )
    if config.start == "fisher":
        evaluations += 3 * config.sensitivity
    return evaluations * config.batch_size * config.length


class PruneContest:
    """One pruning problem; the data of every seed are its own, and so are its scores."""

    def __init__(self, config: ComparePruneConfig, planned: PlannedPruning) -> None:
        self.config, self.planned = config, planned
        self.tokens = config.tokens or default_tokens(config)
        self.tokens_per_batch = config.batch_size * config.length
        experts = len(planned.backend.names)
        self.budget = f"{experts - planned.kept} of {experts} experts pruned"
        self._prepared: tuple[int, DataSplits, Judge] | None = None

    def prepare(self, seed: int) -> tuple[DataSplits, Judge]:
        """Data, scores and the judge of a seed."""
        if self._prepared is None or self._prepared[0] != seed:
            backend = self.planned.backend
            data = build_data(dataclasses.replace(self.config, seed=seed), self.planned.loaded.tokenizer)
            found = backend.collect(data.search)
            backend.set_scores({name: list(found.score(name)) for name in SCORES})
            self._prepared = seed, data, Judge(backend, data.evaluation)
        return self._prepared[1:]

    def run(self, method: str, seed: int, tokens: int) -> SearchResult:
        """Run a method with a seed and an allowance."""
        data, _ = self.prepare(seed)
        entrant = resolve_method(method)
        allowance = tokens // self.tokens_per_batch
        sensed = self._sense(entrant, data.search, seed, allowance)
        selection = data.selection
        if sensed and allowance < _SHORT:
            left = (allowance - 3 * sensed) // _START_CANDIDATES
            selection = selection.select(slice(0, max(left, 1) * self.config.batch_size))
            settings = {**search_settings(self.config), "steps": 0, "refine": 0, "seed": seed}
            searcher = make_searcher(entrant.method, settings)
        else:
            searcher = self._searcher(entrant, seed, allowance - 3 * sensed)
        backend = self.planned.backend
        with backend.objective(data.search, selection) as objective:
            result: SearchResult = searcher.search(
                self.planned.problem, objective, **self._beliefs(backend, entrant, searcher)
            )
        return dataclasses.replace(
            result, forwards=result.forwards + sensed, backwards=result.backwards + sensed
        )

    def _sense(self, entrant: Entrant, data: CalibrationSet, seed: int, allowance: int) -> int:
        """Take the gradients behind a prior of sensitivities; returns the batches that they took."""
        cls = tables.load(tables.METHODS, entrant.method, "method")
        backend = self.planned.backend
        backend.scores.pop("fisher", None)  # another search's, with its own allowance
        usual = "none" if entrant.method == PLAIN else backend.prior_name
        if not issubclass(cls, GumbelSearch) or (entrant.score or usual) != "fisher":
            return 0
        share = _SENSITIVITY_SHORT if allowance < _SHORT else _SENSITIVITY
        most = max(int(share * allowance / 3), 1) * self.config.batch_size
        count = min(self.config.sensitivity, most, len(data))
        backend.scores["fisher"] = backend.sensitivities(data.select(slice(0, count)), seed)
        return -(-count // self.config.batch_size)

    def _beliefs(
        self, backend: ExpertPruningBackend, entrant: Entrant, searcher: Any
    ) -> dict[str, Tensor | None]:
        if isinstance(searcher, GumbelSearch):
            if entrant.score is not None:
                return {"prior": backend.prior_from(entrant.score)}
            return {} if entrant.method == PLAIN else backend.beliefs()
        # Baselines take scores as they are; EvoESAP's order within a layer is REAP's, as published.
        return {"prior": score_table(backend.scores[entrant.score or "reap"])}

    def _searcher(self, entrant: Entrant, seed: int, allowance: int) -> Any:
        """The searcher within the allowance; RCO and its kin with the settings of the configuration."""
        cls = tables.load(tables.METHODS, entrant.method, "method")
        known = {field.name for field in dataclasses.fields(cls)}
        settings: dict[str, Any] = {"generations": self.config.generations}
        if issubclass(cls, GumbelSearch):
            settings |= search_settings(self.config, plain=entrant.method == PLAIN)
            settings["refine"] = None if settings["refine"] else 0
        settings |= {"steps": None, "seed": seed}
        if known & {"generations", "steps", "lazy"}:  # rules have nothing to limit
            settings["max_evaluations"] = allowance
        return make_searcher(entrant.method, {**settings, **entrant.settings})

    def do(self, job: PruneJob) -> dict[str, Any]:
        """The entry of the table that a job makes."""
        result = self.run(job.method, job.seed, int(job.share * self.tokens))
        return {"entries": [self.measure(job.label, job.seed, result)]}

    def measure(self, label: str, seed: int, result: SearchResult) -> dict[str, Any]:
        """What a method found with a seed: KL and perplexity on held-out text under the deployed routing."""
        _, judge = self.prepare(seed)
        row = judge.row(label, result.allocation, self.planned.problem)
        keys = ("kl", "kl_error", "perplexity", "perplexity_error", "by_domain", "experts", "within_budget")
        return {
            "budget": self.budget,
            "label": label,
            "method": result.method,
            "seed": seed,
            **{key: row[key] for key in keys},
            "full_perplexity": judge.row("full model", None, self.planned.problem)["perplexity"],
            "kept_per_layer": [len(layer) for layer in self.planned.backend.kept(result.allocation)],
            "forward_tokens": result.forwards * self.tokens_per_batch,
            "backward_tokens": result.backwards * self.tokens_per_batch,
            "tokens": (result.forwards + 2 * result.backwards) * self.tokens_per_batch,
            "seconds": result.seconds,
            "selection_loss": result.loss,
            "chosen_from": result.chosen_from,
            "choices": result.allocation.tolist(),
        }


def _contest(config: ComparePruneConfig) -> PruneContest:
    return PruneContest(config, plan_pruning(config))


def compare_pruning(config: ComparePruneConfig, progress: Progress | None = None) -> Comparison:
    """Run all methods and seeds that the folder does not hold yet; write tables and plot."""
    progress = progress or Silent()
    listed = parse_methods(config.methods)
    for _, name, _ in listed:
        resolve_method(name)
    seeds = seeds_of(config.seed, config.seeds)
    jobs = [PruneJob(label, name, share, seed) for seed in seeds for label, name, share in listed]
    contest = _contest(config)
    planned = contest.planned

    def describe(entries: list[dict[str, Any]]) -> dict[str, Any]:
        # Every seed has evaluation text of its own.
        known = {entry["seed"]: entry["full_perplexity"] for entry in entries}
        return {
            "title": config.model,
            "tokens": contest.tokens,
            "seconds": None,
            "full_model": {"perplexity": statistics.fmean(known.values())},
        }

    with open_run(config, run_folder(config, planned.budget, prefix="compare-")) as run:
        run.write_problem(planned.problem)
        return run_comparison(
            run,
            jobs,
            _contest,
            config,
            describe,
            progress,
            draw=draw_divergence,
            workers=config.workers or fitting_workers(planned.estimate, config.threads),
            threads=config.threads,
            here=contest,
        )
