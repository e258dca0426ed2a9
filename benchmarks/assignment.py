"""Assignment problems without language models: RCO and other methods at equal evaluations, on six families.

    python benchmarks/assignment.py run --out benchmarks/results/assignment.json --optima --workers 8
    python benchmarks/assignment.py run --out benchmarks/results/assignment_small.json --optima enumeration \\
        --sizes 10x4 --families quadratic,log-det --methods rco --evaluations 1000 --seeds 0-49 --workers 8
    python benchmarks/assignment.py report --results benchmarks/results/assignment.json \\
        --small benchmarks/results/assignment_small.json --docs docs

``run`` adds the records that the file does not hold yet, each as soon as it is finished, so that it can be
interrupted and continued; ``merge`` joins files of several runs. A record is the loss of one method on one
instance. An evaluation is one forward pass of the loss; a backward pass counts as two more. ``report`` writes
``docs/assignment.md`` and its plots.

The gap of a result is its distance from the best loss known for the instance (of all methods and proofs), as a
share of what lies between the uniform assignment and that best loss: 0 is the best known, 1 is uniform.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from assignment_families import FAMILIES, Instance, make
from assignment_score_search import ScoreRCO

import rco
from rco import registry
from rco.atomic_files import write_json_atomic
from rco.core.moves import uniform_allocation
from rco.core.objective import CallableObjective, one_hot
from rco.core.result import SearchResult
from rco.core.searcher import BudgetedSearch
from rco.runs import environment

SIZES = ((10, 4), (50, 5), (200, 6), (2000, 8))
SEEDS = 5
EVALUATIONS = 6000
_LARGE, _SLOW = 1000, 3  # groups of a large instance; how much longer the networks take
LIMITED: dict[str, Any] = {"steps": None}

# Methods and their settings. "penalty", "lagrangian" and "augmented-lagrangian" are gradient searches that end with
# the choice among their candidates; "+ restarts" gives the penalty all that follows RCO's loop.
METHODS: dict[str, tuple[str | type[BudgetedSearch], dict[str, Any]]] = {
    "rco": ("rco", {**LIMITED, "refine": None}),
    "rco-plain": ("rco-plain", LIMITED),
    "penalty": ("penalty", {**LIMITED, "refine": 0}),
    "penalty + restarts": ("penalty", {**LIMITED, "refine": None}),
    "restarts alone": ("rco", {"steps": 0, "refine": None}),
    "lagrangian": ("lagrangian", {**LIMITED, "refine": 0}),
    "augmented-lagrangian": ("augmented-lagrangian", {**LIMITED, "refine": 0}),
    "frank-wolfe": ("frank-wolfe", LIMITED),
    "evopress": ("evopress", {"generations": None}),
    "score function": (ScoreRCO, LIMITED),
    "annealing": ("annealing", LIMITED),
    "greedy": ("greedy", {}),
}
ABLATIONS = ("penalty + restarts", "restarts alone")


def search(method: str, instance: Instance, evaluations: int, seed: int) -> SearchResult:
    """One search on one instance."""
    kind, settings = METHODS[method]
    if isinstance(kind, str):
        kind = registry.load(registry.METHODS, kind, "method")
    searcher = kind(max_evaluations=evaluations, seed=seed, **settings)
    result: SearchResult = searcher.search(instance.problem, CallableObjective(instance.loss, batched=True))
    return result


def loss_of(instance: Instance, choices: np.ndarray) -> float:
    """The loss of an allocation."""
    with torch.no_grad():
        return float(instance.loss(one_hot(choices, instance.problem.num_options)))


def highs(instance: Instance, seconds: float) -> dict[str, Any] | None:
    """HiGHS on the linearised problem, where there is one: pairs of choices as variables."""
    if instance.quadratic is None:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    problem, (linear, pairs) = instance.problem, instance.quadratic
    cells = problem.num_groups * problem.num_options
    first, second = np.nonzero(np.triu(pairs, 1))
    rows = lil_matrix((problem.num_groups + 1 + 3 * len(first), cells + len(first)))
    low = np.full(rows.shape[0], -np.inf)
    high = np.zeros(rows.shape[0])
    for group in range(problem.num_groups):
        rows[group, group * problem.num_options : (group + 1) * problem.num_options] = 1.0
        low[group] = high[group] = 1.0
    rows[problem.num_groups, :cells] = problem.float_costs[0].reshape(-1)
    high[problem.num_groups] = problem.float_budgets[0]
    for pair, (a, b) in enumerate(zip(first, second, strict=True)):
        at, variable = problem.num_groups + 1 + 3 * pair, cells + pair
        rows[at, variable], rows[at, a] = 1.0, -1.0
        rows[at + 1, variable], rows[at + 1, b] = 1.0, -1.0
        rows[at + 2, variable], rows[at + 2, a], rows[at + 2, b], high[at + 2] = -1.0, 1.0, 1.0, 1.0
    whole = np.concatenate([np.ones(cells), np.zeros(len(first))])
    began = time.perf_counter()
    found = milp(
        np.concatenate([linear, pairs[first, second]]),
        integrality=whole,
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows.tocsr(), low, high),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    choices = found.x[:cells].reshape(problem.num_groups, -1).argmax(axis=1)
    proved = bool(found.status == 0)
    return {
        "loss": loss_of(instance, choices),
        "proved": proved,
        "seconds": time.perf_counter() - began,
    }


def knapsack_optimum(instance: Instance, seconds: float) -> dict[str, Any] | None:
    """The optimum of an additive loss."""
    if instance.values is None:
        return None
    began = time.perf_counter()
    solution = rco.solve_mckp(instance.values, instance.problem)
    loss = loss_of(instance, solution.allocation)
    return {"loss": loss, "proved": True, "seconds": time.perf_counter() - began}


def best_of_all(instance: Instance, seconds: float, limit: int = 2_000_000) -> dict[str, Any] | None:
    """The optimum by enumeration in batches, where the problem is small."""
    began = time.perf_counter()
    problem = instance.problem
    count = problem.num_options**problem.num_groups
    if count > limit:
        return None
    best, size = np.inf, 1 << 14
    digits = problem.num_options ** np.arange(problem.num_groups)
    costs = problem.unit_costs[0]
    for begin in range(0, count, size):
        numbers = np.arange(begin, min(begin + size, count))
        choices = (numbers[:, None] // digits) % problem.num_options
        fits = costs[np.arange(problem.num_groups), choices].sum(axis=1) <= problem.unit_budgets[0]
        if fits.any():
            gates = torch.nn.functional.one_hot(torch.from_numpy(choices[fits]), problem.num_options).double()
            with torch.no_grad():
                best = min(best, float(instance.loss(gates).min()))
    return {"loss": best, "proved": True, "seconds": time.perf_counter() - began}


SOLVERS: dict[str, Callable[[Instance, float], dict[str, Any] | None]] = {
    "enumeration": best_of_all,
    "knapsack": knapsack_optimum,
    "HiGHS": highs,
}


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What identifies a record."""
    names = ("family", "groups", "options", "seed", "solver", "method", "evaluations")
    return tuple(record[name] for name in names if name in record)


