"""Reports: runs as one self-contained HTML page."""

from __future__ import annotations

from rco.report.data import ReportError, RunData, read_run
from rco.report.page import build_report, render_report

__all__ = ["ReportError", "RunData", "build_report", "read_run", "render_report"]
