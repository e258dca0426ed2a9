"""A linear layer that can be any one of K compressed versions of itself, with a gradient for every option.

With gates ``g`` (one per option) the layer computes ``y = x @ (sum_k g_k W_k).T + b``. At a one-hot ``g`` the
forward pass needs the chosen ``W`` alone, and the derivative with respect to ``g_k`` is ``<G, W_k>`` where
``G`` is the gradient of the effective weight: one matrix, formed once, for the inner products with all K
options in their packed form. No option is kept dense, and no dense matrix outlives the layer's forward or backward.

An option that rounds its inputs to ``r(x)`` adds ``<dL/dx, r(x) - x>``, the gradient of the inputs times their
change. That is exact for the chosen option. For another one it leaves out the rounding of the inputs times the
difference of the two weights, a product of two small numbers, and so needs no second ``G``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rco.core.async_copy import send
from rco.formats.base import ActivationRule, Stored
from rco.formats.coded import CodedWeight, on_triton_path
from rco.formats.input_rounding import InputRounding, change_along
from rco.formats.products import Option, OptionProducts, unwrapped
from rco.formats.streaming import OptionStream, StreamedOptions, activation_rules

__all__ = [
    "LayerOptions",
    "Selection",
    "SwitchableLayer",
    "SwitchableLinear",
    "WeightBuffer",
    "check_selection",
    "fresh_weight",
    "switchable_linear",
]


class WeightBuffer:
    """Memory for one dense weight at a time, shared by layers.

    Each request overwrites the previous weight: a returned tensor is valid until the next request.
    The layers of one model may share a buffer because they run one after the other.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}
        self._views: dict[tuple[tuple[int, int], torch.dtype, torch.device, int], Tensor] = {}

    def take(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, slot: int = 0) -> Tensor:
        """An uninitialised (out, in) matrix; different slots are different memory."""
        view = self._views.get((shape, dtype, device, slot))
        if view is not None:
            return view
        elements, key = shape[0] * shape[1], (device, dtype, slot)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < elements:
            # Freed before the larger one is made, so that the two never coexist.
            self._views.clear()
            self._flat.pop(key, None)
            del flat
            flat = self._flat[key] = torch.empty(elements, dtype=dtype, device=device)
        view = self._views[shape, dtype, device, slot] = flat[:elements].view(shape)
        return view

    @property
    def nbytes(self) -> int:
        """Bytes held at present."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def clear(self) -> None:
        """Free the memory."""
        self._views.clear()
        self._flat.clear()


class LayerOptions:
    """A layer's options, with everything that is prepared for them once.

    Args:
        options: K weights of one shape.
        parts: Number of stacked matrices in each of them, each with its own choice and products.

    Attributes:
        rules: Rounding of the inputs under each option.
        roundings: Every distinct rounding with the indices of its options; those without one are in none.
    """

    def __init__(self, options: Sequence[Option], parts: int = 1) -> None:
        self.streamed = options if isinstance(options, StreamedOptions) else None
        self.listed: Sequence[Option] = (
            options if self.streamed is not None else [unwrapped(option) for option in options]
        )
        self.parts = parts
        placed = (each for each in self.listed if isinstance(each, Tensor) or each.tensors)
        first = self.streamed if self.streamed is not None else next(placed, self.listed[0])
        rows, columns = first.shape
        self.shape, self.device = (rows, columns), first.device
        self.rules = self.streamed.rules if self.streamed is not None else activation_rules(self.listed)
        self.roundings = [
            (rule, [index for index, other in enumerate(self.rules) if other == rule])
            for rule in dict.fromkeys(self.rules)
            if rule is not None
        ]
        self._rule_numbers: Tensor | None = None  # on the device, for choices there
        self._products: dict[tuple[bool, ...] | None, OptionProducts] = {}
        self._chosen: dict[torch.dtype, Callable[[Tensor, Tensor], None] | None] = {}

    def products(self, active: tuple[bool, ...] | None) -> OptionProducts:
        """Inner products with the active options."""
        if self.streamed is not None:  # at another address every time
            return OptionProducts(_only(self.streamed.all(), active), self.parts)
        found = self._products.get(active)
        if found is None:
            found = self._products[active] = OptionProducts(_only(self.listed, active), self.parts)
        return found

    def chosen_decoder(self, dtype: torch.dtype) -> Callable[[Tensor, Tensor], None] | None:
        """Kernel that decodes, for each part, the option whose index is on the device; None if there is none."""
        if dtype not in self._chosen:
            self._chosen[dtype] = None
            fused = (
                [each for each in self.listed if isinstance(each, CodedWeight | Tensor)]
                if self.streamed is None
                else []
            )
            tensors = [each if isinstance(each, Tensor) else each.packed for each in fused]
            if (
                tensors
                and len(tensors) == len(self.listed)
                and all(map(on_triton_path, tensors))
                and self._rounds_by_choice(dtype)
            ):
                from rco.formats import integer_kernels_gpu

                self._chosen[dtype] = integer_kernels_gpu.chosen_decoder(fused, dtype, self.shape, self.parts)
        return self._chosen[dtype]

    def _rounds_by_choice(self, dtype: torch.dtype) -> bool:
        """Whether a kernel rounds inputs of a type by a choice on the device, or none are rounded."""
        if not self.roundings:
            return True
        from rco.formats import input_kernels_triton

        numbers = [-1] * len(self.rules)
        for number, (_, members) in enumerate(self.roundings):
            for index in members:
                numbers[index] = number
        self._rule_numbers = send(torch.tensor(numbers, dtype=torch.int32), self.device)
        return all(
            isinstance(rule, InputRounding) and input_kernels_triton.takes_rows(rule, self.shape[1], dtype)
            for rule, _ in self.roundings
        )

    def rounded(self, x: Tensor, selection: Selection) -> Tensor:
        """Inputs as the selected option rounds them."""
        if selection.place is None or not self.roundings:
            rule = self.rules[selection.choice]
            return x if rule is None else rule(x)
        from rco.formats import input_kernels_triton

        assert self._rule_numbers is not None, "made with the kernel that decodes by a choice on the device"
        rules = [rule for rule, _ in self.roundings if isinstance(rule, InputRounding)]
        return input_kernels_triton.rounded_by_choice(rules, self._rule_numbers, selection.place, x)


def _only(options: Sequence[Option], active: tuple[bool, ...] | None) -> Sequence[Option | None]:
    if active is None:
        return options
    return [option if wanted else None for option, wanted in zip(options, active, strict=True)]


@dataclass(frozen=True)
class Selection:
    """The option that a switchable layer uses.

    Args:
        choice: Index of the option whose gate is one.
        gate: (K,) gates, needed for a gradient.
        active: Options to compute a gate gradient for; the others get exactly zero. None: all of them.
        place: () the choice as a tensor on the layer's device, which the kernels then read instead, so that a
            recorded launch can be replayed with another choice.
    """

    choice: int
    gate: Tensor | None = None
    active: tuple[bool, ...] | None = None
    place: Tensor | None = None


def switchable_linear(
    x: Tensor,
    options: Sequence[Option],
    selection: Selection,
    bias: Tensor | None = None,
    buffer: WeightBuffer | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with the selected weight; differentiable in ``x``, the gates and the bias.

    Args:
        x: (..., in).
        options: K weights of shape (out, in), stored or dense.
        selection: The choice and its gates.
        bias: (out,) or None.
        buffer: Memory for the dense weight; None allocates it for this call.
    """
    check_selection(options, selection)
    return _linear(
        x, LayerOptions(options), selection, bias, buffer if buffer is not None else WeightBuffer()
    )


