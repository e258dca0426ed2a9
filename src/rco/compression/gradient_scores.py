"""Scores of options from gradients at outputs, weights and inputs of linears, as in ModelOpt and AutoRound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rco.formats.switchable import SwitchableLinear
from rco.models.layout import LinearInfo

__all__ = ["delta_losses", "output_scores"]

OnOutput = Callable[[str, SwitchableLinear, Tensor, Tensor], None]
"""Called with name, layer, inputs (tokens, in) and the gradient at the outputs (tokens, out)."""


@contextmanager
def output_scores(
    layers: Mapping[str, SwitchableLinear], rows: Mapping[str, int], shape: tuple[int, int]
) -> Iterator[Tensor]:
    """Table (N, K) that a backward pass inside the context fills.

    An entry is the sum, over a group's layers, tokens and outputs, of the squared gradient times the squared change
    of the output by the option.

    Args:
        layers: Switchable layers by name, at the options whose outputs are the base.
        rows: Row of every layer.
        shape: (N, K).
    """
    table = torch.zeros(shape, dtype=torch.float64)

    def add(name: str, layer: SwitchableLinear, x: Tensor, gradient: Tensor) -> None:
        base, squares = layer.selection.choice, gradient.float().square()
        before = layer.output_of(x, base).float()
        active = layer.selection.active
        for option in range(len(layer.options)):
            if option != base and (active is None or active[option]):
                change = layer.output_of(x, option).float() - before
                table[rows[name], option] += float((change.square() * squares).sum())

    with _at_outputs(layers, add):
        yield table


@contextmanager
def delta_losses(
    layers: Mapping[str, SwitchableLinear],
    rows: Mapping[str, int],
    groups: int,
    originals: Mapping[str, LinearInfo],
    *,
    of_weights: bool,
) -> Iterator[Tensor]:
    """Table (N,) that a backward pass inside the context fills.

    An entry is the sum, over a group's layers, of sizes of the gradient at every rounded input times its change,
    and, if ``of_weights``, of the gradient at every weight times its change.

    Args:
        layers: Switchable layers by name, at the options to be scored.
        rows: Row of every layer.
        groups: Number of rows.
        originals: Linears with their unquantized weights by name.
        of_weights: Whether changes of weights count.
    """
    table = torch.zeros(groups, dtype=torch.float64)

    def add(name: str, layer: SwitchableLinear, x: Tensor, gradient: Tensor) -> None:
        weight, rule = layer.selected_weight(x.dtype), layer.input_rule
        rounded = x if rule is None else rule(x)
        total = 0.0
        if rule is not None:
            total += float(((gradient @ weight) * (x - rounded)).abs().float().sum())
        if of_weights:
            change = originals[name].weight.detach().to(weight) - weight
            total += float(((gradient.float().T @ rounded.float()) * change.float()).abs().sum())
        table[rows[name]] += total

    with _at_outputs(layers, add):
        yield table


@contextmanager
def _at_outputs(layers: Mapping[str, SwitchableLinear], callback: OnOutput) -> Iterator[None]:
    """Call a function for every layer when a backward pass reaches its outputs."""

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            x = args[0].detach()
            if not output.requires_grad:
                return

            @torch.no_grad()
            def reached(gradient: Tensor) -> None:
                flat = gradient.reshape(-1, gradient.shape[-1])
                callback(name, layers[name], x.reshape(-1, x.shape[-1]), flat)

            output.register_hook(reached)  # type: ignore[no-untyped-call]

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
