"""From a model and a budget to a checkpoint: plan, candidates, search, evaluation, export, report.

Every stage leaves its result in the run's folder and is skipped when it is there, so that a run that was stopped
anywhere goes on where it was and ends the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rco import tables
from rco.backends.base import Budget
from rco.backends.bit_costs import Visits, most_visited
from rco.backends.candidates import CandidateSettings
from rco.backends.plan import ExpertGroups, QuantizationPlan, make_plan
from rco.backends.quantization import QuantizationBackend, routing_visits
from rco.backends.sensitivity import curvature, fisher_differences, logits_from_losses, predicted_losses
from rco.core.knapsack import solve_mckp
from rco.core.problem import Allocation, AllocationProblem
from rco.core.refine import layer_order, spend, uniform_allocation
from rco.core.result import SearchResult
from rco.data.calibration import DataSplits, build_splits
from rco.data.sources import resolve_source
from rco.evaluation.size import average_bits, checkpoint_size
from rco.export.compressed_tensors import check_exportable
from rco.export.engines import validate_for_engine
from rco.folders import atomic_path
from rco.models.loading import LoadedModel, load_model
from rco.models.moe_linears import model_linears, sparse_layers
from rco.pipeline.common import make_searcher, run_search, slug, timed
from rco.pipeline.configs import QuantizeConfig
from rco.pipeline.estimate import Estimate, choose_residency, estimate
from rco.pipeline.expert_widths import describe_experts
from rco.pipeline.judge import Judge
from rco.pipeline.progress import Progress, Silent
from rco.report import build_report
from rco.runs import RunDirectory

__all__ = ["Planned", "QuantizeOutcome", "build_data", "plan_groups", "plan_quantization", "quantize"]


@dataclass(frozen=True)
class Planned:
    """A quantization that has been checked as far as it can be without work."""

    loaded: LoadedModel
    plan: QuantizationPlan
    backend: QuantizationBackend
    problem: AllocationProblem
    budget: Budget
    folder: Path
    estimate: Estimate


@dataclass(frozen=True)
class QuantizeOutcome:
    """Where everything is."""

    folder: Path
    result: SearchResult
    metrics: dict[str, Any]
    report: Path
    checkpoint: Path | None


def plan_quantization(config: QuantizeConfig, progress: Progress | None = None) -> Planned:
    """Load the model, form groups and problem, and refuse what cannot work, before anything expensive."""
    budget = Budget.parse(bits=config.bits, bpw=config.bpw, size=config.size, active_bits=config.active_bits)
    for spec in (config.data, config.eval_data):
        if spec is not None:
            resolve_source(spec)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    # Costs of active bits come from data, and so does what must not be pruned.
    visits = None
    if budget.kind == "active_bits" or config.allow_prune:
        visits = routing_visits(loaded, build_data(config, loaded).search)
    plan = plan_groups(config, loaded, visits)
    residency, memory = choose_residency(loaded, plan, config)
    folder = config.out or Path("runs") / slug(f"{Path(config.model).name}-{budget.kind}-{_amount(config)}")
    backend = QuantizationBackend(
        loaded,
        plan,
        config.store or folder / "candidates",
        settings=CandidateSettings(
            method=config.method,
            damp=config.damp,
            act_order=config.act_order,
            clip=config.clip,
            sweeps=config.sweeps,
            expert_tokens=config.expert_tokens,
        ),
        count=config.count,
        visits=visits,
        loss=config.loss,
        top_k=config.top_k or None,
        batch_size=config.batch_size,
        checkpointing=config.checkpointing,
        overwrite_store=config.overwrite_store,
        memory=residency,
        on_progress=(progress or Silent()).stage("candidates") if progress else None,
    )
    problem = backend.problem(budget)
    if config.serve == "llamacpp" and config.format == "compressed-tensors":
        raise ValueError(
            "llama.cpp loads no compressed-tensors checkpoint; add --format dense, or --format none."
        )
    if config.format == "compressed-tensors":
        schemes = {i.name: [plan.scheme(i, width) for width in plan.packed_widths] for i in plan.linears}
        check_exportable(plan.linears, schemes)
    tables.load(tables.METHODS, config.searcher, "method")
    expected = estimate(loaded, plan, config, residency, memory)
    return Planned(loaded, plan, backend, problem, budget, folder, expected)


def plan_groups(
    config: QuantizeConfig, loaded: LoadedModel, visits: Visits | None = None
) -> QuantizationPlan:
    """Groups and widths of a loaded model; ``visits`` of its experts say which must not be pruned."""
    return make_plan(
        loaded.layout,
        model_linears(loaded.layout, loaded.model, include_head=True),
        widths=_parse_widths(config.widths),
        group_size=config.group_size or None,
        symmetric=config.symmetric,
        serve=config.serve,
        locks=config.lock,
        skips=config.skip,
        ties=config.tie,
        experts=_expert_groups(config),
        allow_prune=config.allow_prune,
        protected=None if visits is None else most_visited(visits, sparse_layers(loaded.model)),
    )


def quantize(config: QuantizeConfig, progress: Progress | None = None) -> QuantizeOutcome:
    """Run the whole job; with ``config.resume``, the rest of it."""
    progress = progress or Silent()
    planned = plan_quantization(config, progress)
    backend = planned.backend
    progress.message(_expectation(planned))
    open_run = RunDirectory.resume if config.resume else RunDirectory.create
    with open_run(planned.folder, config.identity()) as run:
        run.write_problem(planned.problem)
        data = build_data(config, planned.loaded)
        with timed(run, "candidates"):
            backend.look_at_routing(data.search)
            backend.prepare(data.search)
        differences = _sensitivities(config, backend, data, progress, run)
        sensitivities = predicted_losses(differences).numpy()
        backend.curvature = curvature(differences)
        result = _search(config, planned, data, sensitivities, run, progress)
        metrics = _describe(config, planned, result, sensitivities)
        run.update_metrics(metrics)
        _judge(config, planned, data, result, sensitivities, run, progress)
        checkpoint = _export(config, planned, result, run, progress)
        report = build_report([run], run.folder / "report.html")
        return QuantizeOutcome(run.folder, result, run.metrics, report, checkpoint)


# ------------------------------------------------------------------------ stages


def build_data(config: QuantizeConfig, loaded: LoadedModel) -> DataSplits:
    """The sequences of a run: for candidates and gradients, for choosing, for judging."""
    return build_splits(
        config.data,
        loaded.tokenizer,
        search=config.sequences,
        selection=config.selection,
        evaluation=config.evaluation,
        length=config.length,
        seed=config.seed,
        evaluation_spec=config.eval_data,
    )


def _sensitivities(
    config: QuantizeConfig,
    backend: QuantizationBackend,
    data: DataSplits,
    progress: Progress,
    run: RunDirectory,
) -> torch.Tensor:
    """(S, N, K) first-order differences of every option on every sequence, from the run if they are there."""
    saved = run.folder / "sensitivities.safetensors"
    if saved.exists():
        return load_file(saved)["differences"]
    with timed(run, "sensitivities"):
        differences = fisher_differences(
            backend,
            data.search.select(slice(0, config.sensitivity)),
            seed=config.seed,
            on_progress=progress.stage("sensitivities"),
        )
    with atomic_path(saved) as temporary:
        save_file({"differences": differences}, temporary)
    return differences


def _prior(config: QuantizeConfig, planned: Planned, sensitivities: np.ndarray) -> torch.Tensor | None:
    if config.prior == "uniform":
        return None
    losses = (
        torch.from_numpy(sensitivities) if config.prior == "fisher" else planned.backend.relative_errors()
    )
    return logits_from_losses(losses, planned.problem, config.prior_strength)


def _search(
    config: QuantizeConfig,
    planned: Planned,
    data: DataSplits,
    sensitivities: np.ndarray,
    run: RunDirectory,
    progress: Progress,
) -> SearchResult:
    if run.finished:
        return run.result
    device = planned.loaded.device
    layer_errors = None
    if config.searcher == "mxmoe":
        layer_errors = planned.backend.layer_errors(data.search.select(slice(0, config.sensitivity)))
    with (
        timed(run, "search"),
        planned.backend.objective(data.search, data.selection) as objective,
    ):
        if layer_errors is not None:
            objective.layer_errors = layer_errors
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prior = _prior(config, planned, sensitivities)
        result = run_search(run, _searcher(config), planned.problem, objective, prior, progress)
        if device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(device)
            expected = planned.estimate.search_memory
            run.update_metrics({"memory": {"search_bytes": measured, "expected_bytes": expected}})
    return result


def _expectation(planned: Planned) -> str:
    expected = planned.estimate
    text = f"memory about {expected.memory / 2**30:.2f} GiB"
    if expected.on_gpu:
        place = "on the GPU" if expected.residency == "resident" else "in host memory"
        text += f" on the GPU, {expected.search_memory / 2**30:.2f} GiB while searching; candidates {place}"
    return f"{text}; time about {expected.seconds / 60:.1f} minutes"


def _searcher(config: QuantizeConfig) -> Any:
    return make_searcher(
        config.searcher,
        {
            "steps": config.steps,
            "samples": config.samples,
            "lr": config.lr,
            "tau": tuple(config.tau),
            "refine": config.refine,
            "seed": config.seed,
        },
    )


def _judge(
    config: QuantizeConfig,
    planned: Planned,
    data: DataSplits,
    result: SearchResult,
    sensitivities: np.ndarray,
    run: RunDirectory,
    progress: Progress,
) -> None:
    """Evaluate the result beside the full model, the neighbouring uniform widths and the proxy's knapsack."""
    rows = list(run.metrics.get("evaluation", []))
    done = {row["name"] for row in rows}
    judge = Judge(planned.backend, data.evaluation)
    wanted = _allocations_to_judge(planned, result, sensitivities)
    count = progress.stage("evaluation")
    with timed(run, "evaluation"):
        for position, (name, allocation) in enumerate(wanted):
            if name not in done:
                rows.append(
                    {
                        **judge.row(name, allocation, planned.problem),
                        "chosen": allocation is result.allocation,
                    }
                )
                run.update_metrics({"evaluation": rows})
            count(position + 1, len(wanted))


