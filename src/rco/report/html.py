"""The page: one file that needs nothing else, from one run or from several side by side."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rco
from rco.atomic_files import make_folder, write_text_atomic
from rco.report.certificate import checkpoint_bytes
from rco.report.data import Evaluated, ReportError, RunData, evaluations, read_run, section
from rco.report.figures import quality_against_bits
from rco.report.markup import Markup, element, fragment, text
from rco.report.numbers import DASH, bytes_text, duration, measured, plural, short
from rco.report.sections import budget_used, headline, sections
from rco.report.style import SCRIPT, STYLE
from rco.report.tables import Column, table
from rco.runs import RunDirectory

__all__ = ["build_report", "render_report"]


def build_report(runs: Sequence[RunDirectory], out: Path | str) -> Path:
    """Write the report of some runs.

    Args:
        runs: Finished runs, or unfinished ones, of which the page shows what there is.
        out: The HTML file; written whole or not at all.

    Returns:
        The file's path.
    """
    out = Path(out)
    page = render_report([read_run(run) for run in runs])
    make_folder(out.absolute().parent)
    write_text_atomic(out, page)
    return out


def render_report(data: Sequence[RunData]) -> str:
    """The page as a string."""
    if not data:
        raise ReportError("A report needs at least one run.")
    several = len(data) > 1
    articles, links = [], []
    for index, run in enumerate(data):
        prefix = f"run{index + 1}-" if several else ""
        made = sections(run)
        if several:
            links.append(element("a", _run_label(data, index), href=f"#run{index + 1}"))
        else:
            links += [element("a", title, href=f"#{anchor}") for anchor, title, _ in made]
        articles.append(
            element(
                "article",
                element("h2", _title(run), id=f"run{index + 1}"),
                headline(run),
                _navigation(links) if not several else None,
                [
                    element(
                        "section",
                        element("h3", title, id=f"{prefix}{anchor}-title"),
                        content,
                        id=f"{prefix}{anchor}",
                        aria_labelledby=f"{prefix}{anchor}-title",
                    )
                    for anchor, title, content in made
                ],
                aria_labelledby=f"run{index + 1}",
            )
        )
    models = {run.title for run in data}
    compared = f"{plural(len(data), 'run')} compared"
    if len(models) == 1:
        compared = f"{data[0].title}: {compared}"
    title = compared if several else f"{_title(data[0])} – rco report"
    head = element("h1", _eyebrow(data))
    top = [element("h2", title, class_="spaced"), _comparison(data), _navigation(links)] if several else []
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        element("header", head),
        element("main", element("article", top) if several else None, articles, id="content"),
        element("footer", f"Made by rco {rco.__version__} from the files of the run."),
        element("script", Markup(SCRIPT)),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{_head(title)}{body}</html>\n'


def _head(title: str) -> Markup:
    # The policy forbids every request, and every script and style but the page's own, whatever a name contains.
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(STYLE)}'; script-src 'sha256-{_digest(SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(STYLE)),
    )


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")


def _eyebrow(data: Sequence[RunData]) -> str:
    kinds = {str(run.metrics["kind"]).replace("-", " ") for run in data if run.metrics.get("kind")}
    return f"rco report · {kinds.pop()}" if len(kinds) == 1 else "rco report"


def _title(run: RunData) -> str:
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


def _navigation(links: Sequence[Markup]) -> Markup | None:
    if len(links) < 2:
        return None
    return element("nav", element("ul", [element("li", link) for link in links]), aria_label="Contents")


# ---------------------------------------------------------------------- comparison


def _run_label(data: Sequence[RunData], index: int) -> str:
    """The run's folder, numbered where two have the same name."""
    name = data[index].name
    return name if sum(run.name == name for run in data) == 1 else f"{name} ({index + 1})"


def _comparison(data: Sequence[RunData]) -> Markup:
    """One line per run, and where widths were searched, all of them in one plot."""
    chosen = [next((row for row in evaluations(run) if row.chosen), None) for run in data]
    models = {run.title for run in data}
    candidates: list[tuple[Column, list[Any]]] = [
        (Column("Model"), [run.title if len(models) > 1 else None for run in data]),
        (Column("Method"), [run.method if run.result else None for run in data]),
        (Column("Asked"), [section(run.metrics, "budget").get("requested") for run in data]),
        (Column("Used", number=True), [budget_used(run) for run in data]),
        (
            Column("Bits", number=True),
            [short(r.bits) if r and r.bits is not None else None for r in chosen],
        ),
        (
            Column("KL", number=True),
            [measured(r.kl, r.kl_error) if r and r.kl is not None else None for r in chosen],
        ),
        (
            Column("Perplexity", number=True),
            [
                measured(r.perplexity, r.perplexity_error) if r and r.perplexity is not None else None
                for r in chosen
            ],
        ),
        (
            Column("Checkpoint", number=True),
            [None if size is None else bytes_text(size) for size in map(checkpoint_bytes, data)],
        ),
        (
            Column("Search", number=True),
            [duration(run.result.seconds) if run.result else None for run in data],
        ),
    ]
    shown = [(column, cells) for column, cells in candidates if any(cell is not None for cell in cells)]
    rows = [
        [
            element("a", _run_label(data, index), href=f"#run{index + 1}"),
            *(DASH if cells[index] is None else cells[index] for _, cells in shown),
        ]
        for index in range(len(data))
    ]
    pieces: list[Markup | None] = [
        table(
            [Column("Run"), *(column for column, _ in shown)],
            rows,
            caption="The runs of this page, each with its own result on its own evaluation text",
        )
    ]
    plot = quality_against_bits(_points(data, chosen))
    if plot is not None:
        caption = "Results of the runs; points on the dashed line are uniform widths. Lower is better."
        pieces.append(element("figure", plot, element("figcaption", caption)))
    return fragment(pieces)


def _points(data: Sequence[RunData], chosen: Sequence[Evaluated | None]) -> list[tuple[Evaluated, str]]:
    """The runs' results, and the uniform widths if all runs are of one model on one evaluation text."""
    models = {section(run.metrics, "model").get("fingerprint") for run in data}
    if len(models) != 1 or models == {None}:
        return []
    points = [(row, _run_label(data, index)) for index, row in enumerate(chosen) if row is not None]
    uniform: dict[str, Evaluated] = {}
    for run in data:
        for row in evaluations(run):
            if row.uniform_width is not None and uniform.setdefault(row.name, row).kl != row.kl:
                return []  # not measured on the same text: nothing to draw in one plot
    return points + [(row, name) for name, row in uniform.items()]
