"""What tests of whole jobs share."""

from undrawn_plots import _undrawn_plots  # noqa: F401 - used in every test
