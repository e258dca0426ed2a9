"""Speed of the exact knapsack compared with HiGHS, on the shapes of compression problems.

Every timed solve has fresh noise, as in a search. Both solvers get the same instances in turn
within one run; HiGHS (the package ``highspy``) with costs already reduced (minima subtracted, common factors
divided away), gap tolerances 0 and its model built outside the timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any, cast

import numpy as np

from rco.core.knapsack import Solution, solve_choices, solve_mckp
from rco.core.problem import AllocationProblem

__all__ = ["FAMILIES", "Family", "run", "to_markdown"]

_WIDTHS = np.arange(2, 9)
# The linears of a decoder layer of Qwen3-8B (q, k, v, o, gate, up, down) in units of the smallest, 36 layers.
_QWEN = np.array([4, 1, 1, 4, 12, 12, 12] * 36)


@dataclass(frozen=True)
class Family:
    """A problem shape with its target time."""

    title: str
    problem: Callable[[np.random.Generator], AllocationProblem]
    values: Callable[[np.random.Generator, AllocationProblem, int], np.ndarray]
    batch: int  # samples per batched call
    target_ms: float | None = None
    target_ratio: float | None = None  # HiGHS's time over ours


def _widths(weights: np.ndarray) -> AllocationProblem:
    return AllocationProblem(_WIDTHS, int(weights.sum()) * 5 // 2, weights)


def _noisy_logits(
    rng: np.random.Generator, problem: AllocationProblem, batch: int, keep: float = 0.0
) -> np.ndarray:
    """Perturbed log-probabilities at the spreads and temperatures that a search passes through."""
    shape = (problem.num_groups, problem.num_options)
    values = np.empty((batch, *shape))
    for b in range(batch):
        spread, temperature = (1.0, 2.0, 3.0)[b // 3 % 3], (1.0, 0.1, 0.01)[b % 3]
        logits = rng.normal(0.0, spread, shape)
        logits[:, -1] += keep * spread
        logits -= np.logaddexp.reduce(logits, axis=1, keepdims=True)
        values[b] = (logits + rng.gumbel(size=shape)) / temperature
    return values


def _mostly_kept(rng: np.random.Generator, problem: AllocationProblem, batch: int) -> np.ndarray:
    return _noisy_logits(rng, problem, batch, keep=4.0)  # so that the budget binds


def _near_costs(rng: np.random.Generator, problem: AllocationProblem, batch: int) -> np.ndarray:
    costs = problem.unit_costs[0]
    return np.asarray(costs + rng.uniform(-10, 10, (batch, *costs.shape)))


def _correlated(rng: np.random.Generator) -> AllocationProblem:
    costs = rng.integers(1, 101, (1000, 32))
    return AllocationProblem(costs, int(costs.mean() * 1000), sense="<=")


FAMILIES: dict[str, Family] = {
    "qwen3-8b": Family("252 x 7, Qwen3-8B", lambda rng: _widths(_QWEN), _noisy_logits, 32, 0.1, 400.0),
    "odd-sizes": Family(
        "252 x 7, odd sizes, budget 1e9",
        lambda rng: _widths(_QWEN * 241_000 + rng.integers(0, 4096, 252) * 2 + 1),
        _noisy_logits,
        32,
        0.2,
        200.0,
    ),
    "experts": Family(
        "24576 x 2, half of all experts",
        lambda rng: AllocationProblem([0, 1], 12288, np.ones(24576, dtype=int)),
        _mostly_kept,
        8,
        1.0,
    ),
    "two-sizes": Family(
        "1464 x 7, two sizes", lambda rng: _widths(np.tile([2, 1], 732)), _noisy_logits, 32, 0.3
    ),
    "correlated": Family("1000 x 32, value near cost", _correlated, _near_costs, 16, 2.0),
    "wide": Family(
        "24576 x 7, equal sizes", lambda rng: _widths(np.ones(24576, dtype=int)), _noisy_logits, 4, 6.0
    ),
    "wide-odd": Family(
        "24576 x 7, odd sizes, budget 2.5e10",
        lambda rng: _widths(rng.integers(1, 400_000, 24576) * 2 + 1),
        _noisy_logits,
        4,
    ),
}


def run(
    families: Sequence[str] | None = None,
    repeats: int = 9,
    quick: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Time every family and return a JSON-ready report.

    Args:
        families: Names out of :data:`FAMILIES`; all by default.
        repeats: Batches of fresh noise per family.
        quick: Three batches, and at most 2 seconds of HiGHS per family instead of 20.
        on_progress: Called with (batches done, batches in all).
        seed: Seed of problems and noise.
    """
    from rco.runs import environment

    names = list(FAMILIES) if families is None else list(families)
    unknown = sorted(set(names) - set(FAMILIES))
    if unknown:
        raise ValueError(f"Unknown families {unknown}; allowed are {list(FAMILIES)}.")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    repeats = min(repeats, 3) if quick else repeats
    started = time.perf_counter()
    solve_mckp(np.zeros((2, 2)), AllocationProblem([[0, 1], [0, 2]], 2))
    first_call = time.perf_counter() - started
    rows = []
    for f, name in enumerate(names):
        steps = _Steps(on_progress, f * repeats, len(names) * repeats)
        rows.append({"name": name, **_measure(FAMILIES[name], repeats, 2.0 if quick else 20.0, seed, steps)})
    return {
        "environment": environment(),
        "settings": {"repeats": repeats, "quick": quick, "seed": seed, "threads": 1},
        "first_call_seconds": first_call,
        "families": rows,
    }


