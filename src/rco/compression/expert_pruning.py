"""Expert pruning: every expert of a mixture-of-experts model is kept or pruned, exactly as many as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rco.compression.base import Backend, Budget
from rco.compression.expert_objective import ExpertObjective
from rco.compression.expert_problem import KEEP, expert_names, expert_problem
from rco.compression.objective import LossKind, Reference
from rco.compression.recording import Recording
from rco.core.problem import Allocation, AllocationProblem
from rco.data.calibration import CalibrationSet
from rco.formats.expert_scores import ExpertScores, ScoreName, prior_logits
from rco.losses import Head
from rco.models.gating import checkpointed_blocks
from rco.models.loading import LoadedModel
from rco.models.moe.fisher import expert_sensitivity
from rco.models.moe.gates import ExpertGates, GateMode, expert_gates
from rco.models.moe.layers import MoELayer, moe_layers
from rco.models.moe.prune import split_keep
from rco.models.moe.scores import collect_expert_scores
from rco.models.precision import computing_in, default_compute_dtype

__all__ = ["SCORES", "ExpertPruningBackend", "PriorName", "PriorScale", "score_table"]

SCORES: tuple[ScoreName, ...] = ("reap", "frequency", "mass")
PriorName = Literal["fisher", "reap", "frequency", "mass", "none"]
PriorScale = Literal["rank", "global"]


def score_table(scores: Sequence[Tensor]) -> Tensor:
    """(N, 2) scores as a searcher takes them: what keeping an expert is worth, pruning being worth nothing."""
    kept = torch.cat([values.double() for values in scores])
    return torch.stack([torch.zeros_like(kept), kept], dim=1)


class ExpertPruningBackend(Backend):
    """Keep and prune gates on every expert of a model.

    Args:
        loaded: The full model in the type of its checkpoint.
        uniform: Keep the same number in every layer.
        min_per_layer: Fewest experts that a layer keeps, beside its router's top-k.
        locks: ``REGEX=keep`` or ``REGEX=prune`` over names of experts.
        mode: Forward pass that gradients see; candidates are always judged by the deployed one.
        prior: Score that the initial logits are made of; ``fisher`` takes gradients (see
            :mod:`rco.models.moe.fisher`), the others a forward pass.
        sensitivity: Sequences that ``fisher`` takes, a forward and a backward pass each.
        prior_scale: ``rank`` spreads the logits by rank within a layer; ``global`` by value, comparable across
            layers.
        prior_strength: Logit of a layer's best expert (``rank``), or factor on log ratios (``global``).
        compute_dtype: Type of the computation; None: float32 on a CPU, the checkpoint's elsewhere.
        loss: KL to the full model, or cross-entropy.
        top_k: Coarsen the KL to the k likeliest tokens of the reference; None: the full vocabulary.
        batch_size: Sequences per batch of the objective.
        checkpointing: Recompute activations in the backward pass, to save memory.
        on_progress: Called with (batches done, all batches) while experts are scored.
        graphs: Record samples of the search as CUDA graphs where that is possible.

    Raises:
        UnsupportedMoEError: The model has no experts, or its architecture is not known.
    """

    name: ClassVar[str] = "expert-pruning"

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        uniform: bool = False,
        min_per_layer: int = 0,
        locks: Sequence[str] = (),
        mode: GateMode = "deployed",
        prior: PriorName = "fisher",
        prior_scale: PriorScale = "global",
        prior_strength: float = 1.0,
        sensitivity: int = 28,
        compute_dtype: torch.dtype | None = None,
        loss: LossKind = "kl",
        top_k: int | None = None,
        batch_size: int = 1,
        checkpointing: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        graphs: bool = True,
    ) -> None:
        self.loaded = loaded
        self.layers: list[MoELayer] = moe_layers(loaded.model)
        self.counts = tuple(layer.num_experts for layer in self.layers)
        self.names = expert_names(self.layers)
        self.uniform, self.min_per_layer, self.locks = uniform, min_per_layer, tuple(locks)
        self.mode: GateMode = mode
        self.prior_name, self.prior_scale, self.prior_strength = prior, prior_scale, prior_strength
        self.sensitivity = sensitivity
        self.compute_dtype = compute_dtype or default_compute_dtype(loaded.device, loaded.dtype)
        self.loss_kind, self.top_k, self.batch_size = loss, top_k, batch_size
        self.checkpointing, self.on_progress = checkpointing, on_progress
        self.graphs = graphs
        self._scores: dict[str, list[Tensor]] | None = None

    @property
    def blocks(self) -> np.ndarray:
        """(N,) sparse layer of every expert, counted from 0."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def problem(self, budget: Budget) -> AllocationProblem:
        """Keep or prune; see :func:`rco.compression.expert_problem.expert_problem`."""
        return expert_problem(
            self.loaded.model,
            self.layers,
            budget,
            uniform=self.uniform,
            min_per_layer=self.min_per_layer,
            locks=self.locks,
        )

    # ------------------------------------------------------------------ scores

    def prepare(self, calibration: CalibrationSet) -> None:
        """Score every expert in one pass, unless scores are there."""
        if self._scores is None:
            self.score(calibration)

    def score(self, calibration: CalibrationSet) -> None:
        """Score every expert, also where scores of other text are there."""
        found = self.collect(calibration)
        self._scores = {name: found.score(name) for name in SCORES}
        if self.prior_name == "fisher":
            self._scores["fisher"] = self.sensitivities(calibration.select(slice(0, self.sensitivity)))

    def sensitivities(self, calibration: CalibrationSet, seed: int = 0) -> list[Tensor]:
        """Predicted KL per token of leaving out each expert alone, for every layer."""
        with self.gated() as gates:
            return expert_sensitivity(
                self.loaded, gates, self.full_head(), calibration.tokens, calibration.mask, seed=seed
            )

    def collect(self, calibration: CalibrationSet) -> ExpertScores:
        """The sums behind the scores, over the tokens whose predictions count."""
        total = -(-len(calibration) // self.batch_size)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for position, part in enumerate(calibration.batches(self.batch_size)):
                yield part.tokens, part.mask
                if self.on_progress is not None:
                    self.on_progress(position + 1, total)

        with computing_in(self.loaded.model, self.compute_dtype):
            return collect_expert_scores(self.loaded.model, batches())

    @property
    def scores(self) -> dict[str, list[Tensor]]:
        """Score name -> one tensor per layer."""
        if self._scores is None:
            raise ValueError("The experts have not been scored: call prepare() first.")
        return self._scores

    def set_scores(self, scores: dict[str, list[Any]]) -> None:
        """Use scores from an earlier pass."""
        checked = {
            name: [torch.as_tensor(layer, dtype=torch.float64) for layer in per_layer]
            for name, per_layer in scores.items()
        }
        for name, per_layer in checked.items():
            shapes = [tuple(layer.shape) for layer in per_layer]
            if shapes != [(count,) for count in self.counts]:
                raise ValueError(
                    f"The {name} scores have shapes {shapes}, but the layers have {list(self.counts)} experts; "
                    "they belong to another model."
                )
        self._scores = checked

    def prior(self) -> Tensor | None:
        """(N, 2) initial logits from the chosen score; None without one."""
        if self.prior_name == "none" or self.prior_strength == 0:
            return None
        return self.prior_from(self.prior_name)

    def beliefs(self) -> dict[str, Tensor | None]:
        """What a search is told: its initial logits, and losses that add up where sensitivities are the prior."""
        if self.prior_name != "fisher" or self.prior_strength == 0:
            return {"prior": self.prior()}
        removed = torch.cat(self.scores["fisher"]).double()
        return {"prior": self.prior(), "proxy": torch.stack([removed, torch.zeros_like(removed)], dim=1)}

    def prior_from(self, name: str) -> Tensor:
        """(N, 2) initial logits from one of the scores."""
        scores = self.scores[name]
        if self.prior_scale == "rank":
            keep = prior_logits(scores, self.prior_strength)
        elif name == "fisher":
            keep = sensitivity_logits(scores, self.prior_strength)
        else:
            keep = global_logits(scores, self.prior_strength)
        return torch.stack([torch.zeros_like(keep), keep], dim=1)

    def curvature(self) -> Tensor | None:
        """(N, 2, 2) second-order cost of letting an expert in or out, where sensitivities are known."""
        if self._scores is None or "fisher" not in self._scores:
            return None
        cost = torch.cat(self._scores["fisher"]).double()
        none = torch.zeros_like(cost)
        return torch.stack([none, cost, cost, none], dim=1).reshape(-1, 2, 2)

    # --------------------------------------------------------------- the model

    def full_head(self) -> Head:
        """The output layer, which pruning leaves alone."""
        spec = self.loaded.layout.head(self.loaded.model)
        return Head(spec.weight.detach(), spec.bias, spec.softcap, spec.scale)

    @contextmanager
    def gated(self) -> Iterator[ExpertGates]:
        """The model with gates on its experts, computing in the compute type."""
        with ExitStack() as stack:
            stack.enter_context(computing_in(self.loaded.model, self.compute_dtype))
            gates = stack.enter_context(expert_gates(self.loaded.model, "deployed"))
            if self.checkpointing:
                blocks = [block for _, block in self.loaded.layout.blocks(self.loaded.model)]
                stack.enter_context(checkpointed_blocks(blocks))
            yield gates

    def reference(self, calibration: CalibrationSet) -> Reference:
        """The full model's hidden states."""
        with computing_in(self.loaded.model, self.compute_dtype):
            return Reference.compute(self.loaded, calibration, self.batch_size)

    @contextmanager
    def objective(
        self, calibration: CalibrationSet, selection: CalibrationSet | None = None
    ) -> Iterator[ExpertObjective]:
        """KL to the full model as a function of the gates; the selection split sees the deployed model."""
        kl = self.loss_kind == "kl"
        references = [
            self.reference(data) if kl and data is not None else None for data in (calibration, selection)
        ]
        with self.gated() as gates:
            head = self.full_head()
            recordable = self.graphs and Recording.possible(self.loaded.model)

            def make(
                data: CalibrationSet,
                reference: Reference | None,
                mode: GateMode,
                held_back: ExpertObjective | None,
            ) -> ExpertObjective:
                def set_gates(given: Tensor, values: Tensor | None = None, recorded: bool = False) -> None:
                    gates.use_mode(mode)  # and read where they are, recorded or not
                    gates.set_gates(given[:, KEEP], None if values is None else values[:, KEEP])

                def check(values: Tensor) -> None:
                    if mode == "deployed":
                        gates.check_deployed(values[:, KEEP])

                return ExpertObjective(
                    self.loaded,
                    data,
                    reference,
                    head,
                    set_gates,
                    lambda: head,
                    batch_size=self.batch_size,
                    top_k=self.top_k,
                    selection=held_back,
                    group_blocks=self.blocks.tolist(),
                    curvature=None if held_back is None else self.curvature(),
                    room=gates.room,
                    check_recorded=check if recordable and data is calibration else None,
                )

            held_back = None
            if selection is not None:
                held_back = make(selection, references[1], "deployed", None)
            objective = make(calibration, references[0], self.mode, held_back)
            try:
                yield objective
            finally:
                objective.forget_recording()

    # ------------------------------------------------------------- allocations

    def keep_of(self, allocation: Allocation | Sequence[int]) -> Tensor:
        """(N,) booleans: which experts stay.

        Raises:
            ValueError: The allocation belongs to another model, or leaves a router too few experts.
        """
        keep = torch.from_numpy(np.asarray(allocation) == KEEP)
        split_keep(self.layers, keep)
        return keep

    def kept(self, allocation: Allocation | Sequence[int]) -> list[list[int]]:
        """For every sparse layer, the experts that stay."""
        parts = torch.split(self.keep_of(allocation), list(self.counts))
        return [part.nonzero().squeeze(-1).tolist() for part in parts]

    def amounts(self, allocation: Allocation | None) -> dict[str, float]:
        """How many experts stay."""
        return {"experts": len(self.names) if allocation is None else int(self.keep_of(allocation).sum())}

    def describe_cost(self, kind: str, units: float) -> str:
        """Experts that stay, or parameters or bytes of those that do."""
        return f"{units:.1f} experts kept" if kind == "experts" else super().describe_cost(kind, units)

    @contextmanager
    def apply(self, allocation: Allocation) -> Iterator[LoadedModel]:
        """The model as its pruned checkpoint computes, in the compute type."""
        keep = self.keep_of(allocation)
        with self.gated() as gates, torch.no_grad():
            gates.set_gates(keep.double())
            yield self.loaded


# Logits are cut at this many units either way, so that an expert that no token visits can still be brought back.
_FARTHEST = 4.0


def global_logits(scores: Sequence[Tensor], strength: float) -> Tensor:
    """(all experts,) keep logits: ``strength`` times the logarithm of a score relative to its layer's mean.

    Experts of different layers compare by how far above or below their layer's mean they are.
    """
    return torch.cat([_log_ratios(values, values.double().mean(), strength) for values in scores])


def sensitivity_logits(scores: Sequence[Tensor], strength: float) -> Tensor:
    """(all experts,) keep logits from sensitivities, which compare across layers as they are.

    ``strength`` times the logarithm relative to the median over the model.
    """
    values = torch.cat(list(scores))
    return _log_ratios(values, values.double().median(), strength)


def _log_ratios(values: Tensor, middle: Tensor, strength: float) -> Tensor:
    if not strength >= 0:
        raise ValueError(f"strength must not be negative, got {strength}")
    relative = values.double() / middle.clamp(min=torch.finfo(torch.float64).tiny)
    return relative.clamp(min=1e-12).log().clamp(-_FARTHEST, _FARTHEST) * strength
