"""The ``compressed-tensors`` format: packed codes that transformers, vLLM and others load.

Every linear keeps its own width: linears of the same scheme form one config group with their exact names as
targets, so that no program has to interpret a pattern. Unquantized linears are on the ignore list, also by name.
Only experts that share a scheme are named by a pattern (:mod:`rco.export.expert_targets`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from rco.compression.file_size import allocation_tensors, distinct_state
from rco.export.engine_checks import validate_for_engine
from rco.export.expert_code import experts_per_layer, separate_experts_fields, write_expert_code
from rco.export.expert_targets import expert_pattern, name_experts, one_scheme, written_schemes
from rco.export.exporter import ExportError, ExportRequest, ExportSummary, atomic_folder, write_companions
from rco.export.schemes import check_type, scheme_config
from rco.export.writer import expected_bytes, verify_checkpoint, write_checkpoint
from rco.formats.base import Format, Stored
from rco.formats.floating import FloatingPoint
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.embeddings import EMBEDDING_ROLE, embedding_info
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.layers import stored_names
from rco.models.moe.linears import ExpertLinear, model_linears

__all__ = ["CompressedTensorsExporter", "check_exportable", "quantization_config"]

_MIXED = "mixed-precision"  # groups of several layouts
_LAYOUT_VERSION = "0.20.0"  # of compressed-tensors, with dense packing for every width


class CompressedTensorsExporter:
    """Writes packed weights, one tensor at a time, under the names of the model's modules."""

    name: ClassVar[str] = "compressed-tensors"
    kind: ClassVar[str] = "quantization"

    def export(self, request: ExportRequest) -> ExportSummary:
        """Write a model with packed weights, after a check that the engine would load it."""
        loaded, weights, engine = request.source, request.weights, request.engine
        linears = _linears(loaded, weights)
        by_name = {info.name: info for info in linears}
        schemes = {name: packed.format for name, packed in weights.items()}
        check_exportable(linears, schemes)
        for name, packed in weights.items():
            _check_weight(by_name[name], packed)
        rename = stored_names(loaded.model)
        state = {rename(name): (name, value) for name, value in distinct_state(loaded.model).items()}
        by_stored = {info.stored_name: info for info in linears}
        by_stored |= {info.twin: info for info in linears if info.twin is not None and info.name in weights}
        tensors = allocation_tensors(loaded.model, linears, schemes)

        def fetch(stored: str) -> Tensor:
            linear, _, part = stored.rpartition(".")
            packed = weights.get(by_stored[linear].name) if linear in by_stored else None
            parts = {} if packed is None else packed.format.file_tensors(packed)
            if part in parts:
                return parts[part]
            if stored in state:
                return _in_memory(*state[stored], loaded)
            if packed is not None:
                return by_stored[linear].buffers[part]
            # One of several that are stacked in the model.
            return by_stored[stored.removesuffix(".weight")].weight

        quantization = quantization_config(loaded, schemes, patterns=True)
        described = {"model_type": loaded.layout.model_type, "quantization_config": quantization}
        named = [i.name for i in linears if i.role != EMBEDDING_ROLE or i.name in weights]
        violations = validate_for_engine(described, engine, named)
        sparse = any(isinstance(info, ExpertLinear) for info in linears)
        # Experts that stock transformers cannot stack on loading are built by code in the checkpoint.
        stacked = one_scheme(linears, written_schemes(linears, schemes)) is not None
        carries_code = sparse and (not stacked or experts_per_layer(loaded.model.config) is not None)
        if carries_code and engine == "transformers":
            violations.append("Its experts have several schemes, zero points, or are not named one by one.")
        if violations:
            raise ExportError(f"{engine} would not load this checkpoint: {' '.join(violations)}")
        written = {spec.name for spec in tensors}
        changes: dict[str, Any] = {
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "quantization_config": quantization,
        }
        if any(by_name[name].tied and f"{name}.weight" not in written for name in weights):
            # The output layer gets its own tensors, separate from the embedding.
            changes["tie_word_embeddings"] = False
        if carries_code:
            changes.update(separate_experts_fields(loaded.model))
        needed = expected_bytes(tensors, request.max_shard_size)
        with atomic_folder(request.out, overwrite=request.overwrite, needed_bytes=needed) as folder:
            write_checkpoint(folder, tensors, fetch, request.max_shard_size)
            total = verify_checkpoint(folder, tensors)
            write_companions(loaded, folder, changes)
            if carries_code:
                write_expert_code(loaded.model, folder)
            files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
        return ExportSummary(
            self.name, Path(request.out), files, {spec.name: spec.nbytes for spec in tensors}, total
        )


def _linears(loaded: LoadedModel, quantized: Collection[str]) -> list[LinearInfo]:
    """The model's linears and its embedding; experts one by one only if some of them are quantized."""
    plain = [
        *loaded.layout.linears(loaded.model, include_head=True),
        embedding_info(loaded.layout, loaded.model),
    ]
    if {info.name for info in plain}.issuperset(quantized):
        return plain
    return model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)


