"""Whole jobs in one call each; the command line runs these."""
