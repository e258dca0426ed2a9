"""At least so many groups of a block must take a given option: kept experts per layer, for instance.

With two options, and equal costs within each block, such floors cost the exact knapsack nothing: some best solution
gives the option to the groups of the block that value it most, so those can be locked before the rest is solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Floors"]


@dataclass(frozen=True, eq=False)
class Floors:
    """At least ``counts[b]`` groups of block b take ``option``.

    Args:
        blocks: (N,) block index of each group, from 0.
        counts: One floor per block.
        option: The option that the floors are about.
    """

    blocks: np.ndarray
    counts: np.ndarray
    option: int

    @classmethod
    def checked(
        cls, given: Floors | Mapping[str, Any] | None, unit_costs: np.ndarray, allowed: np.ndarray
    ) -> Floors | None:
        """Floors that fit a problem, or an error that says why they do not."""
        if given is None:
            return None
        raw = given.to_dict() if isinstance(given, Floors) else dict(given)
        unknown = sorted(set(raw) - {"blocks", "counts", "option"})
        if unknown:
            raise ValueError(f"Unknown keys {unknown} in floors; allowed are blocks, counts and option.")
        blocks = np.asarray(raw["blocks"], dtype=np.int64)
        counts = np.asarray(raw["counts"], dtype=np.int64)
        option = int(raw["option"])
        num_joint, num_groups, num_options = unit_costs.shape
        if num_options != 2 or num_joint != 1:
            raise ValueError(f"floors need two options and one budget, got {num_options} and {num_joint}.")
        if blocks.shape != (num_groups,) or option not in (0, 1):
            raise ValueError(
                f"floors need a block for each of {num_groups} groups and option 0 or 1, got blocks of shape "
                f"{blocks.shape} and option {option}."
            )
        if counts.ndim != 1 or (blocks.size and (blocks.min() < 0 or blocks.max() >= len(counts))):
            raise ValueError(f"floors name blocks {blocks.min()}..{blocks.max()} but {len(counts)} counts.")
        floors = cls(blocks, counts, option)
        for block in range(len(counts)):
            members = blocks == block
            available = int(allowed[members, option].sum())
            if counts[block] > available:
                raise ValueError(
                    f"Block {block} must give option {option} to {counts[block]} groups, but only {available} of "
                    f"its {int(members.sum())} may take it."
                )
            for k in range(2):
                costs = unit_costs[0, members & allowed[:, k], k]
                if counts[block] > 0 and costs.size and costs.min() != costs.max():
                    raise ValueError(
                        f"floors need equal costs within a block; the groups of block {block} differ."
                    )
        return floors

    def met(self, choices: np.ndarray) -> bool:
        """Whether an allocation has enough of the option in every block."""
        taken = np.bincount(self.blocks[choices == self.option], minlength=len(self.counts))
        return bool((taken >= self.counts).all())

    def may_leave(self, choices: np.ndarray) -> np.ndarray:
        """(N,) whether a group of an allocation could give up its option without breaking its block's floor."""
        taken = np.bincount(self.blocks[choices == self.option], minlength=len(self.counts))
        return np.asarray((choices != self.option) | (taken > self.counts)[self.blocks])

    def enforce(self, values: np.ndarray) -> np.ndarray:
        """Values (batch, N, 2) in which the other option is ruled out for the groups that fill the floors."""
        other = 1 - self.option
        values = np.array(values, copy=True)
        with np.errstate(invalid="ignore"):  # a group with one allowed option has an infinite preference
            preference = values[:, :, self.option] - values[:, :, other]
        preference = np.where(np.isnan(preference), -np.inf, preference)
        # Sort by block, then by preference; the first counts[b] of each block are locked.
        order = np.lexsort((-preference, np.broadcast_to(self.blocks, preference.shape)), axis=-1)
        sizes = np.bincount(self.blocks, minlength=len(self.counts))
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        rank = np.arange(values.shape[1]) - np.repeat(starts, sizes)
        locked_place = rank < np.repeat(self.counts, sizes)
        rows = np.arange(len(values))[:, None]
        values[rows, order[:, locked_place], other] = -np.inf
        return values

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {"blocks": self.blocks.tolist(), "counts": self.counts.tolist(), "option": self.option}
