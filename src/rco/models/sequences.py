"""Removal of transformers' checks of sequences that would wait for the device."""

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
    """Context for a stack of blocks on sequences without padding whose positions start at 0.

    Before it makes a mask, transformers checks the positions for several texts packed into one sequence, and some
    models check the ends of sequences for padding. Both wait for the device.
    """
    masking = sys.modules.get("transformers.masking_utils")
    with ExitStack() as undo:
        if hasattr(masking, _PACKED):
            undo.callback(setattr, masking, _PACKED, _disable(masking, _PACKED))
        if hasattr(stack, _PADDED) and _PADDED not in stack.__dict__:
            undo.callback(stack.__dict__.pop, _PADDED, None)
            _disable(stack, _PADDED)
        yield


def _disable(owner: Any, check: str) -> Callable[..., Any]:
    """Replace a check by one that does nothing; returns the original."""
    before: Callable[..., Any] = getattr(owner, check)
    setattr(owner, check, lambda *_, **__: None)
    return before
