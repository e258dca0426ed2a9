"""Mixed-precision quantization: one width per group of linears, under a budget of bits or bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rco.compression.base import Backend, Budget
from rco.compression.bit_costs import BitCosts, Count, Visits, routing_visits
from rco.compression.candidates import (
    CandidateSettings,
    blocks_of,
    build_candidates,
    candidate_identity,
    candidate_name,
)
from rco.compression.deployment import chosen_weights, deploy, written_names
from rco.compression.layer_errors import layer_errors
from rco.compression.objective import LanguageModelObjective, LossKind, Reference
from rco.compression.option_errors import recorded_errors, weight_distances, weight_errors
from rco.compression.plan import QuantizationPlan
from rco.compression.recording import Recording
from rco.compression.switched import SwitchedModel, switched_model
from rco.core.problem import Allocation, AllocationProblem, InfeasibleBudgetError
from rco.data.calibration import CalibrationSet
from rco.distributed import Ranks
from rco.formats.packing import PackedWeight
from rco.formats.streaming import OptionStream, pinned_together
from rco.losses import Head
from rco.models.gating import checkpointed_blocks, parked
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.linears import ExpertLinear, model_linears, stacked_parameters
from rco.models.precision import computing_in, default_compute_dtype
from rco.store import CandidateStore, StoreMismatchError

__all__ = ["QuantizationBackend", "Residency"]

Residency = Literal["resident", "offload"]


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
        count: Over which linears a budget of bits is averaged: all that are quantized, or experts alone.
        visits: How often experts are routed to, if that is known already.
        on_progress: Called with (linears done, all linears) while candidates are made.
        ranks: Who shares the work on candidates and sensitivities.
        graphs: Record samples of the search as CUDA graphs where that is possible.
        memory: ``resident`` keeps the packed candidates on the model's device, ``offload`` in host memory, from
            where they are streamed to a GPU.
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
        count: Count = "all",
        visits: Visits | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        ranks: Ranks | None = None,
        memory: Residency = "resident",
        graphs: bool = True,
    ) -> None:
        self.loaded, self.plan, self.store_folder = loaded, plan, store_folder
        self.settings = settings if settings is not None else CandidateSettings()
        self.storage_dtype = loaded.dtype
        self.compute_dtype = compute_dtype or default_compute_dtype(loaded.device, loaded.dtype)
        self.loss_kind, self.top_k, self.batch_size = loss, top_k, batch_size
        self.checkpointing = checkpointing
        self.overwrite_store = overwrite_store
        self.count: Count = count
        self.visits = visits
        self._costs: dict[str, BitCosts] = {}
        self.on_progress = on_progress
        self.ranks = ranks or Ranks()
        # On a CPU the candidates are where they are needed either way.
        self.memory: Residency = memory if loaded.device.type == "cuda" else "resident"
        self.graphs = graphs
        self.store: CandidateStore | None = None
        self._packed: Mapping[str, Mapping[str, PackedWeight]] | None = None
        self.curvature: Tensor | None = None
        self.keep_references = False  # for those who open the objective more than once on the same text
        self._references: dict[str, Reference] = {}

    # ---------------------------------------------------------------- problem

    def costs(self, kind: str) -> BitCosts:
        """What options count under a kind of budget."""
        if kind not in self._costs:
            model, count = self.loaded.model, self.count if kind != "size" else "all"
            linears = model_linears(self.loaded.layout, model, include_head=True) if kind == "size" else ()
            visits = self.visits if kind == "active_bits" else None
            self._costs[kind] = BitCosts(model, self.plan, kind, count, visits, linears)
        return self._costs[kind]

    def problem(self, budget: Budget) -> AllocationProblem:
        """Exact integer costs: bits for ``bits`` and ``bpw``, bytes of the checkpoint for ``size``."""
        if budget.kind == "size" and self.count != "all":
            raise ValueError(
                "`size` is that of the whole checkpoint: leave out `count='experts'`, which goes with bits."
            )
        counted = self.costs(budget.kind)
        allowed = np.array([[w in group.widths for w in self.plan.widths] for group in self.plan.groups])
        try:
            return AllocationProblem(
                counted.matrix,
                budget=counted.total(budget.amount),
                allowed=allowed,
                groups=[group.name for group in self.plan.groups],
                options=[str(width) for width in self.plan.widths],
                monotone=True,
            )
        except InfeasibleBudgetError as error:
            low, high = counted.range
            raise InfeasibleBudgetError(
                f"`{budget.kind}` must lie between {low} and {high} with these widths, locks and groups, got "
                f"{budget}."
            ) from error

    def budget_range(self, kind: str) -> tuple[str, str]:
        """The lowest and the highest budget of a kind, as a user would write them."""
        return self.costs(kind).range

    def describe_cost(self, kind: str, units: float) -> str:
        """Average bits, or bytes of the checkpoint."""
        return self.costs(kind).describe(units)

    def look_at_routing(self, calibration: CalibrationSet) -> None:
        """Count how often every expert is routed to; nothing for a model without experts."""
        if self.visits is None:
            self.visits = routing_visits(self.loaded, calibration, self.compute_dtype)

    # -------------------------------------------------------------- candidates

    def _identity(self, calibration: CalibrationSet) -> dict[str, object]:
        return candidate_identity(self.loaded, self.plan, calibration, self.settings, self.storage_dtype)

    def check_store(self, calibration: CalibrationSet) -> None:
        """Refuse a folder with candidates of another model, text or setting, unless they may be replaced."""
        if not self.overwrite_store:
            CandidateStore.check(self.store_folder, self._identity(calibration))

    def prepare(self, calibration: CalibrationSet) -> None:
        """Build the candidates that the store is missing."""
        identity = self._identity(calibration)
        self.ranks.require_same("model, data or settings", identity)
        store = self._shared_store(identity)
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
                    self.ranks,
                )
        finally:
            store.close()
        self.store = store

    def open_store(self, fingerprint: str | None = None) -> None:
        """Use candidates that are there, without the calibration text; with a fingerprint, only those.

        Raises:
            StoreError: There are none, they are not complete, or they are others.
        """
        store = CandidateStore.open(self.store_folder)
        store.verify()
        if fingerprint is not None and store.fingerprint != fingerprint:
            raise StoreMismatchError(
                f"{self.store_folder} holds other candidates than this run was made with: they have been replaced."
            )
        self.store = store

    def _shared_store(self, identity: dict[str, object]) -> CandidateStore:
        """Rank 0's store, which keeps the manifest; the other ranks join it."""
        if self.ranks.first:
            store = CandidateStore.create_or_resume(
                self.store_folder, identity, len(blocks_of(self.plan)), overwrite=self.overwrite_store
            )
            store.verify()  # what an earlier run has made
            self.ranks.broadcast(store.manifest)
            return store
        return CandidateStore.join(self.store_folder, self.ranks.broadcast({}))

    def regrouped(self, plan: QuantizationPlan) -> QuantizationBackend:
        """The same model and candidates, under other groups of the same linears."""
        if {info.name for info in plan.linears} != {info.name for info in self.plan.linears}:
            raise ValueError("The other plan has other linears: its candidates are not these.")
        if (plan.widths, plan.group_size, plan.symmetric) != (
            self.plan.widths, self.plan.group_size, self.plan.symmetric,
        ):  # fmt: skip
            raise ValueError("The other plan has other widths or another grid: its candidates are not these.")
        self.packed()  # loaded once, for both
        other = copy.copy(self)
        other.plan, other._costs, other.curvature = plan, {}, None
        return other

    def packed(self) -> Mapping[str, Mapping[str, PackedWeight]]:
        """Every candidate on its linear's device, or offloaded: linear -> width label -> packed weight."""
        if self._packed is None:
            store = self._built()
            places: dict[str, torch.device] = {}
            for info in self.plan.linears:
                home = info.weight.device if self.memory == "resident" else torch.device("cpu")
                places[candidate_name(info)] = home
            loaded = store.load_all(places)
            if self.memory == "offload":
                for members in self.plan.fetched_together:
                    names = dict.fromkeys(candidate_name(info) for info in members)
                    loaded |= pinned_together({name: loaded[name] for name in names})
            self._packed = loaded
        return self._packed

    def forget_candidates(self) -> None:
        """Free the memory of all candidates; they are read from the store again when they are needed."""
        self._packed = None

    def set_packed(self, packed: Mapping[str, Mapping[str, PackedWeight]]) -> None:
        """Use candidates from elsewhere than the store."""
        self._packed = packed

    def relative_errors(self) -> Tensor:
        """(N, K) relative output error of every option, summed over a group's members; 0 for the original."""
        return recorded_errors(self.plan, self._built(), "relative_error")

    def output_errors(self) -> Tensor:
        """(N, K) squared output error of every option, summed over tokens and a group's members."""
        return recorded_errors(self.plan, self._built(), "error")

    def option_errors(self) -> Tensor:
        """(N, K) squared error of every option's weights over the square of the full ones, in a group together."""
        return weight_errors(self.plan, self.packed(), self.loaded.device)

    def weight_distances(self) -> Tensor:
        """(N, K) mean squared difference of every option's weights to those of the group's widest option."""
        return weight_distances(self.plan, self.packed(), self.loaded.device)

    def _built(self) -> CandidateStore:
        if self.store is None:
            raise ValueError("The candidates have not been built: call prepare() first.")
        return self.store

    def layer_errors(self, calibration: CalibrationSet, *, experts_only: bool = True) -> Tensor:
        """(N, K) L2 norm of what a group's option does to the output of its layer, its members one at a time.

        Sensitivities of experts, shared ones among them, as MxMoE takes them, summed over a group's members. Groups
        outside experts have none, and with ``experts_only`` must be locked.
        """
        with computing_in(self.loaded.model, self.compute_dtype):
            return layer_errors(
                self.loaded.model,
                self.plan,
                self.packed(),
                ((part.tokens, part.mask) for part in calibration.batches(self.settings.batch_size)),
                experts_only=experts_only,
                stream=self._stream(),
            )

    # --------------------------------------------------------------- the model

    @property
    def rows(self) -> dict[str, int]:
        """Linear name -> row of the gates."""
        return {m.name: row for row, group in enumerate(self.plan.groups) for m in group.members}

    @contextmanager
    def switchable(self, *, original: bool = False, searching: bool = False) -> Iterator[SwitchedModel]:
        """The model with every planned linear and expert switchable, computing in the compute type.

        With ``original`` the gates have one more column, for the original weights. While ``searching``, a GPU has
        the original weights in host memory; moving them takes seconds, which a single evaluation is not worth.
        """
        with ExitStack() as stack:
            stack.enter_context(computing_in(self.loaded.model, self.compute_dtype))
            switched = stack.enter_context(
                switched_model(
                    self.loaded.model,
                    self.plan,
                    self.packed(),
                    original=original,
                    stream=self._stream(),
                )
            )
            if searching:
                stack.enter_context(self._without_originals())
            if self.checkpointing:
                blocks = [block for _, block in self.loaded.layout.blocks(self.loaded.model)]
                stack.enter_context(checkpointed_blocks(blocks))
            yield switched

    def _stream(self) -> OptionStream | None:
        return OptionStream(self.loaded.device) if self.memory == "offload" else None

    @contextmanager
    def _without_originals(self) -> Iterator[None]:
        """Inside a switched model on GPUs: original weights in host memory, as packed options alone are read."""
        if {parameter.device.type for parameter in self.loaded.model.parameters()} != {"cuda"}:
            yield
            return
        # What another module holds too (a tied embedding) stays, and so does the reference's output layer.
        held = {parameter.data_ptr() for parameter in self.loaded.model.parameters()}
        weights: dict[int, nn.Parameter] = {}
        for info in self.plan.packed_alone:
            if isinstance(info, ExpertLinear):
                weights |= {id(weight): weight for weight in stacked_parameters(info.layer)}
            elif info.role != "head" and info.weight.data_ptr() not in held:
                module: Any = info.module
                weights[id(module.weight)] = module.weight
        with parked(weights.values()):
            yield

    def present_head(self) -> Head:
        """The output layer under the present gates; inside :meth:`switchable` only."""
        spec = self.loaded.layout.head(self.loaded.model)
        return Head(spec.weight, spec.bias, spec.softcap, spec.scale)

    def reference(self, calibration: CalibrationSet) -> Reference:
        """The full model's hidden states."""
        known = self._references.get(calibration.fingerprint)
        if known is None:
            with computing_in(self.loaded.model, self.compute_dtype):
                known = Reference.compute(self.loaded, calibration, self.settings.batch_size)
            if self.keep_references:
                self._references[calibration.fingerprint] = known
        return known

    @contextmanager
    def objective(
        self, calibration: CalibrationSet, selection: CalibrationSet | None = None
    ) -> Iterator[LanguageModelObjective]:
        """KL to the full model as a function of the gates."""
        kl = self.loss_kind == "kl"
        references = [
            self.reference(data) if kl and data is not None else None for data in (calibration, selection)
        ]
        recordable = self.graphs and Recording.possible(self.loaded.model)  # before original weights leave it
        with ExitStack() as stack:
            switched = stack.enter_context(self.switchable(searching=True))
            # Read before any gate is set; its weight stays the full model's own.
            full = self.full_head()
            recordable = recordable and switched.recordable(self.compute_dtype)

            def make(
                data: CalibrationSet, reference: Reference | None, held_back: LanguageModelObjective | None
            ) -> LanguageModelObjective:
                return LanguageModelObjective(
                    self.loaded,
                    data,
                    reference,
                    full,
                    switched.set_gates,
                    self.present_head,
                    batch_size=self.batch_size,
                    top_k=self.top_k,
                    selection=held_back,
                    curvature=self.curvature,
                    errors=self,
                    room=switched.room,
                    disturb=switched.disturbed,
                    check_recorded=switched.check_gates if recordable and data is calibration else None,
                )

            held_back = make(selection, references[1], None) if selection is not None else None
            objective = make(calibration, references[0], held_back)
            stack.callback(objective.forget_recording)
            yield objective

    def full_head(self) -> Head:
        """The full model's output layer, wherever its weight lives at the moment."""
        spec = self.loaded.layout.head(self.loaded.model)
        for info in self.plan.linears:
            if info.role == "head":
                module: Any = info.module
                return Head(module.weight.detach(), module.bias, spec.softcap, spec.scale)
        return Head(spec.weight.detach(), spec.bias, spec.softcap, spec.scale)

    def prior(self) -> Tensor | None:
        """None: scores need text and a budget, see :mod:`rco.compression.sensitivity`."""
        return None

    # ------------------------------------------------------------- allocations

    def choice_of(self, allocation: Allocation) -> dict[str, int]:
        """Linear name -> width."""
        return {
            member.name: self.plan.widths[choice]
            for group, choice in zip(self.plan.groups, allocation, strict=True)
            for member in group.members
        }

    def amounts(self, allocation: Allocation | None) -> dict[str, float]:
        """The average width of the quantized linears."""
        if allocation is None:
            return {"bits": float(self.loaded.dtype.itemsize * 8)}
        return {"bits": float(self.average_width(allocation))}

    def weights_of(self, allocation: Allocation) -> dict[str, PackedWeight]:
        """The packed weight of every quantized linear; those left alone are missing."""
        return chosen_weights(self.plan, self.packed(), self.choice_of(allocation))

    def written_names(self, allocation: Allocation) -> dict[str, LinearInfo]:
        """The linears that are in the checkpoint, by their names there."""
        return written_names(self.plan, self.choice_of(allocation))

    def deployed(self, allocation: Allocation) -> tuple[LoadedModel, dict[str, PackedWeight]]:
        """What is exported: the model without its pruned experts, and the packed weights by their names there."""
        return deploy(self.loaded, self.plan, self.packed(), self.choice_of(allocation))

    def average_width(self, allocation: Allocation) -> Fraction:
        """Mean bits of the counted weights, as a budget of bits counts them; pruned ones count as 0 bits."""
        counted, choices = self.costs("bits"), self.choice_of(allocation)
        linears = [info for info in self.plan.linears if counted.counts_linear(info)]
        total = sum(counted.of(info, choices[info.name]) for info in linears)
        return Fraction(total, sum(info.parameters for info in linears))

    @contextmanager
    def apply(self, allocation: Allocation) -> Iterator[LoadedModel]:
        """The model under an allocation, computing in the compute type."""
        with self.switchable() as switched, torch.no_grad():
            switched.set_gates(allocation.one_hot(len(self.plan.widths)))
            yield self.loaded
