"""The budget certificate: the budget, its use, and checks that recompute every sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rco.core.optimizer import search_surface
from rco.report.data import ReportError, RunData, integer, number, section
from rco.report.numbers import bytes_text, count, exact, percent, plural, short, significant
from rco.report.result_tables import Column, Table, fold_names

__all__ = ["Check", "budget_facts", "checkpoint_bytes", "checks", "tensor_table"]

_MOST_TENSORS = 1500


@dataclass(frozen=True)
class Check:
    """A statement about the budget, and whether it holds."""

    holds: bool
    words: str


def checks(run: RunData) -> list[Check]:
    """Checks of the budget from the run's documents."""
    return [
        *_within_budget(section(run.metrics, "budget")),
        *_recomputed(run),
        *_written(section(run.metrics, "certificate")),
        *_tensors_add_up(section(run.metrics, "export"), run.header_bytes),
        *_files_add_up(section(run.metrics, "export")),
        *_engine(section(run.metrics, "engine")),
    ]


def _within_budget(budget: Mapping[str, Any]) -> list[Check]:
    used, allowed = integer(budget, "used_units", "budget"), integer(budget, "budget_units", "budget")
    if used is None or allowed is None:
        return []
    unit = str(budget.get("unit", "units"))
    if used <= allowed:
        return [Check(True, f"{count(used)} {unit} used, {count(allowed)} allowed.")]
    return [
        Check(
            False,
            f"{count(used)} {unit} used, {count(used - allowed)} more than the {count(allowed)} allowed.",
        )
    ]


def _recomputed(run: RunData) -> list[Check]:
    """The cost, recomputed in exact arithmetic from the problem and the allocation."""
    if run.problem is None or run.result is None:
        return []
    cost, budgets = run.problem.cost(run.result.allocation), run.problem.budgets
    feasible = run.problem.is_feasible(run.result.allocation)
    found, again = [], "Recomputed from the problem and the allocation:"
    if run.problem.num_budgets == 1:
        words = f"{again} {exact(cost)} of {exact(run.problem.budgets[0])}{_unchanged(run, cost)}."
    else:
        within = sum(Fraction(c) <= Fraction(b) for c, b in zip(cost, run.problem.budgets, strict=True))
        words = f"{again} {within} of {plural(len(budgets), 'budget')} kept."
    found.append(Check(feasible, words))
    if run.result.cost != cost:
        found.append(
            Check(False, f"The search recorded a cost of {run.result.cost}; the allocation costs {cost}.")
        )
    return found


def _unchanged(run: RunData, cost: Any) -> str:
    """The bytes of a size budget that no choice changes."""
    budget = section(run.metrics, "budget")
    used = integer(budget, "used_units", "budget")
    if budget.get("kind") != "size" or used is None or used <= cost:
        return ""
    return f", beside {exact(used - cost)} bytes that no choice changes"


def _written(certificate: Mapping[str, Any]) -> list[Check]:
    used, allowed = certificate.get("used"), certificate.get("allowed")
    if used is None or allowed is None:
        return []
    used, allowed = _fraction(used, "used"), _fraction(allowed, "allowed")
    source = certificate.get("source", "the headers of the files as written")
    words = f"Counted from {source}: {exact(used)} of {exact(allowed)}."
    return [Check(used <= allowed, words)]


def _fraction(value: Any, key: str) -> Fraction:
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ReportError(
            f"{key!r} in certificate of metrics.json must be a number, got {value!r}."
        ) from None


def _tensors(export: Mapping[str, Any]) -> dict[str, int]:
    sizes = section(export, "tensors")
    return {str(name): integer(sizes, name, "tensors of export") or 0 for name in sizes}


def _tensors_add_up(export: Mapping[str, Any], header_bytes: int | None) -> list[Check]:
    sizes, total = _tensors(export), integer(export, "total_bytes", "export")
    if not sizes or total is None:
        return []
    data = sum(sizes.values())
    if data == total:
        return [
            Check(True, f"The {plural(len(sizes), 'tensor')} add up to the total of {count(total)} bytes.")
        ]
    if header_bytes is None:
        words = (
            f"The {plural(len(sizes), 'tensor')} have {count(data)} bytes, the total is {count(total)}: a "
            f"difference of {count(total - data)} bytes, with no file headers to explain it."
        )
        return [Check(False, words)]
    both = data + header_bytes
    words = (
        f"{count(data)} bytes in {plural(len(sizes), 'tensor')} and {count(header_bytes)} of file headers "
    )
    if both == total:
        return [Check(True, words + f"add up to the total of {count(total)} bytes.")]
    return [Check(False, words + f"make {count(both)}, but the total is {count(total)} bytes.")]


def _files_add_up(export: Mapping[str, Any]) -> list[Check]:
    total, files = integer(export, "total_bytes", "export"), export.get("files")
    if total is None or not isinstance(files, Mapping):
        return []
    sizes = [
        integer(files, name, "files of export") or 0 for name in files if str(name).endswith(".safetensors")
    ]
    if not sizes:
        return []
    together = sum(sizes)
    words = f"{plural(len(sizes), 'safetensors file')} of {count(together)} bytes; stated are {count(total)}."
    return [Check(together == total, words)]


