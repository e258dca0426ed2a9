"""Reading and writing of GGUF files: metadata, tensors, and their exact sizes.

A file is a header with metadata (keys and values, the tokenizer among them) and the name, shape, type and offset of
every tensor, then the tensors' data, each padded to the file's alignment. Metadata are copied as bytes, known
keys or not, and the size of a file is known before it is written.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.formats.ggml.block_types import BLOCK_TYPES, GGMLFormat
from rco.formats.ggml.float_types import FLOAT_TYPES
from rco.models.zoo import ModelError

__all__ = [
    "TYPE_NAMES",
    "TYPE_NUMBERS",
    "GGUFFileError",
    "GGUFReader",
    "Metadata",
    "TensorEntry",
    "encoded_numbers",
    "encoded_value",
    "file_bytes",
    "padded",
    "write_gguf",
]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Types that can be copied but not decoded: number -> (weights, bytes) of a block.
_OTHER_TYPES = {
    9: (32, 36), 15: (256, 292), 19: (256, 50), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8),
    29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),
}  # fmt: skip
_SIZES: dict[int, tuple[int, int]] = {
    **_OTHER_TYPES,
    **{number: (1, dtype.itemsize) for number, dtype in FLOAT_TYPES.values()},
    **{kind.number: (kind.block, kind.block_bytes) for kind in BLOCK_TYPES.values()},
}
TYPE_NAMES: dict[int, str] = {
    **{number: name for name, (number, _) in FLOAT_TYPES.items()},
    **{kind.number: name for name, kind in BLOCK_TYPES.items()},
}
TYPE_NUMBERS: dict[str, int] = {name: number for number, name in TYPE_NAMES.items()}


class GGUFFileError(ModelError):
    """A file is not a GGUF file, or not a whole one; the message names the file and a remedy."""


def padded(size: int, alignment: int = _ALIGNMENT) -> int:
    """Bytes up to the next multiple of the alignment."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Metadata:
    """Keys of a file with their values as bytes: the number of the value's type, then the value."""

    values: Mapping[str, bytes]

    @cached_property
    def encoded(self) -> bytes:
        """The key-value section of the file."""
        return b"".join(_string(key) + value for key, value in self.values.items())

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, decoded."""
        raw = self.values.get(key)
        return default if raw is None else _decoded(raw)

    def with_values(self, changes: Mapping[str, bytes]) -> Metadata:
        """The same with some keys replaced or added at the end."""
        return replace(self, values={**self.values, **changes})


def encoded_value(value: bool | int | float | str | Sequence[str]) -> bytes:
    """A value for :class:`Metadata`; integers are 32 bits wide and not negative."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(each) for each in value)


def encoded_numbers(values: Sequence[int]) -> bytes:
    """A list of 32-bit integers for :class:`Metadata`."""
    return struct.pack(f"<IIQ{len(values)}i", _ARRAY, 5, len(values), *values)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _decoded(raw: bytes) -> Any:
    kind = int.from_bytes(raw[:4], "little")
    if kind in _SCALARS:
        return struct.unpack(f"<{_SCALARS[kind]}", raw[4:])[0]
    if kind == _STRING:
        return raw[12:].decode()
    inner, count = struct.unpack("<IQ", raw[4:16])
    if inner in _SCALARS:
        return list(struct.unpack(f"<{count}{_SCALARS[inner]}", raw[16:]))
    found, place = [], 16
    for _ in range(count):
        size = int.from_bytes(raw[place : place + 8], "little")
        found.append(raw[place + 8 : place + 8 + size].decode())
        place += 8 + size
    return found


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: Its name.
        shape: Extents as torch orders them, rows before columns; the file lists them in reverse.
        number: ggml's number of its type.
    """

    name: str
    shape: tuple[int, ...]
    number: int

    @property
    def columns(self) -> int:
        """Length of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of all matrices together."""
        return self.elements // max(self.columns, 1)

    @property
    def type_name(self) -> str:
        """Name of its type; its number if it has no name here."""
        return TYPE_NAMES.get(self.number, str(self.number))

    @property
    def nbytes(self) -> int:
        """Bytes of its data, without padding."""
        block, size = _SIZES[self.number]
        return self.elements // block * size

    @property
    def header_bytes(self) -> int:
        """Bytes of its entry in the header."""
        return 8 + len(self.name.encode()) + 4 + 8 * len(self.shape) + 4 + 8

    def entry(self, offset: int) -> bytes:
        """Its entry in the header, for data at an offset from the first tensor's."""
        extents = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *reversed(self.shape))
        return _string(self.name) + extents + struct.pack("<IQ", self.number, offset)


def file_bytes(metadata: Metadata, tensors: Iterable[TensorEntry], alignment: int = _ALIGNMENT) -> int:
    """Exact bytes of a file."""
    listed = list(tensors)
    header = 24 + len(metadata.encoded) + sum(tensor.header_bytes for tensor in listed)
    return padded(header, alignment) + sum(padded(tensor.nbytes, alignment) for tensor in listed)


