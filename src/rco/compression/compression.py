"""One compression: groups of weights, the options of each, and the model under any choice of them.

An option stores a group in a format, keeps it unchanged, or removes it (an expert). Quantization, expert pruning
and both together differ in the options alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rco.compression.assignment import assignment_problem
from rco.compression.budget import Budget
from rco.compression.candidates import (
    CandidateSettings,
    blocks_of,
    build_candidates,
    candidate_identity,
    candidate_name,
    importance_source,
    measure_importances,
    read_importances,
    replace_candidates,
    tuned_candidates,
)
from rco.compression.costs import Costs, Count, Visits, routing_visits
from rco.compression.cuda_graphs import Recording
from rco.compression.deployment import chosen_weights, deploy, written_names
from rco.compression.language_model_objective import LanguageModelObjective, LossKind, Reference
from rco.compression.llama_mixes import MIXES, is_mix, mix_bytes
from rco.compression.option_errors import layer_errors, recorded_errors, weight_distances, weight_errors
from rco.compression.plan import CompressionPlan
from rco.compression.priors import (
    logits_from_losses,
    logits_from_ranks,
    logits_from_scores,
    logits_from_sensitivities,
    logits_from_weights,
)
from rco.compression.second_budget import SecondBudget
from rco.compression.second_order import SecondOrder, diagonal_losses, fisher_difference, second_order
from rco.compression.switched_model import SwitchedModel, full_head, switched_model
from rco.core.problem import Allocation, AllocationProblem
from rco.data.calibration import CalibrationSet
from rco.distributed import Ranks
from rco.formats.base import Format, Stored
from rco.formats.removed import REMOVED
from rco.formats.streaming import OptionStream, pinned_together
from rco.losses import Head
from rco.models.embeddings import EMBEDDING_ROLE
from rco.models.imatrix_file import ImportanceMatrix
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.expert_removal import split_keep
from rco.models.moe.expert_scores import ExpertScores, ScoreName, collect_expert_scores
from rco.models.moe.expert_statistics import expert_sensitivity
from rco.models.moe.gates import GateMode
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import ExpertLinear, model_linears, stacked_parameters
from rco.models.precision import computing_in, default_compute_dtype
from rco.models.switchable_model import checkpointed_blocks, parked
from rco.requirements import require
from rco.store import CandidateStore, StoreMismatchError

__all__ = ["SCORES", "Compression", "PriorScale", "Residency", "Start"]

IMPORTANCE_FILE = "imatrix.gguf"
Residency = Literal["resident", "offload"]
PriorScale = Literal["rank", "global"]
Start = Literal["fisher", "output-error", "weight-error", "reap", "frequency", "mass", "uniform", "none"]
SCORES: tuple[ScoreName, ...] = ("reap", "frequency", "mass")
_MARGIN = 2.0


class Compression:
    """Groups and options of a model: their costs, candidates, sensitivities and loss, and the model under a choice.

    Args:
        loaded: The full model in the type of its checkpoint.
        plan: Groups and their options.
        store_folder: Folder of packed candidates; None if no option is packed.
        settings: Settings of candidates.
        compute_dtype: Type of the computation; None: float32 on a CPU, the checkpoint's elsewhere.
        loss: KL to the full model, or cross-entropy.
        top_k: Coarsen the KL to the k likeliest tokens of the reference; None: the full vocabulary.
        batch_size: Sequences per batch of the objective.
        checkpointing: Recompute activations in the backward pass, to save memory.
        graphs: Record samples of the search as CUDA graphs where that is possible.
        gates: Model of an expert's removal in gradients: ``deployed``, as in the checkpoint, or ``scale``, as in
            the paper's search. Candidate allocations are always compared as deployed.
        overwrite_store: Replace candidates of another identity instead of refusing.
        second: A further budget that must hold at the same time.
        count: Linears that a budget of bits is averaged over: all quantized ones, or experts alone.
        visits: Routing counts of experts, if already known.
        uniform: Keep the same number of experts in every layer; for plans that only keep or remove experts.
        min_per_layer: Fewest experts that a layer keeps, beside its router's top-k.
        on_progress: Called with (done, total) while candidates are made or experts are scored.
        ranks: Processes that share the work on candidates and sensitivities.
        memory: ``resident`` keeps the packed candidates on the model's device; ``offload`` keeps them in host
            memory and streams them to a GPU.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: CompressionPlan,
        store_folder: Path | None = None,
        *,
        settings: CandidateSettings | None = None,
        compute_dtype: torch.dtype | None = None,
        loss: LossKind = "kl",
        top_k: int | None = None,
        batch_size: int = 1,
        checkpointing: bool = False,
        graphs: bool = True,
        gates: GateMode = "deployed",
        overwrite_store: bool = False,
        count: Count = "all",
        second: SecondBudget | None = None,
        visits: Visits | None = None,
        uniform: bool = False,
        min_per_layer: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
        ranks: Ranks | None = None,
        memory: Residency = "resident",
    ) -> None:
        self.loaded, self.plan = loaded, plan
        self._store_folder = store_folder
        self.settings = settings if settings is not None else CandidateSettings()
        self.storage_dtype = loaded.dtype
        self.compute_dtype = compute_dtype or default_compute_dtype(loaded.device, loaded.dtype)
        self.loss_kind, self.top_k, self.batch_size = loss, top_k, batch_size
        self.checkpointing, self.graphs = checkpointing, graphs
        self.gates: GateMode = gates
        self.overwrite_store = overwrite_store
        self.count: Count = count
        self.visits, self.second = visits, second
        self.uniform, self.min_per_layer = uniform, min_per_layer
        self._costs: dict[str, Costs] = {}
        self.on_progress = on_progress
        self.ranks = ranks or Ranks()
        # On a CPU there is nothing to offload to.
        self.memory: Residency = memory if loaded.device.type == "cuda" else "resident"
        self.store: CandidateStore | None = None
        self._packed: Mapping[str, Mapping[str, Stored]] | None = None
        self._tuned: Mapping[str, Mapping[str, Stored]] = {}
        self._second_order: SecondOrder | None = None
        self._diagonal: Tensor | None = None
        self._scores: dict[str, list[Tensor]] | None = None
        self._keeps_references = False
        self._references: dict[str, Reference] = {}

    @property
    def kind(self) -> str:
        """Kind in runs and exports: ``quantization``, or ``expert-pruning`` without packed options."""
        return "expert-pruning" if self.plan.removes_only else "quantization"

    # ---------------------------------------------------------------- problem

    def costs(self, kind: str) -> Costs:
        """Costs of options under a kind of budget."""
        if kind not in self._costs:
            model, count = self.loaded.model, self.count if kind != "size" else "all"
            linears: Sequence[LinearInfo] = ()
            if kind == "size" and not self.plan.removes_only:
                linears = model_linears(self.loaded.layout, model, include_head=True, include_embedding=True)
            visits = self.visits if kind == "active_bits" else None
            self._costs[kind] = Costs(model, self.plan, kind, count, visits, linears)
        return self._costs[kind]

    def settled(self, budget: Budget) -> Budget:
        """The budget in bytes, where it names a mixture of llama.cpp.

        Raises:
            ValueError: The mixture is unknown, or not among the options.
        """
        if budget.mix is None:
            return budget
        if not is_mix(budget.mix):
            raise ValueError(
                f"`size={budget.mix!r}` names no mixture of llama.cpp; known are {', '.join(MIXES)} and pure-TYPE."
            )
        return Budget("size", Fraction(mix_bytes(self.plan, budget.mix)))

    def problem(self, budget: Budget) -> AllocationProblem:
        """Groups, options, exact integer costs, and the budget in the same units."""
        budget = self.settled(budget)
        if budget.kind == "size" and self.count != "all":
            raise ValueError(
                "`size` counts the whole checkpoint; leave out `count='experts'`, which applies to budgets of bits."
            )
        return assignment_problem(
            self.costs(budget.kind),
            budget,
            second=self.second,
            uniform=self.uniform,
            min_per_layer=self.min_per_layer,
        )

    def budget_range(self, kind: str) -> tuple[str, str]:
        """Lowest and highest feasible budget of a kind, as a user would write them."""
        return self.costs(kind).range

    def describe_cost(self, kind: str, units: float) -> str:
        """A cost of the problem in the user's units, e.g. ``2.5 bits``; ``kind`` is the budget's kind."""
        return self.costs(kind).describe(units)

    def count_visits(self, calibration: CalibrationSet) -> None:
        """Count the tokens routed to every expert; does nothing for a model without experts."""
        if self.visits is None:
            self.visits = routing_visits(self.loaded, calibration, self.compute_dtype)

    # -------------------------------------------------------------- candidates

    def _identity(self, calibration: CalibrationSet) -> dict[str, object]:
        return candidate_identity(self.loaded, self.plan, calibration, self.settings, self.storage_dtype)

    @property
    def store_folder(self) -> Path:
        """Folder of the packed candidates."""
        if self._store_folder is None:
            raise ValueError("Packed options need a folder for their candidates: pass `store_folder`.")
        return self._store_folder

    def check_store(self, calibration: CalibrationSet) -> None:
        """Raise if the folder holds candidates of another model, text or setting and may not be overwritten."""
        if not self.overwrite_store and not self.plan.removes_only:
            CandidateStore.check(self.store_folder, self._identity(calibration))

    def candidates(self, calibration: CalibrationSet) -> None:
        """Make the packed candidates that the store is missing; resumable. Does nothing if no option is packed."""
        if self.plan.removes_only:
            return
        identity = self._identity(calibration)
        self.ranks.require_same("model, data or settings", identity)
        store = self._shared_store(identity)
        try:
            with computing_in(self.loaded.model, self.compute_dtype), torch.no_grad():
                if store.missing_blocks and self.plan.target is not None:
                    require("libggml-python", "Encoding ggml types")
                importances = self._importances(calibration) if store.missing_blocks else None
                build_candidates(
                    self.loaded,
                    self.plan,
                    calibration,
                    store,
                    self.settings,
                    self.storage_dtype,
                    self.on_progress,
                    self.ranks,
                    importances,
                )
        finally:
            store.close()
        self.store = store

    def _importances(self, calibration: CalibrationSet) -> ImportanceMatrix | None:
        """The importance matrix: the given one, else one measured and kept beside the candidates."""
        if self.settings.method != "imatrix":
            return None
        if self.settings.imatrix is not None:
            return read_importances(self.settings.imatrix, self.plan)
        kept = self.store_folder / IMPORTANCE_FILE
        if kept.is_file():
            found = ImportanceMatrix.read(kept)
            if found.source == importance_source(self.loaded, calibration):
                return found
        measured = measure_importances(self.loaded, self.plan, calibration, self.settings)
        if self.ranks.first:
            measured.write(kept)
        return measured

    def open_store(self, fingerprint: str | None = None) -> None:
        """Use existing candidates, without the calibration text; a fingerprint, if given, must match.

        Raises:
            StoreError: Candidates are missing, incomplete or have another fingerprint.
        """
        store = CandidateStore.open(self.store_folder)
        store.verify()
        if fingerprint is not None and store.fingerprint != fingerprint:
            raise StoreMismatchError(
                f"{self.store_folder} no longer holds the candidates of this run: another run replaced them."
            )
        self.store = store

    def _shared_store(self, identity: dict[str, object]) -> CandidateStore:
        """The store: opened by rank 0, which keeps the manifest, and joined by the other ranks."""
        if self.ranks.first:
            store = CandidateStore.create_or_resume(
                self.store_folder, identity, len(blocks_of(self.plan)), overwrite=self.overwrite_store
            )
            store.verify()  # candidates of an earlier run
            self.ranks.broadcast(store.manifest)
            return store
        return CandidateStore.join(self.store_folder, self.ranks.broadcast({}))

    def regrouped(self, plan: CompressionPlan) -> Compression:
        """The same model and candidates, under other groups of the same linears."""
        if {info.name for info in plan.linears} != {info.name for info in self.plan.linears}:
            raise ValueError("The given plan has other linears, so it cannot use the same candidates.")
        if plan.options != self.plan.options:
            raise ValueError("The given plan has other options, so it cannot use the same candidates.")
        self.packed()  # loaded once, for both
        other = copy.copy(self)
        other.plan, other._costs, other._second_order, other._diagonal = plan, {}, None, None
        return other

    def packed(self) -> Mapping[str, Mapping[str, Stored]]:
        """Every candidate on its linear's device, or offloaded: linear -> width label -> packed weight."""
        if self._packed is None:
            if self.plan.removes_only:
                return {}
            store = self._built()
            places: dict[str, torch.device] = {}
            for info in self.plan.linears:
                home = info.weight.device if self.memory == "resident" else torch.device("cpu")
                places[candidate_name(info)] = home
            loaded = replace_candidates(store.load_all(places), self._tuned)
            if self.memory == "offload":
                for members in self.plan.fetched_together:
                    names = dict.fromkeys(candidate_name(info) for info in members)
                    loaded |= pinned_together({name: loaded[name] for name in names})
            self._packed = loaded
        return self._packed

    def tuned(self, allocation: Allocation, weights: Mapping[str, Stored]) -> Compression:
        """The same compression, with tuned candidates in place of those that an allocation takes.

        ``weights`` are by the names of :meth:`deployed`. Other allocations would mix tuned candidates with others,
        so only this allocation is meant to be applied, measured and exported.
        """
        choices, untuned = self.choice_of(allocation), self.packed()
        named = {
            info.name: weights[name]
            for name, info in self.written_names(allocation).items()
            if name in weights
        }
        other = copy.copy(self)
        other._tuned = tuned_candidates(self.plan, untuned, choices, named)
        other._packed = None
        if self.memory != "offload":  # the other candidates are shared
            other._packed = replace_candidates(untuned, other._tuned)
        return other

    def forget_candidates(self) -> None:
        """Free the memory of all candidates; they are reloaded from the store when needed."""
        self._packed = None

    def set_packed(self, packed: Mapping[str, Mapping[str, Stored]]) -> None:
        """Use candidates from elsewhere than the store."""
        self._packed = packed

    def relative_errors(self) -> Tensor:
        """(N, K) relative output error of every option, summed over a group's members; 0 for the original."""
        return recorded_errors(self.plan, self._built(), "relative_error")

    def output_errors(self) -> Tensor:
        """(N, K) squared output error of every option, summed over tokens and a group's members."""
        return recorded_errors(self.plan, self._built(), "error")

    def option_errors(self) -> Tensor:
        """(N, K) squared error of a group's weights under every option, relative to the squared full weights."""
        return weight_errors(self.plan, self.packed(), self.loaded.device)

    def weight_distances(self) -> Tensor:
        """(N, K) mean squared difference of every option's weights from those of the group's widest option."""
        return weight_distances(self.plan, self.packed(), self.loaded.device)

    def _built(self) -> CandidateStore:
        if self.store is None:
            raise ValueError("The candidates have not been built: call candidates() first.")
        return self.store

    def layer_errors(self, calibration: CalibrationSet, *, experts_only: bool = True) -> Tensor:
        """(N, K) L2 norm of the change in a layer's output by each option of a group, its members one at a time.

        Sensitivities of experts (shared ones included) as in MxMoE, summed over a group's members. Other groups
        have none, and with ``experts_only`` must be locked.
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

    # ----------------------------------------------------- sensitivities of options

    def differences(
        self,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """(S, N, K) first-order change of the sampled log-likelihood by every option, per sequence.

        See :mod:`rco.compression.second_order`; ranks share the sequences.
        """
        total = len(calibration)
        with self.switchable(original=True) as switched:

            def measure(mine: Sequence[int]) -> list[Tensor]:
                found = []
                for index in mine:
                    found.append(fisher_difference(self.loaded, switched, calibration, index, seed))
                    if on_progress is not None:
                        on_progress(index + 1, total)
                return found

            parts = self.ranks.map(measure, total)
        if on_progress is not None:
            on_progress(total, total)
        return torch.stack(parts)

    @property
    def has_diagonal_losses(self) -> bool:
        """Whether there are :meth:`diagonal_losses`: some option rounds inputs, and all groups are linears."""
        rounding = any(each.rounds_inputs for each in self.plan.options)
        linears = not any(
            isinstance(info, ExpertLinear) or info.role == EMBEDDING_ROLE for info in self.plan.linears
        )
        return rounding and linears

    @property
    def refinement_margin(self) -> float:
        """Standard errors by which a refined allocation must win, so that it does not fit noise."""
        return _MARGIN if self.has_diagonal_losses else 0.0

    def diagonal_losses(self, calibration: CalibrationSet, *, seed: int = 0) -> Tensor:
        """(N, K) predicted KL of every option, with rounded inputs, by squares of gradients at outputs.

        See :func:`rco.compression.second_order.diagonal_losses`.
        """
        with self.switchable(original=True) as switched:
            parts = [
                diagonal_losses(self.loaded, switched, calibration, index, seed)
                for index in range(len(calibration))
            ]
        return torch.stack(parts).mean(dim=0)

    def use_differences(
        self,
        differences: Tensor | None,
        layer_errors: Tensor | None = None,
        diagonal: Tensor | None = None,
    ) -> None:
        """Derive losses and curvature of all options from :meth:`differences`; None forgets them.

        ``layer_errors``, from :meth:`layer_errors`, steady the losses of experts; ``diagonal``, from
        :meth:`diagonal_losses`, those of options that round inputs.
        """
        self._diagonal = None if differences is None else diagonal
        self._second_order = (
            None
            if differences is None
            else second_order(self.plan, self.relative_errors(), differences, layer_errors, diagonal)
        )

    @property
    def losses(self) -> Tensor:
        """(N, K) predicted KL of every option with all else unchanged; assumed additive over groups."""
        if self.plan.removes_only:
            removed = torch.cat(self.scores["fisher"]).double()
            return torch.stack([removed, torch.zeros_like(removed)], dim=1)
        if self._second_order is None:
            raise ValueError("There are no sensitivities yet: call use_differences() first.")
        return self._second_order.losses

    @property
    def curvature(self) -> Tensor | None:
        """(N, K, K) second-order cost of moving a group from one option to another; None if unknown."""
        if self.plan.removes_only:
            if self._scores is None or "fisher" not in self._scores:
                return None
            cost = torch.cat(self._scores["fisher"]).double()
            none = torch.zeros_like(cost)
            return torch.stack([none, cost, cost, none], dim=1).reshape(-1, 2, 2)
        return None if self._second_order is None else self._second_order.curvature

    def search_inputs(
        self, problem: AllocationProblem, start: Start, strength: float, scale: PriorScale = "global"
    ) -> dict[str, Tensor]:
        """Keyword arguments of a search: ``prior``, its initial logits, and ``proxy``, additive losses, if known.

        Args:
            problem: Costs and budget.
            start: Source of the logits: ``fisher`` sensitivities, errors of outputs or weights, or a score of
                experts; ``uniform`` or ``none``: no prior.
            strength: Scale of the logits.
            scale: For scores: ``rank`` spreads logits by rank within a layer, ``global`` by value across layers.
        """
        if start in ("uniform", "none") or (self.plan.removes_only and strength == 0):
            return {}
        if self.plan.removes_only:
            known = {"prior": self.logits_of_scores(start, strength, scale)}
            return {**known, "proxy": self.losses} if start == "fisher" else known
        if start == "weight-error":
            return {"prior": logits_from_weights(self.weight_distances(), problem, strength)}
        losses = self.losses if start == "fisher" else self.relative_errors()
        diagonal = self._diagonal if start == "fisher" else None
        proxy = losses if diagonal is None else torch.stack([losses, diagonal])
        return {"prior": logits_from_losses(losses, problem, strength), "proxy": proxy}

    # ------------------------------------------------------------ scores of experts

    @property
    def layers(self) -> list[MoELayer]:
        """The sparse layers whose experts are in the plan."""
        return self.plan.sparse_layers

    @property
    def expert_counts(self) -> list[int]:
        """Number of experts of every sparse layer."""
        return [layer.num_experts for layer in self.layers]

    def score_experts(self, calibration: CalibrationSet, *, sensitivity: int = 0, seed: int = 0) -> None:
        """Score every expert in one pass; with ``sensitivity`` sequences, also by gradients (``fisher``)."""
        found = self.collect_scores(calibration)
        self._scores = {name: found.score(name) for name in SCORES}
        if sensitivity:
            self.sense_removal(calibration.select(slice(0, sensitivity)), seed)

    def collect_scores(self, calibration: CalibrationSet) -> ExpertScores:
        """The sums behind the scores, over the tokens whose predictions count."""
        total = -(-len(calibration) // self.batch_size)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for position, part in enumerate(calibration.batches(self.batch_size)):
                yield part.tokens, part.mask
                if self.on_progress is not None:
                    self.on_progress(position + 1, total)

        with computing_in(self.loaded.model, self.compute_dtype):
            return collect_expert_scores(self.loaded.model, batches())

    def sense_removal(self, calibration: CalibrationSet, seed: int = 0) -> list[Tensor]:
        """Predicted KL per token of leaving out each expert alone, by layer; kept as the score ``fisher``."""
        with self.switchable() as switched:
            found = expert_sensitivity(
                self.loaded,
                switched.expert_gates,
                switched.full_head,
                calibration.tokens,
                calibration.mask,
                seed=seed,
            )
        self.scores["fisher"] = found
        return found

    @property
    def scores(self) -> dict[str, list[Tensor]]:
        """Score name -> one tensor per layer."""
        if self._scores is None:
            raise ValueError("The experts have not been scored: call score_experts() first.")
        return self._scores

    def set_scores(self, scores: Mapping[str, Sequence[Any]]) -> None:
        """Use scores from an earlier pass."""
        checked = {
            name: [torch.as_tensor(layer, dtype=torch.float64) for layer in per_layer]
            for name, per_layer in scores.items()
        }
        for name, per_layer in checked.items():
            shapes = [tuple(layer.shape) for layer in per_layer]
            if shapes != [(count,) for count in self.expert_counts]:
                raise ValueError(
                    f"The {name} scores have shapes {shapes}, but the layers have {self.expert_counts} experts; "
                    "they belong to another model."
                )
        self._scores = checked

    def logits_of_scores(self, name: str, strength: float = 1.0, scale: PriorScale = "global") -> Tensor:
        """(N, 2) initial logits from one of the scores."""
        scores = self.scores[name]
        if scale == "rank":
            keep = logits_from_ranks(scores, strength)
        elif name == "fisher":
            keep = logits_from_sensitivities(scores, strength)
        else:
            keep = logits_from_scores(scores, strength)
        return torch.stack([torch.zeros_like(keep), keep], dim=1)

    # --------------------------------------------------------------- the model

    @property
    def rows(self) -> dict[str, int]:
        """Linear name -> row of the gates."""
        return {m.name: row for row, group in enumerate(self.plan.groups) for m in group.members}

    @contextmanager
    def switchable(self, *, original: bool = False, searching: bool = False) -> Iterator[SwitchedModel]:
        """The model with every planned linear and expert switchable, computing in the compute type.

        With ``original`` the gates have one more column, for the original weights. With ``searching`` on a GPU, the
        original weights move to host memory; that takes seconds, so it does not pay for a single evaluation.
        """
        with ExitStack() as stack:
            stack.enter_context(computing_in(self.loaded.model, self.compute_dtype))
            switched = stack.enter_context(
                switched_model(
                    self.loaded,
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
        """Keep unused original weights in host memory, inside a switched model on GPUs."""
        if {parameter.device.type for parameter in self.loaded.model.parameters()} != {"cuda"}:
            yield
            return
        # Weights shared with another module (a tied embedding) and the reference's output layer stay.
        held = {parameter.data_ptr() for parameter in self.loaded.model.parameters()}
        weights: dict[int, nn.Parameter] = {}
        for info in self.plan.packed_alone:
            if isinstance(info, ExpertLinear):
                weights |= {id(weight): weight for weight in stacked_parameters(info.layer)}
            elif info.role not in ("head", EMBEDDING_ROLE) and info.weight.data_ptr() not in held:
                module: Any = info.module
                weights[id(module.weight)] = module.weight
        with parked(weights.values()):
            yield

    def keep_references(self) -> None:
        """Keep hidden states from now on, for callers that open the objective more than once on the same text."""
        self._keeps_references = True

    def reference(self, calibration: CalibrationSet) -> Reference:
        """The full model's hidden states."""
        known = self._references.get(calibration.fingerprint)
        if known is None:
            with computing_in(self.loaded.model, self.compute_dtype):
                known = Reference.compute(self.loaded, calibration, self.settings.batch_size)
            if self._keeps_references:
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
        # Checked before original weights are moved.
        recordable = self.graphs and Recording.possible(self.loaded.model)
        with ExitStack() as stack:
            switched = stack.enter_context(self.switchable(searching=True))
            recordable = recordable and switched.recordable(self.compute_dtype)

            def make(
                data: CalibrationSet,
                reference: Reference | None,
                held_back: LanguageModelObjective | None,
                mode: GateMode,
            ) -> LanguageModelObjective:
                return LanguageModelObjective(
                    self.loaded,
                    data,
                    reference,
                    switched.full_head,
                    partial(switched.set_gates, mode=mode),
                    switched.present_head,
                    batch_size=self.batch_size,
                    top_k=self.top_k,
                    selection=held_back,
                    curvature=self.curvature,
                    errors=None if self.plan.removes_only else self,
                    probe_buffer=switched.probe_buffer,
                    disturb=switched.disturbed,
                    group_blocks=self._blocks(),
                    check_recorded=switched.check_gates if recordable and data is calibration else None,
                    scores=None if self.plan.removes_only else switched,
                )

            # Candidates are compared as deployed, however gradients model removal.
            held_back = None if selection is None else make(selection, references[1], None, "deployed")
            objective = make(calibration, references[0], held_back, self.gates)
            stack.callback(objective.forget_recording)
            yield objective

    def full_head(self) -> Head:
        """The output layer with its original weight; only valid outside of :meth:`switchable`."""
        return full_head(self.loaded, self.plan)

    def _blocks(self) -> list[int] | None:
        """Sparse layer, or else block, of every group; None if some group has neither."""
        blocks = self.plan.layer_of_group.tolist() if self.plan.removes_only else []
        blocks = blocks or [group.block for group in self.plan.groups]
        return None if None in blocks else blocks

    # ------------------------------------------------------------- allocations

    def choice_of(self, allocation: Allocation) -> dict[str, Format]:
        """Options by linear name."""
        return {
            member.name: self.plan.options[choice]
            for group, choice in zip(self.plan.groups, allocation, strict=True)
            for member in group.members
        }

    def amounts(self, allocation: Allocation | None) -> dict[str, float]:
        """Size of an allocation for tables: ``bits`` or ``experts``; None: the full model."""
        if self.plan.removes_only:
            kept = len(self.plan.groups) if allocation is None else int(self.keep_of(allocation).sum())
            return {"experts": kept}
        if allocation is None:
            return {"bits": float(self.loaded.dtype.itemsize * 8)}
        return {"bits": float(self.average_width(allocation))}

    def weights_of(self, allocation: Allocation) -> dict[str, Stored]:
        """The packed weight of every quantized linear."""
        return chosen_weights(self.plan, self.packed(), self.choice_of(allocation))

    def written_names(self, allocation: Allocation) -> dict[str, LinearInfo]:
        """The linears that are in the checkpoint, by their names there."""
        return written_names(self.plan, self.choice_of(allocation))

    def deployed(self, allocation: Allocation) -> tuple[LoadedModel, dict[str, Stored]]:
        """The export: the model without its pruned experts, and the packed weights by their names in it."""
        return deploy(self.loaded, self.plan, self.packed(), self.choice_of(allocation))

    def keep_of(self, allocation: Allocation | Sequence[int]) -> Tensor:
        """(experts,) booleans: True for experts that stay; for plans that only keep or remove experts.

        Raises:
            ValueError: The allocation belongs to another model, or leaves a router too few experts.
        """
        keep = torch.from_numpy(np.asarray(allocation) != self.plan.options.index(REMOVED))
        split_keep(self.layers, keep)
        return keep

    def kept(self, allocation: Allocation | Sequence[int]) -> list[list[int]]:
        """Experts that stay, for every sparse layer."""
        parts = torch.split(self.keep_of(allocation), self.expert_counts)
        return [part.nonzero().squeeze(-1).tolist() for part in parts]

    def average_width(self, allocation: Allocation) -> Fraction:
        """Mean bits of the counted weights, as a budget of bits counts them; pruned ones count as 0 bits."""
        counted, choices = self.costs("bits"), self.choice_of(allocation)
        linears = [info for info in self.plan.linears if counted.counts_linear(info)]
        total = sum(counted.of(info, choices[info.name]) for info in linears)
        return Fraction(total + counted.fixed, counted.parameters)

    @contextmanager
    def apply(self, allocation: Allocation) -> Iterator[LoadedModel]:
        """The model under an allocation, computing in the compute type."""
        if self.plan.removes_only:
            self.keep_of(allocation)  # raises for an allocation of another model
        with self.switchable() as switched, torch.no_grad():
            switched.set_gates(allocation.one_hot(len(self.plan.options)))
            yield self.loaded
