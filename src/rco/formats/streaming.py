"""Options in host memory that are copied to the GPU shortly before a layer needs them.

A search requests the same options in the same order in every sample: the chosen one of each layer in the forward
pass, all of each layer in the backward pass (of experts, each of which has its own choice, all in both).
:class:`OptionStream` records that order and copies the next options on its own CUDA stream while the present layer
computes. It needs a few buffers of device memory, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rco.formats.base import ActivationRule, Stored
from rco.formats.products import Option

__all__ = ["STREAM_SLOTS", "OptionStream", "StreamedOptions", "activation_rules", "pinned", "pinned_together"]

StoredT = TypeVar("StoredT", bound=Stored)

_ALIGNMENT = 256
_AHEAD = 2  # requests copied ahead of the present one
STREAM_SLOTS = _AHEAD + 2  # buffers on the device


@dataclass(frozen=True)
class _Request:
    """A layer's option, or all of them (None)."""

    layer: int
    option: int | None


class OptionStream:
    """Copies the packed options of a model's layers to a device ahead of their use.

    Args:
        device: Device that uses the options.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layers: list[StreamedOptions] = []
        self._order: list[
            tuple[int, bool]
        ] = []  # layer, and whether all options were requested, in the last pass
        self._position = 0
        self._latest: _Request | None = None  # the last request, whose data is still valid
        self._copies: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots: list[Tensor | None] = [None] * STREAM_SLOTS
        self._arrived: dict[int, tuple[_Request, torch.cuda.Event]] = {}  # by position
        self._left: dict[int, torch.cuda.Event] = {}  # by position: when its slot was last read

    def add(self, options: Sequence[Option]) -> StreamedOptions:
        """Move a layer's packed options to pinned host memory; dense ones stay on the device."""
        streamed = StreamedOptions(self, len(self._layers), options)
        self._layers.append(streamed)
        return streamed

    def restart(self) -> None:
        """Begin a pass; call it after choosing other options, so that the first copies start."""
        # Data fetched for positions that were never reached belongs to the previous choices.
        self._position, self._latest = 0, None
        self._arrived.clear()
        if self._order:
            self._leave(-1)
            for position in range(min(_AHEAD, len(self._order))):
                self._prefetch(position)

    def fetch(self, layer: int, option: int | None) -> list[Stored | None]:
        """The requested packed options, valid for launches before the next request; others None."""
        position, request = self._position, _Request(layer, option)
        if request == self._latest:
            return self._layers[layer].views(self._slot(position - 1), option)
        self._position, self._latest = position + 1, request
        self._leave(position - 1)
        if self._arrived.get(position, (None,))[0] != request:
            self._copy(position, request)
        seen = (layer, option is None)
        if position < len(self._order) and self._order[position] != seen:
            del self._order[position:]  # another kind of pass: record it anew from here
        if position == len(self._order):
            self._order.append(seen)
        for ahead in range(position + 1, min(position + 1 + _AHEAD, len(self._order))):
            self._prefetch(ahead)
        torch.cuda.current_stream(self.device).wait_event(self._arrived[position][1])
        return self._layers[layer].views(self._slot(position), option)

    def _leave(self, position: int) -> None:
        """Record an event after the last use of a position's slot."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._left[position] = event

    def _prefetch(self, position: int) -> None:
        layer, everything = self._order[position]
        choice = None if everything else self._layers[layer].choice
        if not everything and (choice is None or not self._layers[layer].streams(choice)):
            return
        request = _Request(layer, choice)
        if position not in self._arrived or self._arrived[position][0] != request:
            self._copy(position, request)

    def _copy(self, position: int, request: _Request) -> None:
        source = self._layers[request.layer]
        # The slot was last read by the request STREAM_SLOTS before, or in the pass before this one.
        free = self._left.get(position - STREAM_SLOTS if position >= STREAM_SLOTS else -1)
        if free is not None:
            self._copies.wait_event(free)
        target = self._slot(position)
        with torch.cuda.stream(self._copies):
            start, stop = source.span(request.option)
            target[start:stop].copy_(source.host[start:stop], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._copies)
        self._arrived[position] = (request, event)
        for old in [p for p in self._arrived if p < position - STREAM_SLOTS]:
            del self._arrived[old]
        for old in [p for p in self._left if 0 <= p < position - 2 * STREAM_SLOTS]:
            del self._left[old]

    def _slot(self, position: int) -> Tensor:
        index = position % STREAM_SLOTS
        size = max(layer.host.nbytes for layer in self._layers)
        slot = self._slots[index]
        if slot is None or slot.numel() < size:
            slot = self._slots[index] = torch.empty(size, dtype=torch.uint8, device=self.device)
            # The memory may have belonged to a tensor that launched kernels still read.
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
            slot.record_stream(self._copies)
        return slot


class StreamedOptions(Sequence[Option]):
    """The options of one layer, fetched when they are indexed.

    Attributes:
        host: All packed options in one pinned buffer.
        choice: The option that the next forward pass will request, if known.
    """

    def __init__(self, stream: OptionStream, index: int, options: Sequence[Option]) -> None:
        self._stream, self._index = stream, index
        self.choice: int | None = None
        packed = [option for option in options if isinstance(option, Stored)]
        together = iter(packed if _together(packed) else pinned(packed))
        self._options = [option if isinstance(option, Tensor) else next(together) for option in options]
        self.rules = activation_rules(self._options)
        parts = [part for option in self._options if isinstance(option, Stored) for part in _parts(option)]
        if not parts:
            raise ValueError(
                "There is no packed option to stream; keep a layer of dense options on the device."
            )
        self.host = torch.empty(0, dtype=torch.uint8).set_(parts[0].untyped_storage())

    def __len__(self) -> int:
        return len(self._options)

    def __getitem__(self, index: int) -> Option:  # type: ignore[override]
        option = self._options[index]
        if not self.streams(index):
            return option
        fetched = self._stream.fetch(self._index, index)[index]
        assert fetched is not None
        return fetched

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the layer."""
        rows, columns = self._options[0].shape
        return rows, columns

    @property
    def device(self) -> torch.device:
        """Device that uses the options."""
        return self._stream.device

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed options."""
        return sum(option.nbytes for option in self._options if isinstance(option, Stored))

    def all(self) -> list[Option]:
        """Every option on the device."""
        fetched = self._stream.fetch(self._index, None)
        return [
            option if isinstance(option, Tensor) else view  # type: ignore[misc]
            for option, view in zip(self._options, fetched, strict=True)
        ]

    def streams(self, option: int) -> bool:
        """Whether an option is packed, and so in host memory."""
        weight = self._options[option]
        return isinstance(weight, Stored) and bool(weight.tensors)

    def span(self, option: int | None) -> tuple[int, int]:
        """Bytes of the host buffer that a request needs."""
        if option is None:
            return 0, self.host.nbytes
        weight = self._options[option]
        assert isinstance(weight, Stored)
        places = [(_place(part), part.nbytes) for part in _parts(weight)]
        return min(at for at, _ in places), max(at + size for at, size in places)

    def views(self, slot: Tensor, option: int | None) -> list[Stored | None]:
        """The fetched options as packed weights over a device buffer."""
        return [
            None if isinstance(weight, Tensor) or option not in (None, index) else _over(weight, slot)
            for index, weight in enumerate(self._options)
        ]


def pinned(options: Sequence[StoredT]) -> list[StoredT]:
    """The same weights in one contiguous buffer of pinned host memory."""
    sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for option in options for part in _parts(option)]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    place, moved = 0, []
    for option in options:
        copies = {}
        for name, part in option.tensors.items():
            copy = host[place : place + part.nbytes].view(part.dtype).view(part.shape)
            copies[name] = copy.copy_(part)
            place += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        moved.append(option.over(copies))
    return moved


def pinned_together(
    options: Mapping[str, Mapping[str, StoredT]],
) -> dict[str, dict[str, StoredT]]:
    """The same by the names of weights and options, all in one buffer that a layer fetches at once."""
    moved = iter(pinned([option for listed in options.values() for option in listed.values()]))
    return {name: {label: next(moved) for label in listed} for name, listed in options.items()}


def activation_rules(options: Sequence[Option]) -> list[ActivationRule | None]:
    """Rounding of a layer's inputs under each of its options."""
    return [None if isinstance(option, Tensor) else option.format.input_rule(option) for option in options]


def _parts(weight: Stored) -> list[Tensor]:
    return list(weight.tensors.values())


def _together(options: Sequence[Stored]) -> bool:
    parts = [part for option in options for part in _parts(option)]
    homes = {part.untyped_storage().data_ptr() for part in parts}
    return len(homes) == 1 and (parts[0].is_pinned() or not torch.cuda.is_available())


def _place(part: Tensor) -> int:
    return int(part.storage_offset()) * part.element_size()


def _over(weight: Stored, slot: Tensor) -> Stored:
    return weight.over(
        {
            name: slot[_place(part) : _place(part) + part.nbytes].view(part.dtype).view(part.shape)
            for name, part in weight.tensors.items()
        }
    )
