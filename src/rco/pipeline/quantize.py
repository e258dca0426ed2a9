"""From a model and a budget to a checkpoint: plan, candidates, search, evaluation, export, report.

Every stage leaves its result in the run's folder and is skipped when it is there, so that a run that was stopped
anywhere goes on where it was and ends the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from rco.compression.base import Budget
from rco.compression.bit_costs import Visits, most_visited, routing_visits
from rco.compression.candidates import CandidateSettings
from rco.compression.engines import find_engine
from rco.compression.gguf_file import GGUFFile
from rco.compression.plan import ExpertGroups, QuantizationPlan, make_plan
from rco.compression.quantization import QuantizationBackend
from rco.compression.sensitivity import (
    fisher_differences,
    logits_from_losses,
    logits_from_weights,
    second_order,
)
from rco.core.knapsack import solve_mckp
from rco.core.problem import Allocation, AllocationProblem
from rco.core.refine import layer_order, spend, uniform_allocation
from rco.core.result import SearchResult
from rco.data.calibration import DataSplits
from rco.distributed import Ranks, join
from rco.export.compressed_tensors import check_exportable
from rco.folders import write_tensors_atomic
from rco.models.loading import LoadedModel
from rco.models.moe.linears import model_linears, sparse_layers
from rco.models.precision import compute_dtype
from rco.pipeline.checkpoints import check_format, check_recipe, export_quantized
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
    timed,
)
from rco.pipeline.configs import QuantizeConfig
from rco.pipeline.estimate import choose_residency, estimate
from rco.pipeline.expert_widths import describe_experts
from rco.pipeline.progress import Progress, Silent
from rco.pipeline.searchers import configured_searcher
from rco.report import build_report
from rco.runs import RunDirectory

__all__ = ["PlannedQuantization", "impq_pair", "plan_groups", "plan_quantization", "quantize"]

PlannedQuantization = Planned[QuantizationBackend]

_IMPQ_WIDTHS = (2, 4)  # as in its paper


def plan_quantization(
    config: QuantizeConfig,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    given: LoadedModel | None = None,
) -> PlannedQuantization:
    """Load the model, form groups and problem, and refuse what cannot work, before anything expensive.

    ``given`` is used in place of the model that ``config`` names.
    """
    budget = Budget.parse(**config.budgets())
    configured_searcher(config)
    check_sources(config)
    ranks = ranks or Ranks()
    loaded = load_for(config, ranks, given)
    computing = compute_dtype(config.compute, loaded.device, loaded.dtype)
    # Costs of active bits come from data, and so does what must not be pruned.
    visits = None
    if budget.kind == "active_bits" or config.allow_prune:
        visits = routing_visits(loaded, build_data(config, loaded.tokenizer).search, computing)
    plan = plan_groups(config, loaded, visits)
    residency, memory = choose_residency(loaded, plan, config)
    folder = run_folder(config, budget)
    backend = QuantizationBackend(
        loaded,
        plan,
        config.store or folder / "candidates",
        settings=CandidateSettings(
            method=config.method or plan.engine.method,
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
        graphs=config.graphs,
        compute_dtype=computing,
        overwrite_store=config.overwrite_store,
        memory=residency,
        on_progress=(progress or Silent()).stage("candidates") if progress else None,
        ranks=ranks,
    )
    problem = backend.problem(budget)
    format = _format(config)
    if format != "none":
        check_recipe(check_format(format, plan.engine, pruned=config.allow_prune), loaded, plan)
    if format == "compressed-tensors":
        schemes = {i.name: [plan.scheme(i, width) for width in plan.packed_widths] for i in plan.linears}
        check_exportable(plan.linears, schemes)
    expected = estimate(loaded, plan, config, residency, memory)
    return Planned(loaded, backend, problem, budget, folder, expected, ranks=ranks)


def plan_groups(
    config: QuantizeConfig, loaded: LoadedModel, visits: Visits | None = None
) -> QuantizationPlan:
    """Groups and widths of a loaded model; ``visits`` of its experts say which must not be pruned."""
    engine = find_engine(config.serve)
    if engine.gguf and config.group_size is not None:
        raise ValueError(
            f"`serve='{engine.name}'`: a block type has groups of its own (16 or 32 weights); leave out "
            "`group_size`."
        )
    return make_plan(
        loaded.layout,
        model_linears(loaded.layout, loaded.model, include_head=True),
        widths=None if config.widths is None else _parse_widths(config.widths),
        group_size=config.columns_per_scale,
        symmetric=config.symmetric,
        serve=config.serve,
        locks=config.lock,
        skips=config.skip,
        ties=config.tie,
        experts=_expert_groups(config),
        allow_prune=config.allow_prune,
        protected=None if visits is None else most_visited(visits, sparse_layers(loaded.model)),
        gguf=GGUFFile.of(loaded.layout, loaded.model) if engine.gguf else None,
    )


def impq_pair(widths: Sequence[int], problem: AllocationProblem) -> tuple[int, int] | None:
    """IMPQ's own two widths where there are candidates for both and the budget lies between them."""
    if not all(width in widths for width in _IMPQ_WIDTHS):
        return None
    low, high = (widths.index(width) for width in _IMPQ_WIDTHS)
    costs = problem.unit_costs[0]
    between = costs[:, low].sum() <= problem.unit_budgets[0] < costs[:, high].sum()
    return (low, high) if between and problem.allowed[:, [low, high]].all() else None


