"""Plan of a compression, checked before any expensive work: model, groups, budget, memory and time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rco import formats
from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings, read_importances
from rco.compression.compression import Compression
from rco.compression.costs import Visits, routing_visits
from rco.compression.engines import find_engine
from rco.compression.gguf_target import GGUFTarget, parse_types
from rco.compression.llama_mixes import is_mix, needed_types
from rco.compression.llama_quantize import GGUFFile
from rco.compression.plan import (
    CompressionPlan,
    ExpertGroups,
    make_gguf_plan,
    make_plan,
    make_removal_plan,
)
from rco.compression.second_budget import SecondBudget
from rco.core.problem import AllocationProblem
from rco.data.calibration import DataSplits, build_splits
from rco.data.sources import resolve_source
from rco.distributed import Ranks
from rco.export.compressed_tensors import check_exportable
from rco.formats.base import Format
from rco.models.checkpoint_files import read_config
from rco.models.device_map import DeviceMap
from rco.models.gguf_conversion import ensure_gguf
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel, load_model, locate_model, outline_model, refuse_quantized
from rco.models.moe.expert_removal import keep_plan
from rco.models.moe.layers import moe_layers
from rco.models.moe.linears import model_linears, sparse_layers, unread_experts
from rco.models.precision import compute_dtype
from rco.pipeline.checkpoints import check_format, check_recipe
from rco.pipeline.configs import CompressConfig, PruneConfig, QuantizeConfig
from rco.pipeline.estimate import Estimate, choose_residency, estimate
from rco.pipeline.progress import Progress
from rco.pipeline.searchers import configured_searcher
from rco.runs import RunDirectory

logger = logging.getLogger(__name__)

__all__ = [
    "Planned",
    "build_data",
    "export_format",
    "file_and_folder",
    "open_run",
    "plan_compression",
    "plan_groups",
    "run_folder",
    "slug",
]


@dataclass(frozen=True)
class Planned:
    """A planned compression.

    Attributes:
        loaded: The model.
        compression: Groups and options.
        problem: The problem of the search.
        budget: The requested budget.
        folder: Folder of the run.
        estimate: Expected memory and time.
        ranks: Processes that share the work.
    """

    loaded: LoadedModel
    compression: Compression
    problem: AllocationProblem
    budget: Budget
    folder: Path
    estimate: Estimate
    ranks: Ranks = field(default_factory=Ranks, kw_only=True)

    @property
    def kept_experts(self) -> int:
        """Most experts that the budget allows to keep; for plans that only keep or remove experts."""
        room = sum(self.problem.unit_budgets)
        if self.budget.kind == "experts":
            return room
        kept = 0
        for cost in sorted(int(costs) for costs in self.problem.unit_costs[0].max(axis=1)):
            room -= cost
            if room < 0:
                break
            kept += 1
        return kept


def plan_compression(
    config: CompressConfig,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    given: LoadedModel | None = None,
    *,
    outline: bool = False,
) -> Planned:
    """Load the model, make groups and problem, and check all settings before expensive work.

    Args:
        config: Settings of the job.
        progress: Receives the progress of candidates or scores.
        ranks: Processes that share the work.
        given: A model in memory, instead of the one named in ``config``.
        outline: Plan without the model's weights, from its config alone, unless the budget depends on them.
    """
    budget = Budget.parse(**config.budgets())
    configured_searcher(config)
    _check_sources(config)
    ranks = ranks or Ranks()
    weightless = budget.kind != "active_bits" and getattr(config, "engine", None) != "gguf"
    if outline and given is None and weightless:
        given = _outline(config)
    loaded = _load(config, ranks, given)
    folder = run_folder(config, budget)
    computing = compute_dtype(config.compute, loaded.device, loaded.dtype)
    visits = _needed_visits(config, budget, loaded, computing)
    plan = plan_groups(config, loaded)
    residency, memory = choose_residency(loaded, plan, config)
    own = (
        _quantization_settings(config, plan, folder)
        if isinstance(config, QuantizeConfig)
        else _pruning_settings(config)
    )
    stage = "scores" if plan.removes_only else "candidates"
    compression = Compression(
        loaded,
        plan,
        visits=visits,
        loss=config.loss,
        top_k=config.top_k or None,
        batch_size=config.batch_size,
        checkpointing=config.checkpointing,
        graphs=config.graphs,
        compute_dtype=computing,
        memory=residency,
        on_progress=progress.stage(stage) if progress is not None else None,
        ranks=ranks,
        **own,
    )
    budget = compression.settled(budget)
    problem = compression.problem(budget)
    _check_export(config, loaded, plan)
    expected = estimate(compression, config, residency, memory)
    return Planned(loaded, compression, problem, budget, folder, expected, ranks=ranks)


def plan_groups(config: CompressConfig, loaded: LoadedModel) -> CompressionPlan:
    """Groups and options of a loaded model."""
    if isinstance(config, PruneConfig):
        _check_removable(loaded)
        return make_removal_plan(model_linears(loaded.layout, loaded.model), config.lock)
    assert isinstance(config, QuantizeConfig)
    engine = find_engine(config.engine)
    if engine.name == "gguf":
        ends = {"include_head": True, "include_embedding": True}
        return _plan_gguf(config, loaded, model_linears(loaded.layout, loaded.model, **ends))
    # A recipe gives no width to an embedding.
    packable = export_format(config) in ("compressed-tensors", "dense", "none") and not engine.gguf
    linears = model_linears(
        loaded.layout,
        loaded.model,
        include_head=True,
        include_embedding=packable and config.packs_ends is not False,
    )
    if config.types is not None or config.imatrix is not None or config.method == "imatrix":
        raise ValueError(
            f"`types`, `imatrix` and `method='imatrix'` are for GGUF files: add `format='gguf'`, got "
            f"`serve='{engine.name}'`."
        )
    if config.allow_prune and sparse_layers(loaded.model):
        _check_removable(loaded)
    if engine.gguf and config.group_size is not None:
        raise ValueError(
            f"`serve='{engine.name}'`: a block type has its own groups (16 or 32 weights); leave out "
            "`group_size`."
        )
    plan = make_plan(
        loaded.layout,
        linears,
        widths=None if config.widths is None else _parse_widths(config.widths),
        formats=_parse_formats(config),
        group_size=config.columns_per_scale,
        symmetric=config.symmetric,
        serve=config.engine,
        locks=config.lock,
        skips=config.skip,
        ties=config.tie,
        experts=_expert_groups(config),
        allow_prune=config.allow_prune,
        embeddings=config.packs_ends,
        gguf=GGUFFile.of(loaded.layout, loaded.model) if engine.gguf else None,
        unread=unread_experts(loaded.model),
        unpackable=loaded.layout.unpackable(loaded.model),
    )
    if plan.unread:
        logger.warning("%s: %s.", loaded.name, plan.unverified)
    return plan


def _check_removable(loaded: LoadedModel) -> None:
    """Raise for a model without experts, or with routers whose rule is not known."""
    for layer in moe_layers(loaded.model):
        _ = layer.known_rule


def _plan_gguf(config: QuantizeConfig, loaded: LoadedModel, linears: Sequence[LinearInfo]) -> CompressionPlan:
    """Groups and options of a GGUF file; settings of other formats are refused."""
    for name in ("widths", "formats", "group_size", "symmetric", "expert_groups"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"In a GGUF file a type has its own width and groups: leave out `{name}`, and restrict `types`."
            )
    if config.method == "gptq" or config.allow_prune or config.per_projection:
        wrong = "method='gptq'" if config.method == "gptq" else "allow_prune"
        raise ValueError(f"`{wrong}` is not possible for GGUF files, which ggml's own encoders make.")
    ensure_gguf(loaded)
    target = GGUFTarget.of(loaded, linears)
    mixes = [name for name in config.mixes if is_mix(name)]
    plan = make_gguf_plan(
        loaded.layout,
        linears,
        target,
        parse_types(config.types, importance=config.method != "rtn", also=needed_types(mixes, target.reader)),
        locks=config.lock,
        skips=config.skip,
        ties=config.tie,
    )
    if config.imatrix is not None:
        if config.method == "rtn":
            raise ValueError("`imatrix` gives importances, which `method='rtn'` does not use; leave one out.")
        read_importances(config.imatrix, plan)
    return plan


def export_format(config: CompressConfig) -> str:
    """Format of the checkpoint: as requested, or the engine's; ``none`` for no checkpoint."""
    if isinstance(config, PruneConfig):
        return "pruned-padded" if config.padded and config.format != "none" else config.format
    assert isinstance(config, QuantizeConfig)
    return config.format or find_engine(config.engine).format


