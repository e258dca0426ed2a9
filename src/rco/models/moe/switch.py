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
from rco.models.moe.gates import ExpertGates, GateMode, expert_gates
from rco.models.moe.options import ExpertOptions, PlacedChoices, SelectedExperts
from rco.models.moe.probe_buffer import ProbeRoom

__all__ = ["SwitchableExperts", "switchable_experts"]


class SwitchableExperts:
    """The experts of a model, driven by one matrix of gates.

    Args:
        handle: The gates that have taken over the layers' forwards.
        options: Sparse layer -> its compressed options. A layer without any computes with its own weights.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection.
        removed: Column of the gates that takes an expert out of the router; None: no expert can be removed.
        wanted: (N, K) options whose gradient is wanted; None: all.
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
    def room(self) -> ProbeRoom | None:
        """For the probes of removed experts; None where none can be removed."""
        return None if self._removed is None else self.handle.room

    def recordable(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`set_gates` takes ``recorded``, the experts computing in a type."""
        one_device = len(self._places) == 1
        return one_device and all(options.follows_places(dtype) for options in self.options.values())

    def check_gates(self, choices: Sequence[int]) -> None:
        """Refuse choices that leave a router fewer experts than it picks."""
        if self._removed is not None and self.handle.mode == "deployed":
            self.handle.check_deployed(torch.cat(self._staying(self._picked(choices))))

    def set_gates(
        self,
        gates: Tensor,
        choices: Sequence[int],
        recorded: bool = False,
        mode: GateMode = "deployed",
    ) -> None:
        """Let every expert use the option that its rows of the gates pick.

        Args:
            gates: (N, K) one-hot rows that may carry gradient, in host memory or where the experts are.
            choices: The option of every row.
            recorded: The experts read their choices off the gates when they run, so that what they launch may be
                recorded and launched again with other gates; see :meth:`recordable`.
            mode: How removal is modelled; see :func:`rco.models.moe.gates.expert_gates`.
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
        """Which experts of every sparse layer stay, in host memory."""
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
        """The choices of every layer, read off the gates where they are."""
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
    removed: int | None = None,
    wanted: NDArray[np.bool_] | None = None,
) -> Iterator[SwitchableExperts]:
    """Run a model with switchable experts inside the context; leaving restores it.

    Args:
        model: The model.
        options: Sparse layer (its position among them) -> its compressed options; other layers compute with their
            own weights.
        rows: Sparse layer -> (experts, 3) row of the gates for every gate, up and down projection; layers left out
            stay as they are.
        removed: Column of the gates that takes an expert out of the router; None: no expert can be removed.
        wanted: (N, K) options whose gradient is wanted; None: all.
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
