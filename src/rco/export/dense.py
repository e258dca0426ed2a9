"""The ``dense`` format: a plain Hugging Face checkpoint with quantized and dequantized weights.

It is as large as the original and loads wherever the original loads. If layers keep different numbers of experts,
it includes the code that builds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rco.compression.file_size import TensorSpec, distinct_state
from rco.export.expert_code import experts_per_layer, write_pruned_code
from rco.export.exporter import ExportError, ExportRequest, ExportSummary, atomic_folder, write_companions
from rco.export.writer import expected_bytes, verify_checkpoint, write_checkpoint
from rco.formats.base import Stored
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.linears import ExpertLinear, model_linears

__all__ = ["DenseExporter"]

_EXPERT = re.compile(r"\.(\d+)\.[^.]+\.experts\.(\d+)\.(\w+)\.weight$")


class DenseExporter:
    """Writes dequantised weights, one tensor at a time, under the names of the original checkpoint.

    Args:
        dtype: Type of the floating-point tensors; None keeps the model's.
    """

    name: ClassVar[str] = "dense"
    kind: ClassVar[str] = "quantization"

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def export(self, request: ExportRequest) -> ExportSummary:
        """Write a model with some weights replaced."""
        loaded, weights, dtype = request.source, request.weights, self.dtype
        listed = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
        linears = {info.name: info for info in listed}
        _check_names(weights, linears)
        # An output layer without its embedding; an embedding keeps its tie.
        tied = [name for name in weights if linears[name].tied and linears[name].twin is None]
        experts = {name: linears[name] for name in weights if isinstance(linears[name], ExpertLinear)}
        state, places = _checkpoint_state(loaded, weights.keys() - set(tied) - experts.keys())
        places.update(_expert_places(state, [info for info in listed if isinstance(info, ExpertLinear)]))
        stacked = {info.stored_in for info in experts.values()} & state.keys()
        for name in tied:
            places[f"{name}.weight"] = name
            state[f"{name}.weight"] = linears[name].weight
        kept = loaded.dtype

        def target(tensor: Tensor) -> torch.dtype:
            # Only tensors of the model's own type are converted; those kept wider on purpose are not.
            return dtype if dtype is not None and tensor.dtype == kept else tensor.dtype

        def fetch(stored: str) -> Tensor:
            if stored in stacked:
                members = [info for info in experts.values() if info.stored_in == stored]
                return _filled_stack(state[stored], members, weights).to(target(state[stored]))
            if stored not in places or places[stored] not in weights:
                return state[stored].to(target(state[stored]))
            info, packed = linears[places[stored]], weights[places[stored]]
            dense = packed.dequantize().to(target(state[stored]))
            return dense.T if info.transposed else dense

        tensors = [TensorSpec(name, target(value), tuple(value.shape)) for name, value in state.items()]
        changes: dict[str, Any] = {
            "dtype": str(dtype or kept).removeprefix("torch."),
            "quantization_config": None,  # a GGUF model carries one
        }
        if tied:
            changes["tie_word_embeddings"] = False
        needed = expected_bytes(tensors, request.max_shard_size)
        with atomic_folder(request.out, overwrite=request.overwrite, needed_bytes=needed) as folder:
            write_checkpoint(folder, tensors, fetch, request.max_shard_size)
            total = verify_checkpoint(folder, tensors)
            if experts_per_layer(loaded.model.config) is not None:
                changes["auto_map"] = write_pruned_code(loaded.model, folder)
            write_companions(loaded, folder, changes)
            files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
        return ExportSummary(
            self.name, Path(request.out), files, {spec.name: spec.nbytes for spec in tensors}, total
        )


def _check_names(weights: Mapping[str, Stored], linears: Mapping[str, LinearInfo]) -> None:
    for name, packed in weights.items():
        info = linears.get(name)
        if info is None:
            raise ExportError(f"The model has no linear {name!r} to give a packed weight to.")
        if packed.shape != (info.out_features, info.in_features):
            raise ExportError(
                f"{name} is {info.out_features}x{info.in_features}, its packed weight {packed.shape[0]}x"
                f"{packed.shape[1]}: the candidates were made for another model."
            )


def _checkpoint_state(loaded: LoadedModel, replaced: set[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors by their checkpoint names, and the checkpoint name of every linear's weight."""
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = loaded.model
    state = distinct_state(model)
    missing = [name for name, value in state.items() if value.is_meta]
    if missing:
        raise ExportError(
            f"{missing[0]} is not in memory (offloaded); load the model on one device to export it."
        )
    owners = {(state[f"{name}.weight"].data_ptr(), state[f"{name}.weight"].shape): name for name in replaced}
    stored = revert_weight_conversion(model, dict(state))
    places = {
        key: owners[value.data_ptr(), value.shape]
        for key, value in stored.items()
        if (value.data_ptr(), value.shape) in owners
    }
    lost = replaced - set(places.values())
    if lost:
        raise ExportError(
            f"{min(lost)} is stored merged with other weights, which this format cannot write yet."
        )
    return stored, places


def _expert_places(state: Mapping[str, Tensor], experts: Sequence[ExpertLinear]) -> dict[str, str]:
    """Tensors of experts in a checkpoint, where a block may have another name than in the model."""
    known = {(info.block, info.expert, info.name.rpartition(".")[2]): info.name for info in experts}
    places = {}
    for key in state:
        match = _EXPERT.search(key)
        if match is not None:
            block, expert, projection = int(match[1]), int(match[2]), match[3]
            name = known.get((block, expert, projection))
            if name is not None:
                places[key] = name
    return places


def _filled_stack(original: Tensor, members: Sequence[LinearInfo], weights: Mapping[str, Stored]) -> Tensor:
    """A stacked tensor with some of its matrices replaced, for checkpoints that keep experts stacked."""
    result = original.clone()
    for info in members:
        assert isinstance(info, ExpertLinear)
        info.place(result).copy_(weights[info.name].dequantize())
    return result
