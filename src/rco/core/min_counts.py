"""Minimum counts: at least so many groups of a block must take one of certain options.

The router of a mixture of experts needs at least ``top_k`` experts per layer that are not removed, where an
expert's options are, say, removed, 2, 3 and 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["MinCounts"]

_KEYS = ("blocks", "counts", "options")


@dataclass(frozen=True, eq=False)
class MinCounts:
    """At least ``counts[b]`` groups of block b take one of ``options``.

    Args:
        blocks: (N,) block index of each group, from 0.
        counts: (B,) least number of groups per block.
        options: The options that count.
        num_options: K.
    """

    blocks: np.ndarray
    counts: np.ndarray
    options: tuple[int, ...]
    num_options: int

    @classmethod
    def checked(
        cls, given: MinCounts | Mapping[str, Any] | None, allowed: np.ndarray, block_index: np.ndarray | None
    ) -> MinCounts | None:
        """Minimum counts that fit a problem with these locks and budget blocks, or an error with the reason."""
        if given is None:
            return None
        raw = given.to_dict() if isinstance(given, MinCounts) else dict(given)
        if set(raw) != set(_KEYS):
            raise ValueError(f"min_counts needs exactly the keys {list(_KEYS)}, got {sorted(raw)}.")
        blocks, counts = np.asarray(raw["blocks"]), np.asarray(raw["counts"])
        options = tuple(sorted({int(k) for k in np.atleast_1d(raw["options"])}))
        num_groups, num_options = allowed.shape
        if blocks.shape != (num_groups,) or blocks.dtype.kind not in "iu":
            raise ValueError(
                f"min_counts needs the index of a block for each of {num_groups} groups, got blocks of shape "
                f"{blocks.shape} and dtype {blocks.dtype}."
            )
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise ValueError(
                f"The counts of min_counts must be integers of at least 0, got {counts.tolist()}."
            )
        if blocks.min() < 0 or blocks.max() >= len(counts):
            raise ValueError(
                f"min_counts has {len(counts)} counts, but blocks {blocks.min()}..{blocks.max()}; give one count "
                "per block."
            )
        if not options or options[0] < 0 or options[-1] >= num_options:
            raise ValueError(
                f"The options of min_counts must be some of 0..{num_options - 1}, got {list(options)}."
            )
        checked = cls(blocks.astype(np.int64), counts.astype(np.int64), options, num_options)
        usable = np.asarray(allowed[:, list(options)]).any(axis=1).reshape(-1)
        for block, count in enumerate(checked.counts.tolist()):
            members = blocks == block
            if count > usable[members].sum():
                raise ValueError(
                    f"Block {block} must give one of the options {list(options)} to {count} groups, but only "
                    f"{int(usable[members].sum())} of its {int(members.sum())} groups may take one."
                )
            if count and block_index is not None and len(set(block_index[members].tolist())) > 1:
                raise ValueError(
                    f"Block {block} of min_counts spans several budget blocks; keep its groups under one budget."
                )
        return checked

    @cached_property
    def counting(self) -> np.ndarray:
        """(K,) booleans: whether an option counts."""
        return np.isin(np.arange(self.num_options), self.options)

    def taken(self, choices: np.ndarray) -> np.ndarray:
        """(B,) groups of each block that take a counting option."""
        return np.bincount(self.blocks[self.counting[choices]], minlength=len(self.counts))

    def met(self, choices: np.ndarray) -> bool:
        """Whether an allocation keeps every minimum."""
        return bool((self.taken(choices) >= self.counts).all())

    def keeping_switches(self, choices: np.ndarray) -> np.ndarray:
        """(N, K) whether a single switch keeps every minimum, given that they are kept now."""
        spare = (self.taken(choices) > self.counts)[self.blocks]
        may_leave = ~self.counting[choices] | spare
        return np.asarray(may_leave[:, None] | self.counting[None, :])

    def _first_of_each_block(self, keys: tuple[np.ndarray, ...]) -> np.ndarray:
        """(..., sum of counts) groups that come first in their block, as many as its count, by ascending keys."""
        blocks = np.broadcast_to(self.blocks, keys[0].shape)
        order = np.lexsort((*keys, blocks), axis=-1)
        sizes = np.bincount(self.blocks, minlength=len(self.counts))
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        rank = np.arange(len(self.blocks)) - np.repeat(starts, sizes)
        return np.asarray(order[..., rank < np.repeat(self.counts, sizes)])

    def lock(self, values: np.ndarray) -> np.ndarray:
        """Values (batch, N, K) in which the groups of each block that prefer counting options most must take one.

        Every allocation that is left keeps the minima. With two options, and equal costs within each block, one of
        the best allocations is left (:meth:`locks_exactly`).
        """
        values = np.array(values, copy=True)
        with np.errstate(invalid="ignore"):  # a group with one allowed option has an infinite preference
            preference = values[:, :, self.counting].max(axis=2, initial=-np.inf)
            preference = preference - values[:, :, ~self.counting].max(axis=2, initial=-np.inf)
        preference = np.where(np.isnan(preference), -np.inf, preference)
        locked = self._first_of_each_block((-preference,))
        rows = np.arange(len(values))[:, None]
        values[rows[:, :, None], locked[:, :, None], np.flatnonzero(~self.counting)] = -np.inf
        return values

    def locks_exactly(self, costs: np.ndarray, allowed: np.ndarray) -> bool:
        """Whether :meth:`lock` always leaves a best allocation: two options, each of one cost within a block."""
        if self.num_options != 2:
            return False
        for block in np.flatnonzero(self.counts):
            for option in range(2):
                group_costs = costs[(self.blocks == block) & allowed[:, option], option]
                if group_costs.size and group_costs.min() != group_costs.max():
                    return False
        return True

    def cheapest(self, costs: np.ndarray, usable: np.ndarray) -> np.ndarray | None:
        """The choices (N,) of least total cost that keep the minima; None where the usable options cannot.

        Args:
            costs: (N, K) integers.
            usable: (N, K) booleans, at least one option per group.
        """
        groups = np.arange(len(costs))
        beyond = costs.max() + 1
        counted = usable & self.counting
        overall = np.where(usable, costs, beyond).argmin(axis=1)
        counting = np.where(counted, costs, beyond).argmin(axis=1)
        possible = counted.any(axis=1)
        extra = costs[groups, counting] - costs[groups, overall]
        free = possible & (extra == 0)
        choices = np.where(free, counting, overall)
        _, rank = np.unique(np.where(possible, extra, 0), return_inverse=True)  # integers of any size
        taken = self._first_of_each_block((rank.reshape(-1), ~possible))
        if not possible[taken].all():
            return None
        choices[taken] = counting[taken]
        return np.asarray(choices, dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {
            "blocks": self.blocks.tolist(),
            "counts": self.counts.tolist(),
            "options": list(self.options),
        }
