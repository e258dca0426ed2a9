"""What recipes share: they tell another tool which linear gets which width, and leave the quantizing to it.

A recipe names every linear that was searched, so that nothing is left to a tool's own rules; what the tool cannot
do is refused here, before it would do something else instead.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from rco.export.exporter import ExportError, ExportSummary, atomic_folder, resolve_source
from rco.formats.base import Format
from rco.formats.integer import IntegerGrid, PackedWeight
from rco.formats.original import ORIGINAL
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.linears import ExpertLinear, model_linears

__all__ = ["Choice", "Recipe", "RecipeExporter", "as_json"]


@dataclass(frozen=True)
class Choice:
    """What a search has chosen, as recipes need it.

    Attributes:
        loaded: The full model.
        linears: All its linears, the output layer last, by name.
        schemes: How each of them is stored; :data:`ORIGINAL` where it is left alone.
    """

    loaded: LoadedModel
    linears: Mapping[str, LinearInfo]
    schemes: Mapping[str, Format]

    @classmethod
    def of(cls, loaded: LoadedModel, weights: Mapping[str, PackedWeight]) -> Choice:
        """The choice that packed weights stand for."""
        found = model_linears(loaded.layout, loaded.model, include_head=True)
        linears = {info.name: info for info in found}
        unknown = sorted(weights.keys() - linears.keys())
        if unknown:
            raise ExportError(f"The model has no linear {unknown[0]!r} to give a width to.")
        schemes = {name: weights[name].format if name in weights else ORIGINAL for name in linears}
        return cls(loaded, linears, schemes)

    @property
    def quantized(self) -> dict[str, IntegerGrid]:
        """Those that are not left alone; never empty."""
        return {name: scheme for name, scheme in self.schemes.items() if isinstance(scheme, IntegerGrid)}

    @property
    def commonest(self) -> IntegerGrid:
        """The scheme of most weights: what tools take as a default."""
        counts: Counter[IntegerGrid] = Counter()
        for name, scheme in self.quantized.items():
            counts[scheme] += self.linears[name].parameters
        return max(counts, key=lambda scheme: (counts[scheme], scheme.bits))

    def called(self, name: str) -> str:
        """What a tool that takes stacked experts apart calls a linear.

        The experts that it makes have a gate, an up and a down projection, whatever checkpoints call them (those
        of Mixtral: w1, w3 and w2).
        """
        info = self.linears[name]
        return (
            info.renumbered(info.expert, f"{info.projection}_proj")
            if isinstance(info, ExpertLinear)
            else name
        )

    def other_linears(self) -> list[str]:
        """Linear modules that are never searched, such as routers; a tool might take them for its own."""
        return [
            name
            for name, module in self.loaded.model.named_modules()
            if isinstance(module, nn.Linear) and name not in self.linears
        ]

    def require(self, tool: str, widths: set[int], group_sizes: set[int] | None = None) -> None:
        """Refuse widths or group sizes that a tool does not have; a group may be a whole row."""
        for name, scheme in self.quantized.items():
            size = scheme.group_size or self.linears[name].in_features
            if scheme.bits not in widths:
                raise ExportError(
                    f"{name} has {scheme.bits} bits; {tool} takes {', '.join(map(str, sorted(widths)))}. "
                    "Search with `widths` that it takes."
                )
            if group_sizes is not None and size not in group_sizes:
                raise ExportError(
                    f"{name} has groups of {size}; {tool} takes {', '.join(map(str, sorted(group_sizes)))}. Search "
                    "with a `group_size` that it takes."
                )


@dataclass(frozen=True)
class Recipe:
    """The files of a recipe, by name, and what the tool will make of them where that is known.

    Attributes:
        files: Text of each file, besides the README.
        usage: What to type, for the README and the report.
        tensors: Bytes of each tensor that the tool will write; empty where it decides.
    """

    files: Mapping[str, str]
    usage: str
    tensors: Mapping[str, int] = field(default_factory=dict)


class RecipeExporter(ABC):
    """Writes a folder of small text files instead of a checkpoint."""

    name: ClassVar[str]
    kind: ClassVar[str] = "quantization"

    def export(
        self,
        source: LoadedModel | str | Path,
        weights: Mapping[str, PackedWeight],
        out: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> ExportSummary:
        """Write a recipe; the packed weights say which linear has which scheme, their values go nowhere.

        Args:
            source: The full-precision model.
            weights: Packed weight of every quantized linear, by name; the others are left alone.
            out: The folder to make.
            dtype: Not used: a recipe holds no tensors.
            max_shard_size: Not used.
            overwrite: Replace a folder that is not empty.

        Raises:
            ExportError: The tool cannot do what was chosen, or the folder cannot be written.
        """
        if not weights:
            raise ExportError("Every linear is left alone: there is nothing to write a recipe for.")
        recipe = self.recipe(Choice.of(resolve_source(source), weights))
        files = {**recipe.files, "README.md": f"# Recipe for {self.name}\n\n{recipe.usage}"}
        with atomic_folder(out, overwrite=overwrite) as folder:
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
        sizes = {name: len(text.encode()) for name, text in sorted(files.items())}
        tensors = dict(recipe.tensors)
        return ExportSummary(self.name, Path(out), sizes, tensors, sum(tensors.values()), recipe.usage)

    @abstractmethod
    def recipe(self, choice: Choice) -> Recipe:
        """The recipe for a choice."""


def as_json(content: Any) -> str:
    """Indented JSON that ends with a line break."""
    return json.dumps(content, indent=2) + "\n"