def _allocations_to_judge(
    planned: Planned, result: SearchResult, sensitivities: np.ndarray
) -> list[tuple[str, Allocation | None]]:
    problem, plan = planned.problem, planned.plan
    listed: list[tuple[str, Allocation | None]] = [("full model", None)]
    # The groups that had a choice: locked ones are no part of a uniform width.
    free = [(k, g) for k, g in zip(result.allocation, plan.groups, strict=True) if len(g.widths) > 1]
    parameters = sum(group.parameters for _, group in free) or 1
    average = sum(plan.widths[k] * group.parameters for k, group in free) / parameters
    packed = plan.packed_widths
    below = max((w for w in packed if w <= average), default=packed[0])
    above = min((w for w in packed if w > average), default=packed[-1])
    for width in dict.fromkeys((below, above)):
        choices = np.array(
            [plan.widths.index(width if width in group.widths else group.widths[0]) for group in plan.groups]
        )
        listed.append((f"uniform {width}", problem.allocation(choices)))
    interpolation = spend(problem, uniform_allocation(problem), layer_order(problem))
    listed.append(("uniform interpolation", problem.allocation(interpolation)))
    proxy = solve_mckp(-sensitivities, problem)
    spent = spend(problem, proxy.allocation, -sensitivities)
    listed.append(("proxy knapsack", problem.allocation(spent)))
    listed.append((result.method.upper() if result.method == "rco" else result.method, result.allocation))
    return listed


