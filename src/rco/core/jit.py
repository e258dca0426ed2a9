"""Compilation of loops with numba."""

# numba infers and specialises all types; annotations would be a second source that nothing checks.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import logging

from numba import njit

__all__ = ["entry", "internal"]

_log = logging.getLogger(__name__)


def internal(function):
    """Compile for use from compiled code only: without the wrappers that unpack Python objects, and uncached.

    Functions that a cached entry point calls are cached with it.
    """
    return njit(function, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def entry(function):
    """Compile for use from Python, and cache the result on disk if a cache folder can be written."""
    try:
        return njit(function, cache=True, error_model="numpy")
    except RuntimeError as error:  # neither the package's folder nor the user's cache can be written
        _log.warning("Compiled code cannot be cached; each process compiles again: %s", error)
        return njit(function, error_model="numpy")
