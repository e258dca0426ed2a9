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

DOMAINS = "en_prose,python_code,tech_docs,math_latex,de_law,fr_novels,dialogue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all parts of a measurement on a model share: text, numbers of sequences, device."""

    text: str | None
    domains: str
    length: int
    sequences: int
    selection: int
    evaluation: int
    device: str
    threads: int

    @property
    def calibration_text(self):
        return text_files(self.text, self.domains, "calibration") if self.text else "builtin"

    @property
    def evaluation_text(self):
        return text_files(self.text, self.domains, "evaluation") if self.text else None

    def config(self, **others):
        """Arguments of a config of rco.pipeline.configs."""
        names = ("length", "sequences", "selection", "evaluation", "device")
        return {"data": self.calibration_text, **{name: getattr(self, name) for name in names}, **others}

    def header(self, paths=("text",)):
        """The first line of a file of parts, without paths."""
        described = dataclasses.asdict(self) | ({} if self.text else {"domains": "builtin"})
        return {name: value for name, value in described.items() if name not in paths}

    @staticmethod
    def add_arguments(parser, **defaults):
        """Add the options of :func:`run_parts` and of these settings to a parser."""
        numbers = {
            "length": 128,
            "sequences": 112,
            "selection": 28,
            "evaluation": 84,
            "threads": 1,
        } | defaults
        parser.add_argument("--parts", type=Path, required=True, help="file with a line per finished part")
        parser.add_argument("--workers", type=int, default=1, help="processes")
        parser.add_argument(
            "--text", help="folder of NAME.calibration.txt and NAME.evaluation.txt; built-in without"
        )
        parser.add_argument("--domains", default=DOMAINS, help="names of the texts to calibrate on")
        parser.add_argument("--device", default="cpu")
        for name, default in numbers.items():
            parser.add_argument(f"--{name}", type=int, default=default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings(RunSettings):
    """The same for measurements that search over widths: the search, its candidates and where they are kept."""

    work: str
    steps: int
    samples: int
    refine: int
    sensitivity: int
    group_size: int

    def config(self, **others):
        names = ("steps", "samples", "refine", "sensitivity", "group_size")
        return super().config(**{name: getattr(self, name) for name in names}, format="none", **others)

    @staticmethod
    def add_arguments(parser, **defaults):
        work, sensitivity = defaults.pop("work"), defaults.pop("sensitivity")
        RunSettings.add_arguments(parser, **defaults)
        parser.add_argument("--work", default=work, help="folder of the candidates")
        numbers = {"steps": 40, "samples": 4, "refine": 20, "sensitivity": sensitivity, "group-size": 64}
        for name, default in numbers.items():
            parser.add_argument(f"--{name}", type=int, default=default)


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
