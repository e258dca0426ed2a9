"""Experts that can each take any of K options (packed, original or removed), with a gradient for every option.

A layer's experts are two stacks of matrices: gate above up, and down. An option is one packed weight
for a whole stack, so that a layer of hundreds of experts is decoded in one launch on a GPU (elsewhere in a pass per
option) and multiplied in one grouped product. The weight gradients ``G`` are formed once, stacked as well; one pass
over ``G`` gives ``<G, W_k>`` for every expert, projection and option from the packed form.

:class:`ExpertOptions` holds the options of a layer, :class:`PlacedChoices` and :class:`SelectedExperts` one choice
of them, and :class:`SwitchableExperts` drives all layers of a model by one matrix of gates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rco.core.async_copy import send, send_together
from rco.formats.base import Stored
from rco.formats.stacks import ChosenSegments, by_option, decode_segments
from rco.formats.streaming import OptionStream, StreamedOptions
from rco.formats.switchable import LayerOptions, WeightBuffer
from rco.models.moe.expert_pairs import ExpertWeights, expert_weights
from rco.models.moe.gates import ExpertGates, GateMode, expert_gates
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import original_stacks
from rco.models.moe.probes import ProbeBuffer

__all__ = ["ExpertOptions", "PlacedChoices", "SelectedExperts", "SwitchableExperts", "switchable_experts"]


class ExpertOptions:
    """The experts of one layer at every option.

    Args:
        layer: The layer; its own weights are referred to, not copied.
        up: K options for gate and up projection, packed (experts x 2 x inner, width) with an expert's up below its
            gate; None for the layer's own weights.
        down: The same for the down projection, (experts x width, inner).
        pruned: Index of the option that removes an expert. It decodes as the layer's own weights, which the
            expert would have if it were kept.
        buffer: Memory for the dense weights of one layer, usually shared by all.
        stream: Keeps the packed options of both stacks in host memory and copies them to the device.
    """

    def __init__(
        self,
        layer: MoELayer,
        up: Sequence[Stored | None],
        down: Sequence[Stored | None],
        *,
        pruned: int | None = None,
        buffer: WeightBuffer | None = None,
        stream: OptionStream | None = None,
    ) -> None:
        self.layer, self.pruned = layer, pruned
        self.buffer = buffer if buffer is not None else WeightBuffer()
        self.up, self.down = tuple(up), tuple(down)
        own = expert_weights(layer.experts)
        # No reference to the weights: if only packed options are read, they may be moved to host memory.
        self.device, self._activate, self._biases = own.up.device, own.activate, (own.up_bias, own.down_bias)
        self._remembered: tuple[list[tuple[int, torch.dtype]], list[LayerOptions]] | None = None
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
        self._streamed: StreamedOptions | None = None
        if stream is not None:
            self._streamed = stream.add([option for option in (*self.up, *self.down) if option is not None])

    @property
    def num_options(self) -> int:
        """Number of options K."""
        return len(self.up)

    @property
    def dtype(self) -> torch.dtype:
        """Type that the layer computes in."""
        return original_stacks(self.layer)[0].dtype

    def own(self) -> ExpertWeights:
        """The layer's own weights, an expert's up below its gate."""
        up, down = original_stacks(self.layer)
        return self._arranged(up.flatten(1, 2), down.flatten(1, 2))

    def supports_device_choice(self, dtype: torch.dtype) -> bool:
        """Whether a kernel can read the choices on the device when the layer computes in a type."""
        if self._streamed is not None or self._reorders_own():
            return False
        everything = range(self.num_options)
        known = self._known(everything, everything)
        return all(options.chosen_decoder(dtype) is not None for options in known)

    def decode(self, placed: PlacedChoices) -> ExpertWeights:
        """The weights with every gate, up and down at its option; valid until the buffer is used again."""
        dense, dtype, places = [], self.dtype, (placed.up, placed.down)
        # Choices on the device are unknown to the host: assume any option.
        taken = [
            chosen.options if isinstance(chosen, ChosenSegments) else range(self.num_options)
            for chosen in places
        ]
        own = [
            all(listed[k] is None for k in each)
            for listed, each in zip((self.up, self.down), taken, strict=True)
        ]
        if all(own):
            return self.own()
        known = self._known(*taken)
        for slot, (options, chosen) in enumerate(zip(known, places, strict=True)):
            if own[slot]:
                dense.append(original_stacks(self.layer)[slot].flatten(1, 2))
                continue
            out = self.buffer.take(options.shape, dtype, self.device, slot=slot)
            if isinstance(chosen, ChosenSegments):
                decode_segments(options.listed, chosen, out)
            else:
                decode = options.chosen_decoder(dtype)
                if decode is None:
                    raise ValueError(
                        f"No kernel decodes the experts of {self.layer.name} to {dtype} by choices on "
                        f"{self.device}; place the choices with PlacedChoices.of."
                    )
                decode(chosen, out)
            dense.append(out.view(self.layer.num_experts, -1, options.shape[1]))
        return self._arranged(*dense)

    def are_own(self, choices: NDArray[np.int64]) -> bool:
        """Whether all of these options are the layer's own weights, which need no decoding."""
        return all(self.up[k] is None and self.down[k] is None for k in np.unique(choices).tolist())

    def _known(self, up: Collection[int], down: Collection[int]) -> list[LayerOptions]:
        """Options of both stacks, with the layer's own weights filled in; kept for the next call where possible.

        Own weights in another memory order are copied if they are among the options that will be read.
        """
        stacks = original_stacks(self.layer)
        options = [self.up, self.down]
        own = [(stack.data_ptr(), stack.dtype) for stack in stacks if None in (*self.up, *self.down)]
        if self._remembered is not None and self._remembered[0] == own:
            return self._remembered[1]
        if self._streamed is not None:
            arrived = (option for option in self._streamed.all() if isinstance(option, Stored))
            options = [tuple(None if o is None else next(arrived) for o in listed) for listed in options]
        made, copies = [], self._reorders_own()
        for listed, stack, read in zip(options, stacks, (up, down), strict=True):
            # A placeholder for own weights that are not read avoids their copy.
            there: Stored | Tensor | None = next((option for option in listed if option is not None), None)
            if there is None or (None in listed and (not copies or any(listed[k] is None for k in read))):
                there = stack.reshape(-1, stack.shape[3])
            filled = [there if option is None else option for option in listed]
            made.append(LayerOptions(filled, stack.shape[0] * stack.shape[1]))
        if self._streamed is None and not copies:  # streamed options move between calls
            self._remembered = own, made
        return made

    def _reorders_own(self) -> bool:
        """Whether the layer's own weights are an option and have another memory order than the packed ones."""
        stacks = zip(original_stacks(self.layer), (self.up, self.down), strict=True)
        return any(None in options and not stack.is_contiguous() for stack, options in stacks)

    def _arranged(self, up: Tensor, down: Tensor) -> ExpertWeights:
        """Stacks (experts, out, in) as weights that multiply from the right, with their biases and activation."""
        activate, (up_bias, down_bias) = self._activate, self._biases
        interleaved = self.layer.architecture.interleaved
        return ExpertWeights(
            up.transpose(1, 2),
            down.transpose(1, 2),
            _in_order(up_bias) if interleaved else up_bias,
            down_bias,
            (lambda both: activate(_alternating(both))) if interleaved else activate,
        )

    def products(self, up: Tensor, down: Tensor, wanted: tuple[bool, ...]) -> Tensor:
        """(experts, 3, K) inner products of weight gradients (experts, out, in) with every wanted option."""
        found, read = [], [k for k, asked in enumerate(wanted) if asked]
        for gradient, options in zip((up, down), self._known(read, read), strict=True):
            part = options.products(wanted)(gradient.reshape(options.shape))
            found.append(part.reshape(self.num_options, self.layer.num_experts, -1))
        return torch.cat(found, dim=2).permute(1, 2, 0)


