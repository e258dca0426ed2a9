"""Temporary replacement of a model's layers by switchable ones, and checkpointing of its blocks.

Everything here is a context manager: on exit, also after an exception, all modules and flags of the model are
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rco.core.async_copy import send
from rco.formats.base import Stored
from rco.formats.streaming import OptionStream
from rco.formats.switchable import Selection, SwitchableLinear, WeightBuffer
from rco.formats.switchable_embedding import SwitchableEmbedding

__all__ = [
    "GatedModel",
    "checkpointed_blocks",
    "frozen",
    "gate_choices",
    "make_switchable",
    "parked",
    "switchable_model",
]

_ONE_HOT_TOLERANCE = 1e-6  # straight-through gates carry rounding of this size at most


def make_switchable(
    module: nn.Module, options: Sequence[Stored | None], stream: OptionStream | None = None
) -> SwitchableLinear:
    """The switchable replacement of an ``nn.Linear`` or ``Conv1D``; None is the module's own weight.

    With a ``stream`` the packed options are kept in host memory.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TypeError(f"Only linear layers can be switchable, got {type(module).__name__}.")
    # Conv1D is recognised by name so that models without it need not import it.
    transposed = type(module).__name__ == "Conv1D"
    if not transposed and not isinstance(module, nn.Linear):
        raise TypeError(f"Only nn.Linear and Conv1D can be switchable, got {type(module).__name__}.")
    bias = getattr(module, "bias", None)
    return SwitchableLinear(options, weight, bias, transposed=transposed, stream=stream)


class GatedModel:
    """A model whose switchable layers are driven by one matrix of gates.

    Args:
        model: The model with the layers in place.
        modules: Layer name -> switchable layer.
        stream: The stream that copies their options from host memory, if they are there.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, SwitchableLinear | SwitchableEmbedding],
        stream: OptionStream | None = None,
    ) -> None:
        self.model = model
        self.modules = dict(modules)
        self.stream = stream
        self._places: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def set_gates(
        self,
        gates: Tensor,
        group_of: Mapping[str, int],
        *,
        active: Tensor | Sequence[Sequence[bool]] | None = None,
        choices: list[int] | None = None,
        recorded: bool = False,
    ) -> list[int]:
        """Set every layer to the option chosen by its row of the gates.

        Args:
            gates: (N, K); rows are one-hot and may carry gradient. Unless ``choices`` are given they are read here,
                which waits for their device.
            group_of: Layer name -> row, for every switchable layer. Layers that share a row share the choice, and
                their gradients add.
            active: (N, K) bool, options that need a gradient; the others get exactly zero.
            choices: The result of :func:`gate_choices`, if the caller has it already.
            recorded: The layers read their choices from the gates when they run, so that their launches can be
                recorded and replayed with other gates; see :meth:`recordable`.

        Returns:
            The choice of every row.
        """
        self._check(gates, group_of, active)
        choices = gate_choices(gates) if choices is None else choices
        if active is None:
            wanted: Sequence[Sequence[bool] | None] = [None] * len(choices)
        else:
            wanted = active.tolist() if isinstance(active, Tensor) else active
        taken: dict[torch.device, dict[int, Tensor]] = {}
        places = gates.detach().argmax(1).unbind() if recorded else None
        for name, module in self.modules.items():
            device, row = module.device, group_of[name]
            if device not in taken:
                taken[device] = self._rows_on(device, gates, group_of)
            place = None if places is None else places[row]
            module.select(choices[row], taken[device][row], wanted[row], place)
        if self.stream is not None:
            self.stream.restart()
        return choices

    def recordable(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`set_gates` supports ``recorded`` when the model computes in a type."""
        return all(module.supports_device_choice(dtype) for module in self.modules.values())

    def _rows_on(self, device: torch.device, gates: Tensor, group_of: Mapping[str, int]) -> dict[int, Tensor]:
        """Rows of the gates for the layers of a device, on that device."""
        # One unbind for all layers of a device: the gradient is assembled once, not once per layer. Rows of
        # experts, of which there may be thousands, are left out: each would be an unused Python object.
        dtype = torch.float32 if device.type == "mps" else gates.dtype
        there = send(gates.to(dtype), device)
        rows = tuple(sorted({group_of[name] for name, each in self.modules.items() if each.device == device}))
        if len(rows) < len(gates):
            if (device, rows) not in self._places:  # once, not for every sample
                self._places[device, rows] = send(torch.tensor(rows), device)
            there = there.index_select(0, self._places[device, rows])
        return dict(zip(rows, there.unbind(), strict=True))

    def clear(self) -> None:
        """Drop the gates, and any autograd graph that they belong to; every layer keeps its choice."""
        for module in self.modules.values():
            module.selection = Selection(module.selection.choice)

    def _check(
        self, gates: Tensor, group_of: Mapping[str, int], active: Tensor | Sequence[Sequence[bool]] | None
    ) -> None:
        if gates.ndim != 2 or not gates.is_floating_point():
            raise ValueError(
                f"gates must be floats of shape (groups, options), got {gates.dtype} {tuple(gates.shape)}."
            )
        missing = [name for name in self.modules if name not in group_of]
        if missing:
            raise ValueError(
                f"{len(missing)} switchable layers have no row of the gates, the first is {missing[0]!r}; "
                "group_of must name every layer."
            )
        count, options = gates.shape
        for name, module in self.modules.items():
            if not 0 <= group_of[name] < count:
                raise ValueError(
                    f"Layer {name!r} has row {group_of[name]} of the gates; rows are 0 to {count - 1}."
                )
            if len(module.options) != options:
                raise ValueError(
                    f"Layer {name!r} has {len(module.options)} options, the gates have {options} columns."
                )
        if isinstance(active, Tensor) and active.shape != gates.shape:
            raise ValueError(
                f"active must have the shape of the gates, {tuple(gates.shape)}; got {tuple(active.shape)}."
            )