def _linear(
    x: Tensor, options: LayerOptions, selection: Selection, bias: Tensor | None, buffer: WeightBuffer
) -> Tensor:
    gate = selection.gate
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (gate is not None and gate.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        y: Tensor = _SwitchableLinear.apply(x, gate, bias, options, selection, buffer)  # type: ignore[no-untyped-call]
        return y
    with torch.no_grad():
        return _chosen_linear(x, options, selection, bias, buffer)


def _chosen_linear(
    x: Tensor, options: LayerOptions, selection: Selection, bias: Tensor | None, buffer: WeightBuffer
) -> Tensor:
    weight = _dense(options, selection, x.dtype, x.device, buffer)
    return F.linear(options.rounded(x, selection), weight, bias)


def _weight(options: LayerOptions, selection: Selection, dtype: torch.dtype) -> Tensor:
    if selection.gate is not None and selection.gate.requires_grad and torch.is_grad_enabled():
        weight: Tensor = _SwitchableWeight.apply(selection.gate, options, selection, dtype)  # type: ignore[no-untyped-call]
        return weight
    return fresh_weight(options, selection, dtype)


class SwitchableLayer(nn.Module):
    """A layer that applies one of its compressed options: what linears and embeddings have in common.

    Options are not parameters: the state dict is empty, and the original weight is referred to, not copied.

    Args:
        options: K stored weights, in any formats; None stands for the original weight.
        dense: The original weight, as options are laid out.

    Attributes:
        selection: The option in use.
        noise: Added to the selected option, to measure the effect of a perturbation.
    """

    def __init__(self, options: Sequence[Stored | None], dense: Tensor) -> None:
        super().__init__()
        if not options:
            raise ValueError("A switchable layer needs at least one option.")
        for index, option in enumerate(options):
            if option is not None and tuple(option.shape) != tuple(dense.shape):
                raise ValueError(
                    f"Option {index} has shape {tuple(option.shape)}, the layer needs {tuple(dense.shape)}, "
                    "one row per output."
                )
        self.options: Sequence[Option] = [
            dense if option is None else unwrapped(option) for option in options
        ]
        self.selection = Selection(0)
        self.noise: Tensor | None = None

    def select(
        self,
        choice: int,
        gate: Tensor | None = None,
        active: Sequence[bool] | None = None,
        place: Tensor | None = None,
    ) -> None:
        """Use option ``choice`` from now on.

        ``choice`` is the index of the gate that is one. It is passed as a number because reading it from
        the gate would make the host wait for the device. A ``gate`` that requires grad receives ``<G, W_k>``.
        ``place`` is the same number as a tensor on the layer's device, for recorded launches.
        """
        selection = Selection(choice, gate, None if active is None else tuple(map(bool, active)), place)
        check_selection(self.options, selection)
        self.selection = selection
        if isinstance(self.options, StreamedOptions):
            self.options.choice = choice  # the one that the stream copies


class SwitchableLinear(SwitchableLayer):
    """Replacement of a linear layer that applies one of its compressed options.

    Args:
        options: K stored weights of shape (out, in), in any formats; None stands for the original weight.
        original: The layer's own weight: (out, in), or (in, out) if ``transposed``.
        bias: The layer's own bias.
        transposed: Whether the original layer computes ``x @ W`` (as ``Conv1D`` in GPT-2).
        buffer: Memory for one dense weight, usually shared by all layers of a model.
        stream: Keeps the stored options in host memory and copies them to the GPU when they are needed.
    """

    def __init__(
        self,
        options: Sequence[Stored | None],
        original: Tensor,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
        buffer: WeightBuffer | None = None,
        stream: OptionStream | None = None,
    ) -> None:
        dense = original.detach().t() if transposed else original.detach()
        super().__init__(options, dense)
        self.out_features, self.in_features = dense.shape
        if stream is not None:
            self.options = stream.add(self.options)
        self._known = LayerOptions(self.options)
        self.transposed = transposed
        self.buffer = buffer if buffer is not None else WeightBuffer()
        self._dtype = dense.dtype
        # In a tuple, so that a bias that is a parameter is not registered here a second time.
        self._bias = (bias,)

    @property
    def bias(self) -> Tensor | None:
        """The original layer's bias."""
        return self._bias[0]

    @property
    def weight(self) -> Tensor:
        """The selected weight, dense: for code that reads an output layer rather than calling it."""
        return self.selected_weight(self._dtype)

    @property
    def device(self) -> torch.device:
        """Device that uses the options."""
        return self._known.device

    @property
    def packed_bytes(self) -> int:
        """Bytes of the stored options; the original weight is not counted."""
        if isinstance(self.options, StreamedOptions):
            return self.options.packed_bytes
        return sum(option.nbytes for option in self.options if not isinstance(option, Tensor))

    def supports_device_choice(self, dtype: torch.dtype) -> bool:
        """Whether the layer can read its choice from the device, and so be recorded, when computing in a type."""
        return self.noise is None and self._known.chosen_decoder(dtype) is not None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the selected option."""
        y = _linear(x, self._known, self.selection, self._bias[0], self.buffer)
        return y if self.noise is None else y + F.linear(x, self.noise.to(x.dtype))

    @property
    def rounds_all_inputs(self) -> bool:
        """Whether every stored option rounds inputs."""
        stored = zip(self._known.rules, self._known.listed, strict=True)
        return all(rule is not None for rule, option in stored if not isinstance(option, Tensor))

    @torch.no_grad()
    def output_of(self, x: Tensor, choice: int) -> Tensor:
        """The output under some option, without bias and gradient; the present choice stays."""
        return _chosen_linear(x, self._known, Selection(choice), None, WeightBuffer())

    @property
    def input_rule(self) -> ActivationRule | None:
        """Rounding of the inputs under the present choice."""
        return self._known.rules[self.selection.choice]

    def selected_weight(self, dtype: torch.dtype) -> Tensor:
        """The selected option as a new dense (out, in) matrix, differentiable in the gate."""
        weight = _weight(self._known, self.selection, dtype)
        return weight if self.noise is None else weight + self.noise.to(dtype)

    def extra_repr(self) -> str:
        """Shapes and the current choice, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, options={len(self.options)}, choice={self.selection.choice}"
        )


