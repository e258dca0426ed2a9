"""Shared by all tests: one thread per process, no GPU but in its own tests, no deadlines, and bare machines.

On a machine with torch and pytest alone (a GPU server, say) the tests that need more are left out, so that
``PYTHONPATH=src pytest -m gpu`` runs there without installing anything.
"""

import os
import re
import sys
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Small tensors lose more to hand-overs between threads than they gain, and threads that wait for work spin. Set
# before anything is loaded, and inherited by the workers of pytest-xdist and by every process that a test starts.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

# Bytecode is kept even where the shell asks for none: each of the many processes that tests start would compile the
# whole package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest  # noqa: E402

_OPTIONAL = [name for name in ("hypothesis", "highspy") if find_spec(name) is None]

if "hypothesis" not in _OPTIONAL:
    from hypothesis import settings

    # A deadline would measure the machine, not the code. In CI the examples are the same on every run.
    settings.register_profile("rco", deadline=None, derandomize=bool(os.environ.get("CI")))
    settings.load_profile("rco")


@pytest.fixture(autouse=True)
def _same_numbers_on_every_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed torch by the test's name, and undo a change of its threads, on which the rounding of sums depends.

    So a test computes the same numbers, whatever ran before it.
    """
    import torch  # not at the top: the process that only hands out files of tests does without

    torch.manual_seed(zlib.crc32(request.node.name.encode()))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know pytest-timeout's setting where the plugin is missing: an unknown one is an error here."""
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds per test (not enforced: pytest-timeout is missing)")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that import what this machine does not have."""
    if not _OPTIONAL or collection_path.suffix != ".py":
        return None
    needed = re.compile(rf"^(import|from) ({'|'.join(_OPTIONAL)})\b", re.MULTILINE)
    return True if needed.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not for them: `--device auto` then means the same on every machine."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)  # when ``-m`` has left out what was not asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Look at what is about to run."""
    refuse_gpu_tests_without_gpu(items)


def refuse_gpu_tests_without_gpu(items: list[pytest.Item]) -> None:
    """Refuse to run GPU tests without a GPU: skipping them all would look like a success."""
    count = sum(item.get_closest_marker("gpu") is not None for item in items)
    if not count:
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"{count} GPU tests were asked for and torch {torch.__version__} sees no CUDA GPU; run them on a "
            "machine with one (make test-gpu), or leave out -m gpu."
        )


def pytest_report_header() -> str | None:
    """Say what was left out."""
    return f"left out: tests that need {', '.join(_OPTIONAL)}" if _OPTIONAL else None
