"""Long measurements made of independent parts: spread over processes, kept in a file, never run twice.

The first line of a file of parts holds settings and environment, each other line a finished part with its key. A
line is written as soon as its part is done, so that a measurement goes on where it was stopped, and files that were
made on different machines with the same settings are put together in the end.
"""

import dataclasses
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rco.atomic_files import make_folder, write_json_atomic, write_text_atomic


def start_worker(threads):
    """Before anything is computed in a process."""
    import torch

    torch.set_num_threads(threads)


def write_report(record, markdown, out, name):
    """Print a record's table, and write NAME.json and NAME.md into a folder if there is one."""
    print(markdown)
    if out is not None:
        make_folder(out)
        write_json_atomic(out / f"{name}.json", record)
        write_text_atomic(out / f"{name}.md", markdown + "\n")


def settings_from(cls, arguments):
    """A dataclass of settings out of what was typed."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in vars(arguments).items() if name in names})


def text_files(folder, domains, kind):
    """``NAME.calibration.txt`` or ``NAME.evaluation.txt`` of every domain, as one mixture."""
    return "+".join(str(Path(folder) / f"{name}.{kind}.txt") for name in domains.split(","))


def read_parts(path):
    """Header and finished parts of a file; a line that was cut short is not one."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return (whole[0], whole[1:]) if whole else (None, [])


def run_parts(path, settings, parts, work, show, *, workers=1, threads=1, prepare=None):
    """Run the parts that the file does not hold yet; returns 1 if any failed, else 0.

    Args:
        path: The file of parts.
        settings: JSON-ready; what all parts of the file must have been made with.
        parts: key (a tuple of strings and numbers) -> arguments of ``work``, in the order to start them.
        work: Does a part in a process of its own and returns its line as a mapping, without the key.
        show: A finished line in a few words.
        workers: Processes.
        threads: Threads of each process.
        prepare: ``prepare(missing)`` lists (function, arguments) to be done before the missing parts (key ->
            arguments) are begun.
    """
    from rco.runs import environment

    start_worker(threads)
    header, finished = read_parts(path)
    if header is not None and header["settings"] != settings:
        raise SystemExit(f"{path} was made with other settings: {header['settings']}")
    done = {tuple(line["key"]) for line in finished}
    missing = {key: arguments for key, arguments in parts.items() if key not in done}
    print(f"{len(parts)} parts, {len(parts) - len(missing)} of them done", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = header or {"settings": settings, "environment": environment()}
    write_text_atomic(path, "".join(json.dumps(line) + "\n" for line in (header, *finished)))
    began, failed = time.perf_counter(), 0
    context = multiprocessing.get_context("spawn")
    with path.open("a") as out, ProcessPoolExecutor(workers, context, start_worker, (threads,)) as pool:
        for future in [pool.submit(first, *given) for first, given in (prepare(missing) if prepare else [])]:
            future.result()
        futures = {pool.submit(work, *arguments): key for key, arguments in missing.items()}
        for position, future in enumerate(as_completed(futures), start=1):
            key = futures[future]
            progress = (
                f"{position}/{len(missing)} {time.perf_counter() - began:6.0f} s  {' '.join(map(str, key))}"
            )
            if (error := future.exception()) is not None:
                failed += 1  # the others are worth having
                print(f"{progress}  FAILED: {error!r}", flush=True)
                continue
            line = {"key": list(key), **future.result()}
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(f"{progress}  {show(line)}", flush=True)
    return int(failed > 0)


def merge_parts(paths):
    """Settings, environments and parts (key -> line) of files that were made with the same settings."""
    files = [(path, *read_parts(path)) for path in paths]
    known = [(path, header) for path, header, _ in files if header is not None]
    if not known:
        raise SystemExit(f"There are no parts in {', '.join(map(str, paths))}.")
    settings = known[0][1]["settings"]
    for path, header in known:
        if header["settings"] != settings:
            raise SystemExit(f"{path} was made with other settings than {known[0][0]}: {header['settings']}")
    lines = {tuple(line["key"]): line for _, _, parts in files for line in parts}
    return settings, [header["environment"] for _, header in known], lines