class _SwitchableLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor | None,
        bias: Tensor | None,
        options: LayerOptions,
        selection: Selection,
        buffer: WeightBuffer,
    ) -> Tensor:
        ctx.options, ctx.selection, ctx.buffer = options, selection, buffer
        # The input is needed for G alone.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return _chosen_linear(x, options, selection, bias, buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        options, selection = ctx.options, ctx.selection
        wants_x, wants_gate, wants_bias, *_ = ctx.needs_input_grad
        grad_x = grad_gate = grad_bias = None
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        wants_gate = wants_gate and (selection.active is None or any(selection.active))
        if wants_x or (wants_gate and options.roundings):
            weight = _dense(options, selection, rows.dtype, rows.device, ctx.buffer)
            # Straight through the rounding of the inputs, where the option has one.
            grad_x = (rows @ weight).view(*grad_y.shape[:-1], options.shape[1])
        if wants_gate:
            grad_gate = _gate_gradient(_outer(rows, x.reshape(-1, x.shape[-1])), options, selection)
            if options.roundings:
                assert grad_x is not None
                grad_gate = grad_gate + _by_rounding(options, selection, x, grad_x)
        elif ctx.needs_input_grad[1]:
            grad_gate = torch.zeros_like(selection.gate)
        if wants_bias:
            grad_bias = rows.sum(0)
        return grad_x if wants_x else None, grad_gate, grad_bias, None, None, None


