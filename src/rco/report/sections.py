"""Contents of the report's sections, rendered by the templates in ``templates/``.

A section without data is None and left out of the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rco.report.certificate import budget_facts, checkpoint_bytes, checks, tensor_table
from rco.report.data import (
    Evaluated,
    RunData,
    evaluations,
    expert_width_layers,
    groups,
    integer,
    moe_layers,
    number,
    section,
)
from rco.report.figures import convergence, quality_against_bits, sensitivity, tuning_curve
from rco.report.maps import expert_map, frequency_map, width_bands, width_map, width_shares
from rco.report.numbers import bytes_text, count, duration, measured, percent, plural, short, significant
from rco.report.result_tables import (
    Column,
    Table,
    domain_matrix,
    domain_tables,
    evaluation_table,
    expert_width_table,
    group_table,
    key_values,
    layer_table,
)
from rco.report.theme import level
from rco.report.usage import loading, reproduce_command

__all__ = ["Section", "Tile", "budget_used", "sections", "tiles"]

_CANDIDATES = {
    "final": "knapsack of the last logits",
    "averaged": "knapsack of the logits averaged over the last steps",
    "measured": "knapsack of the cost of each option: sensitivities corrected by the search's gradients",
    "prices": "knapsack of the cost of each option, predicted over the last steps",
    "best sample": "the sample with the lowest loss",
    "start": "the allocation that the search was started from",
    "prior": "knapsack of the initial logits",
    "proxy": "exact knapsack of the predicted losses",
    "proxy, spent": "the same, the rest of the budget spent",
    "uniform": "the same option everywhere, the rest of the budget spent",
    "refined": "the best of the others after exchanges",
    "best seen": "the lowest loss of all evaluations",
}


@dataclass(frozen=True)
class Section:
    """A section of the page: anchor, title and contents for its template."""

    anchor: str
    title: str
    contents: Any


def sections(run: RunData, prefix: str = "") -> list[Section]:
    """All sections for which the run has data; ``prefix`` makes names unique on a page of several runs."""
    makers: Sequence[tuple[str, str, Callable[[RunData, str], Any]]] = (
        ("results", "Results", _results),
        ("bits", "Bits of every layer", _bits),
        ("expert-widths", "Bits of every expert", _expert_widths),
        ("experts", "Experts kept", _experts),
        ("sensitivity", "Bits against sensitivity", _sensitivity),
        ("search", "Search", _search),
        ("tuning", "Tuning", _tuning),
        ("certificate", "Budget certificate", _certificate),
        ("use", "Load the checkpoint", lambda run, _: loading(run)),
        ("reproduce", "Settings and environment", _settings),
    )
    found = [Section(anchor, title, make(run, prefix)) for anchor, title, make in makers]
    return [section for section in found if section.contents is not None]


# --------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tile:
    """One of the numbers at the top of the page, with notes and, for the budget, the share that is used."""

    label: str
    value: Any
    notes: Sequence[str] = ()
    share: float | None = None


def tiles(run: RunData) -> list[Tile]:
    """Budget, quality, size and time."""
    found = [_budget_tile(run), *_quality_tiles(evaluations(run)), _size_tile(run), _time_tile(run)]
    return [tile for tile in found if tile is not None]


def budget_used(run: RunData) -> str | None:
    """Used budget of the result, in the budget's unit."""
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


def _budget_tile(run: RunData) -> Tile | None:
    budget = section(run.metrics, "budget")
    used, allowed = integer(budget, "used_units", "budget"), integer(budget, "budget_units", "budget")
    value = budget_used(run)
    if value is None:
        return None
    share = used / allowed if used is not None and allowed else None
    notes = [f"asked: {budget['requested']}"] if budget.get("requested") is not None else []
    notes += [f"{percent(share, 2)} of the budget"] if share is not None else []
    return Tile("Budget used", value, notes, share)


def _quality_tiles(rows: Sequence[Evaluated]) -> list[Tile]:
    chosen = next((row for row in rows if row.chosen), None)
    if chosen is None:
        return []
    found = []
    full = next((row for row in rows if row.full), None)
    others = [row for row in rows if row.uniform_width is not None]
    if chosen.kl is not None:
        notes = [f"{row.name}: {significant(row.kl, 3)}" for row in others if row.kl is not None]
        found.append(Tile("KL to the full model", measured(chosen.kl, chosen.kl_error), notes))
    if chosen.perplexity is not None:
        notes = []
        if full is not None and full.perplexity:
            change = percent(chosen.perplexity / full.perplexity - 1)
            sign = "" if change.startswith("−") else "+"
            notes.append(f"full model: {significant(full.perplexity, 4)} ({sign}{change})")
        notes += [
            f"{row.name}: {significant(row.perplexity, 4)}" for row in others if row.perplexity is not None
        ]
        found.append(Tile("Perplexity", measured(chosen.perplexity, chosen.perplexity_error), notes))
    if chosen.recovery is not None:
        found.append(Tile("Recovery", percent(chosen.recovery / 100), ["of the full model's accuracy"]))
    return found


