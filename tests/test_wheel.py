"""The package as it would be published: a wheel, installed where the source tree is not on the path."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "sequences": 2, "sensitivity": 2, "selection": 1, "evaluation": 1, "length": 32, "steps": 1, "samples": 1,
    "refine": 0, "widths": "2,3", "method": "rtn",
}  # fmt: skip
SCRIPT = f"""
import rco
print(rco.__file__)
result = rco.quantize("tiny-llama", bits=2.5, progress=False, **{SETTINGS!r})
assert result.metrics["budget"]["used_units"] <= result.metrics["budget"]["budget_units"]
result.save("saved")
print(rco.evaluate("saved", sequences=1, length=32, progress=False)["perplexity"]["perplexity"])
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("rco-*.whl")
    return found


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs a program of an environment that has the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, str(wheel)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # A folder that is named so has its own such files ignored: an editable install of rco in it is not seen.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = folder / "work"
    work.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def program(name, *arguments):
        done = subprocess.run(
            [str(home / "bin" / name), *arguments], cwd=work, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    program.home, program.work = home, work
    return program


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "src/rco"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {name.removeprefix("src/") for name in tracked.stdout.split()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        described = archive.read(metadata).decode()
    assert names == expected
    assert "rco/models/assets/tiny-llama/model.safetensors" in names
    assert "rco/data/assets/en_prose.calibration.txt" in names
    assert "Provides-Extra: hf" in described
    assert "Requires-Dist: transformers>=5.0; extra == 'hf'" in described


def test_the_api_works_where_the_wheel_is_installed(run):
    place, perplexity = run("python", "-c", SCRIPT).split()
    assert Path(place).is_relative_to(run.home)
    assert float(perplexity) > 1
    assert {path.name for path in run.work.iterdir()} >= {"saved"}


def test_the_command_works_where_the_wheel_is_installed(run):
    flags = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
    out = run("rco", "quantize", "tiny-llama", "--bits", "2.5", "--out", "run", "--json", *flags)
    assert json.loads(out)["checkpoint"] == "run/model"
    assert run("rco", "--version").startswith("rco ")
