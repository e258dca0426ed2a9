"""Calibration and evaluation data: sources of text, and their conversion to token sequences."""

from __future__ import annotations

from rco.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
