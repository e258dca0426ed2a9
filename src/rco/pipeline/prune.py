"""From a mixture-of-experts model and a budget to a smaller checkpoint: scores, search, evaluation, export, report.

Every stage leaves its result in the run's folder and is skipped when it is there, so that a run that was stopped
anywhere goes on where it was and ends the same.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rco import tables
from rco.backends.base import Budget
from rco.backends.expert_problem import ExpertBudgets
from rco.backends.expert_pruning import ExpertPruningBackend
from rco.core.problem import Allocation, AllocationProblem, InfeasibleBudgetError
from rco.core.result import SearchResult
from rco.data.calibration import CalibrationSet, DataSplits, build_splits
from rco.data.sources import resolve_source
from rco.evaluation.size import checkpoint_size, read_headers
from rco.export.pruned_experts import export_pruned
from rco.models.loading import LoadedModel, load_model
from rco.models.moe import moe_layers
from rco.models.moe_prune import keep_plan
from rco.models.precision import computing_in
from rco.pipeline.common import make_searcher, run_search, slug, timed
from rco.pipeline.configs import PruneConfig
from rco.pipeline.estimate import Estimate
from rco.pipeline.expert_judge import ExpertJudge, pick_at_random, pick_by_score
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.prune_estimate import estimate_pruning
from rco.report import build_report
from rco.runs import RunDirectory

__all__ = ["PlannedPruning", "PruneOutcome", "build_data", "plan_pruning", "prune", "search_settings"]

# Largest difference between the logits of the checkpoint and of the evaluated model, relative to the largest logit.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class PlannedPruning:
    """A pruning that has been checked as far as it can be without work."""

    loaded: LoadedModel
    backend: ExpertPruningBackend
    problem: AllocationProblem
    budget: Budget
    folder: Path
    estimate: Estimate

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


@dataclass(frozen=True)
class PruneOutcome:
    """Where everything is."""

    folder: Path
    result: SearchResult
    metrics: dict[str, Any]
    report: Path
    checkpoint: Path | None


def parse_budget(config: PruneConfig) -> Budget:
    """The one budget that was asked for; a number with a point is a fraction and must lie below 1."""
    budget = Budget.parse(experts=config.experts, parameters=config.parameters, size=config.size)
    if budget.kind == "experts" and budget.amount >= 1 and not str(config.experts).strip().isdigit():
        raise ValueError(
            f"--experts is a fraction between 0 and 1 or a whole number of experts, got {config.experts}."
        )
    return budget


def plan_pruning(config: PruneConfig, progress: Progress | None = None) -> PlannedPruning:
    """Load the model, form the problem, and refuse what cannot work, before anything expensive."""
    budget = parse_budget(config)
    tables.load(tables.METHODS, config.searcher, "method")
    for spec in (config.data, config.eval_data):
        if spec is not None:
            resolve_source(spec)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    backend = ExpertPruningBackend(
        loaded,
        uniform=config.uniform,
        min_per_layer=config.min_per_layer,
        locks=config.lock,
        mode=config.gates,
        prior=config.prior,
        prior_scale=config.prior_scale,
        prior_strength=config.prior_strength,
        loss=config.loss,
        top_k=config.top_k or None,
        batch_size=config.batch_size,
        checkpointing=config.checkpointing,
        on_progress=progress.stage("scores") if progress else None,
    )
    problem = backend.problem(budget)
    if config.padded:
        obstacle = keep_plan(loaded.model, torch.ones(len(backend.names))).pad_obstacle
        if obstacle is not None:
            raise ValueError(f"--padded is not possible here: {obstacle}.")
    name = (
        f"{Path(config.model).name}-{budget.kind}-{requested(config)}{'-uniform' if config.uniform else ''}"
    )
    folder = config.out or Path("runs") / slug(name)
    return PlannedPruning(loaded, backend, problem, budget, folder, estimate_pruning(backend, config))


def requested(config: PruneConfig) -> str:
    """The budget as it was typed."""
    return str(next(v for v in (config.experts, config.parameters, config.size) if v is not None))


def build_data(config: PruneConfig, tokenizer: Any, spec: str | None = None) -> DataSplits:
    """Search, selection and evaluation text; ``spec`` replaces the calibration text."""
    return build_splits(
        spec or config.data,
        tokenizer,
        search=config.sequences,
        selection=config.selection,
        evaluation=config.evaluation,
        length=config.length,
        seed=config.seed,
        evaluation_spec=config.eval_data or (config.data if spec else None),
    )


def prune(config: PruneConfig, progress: Progress | None = None) -> PruneOutcome:
    """Run the whole job; with ``config.resume``, the rest of it."""
    progress = progress or Silent()
    planned = plan_pruning(config, progress)
    open_run = RunDirectory.resume if config.resume else RunDirectory.create
    with open_run(planned.folder, config.identity()) as run:
        run.write_problem(planned.problem)
        data = build_data(config, planned.loaded.tokenizer)
        _score(planned.backend, data.search, run)
        result = _search(config, planned, data, run, progress)
        run.update_metrics(_describe(config, planned, result, run))
        _judge(planned, data, result, run, progress)
        if config.by_domain:
            _by_domain(config, planned, data, run, progress)
        checkpoint = _export(config, planned, data, result, run, progress)
        report = build_report([run], run.folder / "report.html")
        return PruneOutcome(run.folder, result, run.metrics, report, checkpoint)


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


def search_settings(config: PruneConfig) -> dict[str, Any]:
    """What a searcher may be told."""
    return {
        "steps": config.steps,
        "samples": config.samples,
        "lr": config.lr,
        "tau": tuple(config.tau),
        "refine": config.refine,
        "seed": config.seed,
    }


def _search(
    config: PruneConfig, planned: PlannedPruning, data: DataSplits, run: RunDirectory, progress: Progress
) -> SearchResult:
    if run.finished:
        result = run.result
        planned.backend.keep_of(result.allocation)  # a mask of another model is an error here
        return result
    searcher = make_searcher(config.searcher, search_settings(config))
    with timed(run, "search"), planned.backend.objective(data.search, data.selection) as objective:
        return run_search(run, searcher, planned.problem, objective, planned.backend.prior(), progress)


def _judge(
    planned: PlannedPruning, data: DataSplits, result: SearchResult, run: RunDirectory, progress: Progress
) -> None:
    """Evaluate the result beside the full model and what plain scores would have chosen."""
    rows = list(run.metrics.get("evaluation", []))
    done = {row["name"] for row in rows}
    judge = ExpertJudge(planned.backend, data.evaluation)
    wanted = _allocations_to_judge(planned, result, progress)
    count = progress.stage("evaluation")
    with timed(run, "evaluation"):
        for position, (name, allocation) in enumerate(wanted):
            if name not in done:
                chosen = allocation is result.allocation
                rows.append({**judge.row(name, allocation, planned.problem), "chosen": chosen})
                run.update_metrics({"evaluation": rows})
            count(position + 1, len(wanted))


def _allocations_to_judge(
    planned: PlannedPruning, result: SearchResult, progress: Progress
) -> list[tuple[str, Allocation | None]]:
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
    listed.append((result.method.upper() if result.method == "rco" else result.method, result.allocation))
    return listed


def _by_domain(
    config: PruneConfig, planned: PlannedPruning, data: DataSplits, run: RunDirectory, progress: Progress
) -> None:
    """Search once on every domain alone; the models that result are measured on every domain."""
    moe = dict(run.metrics["moe"])
    measured: dict[str, Any] = dict(moe.get("by_domain", {}))
    judge = ExpertJudge(planned.backend, data.evaluation)
    domains = list(dict.fromkeys(data.search.domains))
    count = progress.stage("domains")
    backend = planned.backend
    shared = {name: list(layers) for name, layers in backend.scores.items()}
    with timed(run, "domains"):
        for position, domain in enumerate(domains):
            if domain not in measured:
                own = build_data(config, planned.loaded.tokenizer, spec=domain)
                found = backend.collect(own.search)
                backend.set_scores({name: list(found.score(name)) for name in shared})  # type: ignore[arg-type]
                searcher = make_searcher(config.searcher, search_settings(config))
                with backend.objective(own.search, own.selection) as objective:
                    result = searcher.search(planned.problem, objective, prior=backend.prior())
                measured[domain] = judge.row(domain, result.allocation, planned.problem)["by_domain"]
                moe["by_domain"] = measured
                run.update_metrics({"moe": moe})
            count(position + 1, len(domains))
    backend.set_scores(shared)


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
    if target.exists():
        shutil.rmtree(target)  # written, but not yet checked, when the run was stopped
    count = progress.stage("export")
    count(0, 2)
    with timed(run, "export"):
        keep = planned.backend.keep_of(result.allocation)
        written = export_pruned(
            planned.loaded.model, keep, target, padded=config.padded, tokenizer=planned.loaded.tokenizer
        )
        count(1, 2)
        size = checkpoint_size(target)
        headers = read_headers(target)
        run.update_metrics(
            {
                "export": {
                    "format": f"pruned, {written.shape.replace('_', ' ')}",
                    "shape": written.shape,
                    "reason": written.reason,
                    "path": str(target),
                    "files": size["files"],
                    "tensors": {name: entry.nbytes for name, entry in headers.items()},
                    "total_bytes": size["bytes"],
                }
            }
        )
        run.update_metrics({"certificate": _certify(config, planned, data, result, target, size["bytes"])})
    count(2, 2)
    return target


def _certify(
    config: PruneConfig,
    planned: PlannedPruning,
    data: DataSplits,
    result: SearchResult,
    folder: Path,
    written_bytes: int,
) -> dict[str, Any]:
    """Read the checkpoint back: its counts, its size, and its logits beside those of the evaluated model."""
    backend = planned.backend
    reloaded = load_model(folder, device=config.device)
    counts = [layer.num_experts for layer in moe_layers(reloaded.model)]
    kept = int(backend.keep_of(result.allocation).sum())
    if not config.padded and sum(counts) != kept:
        raise RuntimeError(
            f"Internal error: the checkpoint has {sum(counts)} experts, {kept} were to stay; please report this."
        )
    tokens = data.evaluation.tokens[:1].to(planned.loaded.device)
    with computing_in(reloaded.model, backend.compute_dtype), torch.no_grad():
        found = reloaded.model(tokens).logits
    with backend.apply(result.allocation):
        expected = planned.loaded.model(tokens).logits
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    allowed = _TOLERANCE.get(backend.compute_dtype, _LOW_PRECISION_TOLERANCE) * scale
    if not difference <= allowed:
        raise RuntimeError(
            f"Internal error: the checkpoint's logits differ from the evaluated model's by {difference:.3g} "
            f"(largest logit {scale:.3g}); please report this."
        )
    used: dict[str, Any] = {"experts": kept, "parameters": None, "size": written_bytes}
    used["parameters"] = sum(p.numel() for p in reloaded.model.parameters())
    limit = sum(planned.problem.unit_budgets) if planned.budget.kind == "experts" else planned.budget.amount
    if used[planned.budget.kind] > limit:
        raise RuntimeError(
            f"Internal error: the checkpoint takes {used[planned.budget.kind]:,} where {planned.budget} allow "
            f"{float(limit):,.0f}; please report this."
        )
    return {
        "used": used[planned.budget.kind],
        "allowed": str(limit),
        "checkpoint_bytes": written_bytes,
        "experts": kept,
        "parameters": used["parameters"],
        "logit_difference": difference,
        "largest_logit": scale,
    }


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
        "model": {
            "name": config.model,
            "parameters": sum(p.numel() for p in planned.loaded.model.parameters()),
            "blocks": len(planned.loaded.layout.blocks(planned.loaded.model)),
            "dtype": str(planned.loaded.dtype).removeprefix("torch."),
            "fingerprint": planned.loaded.fingerprint,
        },
        "budget": {
            "kind": planned.budget.kind,
            "requested": requested(config),
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
