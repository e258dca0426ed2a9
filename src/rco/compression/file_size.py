"""Exact costs of options on disk: tensors, bytes and bits of each option of each linear.

Three counts, one for each kind of budget:

* :func:`weight_bits`: parameters times width, as papers count;
* :func:`stored_bits`: codes (padded to whole words), scales and zero points, as they are stored;
* :func:`option_bytes` and :func:`fixed_bytes`: the whole of all ``*.safetensors`` files, headers included. The
  index of a sharded checkpoint, the config and the tokenizer do not count.

The last one is an upper bound, because the digits of an offset depend on the tensors before it: it exceeds the
written size by at most a few bytes per tensor. :func:`checkpoint_bytes` is exact once the allocation is known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from rco.formats.base import Format, TensorLayout
from rco.formats.original import ORIGINAL
from rco.models.moe.layers import stored_names

__all__ = [
    "DTYPE_NAMES",
    "FileLayout",
    "LinearLike",
    "TensorSpec",
    "allocation_tensors",
    "checkpoint_bytes",
    "distinct_state",
    "fixed_bytes",
    "fixed_tensors",
    "option_bytes",
    "option_tensors",
    "parse_size",
    "plan_shards",
    "safetensors_header",
    "stored_bits",
    "stored_tensors",
    "weight_bits",
]

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_METADATA = '"__metadata__":{"format":"pt"}'
_UNITS = {"": 1, "B": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class LinearLike(Protocol):
    """Attributes of a linear for accounting, such as :class:`rco.models.layout.LinearInfo`."""

    @property
    def name(self) -> str:
        """Full dotted name."""
        ...

    @property
    def stored_name(self) -> str:
        """Name in a checkpoint, which may differ from the name in the model."""
        ...

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        ...

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        ...

    @property
    def weight(self) -> Tensor:
        """The full-precision weight; only its type is used."""
        ...

    @property
    def stored_in(self) -> str:
        """Entry of the model's state dict that holds the weight; several experts share one."""
        ...

    @property
    def twin(self) -> str | None:
        """Name of the output layer that shares an embedding's weight."""
        ...

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Buffers of an embedding beside its weight, such as a factor."""
        ...


@dataclass(frozen=True)
class TensorSpec:
    """One entry of a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"{self.name} has type {self.dtype}, which safetensors files do not hold.")

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return prod(self.shape) * self.dtype.itemsize

    def entry(self, start: int) -> str:
        """Header entry for data that begin at ``start``."""
        shape = ",".join(map(str, self.shape))
        return (
            f'{json.dumps(self.name)}:{{"dtype":"{DTYPE_NAMES[self.dtype]}","shape":[{shape}],'
            f'"data_offsets":[{start},{start + self.nbytes}]}}'
        )

    def header_bytes(self, digits: int) -> int:
        """Most bytes of the header entry, comma included, for offsets of at most ``digits`` digits."""
        shortest = len(self.entry(0).encode()) - 1 - len(str(self.nbytes))
        return shortest + 2 * digits + 1


