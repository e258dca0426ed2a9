"""A recipe for llama.cpp: a ``--tensor-type-file`` that names every weight it may quantize.

The file is a list of ``pattern=type`` separated by white space, without comments. ``llama-quantize`` searches a
tensor's name for each pattern in turn (a regular expression, made lower case) and takes the first one's type.
Every pattern here is one exact name, so that neither the order nor llama.cpp's own mixtures have an effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from rco.compression.llama_quantize import RECIPE_TYPES, GGUFFile, RecipeType, written_type
from rco.export.exporter import ExportError
from rco.export.recipes import Choice, Recipe, RecipeExporter
from rco.formats.original import ORIGINAL
from rco.models.gguf_names import gguf_names

__all__ = ["LlamaCppExporter", "parse_tensor_types", "types_written"]

_USAGE = """\
    python convert_hf_to_gguf.py MODEL --outtype {dense} --outfile full.gguf
    llama-quantize --tensor-type-file tensor_types.txt full.gguf quantized.gguf {default}

The tensors of quantized.gguf will take {total:,} bytes in {count} tensors, plus tokenizer and header. The last
argument only sets the label of the file: every weight is named in tensor_types.txt. Embeddings and all other
unquantized tensors stay at 16 bits, as in the search; to shrink them too, change their lines.
"""


class LlamaCppExporter(RecipeExporter):
    """Writes a tensor type file for llama-quantize, from a search with `serve='llamacpp'`."""

    name: ClassVar[str] = "llama.cpp"

    def recipe(self, choice: Choice) -> Recipe:
        """``tensor_types.txt``, and the bytes of every tensor that llama.cpp will write."""
        file = GGUFFile.of(choice.loaded.layout, choice.loaded.model)
        types = _types(choice, file)
        asked = {
            name: types.get(name, RECIPE_TYPES[file.dense]).name
            for name, tensor in file.tensors.items()
            if not tensor.float32
        }
        text = "".join(f"^{re.escape(name)}$={kind}\n" for name, kind in asked.items())
        written = types_written(text, {name: file.tensors[name].columns for name in asked})
        if written != asked:
            raise ExportError(
                "Internal error: llama.cpp would read the recipe differently; please report this."
            )
        tensors = file.tensor_bytes(types)
        default = max(types.values(), key=lambda kind: sum(kind is other for other in types.values())).name
        usage = _USAGE.format(
            dense=file.dense, default=default.upper(), total=sum(tensors.values()), count=len(tensors)
        )
        return Recipe({"tensor_types.txt": text}, usage, tensors)


def _types(choice: Choice, file: GGUFFile) -> dict[str, RecipeType]:
    """Type of every quantized tensor."""
    types: dict[str, RecipeType] = {}
    for name, scheme in choice.schemes.items():
        info = choice.linears[name]
        kind = file.type_of(info, scheme.bits)
        if kind is None or kind.scheme.on(info.in_features) != scheme:
            offered = f"{kind.name} with {kind.scheme}" if kind else "no type of that width"
            raise ExportError(
                f"{name} was searched with {scheme}, for which llama.cpp has {offered}. Search again with "
                "`serve='llamacpp'`, so that sizes and errors are those of its types."
            )
        for stored in gguf_names(file.layout, name):
            if stored in file.tensors and types.setdefault(stored, kind) is not kind:
                raise ExportError(
                    f"{stored} holds all experts of a layer in one type, but {name} is {kind.name} and another is "
                    f"{types[stored].name}. Search again with `serve='llamacpp'`."
                )
    return {name: kind for name, kind in types.items() if kind.scheme != ORIGINAL}


def parse_tensor_types(text: str) -> list[tuple[str, str]]:
    """Read a tensor type file as llama-quantize does.

    Raises:
        ExportError: llama-quantize would reject the file.
    """
    found = []
    for item in text.split():
        pattern, separator, kind = item.partition("=")
        if not (separator and pattern and kind):
            raise ExportError(f"{item!r} is not NAME=TYPE.")
        if kind.lower() not in RECIPE_TYPES:
            raise ExportError(f"{kind!r} in {item!r} is none of the types {', '.join(RECIPE_TYPES)}.")
        found.append((pattern.lower(), kind.lower()))
    return found


def types_written(text: str, columns: Mapping[str, int]) -> dict[str, str]:
    """The type that llama-quantize writes for each tensor that a file names, its fallbacks included.

    Args:
        text: A tensor type file.
        columns: Length of a row of each tensor, by name.
    """
    rules = [(re.compile(pattern), kind) for pattern, kind in parse_tensor_types(text)]
    written = {}
    for name, length in columns.items():
        asked = next((kind for pattern, kind in rules if pattern.search(name)), None)
        if asked is not None:
            written[name] = written_type(asked, length)
    return written