class _SwitchableWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, options: LayerOptions, selection: Selection, dtype: torch.dtype
    ) -> Tensor:
        ctx.options, ctx.selection = options, selection
        return fresh_weight(options, selection, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weight: Tensor) -> tuple[Tensor | None, ...]:
        if grad_weight.dtype in (torch.bfloat16, torch.float16):
            grad_weight = grad_weight.float()
        return _gate_gradient(grad_weight, ctx.options, ctx.selection), None, None, None


def _by_rounding(options: LayerOptions, selection: Selection, x: Tensor, gradient: Tensor) -> Tensor:
    """(K,) what rounding the inputs adds to the gradient of every gate, given the gradient of the inputs."""
    assert selection.gate is not None
    found = torch.zeros_like(selection.gate)
    for rule, members in options.roundings:
        wanted = [index for index in members if selection.active is None or selection.active[index]]
        if wanted:
            change = change_along(rule, x, gradient).to(device=found.device, dtype=found.dtype)
            for index in wanted:
                found[index] = change
    return found


def _gate_gradient(weight_gradient: Tensor, options: LayerOptions, selection: Selection) -> Tensor:
    assert selection.gate is not None
    products = options.products(selection.active)(weight_gradient)
    return products.to(device=selection.gate.device, dtype=selection.gate.dtype)


