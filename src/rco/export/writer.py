"""Safetensors files, written tensor by tensor and verified by reading them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rco.compression.file_size import DTYPE_NAMES, TensorSpec, plan_shards, safetensors_header
from rco.export.exporter import ExportError

__all__ = ["expected_bytes", "verify_checkpoint", "write_checkpoint"]

_INDEX = "model.safetensors.index.json"


def expected_bytes(tensors: Sequence[TensorSpec], max_shard_size: int | str) -> int:
    """Bytes of all safetensors files that :func:`write_checkpoint` will write."""
    return sum(
        len(safetensors_header(shard)) + sum(spec.nbytes for spec in shard)
        for shard in plan_shards(tensors, max_shard_size)
    )


def write_checkpoint(
    folder: Path,
    tensors: Sequence[TensorSpec],
    fetch: Callable[[str], Tensor],
    max_shard_size: int | str = "5GB",
) -> None:
    """Write tensors as one safetensors file, or as several with an index.

    Args:
        folder: The folder to write to.
        tensors: Tensors to write; the names must be distinct.
        fetch: Returns a tensor by name; at most one is in memory at a time.
        max_shard_size: Data bytes per file.
    """
    shards = plan_shards(tensors, max_shard_size)
    names = _file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(safetensors_header(shard))
            for spec in shard:
                file.write(_raw(fetch(spec.name), spec))
    if len(shards) > 1:
        places = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in tensors)}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _raw(tensor: Tensor, spec: TensorSpec) -> Any:
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise ExportError(
            f"{spec.name} should be {spec.dtype} {spec.shape}, got {tensor.dtype} {tuple(tensor.shape)}."
        )
    dense = tensor.detach().to("cpu").contiguous()
    # A single element counts as contiguous with any stride, but a view of another type needs stride 1.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def verify_checkpoint(folder: Path, tensors: Sequence[TensorSpec]) -> int:
    """Compare the headers of a folder's files with the expected tensors.

    Returns:
        Bytes of all safetensors files.

    Raises:
        ExportError: A tensor is missing, unexpected, duplicated or of another kind, or a file has another length.
    """
    wanted = {spec.name: spec for spec in tensors}
    found: dict[str, str] = {}
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        total += size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            spec = wanted.get(name)
            start, stop = entry["data_offsets"]
            same = spec is not None and (entry["dtype"], tuple(entry["shape"])) == (
                DTYPE_NAMES[spec.dtype],
                spec.shape,
            )
            if not same or start != end or stop - start != spec.nbytes or name in found:  # type: ignore[union-attr]
                raise ExportError(f"{path.name} holds {name} as {entry}, expected {spec}; export again.")
            found[name], end = path.name, stop
        if size != 8 + length + end:
            raise ExportError(
                f"{path.name} has {size} bytes instead of {8 + length + end} as in its header; export again."
            )
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ExportError(f"The checkpoint lacks {len(missing)} tensors, first {missing[0]}; export again.")
    index = folder / _INDEX
    if index.is_file() and json.loads(index.read_text(encoding="utf-8"))["weight_map"] != found:
        raise ExportError(f"{index.name} does not agree with the files; export again.")
    return total
