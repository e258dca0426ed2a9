"""The experts of one layer at every option: decoded at one each, and met with the gradients of their weights.

A layer's experts are two stacks of matrices: gate and up below each other, and down. Every option is one packed
weight for a whole stack, so that a layer of hundreds of experts decodes in one launch on a GPU, elsewhere in a pass
per option, and multiplies in one grouped product. The gradients ``G`` of the experts' weights are formed once,
stacked as well, and meet all options in their packed form: ``<G, W_k>`` for every expert, projection and option in
one pass over ``G``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rco.core.transfer import send_together
from rco.formats.base import Stored
from rco.formats.stacks import ChosenSegments, by_option, decode_segments
from rco.formats.streaming import OptionStream, StreamedOptions
from rco.formats.switchable import LayerOptions, WeightBuffer
from rco.models.moe.experts import ExpertWeights, expert_weights
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import original_stacks

__all__ = ["ExpertOptions", "PlacedChoices", "SelectedExperts"]


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
        stream: Brings the packed options of both stacks from host memory, where they then are.
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
        # Not the weights themselves: where packed options alone are read, they may leave the device.
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
        """K."""
        return len(self.up)

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in at present."""
        return original_stacks(self.layer)[0].dtype

    def own(self) -> ExpertWeights:
        """The layer's own weights, an expert's up below its gate."""
        up, down = original_stacks(self.layer)
        return self._arranged(up.flatten(1, 2), down.flatten(1, 2))

    def follows_places(self, dtype: torch.dtype) -> bool:
        """Whether choices may be numbers on the device alone, the layer computing in a type."""
        if self._streamed is not None or self._reorders_own():
            return False
        everything = range(self.num_options)
        known = self._known(everything, everything)
        return all(options.chosen_decoder(dtype) is not None for options in known)

    def decode(self, placed: PlacedChoices) -> ExpertWeights:
        """The weights with every gate, up and down at its option; valid until the buffer is used again."""
        dense, dtype, places = [], self.dtype, (placed.up, placed.down)
        # Of numbers on the device the host knows nothing: any option may be among them.
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
        """Whether all of some options are the layer's own weights, which are there and need not be decoded."""
        return all(self.up[k] is None and self.down[k] is None for k in np.unique(choices).tolist())

    def _known(self, up: Collection[int], down: Collection[int]) -> list[LayerOptions]:
        """Both stacks with the layer's own weights in their place, and what is worked out about them once.

        Own weights that are in another order are copied, where they are among the options that will be read.
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
            # In the place of own weights that nobody reads, so that they are not copied: any other option.
            there: Stored | Tensor | None = next((option for option in listed if option is not None), None)
            if there is None or (None in listed and (not copies or any(listed[k] is None for k in read))):
                there = stack.reshape(-1, stack.shape[3])
            filled = [there if option is None else option for option in listed]
            made.append(LayerOptions(filled, stack.shape[0] * stack.shape[1]))
        if self._streamed is None and not copies:  # streamed ones are elsewhere the next time
            self._remembered = own, made
        return made

    def _reorders_own(self) -> bool:
        """Whether the layer's own weights are an option, and lie in another order than the options."""
        stacks = zip(original_stacks(self.layer), (self.up, self.down), strict=True)
        return any(None in options and not stack.is_contiguous() for stack, options in stacks)

    def _arranged(self, up: Tensor, down: Tensor) -> ExpertWeights:
        """Stacks (experts, out, in) as weights that multiply from the right, biases and activation to match."""
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
    """One layer's choices on its device, so that no pass over it has to send them.

    Attributes:
        choices: (experts, 3) option of every projection.
        up: Options of gates and ups: sorted out by the host, or (experts x 2,) numbers that only the device knows.
        down: The same for down, (experts,).
    """

    choices: Tensor
    up: ChosenSegments | Tensor
    down: ChosenSegments | Tensor

    @classmethod
    def of(cls, choices: NDArray[np.int64], device: torch.device) -> PlacedChoices:
        """The choices (experts, 3) of one layer, sorted out and sent to its device."""
        (placed,) = cls.sent([choices], [True], device)
        return placed

    @classmethod
    def sent(
        cls, choices: Sequence[NDArray[np.int64]], sorted_out: Sequence[bool], device: torch.device
    ) -> list[PlacedChoices]:
        """Those of several layers, by one copy; layers that follow them there need not have them sorted out."""
        stacks = [
            [taken[:, :2].reshape(-1), taken[:, 2]] if sort else []
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
        """Choices (experts, 3) that are where the layer is, for one that follows them there."""
        return cls(choices, choices[:, :2].reshape(-1), choices[:, 2].contiguous())


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
