"""What the package promises as a whole: quick import, whole public API, README code that runs."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import rco
from rco.cli import main

ROOT = Path(__file__).parent.parent


def test_import_is_quick_and_loads_no_torch():
    code = "import sys, time; t = time.perf_counter(); import rco; "
    code += "print(time.perf_counter() - t, 'torch' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(out[0]) < 1.0
    assert out[1] == "False"


@pytest.mark.parametrize("name", rco.__all__)
def test_every_public_name_loads(name):
    assert getattr(rco, name) is not None


def test_unknown_attributes_say_what_there_is():
    with pytest.raises(AttributeError, match="RiemannianAdam"):
        _ = rco.Adam


QUICK = {
    "sequences": 2, "sensitivity": 2, "selection": 1, "evaluation": 1, "length": 32, "steps": 1, "samples": 1,
    "refine": 0, "widths": "2,3", "method": "rtn", "progress": False,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's, of bfloat16 on a CPU that has none
def test_readme_examples_run(capsys, monkeypatch, tmp_path):
    """As they are written, but for the amount of work that a model takes."""
    api, own = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(own, "README.md", "exec"), {})
    assert "of 140" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rco, "quantize", partial(rco.quantize, **QUICK), raising=False)
    exec(compile(api, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "* RCO" in out
    assert re.search(r"^q_proj +[23]{8}  ", out, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny-llama-2.5-bits", "report.html"}


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(script):
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_version_and_listings(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rco ")
    for kind in ("methods", "backends", "formats", "models", "data"):
        assert main(["ls", kind]) == 0
        assert capsys.readouterr().out.strip()
    assert main(["ls", "nonsense"]) == 2
    assert main(["no-such-verb"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    "verb", ["quantize", "evaluate", "report", "solve", "ls", "bench knapsack", "bench solver"]
)
def test_every_help_ends_with_commands(verb, capsys):
    assert main([*verb.split(), "--help"]) == 0
    assert f"rco {verb.split()[0]}" in capsys.readouterr().out


def test_the_repository_speaks_of_the_project_alone():
    files = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml", "Makefile"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    # The forbidden words are put together here so that this file does not contain them.
    forbidden = [f"/{name}/" for name in ("work", "root")] + ["../" + "shared"]
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not [word for word in forbidden if word in text], name
