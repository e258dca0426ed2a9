"""Runs ``rco`` commands that something happens to: a signal at a chosen call, a limit on files, a small disk.

Started as a process of its own, it reads one case per line of stdin, as JSON, and answers with what became of it:
exit code, output and errors. Every case is a forked child, so that the libraries are imported once and a kill takes
nothing else with it. A case has:

* ``argv``: the command's arguments;
* ``here``: run in this process instead of a child, so that later children have its imports and compiled kernels;
* ``signal`` and ``at``: the signal to send to itself and the call to do so before, as ``module:Class.method`` and a
  count from 1;
* ``file_bytes``: the largest size a file may have (RLIMIT_FSIZE), which fails writes as a full disk does;
* ``disk`` and ``disk_bytes``: a folder that is a disk of that size from now on, and goes with the process;
* ``keep``: a folder to copy, and where to, when all is over.
"""

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings


def send(number, place, count):
    """Replace a function by one that sends this process a signal when it is called for the ``count``-th time."""
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    kept, calls = getattr(owner, name), []

    def called(*arguments, **options):
        calls.append(None)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return kept(*arguments, **options)

    setattr(owner, name, called)


def child(case, out, err):
    for number, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    if "at" in case:
        send(case["signal"], *case["at"])
    if "file_bytes" in case:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["file_bytes"], resource.RLIM_INFINITY))
    from rco.cli import main

    sys.argv = ["rco", *case["argv"]]
    return main(case["argv"])


def run(case, mounted):
    if "disk" in case:
        again = ["-o", "remount,"] if case["disk"] in mounted else ["-o", ""]
        again[1] += f"size={case['disk_bytes']}"
        subprocess.run(["mount", "-t", "tmpfs", *again, "tmpfs", case["disk"]], check=True)
        mounted.add(case["disk"])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = alone(case, out, err) if case.get("here") else forked(case, out, err)
        texts = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
    if "keep" in case:
        shutil.copytree(*case["keep"])
    return {"code": code, "out": texts[0], "err": texts[1]}


def alone(case, out, err):
    kept = [os.dup(number) for number in (1, 2)]
    try:
        return child(case, out, err)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in zip((1, 2), kept, strict=True):
            os.dup2(file, number)
            os.close(file)


def forked(case, out, err):
    process = os.fork()
    if process == 0:
        code = 70
        try:
            code = child(case, out, err)
        except BaseException:  # noqa: BLE001 - shown like any other that nobody catches
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main():
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the tokenizer would not be there after a fork
    for module in (
        "rco.cli.app",
        "rco.pipeline.progress",
        "rco.pipeline.compress",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(module)  # once, for all children
    importlib.import_module("torch").set_num_threads(1)
    mounted = set()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), mounted)), flush=True)


if __name__ == "__main__":
    main()
