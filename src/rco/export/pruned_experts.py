"""Checkpoints of models without their pruned experts.

Three shapes, from the most to the least portable:

* ``stock``: every layer keeps the same number, so only the number in the configuration changes.
* ``per_layer``: layers keep different numbers. The configuration lists them (``num_experts_per_layer``), the
  checkpoint includes a small modeling file for such layers, and :func:`load_pruned` loads it without remote code.
* ``padded``: for engines that support one number only. Layers are padded with slots that the router never picks;
  possible if the router has a bias per expert.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rco.export.expert_code import experts_per_layer, write_pruned_code
from rco.export.exporter import ExportError, ExportRequest, ExportSummary, atomic_folder
from rco.models.loading import without_progress_bars
from rco.models.moe.expert_removal import keep_plan, pad_experts, prune_experts
from rco.models.moe.layers import moe_layers, named_class
from rco.models.remote_code.modeling_pruned_experts import pruned_class

__all__ = [
    "EXPERT_MAP_FILE",
    "PaddedExporter",
    "PrunedExport",
    "PrunedExporter",
    "export_pruned",
    "load_pruned",
]

EXPERT_MAP_FILE = "kept_experts.json"


@dataclass(frozen=True)
class PrunedExport:
    """Summary of a written checkpoint.

    Attributes:
        path: The checkpoint.
        shape: ``stock``, ``per_layer`` or ``padded``.
        counts: Experts that each sparse layer keeps.
        reason: Reason why it is not a stock checkpoint; None if it is.
    """

    path: Path
    shape: Literal["stock", "per_layer", "padded"]
    counts: tuple[int, ...]
    reason: str | None


def export_pruned(
    model: nn.Module,
    keep: Tensor | Sequence[Tensor],
    out: str | Path,
    *,
    padded: bool = False,
    tokenizer: Any = None,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    numbers: Sequence[Sequence[int]] | None = None,
) -> PrunedExport:
    """Write ``model`` without its pruned experts.

    Args:
        model: The full model; not modified.
        keep: (all experts,) mask over the sparse layers in order, or one mask per layer; nonzero keeps.
        out: Folder to write; must not exist or be empty.
        padded: Pad layers to one count instead of listing counts per layer. Ignored if every layer keeps the same
            count.
        tokenizer: Tokenizer to save, if any.
        max_shard_size: Largest safetensors file.
        overwrite: Replace an existing folder.
        numbers: For each sparse layer, the numbers of its experts before ``model`` was first pruned.

    Raises:
        ValueError: The mask does not fit the model, or its router does not support ``padded``.
        ExportError: The folder is not empty, the disk is full, or the folder cannot be written.
    """
    out = Path(out)
    plan = keep_plan(model, keep)
    shape: Literal["stock", "per_layer", "padded"] = "stock"
    if plan.stock_obstacle is not None:
        shape = "padded" if padded else "per_layer"
    with atomic_folder(out, overwrite=overwrite) as folder, torch.no_grad():
        smaller = pad_experts(model, keep) if shape == "padded" else prune_experts(model, keep)
        if shape == "per_layer":
            config: Any = smaller.config
            config.auto_map = write_pruned_code(smaller, folder)
        with without_progress_bars(import_module("transformers")):
            smaller.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        names = [layer.name for layer in moe_layers(model)]
        kept = plan.kept
        if numbers is not None:
            kept = tuple(tuple(before[i] for i in layer) for before, layer in zip(numbers, kept, strict=True))
        record = {"shape": shape, "kept": {name: list(k) for name, k in zip(names, kept, strict=True)}}
        (folder / EXPERT_MAP_FILE).write_text(json.dumps(record, indent=1) + "\n")
    return PrunedExport(out, shape, plan.counts, plan.stock_obstacle)


class PrunedExporter:
    """Writes the model without its pruned experts."""

    name: ClassVar[str] = "pruned"
    kind: ClassVar[str] = "expert-pruning"
    padded: ClassVar[bool] = False

    def export(self, request: ExportRequest) -> ExportSummary:
        """Write a model without its pruned experts and without quantized weights."""
        if request.weights:
            raise ExportError(
                f"The format {self.name!r} holds unquantized weights; use compressed-tensors or dense."
            )
        model = request.source.model
        keep = torch.ones(sum(layer.num_experts for layer in moe_layers(model)))
        written = export_pruned(
            model,
            keep,
            request.out,
            padded=self.padded,
            tokenizer=request.source.tokenizer,
            max_shard_size=request.max_shard_size,
            overwrite=request.overwrite,
            numbers=request.expert_numbers,
        )
        files = {file.name: file.stat().st_size for file in sorted(written.path.iterdir())}
        tensors: dict[str, int] = {}
        for shard in sorted(written.path.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                tensors |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
        total = sum(size for name, size in files.items() if name.endswith(".safetensors"))
        return ExportSummary(
            f"pruned, {written.shape.replace('_', ' ')}",
            written.path,
            files,
            tensors,
            total,
            shape=written.shape,
            reason=written.reason,
        )


class PaddedExporter(PrunedExporter):
    """Writes pruned layers padded to one number of experts, for engines that support one number only."""

    name: ClassVar[str] = "pruned-padded"
    padded: ClassVar[bool] = True


def load_pruned(path: str | Path, **kwargs: Any) -> nn.Module:
    """Load a checkpoint of :func:`export_pruned`, of any shape, without running its code.

    Args:
        path: The checkpoint.
        kwargs: Passed on to ``from_pretrained``; ``dtype`` is ``"auto"`` unless given.
    """
    import transformers

    kwargs.setdefault("dtype", "auto")
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    if experts_per_layer(config) is None:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)
        return model.eval()
    cls: Any = pruned_class(named_class(config.model_type, config.architectures))
    model = cls.from_pretrained(path, config=config, **kwargs)
    return model.eval()