def _size_tile(run: RunData) -> Tile | None:
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
    return Tile("Checkpoint", bytes_text(size), notes)


def _time_tile(run: RunData) -> Tile | None:
    timings = section(run.metrics, "timings")
    stages = {str(name): number(timings, name, "timings") or 0.0 for name in timings}
    if not stages:
        return None
    notes = [f"{name}: {duration(seconds)}" for name, seconds in stages.items()]
    return Tile("Time", duration(sum(stages.values())), notes)


# ------------------------------------------------------------------------ sections


def _results(run: RunData, prefix: str) -> dict[str, Any] | None:
    rows = evaluations(run)
    if not rows:
        return None
    return {
        "table": evaluation_table(rows),
        "plot": quality_against_bits([(row, row.name) for row in rows], f"{prefix}quality"),
        "uniform": sum(row.uniform_width is not None for row in rows),
        "domains": domain_tables(rows),
    }


def _bits(run: RunData, prefix: str) -> dict[str, Any] | None:
    found = groups(run)
    if not found:
        return None
    kinds = Counter((group.block, group.kind) for group in found)
    bands, loose = width_bands(found)
    return {
        "shares": width_shares(found),
        "bands": bands,
        "blocks": sum(len(band.blocks) for band in bands),
        "loose": [(group.name, f"{group.width:g}", level(group.width)) for group in loose],
        "tied": any(len(group.members) > 1 and kinds[group.block, group.kind] == 1 for group in found),
        "averaged": max(kinds.values()) > 1,
        "groups": len(found),
        "table": group_table(found),
    }


def _expert_widths(run: RunData, prefix: str) -> dict[str, Any] | None:
    layers = expert_width_layers(run)
    if not layers:
        return None
    shares = [share for layer in layers for share in layer.frequency]
    widths = {width for layer in layers for parts in layer.widths for width in parts}
    return {
        "widths": width_map(layers),
        "frequencies": frequency_map(layers),
        "highest": max(shares),
        "columns": max(len(layer.widths) for layer in layers),
        "levels": [(width, level(width)) for width in sorted(widths)],
        "fitted": _fitted(section(run.metrics, "expert_widths")),
        "experts": len(shares),
        "layers": len(layers),
        "table": expert_width_table(layers),
    }


def _fitted(found: Mapping[str, Any]) -> dict[str, int] | None:
    """Numbers of tokens that experts were fitted to; None if no tokens were used."""
    least = integer(found, "minimum_tokens", "expert_widths")
    if least is None:
        return None
    fewest = integer(found, "fewest_tokens", "expert_widths")
    return {"fewest": least if fewest is None else fewest} | {
        name: integer(found, name, "expert_widths") or 0
        for name in ("unvisited", "topped_up", "added_tokens")
    }


def _experts(run: RunData, prefix: str) -> dict[str, Any] | None:
    layers = moe_layers(run)
    moe = section(run.metrics, "moe")
    by_domain = section(moe, "by_domain")
    if not layers and not by_domain:
        return None
    rows = expert_map(layers)
    colours = {colour for row in rows for strip in row.strips for colour in strip.colours}
    return {
        "rows": rows,
        "columns": max((layer.experts for layer in layers), default=0),
        "kept": sum(len(layer.kept) for layer in layers),
        "total": sum(layer.experts for layer in layers),
        "compared": all("reap" in layer.scores for layer in layers),
        "differs": bool(colours & {"gained", "lost"}),
        "overlap": number(moe, "overlap_with_reap", "moe") if layers else None,
        "layers": len(layers),
        "table": layer_table(layers),
        "domains": domain_matrix(by_domain) if by_domain else None,
    }


def _sensitivity(run: RunData, prefix: str) -> dict[str, Any] | None:
    plots, left_out = sensitivity(groups(run), prefix)
    return {"plots": plots, "left_out": left_out} if plots else None


def _search(run: RunData, prefix: str) -> dict[str, Any] | None:
    result, facts = run.result, []
    if result is not None:
        facts.append(f"Method {run.method}")
        if result.seed is not None:
            facts.append(f"seed {result.seed}")
        if result.forwards:
            gradients = f"{count(result.backwards)} with gradient"
            facts.append(f"{plural(result.forwards, 'evaluation')} of the objective, {gradients}")
        if result.seconds:
            facts.append(duration(result.seconds))
    plots = convergence(run, prefix)
    if not facts and not plots:
        return None
    return {"facts": facts, "plots": plots, "candidates": _candidates(run), "margin": _margin(run)} | {
        "chosen": result.chosen_from if result else None
    }


