"""The GGUF file that a compression writes: its tensors, the type of each under an allocation, exact bytes.

The file has the metadata and tensors of the GGUF file that the model was loaded from. Tensors of searched linears
take the chosen types; all others, and those kept as they are, are copied byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rco.formats.base import Format
from rco.formats.ggml.block_types import BLOCK_TYPES, GGMLFormat
from rco.formats.ggml.float_types import GGMLFloat
from rco.formats.original import ORIGINAL
from rco.models.embeddings import EMBEDDING_ROLE
from rco.models.gguf_conversion import interleaved
from rco.models.gguf_file import (
    TYPE_NUMBERS,
    GGUFReader,
    Metadata,
    TensorEntry,
    encoded_value,
    file_bytes,
    padded,
)
from rco.models.gguf_names import gguf_names
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.linears import ExpertLinear
from rco.models.zoo import ModelError

__all__ = ["DEFAULT_TYPES", "GGUFTarget", "parse_types"]

DEFAULT_TYPES = (
    "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "iq4_xs", "iq4_nl", "q4_k", "q5_0", "q5_k", "q5_1",
    "q6_k", "q8_0",
)  # fmt: skip
"""Types that a search chooses from unless others are named, where they fit (benchmarks/gguf_menu.py)."""

# llama.cpp's numbers of whole files, by the type of most of their weights.
_FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15,
    "q5_k": 17, "q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq4_nl": 25, "iq3_s": 26, "iq2_s": 28,
    "iq4_xs": 30, "bf16": 32,
}  # fmt: skip
_QUANTIZATION_VERSION = 2
_CHECKED_ROWS = 16
_EMBEDDING = "token_embd.weight"


def parse_types(text: str | None, *, importance: bool, also: Iterable[str] = ()) -> tuple[Format, ...]:
    """The types of a comma-separated list; None: the default ones.

    Args:
        text: Names such as ``q4_k,iq4_xs``.
        importance: Whether there is an importance matrix; without one, default types that need it are left out.
        also: Types to add to the default ones.

    Raises:
        ValueError: A name is unknown, or a named type needs an importance matrix.
    """
    parts = (part.strip().lower() for part in (text or "").split(","))
    names = (*DEFAULT_TYPES, *also) if text is None else tuple(part for part in parts if part)
    found: dict[str, Format] = {}
    for name in names:
        option = GGMLFormat.parse(name) or GGMLFloat.parse(name)
        if option is None:
            raise ValueError(
                f"`types` is a list of ggml types such as q4_k,iq4_xs,q8_0; {name!r} is none of "
                f"{', '.join(BLOCK_TYPES)}, f16, bf16, f32."
            )
        needs = isinstance(option, GGMLFormat) and option.type.needs_importance
        if needs and not importance:
            if text is None:
                continue
            raise ValueError(
                f"ggml encodes {name} with an importance matrix only: leave out `method='rtn'`, or the type."
            )
        found[name] = option
    if not found:
        raise ValueError("`types` names no type; give at least one, such as q4_k.")
    return tuple(found.values())


@dataclass(frozen=True)
class GGUFTarget:
    """Tensors of a GGUF file, and the linears that they hold.

    Attributes:
        reader: The file that the model was loaded from.
        names: Linear -> its tensor; experts of a layer share one.
        heads: Tensor -> attention heads whose rows are interleaved in the file, not half by half as in the model.
    """

    reader: GGUFReader
    names: Mapping[str, str]
    heads: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedModel, linears: Sequence[LinearInfo]) -> GGUFTarget:
        """The file of a model that was loaded from one; every linear is found in it and compared on some rows.

        Raises:
            ModelError: The model does not come from a GGUF file, or a weight is arranged in an unknown way.
        """
        if loaded.gguf is None:
            raise ModelError(
                f"{loaded.name} is no GGUF file, and one is written from another: convert the model with llama.cpp "
                "(`convert_hf_to_gguf.py MODEL --outtype bf16 --outfile model-bf16.gguf`) and pass that file."
            )
        reader = GGUFReader(loaded.gguf)
        names: dict[str, str] = {}
        heads: dict[str, int] = {}
        for info in linears:
            embedding = info.role == EMBEDDING_ROLE
            named = (_EMBEDDING,) if embedding else gguf_names(loaded.layout, info.name)
            found = [name for name in named if name in reader.tensors]
            if len(found) != 1:
                continue  # split among tensors, or tied to the embedding: copied
            (names[info.name],) = found
            _check_shape(reader.tensors[found[0]], info)
            if not isinstance(info, ExpertLinear) or info.expert == 0:
                turned = _arrangement(reader, found[0], info)
                if turned:
                    heads[found[0]] = turned
        return cls(reader, names, heads)

    def entry(self, info: LinearInfo) -> TensorEntry | None:
        """The tensor of a linear; None if it is not one tensor of the file."""
        name = self.names.get(info.name)
        return None if name is None else self.reader.tensors[name]

    def fits(self, info: LinearInfo, option: Format) -> bool:
        """Whether a linear can be stored in a type."""
        if option == ORIGINAL:
            return True
        entry = self.entry(info)
        return entry is not None and isinstance(option, GGMLFormat | GGMLFloat) and option.fits(entry.columns)

    def stored(self, name: str, option: Format) -> TensorEntry:
        """The entry of a tensor in a type."""
        entry = self.reader.tensors[name]
        return entry if option == ORIGINAL else replace(entry, number=TYPE_NUMBERS[option.name])

    def option_bytes(self, members: Iterable[LinearInfo], option: Format, *, aligned: bool) -> int:
        """Bytes of the tensors of some linears in a type, each padded if ``aligned``."""
        names = dict.fromkeys(self.names[info.name] for info in members if info.name in self.names)
        sizes = (self.stored(name, option).nbytes for name in names)
        return sum(padded(size, self.reader.alignment) if aligned else size for size in sizes)

    def other_bytes(self, linears: Iterable[LinearInfo], *, aligned: bool) -> int:
        """Bytes of all other tensors; with ``aligned`` padded, and with those of the header."""
        searched = {self.names[info.name] for info in linears if info.name in self.names}
        others = [entry for name, entry in self.reader.tensors.items() if name not in searched]
        if not aligned:
            return sum(entry.nbytes for entry in others)
        whole = file_bytes(self.metadata({}), self.reader.tensors.values(), self.reader.alignment)
        kept = sum(padded(self.reader.tensors[name].nbytes, self.reader.alignment) for name in searched)
        return whole - kept

    @cached_property
    def elements(self) -> int:
        """Number of weights of all tensors, as llama.cpp counts for bits per weight."""
        return sum(entry.elements for entry in self.reader.tensors.values())

    def metadata(self, types: Mapping[str, Format]) -> Metadata:
        """Metadata of the file for a type by tensor; its size does not depend on the types."""
        counts: dict[str, int] = {}
        for name, entry in self.reader.tensors.items():
            kind = types[name].name if name in types and types[name] != ORIGINAL else entry.type_name
            counts[kind] = counts.get(kind, 0) + entry.elements
        commonest = max(counts, key=lambda kind: counts[kind])
        kept = {
            key: value
            for key, value in self.reader.metadata.values.items()
            if not key.startswith("quantize.imatrix.")
        }
        return Metadata(kept).with_values(
            {
                "general.file_type": encoded_value(_FILE_TYPES.get(commonest, 0)),
                "general.quantization_version": encoded_value(_QUANTIZATION_VERSION),
            }
        )

    def rows_in_file(self, name: str, rows: int) -> Tensor | None:
        """Order of the rows of one matrix in the file; None if it is the model's."""
        heads = self.heads.get(name)
        return None if heads is None else interleaved(rows, heads)