def quantize(
    config: QuantizeConfig,
    progress: Progress | None = None,
    given: LoadedModel | None = None,
    *,
    checkpoint: bool = True,
) -> Outcome | None:
    """Run the whole job; with ``config.resume``, the rest of it. None on a rank that only helps rank 0.

    Args:
        config: What to do.
        progress: Who is told.
        given: A model in memory, in place of the one that ``config`` names.
        checkpoint: Whether the run's folder gets a checkpoint.
    """
    progress = progress or Silent()
    with join(config.rank_timeout) as ranks:
        planned = plan_quantization(config, progress, ranks, given)
        progress.message(_expectation(planned))
        # Text or candidates that do not fit are found before the run has a folder.
        data = build_data(config, planned.loaded.tokenizer)
        planned.backend.check_store(data.search)
        if ranks.first:
            return _lead(config, planned, data, progress, checkpoint)
        assist(
            config,
            planned,
            data,
            {
                "candidates": lambda: planned.backend.prepare(data.search),
                "sensitivities": lambda: _measure_sensitivities(config, planned.backend, data),
            },
        )
        return None


def _lead(
    config: QuantizeConfig,
    planned: PlannedQuantization,
    data: DataSplits,
    progress: Progress,
    checkpoint: bool,
) -> Outcome:
    backend, ranks = planned.backend, planned.ranks
    with open_run(config, planned.folder, planned.loaded) as run:
        run.write_problem(planned.problem)
        with timed(run, "candidates"):
            backend.look_at_routing(data.search)
            ranks.call("candidates")
            backend.prepare(data.search)
        differences = _sensitivities(config, planned, data, progress, run)
        layer_errors = _layer_errors(config, backend, data, run)
        found = second_order(backend, differences, layer_errors)
        sensitivities, backend.curvature = found.losses.numpy(), found.curvature
        known: dict[str, torch.Tensor] = {}
        if config.searcher == "mxmoe" and layer_errors is not None:
            known["layer_errors"] = layer_errors
        result = search_stage(
            config,
            planned,
            data,
            lambda: _beliefs(config, planned, sensitivities),
            run,
            progress,
            known,
            {"pair": impq_pair(backend.plan.widths, planned.problem)},
        )
        run.update_metrics(_describe(config, planned, result, sensitivities))
        judge_all(planned, data, _allocations_to_judge(planned, result, sensitivities), result, run, progress)
        ranks.dismiss()
        written = _export(config, planned, result, run, progress) if checkpoint else None
        report = build_report([run], run.folder / "report.html")
        return Outcome(planned, run.folder, result, run.metrics, report, written)


# ------------------------------------------------------------------------ stages


def _sensitivities(
    config: QuantizeConfig,
    planned: PlannedQuantization,
    data: DataSplits,
    progress: Progress,
    run: RunDirectory,
) -> torch.Tensor:
    """(S, N, K) first-order differences of every option on every sequence, from the run if they are there."""
    saved = run.folder / "sensitivities.safetensors"
    if saved.exists():
        return load_file(saved)["differences"]
    with timed(run, "sensitivities"):
        planned.ranks.call("sensitivities")
        differences = _measure_sensitivities(config, planned.backend, data, progress)
    write_tensors_atomic(saved, {"differences": differences})
    return differences


def _measure_sensitivities(
    config: QuantizeConfig, backend: QuantizationBackend, data: DataSplits, progress: Progress | None = None
) -> torch.Tensor:
    return fisher_differences(
        backend,
        data.search.select(slice(0, config.sensitivity)),
        seed=config.seed,
        on_progress=progress.stage("sensitivities") if progress is not None else None,
    )


def _layer_errors(
    config: QuantizeConfig, backend: QuantizationBackend, data: DataSplits, run: RunDirectory
) -> torch.Tensor | None:
    """(N, K) what experts' options do to the output of their layers, from the run if it is there; None without."""
    if not backend.plan.experts:
        return None
    saved = run.folder / "layer_errors.safetensors"
    if saved.exists():
        return load_file(saved)["layer_errors"]
    with timed(run, "sensitivities"):
        part = data.search.select(slice(0, config.sensitivity))
        errors = backend.layer_errors(part, experts_only=config.searcher == "mxmoe")
    write_tensors_atomic(saved, {"layer_errors": errors})
    return errors


