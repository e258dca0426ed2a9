"""Exporters of checkpoints and recipes, one module per format."""

from __future__ import annotations

from rco.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
