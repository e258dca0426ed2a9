"""The page and the plots of ``benchmarks/assignment.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["gaps", "optima_found", "write_report"]

ABLATIONS = ("penalty + restarts", "restarts alone")


def gaps(results: dict[str, Any]) -> dict[tuple[str, str, str], list[float]]:
    """Gaps of all instances by (family, size, method); see ``benchmarks/assignment.py``."""
    best: dict[tuple[Any, ...], float] = defaultdict(lambda: np.inf)
    for record in (*results["records"], *results.get("optima", [])):
        where = record["family"], record["groups"], record["options"], record["seed"]
        best[where] = min(best[where], record["loss"])
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record in results["records"]:
        where = record["family"], record["groups"], record["options"], record["seed"]
        span = max(record["uniform"] - best[where], 1e-12)
        size = f"{record['groups']} x {record['options']}"
        found[record["family"], size, record["method"]].append((record["loss"] - best[where]) / span)
    return found


def _shared_sizes(
    found: dict[tuple[str, str, str], list[float]], methods: list[str], family: str
) -> set[str]:
    """Sizes of a family on which every method was run."""
    by_method = [{s for f, s, m in found if (f, m) == (family, method)} for method in methods]
    return set.intersection(*by_method)


def _mean(
    found: dict[tuple[str, str, str], list[float]], family: str, method: str, sizes: set[str]
) -> float | None:
    """Mean over sizes of the mean over instances."""
    each = [float(np.mean(found[family, size, method])) for size in sorted(sizes)]
    return float(np.mean(each)) if each else None


def _table(found: dict[tuple[str, str, str], list[float]], methods: list[str], families: list[str]) -> str:
    rows = ["| method | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
    sizes = {family: _shared_sizes(found, methods, family) for family in families}
    means = {(f, m): _mean(found, f, m, sizes[f]) for f in families for m in methods}
    for method in methods:
        cells = []
        for family in families:
            mean = means[family, method]
            lowest = min((v for m in methods if (v := means[family, m]) is not None), default=0.0)
            text = "" if mean is None else f"{100 * mean:.2f}"
            cells.append(f"**{text}**" if mean is not None and text == f"{100 * lowest:.2f}" else text)
        rows.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _plot(
    found: dict[tuple[str, str, str], list[float]], methods: list[str], family: str, path: Path
) -> None:
    from matplotlib.figure import Figure

    sizes = sorted({s for f, s, _ in found if f == family}, key=lambda s: int(s.split()[0]))
    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axis = figure.subplots()
    for method in methods:
        values = [np.mean(found.get((family, size, method), [np.nan])) for size in sizes]
        axis.plot(
            sizes, [max(100 * v, 1e-3) for v in values], marker="o", markersize=3, linewidth=1, label=method
        )
    axis.set_yscale("log")
    axis.set_ylabel("gap in %")
    axis.set_title(family, fontsize="medium")
    axis.legend(fontsize=6, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def optima_found(results: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """By family and method: instances whose proved optimum was found, and instances with a proved optimum."""
    proved = {
        (o["family"], o["groups"], o["seed"]): o["loss"] for o in results.get("optima", []) if o["proved"]
    }
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for record in results["records"]:
        where = record["family"], record["groups"], record["seed"]
        if where in proved:
            found, of = counts.get((record["family"], record["method"]), (0, 0))
            close = record["loss"] <= proved[where] + 1e-6 * max(1.0, abs(proved[where]))
            counts[record["family"], record["method"]] = found + int(close), of + 1
    return counts


def _small_part(small: dict[str, Any] | None) -> list[str]:
    """Sentences on the proved optima of small instances."""
    if small is None:
        return []
    counts = optima_found(small)
    first = small["records"][0]
    return [
        "## Proved optima",
        "",
        f"Instances of {first['groups']} x {first['options']} whose optimum (by enumeration) was found within "
        f"{first['evaluations']} evaluations: "
        + "; ".join(f"`{m}` on {f}: {found} of {of}" for (f, m), (found, of) in sorted(counts.items()))
        + " (`benchmarks/results/assignment_small.json`).",
        "",
    ]


def write_report(
    results: dict[str, Any], small: dict[str, Any] | None, docs: Path, order: Sequence[str]
) -> None:
    """Write ``assignment.md`` and ``assignment/*.svg``; ``order`` names families and methods, first to last."""
    found = gaps(results)

    def place(name: str) -> int:
        return order.index(name) if name in order else len(order)

    families = sorted(dict.fromkeys(f for f, _, _ in found), key=place)
    methods = sorted(dict.fromkeys(m for _, _, m in found), key=place)
    main = [m for m in methods if m not in ABLATIONS]
    counted = {s: max(len(v) for (_, size, _), v in found.items() if size == s) for _, s, _ in found}
    folder = docs / "assignment"
    folder.mkdir(parents=True, exist_ok=True)
    for family in families:
        _plot(found, main, family, folder / f"{family}.svg")
    evaluations = sorted({record["evaluations"] for record in results["records"]})
    machine = results["environment"]
    text = [
        "# Assignment problems without language models",
        "",
        "RCO and other methods at equal evaluations on six families of assignment problems. Made by "
        "`python benchmarks/assignment.py report` from `benchmarks/results/assignment.json`; the families are "
        "described in `benchmarks/assignment_families.py`.",
        "",
        f"Evaluations per search: {', '.join(map(str, evaluations))}; a gradient counts as three. Instances: "
        + ", ".join(f"{s}: {n}" for s, n in counted.items())
        + ".",
        "",
        "The gap is the distance from the best loss known for an instance, in % of the distance between that and "
        "the uniform assignment; mean over instances, then over the sizes on which all methods of a table were "
        "run. Bold: lowest.",
        "",
        _table(found, main, families),
        "",
        "`penalty`, `lagrangian` and `augmented-lagrangian` are the same Gumbel search with another treatment of "
        "the budget, ended by the choice among candidates; `rco-plain` is Algorithm 1 as printed.",
        "",
        "`score function` is RCO's loop for losses without gradient: samples on the same manifold, with a "
        "score-function estimate in place of the gradient (`benchmarks/assignment_score_search.py`). It is better "
        "than evolution on most families but not, over all of them, than annealing; the package leaves it out.",
        "",
        "## What the manifold buys over a penalty",
        "",
        "The same exchanges and restarts after a penalty, and without any gradient search before them:",
        "",
        _table(found, [m for m in methods if m in ("rco", *ABLATIONS)], families),
        "",
        "Compare the rows: where they agree, the advantage over other methods comes from exchanges and restarts "
        "guided by gradients, and from annealing where gradients mislead (`layers`), not from the manifold. What "
        "the manifold saves is the coefficient of the penalty.",
        "",
        *[line for note in results.get("notes", []) for line in (note, "")],
        *_small_part(small),
        "## By size",
        "",
        *[f"![{family}](assignment/{family}.svg)\n" for family in families],
        f"Machine: {machine.get('machine', machine.get('platform', 'unknown'))}.",
        "",
    ]
    (docs / "assignment.md").write_text("\n".join(text))