def check_exportable(linears: Iterable[LinearInfo], schemes: Mapping[str, Format | Iterable[Format]]) -> None:
    """Raise for linears that the format cannot hold, before any work.

    Args:
        linears: The model's linears.
        schemes: Format of each linear by name, or all formats that a search may give it.

    Raises:
        ExportError: A name is unknown, a layer is not an ``nn.Linear``, or groups do not divide a row.
    """
    known = {info.name: info for info in linears}
    for name, options in schemes.items():
        info = known.get(name)
        if info is None:
            raise ExportError(f"The model has no linear {name!r} to give a packed weight to.")
        for scheme in [options] if isinstance(options, Format) else options:
            written = scheme.on(info.in_features)
            if written in (ORIGINAL, REMOVED):
                continue
            if not isinstance(written, IntegerGrid | FloatingPoint):
                raise ExportError(
                    f"{name} may be stored in {written.name}, which compressed-tensors does not have; export this "
                    "model with the format 'dense'."
                )
            if info.transposed:
                raise ExportError(
                    f"{name} is a {type(info.module).__name__}, and compressed-tensors packs nn.Linear only; "
                    "export this model with the format 'dense'."
                )
            check_type(written, info.weight.dtype)
            if not isinstance(written, IntegerGrid):
                continue
            zeros_in_one_word = written.bits == 4 and info.out_features <= 8 and not written.symmetric
            if zeros_in_one_word and written.group_size is not None:
                raise ExportError(
                    f"{name} has {info.out_features} rows, and compressed-tensors cannot read the zero points of 8 "
                    f"rows or fewer at 4 bits: use `symmetric=True`, or do not quantize it (`lock='{name}=16'`)."
                )
            if written.group_size is not None and info.in_features % written.group_size:
                raise ExportError(
                    f"{name} has rows of {info.in_features}, which groups of {written.group_size} do not "
                    f"divide, as compressed-tensors requires: choose a group size that divides "
                    f"{info.in_features}, one scale per channel, or the format 'dense'."
                )


def _check_weight(info: LinearInfo, packed: Stored) -> None:
    if packed.shape != (info.out_features, info.in_features):
        raise ExportError(
            f"{info.name} is {info.out_features}x{info.in_features}, its packed weight {packed.shape[0]}x"
            f"{packed.shape[1]}: the candidates were made for another model."
        )
    if packed.dtype != info.weight.dtype:
        raise ExportError(
            f"{info.name} has scales in {packed.dtype} and its layer is in {info.weight.dtype}: it would "
            "decode to other values than in the search. Make the candidates in the model's own type."
        )


def _in_memory(name: str, value: Tensor, loaded: LoadedModel) -> Tensor:
    """A tensor of the model; an offloaded one is read from the model's checkpoint."""
    if not value.is_meta:
        return value
    from safetensors import safe_open

    for path in sorted(loaded.path.glob("*.safetensors")) if loaded.path is not None else ():
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - not a mapping
                found: Tensor = file.get_tensor(name)
                return found.to(value.dtype)
    raise ExportError(f"{name} is neither in memory nor in the model's folder; load the model on one device.")


# ---------------------------------------------------------------------- the config


def quantization_config(
    loaded: LoadedModel, schemes: Mapping[str, Format], *, patterns: bool = False
) -> dict[str, Any] | None:
    """The ``quantization_config`` for linears with these schemes; None if nothing is quantized.

    With ``patterns``, experts that share a scheme are named together.
    """
    groups: dict[Format, list[str]] = {}
    linears = _linears(loaded, schemes)
    twins = {info.twin: schemes[info.name] for info in linears if info.twin and info.name in schemes}
    written = written_schemes(linears, {**schemes, **twins})
    for name, scheme in written.items():
        if isinstance(scheme, IntegerGrid | FloatingPoint):
            groups.setdefault(scheme, []).append(name)
    if not groups:
        return None
    for info in linears:
        scheme = written[info.name]
        if info.role == EMBEDDING_ROLE and isinstance(scheme, IntegerGrid):
            # vLLM, which alone reads packed embeddings, builds some without telling them their name.
            groups[scheme].append("VocabParallelEmbedding")
    # Widest first. Without the code in the checkpoint, transformers unpacks all experts by the first scheme that
    # names any: too wide a scheme is an error of shapes, too narrow a scheme would load noise.
    ordered = sorted(groups, key=lambda scheme: (-scheme.bits, scheme.name))
    described = {scheme: scheme_config(scheme) for scheme in ordered}
    used = {each["format"] for each in described.values()}
    return {
        "quant_method": "compressed-tensors",
        "version": _LAYOUT_VERSION,
        "format": used.pop() if len(used) == 1 else _MIXED,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": _ignored(loaded.model, linears, {name for names in groups.values() for name in names}),
        "config_groups": {
            f"group_{index}": {
                "targets": name_experts(groups[scheme], linears, written) if patterns else groups[scheme],
                **described[scheme],
            }
            for index, scheme in enumerate(ordered)
        },
    }


def _ignored(model: nn.Module, linears: Iterable[LinearInfo], quantized: set[str]) -> list[str]:
    """Layers that an engine might quantize but must not.

    vLLM raises for a linear that is neither a target nor on this list. It treats routers as linears, and experts
    that transformers keeps in one three-dimensional parameter as one linear each.
    """
    experts: dict[str, list[ExpertLinear]] = {}
    for info in linears:
        if isinstance(info, ExpertLinear):
            experts.setdefault(info.layer.experts_name, []).append(info)
    ignored: list[str] = []
    for name, module in model.named_modules():
        if name in quantized or isinstance(module, nn.Embedding):
            continue
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if "weight" in own and own["weight"].ndim == 2:
            ignored.append(name)
        elif any(value.ndim == 3 for value in own.values()):
            inside = experts.get(name, [])
            left = [part.name for part in inside if part.name not in quantized]
            if len(left) < len(inside):
                ignored += left
            else:
                ignored.append(expert_pattern(inside[0].layer) if inside else f"re:^{re.escape(name)}\\..*")
    return ignored