def _export(
    config: QuantizeConfig, planned: Planned, result: SearchResult, run: RunDirectory, progress: Progress
) -> Path | None:
    if config.format == "none":
        return None
    target = run.folder / "model"
    if "export" in run.metrics and target.exists():
        return target
    exporter = tables.load(tables.FORMATS, config.format, "format")()
    count = progress.stage("export")
    count(0, 1)
    with timed(run, "export"):
        source, weights = planned.backend.deployed(result.allocation)
        summary = exporter.export(source, weights, target, overwrite=True)
    found: dict[str, Any] = {"export": summary.to_json()}
    if config.format == "compressed-tensors":
        found["certificate"] = _certify(planned, result, target)
        if config.serve != "any":
            violations = validate_for_engine(
                json.loads((target / "config.json").read_text(encoding="utf-8")), config.serve
            )
            found["engine"] = {"preset": config.serve, "violations": violations}
            if violations:
                raise ValueError(f"{config.serve} would refuse the checkpoint: {'; '.join(violations)}")
    run.update_metrics(found)
    count(1, 1)
    return target


def _certify(planned: Planned, result: SearchResult, folder: Path) -> dict[str, Any]:
    """The budget, counted once more from the headers of what was written."""
    size = checkpoint_size(folder)
    backend, kind = planned.backend, planned.budget.kind
    written = backend.written_names(result.allocation)
    bits = average_bits(folder, list(written))
    counted = backend.costs(kind)
    if kind == "size":
        used, allowed = size["bytes"], planned.budget.amount
    else:
        entry = "stored_bits" if kind == "bpw" else "weight_bits"
        used = sum(
            bits["tensors"][name][entry] * counted.weight(member)
            for name, member in written.items()
            if counted.counts_linear(member)
        )
        allowed = counted.total(planned.budget.amount)
    if used > allowed:
        raise RuntimeError(
            f"Internal error: the checkpoint takes {used:,} where {planned.budget} allow {float(allowed):,.0f}; "
            "please report this."
        )
    return {
        "used": used,
        "allowed": str(allowed),
        "checkpoint_bytes": size["bytes"],
        "average_bits": bits["average_bits"],
        "average_stored_bits": bits["average_stored_bits"],
    }


