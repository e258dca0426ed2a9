"""Second-order cost of switches, measured from the gradients of a search.

Let ``d_a(b)`` be the change that the gradient at option a predicts for a switch of one group from a to b. To second
order the true change is ``d_a(b) + q``, and on the way back ``d_b(a) + q``; the two sum to zero, so that
``q = -(d_a(b) + d_b(a)) / 2``. A search visits most options of a group, each among other choices of the other
groups, and averages over these. An estimate that its noise could explain is shrunk towards zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["MeasuredCurvature"]


class MeasuredCurvature:
    """Averages of the predicted switches (N, K, K) and the curvature that follows from them."""

    def __init__(self, num_groups: int, num_options: int) -> None:
        self._rows = np.arange(num_groups)
        self._visits = np.zeros((num_groups, num_options))
        # Sums and sums of squares of d_a(b) at [i, a, b].
        self._sums = np.zeros((2, num_groups, num_options, num_options))

    def add(self, choices: Tensor, gradients: Tensor) -> None:
        """Record gradients (S, N, K) with respect to the gates at some choices (S, N)."""
        at, slopes = choices.numpy()[..., None], gradients.numpy()
        predicted = slopes - np.take_along_axis(slopes, at, axis=2)
        chosen = np.zeros_like(slopes)
        np.put_along_axis(chosen, at, 1.0, axis=2)
        self._visits += chosen.sum(axis=0)
        by_choice = chosen.transpose(1, 2, 0)  # (N, K, S)
        self._sums[0] += by_choice @ predicted.swapaxes(0, 1)
        self._sums[1] += by_choice @ (predicted * predicted).swapaxes(0, 1)

    def switches(self, choices: Tensor) -> Tensor:
        """(N, K) second-order cost of switching each group away from its choice; never negative."""
        at = choices.numpy()
        here, there = self._visits[self._rows, at][:, None], self._visits
        known = (here > 0) & (there > 0)
        count_here, count_there = np.maximum(here, 1.0), np.maximum(there, 1.0)
        out = self._sums[:, self._rows, at] / count_here  # (2, N, K): d_a(b) from the choice a
        back = self._sums[:, self._rows, :, at].swapaxes(0, 1) / count_there  # d_b(a)
        curved = -0.5 * (out[0] + back[0])
        spread = [np.maximum(each[1] - each[0] * each[0], 0.0) for each in (out, back)]
        # One visit says nothing of the spread: the mean spread of the group takes its place.
        typical = 0.5 * (spread[0] + spread[1]).mean(axis=1, keepdims=True)
        noise = 0.25 * (
            np.maximum(spread[0], typical) / count_here + np.maximum(spread[1], typical) / count_there
        )
        kept = np.maximum(1.0 - noise / np.maximum(curved * curved, 1e-300), 0.0)
        return torch.from_numpy(np.where(known & (curved > 0), kept * curved, 0.0))

    def state(self) -> dict[str, Any]:
        """Visits and sums."""
        return {name: torch.from_numpy(each.copy()) for name, each in self._parts().items()}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for name, each in self._parts().items():
            each[...] = state[name].numpy()

    def _parts(self) -> dict[str, np.ndarray]:
        return {"visits": self._visits, "sums": self._sums}