def _engine(engine: Mapping[str, Any]) -> list[Check]:
    if not engine.get("preset"):
        return []
    violations = list(engine.get("violations") or [])
    if not violations:
        return [Check(True, f"All rules of {engine['preset']} are satisfied.")]
    return [Check(False, f"{engine['preset']}: {violation}") for violation in violations]


# --------------------------------------------------------------------------- facts


def budget_facts(run: RunData) -> list[tuple[str, Any]]:
    """Requested, effective, used, left over and stored: (name, value) of those that are known."""
    budget = section(run.metrics, "budget")
    unit = str(budget.get("unit", "units"))
    used, allowed = integer(budget, "used_units", "budget"), integer(budget, "budget_units", "budget")
    written = section(run.metrics, "certificate")
    rows: list[tuple[str, Any]] = []

    def fact(name: str, value: Any) -> None:
        if value is not None:
            rows.append((name, value))

    kind = {"bits": "average bits of the quantized weights", "bpw": "bits per weight, scales counted",
            "size": "whole checkpoint on disk", "experts": "experts"}.get(str(budget.get("kind")))  # fmt: skip
    requested = budget.get("requested")
    fact("Requested", f"{requested} ({kind})" if requested is not None and kind else requested)
    fact("Effective", budget.get("effective"))
    fact("Used", budget.get("used"))
    if used is not None and allowed is not None:
        share = f" ({percent((allowed - used) / allowed, 4)})" if allowed else ""
        fact("Left over", f"{count(allowed - used)} {unit}{share}")
    reachable = budget.get("range")
    if isinstance(reachable, list | tuple) and len(reachable) == 2:
        fact("Reachable", f"{_plain(reachable[0])} to {_plain(reachable[1])}")
    average = number(budget, "average_bits", "budget")
    if average is not None:
        fraction = budget.get("average_bits_exact")
        same = fraction is None or exact(_fraction(fraction, "average_bits_exact")) == short(average, 8)
        fact("Average width", f"{short(average, 8)} bits" + ("" if same else f" (exactly {fraction})"))
    stored = number(budget, "bits_per_weight_stored", "budget")
    if stored is None:
        stored = number(written, "average_stored_bits", "certificate")
    fact(
        "Stored, scales and zeros counted",
        None if stored is None else f"{short(stored, 6)} bits per weight",
    )
    size = checkpoint_bytes(run)
    fact("Checkpoint", None if size is None else f"{count(size)} bytes ({bytes_text(size)})")
    walk = _farthest_from_budget(run)
    fact("Farthest from the budget during the search", walk)
    return rows


def checkpoint_bytes(run: RunData) -> int | None:
    """Bytes of the checkpoint's safetensors files, from whichever section states them."""
    for name, key in (
        ("export", "total_bytes"),
        ("certificate", "checkpoint_bytes"),
        ("budget", "checkpoint_bytes"),
    ):
        found = integer(section(run.metrics, name), key, name)
        if found is not None:
            return found
    return None


def _plain(value: Any) -> str:
    return short(value, 6) if isinstance(value, float) else str(value)


def _farthest_from_budget(run: RunData) -> str | None:
    """Largest distance of the continuous iterate from C = B, relative to B."""
    if run.problem is None or search_surface(run.problem) != "==":
        return None
    budgets = [float(budget) for budget in run.problem.budgets]
    distances = [
        abs(cost - budget) / abs(budget)
        for record in run.history
        for cost, budget in zip(record.expected_cost or (), budgets, strict=False)
        if budget
    ]
    return f"{significant(max(distances), 2)} of it (the continuous iterate)" if distances else None


def tensor_table(run: RunData) -> Table | None:
    """Bytes of every tensor, with the sums below."""
    export = section(run.metrics, "export")
    sizes, total = _tensors(export), integer(export, "total_bytes", "export")
    if not sizes:
        return None
    folded, was_folded = fold_names(sizes, _MOST_TENSORS)
    numbers = [count(number) if was_folded else None for number, _ in folded.values()]
    sums: list[tuple[str, int | None, int | None]] = [
        ("Tensors together", len(sizes), sum(sizes.values())),
        ("Headers of the safetensors files", None, run.header_bytes),
        ("Stated total", None, total),
    ]
    foot = [
        [name, *([number and count(number)] if was_folded else []), count(size)]
        for name, number, size in sums
        if size is not None
    ]
    return Table(
        "Bytes of every tensor" + (", numbered names added up (*)" if was_folded else ""),
        [
            Column("Tensor", list(folded)),
            Column("Tensors", numbers, number=True),
            Column("Bytes", [count(size) for _, size in folded.values()], number=True),
        ],
        foot=foot,
        sortable=True,
    )
