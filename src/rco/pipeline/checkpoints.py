"""Export of an allocation's checkpoint, with checks of the written files: budget, engine, logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rco import registry
from rco.compression.budget import Budget
from rco.compression.engines import Engine
from rco.compression.llama_quantize import ALIGNMENT
from rco.compression.plan import CompressionPlan
from rco.core.problem import Allocation
from rco.evaluation.size import average_bits, checkpoint_size
from rco.export.engine_checks import validate_for_engine
from rco.export.exporter import Exporter, ExportRequest
from rco.export.gguf_container import written_file
from rco.export.recipes import Choice, RecipeExporter
from rco.formats.base import Format, Stored
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.gguf_file import GGUFReader
from rco.models.gguf_names import gguf_names
from rco.models.loading import LoadedModel, load_model
from rco.models.moe.layers import moe_layers, stored_names
from rco.models.moe.linears import ExpertLinear, model_linears
from rco.models.precision import computing_in

if TYPE_CHECKING:
    from rco.pipeline.planning import Planned

__all__ = ["check_format", "check_recipe", "export_checkpoint", "make_exporter"]

# Largest difference between the logits of the checkpoint and of the evaluated model, relative to the largest logit.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_LOW_PRECISION_TOLERANCE = 5e-2
_CHECKED_TOKENS = 64  # of a checkpoint that is read back


Deployed = tuple[LoadedModel, Mapping[str, Stored]]


def export_checkpoint(
    planned: Planned,
    allocation: Allocation,
    format: str,
    out: Path,
    tokens: Tensor | None = None,
    *,
    overwrite: bool = False,
    deployed: Deployed | None = None,
) -> dict[str, Any]:
    """Write the checkpoint of an allocation and check the written files.

    A checkpoint that the plan's engine would not load is an error before anything is written.

    Args:
        planned: The compression.
        allocation: The chosen allocation.
        format: Name of an exporter.
        out: The folder.
        tokens: (1, length) ids on which the logits of a pruned checkpoint are compared; None: the first ones.
        overwrite: Replace an existing folder.
        deployed: Model and packed weights to write, if the compression no longer has its candidates.

    Returns:
        The sections ``export``, ``certificate`` and ``engine`` of a run's metrics.
    """
    if not planned.compression.plan.removes_only:
        return _export_quantized(planned, allocation, format, out, overwrite, deployed)
    if tokens is None:
        vocabulary = planned.loaded.layout.embedding(planned.loaded.model).weight.shape[0]
        tokens = torch.arange(_CHECKED_TOKENS)[None] % vocabulary
    pruned = None if deployed is None else deployed[0]
    return _export_pruning(planned, allocation, format, out, tokens, overwrite, pruned)


def _export_quantized(
    planned: Planned,
    allocation: Allocation,
    format: str,
    out: Path,
    overwrite: bool,
    deployed: Deployed | None,
) -> dict[str, Any]:
    pruned = REMOVED in planned.compression.choice_of(allocation).values()
    exporter = check_format(format, planned.compression.plan.engine, pruned=pruned)
    source, weights = deployed or planned.compression.deployed(allocation)
    engine = planned.compression.plan.engine.name
    summary = exporter.export(ExportRequest(source, weights, out, overwrite=overwrite, engine=engine))
    found: dict[str, Any] = {"export": summary.to_json()}
    if format == "llama.cpp":
        found["certificate"] = _certify_blocks(planned, summary.tensors)
    if format == "gguf":
        found["certificate"] = _certify_file(planned, allocation, out)
    if format != "compressed-tensors":
        return found
    found["certificate"] = _certify_bits(planned, allocation, out)
    if engine != "any":
        written = json.loads((out / "config.json").read_text(encoding="utf-8"))
        found["engine"] = {"preset": engine, "violations": validate_for_engine(written, engine)}
    return found


def make_exporter(format: str, kind: str) -> Exporter:
    """Exporter of a format; an error if the format does not fit this kind of compression."""
    exporter: Exporter = registry.load(registry.EXPORTERS, format, "format")()
    if exporter.kind != kind:
        fitting = [
            n for n in registry.EXPORTERS if registry.load(registry.EXPORTERS, n, "format").kind == kind
        ]
        raise ValueError(
            f"The format {format!r} holds {exporter.kind}, this run is {kind}; take {' or '.join(fitting)}."
        )
    return exporter


def check_format(format: str, engine: Engine, *, pruned: bool = False) -> Exporter:
    """Exporter of a format for quantized weights, if it can express every result of a search for the engine.

    Args:
        format: Name of the format.
        engine: Engine that the search is for.
        pruned: Whether experts may be removed.

    Raises:
        ValueError: The format is unknown, stores other sizes than the search counts, or cannot remove experts.
    """
    exporter = make_exporter(format, "quantization")
    if pruned and isinstance(exporter, RecipeExporter):
        raise ValueError(
            f"The format {format!r} is a recipe for a tool that keeps every expert: leave out `allow_prune`, or "
            "take `format='compressed-tensors'`, dense or none."
        )
    if (format == "gguf") != (engine.name == "gguf") and format not in ("dense", "none"):
        raise ValueError(
            f"The format {format!r} does not hold the options of `serve='{engine.name}'`: the options of a search "
            "for a GGUF file are ggml's types. Take `format='gguf'` with `serve='gguf'` or without `serve`."
        )
    if format == "llama.cpp" and not engine.gguf:
        raise ValueError(
            "llama.cpp has its own block types, which are not among the options of "
            f"`serve='{engine.name}'`: search with `serve='llamacpp'`."
        )
    if engine.gguf and format == "compressed-tensors":
        raise ValueError(
            f"llama.cpp loads no compressed-tensors checkpoint; take `format='{engine.format}'`, dense or none."
        )
    return exporter


def check_recipe(exporter: Exporter, loaded: LoadedModel, plan: CompressionPlan) -> None:
    """Raise, before a search, if a recipe cannot express every combination of groups and widths.

    Raises:
        ExportError: The tool lacks a width, or needs one for linears that are not in one group.
    """
    # Plans for GGUF files already follow the rules of their recipe.
    if not isinstance(exporter, RecipeExporter) or plan.gguf is not None:
        return
    linears = {info.name: info for info in model_linears(loaded.layout, loaded.model, include_head=True)}
    # Neighbouring groups at different widths, and every group at each of its own.
    for turn in range(max(len(group.options) for group in plan.groups)):
        schemes: dict[str, Format] = dict.fromkeys(linears, ORIGINAL)
        for number, group in enumerate(plan.groups):
            option = group.options[(number + turn) % len(group.options)]
            schemes |= {member.name: plan.format_of(member, option) for member in group.members}
        choice = Choice(loaded, linears, schemes)
        if choice.quantized:
            exporter.recipe(choice)


def _check_used(budget: Budget, used: int, allowed: int | Fraction) -> None:
    """Raise if a checkpoint exceeds its budget, which would be an internal error."""
    if used > allowed:
        raise RuntimeError(
            f"Internal error: the checkpoint takes {used:,} where {budget} allow {float(allowed):,.0f}; "
            "please report this."
        )


def _certify_blocks(planned: Planned, tensors: Mapping[str, int]) -> dict[str, Any]:
    """The budget, counted again from the block types of a recipe."""
    backend, budget = planned.compression, planned.budget
    plan = backend.plan
    assert plan.gguf is not None  # the exporter supports GGUF grids only
    names = {name for info in plan.linears for name in gguf_names(plan.gguf.layout, info.name)}
    stored = 8 * sum(tensors[name] for name in names)
    total = sum(size + -size % ALIGNMENT for size in tensors.values())
    found = {
        "checkpoint_bytes": total,
        "average_stored_bits": stored / sum(info.parameters for info in plan.linears),
        "source": "the block types that the recipe names",
    }
    if budget.kind not in ("bpw", "size") or backend.count != "all":
        return found  # these budgets count codes or experts alone, which sizes of tensors do not show
    used = total if budget.kind == "size" else stored
    allowed = budget.amount if budget.kind == "size" else backend.costs(budget.kind).total(budget.amount)
    _check_used(budget, used, allowed)
    return {"used": used, "allowed": str(allowed), **found}


def _certify_file(planned: Planned, allocation: Allocation, folder: Path) -> dict[str, Any]:
    """The budget, counted again from a written GGUF file; its size must be the promised one, to the byte."""
    backend, budget = planned.compression, planned.budget
    file = GGUFReader(written_file(folder))
    costs = {kind: backend.costs(kind) for kind in ("size", "bpw")}
    promised = {
        kind: cost.fixed + int(cost.matrix[np.arange(len(cost.matrix)), np.asarray(allocation)].sum())
        for kind, cost in costs.items()
    }
    stored = 8 * sum(entry.nbytes for entry in file.tensors.values())
    measured = {"size": file.nbytes, "bpw": stored}
    if measured != promised:
        raise RuntimeError(
            f"Internal error: the file has {file.nbytes:,} bytes and {stored:,} bits of tensors instead of "
            f"{promised['size']:,} and {promised['bpw']:,}; please report this."
        )
    found = {
        "checkpoint_bytes": file.nbytes,
        "promised_bytes": promised["size"],
        "average_stored_bits": stored / sum(entry.elements for entry in file.tensors.values()),
        "source": "the written file",
    }
    if budget.kind not in measured:
        return found
    limit = costs[budget.kind].total(budget.amount) + costs[budget.kind].fixed
    _check_used(budget, measured[budget.kind], limit)
    return {"used": measured[budget.kind], "allowed": str(limit), **found}


def _certify_bits(planned: Planned, allocation: Allocation, folder: Path) -> dict[str, Any]:
    """The budget, counted again from the headers of the written files."""
    size = checkpoint_size(folder)
    backend, budget = planned.compression, planned.budget
    rename = stored_names(backend.loaded.model)
    written = {rename(name): info for name, info in backend.written_names(allocation).items()}
    twins = {name: info.twin for name, info in written.items() if info.twin is not None}
    # Parts of larger tensors, and a tied weight under its other name.
    stacked = {
        name: (rename(info.stored_in), info.parameters)
        for name, info in written.items()
        if isinstance(info, ExpertLinear)
    } | {name: (f"{twin}.weight", written[name].parameters) for name, twin in twins.items()}
    bits = average_bits(folder, list(written), stacked, twins)
    counted = backend.costs(budget.kind)
    if budget.kind == "size":
        used, allowed = size["bytes"], budget.amount
    else:
        entry = "stored_bits" if budget.kind == "bpw" else "weight_bits"
        used = sum(
            bits["tensors"][name][entry] * counted.weight(member)
            for name, member in written.items()
            if counted.counts_linear(member)
        )
        allowed = counted.total(budget.amount)
    _check_used(budget, used, allowed)
    return {
        "used": used,
        "allowed": str(allowed),
        "checkpoint_bytes": size["bytes"],
        "average_bits": bits["average_bits"],
        "average_stored_bits": bits["average_stored_bits"],
    }


def _export_pruning(
    planned: Planned,
    allocation: Allocation,
    format: str,
    out: Path,
    tokens: Tensor,
    overwrite: bool,
    pruned: LoadedModel | None,
) -> dict[str, Any]:
    """Write the model without pruned experts, read it back and compare its logits on ``tokens``.

    ``pruned`` is the model without its pruned experts, if already made.
    """
    exporter = make_exporter(format, planned.compression.kind)
    source = planned.compression.deployed(allocation)[0] if pruned is None else pruned
    kept = planned.compression.kept(allocation)
    summary = exporter.export(ExportRequest(source, {}, out, overwrite=overwrite, expert_numbers=kept))
    return {
        "export": summary.to_json(),
        "certificate": _certify_experts(
            planned, allocation, out, tokens, summary.total_bytes, pruned, padded=summary.shape == "padded"
        ),
    }


def _certify_experts(
    planned: Planned,
    allocation: Allocation,
    folder: Path,
    tokens: Tensor,
    written_bytes: int,
    pruned: LoadedModel | None,
    *,
    padded: bool,
) -> dict[str, Any]:
    """Read the checkpoint back: its counts, its size, and its logits beside those of the evaluated model."""
    backend, budget = planned.compression, planned.budget
    reloaded = load_model(folder, device=str(planned.loaded.device))
    counts = [layer.num_experts for layer in moe_layers(reloaded.model)]
    kept = int(backend.keep_of(allocation).sum())
    if not padded and sum(counts) != kept:
        raise RuntimeError(
            f"Internal error: the checkpoint has {sum(counts)} experts instead of {kept}; please report this."
        )
    tokens = tokens.to(planned.loaded.device)
    with computing_in(reloaded.model, backend.compute_dtype), torch.no_grad():
        found = reloaded.model(tokens).logits
    if pruned is None:
        with backend.apply(allocation):
            expected = planned.loaded.model(tokens).logits
    else:
        with computing_in(pruned.model, backend.compute_dtype), torch.no_grad():
            expected = pruned.model(tokens).logits
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    allowed = _TOLERANCE.get(backend.compute_dtype, _LOW_PRECISION_TOLERANCE) * scale
    if not difference <= allowed:
        raise RuntimeError(
            f"Internal error: the checkpoint's logits differ from the evaluated model's by {difference:.3g} "
            f"(largest logit {scale:.3g}); please report this."
        )
    parameters = sum(p.numel() for p in reloaded.model.parameters())
    used = {"experts": kept, "parameters": parameters, "size": written_bytes}[budget.kind]
    limit = sum(planned.problem.unit_budgets) if budget.kind == "experts" else budget.amount
    _check_used(budget, used, limit)
    return {
        "used": used,
        "allowed": str(limit),
        "checkpoint_bytes": written_bytes,
        "experts": kept,
        "parameters": parameters,
        "logit_difference": difference,
        "largest_logit": scale,
    }
