"""Searchers from the settings of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rco import registry
from rco.compression.plan import CompressionPlan
from rco.core.problem import AllocationProblem
from rco.core.search import PRINTED
from rco.pipeline.configs import PLAIN, TAU, CompressConfig

__all__ = ["configured_searcher", "impq_pair", "make_searcher", "search_settings", "warm_start"]

_IMPQ_WIDTHS = (2, 4)  # as in its paper


def search_settings(config: CompressConfig, *, plain: bool | None = None) -> dict[str, Any]:
    """Settings for searchers.

    Args:
        config: Settings of the job.
        plain: Whether unset settings follow Algorithm 1 as printed; None: if the searcher is ``rco-plain``.
    """
    given = {
        "steps": config.steps,
        "samples": config.samples,
        "lr": config.lr,
        "antithetic": config.antithetic,
        "seed": config.seed,
        "tau": TAU,
        "refine": config.refine_passes,
    }
    if config.searcher == PLAIN if plain is None else plain:
        given |= PRINTED
    if config.tau is not None:
        given["tau"] = tuple(config.tau)
    if config.generations is not None:
        given["generations"] = config.generations
    return given


def make_searcher(method: str, settings: Mapping[str, Any]) -> Any:
    """Searcher of a method with those of the settings that it has."""
    cls = registry.load(registry.METHODS, method, "method")
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    return cls(**{name: value for name, value in settings.items() if name in known})


def configured_searcher(config: CompressConfig, own: Mapping[str, Any] | None = None) -> Any:
    """Searcher of a job; ``own`` are further settings, ignored by methods that do not have them.

    Raises:
        ValueError: The method is unknown, or a setting is invalid for it.
    """
    return make_searcher(config.searcher, {**search_settings(config), **(own or {})})


def impq_pair(plan: CompressionPlan, problem: AllocationProblem) -> tuple[int, int] | None:
    """The two widths of IMPQ's paper, if both have candidates and the budget lies between them; else None."""
    if not all(width in plan.widths for width in _IMPQ_WIDTHS):
        return None
    low, high = (plan.widths.index(width) for width in _IMPQ_WIDTHS)
    costs = problem.unit_costs[0]
    between = costs[:, low].sum() <= problem.unit_budgets[0] < costs[:, high].sum()
    return (low, high) if between and problem.allowed[:, [low, high]].all() else None


def warm_start(inputs: dict[str, Tensor], before: np.ndarray | None, strength: float) -> dict[str, Tensor]:
    """Inputs of a search whose prior favours an allocation found at another budget; unchanged if there is none."""
    if before is None or "prior" not in inputs:
        return inputs
    prior = inputs["prior"].clone()
    prior[torch.arange(len(before)), torch.from_numpy(before)] += strength
    return {**inputs, "prior": prior}
