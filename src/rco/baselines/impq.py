"""IMPQ: interactions of pairs of groups, sampled by progressive quantization and solved as a MILP.

Every group has two options, a low and a high one. In a random order, groups are switched from all high to all low;
each switch is measured with all previous ones in place. Several orders give a quadratic surrogate: the cost of each
group alone, plus b_ij where i and j are both low. Its mean marginals are the groups' Shapley values. The
surrogate is minimised exactly, each product of two switches linearised by one more variable.

Implemented from the method's abstract (its code is not public): widths 2 and 4, Shapley estimates by progressive
quantization and the binary quadratic program are its own; the ridge regression behind the interactions, the number
of orders and the reversed pairs are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from rco.core.choice import Candidates
from rco.core.knapsack import knapsack
from rco.core.moves import Ladder, uniform_allocation
from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult
from rco.core.sampling import generator
from rco.core.searcher import BudgetedSearch, SearchRun, SearchState

__all__ = ["IMPQ", "Surrogate", "fit_surrogate", "minimise_surrogate"]

# The dual regression holds a few square matrices of this size; 8192 is 0.5 GB each.
_MOST_OBSERVATIONS = 8192


@dataclass(frozen=True)
class Surrogate:
    """Loss of low switches z: constant + <alone, z> + sum_{i<j} pairs_ij z_i z_j; ``pairs`` is symmetric."""

    alone: np.ndarray  # (M,)
    pairs: np.ndarray  # (M, M), zero diagonal

    def __call__(self, low: np.ndarray) -> float:
        """The surrogate's value without its constant."""
        return float(self.alone @ low + 0.5 * low @ self.pairs @ low)

    @property
    def shapley(self) -> np.ndarray:
        """(M,) mean marginal of each switch over all orders."""
        return np.asarray(self.alone + 0.5 * self.pairs.sum(axis=1))


def fit_surrogate(before: np.ndarray, marginals: np.ndarray, shrinkage: float) -> Surrogate:
    """Ridge regression of the marginals (P, M) on the groups that were low before (P, M, M), in its dual form.

    ``before[p, i, j]`` is true if j was low when i switched in order p. The groups' own terms are not penalised;
    the interactions are: shrinkage 0.5 weighs noise and interactions equally, and 1 leaves only the mean marginals.
    """
    orders, count = marginals.shape
    means = marginals.mean(axis=0)
    if shrinkage >= 1 or orders < 2:
        return Surrogate(means, np.zeros((count, count)))
    # Kernel of the interaction features {i, j}: the same switch shares all pairs with common predecessors, two
    # different switches share the one pair of themselves, if each came before the other in its order.
    flat = before.transpose(1, 0, 2).reshape(count * orders, count).astype(np.float64)  # switch-major
    switch = np.repeat(np.arange(count), orders)
    crossed = flat[:, switch]  # (obs, obs): the column's switch came before the row's
    same = switch[:, None] == switch[None, :]
    kernel = np.where(same, flat @ flat.T, crossed * crossed.T)
    # Centring within each switch removes the unpenalised own terms.
    blocks = kernel.reshape(count, orders, count, orders)
    blocks = blocks - blocks.mean(axis=1, keepdims=True)
    kernel = (blocks - blocks.mean(axis=3, keepdims=True)).reshape(count * orders, count * orders)
    scale = max(float(np.trace(kernel)) / len(kernel), np.finfo(float).tiny)
    ridge = shrinkage / (1 - shrinkage) * scale
    target = (marginals - means).T.reshape(-1)
    dual = np.linalg.solve(kernel + ridge * np.eye(len(kernel)), target).reshape(count, orders)
    dual -= dual.mean(axis=1, keepdims=True)
    weights = np.einsum("ip,pij->ij", dual, before.astype(np.float64))
    pairs = weights + weights.T
    np.fill_diagonal(pairs, 0.0)
    alone = means - (pairs * before.mean(axis=0)).sum(axis=1)
    return Surrogate(alone, pairs)