def _beliefs(
    config: QuantizeConfig, planned: PlannedQuantization, sensitivities: np.ndarray
) -> dict[str, torch.Tensor]:
    """Initial logits of the search, and the additive losses that they come from, where they do."""
    backend, problem = planned.backend, planned.problem
    if config.start == "uniform":
        return {}
    if config.start == "weight-error":
        return {"prior": logits_from_weights(backend.weight_distances(), problem, config.strength)}
    losses = torch.from_numpy(sensitivities) if config.start == "fisher" else backend.relative_errors()
    return {"prior": logits_from_losses(losses, problem, config.strength), "proxy": losses}


def _expectation(planned: PlannedQuantization) -> str:
    """What can be asked for, and what it will take."""
    expected, budget = planned.estimate, planned.budget
    low, high = planned.backend.budget_range(budget.kind)
    text = (
        f"{budget} asked; {budget.kind.replace('_', ' ')} from {low} to {high} can be had; "
        f"memory about {expected.memory / 2**30:.2f} GiB"
    )
    if expected.on_gpu:
        place = "on the GPU" if expected.residency == "resident" else "in host memory"
        text += f" on the GPU, {expected.search_memory / 2**30:.2f} GiB while searching; candidates {place}"
    return f"{text}; time about {expected.seconds / 60:.1f} minutes"


def _allocations_to_judge(
    planned: PlannedQuantization, result: SearchResult, sensitivities: np.ndarray
) -> list[tuple[str, Allocation | None]]:
    """The full model, the neighbouring uniform widths, their interpolation, and the proxy's knapsack."""
    problem, plan = planned.problem, planned.backend.plan
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
    return listed


def _export(
    config: QuantizeConfig,
    planned: PlannedQuantization,
    result: SearchResult,
    run: RunDirectory,
    progress: Progress,
) -> Path | None:
    format = _format(config)
    if format == "none":
        return None
    target = run.folder / "model"
    if "export" in run.metrics and target.exists():
        return target
    count = progress.stage("export")
    count(0, 1)
    with timed(run, "export"):
        found = export_quantized(planned, result.allocation, format, target, overwrite=True)
    run.update_metrics(found)
    count(1, 1)
    return target


# ------------------------------------------------------------------- description


def _describe(
    config: QuantizeConfig, planned: PlannedQuantization, result: SearchResult, sensitivities: np.ndarray
) -> dict[str, Any]:
    plan, problem, backend = planned.backend.plan, planned.problem, planned.backend
    relative = backend.relative_errors().numpy()
    bits = backend.average_width(result.allocation)
    low, high = backend.budget_range(planned.budget.kind)
    unit = {"size": "bytes", "active_bits": "bits x tokens"}.get(planned.budget.kind, "bits")
    # A size is that of the whole checkpoint; the search sees the part that its choices change.
    fixed = backend.costs(planned.budget.kind).fixed
    allowed, used = problem.unit_budgets[0] + fixed, problem.units(result.allocation)[0] + fixed
    labels = [str(width) for width in plan.widths]
    return {
        "kind": backend.name,
        "candidates": backend.store.fingerprint if backend.store is not None else None,
        "model": describe_model(config.model, planned.loaded),
        "budget": {
            "kind": planned.budget.kind,
            "requested": config.requested,
            "effective": f"{allowed:,} {unit}",
            "used": f"{used:,} {unit}",
            "unit": unit,
            "budget_units": allowed,
            "used_units": used,
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
                "block": group.block,
                "parameters": group.parameters,
                "width": plan.widths[choice],
                "sensitivity": dict(zip(labels, sensitivities[row].tolist(), strict=True)),
                "relative_error": dict(zip(labels, relative[row].tolist(), strict=True)),
            }
            for row, (group, choice) in enumerate(zip(plan.groups, result.allocation, strict=True))
        ],
    }


def _format(config: QuantizeConfig) -> str:
    return config.format or find_engine(config.serve).format


def _parse_widths(text: str) -> Sequence[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"`widths` is a list such as 2,3,4,8,16, got {text!r}.") from None


def _expert_groups(config: QuantizeConfig) -> ExpertGroups | None:
    if config.per_projection and config.expert_groups not in (None, "projection"):
        raise ValueError(
            f"`per_projection` contradicts `expert_groups='{config.expert_groups}'`; give one of them."
        )
    return "projection" if config.per_projection else config.expert_groups
