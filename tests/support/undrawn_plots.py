"""Whole runs whose reports have no drawn plots, for tests that do not look at them."""

import pytest


@pytest.fixture(autouse=True)
def _undrawn_plots(monkeypatch):
    """Leave out the last step of every plot of a report, the SVG: it takes longer than the rest of the report.

    Plots are checked by tests/report, and drawn in the runs that the tests of a file share.
    """
    from rco.report.svg import Panel

    monkeypatch.setattr(Panel, "_finish", lambda *_: None)
