"""Plugins of serving engines; the rest of the package imports nothing from here."""
