"""The report: one self-contained HTML page about one run, or about several side by side."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rco
from rco.atomic_files import make_folder, write_text_atomic
from rco.report import numbers
from rco.report.certificate import checkpoint_bytes
from rco.report.data import Evaluated, ReportError, RunData, evaluations, integer, read_run, section
from rco.report.figures import Plot, quality_against_bits
from rco.report.numbers import bytes_text, count, duration, measured, plural, short
from rco.report.result_tables import Column, Table
from rco.report.sections import budget_used, sections, tiles
from rco.report.theme import DARK, LIGHT, WIDTHS
from rco.runs import RunDirectory

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["build_report", "render_report"]

# Control characters are not allowed in HTML, lone surrogates not in UTF-8, and direction overrides could make a
# name read as another one.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def build_report(runs: Sequence[RunDirectory], out: Path | str) -> Path:
    """Write the report of some runs.

    Args:
        runs: Finished or unfinished runs; the page shows their results so far.
        out: The HTML file; written atomically.

    Returns:
        The file's path.
    """
    out = Path(out)
    page = render_report([read_run(run) for run in runs])
    make_folder(out.absolute().parent)
    write_text_atomic(out, page)
    return out


def render_report(data: Sequence[RunData]) -> str:
    """The page as a string; the same runs give the same string."""
    if not data:
        raise ReportError("A report needs at least one run.")
    several = len(data) > 1
    environment = _environment()
    style = environment.get_template("style.css").render(light=LIGHT, dark=DARK, widths=WIDTHS)
    script = environment.get_template("sort.js").render()
    kinds = {str(run.metrics["kind"]).replace("-", " ") for run in data if run.metrics.get("kind")}
    models = {run.title for run in data}
    compared = f"{plural(len(data), 'run')} compared"
    title = f"{data[0].title}: {compared}" if len(models) == 1 else compared
    page = environment.get_template("report.html").render(
        title=title if several else f"{_title(data[0])} – rco report",
        heading=title,
        kind=kinds.pop() if len(kinds) == 1 else None,
        style=style,
        script=script,
        # Only the page's own script and style are allowed, and no requests, whatever a name contains.
        policy=f"default-src 'none'; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(script)}'; base-uri 'none'; form-action 'none'",
        runs=[_run(data, index) for index in range(len(data))],
        comparison=_comparison(data) if several else None,
        version=rco.__version__,
    )
    return _UNSAFE.sub("\ufffd", page)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rco.report"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("count", "percent", "plural", "significant"):
        environment.filters[name] = getattr(numbers, name)
    environment.globals["DASH"] = numbers.DASH
    return environment


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")


def _run(data: Sequence[RunData], index: int) -> dict[str, Any]:
    """Contents of one run for the template."""
    run, prefix = data[index], f"run{index + 1}-" if len(data) > 1 else ""
    model = section(run.metrics, "model")
    parameters = integer(model, "parameters", "model")
    blocks = integer(model, "blocks", "model")
    facts = [
        parameters if parameters is None else f"{_short_count(parameters)} parameters",
        blocks if blocks is None else f"{blocks} blocks",
        model.get("dtype"),
        f"run {run.name}",
    ]
    return {
        "anchor": f"run{index + 1}",
        "prefix": prefix,
        "label": _label(data, index),
        "title": _title(run),
        "facts": [fact for fact in facts if fact],
        "finished": run.result is not None,
        "tiles": tiles(run),
        "sections": sections(run, prefix),
    }


def _short_count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return count(number)


def _title(run: RunData) -> str:
    """The model and its budget."""
    budget = section(run.metrics, "budget")
    requested = budget.get("requested")
    if requested is None:
        return run.title
    phrase = {"bits": "at {} bits", "bpw": "at {} bits per weight", "size": "in {}"}.get(
        str(budget.get("kind"))
    )
    if phrase is not None:
        return f"{run.title} {phrase.format(requested)}"
    if not run.pruning:
        return f"{run.title}, {requested}"
    try:
        share = float(requested)
    except ValueError:
        return f"{run.title}, {requested}"
    return f"{run.title}, {f'{100 * share:g} % of the' if 0 < share < 1 else requested} experts pruned"


# ---------------------------------------------------------------------- comparison


def _label(data: Sequence[RunData], index: int) -> str:
    """Name of the run's folder, numbered if several have the same."""
    name = data[index].name
    return name if sum(run.name == name for run in data) == 1 else f"{name} ({index + 1})"


def _comparison(data: Sequence[RunData]) -> dict[str, Table | Plot | None]:
    """One row per run, and a plot if the results are comparable."""
    chosen = [next((row for row in evaluations(run) if row.chosen), None) for run in data]
    models = {run.title for run in data}
    sizes = [checkpoint_bytes(run) for run in data]
    columns = [
        Column("Run", [_label(data, index) for index in range(len(data))]),
        Column("Model", [run.title if len(models) > 1 else None for run in data]),
        Column("Method", [run.method if run.result else None for run in data]),
        Column("Asked", [section(run.metrics, "budget").get("requested") for run in data]),
        Column("Used", [budget_used(run) for run in data], number=True),
        Column("Bits", [None if r is None or r.bits is None else short(r.bits) for r in chosen], number=True),
        Column(
            "KL",
            [None if r is None or r.kl is None else measured(r.kl, r.kl_error) for r in chosen],
            number=True,
        ),
        Column(
            "Perplexity",
            [
                None if r is None or r.perplexity is None else measured(r.perplexity, r.perplexity_error)
                for r in chosen
            ],
            number=True,
        ),
        Column("Checkpoint", [None if size is None else bytes_text(size) for size in sizes], number=True),
        Column("Search", [duration(run.result.seconds) if run.result else None for run in data], number=True),
    ]
    caption = "The runs of this page, each with its own result on its own evaluation text"
    links = [f"#run{index + 1}" for index in range(len(data))]
    return {
        "table": Table(caption, columns, links=links),
        "plot": quality_against_bits(_points(data, chosen), "comparison"),
    }


def _points(data: Sequence[RunData], chosen: Sequence[Evaluated | None]) -> list[tuple[Evaluated, str]]:
    """The runs' results and the uniform widths, if all runs are of one model on one evaluation text."""
    models = {section(run.metrics, "model").get("fingerprint") for run in data}
    if len(models) != 1 or models == {None}:
        return []
    points = [(row, _label(data, index)) for index, row in enumerate(chosen) if row is not None]
    uniform: dict[str, Evaluated] = {}
    for run in data:
        for row in evaluations(run):
            if row.uniform_width is not None and uniform.setdefault(row.name, row).kl != row.kl:
                return []  # measured on different texts
    return points + [(row, name) for name, row in uniform.items()]
