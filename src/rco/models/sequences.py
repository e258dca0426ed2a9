"""What transformers would ask the device about sequences, though it is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

__all__ = ["whole_sequences"]

_PACKED = "find_packed_sequence_indices"
_PADDED = "warn_if_padding_and_no_attention_mask"


@contextmanager
def whole_sequences(stack: nn.Module) -> Iterator[None]:
    """Run a stack of blocks on sequences without padding whose positions it counts up from 0 by itself.

    Before it makes a mask, transformers looks at the positions for several texts packed into one sequence, and some
    models look at the ends of sequences for padding. Both wait for the device.
    """
    masking = sys.modules.get("transformers.masking_utils")
    with ExitStack() as undo:
        if hasattr(masking, _PACKED):
            undo.callback(setattr, masking, _PACKED, _answered(masking, _PACKED))
        if hasattr(stack, _PADDED) and _PADDED not in stack.__dict__:
            undo.callback(stack.__dict__.pop, _PADDED, None)
            _answered(stack, _PADDED)
        yield


def _answered(owner: Any, question: str) -> Callable[..., Any]:
    """Let a question be answered with nothing from now on; returns what answered it before."""
    before: Callable[..., Any] = getattr(owner, question)
    setattr(owner, question, lambda *_, **__: None)
    return before