def _outer(grad_y: Tensor, x: Tensor) -> Tensor:
    """``grad_y.T @ x``, accumulated in float32 at least.

    On a GPU a bfloat16 gradient is returned as bfloat16, as in training: its rounding changes ``<G, W_k - W_j>`` by
    0.1 % of that difference's own spread, and float32 would take twice the memory traffic.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or (x.is_cuda and x.dtype == torch.bfloat16):
        return grad_y.t() @ x
    if x.is_cuda:  # float16 has too little range for gradients
        return torch.mm(grad_y.t(), x, out_dtype=torch.float32)
    return grad_y.float().t() @ x.float()


def _dense(
    options: LayerOptions,
    selection: Selection,
    dtype: torch.dtype,
    device: torch.device,
    buffer: WeightBuffer,
) -> Tensor:
    """The selected weight as a dense matrix; valid until the buffer is used again."""
    if selection.place is not None:
        decode = options.chosen_decoder(dtype)
        if decode is None:
            raise ValueError(
                f"No kernel decodes these options of shape {options.shape} to {dtype} by a choice on {device}; "
                "select them by the choice on the host."
            )
        out = buffer.take(options.shape, dtype, device)
        decode(selection.place, out)
        return out
    option = options.listed[selection.choice]
    if isinstance(option, Tensor) and option.dtype == dtype:
        return option
    return _fill(option, buffer.take(options.shape, dtype, device))


def fresh_weight(options: LayerOptions, selection: Selection, dtype: torch.dtype) -> Tensor:
    """The selected weight as a dense matrix that no other layer overwrites, without a gradient."""
    with torch.no_grad():
        weight = _dense(options, selection, dtype, options.device, WeightBuffer())
        # An alias, so that autograd does not mark the original weight as the output of a function.
        return weight.detach()


def _fill(option: Option, out: Tensor) -> Tensor:
    if isinstance(option, Tensor):
        return out.copy_(option)
    option.decode(out)
    return out


def check_selection(options: Sequence[Option], selection: Selection) -> None:
    """Raise if a selection does not fit the options.

    Raises:
        ValueError: The choice, the gates or the active options are not one of, or one for each of, the options.
    """
    count, choice, gate, active = len(options), selection.choice, selection.gate, selection.active
    if not 0 <= choice < count:
        raise ValueError(f"choice must be an option's index in 0..{count - 1}, got {choice}.")
    if gate is not None and tuple(gate.shape) != (count,):
        raise ValueError(f"gate must have shape ({count},), one entry per option; got {tuple(gate.shape)}.")
    if active is not None and len(active) != count:
        raise ValueError(f"active must have {count} entries, one per option; got {len(active)}.")
