"""The step and memory benchmarks on tiny shapes, where everything but the speed can be checked."""

import json

import pytest

from rco.cli import main
from rco.studies.step_bench import run, run_memory, to_markdown


@pytest.mark.parametrize("shape", ["quick", "quick-moe"])
def test_parts_add_up_to_the_sample(shape):
    report = run(shape, device="cpu", length=16, samples=2, steps=1, repeats=1)
    assert sum(report["breakdown"]["seconds"].values()) == pytest.approx(report["plain"]["sample"]["seconds"])
    assert report["plain"]["ratio"] == pytest.approx(
        report["plain"]["sample"]["seconds"] / report["plain"]["floor"]["seconds"]
    )
    assert report["options"] == (7 if shape == "quick" else 2)
    assert "| checkpointing |" in to_markdown(report)
    json.dumps(report)


def test_memory_report_and_its_reference():
    report = run_memory("quick", device="cpu", length=16, repeats=1)
    assert [row["checkpointing"] for row in report["modes"]] == [False, True]
    assert report["reference"]["relative_error"] < 1e-5
    assert report["reference"]["bytes"] == 256 * 2048 * 64 * 4
    with pytest.raises(ValueError, match="dense shape"):
        run_memory("quick-moe", device="cpu")


def test_command_writes_table_json_and_plot(tmp_path, capsys):
    assert main(["bench", "step", "--quick", "--out", str(tmp_path)]) == 0
    assert "floor" in capsys.readouterr().out
    assert json.loads((tmp_path / "step_quick.json").read_text())["shape"] == "quick"
    assert (tmp_path / "step_quick.md").is_file()