@dataclass(frozen=True)
class Task:
    """One method, or one exact solver, on one instance."""

    family: str
    groups: int
    options: int
    seed: int
    evaluations: int
    method: str | None = None
    solver: str | None = None
    label: str | None = None
    exact_seconds: float = 0.0

    @property
    def order(self) -> tuple[float, ...]:
        """Slow tasks first; large instances after the first of their size last, in case the time runs out."""
        later = self.seed if self.groups >= _LARGE else 0
        return later, -self.groups * (_SLOW if self.family in ("ranks", "layers") else 1)

    def record(self) -> dict[str, Any]:
        """What identifies the record."""
        where = {name: getattr(self, name) for name in ("family", "groups", "options", "seed")}
        if self.solver is not None:
            return where | {"solver": self.solver}
        return where | {"method": self.label or self.method, "evaluations": self.evaluations}


def work(task: Task) -> dict[str, Any] | None:
    """Run a task; None for a solver that does not apply."""
    torch.set_num_threads(1)
    instance = make(task.family, task.groups, task.options, task.seed)
    if task.solver is not None:
        found = SOLVERS[task.solver](instance, task.exact_seconds)
        return None if found is None else task.record() | found
    assert task.method is not None
    result = search(task.method, instance, task.evaluations, task.seed)
    return task.record() | {
        "loss": loss_of(instance, np.asarray(result.allocation)),
        "uniform": loss_of(instance, uniform_allocation(instance.problem)),
        "used": result.forwards + 2 * result.backwards,
        "seconds": round(result.seconds, 3),
        "feasible": instance.problem.is_feasible(result.allocation),
    }


