"""Modeling code inside a checkpoint whose experts the stock model cannot hold."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rco.models.layout import text_config
from rco.models.moe.layers import stock_class
from rco.models.moe.linears import sparse_layers
from rco.models.remote_code import modeling_pruned_experts, modeling_unfused_experts

__all__ = [
    "experts_per_layer",
    "separate_experts_fields",
    "write_expert_code",
    "write_pruned_code",
]


def experts_per_layer(config: Any) -> list[int] | None:
    """Experts of each layer, if the configuration lists them; stock models have one number for all layers."""
    text = text_config(config)
    counts: list[int] | None = getattr(text, "num_experts_per_layer", None)
    return counts or None


def separate_experts_fields(model: nn.Module) -> dict[str, Any]:
    """Additional fields in the configuration of a model with experts of different precision."""
    stock = stock_class(type(model))
    return {
        "separate_experts": True,
        "expert_projections": list(sparse_layers(model)[0].architecture.projections),
        "auto_map": {
            "AutoModelForCausalLM": f"{_module_name(modeling_unfused_experts)}.Unfused{stock.__name__}"
        },
    }


def write_expert_code(model: nn.Module, folder: Path) -> None:
    """Write the modeling file for separate experts, including that for layers of different size, if needed."""
    stock = stock_class(type(model))
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    bases, imports = ["UnfusedExpertsMixin"], ""
    if (text.get("text_config") or text).get("num_experts_per_layer"):
        own = _module_name(modeling_pruned_experts)
        (folder / f"{own}.py").write_text(inspect.getsource(modeling_pruned_experts), encoding="utf-8")
        bases, imports = (
            [*bases, "PrunedExpertsMixin"],
            f"from .{own} import PrunedExpertsMixin  # noqa: E402\n",
        )
    _carry(modeling_unfused_experts, stock, "Unfused", bases, folder, imports)


def write_pruned_code(model: nn.Module, folder: Path) -> dict[str, str]:
    """Write the modeling file for layers of different size into a checkpoint; returns its ``auto_map``."""
    name = _carry(modeling_pruned_experts, stock_class(type(model)), "Pruned", ["PrunedExpertsMixin"], folder)
    return {"AutoModelForCausalLM": name}


def _carry(
    module: Any, stock: type, prefix: str, bases: Sequence[str], folder: Path, imports: str = ""
) -> str:
    """Write a modeling module with a subclass of the stock model at its end; returns ``module.class``."""
    name = f"{prefix}{stock.__name__}"
    source = inspect.getsource(module)
    source += (
        f"\n\nfrom {stock.__module__} import {stock.__name__}  # noqa: E402\n{imports}\n\n"
        f"class {name}({', '.join([*bases, stock.__name__])}):\n"
        f'    """{stock.__name__} with the experts of this checkpoint."""\n'
    )
    (folder / f"{_module_name(module)}.py").write_text(source, encoding="utf-8")
    return f"{_module_name(module)}.{name}"


def _module_name(module: Any) -> str:
    return str(module.__name__).rpartition(".")[2]
