"""Whole jobs in one call each: what the command line runs, and nothing else."""
