"""Hugging Face models: names, loading, layout, block-wise capture."""

from __future__ import annotations

import importlib
from typing import Any

# Lazy, so that importing one helper does not import every other.
_EXPORTS = {
    "BlockInputs": "rco.models.capture",
    "HeadSpec": "rco.models.layout",
    "Layout": "rco.models.layout",
    "LinearInfo": "rco.models.layout",
    "LoadedModel": "rco.models.loading",
    "ModelError": "rco.models.zoo",
    "builtin_models": "rco.models.zoo",
    "layout_for": "rco.models.layout",
    "linear_inputs": "rco.models.capture",
    "load_model": "rco.models.loading",
    "wrap_model": "rco.models.loading",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rco.models' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
