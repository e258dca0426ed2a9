"""Exporters of checkpoints and recipes, one module per format."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "CompressedTensorsExporter": "rco.export.compressed_tensors",
    "DenseExporter": "rco.export.dense",
    "ExportError": "rco.export.exporter",
    "ExportRequest": "rco.export.exporter",
    "ExportSummary": "rco.export.exporter",
    "Exporter": "rco.export.exporter",
    "check_exportable": "rco.export.compressed_tensors",
    "validate_for_engine": "rco.export.engine_checks",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rco.export' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