def run_folder(config: CompressConfig, budget: Budget, prefix: str = "") -> Path:
    """Folder of a run: as requested, or named after model and budget."""
    suffix = "-uniform" if getattr(config, "uniform", False) else ""
    name = f"{prefix}{Path(config.model).name}-{budget.kind}-{config.requested}{suffix}"
    if config.out is not None and config.out.suffix == ".gguf":  # the file; the run is beside it
        return config.out.with_name(f"{config.out.stem}-run")
    return config.out or Path("runs") / slug(name)


def file_and_folder(config: CompressConfig) -> tuple[CompressConfig, Path | None]:
    """The settings with the run's folder as ``out``, and the GGUF file to write if ``out`` names one.

    Raises:
        ValueError: The file exists already, or another format is asked for.
    """
    file = config.out
    if file is None or file.suffix != ".gguf":
        return config, None
    if not isinstance(config, QuantizeConfig) or config.format not in (None, "gguf"):
        raise ValueError(f"`out={str(file)!r}` names a GGUF file; give a folder, or `format='gguf'`.")
    if file.exists() and not config.resume:
        raise ValueError(f"{file} exists already; choose another name, or remove it.")
    folder = run_folder(config, Budget.parse(**config.budgets()))
    return replace(config, out=folder, format="gguf"), file


