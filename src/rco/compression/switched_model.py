"""A model whose linears and experts switch between their options, controlled by one matrix of gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco.compression.gradient_scores import delta_losses, output_scores
from rco.compression.plan import CompressionPlan
from rco.formats.base import Format, Stored
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.formats.streaming import OptionStream
from rco.formats.switchable import SwitchableLinear
from rco.formats.switchable_embedding import SwitchableEmbedding
from rco.losses import Head
from rco.models.embeddings import EMBEDDING_ROLE, switchable_ends
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.gates import ExpertGates, GateMode
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import ExpertLinear
from rco.models.moe.probes import ProbeBuffer
from rco.models.moe.switchable_experts import ExpertOptions, SwitchableExperts, switchable_experts
from rco.models.switchable_model import GatedModel, gate_choices, make_switchable, switchable_model

__all__ = ["SwitchedModel", "expert_options", "full_head", "option_list", "switched_model"]


class SwitchedModel:
    """A model inside :func:`switched_model`.

    Args:
        loaded: The model.
        full_head: The output layer with the original weight.
        linears: Switchable linears.
        rows: Row of the gates of every linear.
        experts: Switchable experts, if there are any.
        wanted: (N, K) options that a group may take; the others get no gradient.
        originals: Switchable linears by name, with their unquantized weights.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        full_head: Head,
        linears: GatedModel,
        rows: Mapping[str, int],
        experts: SwitchableExperts | None,
        wanted: np.ndarray,
        originals: Mapping[str, LinearInfo],
    ) -> None:
        self._loaded, self.full_head = loaded, full_head
        self._originals = originals
        self._linears, self._rows, self._experts, self._wanted = linears, rows, experts, wanted
        self._active = wanted.tolist()
        self.num_groups, self.num_options = wanted.shape

    def present_head(self) -> Head:
        """The output layer under the present gates."""
        spec = self._loaded.layout.head(self._loaded.model)
        return Head(spec.weight, spec.bias, spec.softcap, spec.scale)

    @property
    def expert_gates(self) -> ExpertGates:
        """The gates that take experts out of their routers."""
        if self._experts is None:
            raise ValueError("No expert of this model can be removed.")
        return self._experts.handle

    @contextmanager
    def disturbed(self, group: int, squared_error: float, seed: int) -> Iterator[None]:
        """Add Gaussian noise to the weights of a group; its square is that fraction of each squared weight.

        The weights are those under the present gates, so gates must be set first.
        """
        names = [name for name, row in self._rows.items() if row == group]
        if not names:
            raise ValueError(
                f"Group {group} holds experts or is unquantized, so no noise can be added to it; use higgs, which "
                "measures groups at their options, instead of higgs-noise."
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

    def _scored(self) -> dict[str, SwitchableLinear]:
        """Layers that have scores.

        Raises:
            ValueError: Experts or embeddings have a choice.
        """
        if self._experts is not None or any(
            not isinstance(each, SwitchableLinear) for each in self._linears.modules.values()
        ):
            raise ValueError(
                "autoquantize and autoscheme score linears alone, and experts or embeddings have a choice here: "
                "lock them (`lock='experts=16'`), pass `embeddings=False`, or take another method."
            )
        return {
            name: each for name, each in self._linears.modules.items() if isinstance(each, SwitchableLinear)
        }

    def output_scores(self) -> AbstractContextManager[Tensor]:
        """Table (N, K) that a backward pass fills; see :func:`rco.compression.gradient_scores.output_scores`."""
        return output_scores(self._scored(), self._rows, (self.num_groups, self.num_options))

    def delta_losses(self) -> AbstractContextManager[Tensor]:
        """Table (N,) that a backward pass fills; see :func:`rco.compression.gradient_scores.delta_losses`.

        As in AutoRound, changes of weights count if some option leaves inputs alone.
        """
        layers = self._scored()
        return delta_losses(
            layers, self._rows, self.num_groups, self._originals,
            of_weights=any(not each.rounds_all_inputs for each in layers.values()),
        )  # fmt: skip

    @property
    def probe_buffer(self) -> ProbeBuffer | None:
        """Buffer for the probes of a backward pass; None if no expert can be removed."""
        return None if self._experts is None else self._experts.probe_buffer

    def recordable(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`set_gates` supports ``recorded`` for computation in a type."""
        experts = self._experts is None or self._experts.recordable(dtype)
        return experts and self._linears.recordable(dtype)

    def check_gates(self, values: Tensor) -> None:
        """Raise for gates (N, K), in host memory, that cannot be set.

        Rows must be one-hot and pick an allowed option, and every router must keep enough experts.
        """
        choices = self._choices(values)
        if self._experts is not None:
            self._experts.check_gates(choices)

    def _choices(self, gates: Tensor) -> list[int]:
        choices = gate_choices(gates)
        taken = self._wanted[np.arange(len(choices)), np.array(choices, dtype=np.int64)]
        if not taken.all():
            row = int(np.flatnonzero(~taken)[0])
            raise ValueError(
                f"Row {row} of the gates picks option {choices[row]}, which is not allowed for its group; allowed "
                f"are {np.flatnonzero(self._wanted[row]).tolist()}."
            )
        return choices

    def set_gates(
        self,
        gates: Tensor,
        values: Tensor | None = None,
        recorded: bool = False,
        mode: GateMode = "deployed",
    ) -> None:
        """Set every group to the option that its one-hot row of the gates (N, K) picks.

        ``values`` is a copy in host memory of gates on a device. Kernels launched under ``recorded`` gates may be
        replayed with others. ``mode`` is the model of expert removal.
        """
        choices = self._choices(gates if values is None else values)
        self._linears.set_gates(gates, self._rows, active=self._active, choices=choices, recorded=recorded)
        if self._experts is not None:
            self._experts.set_gates(gates, choices, recorded, mode)


@contextmanager
def switched_model(
    loaded: LoadedModel,
    plan: CompressionPlan,
    packed: Mapping[str, Mapping[str, Stored]],
    *,
    original: bool = False,
    stream: OptionStream | None = None,
) -> Iterator[SwitchedModel]:
    """Make a model switchable between the options of a plan; leaving restores it.

    Groups whose only option is the original weights are not touched.

    Args:
        loaded: The model, computing in the type to search in.
        plan: Groups and options, the columns of the gates.
        packed: Candidates from the store.
        original: Add a last column to the gates for the original weights, which every group may take.
        stream: Streams the candidates from host memory, if they are there.
    """
    columns: list[Format] = [*plan.options, *([ORIGINAL] if original else [])]
    wanted = plan.allowed
    if original:
        wanted = np.concatenate([wanted, np.ones((len(wanted), 1), dtype=bool)], axis=1)
    modules: dict[str, SwitchableLinear | SwitchableEmbedding] = {}
    rows: dict[str, int] = {}
    originals: dict[str, LinearInfo] = {}
    for row, group in enumerate(plan.groups):
        for info in group.members:
            if group.switched and not isinstance(info, ExpertLinear):
                options = _without_original(option_list(plan, packed[info.name], columns), wanted[row])
                if info.role == EMBEDDING_ROLE:
                    ends = switchable_ends(loaded.layout, loaded.model, info, options, stream)
                else:
                    ends = {info.name: make_switchable(info.module, options, stream)}
                    originals[info.name] = info
                modules |= ends
                rows |= dict.fromkeys(ends, row)
    experts, expert_rows = expert_options(plan, packed, columns, wanted=wanted, stream=stream)
    original_head = full_head(loaded, plan)
    with ExitStack() as stack:
        linears = stack.enter_context(switchable_model(loaded.model, modules, stream=stream))
        handle = None
        if expert_rows:
            removed = columns.index(REMOVED) if REMOVED in columns else None
            handle = stack.enter_context(
                switchable_experts(loaded.model, experts, expert_rows, removed, wanted)
            )
        yield SwitchedModel(loaded, original_head, linears, rows, handle, wanted, originals)


def full_head(loaded: LoadedModel, plan: CompressionPlan) -> Head:
    """The output layer with its original weight; only valid outside of :func:`switched_model`."""
    spec = loaded.layout.head(loaded.model)
    for info in plan.linears:
        if info.role == "head":
            module: Any = info.module
            return Head(module.weight.detach(), module.bias, spec.softcap, spec.scale)
    return Head(spec.weight.detach(), spec.bias, spec.softcap, spec.scale)


def expert_options(
    plan: CompressionPlan,
    packed: Mapping[str, Mapping[str, Stored]],
    columns: Sequence[Format],
    *,
    wanted: np.ndarray | None = None,
    stream: OptionStream | None = None,
) -> tuple[dict[int, ExpertOptions], dict[int, np.ndarray]]:
    """Packed options of sparse layers, and gate rows (experts, 3) of every layer that has a choice.

    Args:
        plan: Groups and options.
        packed: Candidates from the store.
        columns: The option of every column of the gates.
        wanted: (N, K) options that a group may take; layers without an expert that may take its original weights
            then hold no reference to them. None: all are allowed.
        stream: As for :func:`switched_model`.
    """
    layers: dict[int, MoELayer] = {}
    rows: dict[int, np.ndarray] = {}
    for row, group in enumerate(plan.groups):
        for info in group.members:
            if isinstance(info, ExpertLinear):
                index, count = info.layer.index, info.layer.num_experts
                kinds = info.layer.architecture.kinds
                places = rows.setdefault(index, np.full((count, len(kinds)), -1, dtype=np.int64))
                places[info.expert, kinds.index(info.projection)] = row
                if group.switched:
                    layers[index] = info.layer
    rows = {index: rows[index] for index in layers}
    if plan.removes_only:
        return {}, rows
    options = {}
    for index, layer in layers.items():
        stacks = [
            option_list(plan, packed[f"{layer.experts_name}.{stack}"], columns)
            for stack in layer.architecture.stacks
        ]
        if wanted is not None:
            taken = wanted[np.unique(rows[index])].any(axis=0)
            stacks = [_without_original(stack, taken) for stack in stacks]
        pruned = columns.index(REMOVED) if REMOVED in columns else None
        options[index] = ExpertOptions(layer, *stacks, pruned=pruned, stream=stream)
    return options, rows


def _without_original(options: Sequence[Stored | None], wanted: np.ndarray) -> list[Stored | None]:
    """Options with a packed one in place of an original weight that is not allowed, so that it can be freed.

    A packed one exists, because groups whose only option is the original weights are not switchable.
    """
    packed = next(option for option in options if option is not None)
    return [
        packed if option is None and not allowed else option
        for option, allowed in zip(options, wanted.tolist(), strict=True)
    ]


def option_list(
    plan: CompressionPlan, packed: Mapping[str, Stored], columns: Sequence[Format]
) -> list[Stored | None]:
    """One entry per column of the gates; None for the original weight, also used for removal.

    A type that does not fit the rows of a linear has no candidate; another one, never chosen, is in its place.
    """
    spare = next(iter(packed.values()), None)
    return [
        None if option in (ORIGINAL, REMOVED) else packed.get(plan.label(option), spare) for option in columns
    ]
