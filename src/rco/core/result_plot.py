"""Figure of a search: losses, violation of the budget and entropy over the evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rco.core.result import SearchResult

__all__ = ["plot_result"]


def plot_result(result: SearchResult) -> Any:
    """A matplotlib figure with up to three panels; those without data are left out."""
    from matplotlib.figure import Figure

    records = result.history
    spent = np.array([record.forwards + 2 * record.backwards for record in records])
    panels: list[tuple[str, list[tuple[str, np.ndarray, np.ndarray]]]] = []
    loss = np.array([record.loss for record in records])
    best = np.minimum.accumulate([record.best_loss for record in records]) if records else loss
    panels.append(("loss", [("step", spent, loss), ("best so far", spent, np.asarray(best))]))
    known = [i for i, record in enumerate(records) if record.expected_cost is not None]
    if known and result.problem is not None:
        budgets = result.problem.float_budgets
        costs = np.array([records[i].expected_cost for i in known])
        lines = [
            (f"budget {j}" if len(budgets) > 1 else "expected cost", spent[known], costs[:, j] - budgets[j])
            for j in range(len(budgets))
        ]
        panels.append(("C(x) - B", lines[:8]))
    known = [i for i, record in enumerate(records) if record.entropy is not None]
    if known:
        entropy = np.array([records[i].entropy for i in known])
        panels.append(("entropy / log K", [("logits", spent[known], entropy)]))
    figure = Figure(figsize=(6.4, 2.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, lines) in zip(axes, panels, strict=True):
        for name, x, y in lines:
            axis.plot(x, y, label=name, linewidth=1.2)
        axis.set_ylabel(label)
        if len(lines) > 1:
            axis.legend(fontsize="small")
    axes[-1].set_xlabel("evaluations")
    axes[0].set_title(f"{result.method}: loss {result.loss:.6g}, cost {result.cost}", fontsize="medium")
    return figure
