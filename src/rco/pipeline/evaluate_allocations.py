"""Evaluation of allocations: KL to the full model and perplexity on the same evaluation text."""

from __future__ import annotations

from typing import Any

from rco.compression.compression import Compression
from rco.core.problem import Allocation, AllocationProblem
from rco.data.calibration import CalibrationSet
from rco.evaluation.divergence import measure_divergence, measure_divergence_and_perplexity
from rco.evaluation.perplexity import measure_perplexity
from rco.evaluation.reference_states import ReferenceStates
from rco.models.precision import computing_in

__all__ = ["AllocationEvaluator"]


class AllocationEvaluator:
    """Evaluates allocations of one compression; the full model's hidden states are computed once."""

    def __init__(self, compression: Compression, data: CalibrationSet, batch_size: int = 4) -> None:
        self._compression, self._data, self._batch_size = compression, data, batch_size
        self._reference: ReferenceStates | None = None
        self._measured: dict[Any, dict[str, Any]] = {}

    @property
    def reference(self) -> ReferenceStates:
        """Hidden states of the full model on the evaluation text."""
        if self._reference is None:
            with computing_in(self._compression.loaded.model, self._compression.compute_dtype):
                self._reference = ReferenceStates.compute(
                    self._compression.loaded, self._data, batch_size=self._batch_size
                )
        return self._reference

    def row(
        self,
        name: str,
        allocation: Allocation | None,
        problem: AllocationProblem,
        tuned: Compression | None = None,
    ) -> dict[str, Any]:
        """Row of the comparison; None is the full model. ``tuned`` has tuned weights for the allocation."""
        key = None if allocation is None else (tuple(allocation), tuned is not None)
        if key not in self._measured:  # several methods may find the same allocation
            self._measured[key] = self._measure(allocation, tuned or self._compression)
        return {
            "name": name,
            **self._compression.amounts(allocation),
            "within_budget": allocation is not None and problem.is_feasible(allocation),
            **self._measured[key],
        }

    def divergence(self, allocation: Allocation) -> float:
        """The KL to the full model alone."""
        known = self._measured.get((tuple(allocation), False))
        if known is not None:
            return float(known["kl"])
        return float(self._diverge(self._states(allocation, self._compression))["kl"])

    def _states(self, allocation: Allocation, compression: Compression) -> ReferenceStates:
        with compression.apply(allocation):
            return ReferenceStates.compute(self._compression.loaded, self._data, batch_size=self._batch_size)

    def _diverge(self, states: ReferenceStates) -> dict[str, Any]:
        return measure_divergence(states, self.reference, self._data, batch_size=self._batch_size)

    def _measure(self, allocation: Allocation | None, compression: Compression) -> dict[str, Any]:
        divergence: dict[str, Any] = {"kl": 0.0, "stderr": 0.0, "domains": {}}
        if allocation is None:
            perplexity = measure_perplexity(self.reference, self._data, batch_size=self._batch_size)
        else:
            divergence, perplexity = measure_divergence_and_perplexity(
                self._states(allocation, compression), self.reference, self._data, batch_size=self._batch_size
            )
        return {
            "kl": divergence["kl"],
            "kl_error": divergence["stderr"],
            "perplexity": perplexity["perplexity"],
            "perplexity_error": perplexity["stderr"],
            "by_domain": {
                domain: {
                    "kl": divergence["domains"].get(domain, {}).get("kl", 0.0),
                    "perplexity": measured["perplexity"],
                }
                for domain, measured in (perplexity.get("domains") or {}).items()
            },
        }