@dataclass(frozen=True)
class FileLayout:
    """Division of a checkpoint into files, as far as the bound on its size depends on it.

    Attributes:
        digits: Digits of the largest offset that can occur.
        max_shard_bytes: Data bytes after which a new file begins.
        dense_bytes: Data bytes of the uncompressed model.
    """

    digits: int
    max_shard_bytes: int
    dense_bytes: int

    @classmethod
    def of(cls, model: nn.Module, max_shard_size: int | str = "5GB") -> FileLayout:
        """The layout for every allocation of a model."""
        limit = parse_size(max_shard_size)
        tensors = stored_tensors(model)
        dense = sum(spec.nbytes for spec in tensors)
        # Codes, scales and zero points of a sane grid stay far below four times the dense weight.
        largest = 4 * max((spec.nbytes for spec in tensors), default=0) + 2**10
        return cls(len(str(min(4 * dense + 2**20, max(limit, largest)))), limit, dense)

    @property
    def overhead(self) -> int:
        """Most bytes of all files beyond their tensors' data and entries."""
        # Two neighbouring files hold more than one limit together, or they would be one file.
        files = 2 * (4 * self.dense_bytes // self.max_shard_bytes) + 1 if self._sharded else 1
        return files * (8 + len(_METADATA) + 3 + 7)  # length, metadata with braces and comma, padding to 8

    @property
    def _sharded(self) -> bool:
        return 4 * self.dense_bytes > self.max_shard_bytes


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 5000, ``"5GB"`` (10^9) or ``"5GiB"`` (2^30)."""
    if isinstance(size, str):
        text = size.strip().upper().replace(" ", "")
        number = text.rstrip("KMGTIB")
        unit = text[len(number) :]
        factor = _UNITS.get(unit.removesuffix("B")) or _BINARY_UNITS.get(unit.removesuffix("B"))
        try:
            value = int(Decimal(number) * factor) if factor else 0  # a float would turn 3.1 GB into less
        except (ArithmeticError, ValueError):
            value = 0
    else:
        value = size
    if value < 1:
        raise ValueError(
            f"A size is a positive number of bytes with a unit such as 800MB, 3.1GB or 5GiB; got {size!r}."
        )
    return value


# ---------------------------------------------------------------------- one option of one linear


def option_tensors(linear: LinearLike, option: Format) -> list[TensorSpec]:
    """Tensors that store a linear's weight (its bias is stored unchanged).

    Readers tie a tensor named ``weight`` by themselves; all others of a tied embedding are stored twice.
    compressed-tensors expects the buffers of an embedding in the file, unless it is packed.
    """
    shape = (linear.out_features, linear.in_features)
    layout = option.on(linear.in_features).layout(shape, linear.weight.dtype)
    tensors = {f"{linear.stored_name}.{name}": tensor for name, tensor in layout.items()}
    if linear.twin is not None:
        tensors |= {f"{linear.twin}.{name}": tensor for name, tensor in layout.items() if name != "weight"}
    if option != ORIGINAL and "weight" in layout:
        tensors |= {
            f"{linear.stored_name}.{name}": TensorLayout(buffer.dtype, tuple(buffer.shape))
            for name, buffer in linear.buffers.items()
        }
    return [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def option_bytes(linear: LinearLike, option: Format, layout: FileLayout) -> int:
    """Most bytes that an option adds to the files: data and header entries."""
    # The weight of a tied embedding may be stored under the name of the output layer.
    longer = max(0, len(linear.twin or "") - len(linear.stored_name))
    return longer + sum(
        spec.nbytes + spec.header_bytes(layout.digits) for spec in option_tensors(linear, option)
    )


def weight_bits(linear: LinearLike, option: Format) -> int:
    """Parameters times width. An unquantized weight counts at the width of its type."""
    width = linear.weight.dtype.itemsize * 8 if option == ORIGINAL else option.bits
    return linear.out_features * linear.in_features * width


def stored_bits(linear: LinearLike, option: Format) -> int:
    """Bits of codes, scales and zero points as stored; the two numbers of ``weight_shape`` are not counted."""
    uncounted = {"weight_shape", *linear.buffers}
    tensors = option_tensors(linear, option)
    return 8 * sum(spec.nbytes for spec in tensors if spec.name.rpartition(".")[2] not in uncounted)


# ---------------------------------------------------------------------- everything else


def stored_tensors(model: nn.Module, linears: Iterable[LinearLike] = ()) -> list[TensorSpec]:
    """Every tensor of a model's unquantized checkpoint, in order; a tied weight once, under its first name.

    Args:
        model: The model.
        linears: Linears, of which those stacked in one tensor of the model (experts) are listed one by one, as in
            checkpoints.
    """
    parts: dict[str, list[LinearLike]] = {}
    for linear in linears:
        if linear.stored_in != f"{linear.name}.weight":
            parts.setdefault(linear.stored_in, []).append(linear)
    rename, tensors = stored_names(model), []
    for name, value in distinct_state(model).items():
        if name in parts:
            tensors += [
                TensorSpec(f"{part.stored_name}.weight", value.dtype, (part.out_features, part.in_features))
                for part in parts[name]
            ]
        else:
            tensors.append(TensorSpec(rename(name), value.dtype, tuple(value.shape)))
    return tensors


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without second names of the same parameter."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)  # without it every entry would be a new tensor object
    for name, value in state.items():
        first.setdefault(id(value), name)
    return {name: value.detach() for name, value in state.items() if first[id(value)] == name}


def fixed_tensors(
    model: nn.Module, quantized: Collection[str], linears: Collection[LinearLike] = ()
) -> list[TensorSpec]:
    """Tensors that no choice changes: all but the weights of the named linears.

    Quantizing a tied output layer leaves the embedding in place. ``linears`` is as for
    :func:`stored_tensors`.
    """
    tensors, rename = stored_tensors(model, linears), stored_names(model)
    weights = {f"{rename(name)}.weight": name for name in quantized}
    for linear in linears:
        if linear.twin is not None and linear.name in quantized:
            weights[f"{linear.twin}.weight"] = linear.twin
    known = {spec.name for spec in tensors} | {rename(name) for name in model.state_dict(keep_vars=True)}
    unknown = sorted(name for stored, name in weights.items() if stored not in known)
    if unknown:
        raise ValueError(f"The model has no linears {', '.join(unknown[:4])}; take names from its layout.")
    return [spec for spec in tensors if spec.name not in weights]


def fixed_bytes(
    model: nn.Module, quantized: Collection[str], layout: FileLayout, linears: Collection[LinearLike] = ()
) -> int:
    """Most bytes of the files apart from the weights of the named linears."""
    tensors = fixed_tensors(model, quantized, linears)
    return layout.overhead + sum(spec.nbytes + spec.header_bytes(layout.digits) for spec in tensors)


# ---------------------------------------------------------------------- whole files


def plan_shards(tensors: Iterable[TensorSpec], max_shard_size: int | str = "5GB") -> list[list[TensorSpec]]:
    """Cut a list of tensors into files of at most that many data bytes (a larger tensor gets its own file).

    Inside a file wide types come first, so that every tensor is aligned without gaps.
    """
    limit = parse_size(max_shard_size)
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in tensors:
        if shards[-1] and used + spec.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return [sorted(shard, key=lambda spec: -spec.dtype.itemsize) for shard in shards]


def safetensors_header(shard: Sequence[TensorSpec]) -> bytes:
    """Length and header of a safetensors file, padded to 8 bytes."""
    entries, start = [_METADATA], 0
    for spec in shard:
        entries.append(spec.entry(start))
        start += spec.nbytes
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def checkpoint_bytes(
    model: nn.Module,
    linears: Iterable[LinearLike],
    options: Mapping[str, Format],
    max_shard_size: int | str = "5GB",
) -> int:
    """Exact bytes of all safetensors files for one format per linear; unnamed linears are unquantized."""
    tensors = allocation_tensors(model, linears, options)
    return sum(
        len(safetensors_header(shard)) + sum(spec.nbytes for spec in shard)
        for shard in plan_shards(tensors, max_shard_size)
    )


def allocation_tensors(
    model: nn.Module, linears: Iterable[LinearLike], options: Mapping[str, Format]
) -> list[TensorSpec]:
    """Tensors of a checkpoint in writing order: packed tensors take the place of their weight."""
    linears = list(linears)
    packed = {
        linear.stored_name: option_tensors(linear, options[linear.name])
        for linear in linears
        if linear.name in options and options[linear.name] != ORIGINAL
    }
    # A tied weight is stored under the first of its names.
    owners = {linear.twin: linear.stored_name for linear in linears if linear.twin is not None}
    tensors: list[TensorSpec] = []
    for spec in stored_tensors(model, linears):
        name = spec.name.removesuffix(".weight")
        tensors += packed.pop(name if name in packed else owners.get(name, name), [spec])
    for rest in packed.values():  # a tied output layer has its own tensor only if quantized
        tensors += rest
    return tensors
