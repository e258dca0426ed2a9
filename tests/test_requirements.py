"""Optional packages: the table agrees with pyproject.toml, and what is missing or too old is named."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from rco import requirements
from rco.requirements import EXTRAS, MissingPackageError, require

ROOT = Path(__file__).parent.parent


def test_the_table_is_that_of_the_package():
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        extra: dict(re.fullmatch(r"([\w-]+)(?:>=([\w.]+))?", line).groups("") for line in lines)
        for extra, lines in project["optional-dependencies"].items()
        if extra not in ("all", "dev")
    }
    assert declared == EXTRAS


@pytest.mark.parametrize(
    ("installed", "fits"),
    [("5.0", True), ("5", True), ("5.0.0", True), ("5.22.2", True), ("5.1.dev0", True), ("10.0", True),
     ("4.57.1", False), ("4.99.dev3", False), ("0.9", False)],
)  # fmt: skip
def test_versions_below_the_floor_are_refused_by_name(monkeypatch, installed, fits):
    monkeypatch.setattr(requirements, "version", lambda package: installed)
    if fits:
        require("transformers", "Loading a model")
        return
    with pytest.raises(MissingPackageError) as caught:
        require("transformers", "Loading a model")
    assert str(caught.value) == (
        f"Loading a model needs transformers 5.0 or later; installed is {installed}: run "
        "pip install 'transformers>=5.0'."
    )


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(requirements, "version", version)
    for package in {package for packages in EXTRAS.values() for package in packages}:
        extra = next(
            name for name, packages in EXTRAS.items() if package in packages
        )  # the first, of several
        with pytest.raises(ValueError, match=rf"^Work needs {package}.*pip install 'rco\[{extra}\]'\.$"):
            require(package, "Work")


def test_the_api_names_what_is_missing(monkeypatch):
    import rco

    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(requirements, "version", version)
    with pytest.raises(ValueError, match=r"Loading a model needs transformers.*pip install 'rco\[hf\]'"):
        rco.quantize("tiny-llama", bits=3, progress=False)
