"""What transformers would ask the device about sequences, though it is known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["whole_sequences"]

_QUESTION = "find_packed_sequence_indices"


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Run a model on sequences whose positions it counts up from 0 by itself.

    Before it makes a mask, transformers looks at the positions for several texts packed into one sequence, and
    waits for the device to tell. Positions that nobody has given hold none.
    """
    masking = sys.modules.get("transformers.masking_utils")
    ask = getattr(masking, _QUESTION, None)
    if masking is None or ask is None or ask is _nothing_packed:
        yield
        return
    setattr(masking, _QUESTION, _nothing_packed)
    try:
        yield
    finally:
        setattr(masking, _QUESTION, ask)


def _nothing_packed(position_ids: Tensor) -> None:
    """In place of the search: there is one text in every sequence."""
