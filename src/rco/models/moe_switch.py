"""Experts that can each be any one of K compressed versions of themselves, with a gradient for every option.

A layer's experts are two stacks of matrices: gate and up below each other, and down. Every option is one packed
weight for a whole stack, so that a layer of hundreds of experts decodes in one pass per option and multiplies in
one grouped product. The gradients ``G`` of the experts' weights are formed once, stacked as well, and meet all
options in their packed form: ``<G, W_k>`` for every expert, projection and option in one pass over ``G``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rco.compressors.packing import PackedWeight, inner_products
from rco.compressors.stacks import ChosenSegments, by_option, decode_segments
from rco.compressors.switchable import WeightBuffer
from rco.core.transfer import send
from rco.models.moe import MoELayer
from rco.models.moe_experts import ExpertWeights, expert_weights
from rco.models.moe_gates import ExpertGates, expert_gates
from rco.models.moe_linears import original_stacks
from rco.models.moe_room import ProbeRoom

__all__ = ["ExpertOptions", "PlacedChoices", "SelectedExperts", "SwitchableExperts", "switchable_experts"]


class ExpertOptions:
    """The experts of one layer at every option.

    Args:
        layer: The layer; its own weights are referred to, not copied.
        up: K options for gate and up projection, packed (experts x 2 x inner, width) with an expert's up below its
            gate; None for the layer's own weights.
        down: The same for the down projection, (experts x width, inner).
        pruned: Index of the option that takes an expert out. It decodes as the layer's own weights: what the
            expert would say if it came back.
        buffer: Memory for the dense weights of one layer, usually shared by all.
    """

    def __init__(
        self,
        layer: MoELayer,
        up: Sequence[PackedWeight | None],
        down: Sequence[PackedWeight | None],
        *,
        pruned: int | None = None,
        buffer: WeightBuffer | None = None,
    ) -> None:
        self.layer, self.pruned = layer, pruned
        self.buffer = buffer if buffer is not None else WeightBuffer()
        self.up, self.down = tuple(up), tuple(down)
        self._own = expert_weights(layer.experts)
        stacks = original_stacks(layer)
        for name, options, stack in (("up", self.up, stacks[0]), ("down", self.down, stacks[1])):
            shape = (stack.shape[0] * stack.shape[1] * stack.shape[2], stack.shape[3])
            for index, option in enumerate(options):
                if option is not None and option.shape != shape:
                    raise ValueError(
                        f"Option {index} of the {name} projections of {layer.name} is {tuple(option.shape)}, the "
                        f"layer needs {shape}."
                    )
        if len(self.up) != len(self.down) or not self.up:
            raise ValueError(
                f"Up and down projections need the same options, at least one; got {len(self.up)} and "
                f"{len(self.down)}."
            )

    @property
    def num_options(self) -> int:
        """K."""
        return len(self.up)

    @property
    def device(self) -> torch.device:
        """Where the layer is."""
        return self._own.up.device

    def own(self) -> ExpertWeights:
        """The layer's own weights, an expert's up below its gate."""
        up, down = original_stacks(self.layer)
        return self._arranged(up.flatten(1, 2), down.flatten(1, 2))

    def decode(self, placed: PlacedChoices) -> ExpertWeights:
        """The weights with every gate, up and down at its option; valid until the buffer is used again."""
        up, down = original_stacks(self.layer)
        dense = []
        for slot, (options, stack, chosen) in enumerate(
            ((self.up, up, placed.up), (self.down, down, placed.down))
        ):
            experts, parts, rows, columns = stack.shape
            own = [k for k in chosen.options if options[k] is None]
            if len(own) == len(chosen.options) and stack.is_contiguous():
                dense.append(stack.reshape(experts, parts * rows, columns))
                continue
            # The layer's own weights in their place; a copy of those only where they are needed.
            there = stack.reshape(-1, columns) if own else stack
            filled = [there if option is None else option for option in options]
            out = self.buffer.take((experts * parts * rows, columns), stack.dtype, stack.device, slot=slot)
            dense.append(decode_segments(filled, chosen, out).view(experts, parts * rows, columns))
        return self._arranged(*dense)

    def _arranged(self, up: Tensor, down: Tensor) -> ExpertWeights:
        """Stacks (experts, out, in) as weights that multiply from the right, biases and activation to match."""
        own, interleaved = self._own, self.layer.architecture.interleaved
        return ExpertWeights(
            up.transpose(1, 2),
            down.transpose(1, 2),
            _in_order(own.up_bias) if interleaved else own.up_bias,
            own.down_bias,
            (lambda both: own.activate(_alternating(both))) if interleaved else own.activate,
        )

    def products(self, up: Tensor, down: Tensor, wanted: Sequence[bool]) -> Tensor:
        """(experts, 3, K) inner products of weight gradients (experts, out, in) with every wanted option."""
        stacks = original_stacks(self.layer)
        found = []
        for gradient, options, stack in ((up, self.up, stacks[0]), (down, self.down, stacks[1])):
            experts, parts, _, columns = stack.shape
            listed = [
                None if not asked else stack.reshape(-1, columns) if option is None else option
                for option, asked in zip(options, wanted, strict=True)
            ]
            part = inner_products(gradient.reshape(-1, columns), listed, experts * parts)
            found.append(part.reshape(self.num_options, experts, parts))
        return torch.cat(found, dim=2).permute(1, 2, 0)


def _in_order(bias: Tensor | None) -> Tensor | None:
    """A bias of alternating gate and up entries as all of gate, then all of up."""
    return None if bias is None else torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1)


def _alternating(both: Tensor) -> Tensor:
    return torch.stack(both.chunk(2, dim=-1), dim=-1).flatten(-2)


@dataclass(frozen=True)
class PlacedChoices:
    """One layer's choices on its device, so that no pass over it has to send them.

    Attributes:
        up: Options of gates and ups, as :func:`decode_segments` takes them.
        down: The same for down.
        choices: (experts, 3) option of every projection.
    """

    up: ChosenSegments
    down: ChosenSegments
    choices: Tensor

    @classmethod
    def of(cls, choices: NDArray[np.int64], device: torch.device) -> PlacedChoices:
        """The choices (experts, 3) of one layer alone, sent to its device."""
        up, down = (ChosenSegments.sent(part.reshape(-1), device) for part in (choices[:, :2], choices[:, 2]))
        return cls(up, down, send(torch.from_numpy(choices), device))


@dataclass(frozen=True)
class SelectedExperts:
    """A layer's experts at one choice each; what a forward pass and its backward pass compute with.

    Attributes:
        options: The layer's options.
        gates: (experts, 3, K) gates that want a gradient; None if nothing does.
        wanted: Options whose gradient is wanted.
        placed: Option of every expert's gate, up and down projection, where the layer is.
    """

    options: ExpertOptions
    gates: Tensor | None
    wanted: tuple[bool, ...]
    placed: PlacedChoices

    def dense(self) -> ExpertWeights:
        """The weights of the choice."""
        return self.options.decode(self.placed)

    def option_gradient(self, up: Tensor, down: Tensor, idle: Tensor) -> Tensor:
        """(experts, 3, K): ``<G, W_k>``; where experts may be pruned, relative to the present option.

        Taking an expert out is no change of its weights: the keep gate's gradient says what that costs, and the
        options of an expert that stays differ by what is returned here.
        """
        assert self.gates is not None
        products = self.options.products(up, down, self.wanted)
        if self.options.pruned is not None:
            chosen = self.placed.choices
            products = products - products.gather(2, chosen.unsqueeze(2))
            products[:, :, self.options.pruned] = 0.0
            idle = idle | (chosen[:, 0] == self.options.pruned)
        products = products.masked_fill(idle[:, None, None], 0.0)
        return products.to(device=self.gates.device, dtype=self.gates.dtype)


class SwitchableExperts:
    """The experts of a model, driven by one matrix of gates.

    Args:
        handle: The gates that have taken over the layers' forwards.
        options: Sparse layer -> its options.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection.
    """

    def __init__(
        self, handle: ExpertGates, options: Mapping[int, ExpertOptions], rows: Mapping[int, NDArray[np.int64]]
    ) -> None:
        self._handle, self.options = handle, dict(options)
        self._rows = {layer: np.array(rows[layer], dtype=np.int64) for layer in options}
        self._places = {
            layer: torch.from_numpy(self._rows[layer]).to(each.device) for layer, each in options.items()
        }

    @property
    def room(self) -> ProbeRoom | None:
        """For the probes of pruned experts; None where none can be pruned."""
        prunes = any(options.pruned is not None for options in self.options.values())
        return self._handle.room if prunes else None

    def set_gates(
        self, gates: Tensor, choices: Sequence[int | None], wanted: NDArray[np.bool_] | None = None
    ) -> None:
        """Let every expert use the option that its rows of the gates pick.

        Args:
            gates: (N, K) one-hot rows that may carry gradient, in host memory or where the experts are.
            choices: The option of every row.
            wanted: (N, K) options whose gradient is wanted; None: all.
        """
        chosen = np.array([-1 if choice is None else choice for choice in choices], dtype=np.int64)
        picked = {layer: chosen[rows] for layer, rows in self._rows.items()}
        for index, taken in picked.items():
            if (taken < 0).any():
                name = self.options[index].layer.name
                raise ValueError(f"{name} needs one option per expert, not a mixture of options.")
        placed = self._placed(picked)
        here: dict[torch.device, Tensor] = {}
        keep: list[Tensor] = []
        kept: list[Tensor] = []
        for layer in self._handle.layers:
            options = self.options.get(layer.index)
            all_stay = torch.ones(layer.num_experts, dtype=torch.bool)
            if options is None:
                keep.append(all_stay)
                kept.append(all_stay)
                continue
            rows, taken = self._rows[layer.index], picked[layer.index]
            own: Tensor | None = None
            if gates.requires_grad:
                if options.device not in here:
                    dtype = torch.float32 if options.device.type == "mps" else gates.dtype
                    here[options.device] = send(gates.to(dtype), options.device)
                own = here[options.device][self._places[layer.index]]
            asked = (True,) * options.num_options
            if wanted is not None:
                asked = tuple(np.atleast_1d(wanted[np.unique(rows)].any(axis=0)).tolist())
            selected = SelectedExperts(options, own, asked, placed[layer.index])
            self._handle.use_options(layer.index, selected)
            stay = all_stay if options.pruned is None else torch.from_numpy(taken[:, 0] != options.pruned)
            kept.append(stay)
            keep.append(stay if own is None or options.pruned is None else 1.0 - own[:, 0, options.pruned])
        if self.room is not None:
            self._handle.set_gates(keep, kept)

    def _placed(self, picked: Mapping[int, NDArray[np.int64]]) -> dict[int, PlacedChoices]:
        """The choices of every layer on its device, by one copy for all layers of a device."""
        found = {}
        for device in {options.device for options in self.options.values()}:
            layers = [layer for layer in picked if self.options[layer].device == device]
            chosen = [
                part
                for taken in (picked[layer] for layer in layers)
                for part in (taken[:, :2].reshape(-1), taken[:, 2])
            ]
            orders = [by_option(part) for part in chosen]
            parts = [*orders, *(picked[layer].reshape(-1) for layer in layers)]
            together = send(torch.from_numpy(np.concatenate(parts)), device)
            pieces = torch.split(together, [len(part) for part in parts])
            stacks = map(ChosenSegments, chosen, orders, pieces)
            for layer, choices in zip(layers, pieces[len(orders) :], strict=True):
                found[layer] = PlacedChoices(next(stacks), next(stacks), choices.view(-1, 3))
        return found


@contextmanager
def switchable_experts(
    model: nn.Module, options: Mapping[int, ExpertOptions], rows: Mapping[int, NDArray[np.int64]]
) -> Iterator[SwitchableExperts]:
    """Run a model with switchable experts inside the context; leaving restores it.

    Args:
        model: The model.
        options: Sparse layer (its position among them) -> its options; layers left out stay as they are.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection.
    """
    buffer = WeightBuffer()
    prunes = any(layer.pruned is not None for layer in options.values())
    with expert_gates(model, "deployed", reroute=prunes, only=None if prunes else set(options)) as handle:
        for layer in options.values():
            layer.buffer = buffer
        try:
            yield SwitchableExperts(handle, options, rows)
        finally:
            buffer.clear()
