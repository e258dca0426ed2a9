"""Hugging Face models: names, loading, layout, block-wise capture."""

from __future__ import annotations

from rco.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