def slug(text: str) -> str:
    """A file name from any text."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in text)


def open_run(
    config: CompressConfig, folder: Path, given: LoadedModel | None = None
) -> AbstractContextManager[RunDirectory]:
    """The run's folder: a new one, or with ``config.resume`` the existing one."""
    identity = config.identity()
    if given is not None and given.path is None:  # models in memory are not told apart by name
        identity["weights"] = given.fingerprint
    return (RunDirectory.resume if config.resume else RunDirectory.create)(folder, identity)


def build_data(config: CompressConfig, tokenizer: Any, spec: str | None = None) -> DataSplits:
    """Search, selection and evaluation text; ``spec`` replaces the calibration text."""
    return build_splits(
        spec if spec is not None and spec != str(config.data) else config.data,
        tokenizer,
        search=config.sequences,
        selection=config.selection,
        evaluation=config.evaluation,
        length=config.length,
        seed=config.seed,
        evaluation_spec=config.eval_data or (config.data if spec else None),
    )


def _check_sources(config: CompressConfig) -> None:
    """Raise if text cannot be found, before the model is loaded."""
    for spec in (config.data, config.eval_data):
        if spec is not None:
            resolve_source(spec)


def _load(config: CompressConfig, ranks: Ranks, given: LoadedModel | None) -> LoadedModel:
    """The model on this rank's device or spread over its GPUs; ``given``, if not None."""
    if given is not None:
        return given
    if config.device_map != "none" and config.device != "cuda":
        raise ValueError(f"`device_map` spreads a model over GPUs: add `device='cuda'`, got {config.device}.")
    folder, gguf = locate_model(config.model, revision=config.revision)
    if gguf is None:
        refuse_quantized(read_config(folder), config.model)
    device_map = None if config.device_map == "none" else DeviceMap(config.device_map, ranks.gpus)
    return load_model(
        config.model,
        dtype=config.dtype,
        device=ranks.device(config.device, device_map is not None),
        device_map=device_map,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )


def _outline(config: CompressConfig) -> LoadedModel:
    """The model without its weights."""
    outlined = outline_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )
    refuse_quantized(outlined.model.config, config.model)
    return outlined


def _needed_visits(
    config: CompressConfig, budget: Budget, loaded: LoadedModel, computing: torch.dtype
) -> Visits | None:
    """Routing counts of experts; None if costs do not depend on them."""
    if budget.kind == "active_bits":
        return routing_visits(loaded, build_data(config, loaded.tokenizer).search, computing)
    return None


def _quantization_settings(config: QuantizeConfig, plan: CompressionPlan, folder: Path) -> dict[str, Any]:
    return {
        "store_folder": config.store or folder / "candidates",
        "settings": CandidateSettings(
            method=config.method or plan.engine.method,
            damp=config.damp,
            act_order=config.act_order,
            clip=config.clip,
            sweeps=config.sweeps,
            expert_tokens=config.expert_tokens,
            imatrix=config.imatrix,
        ),
        "count": config.count,
        "second": SecondBudget.parse(config.flops_share, config.cost_table, config.cost_budget),
        "overwrite_store": config.overwrite_store,
    }


def _pruning_settings(config: CompressConfig) -> dict[str, Any]:
    assert isinstance(config, PruneConfig)
    return {"uniform": config.uniform, "min_per_layer": config.min_per_layer, "gates": config.gates}


def _check_export(config: CompressConfig, loaded: LoadedModel, plan: CompressionPlan) -> None:
    """Raise if the format cannot hold every possible result of the search."""
    format = export_format(config)
    if format == "none":
        return
    if format == "pruned-padded":
        obstacle = keep_plan(loaded.model, torch.ones(len(plan.groups))).pad_obstacle
        if obstacle is not None:
            raise ValueError(f"`padded` is not possible here: {obstacle}.")
    if isinstance(config, QuantizeConfig):
        check_recipe(check_format(format, plan.engine, pruned=config.allow_prune), loaded, plan)
        if format == "compressed-tensors":
            schemes = {
                info.name: [plan.format_of(info, option) for option in group.options if option in plan.packed]
                for group in plan.groups
                for info in group.members
            }
            check_exportable(plan.linears, schemes)


def _parse_widths(text: str) -> Sequence[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"`widths` is a list such as 2,3,4,8,16, got {text!r}.") from None


def _parse_formats(config: QuantizeConfig) -> list[Format]:
    """Formats that are options beside the widths."""
    names = [name.strip().lower() for name in (config.formats or "").split(",") if name.strip()]
    if config.formats is not None and not names:
        raise ValueError(
            "`formats` is empty: give names such as nvfp4,fp8-dynamic,original, or leave it out."
        )
    found = [formats.parse(name) for name in names]
    for each in found:
        if not each.listed():
            raise ValueError(
                f"`formats` takes names such as {', '.join(formats.listed())}; {each.name} is not an option here."
            )
    return list(dict.fromkeys(found))


def _expert_groups(config: QuantizeConfig) -> ExpertGroups | None:
    if config.per_projection and config.expert_groups not in (None, "projection"):
        raise ValueError(
            f"`per_projection` contradicts `expert_groups='{config.expert_groups}'`; give one of them."
        )
    return "projection" if config.per_projection else config.expert_groups