class GGUFReader:
    """The content of a GGUF file; data are read on demand.

    Args:
        path: The file.

    Attributes:
        metadata: Keys and values.
        tensors: Entries by name, in the order of the file.
        alignment: Alignment of the data.

    Raises:
        GGUFFileError: The file is no GGUF file, of another version, or shorter than its header says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 24:
                    raise GGUFFileError(
                        f"{self.path} has {size} bytes, too few for a GGUF file; get it again."
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise GGUFFileError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        self._place = 0
        magic, version = self._take(4), self._number("<I")
        if magic != _MAGIC:
            raise GGUFFileError(
                f"{self.path} begins with {bytes(magic)!r} instead of b'GGUF', so it is not a GGUF file."
            )
        if version not in _VERSIONS:
            raise GGUFFileError(
                f"{self.path} is a GGUF file of version {version} (big-endian files look like this, too); versions "
                f"{' and '.join(map(str, _VERSIONS))} are read. Convert it with a newer llama.cpp."
            )
        count, keys = self._number("<Q"), self._number("<Q")
        self.metadata = Metadata({self._text(): self._value() for _ in range(keys)})
        self.alignment = int(self.metadata.get("general.alignment", _ALIGNMENT))
        self.tensors: dict[str, TensorEntry] = {}
        offsets: dict[str, int] = {}
        for _ in range(count):
            name, extents = self._text(), self._number("<I")
            shape = tuple(self._number("<Q") for _ in range(extents))[::-1]
            number, offset = self._number("<I"), self._number("<Q")
            if number not in _SIZES:
                raise GGUFFileError(
                    f"{self.path} stores {name} in a type with the number {number}, which is not known here; "
                    "re-create the file with another type, such as bf16."
                )
            self.tensors[name], offsets[name] = TensorEntry(name, shape, number), offset
        data = padded(self._place, self.alignment)
        self._starts = {name: data + offset for name, offset in offsets.items()}
        for name, tensor in self.tensors.items():
            if self._starts[name] + tensor.nbytes > size:
                raise GGUFFileError(
                    f"{self.path} is cut off: {name} ends at byte {self._starts[name] + tensor.nbytes:,}, but the "
                    f"file has {size:,}; get it again."
                )

    def _take(self, size: int) -> bytes:
        if self._place + size > len(self._map):
            raise GGUFFileError(
                f"{self.path} is cut off: its header goes on after its {len(self._map):,} bytes; get it again."
            )
        self._place += size
        return self._map[self._place - size : self._place]

    def _number(self, kind: str) -> int:
        return int(struct.unpack(kind, self._take(struct.calcsize(kind)))[0])

    def _text(self) -> str:
        try:
            return self._take(self._number("<Q")).decode()
        except UnicodeDecodeError as error:
            raise GGUFFileError(f"{self.path} has a name that is no text ({error}); get it again.") from None

    def _value(self) -> bytes:
        start = self._place
        self._skip(self._number("<I"))
        return self._map[start : self._place]

    def _skip(self, kind: int) -> None:
        if kind in _SCALARS:
            self._take(struct.calcsize(f"<{_SCALARS[kind]}"))
        elif kind == _STRING:
            self._take(self._number("<Q"))
        elif kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _SCALARS:
                self._take(count * struct.calcsize(f"<{_SCALARS[inner]}"))
            else:
                for _ in range(count):
                    self._skip(inner)
        else:
            raise GGUFFileError(f"{self.path} has metadata of an unknown type {kind}; get it again.")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self._map)

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor."""
        start = self._starts[name]
        return memoryview(self._map)[start : start + self.tensors[name].nbytes]

    def decode(self, name: str) -> Tensor:
        """A tensor as float32, bit for bit as ggml decodes it.

        Raises:
            GGUFFileError: Its type cannot be decoded.
        """
        entry = self.tensors[name]
        return self.decode_rows(name, torch.arange(entry.rows)).view(entry.shape)

    def decode_rows(self, name: str, places: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Some rows of a tensor as float32 (rows, columns); rows of all its matrices are counted through."""
        entry = self.tensors[name]
        kind = TYPE_NAMES.get(entry.number)
        if kind is None:
            raise GGUFFileError(
                f"{self.path} stores {name} in ggml's type {entry.number}, which cannot be decoded here; re-create "
                "the file with another type, such as bf16."
            )
        data = np.frombuffer(self.data(name), dtype=np.uint8).reshape(entry.rows, -1)
        rows = torch.from_numpy(data[places.numpy()]).to(device)
        if kind in FLOAT_TYPES:
            return rows.view(FLOAT_TYPES[kind][1]).float()
        return GGMLFormat(kind).from_blocks(rows, (len(rows), entry.columns)).dequantize(torch.float32)


def write_gguf(
    path: Path,
    metadata: Metadata,
    tensors: Sequence[tuple[TensorEntry, Callable[[], Any]]],
    alignment: int = _ALIGNMENT,
) -> int:
    """Write a file, which must not exist, and return its size.

    Args:
        path: The file.
        metadata: Keys and values.
        tensors: Entries in order, each with a function that returns the data as a buffer.
        alignment: Alignment of the data, as in the metadata.

    Raises:
        ValueError: Data of a tensor have another size than their entry says.
    """
    with open(path, "xb") as file:
        file.write(_MAGIC + struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(metadata.values)))
        file.write(metadata.encoded)
        offset = 0
        for entry, _ in tensors:
            file.write(entry.entry(offset))
            offset += padded(entry.nbytes, alignment)
        file.write(b"\0" * (padded(file.tell(), alignment) - file.tell()))
        for entry, make in tensors:
            data = memoryview(make()).cast("B")
            if len(data) != entry.nbytes:
                raise ValueError(f"{entry.name} has {len(data)} bytes of data instead of {entry.nbytes}.")
            file.write(data)
            file.write(b"\0" * (padded(len(data), alignment) - len(data)))
        return file.tell()
