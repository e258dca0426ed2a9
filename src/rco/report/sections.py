"""The sections of one run, in the order in which a reader wants them. What was not measured has no section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rco.report.bits import bit_map, width_shares
from rco.report.certificate import certificate, checkpoint_bytes
from rco.report.data import (
    Evaluated,
    RunData,
    evaluations,
    groups,
    integer,
    moe_layers,
    number,
    section,
)
from rco.report.expert_widths import expert_width_section
from rco.report.experts import domain_matrix, expert_map, layer_table
from rco.report.figures import convergence, quality_against_bits, sensitivity
from rco.report.markup import Markup, element, fragment
from rco.report.numbers import bytes_text, count, duration, measured, percent, plural, short, significant
from rco.report.tables import Column, domain_tables, evaluation_table, group_table, key_values, table
from rco.report.usage import code, loading, reproduce_command

__all__ = ["budget_used", "headline", "sections"]

Section = tuple[str, str, Markup]  # anchor, title, content

_CANDIDATES = {
    "final": "knapsack of the last logits",
    "averaged": "knapsack of the logits averaged over the last steps",
    "measured": "knapsack of what each option costs: sensitivities corrected by the search's gradients",
    "prices": "knapsack of what each option cost, predicted over the last steps",
    "best sample": "the sample with the lowest loss",
    "prior": "knapsack of the initial logits",
    "uniform": "the same option everywhere, the rest of the budget spent",
    "refined": "the best of the others after exchanges",
}


def sections(run: RunData) -> list[Section]:
    """All sections that the run has something for."""
    makers: Sequence[tuple[str, str, Callable[[RunData], Markup | None]]] = (
        ("results", "Results", _results),
        ("bits", "Bits of every layer", _bits),
        ("expert-widths", "Bits of every expert", expert_width_section),
        ("experts", "Experts kept", _experts),
        ("sensitivity", "Bits against sensitivity", _sensitivity),
        ("search", "Search", _search),
        ("certificate", "Budget certificate", certificate),
        ("use", "Load the checkpoint", loading),
        ("reproduce", "Settings and environment", _settings),
    )
    found = []
    for anchor, title, make in makers:
        content = make(run)
        if content is not None:
            found.append((anchor, title, content))
    return found


# ------------------------------------------------------------------------ headline


def headline(run: RunData) -> Markup:
    """What a reader must know: the model, the budget asked and used, and what it cost in quality."""
    model = section(run.metrics, "model")
    facts = []
    parameters = integer(model, "parameters", "model")
    if parameters is not None:
        facts.append(f"{_short(parameters)} parameters")
    if integer(model, "blocks", "model") is not None:
        facts.append(f"{model['blocks']} blocks")
    if model.get("dtype"):
        facts.append(str(model["dtype"]))
    facts.append(f"run {run.name}")
    rows = evaluations(run)
    tiles = [
        tile for tile in (_budget_tile(run), *_quality_tiles(rows), _size_tile(run), _time_tile(run)) if tile
    ]
    unfinished = (
        element(
            "p",
            "The search of this run has not ended: the page shows what has been written so far.",
            class_="notice",
            role="note",
        )
        if run.result is None
        else None
    )
    return fragment(
        element("p", " · ".join(facts), class_="facts"),
        unfinished,
        element("div", tiles, class_="tiles") if tiles else None,
    )


def _short(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return count(number)


def _tile(label: str, value: Any, notes: Sequence[str] = (), extra: Markup | None = None) -> Markup:
    return element(
        "div",
        element("p", label, class_="tile-label"),
        element("p", value, class_="tile-value"),
        extra,
        [element("p", note, class_="tile-note") for note in notes],
        class_="tile",
    )


def budget_used(run: RunData) -> str | None:
    """What the result takes of its budget, in the budget's own terms."""
    budget = section(run.metrics, "budget")
    used, average = integer(budget, "used_units", "budget"), number(budget, "average_bits", "budget")
    kind = budget.get("kind")
    if kind == "bits" and average is not None:
        return f"{short(average)} bits"
    if kind == "size" and used is not None:
        return bytes_text(used)
    if kind == "experts" and used is not None:
        return f"{count(used)} {budget.get('unit', 'experts')}"
    return None if budget.get("used") is None else str(budget["used"])


