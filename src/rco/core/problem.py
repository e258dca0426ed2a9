"""The assignment problem: N groups, K options, exact costs, and budgets.

Total cost is ``sum_i w_i c_{i, k_i}`` (paper, Eq. 1). Everything that decides feasibility is integer arithmetic:
costs and budgets become integers in units of ``1 / denominator`` here, once, and stay so.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, wraps
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from rco.core.exact import ExactArray, exact_array, exact_ratio, integer_array, json_number, plain, show
from rco.core.min_counts import MinCounts

__all__ = [
    "Allocation",
    "AllocationProblem",
    "InfeasibleBudgetError",
    "MinCounts",
    "ReducedCosts",
    "once_per_problem",
]

Sense = Literal["==", "<="]
T = TypeVar("T")

_INT64_SAFE = 2**62


class InfeasibleBudgetError(ValueError):
    """No assignment meets the budget; the message names the reachable range."""


class NamedTotals(tuple[Any, ...]):
    """One number per block in the order of the sorted block ids, and by the names that the budgets were given with.

    Equal to the plain tuple. ``by_name`` is a mapping in the order given; a string indexes it directly.
    """

    by_name: dict[Any, Any]

    def __new__(cls, values: Iterable[Any], block_ids: Sequence[Any], names: Sequence[Any]) -> NamedTotals:
        """From values in the order of the block ids."""
        made = super().__new__(cls, values)
        found = dict(zip(block_ids, made, strict=True))
        made.by_name = {name: found[name] for name in names}
        return made

    def __getitem__(self, key: Any) -> Any:
        return self.by_name[key] if isinstance(key, str) else super().__getitem__(key)

    def __repr__(self) -> str:
        return repr(self.by_name)


class Allocation(Sequence[int]):
    """One option index per group, with the labels of its problem for reading.

    Behaves as a read-only sequence of integers and converts to an array with ``numpy.asarray``.
    """

    __slots__ = ("choices", "groups", "options")

    def __init__(
        self, choices: Any, groups: Sequence[str] | None = None, options: Sequence[str] | None = None
    ) -> None:
        array = np.array(choices, dtype=np.int64)
        if array.ndim != 1:
            raise ValueError(f"An allocation is one option per group, got an array of shape {array.shape}.")
        array.setflags(write=False)
        self.choices = array
        self.groups = tuple(groups) if groups is not None else None
        self.options = tuple(options) if options is not None else None

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: Any) -> Any:
        picked = self.choices[index]
        return int(picked) if np.ndim(picked) == 0 else picked

    def __iter__(self) -> Iterator[int]:
        return iter(self.choices.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.choices, dtype=dtype)

    def __eq__(self, other: object) -> bool:
        try:
            return bool(np.array_equal(self.choices, np.asarray(other)))
        except (TypeError, ValueError):
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self.choices.tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.choices[:12].tolist()))
        return f"Allocation([{shown}{', ...' if len(self) > 12 else ''}], groups={len(self)})"

    def tolist(self) -> list[int]:
        """The option indices as a list."""
        return [int(k) for k in self.choices]

    def to_dict(self) -> dict[str, str]:
        """Group label to option label, both defaulting to their indices."""
        groups = self.groups or [str(i) for i in range(len(self))]
        return {
            group: self.options[k] if self.options else str(k)
            for group, k in zip(groups, self.tolist(), strict=True)
        }

    def one_hot(self, num_options: int) -> Tensor:
        """Float64 gates (N, K) with a one at each chosen option."""
        return torch.nn.functional.one_hot(torch.tensor(self.choices), num_options).double()


@dataclass(frozen=True)
class ReducedCosts:
    """Knapsack costs without the part that every assignment pays: minima subtracted, divided by the gcd.

    ``costs`` is (J, N, K) int64, or Python ints in an object array when they are too large for that; forbidden
    options cost 0 there and must be masked. ``capacity`` holds one integer per budget.
    """

    costs: np.ndarray
    capacity: tuple[int, ...]


class AllocationProblem:
    """Choose one of K options for each of N groups under an exact budget.

    Args:
        option_costs: (K,) costs shared by all groups, (N, K) per group, or (q, N, K) for q joint budgets.
        budget: One number; q numbers for q joint budgets; with ``blocks``, one per block, as a sequence in the
            order of the sorted block ids or as a mapping from block id; costs are then found by these names, too.
        weights: (N,) positive weights; the cost of option k in group i is ``weights[i] * option_costs[..., k]``.
        sense: ``"<="``: an allocation costs at most B. ``"=="``: it costs exactly B; a search refuses a total that
            no allocation has. None: at most B, and B must lie within the reachable range, which catches budgets in
            the wrong unit. Whether the logits of a search may cost less than B is a setting of the
            search (``surface``).
        blocks: (N,) block ids: each block of groups has a budget of its own.
        allowed: (N, K) booleans: locks (one allowed option) and forbidden options. Costs of forbidden options
            are ignored.
        groups: N labels for display.
        options: K labels for display.
        min_counts: At least so many groups of a block take one of certain options, apart from the budgets' blocks:
            a mapping with ``blocks`` (N block indices from 0), ``counts`` (one per block) and ``options`` (the
            option indices that count); see :class:`rco.core.min_counts.MinCounts`. Every discrete allocation
            keeps them; the continuous iterate of a search need not.
        monotone: Declares that within a group a costlier option is never worse (true of bit widths and of kept
            experts), so that a search may spend leftover budget.

    Numbers may be integers, Fractions, Decimals, strings such as "2.5" or "7/3", or floats; see
    :mod:`rco.core.exact` for how floats are read.

    Raises:
        InfeasibleBudgetError: A budget lies outside its reachable range.
        ValueError: Anything else that is wrong with the input.
    """

    def __init__(
        self,
        option_costs: Any,
        budget: Any,
        weights: Any = None,
        sense: Sense | None = None,
        blocks: Any = None,
        allowed: Any = None,
        groups: Sequence[str] | None = None,
        options: Sequence[str] | None = None,
        monotone: bool = False,
        min_counts: MinCounts | Mapping[str, Any] | None = None,
    ) -> None:
        if sense not in ("==", "<=", None):
            raise ValueError(f'sense must be "<=", "==" or None, got {sense!r}.')
        self.sense: Sense | None = sense
        self.monotone = bool(monotone)

        costs = _costs_with_holes(option_costs, allowed)
        num_groups = _count_groups(costs, weights, blocks, allowed, groups, budget)
        self._given_costs = costs
        self.num_options = int(costs.numerators.shape[-1])
        self.num_groups = num_groups
        self.allowed = _check_allowed(allowed, num_groups, self.num_options)
        self._weights = _check_weights(weights, num_groups)
        self.groups = _check_labels(groups, num_groups, "groups")
        self.options = _check_labels(options, self.num_options, "options")

        broadcast = np.broadcast_to(
            costs.numerators if costs.numerators.ndim == 3 else costs.numerators[None],
            (costs.numerators.shape[0] if costs.numerators.ndim == 3 else 1, num_groups, self.num_options),
        )
        self.num_joint = int(broadcast.shape[0])
        broadcast = _fill_forbidden(broadcast, self.allowed)
        self._directions = ExactArray(broadcast, costs.denominator)
        self.unit_costs, self.denominator = _weighted_costs(self._directions, self._weights)
        self._set_blocks(blocks)
        self.min_counts = MinCounts.checked(min_counts, self.allowed, self.block_index)
        self._set_budgets(budget)
        _check_budgets(self)

    # ------------------------------------------------------------------ shape

    def _set_blocks(self, blocks: Any) -> None:
        self.block_ids: tuple[Any, ...] | None = None
        self.block_index: np.ndarray | None = None
        if blocks is None:
            return
        if self.num_joint > 1:
            raise ValueError(
                "blocks and several joint budgets cannot be combined; give each block's budget as one of the q "
                "joint budgets, with zero costs outside the block."
            )
        ids = blocks.tolist() if hasattr(blocks, "tolist") else list(blocks)
        if len(ids) != self.num_groups:
            raise ValueError(
                f"blocks must name a block for each of {self.num_groups} groups, got {len(ids)}."
            )
        self.block_ids = tuple(sorted(set(ids)))
        position = {block: j for j, block in enumerate(self.block_ids)}
        self.block_index = np.array([position[block] for block in ids], dtype=np.int64)

    @property
    def num_budgets(self) -> int:
        """Number of budgets: q joint ones, or one per block."""
        return self.num_joint if self.block_ids is None else len(self.block_ids)

    def _set_budgets(self, budget: Any) -> None:
        self._budget_names: tuple[Any, ...] | None = None  # in the order given
        if isinstance(budget, Mapping):
            if self.block_ids is None or set(budget) != set(self.block_ids):
                raise ValueError(
                    f"A mapping of budgets needs exactly the block ids as keys, got {sorted(budget, key=str)} for "
                    f"blocks {list(self.block_ids or ())}."
                )
            self._budget_names = tuple(budget)
            budget = [budget[block] for block in self.block_ids]
        array = exact_array(budget, "budget")
        if array.numerators.ndim == 0 and self.num_budgets == 1:
            array = ExactArray(array.numerators[None], array.denominator)
        if array.numerators.shape != (self.num_budgets,):
            kind = "blocks" if self.block_ids is not None else "joint budgets"
            raise ValueError(
                f"budget must hold {self.num_budgets} numbers for {self.num_budgets} {kind}, got shape "
                f"{array.numerators.shape}."
            )
        self.budgets = tuple(Fraction(int(n), array.denominator) for n in array.numerators)
        self._budget_is_scalar = self.block_ids is None and self.num_joint == 1
        # Totals are multiples of 1/denominator, so the part of a budget below that unit can never be used.
        self.unit_budgets = tuple(math.floor(b * self.denominator) for b in self.budgets)

    @property
    def budget(self) -> Any:
        """The budget as an exact number, or a tuple of them; with their names if it was given as a mapping."""
        return self._per_budget([plain(b) for b in self.budgets])

    def _per_budget(self, values: Sequence[Any]) -> Any:
        if self._budget_names is not None:
            assert self.block_ids is not None
            return NamedTotals(values, self.block_ids, self._budget_names)
        return values[0] if self._budget_is_scalar else tuple(values)

    # ------------------------------------------------------------- feasibility

    def _sum_per_budget(self, per_group: np.ndarray) -> list[int]:
        """Exact totals of (q, N) group costs, one per budget."""
        if self.block_index is None:
            return [int(row.sum()) for row in per_group]
        if per_group.dtype == object:
            totals = [0] * self.num_budgets
            for block, cost in zip(self.block_index.tolist(), per_group[0].tolist(), strict=True):
                totals[block] += cost
            return totals
        sums = np.zeros(self.num_budgets, dtype=np.int64)
        np.add.at(sums, self.block_index, per_group[0])
        return [int(s) for s in sums]

    @cached_property
    def unit_range(self) -> tuple[list[int], list[int]]:
        """Lowest and highest reachable totals in units of 1/denominator, one per budget."""
        # Forbidden options carry an allowed option's cost, so plain minima and maxima are right.
        return self._sum_per_budget(self.unit_costs.min(axis=2)), self._sum_per_budget(
            self.unit_costs.max(axis=2)
        )

    @cached_property
    def counted_range(self) -> tuple[list[int], list[int]]:
        """As :attr:`unit_range`, with the minimum counts in force."""
        if self.min_counts is None:
            return self.unit_range
        groups = np.arange(self.num_groups)
        ends: list[list[int]] = []
        for sign in (1, -1):
            per_group = []
            for costs in self.unit_costs:
                choices = self.min_counts.cheapest(sign * costs, self.allowed)
                assert choices is not None, "checked at construction"
                per_group.append(costs[groups, choices])
            ends.append(self._sum_per_budget(np.stack(per_group)))
        return ends[0], ends[1]

    @property
    def feasible_range(self) -> tuple[Any, Any]:
        """Lowest and highest reachable total cost (per budget, if there are several)."""
        low, high = self.counted_range
        return (
            self._per_budget([plain(Fraction(v, self.denominator)) for v in low]),
            self._per_budget([plain(Fraction(v, self.denominator)) for v in high]),
        )

    def units(self, allocation: Any) -> list[int]:
        """Exact total cost of an allocation in units of 1/denominator, one integer per budget."""
        return self._units(self._check_choices(allocation))

    def _units(self, choices: np.ndarray) -> list[int]:
        return self._sum_per_budget(self.unit_costs[:, self._rows, choices])

    def cost(self, allocation: Any) -> Any:
        """Exact total cost: an int, or a Fraction where it is not whole; per budget where there are several."""
        return self.priced(self.units(allocation))

    def priced(self, units: Sequence[int]) -> Any:
        """Totals in units of 1/denominator, one per budget, as :meth:`cost` gives them."""
        if self.denominator == 1:
            return self._per_budget([int(u) for u in units])
        return self._per_budget([plain(Fraction(int(u), self.denominator)) for u in units])

    def is_feasible(self, allocation: Any) -> bool:
        """Whether the allocation uses allowed options only, meets every budget and keeps the minimum counts."""
        choices = self._check_choices(allocation)
        if not self._all_allowed and not self.allowed[self._rows, choices].all():
            return False
        if self.min_counts is not None and not self.min_counts.met(choices):
            return False
        spent = zip(self._units(choices), self.unit_budgets, strict=True)
        return all(u == b if self.exact else u <= b for u, b in spent)

    @cached_property
    def _rows(self) -> np.ndarray:
        return np.arange(self.num_groups)

    @cached_property
    def _all_allowed(self) -> bool:
        return bool(self.allowed.all())

    @property
    def exact(self) -> bool:
        """Whether allocations must cost exactly the budget."""
        return self.sense == "=="

    @cached_property
    def _reachable(self) -> str | None:
        """The message of the error for a budget that no allocation meets; None if there is no such budget."""
        if not self.exact or self.num_joint > 1 or self.min_counts is not None:
            return None  # the knapsack finds out
        try:
            _check_reachable(self)
        except InfeasibleBudgetError as error:
            return str(error)
        return None

    def require_reachable(self) -> None:
        """Raise an error if some budget must be met exactly and is no reachable total; it names the nearest ones.

        Raises:
            InfeasibleBudgetError: There is such a budget.
        """
        if self._reachable is not None:
            raise InfeasibleBudgetError(self._reachable)

    @cached_property
    def relaxed(self) -> AllocationProblem:
        """The problem with budgets that may be left unspent."""
        return self.replace(sense="<=") if self.exact else self

    def allocation(self, choices: Any) -> Allocation:
        """Choices with this problem's labels."""
        return Allocation(self._check_choices(choices), self.groups, self.options)

    def _check_choices(self, allocation: Any) -> np.ndarray:
        choices = np.asarray(allocation)
        if choices.shape != (self.num_groups,) or choices.dtype.kind not in "iu":
            raise ValueError(
                f"An allocation must be {self.num_groups} option indices, got shape {choices.shape} and dtype "
                f"{choices.dtype}."
            )
        if choices.size and (choices.min() < 0 or choices.max() >= self.num_options):
            raise ValueError(
                f"Option indices must lie in 0..{self.num_options - 1}, got {choices.min()}..{choices.max()}."
            )
        return choices.astype(np.int64, copy=False)

    # --------------------------------------------------------- numeric views

    @cached_property
    def float_costs(self) -> np.ndarray:
        """(q, N, K) float64 weighted costs; forbidden options hold some allowed option's cost."""
        return ExactArray(self.unit_costs, self.denominator).to_float()

    @cached_property
    def relative_costs(self) -> np.ndarray:
        """(q, N, K) float64 costs above each group's cheapest option, as shares of their budget's range.

        Bit for bit the same whatever unit costs are counted in and whatever offset a group's costs have.
        """
        low, high = self.unit_range
        span = np.array([max(h - v, 1) for h, v in zip(high, low, strict=True)], dtype=object)
        above = self.unit_costs - self.unit_costs.min(axis=2, keepdims=True)
        return exact_ratio(
            above, span[:, None, None] if self.block_index is None else span[self.block_index][:, None]
        )

    @cached_property
    def relative_budgets(self) -> np.ndarray:
        """(J,) float64 budgets above their lowest total, as shares of their range; 0 where the range is empty."""
        low, high = self.unit_range
        ranges = zip(self.budgets, low, high, strict=True)
        return np.array([float((b * self.denominator - v) / (h - v)) if h > v else 0.0 for b, v, h in ranges])

    @cached_property
    def directions(self) -> np.ndarray:
        """(q, N, K) float64 unweighted costs: the directions along which the retraction shifts logits."""
        return np.ascontiguousarray(self._directions.to_float())

    @cached_property
    def relative_directions(self) -> tuple[np.ndarray, tuple[Fraction, ...]]:
        """:attr:`directions` above each group's lowest, over a budget's widest spread; and those spreads.

        The former, (q, N, K) float64, are as free of units as :attr:`relative_costs`.
        """
        directions = self._directions.numerators
        above = directions - directions.min(axis=2, keepdims=True)
        spread = above.max(axis=2)
        if self.block_index is None:
            widest = spread.max(axis=1)
        else:
            widest = np.zeros(self.num_budgets, dtype=spread.dtype)
            np.maximum.at(widest, self.block_index, spread[0])
        widest = np.where(widest == 0, 1, widest)
        per_group = widest[:, None, None] if self.block_index is None else widest[self.block_index][:, None]
        return exact_ratio(above, per_group), tuple(
            Fraction(int(w), self._directions.denominator) for w in widest
        )

    @cached_property
    def weights(self) -> np.ndarray:
        """(N,) float64 weights."""
        return self._weights.to_float() if self._weights is not None else np.ones(self.num_groups)

    @property
    def largest_weight(self) -> Fraction:
        """The largest weight, exactly."""
        if self._weights is None:
            return Fraction(1)
        return Fraction(int(self._weights.numerators.max()), self._weights.denominator)

    @cached_property
    def relative_weights(self) -> np.ndarray:
        """(N,) float64 weights as shares of the largest."""
        if self._weights is None:
            return np.ones(self.num_groups)
        return exact_ratio(self._weights.numerators, self._weights.numerators.max())

    @cached_property
    def float_budgets(self) -> np.ndarray:
        """One float64 per budget."""
        return np.array([float(b) for b in self.budgets])

    @cached_property
    def reduced(self) -> ReducedCosts:
        """Costs and capacities of the knapsack in the smallest equivalent integers."""
        if self.unit_costs.dtype == object:
            costs = self.unit_costs - self.unit_costs.min(axis=2, keepdims=True)
        else:
            costs = (self.unit_costs - self.unit_costs.min(axis=2, keepdims=True)).astype(np.int64)
        low, _ = self.unit_range
        capacity = [b - lowest for b, lowest in zip(self.unit_budgets, low, strict=True)]
        reduced = []
        for j in range(self.num_joint):
            divisor = int(np.gcd.reduce(costs[j], axis=None)) or 1
            reduced.append(costs[j] // divisor)
            if self.block_index is None:
                capacity[j] //= divisor
            else:
                capacity = [c // divisor for c in capacity]
        return ReducedCosts(integer_array(np.stack(reduced)), tuple(capacity))

    @cached_property
    def log_allowed(self) -> Tensor:
        """(N, K) float64: 0 where allowed, -inf where forbidden."""
        return torch.where(torch.tensor(self.allowed), 0.0, -math.inf).double()

    # ------------------------------------------------------------ change, JSON

    def replace(self, **changes: Any) -> AllocationProblem:
        """The same problem with some constructor arguments changed."""
        return AllocationProblem(**{**self._arguments(), **changes})

    def _arguments(self) -> dict[str, Any]:
        def fractions(array: ExactArray | None) -> Any:
            if array is None or array.denominator == 1:
                return None if array is None else array.numerators
            return np.vectorize(lambda n: Fraction(int(n), array.denominator), otypes=[object])(
                array.numerators
            )

        blocks = None
        if self.block_ids is not None and self.block_index is not None:
            blocks = [self.block_ids[j] for j in self.block_index]
        return {
            "option_costs": fractions(self._given_costs),
            "budget": self.budget if self._budget_names is None else self.budget.by_name,
            "weights": fractions(self._weights),
            "sense": self.sense,
            "blocks": blocks,
            "allowed": None if self.allowed.all() else self.allowed,
            "groups": self.groups,
            "options": self.options,
            "monotone": self.monotone,
            "min_counts": None if self.min_counts is None else self.min_counts.to_dict(),
        }

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description; numbers that are not whole are "p/q" strings."""
        described = self._arguments()
        described["option_costs"] = self._given_costs.to_json()
        described["weights"] = self._weights.to_json() if self._weights is not None else None
        numbers = [json_number(b) for b in self.budgets]
        described["budget"] = numbers[0] if self._budget_is_scalar else numbers
        if self._budget_names is not None:
            described["budget_names"] = list(self._budget_names)
        if described["allowed"] is not None:
            described["allowed"] = described["allowed"].tolist()
        return {k: list(v) if isinstance(v, tuple) else v for k, v in described.items() if v is not None}

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> AllocationProblem:
        """The inverse of :meth:`to_dict`; unknown keys are an error."""
        known = {"option_costs", "budget", "weights", "sense", "blocks", "allowed", "groups", "options"}
        known |= {"monotone", "min_counts", "budget_names"}
        unknown = sorted(set(described) - known)
        if unknown:
            raise ValueError(f"Unknown keys {unknown} in a problem; allowed are {sorted(known)}.")
        missing = sorted({"option_costs", "budget"} - set(described))
        if missing:
            raise ValueError(f"A problem needs the keys 'option_costs' and 'budget'; {missing} is missing.")
        arguments = dict(described)
        names = arguments.pop("budget_names", None)
        if names is not None:
            by_block = dict(zip(sorted(set(names)), arguments["budget"], strict=True))
            arguments["budget"] = {name: by_block[name] for name in names}
        return cls(**arguments)

    def to_json(self) -> str:
        """The problem as one JSON object."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> AllocationProblem:
        """Read the output of :meth:`to_json`."""
        try:
            described = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Not a JSON problem: {error}.") from None
        if not isinstance(described, dict):
            raise ValueError(f"A JSON problem is one object, got {type(described).__name__}.")
        return cls.from_dict(described)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that defines the problem; equal for equal problems."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AllocationProblem):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        budgets = f"{show(self.budgets[0])}" if self.num_budgets == 1 else f"{self.num_budgets} budgets"
        sense = self.sense or "<="
        return f"AllocationProblem(groups={self.num_groups}, options={self.num_options}, C {sense} {budgets})"


# ---------------------------------------------------------------------------- checks of the arguments


def _costs_with_holes(option_costs: Any, allowed: Any) -> ExactArray:
    """Exact costs; entries of forbidden options may hold anything, NaN included."""
    if allowed is not None:
        mask = np.asarray(allowed)
        raw = np.asarray(option_costs)
        if raw.dtype.kind == "f" and raw.ndim >= 2 and raw.shape[-2:] == mask.shape and mask.dtype == bool:
            option_costs = np.where(mask, raw, 0.0)
    costs = exact_array(option_costs, "option_costs")
    if costs.numerators.ndim not in (1, 2, 3):
        raise ValueError(
            f"option_costs must have shape (K,), (N, K) or (q, N, K), got {costs.numerators.shape}."
        )
    if 0 in costs.numerators.shape:
        raise ValueError(
            f"option_costs is empty: shape {costs.numerators.shape}; N, K and q must be at least 1."
        )
    return costs


def _count_groups(
    costs: ExactArray, weights: Any, blocks: Any, allowed: Any, groups: Sequence[str] | None, budget: Any
) -> int:
    """N, from the first argument that determines it."""
    if costs.numerators.ndim >= 2:
        return int(costs.numerators.shape[-2])
    for name, value in (("weights", weights), ("blocks", blocks), ("allowed", allowed), ("groups", groups)):
        if value is not None:
            count = len(value)
            if count == 0:
                raise ValueError(f"{name} is empty: a problem needs at least one group.")
            return count
    raise ValueError(
        "The number of groups is unknown: with shared (K,) option_costs give weights, blocks, allowed or groups "
        "(one entry per group), or repeat the costs as an (N, K) array."
    )


def _check_allowed(allowed: Any, num_groups: int, num_options: int) -> np.ndarray:
    """Booleans (N, K), each group with at least one allowed option."""
    if allowed is None:
        return np.ones((num_groups, num_options), dtype=bool)
    mask = np.asarray(allowed)
    if mask.dtype != bool or mask.shape != (num_groups, num_options):
        raise ValueError(
            f"allowed must be booleans of shape ({num_groups}, {num_options}), got {mask.dtype} of shape "
            f"{mask.shape}."
        )
    closed = np.flatnonzero(~mask.any(axis=1))
    if closed.size:
        raise ValueError(f"Group {int(closed[0])} has no allowed option; leave each group at least one.")
    mask = mask.copy()
    mask.setflags(write=False)
    return mask


def _check_weights(weights: Any, num_groups: int) -> ExactArray | None:
    """Positive exact weights (N,)."""
    if weights is None:
        return None
    exact = exact_array(weights, "weights")
    if exact.numerators.shape != (num_groups,):
        raise ValueError(f"weights must have shape ({num_groups},), got {exact.numerators.shape}.")
    bad = np.flatnonzero(exact.numerators <= 0)
    if bad.size:
        i = int(bad[0])
        value = show(Fraction(int(exact.numerators[i]), exact.denominator))
        raise ValueError(
            f"weights must be positive, got {value} for group {i}; drop the group or give it a weight."
        )
    return exact


def _check_labels(labels: Sequence[str] | None, count: int, name: str) -> tuple[str, ...] | None:
    """Labels as strings, as many as needed."""
    if labels is None:
        return None
    labels = tuple(str(label) for label in labels)
    if len(labels) != count:
        raise ValueError(f"{name} must hold {count} labels, got {len(labels)}.")
    return labels


def _fill_forbidden(costs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Give forbidden options the cost of their group's first allowed option, so that they widen no range."""
    if allowed.all():
        return costs
    first = allowed.argmax(axis=1)
    fallback = costs[:, np.arange(costs.shape[1]), first]
    return np.where(allowed[None], costs, fallback[:, :, None])


def _weighted_costs(directions: ExactArray, weights: ExactArray | None) -> tuple[np.ndarray, int]:
    """Exact ``w_i c_ik`` over one denominator, as int64 where even their sum over all groups fits."""
    costs = directions.numerators
    factor = weights.numerators if weights is not None else np.ones(costs.shape[1], dtype=np.int64)
    largest = max(abs(int(costs.min())), abs(int(costs.max()))) * int(factor.max()) * len(factor)
    if costs.dtype == object or factor.dtype == object or largest >= _INT64_SAFE:
        product = costs.astype(object) * factor.astype(object)[None, :, None]
        product = integer_array(product) if largest < _INT64_SAFE else product
    else:
        product = costs * factor[None, :, None]
    denominator = directions.denominator * (weights.denominator if weights is not None else 1)
    divisor = math.gcd(denominator, int(np.gcd.reduce(product, axis=None)))
    return product // divisor, denominator // divisor


def _check_budgets(problem: AllocationProblem) -> None:
    """Raise an error for budgets that no assignment meets, or that leave nothing to decide.

    Raises:
        InfeasibleBudgetError: A budget lies outside its reachable range, or joint ones cannot be met together.
        ValueError: Every assignment costs the same, and the sense is not "<=".
    """
    low, high = problem.counted_range
    for j, budget in enumerate(problem.budgets):
        lowest, highest = Fraction(low[j], problem.denominator), Fraction(high[j], problem.denominator)
        reachable = f"reachable totals lie between {show(lowest)} and {show(highest)}"
        if budget < lowest:
            raise InfeasibleBudgetError(
                f"{_budget_name(problem, j)} is {show(budget)}, but {reachable}; raise it to at least "
                f"{show(lowest)}, or allow cheaper options."
            )
        if problem.sense != "<=" and lowest == highest:
            raise ValueError(
                f"Under {_budget_name(problem, j)} every assignment costs the same ({show(lowest)}): all options "
                "of each group cost the same, so the expected cost is constant, its gradient vanishes and "
                'C = B is not a surface. Give options of different cost, or use sense="<=" if the '
                "budget is not meant to decide anything."
            )
        if problem.sense != "<=" and budget > highest:
            raise InfeasibleBudgetError(
                f"{_budget_name(problem, j)} is {show(budget)}, but {reachable}; lower it to at most "
                f'{show(highest)}, or use sense="<=" if it may be left unspent.'
            )
    if problem.num_joint > 1:
        _check_joint(problem)


def _check_reachable(problem: AllocationProblem) -> None:
    """Raise an error for a budget that no assignment costs exactly, with the nearest totals that one does."""
    from rco.core.knapsack.equality import nearest_totals

    if problem.unit_costs.dtype == object:
        raise ValueError(
            'Totals beyond 2**62 units cannot be met exactly; use sense="<=", or costs with fewer digits.'
        )
    low, _ = problem.unit_range
    costs = problem.unit_costs[0] - problem.unit_costs[0].min(axis=1, keepdims=True)
    divisor = int(np.gcd.reduce(np.where(problem.allowed, costs, 0), axis=None)) or 1
    for j, budget in enumerate(problem.budgets):
        members = slice(None) if problem.block_index is None else problem.block_index == j
        above = budget * problem.denominator - low[j]
        below, beyond = nearest_totals(
            costs[members] // divisor, problem.allowed[members], math.floor(above / divisor)
        )
        if below is not None and below * divisor == above:
            continue
        if (
            beyond is not None and beyond * divisor < above
        ):  # the budget lies between two multiples of the unit
            _, beyond = nearest_totals(
                costs[members] // divisor, problem.allowed[members], math.floor(above / divisor) + 1
            )
        near = [
            show(Fraction(low[j] + t * divisor, problem.denominator))
            for t in (below, beyond)
            if t is not None
        ]
        raise InfeasibleBudgetError(
            f"No assignment costs exactly {show(budget)} under {_budget_name(problem, j)}; the nearest reachable "
            f'totals are {" and ".join(near)}. Take one of them, or use sense="<=".'
        )


def _budget_name(problem: AllocationProblem, j: int) -> str:
    if problem.block_ids is not None:
        return f"the budget of block {problem.block_ids[j]!r}"
    return "the budget" if problem.num_joint == 1 else f"joint budget {j}"


def _check_joint(problem: AllocationProblem) -> None:
    """Check by the linear relaxation that the joint budgets can be met together."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix, vstack

    cells = np.flatnonzero(problem.allowed)
    rows = cells // problem.num_options
    # In units of the ranges, shared among the groups so that entries are of moderate size.
    matrix = problem.num_groups * problem.relative_costs.reshape(problem.num_joint, -1)[:, cells]
    choose_one = csr_matrix((np.ones(len(cells)), (rows, np.arange(len(cells)))))
    totals, targets = csr_matrix(matrix), problem.num_groups * problem.relative_budgets
    # Unless budgets may be left unspent, a continuous iterate must be able to meet all of them at once.
    exact = problem.sense != "<="
    result = linprog(
        np.zeros(len(cells)),
        A_ub=None if exact else totals,
        b_ub=None if exact else targets,
        A_eq=vstack([choose_one, totals]) if exact else choose_one,
        b_eq=np.concatenate([np.ones(problem.num_groups), targets if exact else []]),
        bounds=(0, None),
        method="highs",
        # Any time limit: without one HiGHS takes minutes here, with one a second.
        options={"time_limit": 300.0},
    )
    if result.status == 2:
        raise InfeasibleBudgetError(
            f"The {problem.num_joint} joint budgets {[show(b) for b in problem.budgets]} cannot be met together, "
            f"although each lies in its own range {problem.feasible_range}; raise some of them."
        )


def once_per_problem(make: Callable[[AllocationProblem], T]) -> Callable[[AllocationProblem], T]:
    """Make what a problem needs at its first use, and keep it as long as the problem lives."""
    kept: dict[int, T] = {}  # by identity: problems are large, and equal ones are rare

    @wraps(make)
    def find(problem: AllocationProblem) -> T:
        found = kept.get(id(problem))
        if found is None:
            found = kept[id(problem)] = make(problem)
            weakref.finalize(problem, kept.pop, id(problem), None)
        return found

    return find
