"""From a mixture-of-experts model and a budget to a smaller checkpoint: scores, search, evaluation, export, report.

Every stage leaves its result in the run's folder and is skipped when it is there, so that a run that was stopped
anywhere goes on where it was and ends the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rco.compression.base import Budget
from rco.compression.expert_problem import ExpertBudgets
from rco.compression.expert_pruning import ExpertPruningBackend
from rco.core.problem import Allocation, InfeasibleBudgetError
from rco.core.result import SearchResult
from rco.data.calibration import CalibrationSet, DataSplits
from rco.distributed import Ranks, join
from rco.models.loading import LoadedModel
from rco.models.moe.prune import keep_plan
from rco.models.precision import compute_dtype
from rco.pipeline.checkpoints import export_pruning
from rco.pipeline.common import (
    Outcome,
    Planned,
    assist,
    build_data,
    check_sources,
    describe_model,
    judge_all,
    load_for,
    open_run,
    run_folder,
    search_stage,
    shared_objective,
    timed,
)
from rco.pipeline.configs import PruneConfig
from rco.pipeline.expert_choices import pick_at_random, pick_by_score
from rco.pipeline.judge import Judge
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.prune_estimate import estimate_pruning
from rco.pipeline.searchers import configured_searcher
from rco.report import build_report
from rco.runs import RunDirectory

__all__ = ["PlannedPruning", "plan_pruning", "prune"]


@dataclass(frozen=True)
class PlannedPruning(Planned[ExpertPruningBackend]):
    """A pruning that has been checked as far as it can be without work."""

    @property
    def kept(self) -> int:
        """Experts that the budget lets stay (at most, for budgets of parameters or bytes)."""
        share = [int(costs) for costs in self.problem.unit_costs[0].max(axis=1)]
        if self.budget.kind == "experts":
            return sum(self.problem.unit_budgets)
        room = sum(self.problem.unit_budgets)
        kept = 0
        for cost in sorted(share):
            room -= cost
            if room < 0:
                break
            kept += 1
        return kept


def parse_budget(config: PruneConfig) -> Budget:
    """The one budget that was asked for; a number with a point is a fraction and must lie below 1."""
    budget = Budget.parse(**config.budgets())
    if budget.kind == "experts" and budget.amount >= 1 and not str(config.experts).strip().isdigit():
        raise ValueError(
            f"`experts` is a fraction between 0 and 1 or a whole number of experts, got {config.experts}."
        )
    return budget


def plan_pruning(
    config: PruneConfig,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    given: LoadedModel | None = None,
) -> PlannedPruning:
    """Load the model, form the problem, and refuse what cannot work, before anything expensive.

    ``given`` is used in place of the model that ``config`` names.
    """
    budget = parse_budget(config)
    configured_searcher(config)
    check_sources(config)
    ranks = ranks or Ranks()
    loaded = load_for(config, ranks, given)
    backend = ExpertPruningBackend(
        loaded,
        uniform=config.uniform,
        min_per_layer=config.min_per_layer,
        locks=config.lock,
        mode=config.gates,
        prior=config.start,
        prior_scale=config.prior_scale,
        prior_strength=config.prior_strength,
        sensitivity=config.sensitivity,
        loss=config.loss,
        top_k=config.top_k or None,
        batch_size=config.batch_size,
        checkpointing=config.checkpointing,
        graphs=config.graphs,
        compute_dtype=compute_dtype(config.compute, loaded.device, loaded.dtype),
        on_progress=progress.stage("scores") if progress else None,
    )
    problem = backend.problem(budget)
    if config.padded:
        obstacle = keep_plan(loaded.model, torch.ones(len(backend.names))).pad_obstacle
        if obstacle is not None:
            raise ValueError(f"`padded` is not possible here: {obstacle}.")
    folder = run_folder(config, budget)
    return PlannedPruning(
        loaded, backend, problem, budget, folder, estimate_pruning(backend, config), ranks=ranks
    )


def prune(
    config: PruneConfig,
    progress: Progress | None = None,
    given: LoadedModel | None = None,
    *,
    checkpoint: bool = True,
) -> Outcome | None:
    """Run the whole job, as :func:`rco.pipeline.quantize.quantize` does."""
    progress = progress or Silent()
    with join(config.rank_timeout) as ranks:
        planned = plan_pruning(config, progress, ranks, given)
        data = build_data(config, planned.loaded.tokenizer)
        ranks.require_same("model or data", (planned.loaded.fingerprint, data.search.fingerprint))
        if ranks.first:
            return _lead(config, planned, data, progress, checkpoint)
        assist(config, planned, data)
        return None


def _lead(
    config: PruneConfig, planned: PlannedPruning, data: DataSplits, progress: Progress, checkpoint: bool
) -> Outcome:
    with open_run(config, planned.folder, planned.loaded) as run:
        run.write_problem(planned.problem)
        _score(planned.backend, data.search, run)
        result = search_stage(config, planned, data, planned.backend.beliefs, run, progress)
        run.update_metrics(_describe(config, planned, result, run))
        judge_all(planned, data, _allocations_to_judge(planned, progress), result, run, progress)
        if config.by_domain:
            _by_domain(config, planned, data, run, progress)
        planned.ranks.dismiss()
        written = _export(config, planned, data, result, run, progress) if checkpoint else None
        report = build_report([run], run.folder / "report.html")
        return Outcome(planned, run.folder, result, run.metrics, report, written)


# ------------------------------------------------------------------------ stages


def _score(backend: ExpertPruningBackend, calibration: CalibrationSet, run: RunDirectory) -> None:
    saved = run.metrics.get("scores")
    if saved is not None:
        backend.set_scores(saved)
        return
    with timed(run, "scores"):
        backend.prepare(calibration)
    run.update_metrics(
        {"scores": {name: [layer.tolist() for layer in layers] for name, layers in backend.scores.items()}}
    )


def _allocations_to_judge(planned: PlannedPruning, progress: Progress) -> list[tuple[str, Allocation | None]]:
    """The full model, chance, and what plain scores would have chosen."""
    backend, problem = planned.backend, planned.problem
    listed: list[tuple[str, Allocation | None]] = [("full model", None)]
    listed.append(("random", pick_at_random(problem, seed=0)))
    for label, score in (("frequency", "frequency"), ("REAP", "reap")):
        for per_layer in (True, False):
            name = f"{label}, {'same share per layer' if per_layer else 'over the model'}"
            if per_layer is False and problem.block_index is not None:
                continue  # with a budget per layer both are the same
            try:
                picked = pick_by_score(problem, backend.scores[score], backend.blocks, per_layer=per_layer)
            except InfeasibleBudgetError as error:
                progress.message(f"{name} is left out of the comparison: {error}")
                continue
            listed.append((name, picked))
    return listed


def _by_domain(
    config: PruneConfig, planned: PlannedPruning, data: DataSplits, run: RunDirectory, progress: Progress
) -> None:
    """Search once on every domain alone; the models that result are measured on every domain."""
    moe = dict(run.metrics["moe"])
    measured: dict[str, Any] = dict(moe.get("by_domain", {}))
    judge = Judge(planned.backend, data.evaluation)
    domains = list(dict.fromkeys(data.search.domains))
    count = progress.stage("domains")
    backend = planned.backend
    before = {name: list(layers) for name, layers in backend.scores.items()}
    with timed(run, "domains"):
        for position, domain in enumerate(domains):
            if domain not in measured:
                own = build_data(config, planned.loaded.tokenizer, spec=domain)
                backend.score(own.search)
                searcher = configured_searcher(config)
                with shared_objective(planned, own, domain) as objective:
                    result = searcher.search(planned.problem, objective, **backend.beliefs())
                measured[domain] = judge.row(domain, result.allocation, planned.problem)["by_domain"]
                moe["by_domain"] = measured
                run.update_metrics({"moe": moe})
            count(position + 1, len(domains))
    backend.set_scores(before)


def _export(
    config: PruneConfig,
    planned: PlannedPruning,
    data: DataSplits,
    result: SearchResult,
    run: RunDirectory,
    progress: Progress,
) -> Path | None:
    if config.format == "none":
        return None
    target = run.folder / "model"
    if "certificate" in run.metrics and target.exists():
        return target
    count = progress.stage("export")
    count(0, 1)
    with timed(run, "export"):
        tokens = data.evaluation.tokens[:1]
        format = "pruned-padded" if config.padded else config.format
        run.update_metrics(export_pruning(planned, result.allocation, format, target, tokens, overwrite=True))
    count(1, 1)
    return target


# ------------------------------------------------------------------- description


def _describe(
    config: PruneConfig, planned: PlannedPruning, result: SearchResult, run: RunDirectory
) -> dict[str, Any]:
    backend, problem = planned.backend, planned.problem
    kept = backend.kept(result.allocation)
    total, stays = len(backend.names), sum(map(len, kept))
    used = sum(problem.units(result.allocation))
    limit = sum(problem.unit_budgets)
    fixed = ExpertBudgets.of(planned.loaded.model, backend.layers, planned.budget.kind).fixed
    unit = {"experts": "experts kept", "parameters": "parameters", "size": "bytes"}[planned.budget.kind]
    low, high = problem.feasible_range
    ends = [fixed + (sum(end) if isinstance(end, tuple) else end) for end in (low, high)]
    reap = sum(
        len(set(layer) & set(torch.topk(score, len(layer)).indices.tolist()))
        for layer, score in zip(kept, backend.scores["reap"], strict=True)
    )
    layers = [
        {
            "layer": layer.decoder_index,
            "name": layer.name,
            "experts": layer.num_experts,
            "top_k": layer.top_k,
            "kept": stay,
            "scores": {name: scores[layer.index].tolist() for name, scores in backend.scores.items()},
        }
        for layer, stay in zip(backend.layers, kept, strict=True)
    ]
    before = run.metrics.get("moe", {})
    return {
        "kind": "expert-pruning",
        "model": describe_model(config.model, planned.loaded),
        "budget": {
            "kind": planned.budget.kind,
            "requested": config.requested,
            "effective": f"{limit + fixed:,} {unit}",
            "used": f"{used + fixed:,} {unit}; {total - stays} of {total} experts pruned",
            "unit": unit,
            "budget_units": limit + fixed,
            "used_units": used + fixed,
            "range": [f"{end:,} {unit}" for end in ends],
            "experts": total,
            "pruned": total - stays,
        },
        "moe": {**before, "layers": layers, "overlap_with_reap": reap / stays},
    }
