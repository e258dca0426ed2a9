"""Names of a package that are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        package: Its name.
        exports: Public name -> module that defines it.
    """
    names = sorted(exports)

    def find(name: str) -> Any:
        if name not in exports:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it offers {', '.join(names)}"
            )
        return getattr(importlib.import_module(exports[name]), name)

    return find, lambda: names