# ------------------------------------------------------------------- description


def _describe(
    config: QuantizeConfig, planned: Planned, result: SearchResult, sensitivities: np.ndarray
) -> dict[str, Any]:
    plan, problem, backend = planned.plan, planned.problem, planned.backend
    relative = backend.relative_errors().numpy()
    bits = backend.average_width(result.allocation)
    low, high = backend.budget_range(planned.budget.kind)
    unit = {"size": "bytes", "active_bits": "bits x tokens"}.get(planned.budget.kind, "bits")
    labels = [str(width) for width in plan.widths]
    return {
        "kind": "quantization",
        "model": {
            "name": config.model,
            "parameters": sum(p.numel() for p in planned.loaded.model.parameters()),
            "blocks": len(planned.loaded.layout.blocks(planned.loaded.model)),
            "dtype": str(planned.loaded.dtype).removeprefix("torch."),
            "fingerprint": planned.loaded.fingerprint,
        },
        "budget": {
            "kind": planned.budget.kind,
            "requested": _amount(config),
            "effective": f"{problem.unit_budgets[0]:,} {unit}",
            "used": f"{problem.units(result.allocation)[0]:,} {unit}",
            "unit": unit,
            "budget_units": problem.unit_budgets[0],
            "used_units": problem.units(result.allocation)[0],
            "range": [low, high],
            "average_bits": float(bits),
            "average_bits_exact": str(bits),
            "counted_over": backend.costs(planned.budget.kind).count,
        },
        **describe_experts(backend, result.allocation),
        "groups": [
            {
                "name": group.name,
                "members": [member.name for member in group.members],
                "kind": "+".join(dict.fromkeys(member.kind for member in group.members)),
                "block": group.members[0].block,
                "parameters": group.parameters,
                "width": plan.widths[choice],
                "sensitivity": dict(zip(labels, sensitivities[row].tolist(), strict=True)),
                "relative_error": dict(zip(labels, relative[row].tolist(), strict=True)),
            }
            for row, (group, choice) in enumerate(zip(plan.groups, result.allocation, strict=True))
        ],
    }


def _parse_widths(text: str) -> Sequence[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--widths is a list such as 2,3,4,8,16, got {text!r}.") from None


def _expert_groups(config: QuantizeConfig) -> ExpertGroups | None:
    if config.per_projection and config.expert_groups not in (None, "projection"):
        raise ValueError(
            f"--per-projection contradicts --expert-groups {config.expert_groups}; give one of them."
        )
    return "projection" if config.per_projection else config.expert_groups


def _amount(config: QuantizeConfig) -> str:
    return str(next(v for v in (config.bits, config.bpw, config.size, config.active_bits) if v is not None))
