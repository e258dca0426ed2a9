"""A token embedding that can be any one of K compressed versions of itself, with a gradient for every option.

Only the rows of the tokens at hand are decoded, and only their gradients enter the inner products with options. A
token that occurs twice is decoded twice: finding the distinct ones would make the host wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rco.formats.base import Stored
from rco.formats.products import Option, inner_products
from rco.formats.switchable import LayerOptions, Selection, SwitchableLayer, WeightBuffer, fresh_weight

__all__ = ["SwitchableEmbedding"]


class SwitchableEmbedding(SwitchableLayer):
    """Replacement of a token embedding that applies one of its compressed options.

    Args:
        options: K stored weights of shape (tokens, features), in any formats; None stands for the original weight.
        original: The embedding's own weight.
        scale: Factor of the result, where the model's embedding has one.
    """

    def __init__(
        self, options: Sequence[Stored | None], original: Tensor, scale: Tensor | float | None = None
    ) -> None:
        super().__init__(options, original.detach())
        self.buffer = WeightBuffer()
        self._known = LayerOptions(self.options)
        # In a tuple, so that the parameter is not registered here a second time.
        self._original, self._scale = (original,), scale

    @property
    def weight(self) -> Tensor:
        """The original weight: for code that asks for type, device or size of the embedding."""
        return self._original[0]

    @property
    def device(self) -> torch.device:
        """Device of the embedding."""
        return self.weight.device

    def supports_device_choice(self, dtype: torch.dtype) -> bool:
        """Whether the layer can read its choice from the device, and so be recorded, when computing in a type."""
        return self.noise is None and self._known.chosen_decoder(dtype) is not None

    def selected_weight(self, dtype: torch.dtype) -> Tensor:
        """The selected option as a new dense matrix."""
        option = self.options[self.selection.choice]
        weight = option.to(dtype) if isinstance(option, Tensor) else option.dequantize(dtype)
        return weight if self.noise is None else weight + self.noise.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the selected option (..., features) for token ids (...)."""
        places, gate = tokens.reshape(-1), self.selection.gate
        if gate is not None and gate.requires_grad and torch.is_grad_enabled():
            rows: Tensor = _Rows.apply(gate, places, self.options, self.selection, self.weight.dtype)  # type: ignore[no-untyped-call]
        else:
            rows = _chosen_rows(self.options, self.selection, places, self.weight.dtype)
        if self.noise is not None:
            rows = rows + self.noise[places].to(rows.dtype)
        found = rows.view(*tokens.shape, -1)
        return found if self._scale is None else found * self._scale


def _part(option: Option, rows: Tensor) -> Option:
    """Some rows of an option, copied."""
    if isinstance(option, Tensor):
        return option[rows]
    if option.device != rows.device:  # options in host memory
        rows = rows.to(option.device)
    return option.over(
        {name: part[rows] for name, part in option.tensors.items()}, (len(rows), option.shape[1])
    )


def _chosen_rows(options: Sequence[Option], selection: Selection, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of the selected option, dense."""
    if selection.place is None:
        part = _part(options[selection.choice], rows)
        dense = part if isinstance(part, Tensor) else part.dequantize()
        return dense.to(rows.device, dtype)
    # Each distinct option once: where one does not fit the embedding, another stands in its place.
    parts = {key: _part(option, rows) for key, option in {id(each): each for each in options}.items()}
    return fresh_weight(LayerOptions([parts[id(option)] for option in options]), selection, dtype)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        rows: Tensor,
        options: Sequence[Option],
        selection: Selection,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.rows, ctx.options, ctx.selection = rows, options, selection
        return _chosen_rows(options, selection, rows, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        selection, gate = ctx.selection, ctx.selection.gate
        wanted = selection.active or (True,) * len(ctx.options)
        slopes, found = gradient.float(), torch.zeros_like(gate)
        products: dict[int, Tensor] = {}
        # One option at a time: together, options of several group sizes need numbers copied from the host, which a
        # recording must not contain.
        for index, option in enumerate(ctx.options):
            if wanted[index]:
                if id(option) not in products:
                    part = _on(_part(option, ctx.rows), slopes.device)
                    products[id(option)] = inner_products(slopes, [part])[0]
                found[index] = products[id(option)]
        return found, None, None, None, None


def _on(option: Option, device: torch.device) -> Option:
    return option if option.device == device else option.to(device)
