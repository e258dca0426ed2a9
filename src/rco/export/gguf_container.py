"""A GGUF file with the searched bytes: for llama.cpp and the programs built on it.

The file has the metadata, tokenizer and remaining tensors of the GGUF file that the model was loaded from. Chosen
tensors hold the very blocks that were searched and evaluated; nothing is quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rco.compression.gguf_target import GGUFTarget
from rco.export.exporter import ExportError, ExportRequest, ExportSummary, atomic_folder
from rco.formats.base import Format, Stored
from rco.models.gguf_file import GGUFReader, TensorEntry, file_bytes, write_gguf
from rco.models.layout import LinearInfo
from rco.models.moe.linears import ExpertLinear, model_linears
from rco.models.zoo import ModelError

__all__ = ["GGUFExporter", "written_file"]

_FILE = "model.gguf"


def written_file(folder: Path) -> Path:
    """The file in an exported folder."""
    return folder / _FILE


class GGUFExporter:
    """Writes a GGUF file in ggml's types, from a search over them."""

    name: ClassVar[str] = "gguf"
    kind: ClassVar[str] = "quantization"

    def export(self, request: ExportRequest) -> ExportSummary:
        """Write ``model.gguf``; tensors of linears without a weight in the request are copied."""
        loaded, weights = request.source, request.weights
        ends = {"include_head": True, "include_embedding": True}
        linears = {info.name: info for info in model_linears(loaded.layout, loaded.model, **ends)}
        unknown = next((name for name in weights if name not in linears), None)
        if unknown is not None:
            raise ExportError(f"The model has no linear {unknown!r} to give a weight to.")
        try:
            target = GGUFTarget.of(loaded, [linears[name] for name in weights])
        except ModelError as error:
            raise ExportError(str(error)) from error
        parts = _by_tensor(target, {name: linears[name] for name in weights}, weights)
        types = {name: members[0].format for name, members in parts.items()}
        reader = target.reader
        tensors: list[tuple[TensorEntry, Callable[[], Any]]] = []
        for name in reader.tensors:
            if name in parts:
                tensors.append((target.stored(name, types[name]), partial(_data, target, name, parts[name])))
            else:
                tensors.append((reader.tensors[name], partial(reader.data, name)))
        metadata, entries = target.metadata(types), [entry for entry, _ in tensors]
        expected = file_bytes(metadata, entries, reader.alignment)
        with atomic_folder(request.out, overwrite=request.overwrite, needed_bytes=expected) as folder:
            written = write_gguf(folder / _FILE, metadata, tensors, reader.alignment)
            found = GGUFReader(folder / _FILE)
            if written != expected or list(found.tensors.values()) != entries:
                raise ExportError(
                    f"The file has {written:,} bytes instead of {expected:,}, or other tensors than intended; "
                    "please report this."
                )
        sizes = {entry.name: entry.nbytes for entry in entries}
        return ExportSummary(self.name, Path(request.out), {_FILE: written}, sizes, written)


def _by_tensor(
    target: GGUFTarget, linears: Mapping[str, LinearInfo], weights: Mapping[str, Stored]
) -> dict[str, list[Stored]]:
    """Weights of every tensor that changes, experts in their order."""
    found: dict[str, dict[int, Stored]] = {}
    counts: dict[str, int] = {}
    for name, info in linears.items():
        entry = target.entry(info)
        if entry is None:
            raise ExportError(f"The GGUF file has no single tensor for {name}; leave it out (`skip`).")
        if not target.fits(info, weights[name].format) or tuple(weights[name].shape) != tuple(
            info.weight.shape
        ):
            raise ExportError(
                f"{name} is stored as {weights[name]}, which {entry.name} of {tuple(entry.shape)} cannot hold; "
                "search with `format='gguf'`."
            )
        expert = info.expert if isinstance(info, ExpertLinear) else 0
        counts[entry.name] = info.layer.num_experts if isinstance(info, ExpertLinear) else 1
        found.setdefault(entry.name, {})[expert] = weights[name]
    for name, members in found.items():
        kinds: dict[Format, None] = dict.fromkeys(weight.format for weight in members.values())
        if len(kinds) > 1 or len(members) != counts[name]:
            raise ExportError(
                f"{name} holds {counts[name]} matrices in one type, but {len(members)} are given in "
                f"{', '.join(kind.name for kind in kinds)}; search with `format='gguf'`."
            )
    return {name: [members[expert] for expert in sorted(members)] for name, members in found.items()}


def _data(target: GGUFTarget, name: str, members: list[Stored]) -> memoryview:
    """The data of a tensor: the blocks of its matrices, rows in the file's order."""
    rows = []
    for weight in members:
        (data,) = weight.format.file_tensors(weight).values()
        order = target.rows_in_file(name, weight.shape[0])
        rows.append(data.cpu() if order is None else data.cpu()[order])
    whole: Tensor = torch.cat(rows).contiguous().view(torch.uint8)
    return memoryview(whole.numpy())  # type: ignore[arg-type]
