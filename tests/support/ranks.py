"""Starting a few ranks on this machine as torchrun would, cheaply: one process imports, the ranks are its forks."""

import multiprocessing
import os
import socket
import subprocess
import sys
import traceback

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed",
        "rco.cli.app",
        "rco.pipeline.progress",
        "rco.pipeline.compress",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(rank, count, port):
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _rank(function, arguments, rank, count, port, answers):
    os.environ.update(_environment(rank, count, port))
    import torch

    torch.set_num_threads(1)
    try:
        answers.put((rank, function(*arguments), None))
    except Exception as error:  # noqa: BLE001 - the test that started the rank judges it
        answers.put((rank, None, (type(error).__name__, str(error), traceback.format_exc())))


def start_ranks(count, function, *arguments, timeout=120):
    """Run a function in ``count`` ranks: rank -> (result, error as (type, message, traceback)); dead ones lack."""
    answers = _context.Queue()
    port = _free_port()
    processes = [
        _context.Process(target=_rank, args=(function, arguments, rank, count, port, answers), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        assert process.exitcode is not None, "a rank hangs"
    found = {}
    while not answers.empty():
        rank, result, error = answers.get()
        found[rank] = (result, error)
    answers.close()
    return found


def start_scripts(count, script, timeout=120):
    """Run a script in ``count`` ranks that share nothing: (exit code, output, errors) in the order of the ranks."""
    port = _free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **_environment(rank, count, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    outputs = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def results(found):
    """Results in the order of the ranks; the first error of any is raised."""
    for _, error in found.values():
        assert error is None, error[2]
    return [found[rank][0] for rank in sorted(found)]
