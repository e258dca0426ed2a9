"""Second-order cost of switches, measured from the gradients of a search.

Let ``d_a(b)`` be the change that the gradient at option a predicts for a switch of one group from a to b. To second
order the true change is ``d_a(b) + q``, and on the way back ``d_b(a) + q``; the two sum to zero, so that
``q = -(d_a(b) + d_b(a)) / 2``. A search visits most options of a group, each among other choices of the other
groups, and averages over these. An estimate that its noise could explain is shrunk towards zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["MeasuredCurvature"]


class MeasuredCurvature:
    """Averages of the predicted switches (N, K, K) and the curvature that follows from them."""

    def __init__(self, num_groups: int, num_options: int) -> None:
        self._rows = torch.arange(num_groups)
        self._visits = torch.zeros(num_groups, num_options, dtype=torch.float64)
        # Sums and sums of squares of d_a(b) at [i, a, b].
        self._sums = torch.zeros(2, num_groups, num_options, num_options, dtype=torch.float64)

    def add(self, choices: Tensor, gradient: Tensor) -> None:
        """Record the gradient (N, K) with respect to the gates at some choices (N,)."""
        predicted = gradient - gradient.gather(1, choices[:, None])
        self._visits[self._rows, choices] += 1.0
        self._sums[0, self._rows, choices] += predicted
        self._sums[1, self._rows, choices] += predicted.square()

    def switches(self, choices: Tensor) -> Tensor:
        """(N, K) second-order cost of switching each group away from its choice; never negative."""
        here, there = self._visits[self._rows, choices][:, None], self._visits
        known = (here > 0) & (there > 0)
        count_here, count_there = here.clamp_min(1.0), there.clamp_min(1.0)
        out = self._sums[:, self._rows, choices] / count_here  # (2, N, K): d_a(b) from the choice a
        back = self._sums[:, self._rows, :, choices].movedim(0, 1) / count_there  # d_b(a)
        curved = -0.5 * (out[0] + back[0])
        spread = (out[1] - out[0].square()).clamp_min(0.0), (back[1] - back[0].square()).clamp_min(0.0)
        # One visit says nothing of the spread: the mean spread of the group takes its place.
        typical = 0.5 * (spread[0] + spread[1]).mean(dim=1, keepdim=True)
        noise = 0.25 * sum(
            torch.maximum(s, typical) / c for s, c in zip(spread, (count_here, count_there), strict=True)
        )
        kept = (1.0 - noise / curved.square().clamp_min(1e-300)).clamp_min(0.0)
        return torch.where(known & (curved > 0), kept * curved, 0.0)

    def state(self) -> dict[str, Any]:
        """Visits and sums."""
        return {"visits": self._visits.clone(), "sums": self._sums.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self._visits, self._sums = state["visits"].clone(), state["sums"].clone()