def tasks(settings: argparse.Namespace) -> list[Task]:
    """All tasks of a run, in the order in which they begin."""
    found = []
    for seed, (groups, options), family in itertools.product(
        settings.seeds, settings.sizes, settings.families
    ):
        where = family, groups, options, seed, settings.evaluations
        found += [Task(*where, method=m, label=settings.label.get(m)) for m in settings.methods]
        found += [Task(*where, solver=s, exact_seconds=settings.exact_seconds) for s in settings.optima]
    return sorted(found, key=lambda task: task.order)


def run(settings: argparse.Namespace) -> None:
    """Add the missing records, each as soon as it is finished."""
    known = {"study": "assignment", "records": []}
    if settings.out.exists():
        known = json.loads(settings.out.read_text())
    known["environment"] = environment()
    kinds = {True: known.setdefault("optima", []), False: known["records"]}
    done = {key(record) for records in kinds.values() for record in records}
    missing = [task for task in tasks(settings) if key(task.record()) not in done]
    with contextlib.ExitStack() as stack:
        finished: Iterable[dict[str, Any] | None] = map(work, missing)
        if settings.workers > 1:
            # Processes start anew: a fork would copy threads of torch that no longer run.
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(settings.workers))
            finished = pool.imap_unordered(work, missing)
        for record in finished:
            if record is None:
                continue
            kinds["solver" in record].append(record)
            print(*key(record), round(record["loss"], 4), round(record["seconds"], 3), flush=True)
            write_json_atomic(settings.out, known)


def merge(settings: argparse.Namespace) -> None:
    """Write the records of several files into one; of equal ones that of the last file stays."""
    parts = [json.loads(path.read_text()) for path in settings.parts]
    merged = {"study": "assignment", "environment": parts[-1]["environment"]}
    for kind in ("records", "optima"):
        each = {key(record): record for part in parts for record in part.get(kind, [])}
        merged[kind] = [each[name] for name in sorted(each, key=str)]
    write_json_atomic(settings.out, merged)


def sizes_of(text: str) -> list[tuple[int, int]]:
    """Sizes written as 10x4,50x5."""
    return [tuple(int(number) for number in size.split("x")) for size in text.split(",")]  # type: ignore[misc]


def seeds_of(text: str) -> list[int]:
    """Seeds written as 0,3 or as 0-49."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [seed for end in ends for seed in range(end[0], end[-1] + 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--families", type=lambda t: t.split(","), default=list(FAMILIES))
    running.add_argument("--sizes", type=sizes_of, default=list(SIZES))
    running.add_argument("--methods", type=lambda t: t.split(","), default=list(METHODS))
    running.add_argument(
        "--seeds",
        type=seeds_of,
        default=list(range(SEEDS)),
        help="of the instances, and of the searches on them: 0,1,2 or 0-49",
    )
    running.add_argument("--evaluations", type=int, default=EVALUATIONS)
    running.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    running.add_argument(
        "--optima",
        nargs="?",
        type=lambda t: t.split(","),
        const=list(SOLVERS),
        default=[],
        help=f"also prove optima where that is possible, by {', '.join(SOLVERS)} or those named",
    )
    running.add_argument("--exact-seconds", type=float, default=60.0)
    running.add_argument("--label", type=json.loads, default={}, help="other names of methods, as JSON")
    running.set_defaults(call=run)
    merging = commands.add_parser("merge")
    merging.add_argument("parts", type=Path, nargs="+")
    merging.add_argument("--out", type=Path, required=True)
    merging.set_defaults(call=merge)
    reporting = commands.add_parser("report")
    reporting.add_argument("--results", type=Path, required=True)
    reporting.add_argument("--small", type=Path, help="results on instances whose optima are proved")
    reporting.add_argument("--docs", type=Path, required=True)
    reporting.set_defaults(call=report)
    settings = parser.parse_args(arguments)
    settings.call(settings)


def report(settings: argparse.Namespace) -> None:
    """Write the page and its plots."""
    from assignment_report import write_report

    small = None if settings.small is None else json.loads(settings.small.read_text())
    write_report(json.loads(settings.results.read_text()), small, settings.docs, [*FAMILIES, *METHODS])


if __name__ == "__main__":
    main()