def _budget_tile(run: RunData) -> Markup | None:
    budget = section(run.metrics, "budget")
    used, allowed = integer(budget, "used_units", "budget"), integer(budget, "budget_units", "budget")
    value = budget_used(run)
    if value is None:
        return None
    notes = [f"asked: {budget['requested']}"] if budget.get("requested") is not None else []
    meter = None
    if used is not None and allowed:
        notes.append(f"{percent(used / allowed, 2)} of the budget")
        meter = _meter(used / allowed)
    return _tile("Budget used", value, notes, meter)


def _meter(share: float) -> Markup:
    over = " over" if share > 1 else ""
    return element(
        "svg",
        element("rect", x=0, y=0, width=100, height=6, rx=3, class_="meter-back"),
        element(
            "rect", x=0, y=0, width=f"{100 * min(1.0, share):.2f}", height=6, rx=3, class_=f"meter-fill{over}"
        ),
        viewBox="0 0 100 6",
        preserveAspectRatio="none",
        class_="meter",
        aria_hidden="true",
    )


def _quality_tiles(rows: Sequence[Evaluated]) -> list[Markup]:
    chosen = next((row for row in rows if row.chosen), None)
    if chosen is None:
        return []
    tiles = []
    full = next((row for row in rows if row.full), None)
    others = [row for row in rows if row.uniform_width is not None]
    if chosen.kl is not None:
        listed = [f"{row.name}: {significant(row.kl, 3)}" for row in others if row.kl is not None]
        tiles.append(_tile("KL to the full model", measured(chosen.kl, chosen.kl_error), listed))
    if chosen.perplexity is not None:
        notes = []
        if full is not None and full.perplexity:
            change = percent(chosen.perplexity / full.perplexity - 1)
            sign = "" if change.startswith("−") else "+"
            notes.append(f"full model: {significant(full.perplexity, 4)} ({sign}{change})")
        notes += [
            f"{row.name}: {significant(row.perplexity, 4)}" for row in others if row.perplexity is not None
        ]
        value = measured(chosen.perplexity, chosen.perplexity_error)
        tiles.append(_tile("Perplexity", value, notes))
    if chosen.recovery is not None:
        tiles.append(_tile("Recovery", percent(chosen.recovery / 100), ["of the full model's accuracy"]))
    return tiles


def _size_tile(run: RunData) -> Markup | None:
    size = checkpoint_bytes(run)
    if size is None:
        return None
    form = section(run.metrics, "export").get("format")
    stored = number(section(run.metrics, "budget"), "bits_per_weight_stored", "budget")
    if stored is None:
        stored = number(section(run.metrics, "certificate"), "average_stored_bits", "certificate")
    notes = [str(form)] if form else []
    if stored is not None:
        notes.append(f"{short(stored, 4)} bits per weight with scales")
    return _tile("Checkpoint", bytes_text(size), notes)


def _time_tile(run: RunData) -> Markup | None:
    timings = section(run.metrics, "timings")
    stages = {str(name): number(timings, name, "timings") or 0.0 for name in timings}
    if not stages:
        return None
    notes = [f"{name}: {duration(seconds)}" for name, seconds in stages.items()]
    return _tile("Time", duration(sum(stages.values())), notes)


# ------------------------------------------------------------------------ sections


def _figure(content: Markup, caption: Any) -> Markup:
    return element("figure", content, element("figcaption", caption))


def _results(run: RunData) -> Markup | None:
    rows = evaluations(run)
    if not rows:
        return None
    pieces: list[Markup | None] = [evaluation_table(rows, "Allocations on the evaluation text")]
    plot = quality_against_bits([(row, row.name) for row in rows])
    if plot is not None:
        uniform = sum(row.uniform_width is not None for row in rows)
        words = "Lower is better. "
        if uniform > 1:
            words += "The dashed line joins the uniform widths."
        pieces.append(_figure(plot, words))
    by_domain = domain_tables(rows)
    if by_domain:
        pieces += [element("h4", "By domain"), element("div", by_domain, class_="panels")]
    return fragment(pieces)


def _bits(run: RunData) -> Markup | None:
    found = groups(run)
    if not found:
        return None
    kinds = Counter((group.block, group.kind) for group in found)
    tied = any(len(group.members) > 1 and kinds[group.block, group.kind] == 1 for group in found)
    caption = (
        "Blocks from left to right, kinds of linears from top to bottom, the width in each cell; averages are "
        "weighted by parameters."
        + (" A framed cell that spans several kinds is one tied group: one width for all." if tied else "")
        + (" A cell of experts has the average of their groups." if max(kinds.values()) > 1 else "")
    )
    return fragment(
        _figure(fragment(width_shares(found), bit_map(found)), caption),
        element("details", element("summary", f"Table of {plural(len(found), 'group')}"), group_table(found)),
    )


