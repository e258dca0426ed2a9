"""Rounding of the inputs of linears, for formats that an engine computes with rounded inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rco.formats.base import ActivationRule, Stored

__all__ = ["round_inputs", "rounded_inputs"]


@dataclass(frozen=True)
class _Rounding:
    """Forward pre-hook; gradients pass straight through."""

    rule: ActivationRule

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        with torch.no_grad():
            rounded = self.rule(x)
        if torch.is_grad_enabled() and x.requires_grad:
            rounded = x + (rounded - x).detach()
        return (rounded, *args[1:])


def round_inputs(model: nn.Module, weights: Mapping[str, Stored]) -> list[RemovableHandle]:
    """Round the inputs of linears as the formats of their weights do.

    Args:
        model: The model, changed in place.
        weights: Stored weights by name of the linear.

    Returns:
        Handles that undo it.
    """
    rules = {name: stored.format.input_rule(stored) for name, stored in weights.items()}
    return [
        model.get_submodule(name).register_forward_pre_hook(_Rounding(rule))
        for name, rule in rules.items()
        if rule is not None
    ]


@contextmanager
def rounded_inputs(model: nn.Module, weights: Mapping[str, Stored]) -> Iterator[None]:
    """:func:`round_inputs` for the duration of the context."""
    handles = round_inputs(model, weights)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
