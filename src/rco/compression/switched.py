"""A model whose linears and experts can each be any of their options, driven by one matrix of gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rco.compression.candidates import option_label
from rco.compression.plan import LEAVE_ALONE, PRUNED, QuantizationPlan
from rco.formats.packing import PackedWeight
from rco.formats.streaming import OptionStream
from rco.models.gating import GatedModel, gate_choices, make_switchable, switchable_model
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import ExpertLinear
from rco.models.moe.options import ExpertOptions
from rco.models.moe.probe_buffer import ProbeRoom
from rco.models.moe.switch import SwitchableExperts, switchable_experts

__all__ = ["SwitchedModel", "expert_options", "option_list", "switched_model"]

_PARTS = {"gate": 0, "up": 1, "down": 2}


class SwitchedModel:
    """A model inside :func:`switched_model`.

    Args:
        linears: Its switchable linears.
        rows: Linear -> row of the gates.
        experts: Its switchable experts, if it has any.
        wanted: (N, K) options that a group may take; the others get no gradient.
    """

    def __init__(
        self,
        linears: GatedModel,
        rows: Mapping[str, int],
        experts: SwitchableExperts | None,
        wanted: np.ndarray,
    ) -> None:
        self._linears, self._rows, self._experts, self._wanted = linears, rows, experts, wanted
        self._active = wanted.tolist()

    @contextmanager
    def disturbed(self, group: int, squared_error: float, seed: int) -> Iterator[None]:
        """Gaussian noise on the weights of a group; its square is that part of the square of each of them.

        The weights are those of the present gates, so that gates are set first.
        """
        names = [name for name, row in self._rows.items() if row == group]
        if not names:
            raise ValueError(
                f"Group {group} holds experts, or is left alone, and cannot be disturbed by noise; use higgs, "
                "which disturbs groups by their options, rather than higgs-noise."
            )
        modules = [self._linears.modules[name] for name in names]
        for number, module in enumerate(modules):
            weight = module.selected_weight(torch.float32).detach()
            generator = torch.Generator(weight.device).manual_seed(seed + number)
            drawn = torch.randn(weight.shape, generator=generator, device=weight.device)
            module.noise = drawn * (squared_error**0.5 * weight.norm() / drawn.norm())
        try:
            yield
        finally:
            for module in modules:
                module.noise = None

    @property
    def room(self) -> ProbeRoom | None:
        """What a backward pass makes room for; None where no expert can be pruned."""
        return None if self._experts is None else self._experts.room

    def recordable(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`set_gates` takes ``recorded``, the model computing in a type."""
        experts = self._experts is None or self._experts.recordable(dtype)
        return experts and self._linears.recordable(dtype)

    def check_gates(self, values: Tensor) -> None:
        """Refuse gates (N, K), in host memory, whose rows are not one-hot or pick what their group may not take."""
        self._choices(values)

    def _choices(self, gates: Tensor) -> list[int | None]:
        choices = gate_choices(gates)
        taken = self._wanted[np.arange(len(choices)), np.array(choices, dtype=np.int64)]
        if not taken.all():
            row = int(np.flatnonzero(~taken)[0])
            raise ValueError(
                f"Row {row} of the gates picks option {choices[row]}, which its group may not take; allowed are "
                f"{np.flatnonzero(self._wanted[row]).tolist()}."
            )
        return choices

    def set_gates(self, gates: Tensor, values: Tensor | None = None, recorded: bool = False) -> None:
        """Let every group use the option that its row of the gates (N, K) picks; rows are one-hot.

        ``values`` are the same numbers in host memory, where the gates are on a device. What is launched under
        ``recorded`` gates may be launched again with others.
        """
        choices = self._choices(gates if values is None else values)
        self._linears.set_gates(gates, self._rows, active=self._active, choices=choices, recorded=recorded)
        if self._experts is not None:
            self._experts.set_gates(gates, choices, recorded)


