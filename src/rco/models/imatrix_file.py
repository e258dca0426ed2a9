"""Importance matrices in llama.cpp's files: the mean squared inputs of every column of a tensor.

llama.cpp writes GGUF files with sums and counts, earlier versions a binary format of their own (``.dat``); both are
read, the former is written. A tensor of stacked experts has one row of means per expert.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.atomic_files import atomic_path
from rco.models.gguf_file import (
    TYPE_NUMBERS,
    GGUFReader,
    Metadata,
    TensorEntry,
    encoded_value,
    write_gguf,
)
from rco.models.zoo import ModelError

__all__ = ["ImportanceMatrix"]

_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class ImportanceMatrix:
    """Mean squared inputs of tensors.

    Attributes:
        means: Tensor name -> (matrices, columns), float32.
        counts: Tensor name -> (matrices,) tokens that were averaged.
        chunks: Number of sequences.
        chunk_size: Tokens of a sequence.
        source: Name of the text.
    """

    means: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]
    chunks: int = 0
    chunk_size: int = 0
    source: str = ""

    def of(self, name: str, matrices: int, columns: int) -> Tensor:
        """(matrices, columns) importances of a tensor; ones for a matrix that no token reached.

        Raises:
            ModelError: The tensor is missing, or has another shape: the file belongs to another model.
        """
        found = self.means.get(name)
        if found is None:
            raise ModelError(
                f"The importance matrix has no entry for {name}, so it belongs to another model or is incomplete; "
                "leave it out, and one is measured."
            )
        if tuple(found.shape) != (matrices, columns):
            raise ModelError(
                f"The importance matrix has {found.shape[0]} x {found.shape[1]} numbers for {name}, the model "
                f"{matrices} x {columns}: it belongs to another model. Leave it out, and one is measured."
            )
        reached = self.counts[name] > 0
        return torch.where(reached[:, None], found, 1.0)

    @classmethod
    def read(cls, path: Path) -> ImportanceMatrix:
        """Read a file of either form.

        Raises:
            ModelError: It is no importance matrix, or cut off.
        """
        try:
            with open(path, "rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
        return cls._read_gguf(path) if magic == b"GGUF" else cls._read_dat(path)

    @classmethod
    def _read_gguf(cls, path: Path) -> ImportanceMatrix:
        reader = GGUFReader(path)
        names = [name.removesuffix(_SUMS) for name in reader.tensors if name.endswith(_SUMS)]
        if not names:
            raise ModelError(
                f"{path} is a GGUF file without an importance matrix; make one with llama-imatrix."
            )
        means, counts = {}, {}
        for name in names:
            sums = reader.decode(name + _SUMS)
            matrices = sums.reshape(-1, sums.shape[-1])
            if name + _COUNTS not in reader.tensors:
                raise ModelError(
                    f"{path} has sums of {name} without counts; make it again with llama-imatrix."
                )
            count = reader.decode(name + _COUNTS).reshape(-1)
            means[name] = matrices / count.clamp_min(1)[:, None]
            counts[name] = count
        sources = reader.metadata.get("imatrix.datasets") or [""]
        chunks = int(reader.metadata.get("imatrix.chunk_count", 0))
        size = int(reader.metadata.get("imatrix.chunk_size", 0))
        return cls(means, counts, chunks, size, str(sources[0]))

    @classmethod
    def _read_dat(cls, path: Path) -> ImportanceMatrix:
        data, place = path.read_bytes(), 0

        def number() -> int:
            nonlocal place
            place += 4
            if place > len(data):
                raise ModelError(
                    f"{path} is cut off, or no importance matrix; make it again with llama-imatrix."
                )
            return int(struct.unpack("<i", data[place - 4 : place])[0])

        means, counts = {}, {}
        for _ in range(number()):
            length = number()
            name = data[place : place + length].decode(errors="replace")
            place += length
            calls, size = number(), number()
            if length < 1 or size < 1 or calls < 0 or place + 4 * size > len(data):
                raise ModelError(
                    f"{path} is cut off, or no importance matrix; make it again with llama-imatrix."
                )
            values = np.frombuffer(data, dtype="<f4", count=size, offset=place)
            place += 4 * size
            means[name] = torch.from_numpy(values / np.float32(max(calls, 1))).view(1, -1)
            counts[name] = torch.tensor([float(calls)])
        if not means:
            raise ModelError(
                f"{path} is an importance matrix without entries; make it again with llama-imatrix."
            )
        return cls(means, counts, number() if place + 4 <= len(data) else 0)

    def shaped(self, matrices: Mapping[str, int]) -> ImportanceMatrix:
        """The same with the entries of stacked experts cut apart; the old form does not tell their number."""
        means, counts = dict(self.means), dict(self.counts)
        for name, count in matrices.items():
            if name in means and len(means[name]) == 1 and count > 1 and means[name].numel() % count == 0:
                means[name], counts[name] = means[name].view(count, -1), counts[name].expand(count)
        return ImportanceMatrix(means, counts, self.chunks, self.chunk_size, self.source)

    def write(self, path: Path) -> None:
        """Write llama.cpp's GGUF form, which ``llama-quantize --imatrix`` reads."""
        metadata = Metadata(
            {
                "general.type": encoded_value("imatrix"),
                "imatrix.datasets": encoded_value([self.source]),
                "imatrix.chunk_count": encoded_value(self.chunks),
                "imatrix.chunk_size": encoded_value(self.chunk_size),
            }
        )
        tensors: list[tuple[TensorEntry, Any]] = []
        for name in sorted(self.means):
            means, counts = self.means[name].float().cpu(), self.counts[name].float().cpu()
            sums = (means * counts[:, None]).contiguous()
            for suffix, value in ((_SUMS, sums), (_COUNTS, counts[:, None].contiguous())):
                entry = TensorEntry(name + suffix, tuple(value.shape), TYPE_NUMBERS["f32"])
                tensors.append((entry, lambda value=value: value.numpy().data))
        with atomic_path(path) as temporary:
            temporary.unlink(missing_ok=True)
            write_gguf(temporary, metadata, tensors)
