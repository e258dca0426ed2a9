"""Calibration and evaluation data: sources of text, and their conversion to token sequences."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "CalibrationSet": "rco.data.calibration",
    "DataError": "rco.data.documents",
    "DataSplits": "rco.data.calibration",
    "Document": "rco.data.documents",
    "Mixture": "rco.data.sources",
    "Source": "rco.data.sources",
    "build_calibration": "rco.data.calibration",
    "build_splits": "rco.data.calibration",
    "describe_sources": "rco.data.sources",
    "resolve_source": "rco.data.sources",
    "splits": "rco.data.calibration",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rco.data' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