@contextmanager
def switched_model(
    model: nn.Module,
    plan: QuantizationPlan,
    packed: Mapping[str, Mapping[str, PackedWeight]],
    *,
    original: bool = False,
    stream: OptionStream | None = None,
) -> Iterator[SwitchedModel]:
    """Run a model with the options of a plan in place; leaving restores it.

    Groups that can only be left alone are not touched.

    Args:
        model: The model, computing in the type to search in.
        plan: Groups and widths, the columns of the gates.
        packed: Candidates as the store gives them.
        original: The gates have one more column at the end, for the original weights, which every group may take.
        stream: Brings the candidates from host memory, where they then are.
    """
    columns: list[int] = [*plan.widths, *([LEAVE_ALONE] if original else [])]
    wanted = np.array([[w in group.widths for w in plan.widths] for group in plan.groups])
    if original:
        wanted = np.concatenate([wanted, np.ones((len(wanted), 1), dtype=bool)], axis=1)
    modules, rows = {}, {}
    for row, group in enumerate(plan.groups):
        for info in group.members:
            if group.switched and not isinstance(info, ExpertLinear):
                options = _without_original(option_list(packed[info.name], columns), wanted[row])
                modules[info.name] = make_switchable(info.module, options, stream)
                rows[info.name] = row
    experts, expert_rows = expert_options(plan, packed, columns, wanted=wanted, stream=stream)
    with ExitStack() as stack:
        linears = stack.enter_context(switchable_model(model, modules, stream=stream))
        handle = None
        if experts:
            handle = stack.enter_context(switchable_experts(model, experts, expert_rows, wanted))
        yield SwitchedModel(linears, rows, handle, wanted)


def expert_options(
    plan: QuantizationPlan,
    packed: Mapping[str, Mapping[str, PackedWeight]],
    columns: Sequence[int],
    *,
    wanted: np.ndarray | None = None,
    stream: OptionStream | None = None,
) -> tuple[dict[int, ExpertOptions], dict[int, np.ndarray]]:
    """The experts of every sparse layer that has a choice, and the rows (experts, 3) of its gates.

    Args:
        plan: Groups and widths.
        packed: Candidates as the store gives them.
        columns: Width of every option.
        wanted: (N, K) options that a group may take; layers then do not refer to original weights that none of
            their experts may take. None: all may.
        stream: As for :func:`switched_model`.
    """
    layers: dict[int, MoELayer] = {}
    rows: dict[int, np.ndarray] = {}
    for row, group in enumerate(plan.groups):
        for info in group.members:
            if isinstance(info, ExpertLinear):
                index, count = info.layer.index, info.layer.num_experts
                places = rows.setdefault(index, np.full((count, 3), -1, dtype=np.int64))
                places[info.expert, _PARTS[info.projection]] = row
                if group.switched:
                    layers[index] = info.layer
    options = {}
    for index, layer in layers.items():
        stacks = [
            option_list(packed[f"{layer.experts_name}.{stack}"], columns)
            for stack in ("gate_up_proj", "down_proj")
        ]
        if wanted is not None:
            taken = wanted[np.unique(rows[index])].any(axis=0)
            stacks = [_without_original(stack, taken) for stack in stacks]
        pruned = columns.index(PRUNED) if PRUNED in columns else None
        options[index] = ExpertOptions(layer, *stacks, pruned=pruned, stream=stream)
    return options, {index: rows[index] for index in options}


def _without_original(
    options: Sequence[PackedWeight | None], wanted: np.ndarray
) -> list[PackedWeight | None]:
    """A packed option in the place of an original weight that may not be taken, so that nobody holds on to it.

    There is one: groups that can only be left alone have no switch.
    """
    packed = next(option for option in options if option is not None)
    return [
        packed if option is None and not allowed else option
        for option, allowed in zip(options, wanted.tolist(), strict=True)
    ]


def option_list(packed: Mapping[str, PackedWeight], columns: Sequence[int]) -> list[PackedWeight | None]:
    """One entry per column of the gates; None is the original weight, which also stands in for no weight at all."""
    return [None if width in (LEAVE_ALONE, PRUNED) else packed[option_label(width)] for width in columns]
