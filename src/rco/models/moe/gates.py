"""Expert gates: run a model as if experts were pruned, and differentiate its loss in the gates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from rco.core.async_copy import send
from rco.models.moe.expert_pairs import (
    Ask,
    ExpertPairs,
    ExpertSource,
    ExpertWeights,
    PairedExperts,
    expert_weights,
)
from rco.models.moe.layers import MoELayer, moe_layers
from rco.models.moe.probes import ProbeBuffer, RoutingProbes
from rco.models.moe.routing import Routing, route

__all__ = ["ExpertGates", "GateMode", "OptionSource", "expert_gates", "override_forward"]

GateMode = Literal["deployed", "scale"]

# Largest deviation of straight-through gates, sums of floats, from 0 or 1.
_BINARY_TOLERANCE = 1e-3

_paired: Callable[..., Tensor] = PairedExperts.apply


class OptionSource(ExpertSource, Protocol):
    """Experts at one option each; ``gates`` are those of the options, if they need a gradient."""

    @property
    def gates(self) -> Tensor | None:
        """Gates of the options."""
        ...


class ExpertGates:
    """Handle on the gates of a model's experts, layer after layer in one vector.

    Attributes:
        layers: The sparse layers.
        counts: Experts per layer; gates of layer ``l`` start at ``sum(counts[:l])``.
        mode: ``deployed`` or ``scale``, see :func:`expert_gates`.
        probe_buffer: Buffer sizes for the probes of a backward pass.
        devices: Device of each layer.
    """

    def __init__(self, layers: Sequence[MoELayer], mode: GateMode) -> None:
        self.layers = tuple(layers)
        self.counts = tuple(layer.num_experts for layer in self.layers)
        self.mode = mode
        self.devices = [next(layer.experts.parameters()).device for layer in self.layers]
        on_host = all(place.type == "cpu" for place in self.devices)
        self.probe_buffer = ProbeBuffer(len(self.layers), always_counted=on_host)
        self._gates = [_LayerGates(layer, mode, self.probe_buffer) for layer in self.layers]

    @property
    def num_gates(self) -> int:
        """Experts in all sparse layers together."""
        return sum(self.counts)

    def set_gates(
        self, keep: Tensor | Sequence[Tensor], values: Tensor | Sequence[Tensor] | None = None
    ) -> None:
        """Set all gates: 1 keeps an expert, 0 prunes it.

        Args:
            keep: (num_gates,) values, or one tensor per layer. May carry gradient. ``deployed`` accepts only
                0 and 1 (booleans too); ``scale`` accepts any number.
            values: The same numbers in host memory, to avoid waiting for the device of ``keep``.

        Raises:
            ValueError: Wrong length, a gate that is neither 0 nor 1, or a layer left with fewer experts than
                its router must choose.
        """
        parts = self._split(keep)
        bare = [part.detach().cpu() for part in (parts if values is None else self._split(values))]
        if self.mode == "scale":
            for gates, part, here, device in zip(self._gates, parts, bare, self.devices, strict=True):
                ones = bool((here == 1).all()) and not part.requires_grad
                dtype = torch.float64 if _is_double(gates.layer) else torch.float32
                gates.use(None, None if ones else send(part.to(dtype), device))
            return
        flags, on_one = self._kept(bare), len({part.device for part in parts}) == 1
        # One copy for all layers instead of one transfer each. Gates are read on their device, so that launches
        # can be recorded and replayed with other gates.
        together = torch.cat([part.detach() for part in parts]) > 0.5 if on_one else torch.cat(flags)
        placed = {
            device: torch.split(send(together, device), list(self.counts)) for device in set(self.devices)
        }
        for index, (gates, part, device) in enumerate(zip(self._gates, parts, self.devices, strict=True)):
            gate = send(part, device) if part.requires_grad else None
            kept = int(flags[index].sum())
            unchanged = kept == gates.layer.num_experts and gate is None
            gates.use(None if unchanged else placed[device][index], gate, kept)

    def check_deployed(self, values: Tensor) -> None:
        """Raise the errors of :meth:`set_gates` for deployed gates (num_gates,) in host memory."""
        self._kept(self._split(values))

    def _kept(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Booleans per layer, in host memory: experts that its gates keep."""
        return [gates.kept(part) for gates, part in zip(self._gates, parts, strict=True)]

    def use_mode(self, mode: GateMode) -> None:
        """Switch between ``deployed`` and ``scale``; every expert is kept until gates are set again."""
        if mode not in get_args(GateMode):
            raise ValueError(f"mode is {mode!r}; allowed are {', '.join(get_args(GateMode))}")
        if mode != self.mode:
            self.mode = mode
            for gates in self._gates:
                gates.mode = mode
            self.clear()

    def use_options(self, layer: int, options: OptionSource | None) -> None:
        """Set the weights that a layer's experts compute with; None: their own."""
        self._gates[layer].options = options

    def use_squares(self, squares: bool) -> None:
        """Set whether gates receive the sum over tokens of the squared change instead of their gradient.

        If the loss is the log-likelihood of tokens drawn from the model itself, that is the diagonal of the Fisher
        information of removing an expert, with tokens taken as independent.
        """
        for gates in self._gates:
            gates.squares = squares

    def clear(self) -> None:
        """Keep every expert; the model then computes as outside the context."""
        for gates in self._gates:
            gates.use(None, None)

    def _split(self, keep: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(keep, Tensor):
            if keep.shape != (self.num_gates,):
                raise ValueError(
                    f"gates have shape {tuple(keep.shape)}; this model has {len(self.counts)} sparse layers with "
                    f"{self.num_gates} experts together, so the shape must be ({self.num_gates},)"
                )
            return list(torch.split(keep, list(self.counts)))
        shapes = [tuple(part.shape) for part in keep]
        if shapes != [(count,) for count in self.counts]:
            raise ValueError(f"gates per layer have shapes {shapes}; expected lengths {list(self.counts)}")
        return keep


@contextmanager
def expert_gates(
    model: nn.Module,
    mode: GateMode = "deployed",
    *,
    reroute: bool = True,
    only: Collection[int] | None = None,
) -> Iterator[ExpertGates]:
    """Run ``model`` with gated experts inside the context; leaving restores it.

    * ``deployed``: the forward pass is that of the pruned model. Experts with gate 0 leave the router before
      the top-k, survivors are re-picked and renormalised as the architecture does. The gradient is the
      straight-through one of :mod:`rco.models.moe.probes`, for kept and pruned experts alike.
    * ``scale``: the router still ranks every expert, and the contribution of a chosen expert is multiplied by
      its gate. The paper's search differentiates this; a pruned checkpoint computes something else.

    ``reroute=False`` leaves the routers unchanged: no expert can be pruned then, but experts may compute with other
    weights (:meth:`ExpertGates.use_options`). With ``only``, all other layers stay unchanged.

    Without gradient nothing extra is computed. Parameters are frozen inside the context (the search
    differentiates in the gates alone) and get their ``requires_grad`` back afterwards.

    Raises:
        UnsupportedMoEError: The model has no experts or an unknown layout.
    """
    if mode not in get_args(GateMode):
        raise ValueError(f"mode is {mode!r}; allowed are {', '.join(get_args(GateMode))}")
    handle = ExpertGates(moe_layers(model), mode)
    with ExitStack() as undo:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                undo.callback(parameter.requires_grad_, True)
        for index, gates in enumerate(handle._gates):
            if only is None or index in only:
                gates.install(undo, reroute)
        yield handle


class _LayerGates:
    """The gates of one layer and the forward methods that apply them."""

    def __init__(self, layer: MoELayer, mode: GateMode, probe_buffer: ProbeBuffer) -> None:
        self.layer = layer
        self.mode = mode
        self.probe_buffer = probe_buffer
        self.num_kept = layer.num_experts
        self.squares = False
        self.weights: ExpertWeights | None = None
        self.keep: Tensor | None = None  # booleans on the router's device; None keeps all
        self.gate: Tensor | None = None  # values on the router's device, where they carry gradient or scale
        self.routing: Routing | None = None
        self.options: OptionSource | None = None  # None: the experts' own weights
        self.own_forward: Callable[..., Tensor] | None = None

    def kept(self, values: Tensor) -> Tensor:
        """Experts that one layer's gates keep, in host memory; an error if they cannot be deployed."""
        layer = self.layer
        keep = values > 0.5
        off = (values.double() - keep.double()).abs()
        if not bool((off <= _BINARY_TOLERANCE).all()):
            worst = int(off.nan_to_num(nan=torch.inf).argmax())
            raise ValueError(
                f"gate of expert {worst} in {layer.name} is {float(values[worst])}; deployed gates are 0 or 1 "
                "(use mode='scale' for values between)"
            )
        kept = int(keep.sum())
        if kept < layer.top_k:
            raise ValueError(
                f"{layer.name} would keep {kept} of {layer.num_experts} experts, but its router picks "
                f"{layer.top_k} per token; keep at least {layer.top_k} in every layer"
            )
        return keep

    def use(self, keep: Tensor | None, gate: Tensor | None, num_kept: int | None = None) -> None:
        self.keep, self.gate, self.routing = keep, gate, None
        self.num_kept = self.layer.num_experts if num_kept is None else num_kept

    def install(self, undo: ExitStack, reroute: bool = True) -> None:
        """Replace the forward methods of the layer; ``undo`` restores them."""
        layer = self.layer
        if layer.fused:
            replayed = layer.architecture.replayed
            if reroute and not replayed:
                override_forward(layer.router, self.route, undo)
            run = self.reroute_experts if reroute and replayed else self.run_experts
            self.own_forward = override_forward(layer.experts, run, undo)
        else:
            self.weights = expert_weights(layer.experts)
            override_forward(layer.block, _unfused_forward(self), undo)
        undo.callback(self.use, None, None)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replacement of the router: logits, weights and choice of the flattened tokens."""
        layer = self.layer
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = layer.logits(flat)
        keep = self.keep if self.mode == "deployed" else None
        routing = route(layer.known_rule, logits, layer.correction, keep)
        weights = routing.weights
        if layer.architecture.casts_weights:
            weights = weights.to(hidden.dtype)
        if self.mode == "scale" and self.gate is not None:
            weights = weights * self.gate[routing.indices].to(weights.dtype)
        self.routing = routing if self.gate is not None and torch.is_grad_enabled() else None
        return logits, weights, routing.indices

    def reroute_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Replacement of experts whose router was replayed: its decisions are made anew if gates change them."""
        indices, weights = top_k_index, top_k_weights
        if self.keep is not None or self.gate is not None:
            _, weights, indices = self.route(hidden_states)
        return self.run_experts(hidden_states, indices, weights)

    def run_experts(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Replacement of the experts: their weighted sum, with the gates' gradient if required."""
        routing, self.routing = self.routing, None
        gate = self.gate if self.mode == "deployed" else None
        option_gates = None if self.options is None else self.options.gates
        differentiated = torch.is_grad_enabled() and (
            gate is not None or option_gates is not None or hidden.requires_grad or weights.requires_grad
        )
        if self.options is None and not differentiated and self.own_forward is not None:
            return self.own_forward(hidden, indices, weights)
        source: ExpertSource
        if self.options is not None:
            source = self.options
        else:
            if self.weights is None:
                self.weights = expert_weights(self.layer.experts)
            source = self.weights
        pairs = ExpertPairs.build(indices, self.layer.num_experts)
        if differentiated and gate is not None and routing is not None and self.keep is not None:
            wanted = partial(self.gate_gradient, routing, self.keep, self.num_kept)
            return _paired(hidden, weights, gate, option_gates, pairs, source, wanted)
        return _paired(hidden, weights, None, option_gates, pairs, source, None)

    def gate_gradient(self, routing: Routing, keep: Tensor, kept: int, real: Tensor, ask: Ask) -> Tensor:
        """(experts,) straight-through gradient of the gates, or the sum of squares that replaces it."""
        layer = self.layer

        def reserve(needed: Tensor) -> int:
            tokens, pruned = len(routing.indices), layer.num_experts - kept
            return self.probe_buffer.reserve(layer.index, tokens, layer.top_k, kept, pruned, needed)

        probes = RoutingProbes.find(
            layer.known_rule, routing, layer.correction, keep, None if self.probe_buffer.counted else reserve
        )
        changes = probes.changes(real, ask(probes.tokens, probes.experts))
        return (changes.square() if self.squares else changes).sum(dim=0)


def override_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> Callable[..., Any]:
    """Replace a module's forward on the instance; returns the forward it had."""
    # accelerate keeps the forward that its device hooks call under another name: replace that one.
    name = "_old_forward" if hasattr(module, "_old_forward") else "forward"
    before: Callable[..., Any] = getattr(module, name)
    own = module.__dict__.get(name)
    module.__dict__[name] = forward

    def restore() -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    undo.callback(restore)
    return before


def _unfused_forward(gates: _LayerGates) -> Callable[[Tensor], Any]:
    """A block's forward over a list of separate experts, instead of its loop over them."""
    layer = gates.layer
    block: Any = layer.block
    parameter = next(layer.router.parameters())
    with torch.no_grad():
        sample = block(parameter.new_zeros(1, layer.top_k, parameter.shape[-1]))
    returns_logits = isinstance(sample, tuple)

    def forward(hidden: Tensor) -> Any:
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits, weights, indices = gates.route(flat)
        out = gates.run_experts(flat, indices, weights)
        if layer.shared is not None:
            extra = layer.shared(flat)
            name = layer.architecture.shared_gate
            if name:
                extra = torch.sigmoid(getattr(block, name)(flat)) * extra
            out = out + extra
        out = out.reshape(hidden.shape)
        return (out, logits) if returns_logits else out

    return forward


def _is_double(layer: MoELayer) -> bool:
    return next(layer.experts.parameters()).dtype == torch.float64