def minimise_surrogate(
    surrogate: Surrogate,
    saved: np.ndarray,
    needed: np.ndarray,
    *,
    max_pairs: int,
    time_limit: float,
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Low switches (M,) that minimise the surrogate with the needed savings, and the certified gap.

    Args:
        surrogate: The surrogate.
        saved: (J, M) cost that each low switch saves under each budget.
        needed: (J,) least total savings.
        max_pairs: Interactions that enter exactly, the strongest first; each of the others enters with its
            partner's switch replaced by a half.
        time_limit: Seconds for HiGHS.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix, csr_matrix, hstack

    count = len(surrogate.alone)
    first, second = np.triu_indices(count, 1)
    strength = surrogate.pairs[first, second]
    order = np.argsort(-np.abs(strength), kind="stable")
    kept = order[:max_pairs][strength[order[:max_pairs]] != 0]
    dropped = order[max_pairs:]
    linear = surrogate.alone.copy()
    np.add.at(linear, first[dropped], 0.5 * strength[dropped])
    np.add.at(linear, second[dropped], 0.5 * strength[dropped])
    first, second, strength = first[kept], second[kept], strength[kept]
    pairs = len(kept)
    number = np.arange(pairs)
    scale = np.maximum(np.abs(saved).max(axis=1, initial=0.0), np.finfo(float).tiny)
    constraints = [
        LinearConstraint(
            hstack([csr_matrix(saved / scale[:, None]), csr_matrix((len(saved), pairs))]),
            needed / scale,
            np.inf,
        )
    ]
    if pairs:
        # A product with positive coefficient is at least z_i + z_j - 1, with a negative one at most z_i and z_j.
        up, down = np.flatnonzero(strength > 0), np.flatnonzero(strength < 0)
        for rows, sides, low, high in (
            (up, ((first, 1.0), (second, 1.0)), -np.inf, 1.0),
            (down, ((first, -1.0),), -np.inf, 0.0),
            (down, ((second, -1.0),), -np.inf, 0.0),
        ):
            if not rows.size:
                continue
            at = np.arange(len(rows))
            sign = -1.0 if len(sides) == 2 else 1.0
            entries = [(np.full(len(rows), factor), (at, side[rows])) for side, factor in sides]
            entries.append((np.full(len(rows), sign), (at, count + number[rows])))
            values = np.concatenate([value for value, _ in entries])
            positions = np.concatenate([where for _, where in entries], axis=1)
            matrix = coo_matrix((values, positions), shape=(len(rows), count + pairs)).tocsr()
            constraints.append(LinearConstraint(matrix, low, high))
    unit = max(float(np.abs(linear).max(initial=0.0)), float(np.abs(strength).max(initial=0.0)), 1e-300)
    result = milp(
        np.concatenate([linear, strength]) / unit * 1e3,
        integrality=np.concatenate([np.ones(count), np.zeros(pairs)]),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": time_limit, "mip_rel_gap": 1e-9},
    )
    status = {0: "optimal", 1: "time limit", 2: "infeasible"}.get(result.status, str(result.message))
    gap = None if result.x is None else float(result.mip_gap)
    notes = {"milp_status": status, "milp_gap": gap, "milp_pairs": pairs, "milp_pairs_dropped": len(dropped)}
    return None if result.x is None else result.x[:count].round().astype(np.int64), notes


class _Orders(SearchState):
    """The orders so far and the marginals measured on them."""

    saved = ("orders", "marginals")

    def __init__(self, run: SearchRun, settings: IMPQ) -> None:
        super().__init__(run)
        self.settings = settings
        self.low, self.high = _two_options(self.problem, settings.pair)
        self.switches = np.flatnonzero(self.low != self.high)
        observations = settings.orders * len(self.switches)
        if settings.shrinkage < 1 and observations > _MOST_OBSERVATIONS:
            raise ValueError(
                f"{settings.orders} orders of {len(self.switches)} groups give {observations} marginals, more than "
                f"the {_MOST_OBSERVATIONS} whose interactions can be fitted; take fewer orders, or "
                "shrinkage=1, which leaves interactions out."
            )
        self.orders: list[np.ndarray] = []
        self.marginals: list[np.ndarray] = []

    def surrogate(self) -> Surrogate:
        """The surrogate of all orders measured so far."""
        count = len(self.switches)
        before = np.zeros((len(self.orders), count, count), dtype=bool)
        for p, order in enumerate(self.orders):
            place = np.empty(count, dtype=np.int64)
            place[order] = np.arange(count)
            before[p] = place[None, :] < place[:, None]
        return fit_surrogate(before, np.array(self.marginals), self.settings.shrinkage)

    def propose(self, candidates: Candidates) -> None:
        self.run.notes["options"] = "two per group: the low and the high one"
        self.run.notes["orders_walked"] = len(self.orders)
        if not self.orders:
            if not self.switches.size:
                candidates.add("impq", self.low, self.run.scores())
            return
        surrogate = self.surrogate()
        values = np.zeros((self.problem.num_groups, self.problem.num_options))
        values[self.switches, self.low[self.switches]] = -surrogate.shapley
        choices = self._solve(surrogate)
        self.run.notes.pop("milp_replaced_by", None)
        if choices is None or not self.problem.is_feasible(choices):
            # No solution in time, or one that is over budget within the solver's tolerance: the exact knapsack of
            # the Shapley values, which the result reports.
            self.run.notes["milp_replaced_by"] = "knapsack of the Shapley values"
            only = np.full_like(values, -np.inf)
            groups = np.arange(self.problem.num_groups)
            only[groups, self.low] = values[groups, self.low]
            only[groups, self.high] = values[groups, self.high]
            choices = knapsack(only, self.problem)
        candidates.add("impq", choices, torch.from_numpy(values))

    def _solve(self, surrogate: Surrogate) -> np.ndarray | None:
        problem, switches = self.problem, self.switches
        groups = np.arange(problem.num_groups)
        spent = problem.unit_costs[:, groups, self.high]
        taken_off = spent - problem.unit_costs[:, groups, self.low]
        excess = [u - b for u, b in zip(problem.units(self.high), problem.unit_budgets, strict=True)]
        if problem.block_index is not None:
            taken_off = np.where(problem.block_index == np.arange(problem.num_budgets)[:, None], taken_off, 0)
        low, notes = minimise_surrogate(
            surrogate,
            taken_off[:, switches].astype(np.float64),
            np.array([float(e) for e in excess]),
            max_pairs=self.settings.max_pairs,
            time_limit=self.settings.time_limit,
        )
        self.run.notes.update(notes)
        if low is None:
            return None
        choices = self.high.copy()
        choices[switches[low == 1]] = self.low[switches[low == 1]]
        return choices


def _two_options(problem: AllocationProblem, pair: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """A feasible low option per group and a dearer high one; the same if a lock or the budget leaves one."""
    ladder = Ladder(problem)
    groups = np.arange(problem.num_groups)
    if pair is None:
        low = uniform_allocation(problem)
        above = ladder.neighbours(low, 1)
        return low, np.where(above.any(axis=1), above.argmax(axis=1), low)
    if len(pair) != 2 or not all(0 <= k < problem.num_options for k in pair):
        raise ValueError(f"pair must name two of the options 0..{problem.num_options - 1}, got {pair}.")
    first, second = (np.full(problem.num_groups, k) for k in pair)
    ok = [problem.allowed[groups, k] for k in (first, second)]
    if not (ok[0] | ok[1]).all():
        group = int(np.flatnonzero(~(ok[0] | ok[1]))[0])
        raise ValueError(f"Group {group} may use neither of the options {pair}; give another pair.")
    first, second = np.where(ok[0], first, second), np.where(ok[1], second, first)
    swap = ladder.size[groups, first] > ladder.size[groups, second]
    low, high = np.where(swap, second, first), np.where(swap, first, second)
    if not problem.is_feasible(low):
        raise ValueError(
            f"Even with the cheaper of the options {pair} everywhere the cost {problem.cost(low)} exceeds the "
            f"budget {problem.budget}; give a pair with a cheaper option."
        )
    return low, high


@dataclass(frozen=True, kw_only=True)
class IMPQ(BudgetedSearch):
    """Two options per group, a quadratic surrogate from progressive quantization, and its MILP.

    Args:
        orders: Random orders; each takes one evaluation per group and batch. They come in reversed pairs.
        batches: Batches per order, other ones for each; None: all.
        pair: Indices of the two options; None: the dearest that all groups can afford, and the next dearer.
        shrinkage: Strength of shrinking the interactions to zero, in (0, 1]; 1 leaves only the Shapley values.
        max_pairs: Interactions that enter the MILP exactly.
        time_limit: Seconds for the MILP; the remaining gap is in the result's settings.
    """

    name: ClassVar[str] = "impq"
    spends_uniform: ClassVar[bool] = False

    orders: int = 16
    batches: int | None = 1
    pair: tuple[int, int] | None = None
    shrinkage: float = 0.5
    max_pairs: int = 1000
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(orders=1, batches=1, max_pairs=0)
        if not 0 < self.shrinkage <= 1:
            raise ValueError(f"shrinkage must lie in (0, 1], got {self.shrinkage}.")
        if not self.time_limit > 0:
            raise ValueError(f"time_limit must be positive, got {self.time_limit}.")

    def loop(self, run: SearchRun) -> SearchResult:
        """Measure one order after the other from all high to all low."""
        state = run.resume(_Orders(run, self))
        switches = state.switches

        def batches(step: int) -> list[int]:
            return run.some_batches(self.batches, first=step)

        def cost(step: int) -> int:
            return (len(switches) + 1) * len(batches(step))

        with run.allowance():
            for step in run.steps(self.orders if switches.size else 0, cost):
                # Orders come in pairs, one the reverse of the other: every two groups occur in both orders.
                order = generator(self.seed, step // 2).permutation(len(switches))
                order = order[::-1].copy() if step % 2 else order
                some = batches(step)
                choices = state.high.copy()
                losses = [float(run.losses(choices, some).mean())]
                for switch in switches[order].tolist():
                    choices[switch] = state.low[switch]
                    losses.append(float(run.losses(choices, some).mean()))
                marginals = np.empty(len(order))
                marginals[order] = np.diff(losses)
                state.orders.append(order)
                state.marginals.append(marginals)
                run.record(losses[-1])
        return run.choose()
