"""One option per group: what every solver and searcher returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Allocation"]


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