@contextmanager
def switchable_model(
    model: nn.Module,
    modules: Mapping[str, SwitchableLinear | SwitchableEmbedding],
    *,
    freeze: bool = True,
    stream: OptionStream | None = None,
) -> Iterator[GatedModel]:
    """Replace the named layers of a model for the duration of the context.

    All of them share one buffer for dense weights. With ``freeze`` the model is also in evaluation mode and none of
    its parameters requires a gradient, so that a backward pass computes only what the gates need.

    Args:
        model: Any module; its layers are restored on exit.
        modules: Name, as in ``model.named_modules()``, -> switchable layer (see :func:`make_switchable`).
        freeze: Freeze the parameters and switch to evaluation mode inside the context.
        stream: The stream that the layers were made with, if their options are in host memory.
    """
    places = [(*_locate(model, name), module) for name, module in modules.items()]
    buffer = WeightBuffer()
    gated = GatedModel(model, modules, stream)
    with ExitStack() as stack:
        if freeze:
            stack.enter_context(frozen(model))
        stack.callback(buffer.clear)
        stack.callback(gated.clear)
        for parent, attribute, module in places:
            stack.callback(setattr, parent, attribute, getattr(parent, attribute))
            stack.callback(setattr, module, "buffer", module.buffer)
            module.buffer = buffer
            module.train(model.training)
            setattr(parent, attribute, module)
        yield gated


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Context in evaluation mode without parameter gradients; all flags are restored on exit."""
    training = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        yield model
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)


@contextmanager
def parked(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context that keeps some weights in host memory, since a search over packed options never reads them.

    Weights that other modules share (a tied output layer) must not be among them.
    """
    homes: list[tuple[nn.Parameter, torch.device]] = []
    try:
        for weight in weights:
            homes.append((weight, weight.device))
            weight.data = weight.data.to("cpu")
        yield
    finally:
        for weight, device in homes:
            weight.data = weight.data.to(device)


@contextmanager
def checkpointed_blocks(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which each block keeps only its input and recomputes the rest in the backward pass.

    The choices of linears are those of the forward pass even if they have changed since, so that the losses of
    several assignments may be summed before one backward pass; those of experts are the present ones. Without
    gradients the blocks run unchanged. Install switchable layers before.
    """
    with ExitStack() as stack:
        for block in blocks:
            own = block.__dict__.get("forward")  # set by hooks of other libraries, for instance
            if own is None:
                stack.callback(block.__dict__.pop, "forward", None)
            else:
                stack.callback(block.__dict__.__setitem__, "forward", own)
            block.__dict__["forward"] = _checkpointing(block, block.forward)
        yield


def _checkpointing(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    switchable = [module for module in block.modules() if isinstance(module, SwitchableLinear)]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Recognised by its type, not by name: some architectures pass the cache by position.
        if any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values())):
            raise ValueError(
                f"A checkpointed {type(block).__name__} would write to its key-value cache twice; "
                "call the model with use_cache=False."
            )
        selections = [module.selection for module in switchable]

        def replay(*args: Any, **kwargs: Any) -> Any:
            current = [module.selection for module in switchable]
            if all(now is then for now, then in zip(current, selections, strict=True)):
                return forward(*args, **kwargs)
            _restore(switchable, selections)
            try:
                return forward(*args, **kwargs)
            finally:
                _restore(switchable, current)

        # The state of random numbers is saved only if something draws them.
        return checkpoint(replay, *args, use_reentrant=False, preserve_rng_state=block.training, **kwargs)

    return run


def _restore(modules: Sequence[SwitchableLinear], selections: Sequence[Selection]) -> None:
    for module, selection in zip(modules, selections, strict=True):
        module.selection = selection


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent_name, _, attribute = name.rpartition(".")
    try:
        parent = model.get_submodule(parent_name)
        parent.get_submodule(attribute)
    except AttributeError as error:
        raise KeyError(f"The model has no layer {name!r}: {error}.") from error
    return parent, attribute


def gate_choices(gates: Tensor) -> list[int]:
    """The option chosen by each row of the gates (N, K)."""
    values = gates.detach().cpu()
    indices = values.argmax(1)
    target = torch.zeros_like(values).scatter_(1, indices.unsqueeze(1), 1.0)
    one_hot = ((values - target).abs() <= _ONE_HOT_TOLERANCE).all(1)
    if not bool(one_hot.all()):
        row = int((~one_hot).nonzero()[0])
        raise ValueError(
            f"Row {row} of the gates is not one-hot: {values[row].tolist()}. Pass one-hot gates; they may carry "
            "gradient."
        )
    found: list[int] = indices.tolist()
    return found
