"""Mixed-precision quantization: one width per group of linears, under a budget of bits or bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rco.backends.accounting import (
    DENSE,
    FileLayout,
    Scheme,
    fixed_bytes,
    option_bytes,
    stored_bits,
    weight_bits,
)
from rco.backends.base import Backend, Budget
from rco.backends.candidates import (
    CandidateSettings,
    blocks_of,
    build_candidates,
    candidate_identity,
    option_label,
)
from rco.backends.objective import LanguageModelObjective, LossKind, Reference
from rco.backends.plan import LEAVE_ALONE, QuantizationPlan
from rco.compressors.packing import PackedWeight
from rco.compressors.switchable import SwitchableLinear
from rco.core.problem import Allocation, AllocationProblem
from rco.data.calibration import CalibrationSet
from rco.losses import Head
from rco.models.gating import GatedModel, checkpointed_blocks, make_switchable, switchable_model
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.precision import computing_in, default_compute_dtype
from rco.store import CandidateStore

__all__ = ["QuantizationBackend"]


class QuantizationBackend(Backend):
    """Packed candidates for every linear and width; the search switches between them.

    Args:
        loaded: The full model in the type of its checkpoint.
        plan: Groups, widths and grid.
        store_folder: Where the candidates are kept.
        settings: How candidates are made.
        compute_dtype: Type of the computation; None: float32 on a CPU, the checkpoint's elsewhere.
        loss: KL to the full model, or cross-entropy.
        top_k: Coarsen the KL to the k likeliest tokens of the reference; None: the full vocabulary.
        batch_size: Sequences per batch of the objective.
        checkpointing: Recompute activations in the backward pass, to save memory.
        overwrite_store: Replace candidates of another identity instead of refusing.
    """

    name: ClassVar[str] = "quantization"

    def __init__(
        self,
        loaded: LoadedModel,
        plan: QuantizationPlan,
        store_folder: Path,
        *,
        settings: CandidateSettings | None = None,
        compute_dtype: torch.dtype | None = None,
        loss: LossKind = "kl",
        top_k: int | None = None,
        batch_size: int = 1,
        checkpointing: bool = False,
        overwrite_store: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.loaded, self.plan, self.store_folder = loaded, plan, store_folder
        self.settings = settings if settings is not None else CandidateSettings()
        self.storage_dtype = loaded.dtype
        self.compute_dtype = compute_dtype or default_compute_dtype(loaded.device, loaded.dtype)
        self.loss_kind, self.top_k, self.batch_size = loss, top_k, batch_size
        self.checkpointing = checkpointing
        self.overwrite_store = overwrite_store
        self.on_progress = on_progress
        self.store: CandidateStore | None = None
        self._packed: dict[str, dict[str, PackedWeight]] | None = None
        self._prior: Tensor | None = None
        self.curvature: Tensor | None = None

    # ---------------------------------------------------------------- problem

    def scheme(self, width: int) -> Scheme:
        """What a width means in the artifact."""
        return DENSE if width == LEAVE_ALONE else Scheme(width, self.plan.group_size, self.plan.symmetric)

    def _cost(self, kind: str, layout: FileLayout | None) -> Callable[[LinearInfo, int], int]:
        if kind == "bits":
            return lambda info, width: weight_bits(info, self.scheme(width))
        if kind == "bpw":
            return lambda info, width: stored_bits(info, self.scheme(width))
        assert layout is not None
        return lambda info, width: option_bytes(info, self.scheme(width), layout)

    def problem(self, budget: Budget) -> AllocationProblem:
        """Exact integer costs: bits for ``bits`` and ``bpw``, bytes of the checkpoint for ``size``."""
        if budget.kind not in ("bits", "bpw", "size"):
            raise ValueError(f"Quantization takes a budget of bits, bpw or size, got {budget.kind}.")
        layout = FileLayout.of(self.loaded.model) if budget.kind == "size" else None
        cost = self._cost(budget.kind, layout)
        costs = np.array(
            [
                [sum(cost(member, width) for member in group.members) for width in self.plan.widths]
                for group in self.plan.groups
            ],
            dtype=np.int64,
        )
        allowed = np.array([[w in group.widths for w in self.plan.widths] for group in self.plan.groups])
        if layout is not None:
            names = [info.name for info in self.plan.linears]
            total = budget.amount - fixed_bytes(self.loaded.model, names, layout)
        else:
            total = budget.amount * sum(group.parameters for group in self.plan.groups)
        try:
            return AllocationProblem(
                costs,
                budget=total,
                allowed=allowed,
                groups=[group.name for group in self.plan.groups],
                options=[str(width) for width in self.plan.widths],
                monotone=True,
            )
        except ValueError as error:
            raise type(error)(self._explain(budget, costs, allowed, error)) from None

    def _explain(self, budget: Budget, costs: np.ndarray, allowed: np.ndarray, error: ValueError) -> str:
        low, high = self.budget_range(budget.kind)
        return f"--{budget.kind} must lie between {low} and {high} here, got {budget}. ({error})"

    def budget_range(self, kind: str) -> tuple[str, str]:
        """The lowest and the highest budget of a kind, as a user would write them."""
        layout = FileLayout.of(self.loaded.model) if kind == "size" else None
        cost = self._cost(kind, layout)
        ends = []
        for pick in (min, max):
            ends.append(
                sum(
                    pick(sum(cost(member, width) for member in group.members) for width in group.widths)
                    for group in self.plan.groups
                )
            )
        if layout is not None:
            names = [info.name for info in self.plan.linears]
            fixed = fixed_bytes(self.loaded.model, names, layout)
            return f"{ends[0] + fixed:,} bytes", f"{ends[1] + fixed:,} bytes"
        parameters = sum(group.parameters for group in self.plan.groups)
        return f"{ends[0] / parameters:.6g}", f"{ends[1] / parameters:.6g}"

    # -------------------------------------------------------------- candidates

    def prepare(self, calibration: CalibrationSet) -> None:
        """Build the candidates that the store is missing."""
        identity = candidate_identity(self.loaded, self.plan, calibration, self.settings, self.storage_dtype)
        store = CandidateStore.create_or_resume(
            self.store_folder, identity, len(blocks_of(self.plan)), overwrite=self.overwrite_store
        )
        try:
            with computing_in(self.loaded.model, self.compute_dtype), torch.no_grad():
                build_candidates(
                    self.loaded,
                    self.plan,
                    calibration,
                    store,
                    self.settings,
                    self.storage_dtype,
                    self.on_progress,
                )
        finally:
            store.close()
        self.store = store

    def packed(self) -> Mapping[str, Mapping[str, PackedWeight]]:
        """Every candidate on the model's device: linear -> width label -> packed weight."""
        if self.store is None:
            raise ValueError("The candidates have not been built: call prepare() first.")
        if self._packed is None:
            self._packed = self.store.load_all(self.loaded.device)
        return self._packed

    def relative_errors(self) -> Tensor:
        """(N, K) relative output error of every option, summed over a group's members; 0 for the original."""
        if self.store is None:
            raise ValueError("The candidates have not been built: call prepare() first.")
        store = self.store
        rows = []
        for group in self.plan.groups:
            rows.append(
                [
                    sum(
                        0.0
                        if w == LEAVE_ALONE
                        else store.statistics(m.name, option_label(w))["relative_error"]
                        for m in group.members
                    )
                    for w in self.plan.widths
                ]
            )
        return torch.tensor(rows, dtype=torch.float64)

    # --------------------------------------------------------------- the model

    def _modules(self) -> dict[str, SwitchableLinear]:
        packed = self.packed()
        modules = {}
        for info in self.plan.linears:
            options = [
                None if width == LEAVE_ALONE else packed[info.name][option_label(width)]
                for width in self.plan.widths
            ]
            modules[info.name] = make_switchable(info.module, options)
        return modules

    @property
    def rows(self) -> dict[str, int]:
        """Linear name -> row of the gates."""
        return {m.name: row for row, group in enumerate(self.plan.groups) for m in group.members}

    @contextmanager
    def switchable(self) -> Iterator[GatedModel]:
        """The model with every planned linear switchable, computing in the compute type."""
        with ExitStack() as stack:
            stack.enter_context(computing_in(self.loaded.model, self.compute_dtype))
            gated = stack.enter_context(switchable_model(self.loaded.model, self._modules()))
            if self.checkpointing:
                blocks = [block for _, block in self.loaded.layout.blocks(self.loaded.model)]
                stack.enter_context(checkpointed_blocks(blocks))
            yield gated

    def present_head(self) -> Head:
        """The output layer under the present gates; inside :meth:`switchable` only."""
        spec = self.loaded.layout.head(self.loaded.model)
        return Head(spec.weight, spec.bias, spec.softcap, spec.scale)

    def reference(self, calibration: CalibrationSet) -> Reference:
        """The full model's hidden states."""
        with computing_in(self.loaded.model, self.compute_dtype):
            return Reference.compute(self.loaded, calibration, self.settings.batch_size)

    @contextmanager
    def objective(
        self, calibration: CalibrationSet, selection: CalibrationSet | None = None
    ) -> Iterator[LanguageModelObjective]:
        """KL to the full model as a function of the gates."""
        kl = self.loss_kind == "kl"
        references = [
            self.reference(data) if kl and data is not None else None for data in (calibration, selection)
        ]
        with ExitStack() as stack:
            gated = stack.enter_context(self.switchable())
            # Read before any gate is set; its weight stays the full model's own.
            full = self.full_head()
            rows = self.rows

            def set_gates(gates: Tensor) -> None:
                gated.set_gates(gates, rows)

            def make(
                data: CalibrationSet, reference: Reference | None, held_back: LanguageModelObjective | None
            ) -> LanguageModelObjective:
                return LanguageModelObjective(
                    self.loaded,
                    data,
                    reference,
                    full,
                    set_gates,
                    self.present_head,
                    batch_size=self.batch_size,
                    top_k=self.top_k,
                    selection=held_back,
                    curvature=self.curvature,
                )

            held_back = make(selection, references[1], None) if selection is not None else None
            yield make(calibration, references[0], held_back)

    def full_head(self) -> Head:
        """The full model's output layer, wherever its weight lives at the moment."""
        spec = self.loaded.layout.head(self.loaded.model)
        for info in self.plan.linears:
            if info.role == "head":
                module: Any = info.module
                return Head(module.weight.detach(), module.bias, spec.softcap, spec.scale)
        return Head(spec.weight.detach(), spec.bias, spec.softcap, spec.scale)

    def prior(self) -> Tensor | None:
        """Scores from :meth:`measure_prior`, if it was called."""
        return self._prior

    def set_prior(self, prior: Tensor | None) -> None:
        """Keep scores for :meth:`prior`."""
        self._prior = prior

    # ------------------------------------------------------------- allocations

    def choice_of(self, allocation: Allocation) -> dict[str, int]:
        """Linear name -> width."""
        return {
            member.name: self.plan.widths[choice]
            for group, choice in zip(self.plan.groups, allocation, strict=True)
            for member in group.members
        }

    def weights_of(self, allocation: Allocation) -> dict[str, PackedWeight]:
        """The packed weight of every quantized linear; those left alone are missing."""
        packed = self.packed()
        return {
            name: packed[name][option_label(width)]
            for name, width in self.choice_of(allocation).items()
            if width != LEAVE_ALONE
        }

    @contextmanager
    def apply(self, allocation: Allocation) -> Iterator[LoadedModel]:
        """The model under an allocation, computing in the compute type."""
        with self.switchable() as gated, torch.no_grad():
            gates = allocation.one_hot(len(self.plan.widths))
            gated.set_gates(gates, self.rows)
            yield self.loaded
