"""What the package promises as a whole: quick import, whole public API, README code that runs."""

import json
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import rco
from rco.cli import main

ROOT = Path(__file__).parent.parent


def test_import_loads_nothing_slow():
    code = "import sys, rco; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "rco" in loaded.split()
    slow = {"torch", "numpy", "scipy", "numba", "transformers", "typer", "rich", "matplotlib", "jinja2"}
    assert slow.isdisjoint(loaded.split())


@pytest.mark.parametrize("name", rco.__all__)
def test_every_public_name_loads(name):
    assert getattr(rco, name) is not None


def test_unknown_attributes_say_what_there_is():
    with pytest.raises(AttributeError, match="RiemannianAdam"):
        _ = rco.Adam


QUICK = {
    "sequences": 2, "sensitivity": 2, "selection": 1, "evaluation": 1, "length": 32, "steps": 1, "samples": 1,
    "refine": 0, "widths": "2,3,4", "method": "rtn", "progress": False, "data": "en_prose",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's, of bfloat16 on a CPU that has none
def test_readme_examples_run(capsys, monkeypatch, tmp_path):
    """As they are written, but for the amount of work that a model takes."""
    api, own = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(own, "README.md", "exec"), {})
    assert "of 140" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    quick(monkeypatch)
    exec(compile(api, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "* RCO" in out
    assert re.search(r"^q_proj +[2-4]{8}  ", out, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny-llama-2.5-bits", "report.html"}


def quick(monkeypatch):
    """Models are compressed with so little text and so few steps that it takes seconds, whatever a script asks."""
    compressed = []

    def compress(job, settings, *arguments, **asked):
        compressed.append(job(*arguments, **{**asked, **settings}))
        return compressed[-1]

    pruning = {name: value for name, value in QUICK.items() if name not in ("widths", "method")}
    monkeypatch.setattr(rco, "quantize", partial(compress, rco.quantize, QUICK), raising=False)
    monkeypatch.setattr(rco, "prune", partial(compress, rco.prune, pruning), raising=False)
    return compressed


@pytest.mark.parametrize("script", ["own_loss", "solve_knapsack"])
def test_the_problems_of_the_examples_are_solved(script, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("script", ["quantize_a_model", "prune_experts"])
def test_the_models_of_the_examples_are_compressed(script, monkeypatch, capsys):
    compressed = quick(monkeypatch)
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"))
    (result,) = compressed
    assert str(result.allocation) in capsys.readouterr().out


def test_every_example_is_tested():
    known = {
        "own_loss.py",
        "solve_knapsack.py",
        "quantize_a_model.py",
        "prune_experts.py",
        "quantize_a_model.ipynb",
    }
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == known


def test_the_notebook_runs_and_has_its_outputs(monkeypatch, capsys, tmp_path):
    """Its cells as they are, but for the amount of work; the outputs in the file are those of a whole run."""
    import matplotlib

    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / "quantize_a_model.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    compressed = quick(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert len(compressed) == 4
    assert "full model:" in capsys.readouterr().out
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    assert not [
        output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    shown = json.dumps([output for output in outputs if "image/png" not in output.get("data", {})])
    assert "4 bits: " in shown
    assert "/home" not in shown
    assert "/tmp" not in shown


def test_no_two_files_of_the_package_have_the_same_name():
    names = [path.name for path in (ROOT / "src" / "rco").rglob("*.py") if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_version_and_listings(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rco ")
    for kind in ("methods", "formats", "models", "data"):
        assert main(["ls", kind]) == 0
        assert capsys.readouterr().out.strip()
    assert main(["ls", "nonsense"]) == 2
    assert main(["no-such-verb"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    "verb", ["quantize", "evaluate", "report", "solve", "ls", "bench step", "bench solver"]
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
