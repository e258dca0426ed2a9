"""A model whose quantized weights are trained in place, through the differentiable decoding of their formats.

The model's own parameters hold the decoded weights and collect their gradients, so a forward and a backward pass
cost what they cost for any model. The gradient of a weight is passed on to the codes and scales behind it, one
weight at a time: where only scales are trained, during the backward pass, which then keeps no gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rco.formats.base import AdamState, AdamStep, Stored, Tunable, TunableKernels
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import ExpertLinear, expert_matrices, model_linears, stacked_parameters
from rco.models.moe.trained_experts import trained_experts
from rco.models.rounded_inputs import rounded_inputs
from rco.models.switchable_model import frozen

__all__ = ["MakeTunable", "TunableModel", "TunableWeight", "format_tunable", "tunable_model"]

MakeTunable = Callable[[Stored, Tensor | None, bool], Tunable | None]
"""From a stored weight, the original one and whether codes are trained, to its trainable form."""


def format_tunable(stored: Stored, original: Tensor | None, codes: bool) -> Tunable | None:
    """The trainable form that the weight's format defines."""
    return stored.format.tunable(stored, original, codes=codes)


@dataclass(eq=False)
class TunableWeight:
    """One weight of the model, or the experts of one format in a stack, with its trainable form.

    Attributes:
        names: Linears whose rows are stacked in ``tunable``, in this order.
        parameter: The model's parameter that holds the decoded weight.
        tunable: The trainable form; None if the format has none.
        stored: The weight before training, all linears stacked.
        places: The matrices in the parameter: a function from a tensor of its shape to (matrices, out, in).
        put: Writes (matrices, out, in) to a tensor of the parameter's shape.
        block: Block of the model; None for the output layer.
        layer: Sparse layer of experts; None for other weights.
        collected: Gradients of the trainable parameters so far, where codes are not trained.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    tunable: Tunable | None
    stored: Stored
    places: Callable[[Tensor], Tensor]
    put: Callable[[Tensor, Tensor], None]
    block: int | None
    layer: MoELayer | None = None
    collected: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> TunableKernels | None:
        """Kernels of a training step; None: it is made of torch operations."""
        return None if self.tunable is None else self.tunable.kernels()

    @property
    def trains_codes(self) -> bool:
        """Whether there is a trained parameter for every code."""
        return self.tunable is not None and any(name in self.tunable.spacing for name in self.trained)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        if self.tunable is None:
            return {}
        return {name: each for name, each in self.tunable.named_parameters() if each.requires_grad}

    def rates(self, code_rate: float, scale_rate: float) -> dict[str, float]:
        """Learning rate of every parameter, both in steps of the grid.

        A scale multiplies codes up to half the grid away from its zero: its rate is the change of such a weight.
        """
        assert self.tunable is not None
        spacing, farthest = self.tunable.spacing, 2.0 ** (self.stored.format.bits - 1)
        return {
            name: code_rate * spacing[name]
            if name in spacing
            else scale_rate / farthest * float(each.detach().abs().float().mean())
            for name, each in self.trained.items()
        }

    @torch.no_grad()
    def decode(self) -> None:
        """Write the present weight to the model."""
        if self.kernels is not None:
            with self._target() as out:
                self.kernels.decode(out)
            return
        dense = self.stored.dequantize() if self.tunable is None else self.tunable()
        self._put(dense)

    def _put(self, dense: Tensor) -> None:
        self.put(
            self.parameter.data, dense.view(len(self.names), -1, dense.shape[1]).to(self.parameter.dtype)
        )

    @contextmanager
    def _target(self) -> Iterator[Tensor]:
        """A contiguous matrix whose values are the weight's after the context: the parameter itself if possible."""
        data = self.parameter.data
        matrix = self.places(data)
        if matrix.data_ptr() == data.data_ptr() and matrix.is_contiguous():
            yield matrix.view(self.stored.shape)
            return
        out = torch.empty(self.stored.shape, dtype=data.dtype, device=data.device)
        yield out
        self._put(out)

    def _slope(self) -> Tensor:
        """Gradient of the decoded matrix, all linears stacked."""
        assert self.parameter.grad is not None
        return self.places(self.parameter.grad).reshape(self.stored.shape)

    def _passed_on(self) -> dict[str, Tensor]:
        """Gradients of the trainable parameters, from that of the model's parameter; empty if it has none."""
        parameters = self.trained
        if self.parameter.grad is None or self.tunable is None or not parameters:
            return {}
        if self.kernels is not None and not self.trains_codes:
            return self.kernels.gradients(self._slope())
        with torch.enable_grad():
            decoded: Tensor = self.tunable()
            of_parts = torch.autograd.grad(
                decoded, list(parameters.values()), self._slope().to(decoded.dtype)
            )
        return dict(zip(parameters, of_parts, strict=True))

    def collect(self) -> None:
        """Add the gradients from that of the model's parameter to those collected."""
        for name, gradient in self._passed_on().items():
            before = self.collected.get(name)
            self.collected[name] = gradient if before is None else before.add_(gradient)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the trainable parameters: those collected, or from that of the model's parameter."""
        return self.collected or self._passed_on()

    def clear_gradients(self) -> None:
        """Free the gradient of the model's parameter and those collected."""
        self.parameter.grad = None
        self.collected.clear()

    def adam(self, state: Mapping[str, AdamState], step: AdamStep) -> bool:
        """Step of Adam on codes and scales by one kernel, and decode; False if there is no such kernel."""
        if self.kernels is None or not self.trains_codes or self.parameter.grad is None:
            return False
        with self._target() as out:
            self.kernels.adam(self._slope(), out, state, step)
        return True

    def weights(self) -> dict[str, Stored]:
        """The stored weight of every linear at the present parameters."""
        stored = self.stored if self.tunable is None else self.tunable.stored()
        rows = stored.shape[0] // len(self.names)
        if len(self.names) == 1:
            return {self.names[0]: stored}
        return {
            name: stored.rows(number * rows, (number + 1) * rows) for number, name in enumerate(self.names)
        }


