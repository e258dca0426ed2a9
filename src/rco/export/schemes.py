"""Schemes of compressed-tensors: the config group of a format, and the format of a config group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rco.export.exporter import ExportError
from rco.formats.base import Format
from rco.formats.floating import FloatingPoint
from rco.formats.integer import IntegerGrid

__all__ = ["check_type", "scheme_config", "scheme_of"]

PACKED = "pack-quantized"
_ALL = tuple(FloatingPoint(name) for name in FloatingPoint.listed())


def check_type(scheme: Format, dtype: torch.dtype) -> None:
    """Raise if compressed-tensors decodes a format to another type than the model's.

    Raises:
        ExportError: The format's scales are not numbers of the model's type, and the model is not in bfloat16.
    """
    fixed = isinstance(scheme, FloatingPoint) and scheme.kind.scaling in ("group16", "group32")
    if fixed and dtype != torch.bfloat16:
        raise ExportError(
            f"compressed-tensors decodes {scheme.name} to bfloat16, and the model is in {dtype}: load it with "
            "`dtype='bfloat16'`, or choose another format."
        )


def scheme_config(scheme: Format) -> dict[str, Any]:
    """A config group of compressed-tensors without its targets: weights, inputs, and the layout of the tensors."""
    inputs = None
    if isinstance(scheme, FloatingPoint):
        layout, weights, inputs = _floating_config(scheme)
    else:
        assert isinstance(scheme, IntegerGrid)
        layout = PACKED
        weights = _numbers(
            scheme.bits, "int", "channel" if scheme.group_size is None else "group", scheme.group_size
        )
        weights["symmetric"] = scheme.symmetric
    return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": layout}


def _floating_config(scheme: FloatingPoint) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Layout, weights and inputs of a floating-point format."""
    kind, type_ = scheme.kind, "int" if scheme.kind.element == "int8" else "float"

    def scaled(scaling: str) -> dict[str, Any]:
        """Scales of one kind for weights, or for inputs (token, group128)."""
        schemes: dict[str, tuple[str, int | None, dict[str, Any]]] = {
            "channel": ("channel", None, {}),
            "token": ("token", None, {}),
            "block": ("block", None, {"block_structure": [128, 128]}),
            "group128": ("group", 128, {}),
            "group16": ("tensor_group", 16, {"scale_dtype": "torch.float8_e4m3fn"}),
            "group32": ("group", 32, {"scale_dtype": "torch.uint8"}),
        }
        strategy, size, own = schemes[scaling]
        return {**_numbers(scheme.bits, type_, strategy, size), **own}

    inputs = None
    if kind.inputs is not None:
        # Local: scales of groups are dynamic under a fixed scale of the tensor.
        dynamic: bool | str = "local" if scheme.calibrates_inputs else True
        inputs = {**scaled(kind.inputs), "dynamic": dynamic}
    layout = {
        "group16": "nvfp4-pack-quantized",
        "group32": "mxfp4-pack-quantized" if kind.element == "e2m1" else "mxfp8-quantized",
    }.get(kind.scaling)
    if layout is None:
        layout = "naive-quantized" if inputs is None else f"{type_}-quantized"
    return layout, scaled(kind.scaling), inputs


def _numbers(bits: int, type_: str, strategy: str, size: int | None) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": type_, "symmetric": True, "strategy": strategy, "group_size": size,
        "dynamic": False,
    }  # fmt: skip


def scheme_of(group: Mapping[str, Any]) -> Format | None:
    """The format of a config group; None if it is none of this package."""
    for each in _ALL:
        described = scheme_config(each)
        same = all(_same(group.get(part), described[part]) for part in ("weights", "input_activations"))
        layout = group.get("format")
        # Without a layout, 8-bit integers are packed.
        if same and (layout == described["format"] or (layout is None and each.name != "int8")):
            return each
    weights = group["weights"]
    packed = weights.get("type", "int") == "int" and weights.get("strategy") in ("group", "channel")
    if not packed or group.get("input_activations") is not None or group.get("format") not in (None, PACKED):
        return None
    size = weights.get("group_size")
    per_channel = weights.get("strategy") == "channel" or size in (None, -1)
    return IntegerGrid(weights["num_bits"], None if per_channel else size, weights.get("symmetric", True))


def _same(found: Mapping[str, Any] | None, described: Mapping[str, Any] | None) -> bool:
    """Whether two descriptions of numbers agree in all that the second one states."""
    if found is None or described is None:
        return found is described
    return all(found.get(key) == value for key, value in described.items())