def _tuning(run: RunData, prefix: str) -> dict[str, Any] | None:
    found = section(run.metrics, "tuning")
    if not found:
        return None
    before, after = (number(found, name, "tuning") or 0.0 for name in ("before", "after"))
    codes, moved = (integer(found, name, "tuning") or 0 for name in ("codes", "moved"))
    return {
        "mode": str(found.get("mode")),
        "tokens": integer(found, "tokens", "tuning") or 0,
        "sequences": integer(found, "sequences", "tuning") or 0,
        "seconds": duration(number(found, "seconds", "tuning") or 0.0),
        "improved": bool(found.get("improved")),
        "before": significant(before, 4),
        "after": significant(after, 4),
        "change": percent(1 - after / before) if before else None,
        "codes": codes,
        "moved": moved,
        "share": percent(moved / codes) if codes else None,
        "plot": tuning_curve(found.get("curve") or [], f"{prefix}tuning"),
        "domains": _tuned_domains(run),
    }


def _tuned_domains(run: RunData) -> Table | None:
    """KL on evaluation text before and after tuning, by domain."""
    rows = run.metrics.get("evaluation") or []
    after = next((row for row in rows if row.get("chosen")), None)
    before = next((row for row in rows if after and row["name"] == f"{after['name']}, not tuned"), None)
    if after is None or before is None:
        return None
    pairs = [("all", before["kl"], after["kl"])]
    for domain, measured_before in (before.get("by_domain") or {}).items():
        if domain in (after.get("by_domain") or {}):
            pairs.append((domain, measured_before["kl"], after["by_domain"][domain]["kl"]))
    return Table(
        "KL to the full model on evaluation text, before and after tuning",
        [
            Column("Domain", [name for name, _, _ in pairs]),
            Column("Before", [significant(kl, 4) for _, kl, _ in pairs], number=True),
            Column("After", [significant(kl, 4) for _, _, kl in pairs], number=True),
            Column("Less", [percent(1 - b / a) if a else None for _, a, b in pairs], number=True),
        ],
    )


def _candidates(run: RunData) -> Table | None:
    """Allocations by their loss on the selection split."""
    if run.result is None or not run.result.candidates:
        return None
    ranked = sorted(run.result.candidates.items(), key=lambda item: item[1])
    lowest = ranked[0][1]
    return Table(
        "Allocations compared on the selection split",
        [
            Column("Candidate", [name for name, _ in ranked]),
            Column("Origin", [_CANDIDATES.get(name) for name, _ in ranked]),
            Column("Selection loss", [significant(loss, 5) for _, loss in ranked], number=True),
            Column(
                "Above the lowest",
                [None if loss == lowest else f"+{significant(loss - lowest, 3)}" for _, loss in ranked],
                number=True,
            ),
        ],
        tags={index: "chosen" for index, (name, _) in enumerate(ranked) if name == run.result.chosen_from},
    )


def _margin(run: RunData) -> str | None:
    """Distance of the chosen candidate's loss below the next ("0": equal); None if it is not the lowest."""
    if run.result is None or run.result.chosen_from not in run.result.candidates:
        return None
    own = run.result.candidates[run.result.chosen_from]
    others = [loss for name, loss in run.result.candidates.items() if name != run.result.chosen_from]
    if min(others, default=own) < own:
        return None
    return significant(min(others, default=own) - own, 3)


def _certificate(run: RunData, prefix: str) -> dict[str, Any] | None:
    facts, verified = budget_facts(run), checks(run)
    if not facts and not verified:
        return None
    columns = [Column("Budget", [name for name, _ in facts]), Column("Value", [value for _, value in facts])]
    return {
        "facts": Table("The budget and its use", columns) if facts else None,
        "checks": verified,
        "tensors": tensor_table(run),
        "tensor_count": len(section(section(run.metrics, "export"), "tensors")),
    }


def _settings(run: RunData, prefix: str) -> dict[str, Any] | None:
    documents = {
        "Configuration": {key: value for key, value in run.config.items() if key != "command"},
        "Settings of the search": run.result.settings if run.result else {},
        "Model": section(run.metrics, "model"),
        "Environment": {key: value for key, value in run.environment.items() if key != "command"},
    }
    command = reproduce_command(run)
    tables = [key_values(document, title) for title, document in documents.items() if document]
    return {"command": command, "tables": tables} if command or tables else None
