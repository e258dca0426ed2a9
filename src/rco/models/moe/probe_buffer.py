"""Room for the probes of a backward pass, made before the device has counted them.

How many pruned experts would enter a token's choice depends on the token, and a host that asked for their number
would wait for the device in every layer. So room is made for as many as are likely. The device counts them on the
side; when a sample is over the counts are looked at, and one that needed more is done again, probes counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["ProbeRoom", "UsedRoom"]

# Room costs little, a sample that is done again costs a sample: what was needed once is kept for hundreds of them.
_FIRST = 2.0  # room made in the first samples, in units of what a router without preferences would need
_MARGIN = 1.3  # over the most that was needed lately
_FORGET = 0.998  # per sample: how fast a sample that needed much is forgotten
_OTHERS = 0.7  # of the most that any layer needed, a recorded sample makes room for in all of them
_MULTIPLE = 128


@dataclass
class UsedRoom:
    """What one sample made room for.

    Attributes:
        recorded: Whether the sample is recorded, to be replayed with other gates.
        layers: Layer, places and expected number; None: any, the sample being replayed.
        needed: The numbers needed, on the device: one tensor per layer, or all in one.
    """

    recorded: bool = False
    layers: list[tuple[int, int, float | None]] = field(default_factory=list)
    needed: list[Tensor] = field(default_factory=list)

    def counts(self) -> Tensor:
        """(layers,) the numbers needed, in one tensor."""
        place = self.needed[0].device
        return torch.cat([numbers.reshape(-1).to(place, non_blocking=True) for numbers in self.needed])

    def replayed(self, counts: Tensor) -> UsedRoom:
        """The same room, of which another sample needed so much."""
        return UsedRoom(True, self.layers, [counts])


class ProbeRoom:
    """How much room every layer makes.

    Outside :meth:`sample` probes are counted, and the host waits for their number.

    Args:
        layers: Sparse layers.
        always_counted: Count them in samples as well, as is best where the host is the device.

    Attributes:
        always_counted: As given.
        too_small: Samples so far that needed more room than they had.
    """

    def __init__(self, layers: int, *, always_counted: bool) -> None:
        self.always_counted = always_counted
        self._factors = [_FIRST] * layers
        self._most = [0] * layers
        self._used: UsedRoom | None = None
        self.too_small = 0

    @property
    def counted(self) -> bool:
        """Whether probes are counted at the moment."""
        return self._used is None

    @contextmanager
    def sample(self, recorded: bool = False) -> Iterator[UsedRoom | None]:
        """Launch forward and backward pass of a sample inside; what it uses is for :meth:`settle` to look at.

        A ``recorded`` one will be replayed with other gates: it makes room for the most that was needed so far.
        """
        self._used = None if self.always_counted else UsedRoom(recorded)
        try:
            yield self._used
        finally:
            self._used = None

    def reserve(self, layer: int, tokens: int, top_k: int, kept: int, pruned: int, needed: Tensor) -> int:
        """Places for the pairs of tokens and pruned experts that enter them, of which there are ``needed``."""
        assert self._used is not None
        expected: float | None = None
        if self._used.recorded:
            most = tokens * (kept + pruned)
            likely = _MARGIN * max(self._most[layer], _OTHERS * max(self._most), 1)
        else:
            most = tokens * pruned
            # Before the top_k-th of the kept ones, so many pruned ones come in a random order.
            expected = tokens * top_k * pruned / (kept + 1)
            likely = self._factors[layer] * expected
        places = min(-(-int(likely) // _MULTIPLE) * _MULTIPLE, most)
        if most:
            self._used.layers.append((layer, places, expected))
            self._used.needed.append(needed)
        return places

    def settle(self, used: UsedRoom) -> bool:
        """Whether a sample had room enough; waits for the device, and learns from what was needed."""
        if not used.layers:
            return True
        enough = True
        for (layer, places, expected), number in zip(used.layers, used.counts().tolist(), strict=True):
            enough &= number <= places
            self._most[layer] = max(number, self._most[layer])
            if expected is not None:
                self._factors[layer] = max(_MARGIN * number / expected, _FORGET * self._factors[layer])
        self.too_small += not enough
        return enough
