"""Jobs in several processes: what ends them, and what is kept."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from napping import Nap, Sleeper

from rco.atomic_files import read_json
from rco.pipeline.jobs import run_jobs


def test_an_interruption_ends_running_jobs_and_keeps_finished_ones(tmp_path):
    jobs = [Nap("short", 0.0), *(Nap(f"long{i}", 300.0) for i in range(4))]
    interrupted = []

    def on_done(done, total):
        if done:
            interrupted.append(time.perf_counter())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, tmp_path, Sleeper, 1000.0, workers=2, on_done=on_done)
    # The pool's own thread waits for its processes as well, so one that has ended may seem alive for a moment.
    while multiprocessing.active_children() and time.perf_counter() - interrupted[0] < 5:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    assert [path.name for path in tmp_path.iterdir()] == ["short.json"]
    assert read_json(tmp_path / "short.json") == {"slept": 0.0}


def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom napping import Nap, Sleeper\n"
        "from rco.pipeline.jobs import run_jobs\n"
        "if __name__ == '__main__':\n"
        "    jobs = [Nap('short', 0.0), *(Nap(f'long{i}', 300.0) for i in range(4))]\n"
        "    run_jobs(jobs, Path(sys.argv[1]), Sleeper, 1000.0, workers=2)\n"
    )
    out, support = tmp_path / "out", Path(__file__).parents[1] / "support"
    path = os.pathsep.join([str(support), *sys.path])
    with subprocess.Popen([sys.executable, script, out], env={**os.environ, "PYTHONPATH": path}) as parent:
        deadline = time.perf_counter() + 60
        while not (out / "short.json").exists():
            assert time.perf_counter() < deadline
            time.sleep(0.05)
        processes = _descendants(parent.pid)
        assert len(processes) >= 2
        parent.kill()
    deadline = time.perf_counter() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.perf_counter() < deadline
        time.sleep(0.05)


def _descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_descendants(int(child))]
    return found


def test_refused_jobs_are_reported_and_tried_again(tmp_path):
    jobs = [Nap("a", 0.0), Nap("b", 2.0)]
    results, failed = run_jobs(jobs, tmp_path, Sleeper, 1.0)
    assert (results, failed) == ({"a": {"slept": 0.0}}, {"b": "2.0 seconds are too long"})
    jobs = [Nap("a", 5.0), Nap("b", 0.0)]  # the first is not done again
    assert run_jobs(jobs, tmp_path, Sleeper, 1.0) == ({"a": {"slept": 0.0}, "b": {"slept": 0.0}}, {})