def _in_order(bias: Tensor | None) -> Tensor | None:
    """A bias of alternating gate and up entries as all of gate, then all of up."""
    return None if bias is None else torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1)


def _alternating(both: Tensor) -> Tensor:
    return torch.stack(both.chunk(2, dim=-1), dim=-1).flatten(-2)


@dataclass(frozen=True)
class PlacedChoices:
    """One layer's choices, on its device.

    Attributes:
        choices: (experts, 3) option of every projection; (experts, 2) for experts without a gate, here and below.
        up: Options of gates and ups: sorted by the host, or (experts x 2,) numbers on the device.
        down: The same for down, (experts,).
    """

    choices: Tensor
    up: ChosenSegments | Tensor
    down: ChosenSegments | Tensor

    @classmethod
    def of(cls, choices: NDArray[np.int64], device: torch.device) -> PlacedChoices:
        """The choices (experts, 3) of one layer, sorted by the host and sent to its device."""
        (placed,) = cls.sent([choices], [True], device)
        return placed

    @classmethod
    def sent(
        cls, choices: Sequence[NDArray[np.int64]], sorted_out: Sequence[bool], device: torch.device
    ) -> list[PlacedChoices]:
        """The choices of several layers, in one copy; ``sorted_out``: whether the host sorts those of a layer."""
        stacks = [
            [taken[:, :-1].reshape(-1), taken[:, -1]] if sort else []
            for taken, sort in zip(choices, sorted_out, strict=True)
        ]
        orders = [by_option(part) for parts in stacks for part in parts]
        arrived = send_together([*choices, *orders], device)
        places = zip(orders, arrived[len(choices) :], strict=True)
        found = []
        for numbers, parts in zip(arrived, stacks, strict=False):
            if parts:
                up, down = (ChosenSegments(part, *next(places)) for part in parts)
                found.append(cls(numbers, up, down))
            else:
                found.append(cls.there(numbers))
        return found

    @classmethod
    def there(cls, choices: Tensor) -> PlacedChoices:
        """Choices (experts, 3) that are on the layer's device, for kernels that read them there."""
        return cls(choices, choices[:, :-1].reshape(-1), choices[:, -1].contiguous())


