"""Masks of experts judged side by side, and the choices that plain scores would make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rco.backends.expert_pruning import ExpertPruningBackend, score_table
from rco.baselines.common import generator, knapsack
from rco.baselines.selection import share_budget
from rco.core.problem import Allocation, AllocationProblem
from rco.core.refine import spend
from rco.data.calibration import CalibrationSet
from rco.evaluation.divergence import measure_divergence
from rco.evaluation.perplexity import measure_perplexity
from rco.evaluation.states import ReferenceStates
from rco.models.precision import computing_in

__all__ = ["ExpertJudge", "pick_at_random", "pick_by_score"]


class ExpertJudge:
    """KL to the full model and perplexity of masks, always under the deployed routing."""

    def __init__(self, backend: ExpertPruningBackend, data: CalibrationSet, batch_size: int = 4) -> None:
        self._backend, self._data, self._batch_size = backend, data, batch_size
        self._reference: ReferenceStates | None = None

    @property
    def reference(self) -> ReferenceStates:
        """Hidden states of the full model on the evaluation text."""
        if self._reference is None:
            with computing_in(self._backend.loaded.model, self._backend.compute_dtype):
                self._reference = ReferenceStates.compute(
                    self._backend.loaded, self._data, batch_size=self._batch_size
                )
        return self._reference

    def row(self, name: str, allocation: Allocation | None, problem: AllocationProblem) -> dict[str, Any]:
        """One line of the comparison; None is the full model."""
        backend, reference = self._backend, self.reference
        states = reference
        divergence: dict[str, Any] = {"kl": 0.0, "stderr": 0.0, "domains": {}}
        kept = len(backend.names)
        if allocation is not None:
            with backend.apply(allocation):
                states = ReferenceStates.compute(backend.loaded, self._data, batch_size=self._batch_size)
            divergence = measure_divergence(states, reference, self._data, batch_size=self._batch_size)
            kept = int(backend.keep_of(allocation).sum())
        perplexity = measure_perplexity(states, self._data, batch_size=self._batch_size)
        domains = perplexity.get("domains") or {}
        return {
            "name": name,
            "experts": kept,
            "within_budget": allocation is not None and problem.is_feasible(allocation),
            "kl": divergence["kl"],
            "kl_error": divergence["stderr"],
            "perplexity": perplexity["perplexity"],
            "perplexity_error": perplexity["stderr"],
            "by_domain": {
                domain: {
                    "kl": divergence["domains"].get(domain, {}).get("kl", 0.0),
                    "perplexity": measured["perplexity"],
                }
                for domain, measured in domains.items()
            },
        }


def pick_by_score(
    problem: AllocationProblem, scores: Sequence[Tensor], blocks: np.ndarray, *, per_layer: bool
) -> Allocation:
    """The experts of the highest score: the same share of every layer, or over the whole model."""
    values = score_table(scores).numpy()
    rule = share_budget(problem, blocks) if per_layer else problem
    return problem.allocation(spend(rule, knapsack(values, rule), values))


def pick_at_random(problem: AllocationProblem, seed: int) -> Allocation:
    """A feasible choice drawn at random."""
    values = np.zeros((problem.num_groups, problem.num_options))
    values[:, 1] = generator(seed, 0).random(problem.num_groups)
    return problem.allocation(spend(problem, knapsack(values, problem), values))
