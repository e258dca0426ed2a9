"""Glue for serving engines; nothing here is imported by the rest of the package."""