def _check_shape(entry: TensorEntry, info: LinearInfo) -> None:
    matrices = info.layer.num_experts if isinstance(info, ExpertLinear) else 1
    expected = (matrices * info.out_features, info.in_features)
    if (entry.rows, entry.columns) != expected:
        raise ModelError(
            f"{entry.name} of the GGUF file is {entry.rows}x{entry.columns}, but {info.name} needs "
            f"{expected[0]}x{expected[1]}; the file's architecture is not supported."
        )


def _arrangement(reader: GGUFReader, name: str, info: LinearInfo) -> int:
    """Heads whose rows are interleaved in the file, 0 if rows are those of the model; compared on a few rows."""
    weight = info.weight.detach()
    places = torch.linspace(0, info.out_features - 1, min(_CHECKED_ROWS, info.out_features)).long()
    found = reader.decode_rows(name, places).to(weight.dtype)
    prefix = f"{reader.architecture}.attention.head_count"
    counts = {reader.metadata.get(prefix), reader.metadata.get(f"{prefix}_kv")}
    possible = [0, *sorted(n for n in counts if isinstance(n, int) and info.out_features % (2 * n) == 0)]
    for heads in possible:
        order = interleaved(info.out_features, heads)[places] if heads else places
        if torch.equal(weight[order.to(weight.device)].cpu(), found):
            return heads
    raise ModelError(
        f"{name} of {reader.path.name} does not hold the rows of {info.name} in an order known here, so it cannot "
        f"be written; the architecture {reader.architecture!r} is not supported."
    )