class TunableModel:
    """A model inside :func:`tunable_model`.

    Attributes:
        loaded: The model.
        weights: Its quantized weights.
    """

    def __init__(self, loaded: LoadedModel, weights: Sequence[TunableWeight]) -> None:
        self.loaded, self.weights = loaded, list(weights)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All trainable parameters by a unique name."""
        return {
            f"{weight.names[0]}|{name}": parameter
            for weight in self.weights
            for name, parameter in weight.trained.items()
        }

    def train(self, mode: bool) -> None:
        """Set training mode of the tunables, in which some relax their grid, and decode all weights."""
        for weight in self.weights:
            if weight.tunable is not None and weight.tunable.training != mode:
                weight.tunable.train(mode)
        self.decode()

    def anneal(self, progress: float) -> None:
        """Tell the tunables the finished share of the training, and decode those that change by it."""
        for weight in self.weights:
            if weight.tunable is not None and weight.tunable.anneal(progress):
                weight.decode()

    def decode(self) -> None:
        """Write all present weights to the model."""
        for weight in self.weights:
            weight.decode()

    def clear_gradients(self) -> None:
        """Free the gradients of all weights."""
        for weight in self.weights:
            weight.clear_gradients()

    def collecting(self) -> list[RemovableHandle]:
        """Pass gradients on to the scales during the backward pass, for parameters of which no code is trained."""
        sharing: dict[nn.Parameter, list[TunableWeight]] = {}
        for weight in self.weights:
            if weight.trained:
                sharing.setdefault(weight.parameter, []).append(weight)
        handles = []
        for parameter, weights in sharing.items():
            if any(weight.trains_codes for weight in weights):
                continue

            def collect(parameter: Tensor, weights: Sequence[TunableWeight] = weights) -> None:
                for weight in weights:
                    weight.collect()
                parameter.grad = None

            handles.append(parameter.register_post_accumulate_grad_hook(collect))  # type: ignore[no-untyped-call]
        return handles

    def stored(self) -> dict[str, Stored]:
        """The stored weight of every linear at the present parameters."""
        return {name: each for weight in self.weights for name, each in weight.weights().items()}


@contextmanager
def tunable_model(
    loaded: LoadedModel,
    weights: Mapping[str, Stored],
    *,
    codes: Callable[[Stored], bool],
    make: MakeTunable = format_tunable,
    blocks: Sequence[int] | None = None,
) -> Iterator[TunableModel]:
    """Replace a model's weights by trainable quantized ones; leaving restores it.

    Inputs are rounded where the format of a weight does. On a GPU the original weights are in host memory.

    Args:
        loaded: The model without pruned experts, in the type to compute in.
        weights: Stored weights by linear, as :func:`rco.compression.deployment.deploy` returns them.
        codes: Whether the codes of a weight are trained; its scales always are.
        make: Makes the trainable form of a weight.
        blocks: Blocks whose weights are trained; the others are replaced all the same. None: all.
    """
    places = _weights_of(loaded, weights, codes, make, blocks)
    handles: list[RemovableHandle] = []
    held: dict[int, tuple[nn.Parameter, Tensor]] = {}
    sparse = {id(layer): layer for layer in (weight.layer for weight in places) if layer is not None}
    rounding = rounded_inputs(loaded.model, weights)
    with frozen(loaded.model), trained_experts(sparse.values()), rounding:
        try:
            for weight in places:
                parameter = weight.parameter
                if id(parameter) not in held:
                    dense = torch.empty_like(parameter.data)
                    dense.copy_(parameter.data)  # experts that are not quantized keep their values
                    original = parameter.data
                    held[id(parameter)] = (parameter, original.to("cpu") if original.is_cuda else original)
                    parameter.data = dense
                if weight.trained:
                    parameter.requires_grad_(True)
            model = TunableModel(loaded, places)
            model.train(False)  # weights as they are stored, until a training begins
            handles = model.collecting()
            yield model
        finally:
            for handle in handles:
                handle.remove()
            for parameter, original in held.values():
                parameter.grad = None
                parameter.data = original.to(parameter.device)


def _weights_of(
    loaded: LoadedModel,
    weights: Mapping[str, Stored],
    codes: Callable[[Stored], bool],
    make: MakeTunable,
    blocks: Sequence[int] | None,
) -> list[TunableWeight]:
    """The quantized weights of the model, the experts of a stack together if they have one format."""
    listed = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    linears = {info.name: info for info in listed}
    together: dict[Any, list[LinearInfo]] = {}
    for name, stored in weights.items():
        info = linears[name]
        key = (info.stored_in, stored.format.name) if isinstance(info, ExpertLinear) else name
        together.setdefault(key, []).append(info)
    found = []
    for members in together.values():
        parameter, read, put = _place(members)
        parts = [weights[info.name].to(parameter.device) for info in members]
        stored = parts[0] if len(parts) == 1 else parts[0].format.stack(parts)
        tunable = None
        if blocks is None or members[0].block in blocks:
            with torch.no_grad():
                original = torch.cat([info.weight.detach().float() for info in members])
                tunable = make(stored, original, codes(stored))
        names = tuple(info.name for info in members)
        layer = members[0].layer if isinstance(members[0], ExpertLinear) else None
        found.append(TunableWeight(names, parameter, tunable, stored, read, put, members[0].block, layer))
    return found


def _place(
    members: Sequence[LinearInfo],
) -> tuple[nn.Parameter, Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], None]]:
    """Parameter of some linears, and how their matrices (matrices, out, in) are read from and written to it."""
    first = members[0]
    if not isinstance(first, ExpertLinear):
        turned = first.transposed

        def read(tensor: Tensor) -> Tensor:
            return (tensor.T if turned else tensor).unsqueeze(0)

        def put(tensor: Tensor, values: Tensor) -> None:
            (tensor.T if turned else tensor).copy_(values[0])

        return first.module.get_parameter("weight"), read, put
    layer, down = first.layer, first.projection == "down"
    parameter = stacked_parameters(layer)[int(down)]
    experts = torch.tensor([info.expert for info in members if isinstance(info, ExpertLinear)])
    parts = torch.tensor([info.part for info in members if isinstance(info, ExpertLinear)])
    index = experts.to(parameter.device), parts.to(parameter.device)

    def read_experts(tensor: Tensor) -> Tensor:
        return expert_matrices(layer, tensor, down)[index]

    def put_experts(tensor: Tensor, values: Tensor) -> None:
        expert_matrices(layer, tensor, down)[index] = values

    return parameter, read_experts, put_experts