def _experts(run: RunData) -> Markup | None:
    layers = moe_layers(run)
    moe = section(run.metrics, "moe")
    pieces: list[Markup | None] = []
    if layers:
        kept, total = sum(len(layer.kept) for layer in layers), sum(layer.experts for layer in layers)
        words = f"{count(kept)} of {count(total)} experts kept ({percent(kept / total)})."
        if all("reap" in layer.scores for layer in layers):
            words += " REAP's choice is drawn at the same count in each layer."
        overlap = number(moe, "overlap_with_reap", "moe")
        if overlap is not None:
            pieces.append(
                element(
                    "p", element("strong", percent(overlap)), " of the kept experts are also REAP's choice."
                )
            )
        pieces.append(_figure(expert_map(layers), words))
        pieces.append(
            element(
                "details", element("summary", f"Table of {plural(len(layers), 'layer')}"), layer_table(layers)
            )
        )
    if section(moe, "by_domain"):
        pieces += [
            element("h4", "Pruned on one domain, evaluated on all"),
            domain_matrix(section(moe, "by_domain")),
        ]
    return fragment(pieces) if pieces else None


def _sensitivity(run: RunData) -> Markup | None:
    plot = sensitivity(groups(run))
    if plot is None:
        return None
    return _figure(
        plot,
        "Each dot is a group, its area in proportion to its weights. The prediction is for this group alone at the "
        "smallest width; the search sees all groups together.",
    )


def _search(run: RunData) -> Markup | None:
    pieces: list[Markup | None] = []
    result = run.result
    if result is not None:
        facts = [f"Method {run.method}"]
        if result.seed is not None:
            facts.append(f"seed {result.seed}")
        if result.forwards:
            gradients = f"{count(result.backwards)} with gradient"
            facts.append(f"{plural(result.forwards, 'evaluation')} of the objective, of which {gradients}")
        if result.seconds:
            facts.append(duration(result.seconds))
        pieces.append(element("p", " · ".join(facts), class_="facts"))
    plot = convergence(run)
    if plot is not None:
        pieces.append(
            _figure(plot, "How the search went. The loss of a step is the mean over its samples and batches.")
        )
    if result is not None and result.candidates:
        pieces.append(_candidates(run))
    return fragment(pieces) if pieces else None


def _candidates(run: RunData) -> Markup:
    """Which allocation won on the selection split, and by how much."""
    assert run.result is not None  # the caller has looked
    result = run.result
    ranked = sorted(result.candidates.items(), key=lambda item: item[1])
    lowest = ranked[0][1]
    names = [name for name, _ in ranked]
    rows = []
    for name, loss in ranked:
        chosen = name == result.chosen_from
        label = fragment(name, element("span", "chosen", class_="tag")) if chosen else name
        gap = "–" if loss == lowest else f"+{significant(loss - lowest, 3)}"
        rows.append([label, _CANDIDATES.get(name, ""), significant(loss, 5), gap])
    why = None
    if result.chosen_from in names:
        own = result.candidates[result.chosen_from]
        others = [loss for name, loss in ranked if name != result.chosen_from]
        if others and own < min(others):
            why = f"“{result.chosen_from}” was chosen: its loss on the selection split, unseen by gradients, "
            why += f"is {significant(min(others) - own, 3)} below the next."
        elif own == lowest:
            why = f"“{result.chosen_from}” was chosen: no candidate has a lower loss on the selection split."
    return fragment(
        element("h4", "Candidates"),
        element("p", why) if why else None,
        table(
            [
                Column("Candidate"),
                Column("What it is"),
                Column("Selection loss", number=True),
                Column("Above the lowest", number=True),
            ],
            rows,
            caption="Allocations compared on the selection split",
            strong=[index for index, name in enumerate(names) if name == result.chosen_from],
        ),
    )


def _settings(run: RunData) -> Markup | None:
    pieces: list[Markup | None] = []
    command = reproduce_command(run)
    if command:
        pieces += [element("h4", "Run it again"), code(command)]
    documents = [
        ("Configuration", {key: value for key, value in run.config.items() if key != "command"}),
        ("Settings of the search", run.result.settings if run.result else {}),
        ("Model", section(run.metrics, "model")),
        ("Environment", {key: value for key, value in run.environment.items() if key != "command"}),
    ]
    for title, document in documents:
        if document:
            pieces.append(element("details", element("summary", title), key_values(document, title)))
    return fragment(pieces) if pieces else None