@dataclass(frozen=True)
class _Steps:
    report: Callable[[int, int], None] | None
    before: int
    total: int

    def __call__(self, done: int) -> None:
        if self.report is not None:
            self.report(self.before + done, self.total)


def _measure(family: Family, repeats: int, highs_seconds: float, seed: int, step: _Steps) -> dict[str, Any]:
    rng = np.random.default_rng([seed, len(family.title)])
    problem = family.problem(rng)
    solve_choices(family.values(rng, problem, 1), problem)  # prepares the problem
    highs = _Highs(problem)
    batched: list[float] = []
    single: list[float] = []
    theirs: list[float] = []
    proven, worst, unsolved = 0, 0.0, 0
    for repeat in range(repeats):
        values = family.values(rng, problem, family.batch)
        began = time.perf_counter()
        found = solve_choices(values, problem)
        batched.append((time.perf_counter() - began) / family.batch)
        unsolved += int((found.codes != 0).sum())
        for sample in family.values(rng, problem, min(family.batch, 4)):
            began = time.perf_counter()
            solution = cast(Solution, solve_mckp(sample, problem))
            single.append(time.perf_counter() - began)
        left = highs_seconds - sum(theirs)
        peer = highs.solve(sample, left) if left > 0 else None
        if peer is not None:
            theirs.append(peer[0])
            if peer[1] is not None:
                proven += 1
                worst = max(worst, abs(peer[1] - solution.value) / max(abs(peer[1]), 1.0))
        step(repeat + 1)
    ours_ms, one_call_ms = 1e3 * median(batched), 1e3 * median(single)
    highs_ms = 1e3 * median(theirs) if theirs else None
    ratio = highs_ms / ours_ms if highs_ms is not None else None
    return {
        "title": family.title,
        "groups": problem.num_groups,
        "options": problem.num_options,
        "capacity": int(problem.reduced.capacity[0]),
        "batch": family.batch,
        "ms": ours_ms,
        "ms_one_call": one_call_ms,
        "unsolved": unsolved,
        "highs_ms": highs_ms,
        "highs_instances": len(theirs),
        "highs_proven": proven,
        "ratio": ratio,
        "ratio_one_call": highs_ms / one_call_ms if highs_ms is not None else None,
        "largest_difference": worst if proven else None,
        "target_ms": family.target_ms,
        "target_ratio": family.target_ratio,
        "met": (family.target_ms is None or ours_ms <= family.target_ms)
        and (family.target_ratio is None or ratio is None or ratio >= family.target_ratio),
    }


class _Highs:
    """The same knapsack as a mixed-integer program."""

    def __init__(self, problem: AllocationProblem) -> None:
        from scipy.sparse import csc_matrix, csr_matrix, vstack

        n, k = problem.num_groups, problem.num_options
        choose_one = csr_matrix((np.ones(n * k), (np.repeat(np.arange(n), k), np.arange(n * k))))
        costs = csr_matrix(problem.reduced.costs[0].astype(np.float64).reshape(1, -1))
        self.matrix = csc_matrix(vstack([choose_one, costs]))
        self.capacity = float(problem.reduced.capacity[0])

    def solve(self, values: np.ndarray, seconds: float) -> tuple[float, float | None] | None:
        """Seconds taken, and the optimal value if it was proven; None where HiGHS is not installed."""
        try:
            highspy: Any = import_module("highspy")  # untyped
        except ImportError:
            return None
        rows, columns = self.matrix.shape
        model = highspy.HighsLp()
        model.num_row_, model.num_col_ = rows, columns
        model.sense_ = highspy.ObjSense.kMaximize
        model.col_cost_ = values.reshape(-1)
        model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
        model.row_lower_ = np.append(np.ones(rows - 1), -highspy.kHighsInf)
        model.row_upper_ = np.append(np.ones(rows - 1), self.capacity)
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_, model.a_matrix_.index_ = self.matrix.indptr, self.matrix.indices
        model.a_matrix_.value_ = self.matrix.data
        model.integrality_ = [highspy.HighsVarType.kInteger] * columns
        solver = highspy.Highs()
        options = {
            "output_flag": False,
            "threads": 1,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 0.0,
            "time_limit": seconds,
        }
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(model)
        began = time.perf_counter()
        solver.run()
        taken = time.perf_counter() - began
        proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return taken, float(solver.getInfo().objective_function_value) if proven else None


def to_markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown table, with the machine under it."""
    lines = [
        "| shape | ms per solve, batched | ms, one call | HiGHS ms | times faster | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["families"]:
        bound = "" if row["highs_proven"] == row["highs_instances"] else ">= "
        highs = "not installed" if row["highs_ms"] is None else f"{bound}{row['highs_ms']:.0f}"
        ratio = "" if row["ratio"] is None else f"{bound}{row['ratio']:.0f}"
        target = "" if row["target_ms"] is None else f"<= {row['target_ms']:g} ms"
        if row["target_ratio"] is not None:
            target += f", >= {row['target_ratio']:g}x"
        verdict = "" if not target else ("met" if row["met"] else "missed")
        lines.append(
            f"| {row['title']} | {row['ms']:.3f} | {row['ms_one_call']:.3f} | {highs} | {ratio} | {target} | "
            f"{verdict} |"
        )
    machine = report["environment"]
    lines += [
        "",
        f"One thread, medians over fresh noise; first call {report['first_call_seconds']:.1f} s "
        f"(compilation, or loading what was compiled before). CPU: {machine.get('cpu', 'unknown')}. "
        '">=": HiGHS had not proven its solution when its time was up.',
    ]
    return "\n".join(lines) + "\n"