@dataclass(frozen=True)
class SelectedExperts:
    """A layer's experts at one option each, as a forward and its backward pass use them.

    Attributes:
        options: The layer's options.
        gates: (experts, 3, K) gates that need a gradient; None if none does.
        wanted: Options that need a gradient.
        placed: Option of every expert's gate, up and down projection, on the layer's device.
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

        The cost of removing an expert is the gradient of its keep gate; the values here are the differences
        between the options of an expert that stays.
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


# ------------------------------------------------------------- all layers of a model


class SwitchableExperts:
    """The experts of a model, driven by one matrix of gates.

    Args:
        handle: The gates installed in the layers.
        options: Sparse layer -> its compressed options. A layer without any computes with its own weights.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection.
        removed: Column of the gates that removes an expert from the router; None: no expert can be removed.
        wanted: (N, K) options that need a gradient; None: all.
    """

    def __init__(
        self,
        handle: ExpertGates,
        options: Mapping[int, ExpertOptions],
        rows: Mapping[int, NDArray[np.int64]],
        removed: int | None = None,
        wanted: NDArray[np.bool_] | None = None,
    ) -> None:
        self.handle, self.options, self._removed = handle, dict(options), removed
        self._rows = {layer: np.array(own, dtype=np.int64) for layer, own in rows.items()}
        self._wanted = {layer: (True,) * each.num_options for layer, each in options.items()}
        if wanted is not None:
            for layer in options:
                own = np.unique(self._rows[layer])
                self._wanted[layer] = tuple(np.atleast_1d(wanted[own].any(axis=0)).tolist())
        # By device: its layers, and the rows of all of them.
        self._places: dict[torch.device, tuple[list[int], Tensor]] = {}
        by_device: dict[torch.device, list[int]] = {}
        for layer in self._rows:
            by_device.setdefault(handle.devices[layer], []).append(layer)
        for device, layers in by_device.items():
            self._places[device] = layers, self._host_rows(layers).to(device)

    @property
    def probe_buffer(self) -> ProbeBuffer | None:
        """Buffer of the probes of removed experts; None if none can be removed."""
        return None if self._removed is None else self.handle.probe_buffer

    def recordable(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`set_gates` supports ``recorded`` when the experts compute in a type."""
        one_device = len(self._places) == 1
        return one_device and all(options.supports_device_choice(dtype) for options in self.options.values())

    def check_gates(self, choices: Sequence[int]) -> None:
        """Raise an error for choices that leave a router fewer experts than it picks."""
        if self._removed is not None and self.handle.mode == "deployed":
            self.handle.check_deployed(torch.cat(self._staying(self._picked(choices))))

    def set_gates(
        self,
        gates: Tensor,
        choices: Sequence[int],
        recorded: bool = False,
        mode: GateMode = "deployed",
    ) -> None:
        """Set every expert to the option chosen by its rows of the gates.

        Args:
            gates: (N, K) one-hot rows that may carry gradient, in host memory or on the experts' device.
            choices: The option of every row.
            recorded: The experts read their choices from the gates when they run, so that their launches can be
                recorded and replayed with other gates; see :meth:`recordable`.
            mode: Model of removal; see :func:`rco.models.moe.gates.expert_gates`.
        """
        picked = self._picked(choices)
        own = self._own_gates(gates) if gates.requires_grad else {}
        if self.options:
            placed = self._read(gates) if recorded else self._sent(picked)
            for layer in self.options:
                selected = SelectedExperts(
                    self.options[layer], own.get(layer), self._wanted[layer], placed[layer]
                )
                self.handle.use_options(layer, selected)
        if self._removed is not None:
            self.handle.use_mode(mode)
            self.handle.set_gates(self._keep(gates, own), self._staying(picked))

    def _keep(self, gates: Tensor, own: Mapping[int, Tensor]) -> list[Tensor]:
        """One gate per expert of every sparse layer: 1 keeps it, 0 removes it; with gradient if gates have one."""
        kept: dict[int, Tensor] = {}
        if own:
            kept = {layer: 1.0 - gate[:, 0, self._removed] for layer, gate in own.items()}
        else:
            for layers, rows in self._places.values():
                own_rows = rows if rows.device == gates.device else self._host_rows(layers)
                chosen = gates[own_rows[:, 0], self._removed]
                kept |= self._by_layer(layers, 1.0 - chosen)
        return [
            kept[layer.index]
            if layer.index in kept
            else torch.ones(layer.num_experts, dtype=gates.dtype, device=gates.device)
            for layer in self.handle.layers
        ]

    def _host_rows(self, layers: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.concatenate([self._rows[layer] for layer in layers]))

    def _picked(self, choices: Sequence[int]) -> dict[int, NDArray[np.int64]]:
        """(experts, 3) option of every layer's projections, in host memory."""
        chosen = np.array(choices, dtype=np.int64)
        return {layer: chosen[rows] for layer, rows in self._rows.items()}

    def _staying(self, picked: Mapping[int, NDArray[np.int64]]) -> list[Tensor]:
        """Booleans per sparse layer, in host memory: experts that stay."""
        found = []
        for layer in self.handle.layers:
            stay = np.ones(layer.num_experts, dtype=bool)
            if layer.index in picked:
                stay = picked[layer.index][:, 0] != self._removed
            found.append(torch.from_numpy(stay))
        return found

    def _own_gates(self, gates: Tensor) -> dict[int, Tensor]:
        """(experts, 3, K) gates of every layer on its device; one gather for all layers of a device."""
        found: dict[int, Tensor] = {}
        for device, (layers, rows) in self._places.items():
            dtype = torch.float32 if device.type == "mps" else gates.dtype
            found |= self._by_layer(layers, send(gates.to(dtype), device)[rows])
        return found

    def _read(self, gates: Tensor) -> dict[int, PlacedChoices]:
        """The choices of every layer, read from the gates on their device."""
        ((layers, rows),) = self._places.values()
        parts = self._by_layer(layers, gates.detach().argmax(1)[rows])
        return {layer: PlacedChoices.there(choices) for layer, choices in parts.items()}

    def _sent(self, picked: Mapping[int, NDArray[np.int64]]) -> dict[int, PlacedChoices]:
        """The choices of every layer with options on its device, by one copy for all layers of a device."""
        found: dict[int, PlacedChoices] = {}
        for device, (everything, _) in self._places.items():
            layers = [layer for layer in everything if layer in self.options]
            # Sorted on the host if no kernel reads choices on the device, or if nothing has to be decoded.
            sorted_out = [
                options.are_own(picked[layer]) or not options.supports_device_choice(options.dtype)
                for layer, options in ((layer, self.options[layer]) for layer in layers)
            ]
            placed = PlacedChoices.sent([picked[layer] for layer in layers], sorted_out, device)
            found |= zip(layers, placed, strict=True)
        return found

    def _by_layer(self, layers: Sequence[int], together: Tensor) -> dict[int, Tensor]:
        parts = torch.split(together, [len(self._rows[layer]) for layer in layers])
        return dict(zip(layers, parts, strict=True))


@contextmanager
def switchable_experts(
    model: nn.Module,
    options: Mapping[int, ExpertOptions],
    rows: Mapping[int, NDArray[np.int64]],
    removed: int | None = None,
    wanted: NDArray[np.bool_] | None = None,
) -> Iterator[SwitchableExperts]:
    """Run a model with switchable experts inside the context; leaving restores it.

    Args:
        model: The model.
        options: Sparse layer (its position among them) -> its compressed options; other layers compute with their
            own weights.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection; other layers
            stay unchanged.
        removed: Column of the gates that removes an expert from the router; None: no expert can be removed.
        wanted: (N, K) options that need a gradient; None: all.
    """
    buffer = WeightBuffer()
    prunes = removed is not None
    with expert_gates(model, "deployed", reroute=prunes, only=None if prunes else set(options)) as handle:
        for layer in options.values():
            layer.buffer = buffer
        try:
            yield SwitchableExperts(handle, options, rows, removed, wanted)
        finally:
            buffer.clear()
