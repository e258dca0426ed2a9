"""Experts that can each be any one of K compressed versions of themselves, with a gradient for every option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rco.core.transfer import send
from rco.formats.switchable import WeightBuffer
from rco.models.moe.gates import ExpertGates, expert_gates
from rco.models.moe.options import ExpertOptions, PlacedChoices, SelectedExperts
from rco.models.moe.probe_buffer import ProbeRoom

__all__ = ["SwitchableExperts", "switchable_experts"]


class SwitchableExperts:
    """The experts of a model, driven by one matrix of gates.

    Args:
        handle: The gates that have taken over the layers' forwards.
        options: Sparse layer -> its options.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection.
        wanted: (N, K) options whose gradient is wanted; None: all.
    """

    def __init__(
        self,
        handle: ExpertGates,
        options: Mapping[int, ExpertOptions],
        rows: Mapping[int, NDArray[np.int64]],
        wanted: NDArray[np.bool_] | None = None,
    ) -> None:
        self._handle, self.options = handle, dict(options)
        self._rows = {layer: np.array(rows[layer], dtype=np.int64) for layer in options}
        self._wanted = {layer: (True,) * each.num_options for layer, each in options.items()}
        if wanted is not None:
            for layer, own in self._rows.items():
                self._wanted[layer] = tuple(np.atleast_1d(wanted[np.unique(own)].any(axis=0)).tolist())
        # By device: its layers, and the rows of all of them.
        self._places: dict[torch.device, tuple[list[int], Tensor]] = {}
        for device in {each.device for each in options.values()}:
            layers = [layer for layer, each in options.items() if each.device == device]
            together = np.concatenate([self._rows[layer] for layer in layers])
            self._places[device] = layers, torch.from_numpy(together).to(device)

    @property
    def room(self) -> ProbeRoom | None:
        """For the probes of pruned experts; None where none can be pruned."""
        prunes = any(options.pruned is not None for options in self.options.values())
        return self._handle.room if prunes else None

    def recordable(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`set_gates` takes ``recorded``, the experts computing in a type."""
        one_device = len(self._places) == 1
        return one_device and all(options.follows_places(dtype) for options in self.options.values())

    def set_gates(self, gates: Tensor, choices: Sequence[int | None], recorded: bool = False) -> None:
        """Let every expert use the option that its rows of the gates pick.

        Args:
            gates: (N, K) one-hot rows that may carry gradient, in host memory or where the experts are.
            choices: The option of every row.
            recorded: The experts read their choices off the gates when they run, so that what they launch may be
                recorded and launched again with other gates; see :meth:`recordable`.
        """
        picked = self._picked(choices)
        placed = self._read(gates) if recorded else self._sent(picked)
        own = self._own_gates(gates) if gates.requires_grad else {}
        keep: list[Tensor] = []
        for layer in self._handle.layers:
            options = self.options.get(layer.index)
            gate = own.get(layer.index)
            if options is not None:
                selected = SelectedExperts(options, gate, self._wanted[layer.index], placed[layer.index])
                self._handle.use_options(layer.index, selected)
            if options is None or options.pruned is None:
                keep.append(torch.ones(layer.num_experts, dtype=torch.bool, device=gates.device))
            elif gate is not None:
                keep.append(1.0 - gate[:, 0, options.pruned])
            else:
                keep.append(placed[layer.index].choices[:, 0] != options.pruned)
        if self.room is not None:
            self._handle.set_gates(keep, self._staying(picked))

    def _picked(self, choices: Sequence[int | None]) -> dict[int, NDArray[np.int64]]:
        """(experts, 3) option of every layer's projections, in host memory."""
        chosen = np.array([-1 if choice is None else choice for choice in choices], dtype=np.int64)
        picked = {layer: chosen[rows] for layer, rows in self._rows.items()}
        for index, taken in picked.items():
            if (taken < 0).any():
                name = self.options[index].layer.name
                raise ValueError(f"{name} needs one option per expert, not a mixture of options.")
        return picked

    def _staying(self, picked: Mapping[int, NDArray[np.int64]]) -> list[Tensor]:
        """Which experts of every sparse layer stay, in host memory."""
        found = []
        for layer in self._handle.layers:
            options = self.options.get(layer.index)
            stay = np.ones(layer.num_experts, dtype=bool)
            if options is not None and options.pruned is not None:
                stay = picked[layer.index][:, 0] != options.pruned
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
        """The choices of every layer, read off the gates where they are."""
        ((layers, rows),) = self._places.values()
        parts = self._by_layer(layers, gates.detach().argmax(1)[rows])
        return {layer: PlacedChoices.there(choices) for layer, choices in parts.items()}

    def _sent(self, picked: Mapping[int, NDArray[np.int64]]) -> dict[int, PlacedChoices]:
        """The choices of every layer on its device, by one copy for all layers of a device."""
        found: dict[int, PlacedChoices] = {}
        for device, (layers, _) in self._places.items():
            # The host sorts out what no kernel follows, and knows where nothing is to be decoded at all.
            sorted_out = [
                options.are_own(picked[layer]) or not options.follows_places(options.dtype)
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
    wanted: NDArray[np.bool_] | None = None,
) -> Iterator[SwitchableExperts]:
    """Run a model with switchable experts inside the context; leaving restores it.

    Args:
        model: The model.
        options: Sparse layer (its position among them) -> its options; layers left out stay as they are.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection.
        wanted: (N, K) options whose gradient is wanted; None: all.
    """
    buffer = WeightBuffer()
    prunes = any(layer.pruned is not None for layer in options.values())
    with expert_gates(model, "deployed", reroute=prunes, only=None if prunes else set(options)) as handle:
        for layer in options.values():
            layer.buffer = buffer
        try:
            yield SwitchableExperts(handle, options, rows, wanted)
        finally:
            buffer.clear()
