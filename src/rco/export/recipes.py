"""Base of recipes: files that give another tool the width of every linear for its own quantization.

A recipe names every searched linear, so that the tool's own rules have no effect. A width or group size that the
tool does not support is an error here, because the tool might silently use another one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from rco.export.exporter import ExportError, ExportRequest, ExportSummary, atomic_folder
from rco.formats.base import Format, Stored
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.models.embeddings import embedding_info
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.linears import ExpertLinear, model_linears

__all__ = ["Choice", "Recipe", "RecipeExporter", "as_json"]


@dataclass(frozen=True)
class Choice:
    """Choice of a search, for recipes.

    Attributes:
        loaded: The full model.
        linears: All linears by name, the output layer last.
        schemes: Format of each linear; :data:`ORIGINAL` if unquantized.
    """

    loaded: LoadedModel
    linears: Mapping[str, LinearInfo]
    schemes: Mapping[str, Format]

    @classmethod
    def of(cls, loaded: LoadedModel, weights: Mapping[str, Stored]) -> Choice:
        """The choice of given weights."""
        found = model_linears(loaded.layout, loaded.model, include_head=True)
        linears = {info.name: info for info in found}
        unknown = sorted(weights.keys() - linears.keys())
        if embedding_info(loaded.layout, loaded.model).name in unknown:
            raise ExportError(
                "A recipe gives no width to an embedding: search without it (`embeddings=False`), or take "
                "`format='compressed-tensors'` or dense."
            )
        if unknown:
            raise ExportError(f"The model has no linear {unknown[0]!r} to give a width to.")
        schemes = {name: weights[name].format if name in weights else ORIGINAL for name in linears}
        return cls(loaded, linears, schemes)

    @property
    def quantized(self) -> dict[str, IntegerGrid]:
        """Schemes of the quantized linears; never empty."""
        return {name: scheme for name, scheme in self.schemes.items() if isinstance(scheme, IntegerGrid)}

    @property
    def commonest(self) -> IntegerGrid:
        """The most frequent scheme by number of weights, used as a tool's default."""
        counts: Counter[IntegerGrid] = Counter()
        for name, scheme in self.quantized.items():
            counts[scheme] += self.linears[name].parameters
        return max(counts, key=lambda scheme: (counts[scheme], scheme.bits))

    def called(self, name: str) -> str:
        """Name of a linear in a tool that splits stacked experts.

        The split experts have a gate, an up and a down projection, whatever their names in checkpoints (in Mixtral:
        w1, w3 and w2).
        """
        info = self.linears[name]
        return (
            info.renumbered(info.expert, f"{info.projection}_proj")
            if isinstance(info, ExpertLinear)
            else name
        )

    def other_linears(self) -> list[str]:
        """Linear modules that are never searched, such as routers, but that a tool might quantize."""
        return [
            name
            for name, module in self.loaded.model.named_modules()
            if isinstance(module, nn.Linear) and name not in self.linears
        ]

    def require(self, tool: str, widths: set[int], group_sizes: set[int] | None = None) -> None:
        """Raise for widths or group sizes that a tool does not support; a group may be a whole row."""
        for name, scheme in self.quantized.items():
            size = scheme.group_size or self.linears[name].in_features
            if scheme.bits not in widths:
                raise ExportError(
                    f"{name} has {scheme.bits} bits; {tool} supports {', '.join(map(str, sorted(widths)))}. "
                    "Search with other `widths`."
                )
            if group_sizes is not None and size not in group_sizes:
                raise ExportError(
                    f"{name} has groups of {size}; {tool} supports {', '.join(map(str, sorted(group_sizes)))}. "
                    "Search with another `group_size`."
                )


@dataclass(frozen=True)
class Recipe:
    """Files of a recipe, and the sizes of the tool's tensors, if known.

    Attributes:
        files: Text of each file by name, without the README.
        usage: Commands for the README and the report.
        tensors: Bytes of each tensor that the tool will write; empty if unknown.
    """

    files: Mapping[str, str]
    usage: str
    tensors: Mapping[str, int] = field(default_factory=dict)


class RecipeExporter(ABC):
    """Writes a folder of small text files instead of a checkpoint."""

    name: ClassVar[str]
    kind: ClassVar[str] = "quantization"

    def export(self, request: ExportRequest) -> ExportSummary:
        """Write a recipe; only the formats of the weights are used, not their values."""
        if not request.weights:
            raise ExportError("No linear is quantized, so there is nothing to write a recipe for.")
        recipe = self.recipe(Choice.of(request.source, request.weights))
        files = {**recipe.files, "README.md": f"# Recipe for {self.name}\n\n{recipe.usage}"}
        with atomic_folder(request.out, overwrite=request.overwrite) as folder:
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
        sizes = {name: len(text.encode()) for name, text in sorted(files.items())}
        tensors = dict(recipe.tensors)
        return ExportSummary(
            self.name, Path(request.out), sizes, tensors, sum(tensors.values()), recipe.usage
        )

    @abstractmethod
    def recipe(self, choice: Choice) -> Recipe:
        """The recipe for a choice."""


def as_json(content: Any) -> str:
    """Indented JSON that ends with a line break."""
    return json.dumps(content, indent=2) + "\n"
