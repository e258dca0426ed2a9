"""Size of a written checkpoint, from its files alone.

Independent of the planning of budgets: sizes come from the file system and the headers, widths from the shapes of
packed tensors, so that they can certify the result of a search.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rco.evaluation.statistics import EvaluationError

__all__ = ["average_bits", "checkpoint_size", "read_headers"]

_WIDTHS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "F8_E4M3": 8,
}
_SCALES = ("weight_scale", "weight_zero_point", "weight_global_scale", "input_global_scale")


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int  # of the data, within the file
    nbytes: int


def read_headers(folder: str | Path) -> dict[str, _Entry]:
    """Every tensor of a folder's safetensors files.

    Raises:
        EvaluationError: There is no file, one is damaged, or a tensor is duplicated.
    """
    folder = Path(folder).expanduser()
    entries: dict[str, _Entry] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EvaluationError(f"{folder} holds no safetensors files.")
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(length, size)))
            except (UnicodeDecodeError, json.JSONDecodeError):
                raise EvaluationError(f"{path} is damaged: its header cannot be read.") from None
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != 8 + length + end:
            raise EvaluationError(
                f"{path} is damaged: {size} bytes instead of the {8 + length + end} of its header."
            )
        for name, entry in header.items():
            if name in entries:
                raise EvaluationError(f"{name} is both in {entries[name].path.name} and in {path.name}.")
            start, stop = entry["data_offsets"]
            entries[name] = _Entry(
                entry["dtype"], tuple(entry["shape"]), path, 8 + length + start, stop - start
            )
    return entries


def checkpoint_size(folder: str | Path) -> dict[str, Any]:
    """Bytes of a checkpoint.

    Returns:
        ``bytes`` of all safetensors files (as a size budget counts), ``data_bytes`` of the tensors in them,
        ``folder_bytes`` of everything in the folder, and ``files`` with the size of each.
    """
    entries = read_headers(folder)
    files = {
        path.name: path.stat().st_size
        for path in sorted(Path(folder).expanduser().iterdir())
        if path.is_file()
    }
    return {
        "bytes": sum(size for name, size in files.items() if name.endswith(".safetensors")),
        "data_bytes": sum(entry.nbytes for entry in entries.values()),
        "folder_bytes": sum(files.values()),
        "files": files,
    }


def average_bits(
    folder: str | Path,
    linears: Collection[str] | None = None,
    stacked: Mapping[str, tuple[str, int]] | None = None,
    twins: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Bits per weight of a compressed-tensors checkpoint, from the shapes of its packed tensors.

    Args:
        folder: The checkpoint.
        linears: Names of the linears to average over, including unquantized ones; None for all quantized ones.
        stacked: Linears among them that may be part of a larger tensor: its name, and their number of elements in
            it. Unquantized experts are stored like this.
        twins: Embeddings among them, and the output layer that shares the weight of each: what it stores counts.

    Returns:
        ``parameters``, ``weight_bits`` and ``average_bits`` (codes alone), ``stored_bits`` and
        ``average_stored_bits`` (padding, scales and zero points counted), and ``tensors`` with the same for each
        linear. All but the averages are exact integers.

    Raises:
        EvaluationError: A linear is missing, or its tensors contradict each other.
    """
    entries = read_headers(folder)
    packed = [name.removesuffix(".weight_scale") for name in entries if name.endswith(".weight_scale")]
    names = sorted(packed if linears is None else linears)
    declared = _declared_widths(Path(folder).expanduser())
    parts = {name: part for name, part in (stacked or {}).items() if part[0] in entries}
    tensors = {
        name: _plain(parts[name][1], entries[parts[name][0]])
        if name in parts
        else _one(name, entries, declared(name))
        for name in names
    }
    for name, twin in (twins or {}).items():
        copies = (entries.get(f"{twin}.{part}") for part in ("weight_packed", *_SCALES))
        tensors[name]["stored_bits"] += 8 * sum(entry.nbytes for entry in copies if entry is not None)
    parameters = sum(entry["parameters"] for entry in tensors.values())
    weight = sum(entry["weight_bits"] for entry in tensors.values())
    stored = sum(entry["stored_bits"] for entry in tensors.values())
    return {
        "parameters": parameters,
        "weight_bits": weight,
        "stored_bits": stored,
        "average_bits": weight / parameters if parameters else None,
        "average_stored_bits": stored / parameters if parameters else None,
        "tensors": tensors,
    }


def _declared_widths(folder: Path) -> Callable[[str], int | None]:
    """Width of a linear in the config, by its exact name or a pattern (``re:...``)."""
    path = folder / "config.json"
    text = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    groups = ((text.get("quantization_config") or {}).get("config_groups") or {}).values()
    named = {target: group["weights"]["num_bits"] for group in groups for target in group["targets"]}
    patterns = [
        (re.compile(name.removeprefix("re:")), bits) for name, bits in named.items() if name.startswith("re:")
    ]

    def declared(name: str) -> int | None:
        found = (bits for pattern, bits in patterns if pattern.match(name))
        return named[name] if name in named else next(found, None)

    return declared


def _plain(count: int, entry: _Entry) -> dict[str, int]:
    """Bits of ``count`` elements of an unpacked tensor."""
    width = _WIDTHS[entry.dtype]
    return {"bits": width, "parameters": count, "weight_bits": count * width, "stored_bits": count * width}


def _one(name: str, entries: dict[str, _Entry], declared: int | None) -> dict[str, int]:
    dense = entries.get(f"{name}.weight")
    scales = 8 * sum(entries[part].nbytes for each in _SCALES if (part := f"{name}.{each}") in entries)
    if dense is not None:  # elements of 8 bits have scales
        found = _plain(math.prod(dense.shape), dense)
        return {**found, "stored_bits": found["stored_bits"] + scales}
    codes, shape = entries.get(f"{name}.weight_packed"), entries.get(f"{name}.weight_shape")
    scale = entries.get(f"{name}.weight_scale")
    if codes is not None and codes.dtype == "U8" and scale is not None:  # two elements of 4 bits in a byte
        count = 2 * math.prod(codes.shape)
        stored = 8 * codes.nbytes
        return {"bits": 4, "parameters": count, "weight_bits": stored, "stored_bits": stored + scales}
    if codes is None or shape is None or scale is None:
        raise EvaluationError(
            f"The checkpoint has no weight of {name}, neither plain nor packed and complete."
        )
    rows, columns = _read_shape(shape)
    fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == codes.shape[1]]
    if declared is not None:
        fitting = [bits for bits in fitting if bits == declared]
    # From 32 columns on, the number of words determines the width; shorter rows need the config.
    if len(fitting) != 1 or codes.shape[0] != rows or codes.dtype != "I32":
        stated = "names no width" if declared is None else f"says {declared} bits"
        raise EvaluationError(
            f"{name} is {rows}x{columns}, packed as {codes.dtype} {codes.shape}, and the config {stated}: these do "
            "not determine one width."
        )
    width = fitting[0]
    count, stored = rows * columns, 8 * codes.nbytes + scales
    return {"bits": width, "parameters": count, "weight_bits": count * width, "stored_bits": stored}


def _read_shape(entry: _Entry) -> tuple[int, int]:
    with entry.path.open("rb") as file:
        file.seek(entry.start)
        data = file.read(16)
    return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")
